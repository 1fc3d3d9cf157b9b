"""Capture: a module and one sample micro-batch become one functional forward-backward graph.

The user's forward runs once, on fake tensors in place of its parameters and buffers, then autograd's
backward; a recorder records both. The user's tensors do not change. All unstable APIs of torch that the
engine needs are used in this file and in `recording/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from ..ir import Graph, Key
from .recording.capture_contexts import (
    interrupts_held,
    modes_left,
    module_paths,
    traced,
    without_torch_compile,
)
from .recording.current_capture import ENDED, Capture, active
from .recording.functional import as_graph
from .recording.graph_recorder import Recorder, check_dense, like
from .recording.leftovers import Attributes
from .recording.standins import StandIns, adoption
from .recording.torch_errors import explained
from .rewriting.mixed_types import MixedPrecision


@interrupts_held()
@modes_left()
def capture(
    module: nn.Module,
    forward: Callable[[list[Tensor]], Sequence[Tensor]],
    samples: Sequence[Tensor],
    *,
    training: bool,
    device: str = "cpu",
    given: str = "",
    needs_values: bool = True,
) -> Graph:
    """Trace `forward` and, in training, its backward, into one functional graph.

    Args:
        module:   its parameters and buffers become inputs of the graph, each once, by its canonical name
        forward:  called once with fake inputs: calls the module, returns a flat list of output tensors
        samples:  one micro-batch; only shapes, strides and dtypes are read
        training: append the backward of the model's one final loss, for parameters that require a gradient
        device:   where the model will run; if not "cpu", no operations are recorded that only CPUs have
        given:    a description of forward's arguments, for error messages
        needs_values: raise CaptureError for weights on the meta device

    Raises:
        CaptureError: torch fails in the forward; the forward reads a value out of a tensor, makes a shape that
            depends on data, rebinds or removes a buffer, or in training does not have exactly one final loss
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    # Only shapes are read, so the `__torch_function__` of tensor subclasses is off.
    with torch._C.DisableTorchFunctionSubclass(), fake:
        stand_ins = StandIns(module, training, needs_values)
        inputs = [like(sample) for sample in samples]
        scale = torch.empty(())
    state = Capture(training, stand_ins.members(), stand_ins.of_operand)
    recorder = state.recorder
    inputs_by_key = {str(i): value for i, value in enumerate(inputs)}
    roles = {"parameter": stand_ins.parameters, "buffer": stand_ins.buffers, "input": inputs_by_key}
    for role, values in roles.items():
        for key, value in values.items():
            recorder.placeholder(f"{role}_{key}".replace(".", "_"), value, role=role, key=key)
    attributes = Attributes(module)
    token = active.set(state)
    random = torch.get_rng_state()
    try:
        with (
            without_torch_compile(module),
            traced(training, device),
            fake,
            stand_ins.in_place(),
            recorder,
            explained(given),
        ):
            with (
                recorder.saved_before_writes(),
                adoption(stand_ins),
                module_paths(module, state),
                LossFinder(state),
                MixedPrecision(),
            ):
                outputs = list(forward(list(inputs)))
            gradients = _gradients(state, stand_ins, scale) if training else {}
    finally:
        active.reset(token)
        torch.set_rng_state(random)
        attributes.put_back(lambda value: recorder.has_met(value) or stand_ins.has_met(value))
    attributes.check(stand_ins.hooks)
    results: list[tuple[Key, str, fx.Node]] = [
        *(("output", str(i), recorder.node(value)) for i, value in enumerate(outputs)),
        *(("gradient", name, recorder.node(value)) for name, value in gradients.items()),
    ]
    graph = as_graph(recorder, results, tuple(state.visits), set(stand_ins.trained()))
    stand_ins.check_shared({result.key for result in graph.results if result.kind in ("gradient", "buffer")})
    return graph


