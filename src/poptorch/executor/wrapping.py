"""How a model becomes an executor: `trainingModel`, `inferenceModel`, `load`; `describe` and `plan` run nothing."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from popengine.errors import Error

from ..logs import logger
from ..options import Options
from ..reporting.overview import Overview
from . import executable_file, marked_model
from .executor import PoplarExecutor
from .public_names import with_torch_modes

if TYPE_CHECKING:
    from popvision.plan import Estimates


@with_torch_modes
def trainingModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: Any = None,
    loss: str | int | None = None,
) -> PoplarExecutor:
    """Wrap a model whose forward computes a loss: calling it trains it.

    Args:
        optimizer: poptorch.optim's or torch.optim's; by default poptorch.optim.SGD with lr 0.01
        loss:      *ours*: the key, attribute or place of the loss in what forward returns, as `Options.loss` takes it
    Raises:
        RuntimeError: the model is wrapped for training already
    """
    model = _module_of(model)
    marked_model.check_not_wrapped(model)
    if loss is not None:
        given = Options() if options is None else options
        options = given.clone().loss(loss)
        given._freeze()
    return PoplarExecutor(model, options, training=True, optimizer=optimizer)


@with_torch_modes
def inferenceModel(
    model: nn.Module | PoplarExecutor | Callable[..., Any], options: Options | None = None
) -> PoplarExecutor:
    """Wrap a model, or a function of tensors: calling it runs its forward."""
    return PoplarExecutor(_module_of(model), options, training=False)


def _module_of(model: Any) -> Any:
    """Return what to wrap: an executor's model, or the module that torch.compile was given; else `model` itself."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        logger.warning(
            "torch.compile is left out: the module inside is wrapped, and compiled by its executor"
        )
        return model._orig_mod
    if isinstance(model, nn.Module) and any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise Error(
            "the model is, or has, a module of torch.jit\n"
            "  why: its forward is no Python, which is what is captured here\n"
            "  fix: wrap the module that torch.jit.script or trace was given"
        )
    return model._user_model if isinstance(model, PoplarExecutor) else model


@with_torch_modes
def load(filename: str, edit_opts_fn: Callable[[Options], Any] | None = None) -> PoplarExecutor:
    """Build an executor from a file that `save` or `compileAndExport` wrote, and restore its state.

    The file is a pickle: load only files that you trust.

    Args:
        edit_opts_fn: may change the options before they are used
    Raises:
        AssertionError: no such file, one of another version, or one without the model
    """
    saved = executable_file.read(filename)
    assert saved.model is not None, (
        f"{filename} holds no model (export_model=False)\n"
        "  fix: wrap the model as it was wrapped then, and call loadExecutable(filename)"
    )
    options = saved.options
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    executor = PoplarExecutor(saved.model, options, training=saved.training, optimizer=saved.optimizer)
    executor._restore(saved)
    return executor


@with_torch_modes
def describe(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    batch: Any = (),
    *,
    training: bool = True,
) -> Overview:
    """What would run: captures and cuts the model as its first call would, and loads nothing. (Not in PopTorch.)

    >>> print(poptorch.describe(model, options, (images, labels)))

    Args:
        model:    a module, or an executor (which trains or not)
        options:  by default those of the executor, if the model is wrapped already
        batch:    a combined batch, as for a call: one tensor, a tuple or list of arguments, or a dictionary of them
        training: for a module: compile what `trainingModel` would, else what `inferenceModel` would
    Raises:
        Error: the model can't be compiled for such a batch
    """
    with _executor_of(model, options, training) as (executor, own):
        return executor._described(*executor._run_for(own, *arguments_of(batch)))


@with_torch_modes
def plan(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    batch: Any = (),
    *,
    on: str | Sequence[str] = ("bow-pod16",),
    training: bool = True,
    replicas: Sequence[int] = (),
    accumulation: Sequence[int] = (),
) -> "Estimates":
    """Return how fast a model would be on these machines, and the memory it needs there. (Not in PopTorch.)

    >>> print(poptorch.plan(model, options, (images, labels), on=["bow-pod16", "this-machine"]))

    Args:
        model, options, batch, training: as for `describe`; the model's parameters may be on the meta device
        on:           names of machines, or paths of TOML files; "this-machine" is measured
        replicas:     plan with each of these numbers of replicas
        accumulation: plan with each of these gradient accumulations
    Raises:
        Error: the model can't be compiled for such a batch
        ValueError: a machine is not known
    """
    from popvision.machine import machines
    from popvision.plan import Estimates

    chosen = machines(on)
    kinds = list(dict.fromkeys(machine.kind for machine in chosen))
    with _executor_of(model, options, training) as (executor, own):
        found = executor._profiles(*executor._run_for(own, *arguments_of(batch)), kinds)
    return Estimates.of(found, chosen, replicas, accumulation)


def arguments_of(batch: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of a call: a tensor, a tuple or list, or a dictionary of them."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return batch if isinstance(batch, tuple | list) else (batch,), {}


@contextlib.contextmanager
def _executor_of(
    model: Any, options: Options | None, training: bool
) -> Iterator[tuple[PoplarExecutor, Options | None]]:
    """Yield the executor of a model, or one that is made for the body, and options in place of its own."""
    if not isinstance(model, PoplarExecutor):
        model = _module_of(model)
        owner = marked_model.owner_of(model) if training else None
        if owner is None:
            own = None if options is None else options.clone()
            made = PoplarExecutor(model, own, training=training)
            try:
                yield made, None
            finally:
                made._release()
            return
        model = owner
    yield model, options
