"""The whole state of a training, as one value that `popdist.Checkpoint` writes and restores."""

from dataclasses import fields
from typing import Any

import torch

from popengine.errors import Error

from .device_lease import KeptState
from .executor import PoplarExecutor

TrainingState = dict[str, Any]
_PLAIN = (int, float, bool, str, tuple, list, type(None))


def training_state(executor: PoplarExecutor) -> TrainingState:
    """Return copies of weights, each replica's buffers, optimizer state and rates, loss scale and random state.

    "weights" and "optimizer" are equal in all instances, except those of per-replica parameters. If the
    optimizer state is sharded ("shares_state"), "optimizer" is the shard of this instance.
    """
    lease, optimizer, kept = executor._lease, executor._optimizer, executor._lease.to_keep()
    names = dict(executor._wrapped.traced.named_buffers())
    with torch._C.DisableTorchFunctionSubclass():
        if lease.engine is not None:
            with lease.engine.state.still:
                values = {name: value.clone() for name, value in lease.engine.state.read().items()}
            buffers = lease.engine.state.read_buffers()
        else:
            values = {name: v.detach().clone() for name, v in executor._weights.on_host().items()}
            buffers = [{name: values[name] for name in names}]
    return {
        **vars(kept),
        "optimizer": kept.optimizer or {},
        "weights": {name: value for name, value in values.items() if name not in names},
        "buffers": buffers,
        "shares_state": lease.shares_state,
        "rates": [
            {n: value for n, value in group.items() if n != "params" and isinstance(value, _PLAIN)}
            for group in optimizer.param_groups
        ],
        "loss_scaling": getattr(optimizer, "loss_scaling", None),
    }


def set_training_state(executor: PoplarExecutor, state: TrainingState) -> None:
    """Continue from the `training_state` of the same model, uploaded now or when the executor is attached.

    Raises: Error, if the state is of another model
    """
    _check_fits(executor, state)
    attached = executor.isAttachedToDevice()
    if attached:
        executor.detachFromDevice()
    executor._weights.put_on_host({**state["buffers"][0], **state["weights"]})
    kept = {field.name: state[field.name] for field in fields(KeptState)}
    executor._lease.kept = KeptState(**kept)
    optimizer = executor._optimizer
    for group, rates in zip(optimizer.param_groups, state["rates"], strict=True):
        group.update(rates)
    if state["loss_scaling"] is not None:
        optimizer.loss_scaling = state["loss_scaling"]
    executor._optimizer_link.discard_loaded()
    executor.setOptimizer(optimizer)
    if attached:
        executor.attachToDevice()


def _check_fits(executor: PoplarExecutor, state: TrainingState) -> None:
    """Raise Error if the state has other weights or shapes, or another number of parameter groups."""
    with torch._C.DisableTorchFunctionSubclass():
        here = {name: list(value.shape) for name, value in executor._weights.on_host().items()}
    there = {name: list(value.shape) for name, value in {**state["buffers"][0], **state["weights"]}.items()}
    groups = [name for name in executor.per_replica_params if name in here]
    here, there = ({n: s for n, s in one.items() if n not in groups} for one in (here, there))
    other = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if other:
        shown = [
            f"{name} is {there.get(name, 'missing')} there, {here.get(name, 'missing')} here"
            for name in other
        ]
        raise Error(f"the checkpoint is of another model: {'; '.join(shown[:5])}")
    if len(state["rates"]) != len(executor._optimizer.param_groups):
        raise Error(
            f"the checkpoint's optimizer has {len(state['rates'])} groups, this one"
            f" {len(executor._optimizer.param_groups)}"
        )