def _gradients(state: Capture, stand_ins: StandIns, scale: Tensor) -> dict[str, Tensor]:
    """Record the backward of the model's one loss, and return the gradient of each parameter that gets one.

    Raises:
        CaptureError: no parameter gets a gradient, or a tensor that is no parameter does
    """
    recorder = state.recorder
    wanted = stand_ins.trained()
    loss = final_loss(state.losses, state.chosen, recorder)
    recorder.placeholder("loss_scale", scale, role="loss_scale", key="loss_scale")
    state.phase, state.block = "B", ENDED
    if (scale.dtype, scale.shape) != (loss.dtype, loss.shape):
        scale = scale.to(loss.dtype).reshape(loss.shape)
    orphans = [value for value, _ in stand_ins.orphans]
    leaves = [*wanted.values(), *orphans]
    made = (
        torch.autograd.grad(loss, leaves, scale, allow_unused=True) if loss.requires_grad and leaves else []
    )
    for (value, where), gradient in zip(stand_ins.orphans, made[len(wanted) :], strict=bool(made)):
        if gradient is not None:
            raise CaptureError(
                f"a tensor of shape {tuple(value.shape)} needs a gradient, but is no parameter of the model, and"
                " no update would change it\n"
                f"  forward uses it at {where}\n"
                "  fix: make it a parameter, `self.name = nn.Parameter(...)`, and keep parameters and layers in"
                " nn.ParameterList and nn.ModuleList, not in lists; compute in forward what depends on parameters;"
                " or say `.detach()`, if it is meant as a constant"
            )
    found = {name: value for name, value in zip(wanted, made, strict=False) if value is not None}
    for name, value in found.items():
        check_dense(value, f"the gradient of {name}")
    if not found:
        raise CaptureError(
            "the model would not train: no parameter gets a gradient\n"
            + (
                "  why: the loss depends on none of those that require one: forward leaves them out, or computes in"
                " torch.no_grad(), with `.detach()` or in integers\n"
                if wanted
                else "  why: all of them are frozen, by requires_grad_(False)\n"
            )
            + "  fix: let the loss depend on parameters that require a gradient; or wrap the model with"
            " poptorch.inferenceModel"
        )
    return found


# ---- losses ----------------------------------------------------------------------------------------------

_NAMES = """
    l1_loss mse_loss smooth_l1_loss huber_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss
    nll_loss cross_entropy binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss
    gaussian_nll_loss multilabel_soft_margin_loss multilabel_margin_loss multi_margin_loss
    cosine_embedding_loss triplet_margin_loss triplet_margin_with_distance_loss ctc_loss
"""
LOSSES = frozenset(getattr(functional, name) for name in _NAMES.split())


class LossFinder(TorchFunctionMode):
    """A function mode that notes the results of torch's loss functions as losses."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in LOSSES:
            self._capture.mark_loss(result)
        return result


def final_loss(
    losses: list[tuple[Tensor, str]], chosen: tuple[Tensor, str] | None, recorder: Recorder
) -> Tensor:
    """Return the chosen loss, else the one marked loss that no other marked loss is computed from.

    Raises:
        CaptureError: there is no loss, several independent ones, or the loss is no scalar
    """
    if chosen is not None:
        return _scalar(*chosen)
    if not losses:
        raise CaptureError(
            "Couldn't find a loss in graph!\n"
            "  why: training differentiates one loss, which forward must compute\n"
            "  fix: compute a torch.nn loss in forward, or mark your own scalar with"
            ' `poptorch.identity_loss(x, reduction="mean")`; or return your own scalar first, or as "loss"'
        )
    final = final_losses(losses, recorder)
    if len(final) > 1:
        places = "\n".join(f"  a loss at {where}" for _, where in final.values())
        raise CaptureError(
            f"Multiple independent losses found in graph\n{places}\n"
            '  fix: join them into one final loss: `poptorch.identity_loss(a + b, reduction="none")`, or return their'
            ' sum as "loss"'
        )
    return _scalar(*next(iter(final.values())))


def final_losses(losses: list[tuple[Tensor, str]], recorder: Recorder) -> dict[fx.Node, tuple[Tensor, str]]:
    """Return the losses that no other loss is computed from, by their nodes."""
    nodes = [recorder.node(value) for value, _ in losses]
    reached = sources_of([operand for node in nodes for operand in node.all_input_nodes])
    return {node: loss for node, loss in zip(nodes, losses, strict=True) if node not in reached}


def sources_of(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes, and all nodes that they are computed from, directly or indirectly."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _scalar(loss: Tensor, where: str) -> Tensor:
    if loss.numel() != 1:
        raise CaptureError(
            f"the loss at {where} has shape {tuple(loss.shape)}, and training needs a scalar\n"
            '  fix: give the loss reduction="mean" or "sum", or wrap it in'
            ' `poptorch.identity_loss(x, reduction="mean")`'
        )
    return loss
