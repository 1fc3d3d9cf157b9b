"""The engine's own operations: a branch, a loop, a gather of the values of all replicas of a group, a strided copy,
torch's attention and recurrent layers as one operation for all kinds of devices.

A branch or loop runs bodies, graphs inside a graph, which are passed as text, since the operations of a graph take
tensors and plain values only. Gathering is a task of its own in a plan; outside a plan the operation returns `size`
copies of its value, as if all replicas had the same value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .piece import Line, Piece, Value


@dataclass(frozen=True)
class Body:
    """The body of a branch or loop: a function from tensors to tensors, and each output's shape and dtype."""

    piece: Piece
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    draws: bool  # whether it draws random numbers

    def as_text(self) -> str:
        """Return the body as Python text, from which `from_text` makes it again."""
        return repr(self)

    @staticmethod
    @functools.cache
    def from_text(text: str) -> Body:
        """Return the body of a text that `as_text` has returned; the same object for the same text."""
        return eval(text, dict(_NAMES))


_NAMES = {
    **{cls.__name__: cls for cls in (Body, Piece, Line, Value)},
    **{"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan},
}


LIBRARY = torch.library.Library("popengine", "DEF")
_BODIES = "str then_body, Tensor[] then_inputs, str else_body, Tensor[] else_inputs"
_COND = f"(Tensor condition, {_BODIES}) -> Tensor[]"
_LOOP = "(int count, str body, Tensor[] state, Tensor[] invariants) -> Tensor[]"


def _empty_outputs(body: str, device: torch.device) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in Body.from_text(body).outputs]


# Bodies that draw random numbers have a variant with the tag of random operations, so it is given a key.
for _suffix, _tags in (("", ()), ("_that_draws", (torch.Tag.nondeterministic_seeded,))):
    LIBRARY.define(f"cond{_suffix}{_COND}", tags=_tags)
    LIBRARY.define(f"loop{_suffix}{_LOOP}", tags=_tags)
    torch.library.register_fake(
        f"popengine::cond{_suffix}",
        lambda condition, body, *_: _empty_outputs(body, condition.device),
        lib=LIBRARY,
    )
    torch.library.register_fake(
        f"popengine::loop{_suffix}",
        lambda count, body, state, invariants: _empty_outputs(body, state[0].device),
        lib=LIBRARY,
    )


LIBRARY.define("gather_over_replicas(Tensor value, int size) -> Tensor")
# The composite implementation gives fake tensors their shape, too.
LIBRARY.impl(
    "gather_over_replicas",
    lambda value, size: value.unsqueeze(0).repeat(size, *[1] * value.dim()),
    "CompositeExplicitAutograd",
)


def gather_over_replicas(value: Tensor, size: int) -> Tensor:
    """Return the values of the group's replicas, stacked: [size, *value.shape], without a gradient."""
    return torch.ops.popengine.gather_over_replicas(value, size)


LIBRARY.define("with_strides(Tensor value, int[] strides) -> Tensor")
LIBRARY.impl(
    "with_strides",
    lambda value, strides: value.new_empty_strided(value.shape, strides).copy_(value),
    "CompositeExplicitAutograd",
)


def with_strides(value: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy of a tensor with other strides."""
    return torch.ops.popengine.with_strides(value, strides)


# ---- torch's functions with fused kernels --------------------------------------------------------------------

# Each is one operation for all kinds of devices. Its backward runs forward again, because what torch's kernels keep for
# it differs by kind of device.


def _run_attention(tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Tensor]:
    is_causal, scale, enable_gqa = numbers
    mask, factor = tensors[3] if len(tensors) > 3 else None, None if math.isnan(scale) else scale
    named: dict[str, Any] = {"scale": factor, "enable_gqa": bool(enable_gqa)}
    query, key, value = tensors[:3]
    return [functional.scaled_dot_product_attention(query, key, value, mask, 0.0, bool(is_causal), **named)]


def _run_recurrent(function: Any, tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Tensor]:
    states, has_biases, layers, is_bidirectional, batch_first = map(int, numbers)
    hidden = tensors[1 : 1 + states] if states > 1 else tensors[1]
    flags = bool(has_biases), layers, 0.0, torch.is_grad_enabled(), bool(is_bidirectional), bool(batch_first)
    return [*function(tensors[0], hidden, tensors[1 + states :], *flags)]


# In the order of cuDNN's numbers for them.
_RECURRENT = {"rnn_relu": torch.rnn_relu, "rnn_tanh": torch.rnn_tanh, "lstm": torch.lstm, "gru": torch.gru}
RECURRENT_CALLS = [f"popengine.{name}.default" for name in _RECURRENT]


def flatten_weights(call: str, weights: Sequence[Tensor], numbers: Sequence[float]) -> bool:
    """Put the weights of a recurrent layer into one block of memory, from which cuDNN reads them without a copy; return
    False if cuDNN does not run the layer."""
    aten = torch.ops.aten
    if not (aten._use_cudnn_rnn_flatten_weight() and torch.backends.cudnn.is_acceptable(weights[0])):
        return False
    mode = RECURRENT_CALLS.index(call)
    _, has_biases, layers, is_bidirectional, batch_first = map(int, numbers)
    (width, inputs), states = weights[0].shape, weights[1].shape[1]
    hidden = width // (1, 1, 4, 3)[mode]  # gates
    projected = states if states != hidden else 0
    count = 2 + 2 * has_biases + (projected > 0)  # of weights of a layer
    sizes = inputs, mode, hidden, projected, layers, bool(batch_first), bool(is_bidirectional)
    aten._cudnn_rnn_flatten_weight([*weights], count, *sizes)
    return True


_FUSED = {"attention": _run_attention} | {
    n: functools.partial(_run_recurrent, function) for n, function in _RECURRENT.items()
}


def _run_backward(
    function: Any, gradients: Sequence[Tensor], tensors: Sequence[Tensor], numbers: Sequence[float]
) -> list[Tensor]:
    """Return the gradients of the tensors; attention's mask has no gradient."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),  # the caller may capture the work of its thread
    ):
        # Weights stay in their memory.
        inputs = [(x.clone() if x.is_inference() else x).detach() for x in tensors]
        wanted = [x.requires_grad_() for x in (inputs[:3] if function is _run_attention else inputs)]
        return [*torch.autograd.grad(function(inputs, numbers), wanted, [*map(torch.clone, gradients)])]


def _empty_results(function: Any, tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Tensor]:
    if function is _run_attention:
        return [tensors[0].new_empty((*tensors[0].shape[:-1], tensors[2].shape[-1]))]
    states, is_bidirectional = int(numbers[0]), numbers[3]
    width = tensors[1].shape[-1] * (2 if is_bidirectional else 1)
    made = tensors[0].new_empty((*tensors[0].shape[:-1], width))
    return [made, *(tensor.new_empty(tensor.shape) for tensor in tensors[1 : 1 + states])]


def _empty_gradients(function: Any, gradients: Any, tensors: Sequence[Tensor], numbers: Any) -> list[Tensor]:
    wanted = tensors[:3] if function is _run_attention else tensors
    return [tensor.new_empty(tensor.shape) for tensor in wanted]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[0])
    ctx.numbers = inputs[1]


def _call_backward(name: str, context: Any, gradients: Sequence[Tensor]) -> tuple[Any, None]:
    tensors = [*context.saved_tensors]
    backward = getattr(torch.ops.popengine, f"{name}_backward")
    results = backward([*gradients], tensors, context.numbers)
    return [*results, *[None] * (len(tensors) - len(results))], None


for _name, _function in _FUSED.items():
    LIBRARY.define(f"{_name}(Tensor[] tensors, float[] numbers) -> Tensor[]")
    LIBRARY.define(f"{_name}_backward(Tensor[] gradients, Tensor[] tensors, float[] numbers) -> Tensor[]")
    for _kind in ("CPU", "CUDA", "XPU"):
        LIBRARY.impl(_name, _function, _kind)
        LIBRARY.impl(f"{_name}_backward", functools.partial(_run_backward, _function), _kind)
    _partial = functools.partial
    torch.library.register_fake(f"popengine::{_name}", _partial(_empty_results, _function), lib=LIBRARY)
    torch.library.register_fake(
        f"popengine::{_name}_backward", _partial(_empty_gradients, _function), lib=LIBRARY
    )
    _backward = _partial(_call_backward, _name)
    torch.library.register_autograd(f"popengine::{_name}", _backward, setup_context=_save_inputs, lib=LIBRARY)
FUSED_CALLS = tuple(f"popengine.{name}{end}.default" for name in _FUSED for end in ("", "_backward"))


class FusedFunctions(TorchFunctionMode):
    """A mode in which attention, recurrent layers and dropout are one operation each, for which a device runs torch's
    fused kernels. Layers with dropout inside, or a mask that is trained, are recorded as many operations."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, names = None, [name for name, layer in _RECURRENT.items() if layer is function]
        if function is functional.scaled_dot_product_attention:
            result = _record_attention(*args, **(kwargs or {}))
        elif names:
            result = _record_recurrent(names[0], *args)
        elif function is functional.dropout:
            result = _record_dropout(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {})) if result is None else result


def _record_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Call the operation `attention`, with the arguments of torch's function; return None if it can't be used."""
    mask = attn_mask
    is_trained = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    if dropout_p or is_trained or query.dim() != 4:
        return None
    tensors = [query, key, value, *([] if mask is None else [mask])]
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        tensors = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
    numbers = [float(is_causal), math.nan if scale is None else scale, float(enable_gqa)]
    return torch.ops.popengine.attention(tensors, numbers)[0]


def _record_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    """Return the result of `native_dropout` (its mask has one byte per element), or None: torch's dropout must run."""
    return torch.native_dropout(input, p, True)[0] if training and 0 < p < 1 and not inplace else None


def _record_recurrent(name: str, data: Tensor, hidden: Any, weights: Any, *arguments: Any) -> Any:
    """Call the operation of a recurrent layer, with the arguments of torch's function. Return None if it can't be used:
    for packed sequences, which have different arguments, with dropout between layers, and under autocast."""
    has_biases, layers, dropout, train, *flags = arguments
    if not isinstance(has_biases, bool) or (dropout and train) or torch.is_autocast_enabled("cpu"):
        return None
    states = [hidden] if isinstance(hidden, Tensor) else [*hidden]
    numbers = [float(number) for number in (len(states), has_biases, layers, *flags)]
    return tuple(getattr(torch.ops.popengine, name)([data, *states, *weights], numbers))
