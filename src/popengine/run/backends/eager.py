"""The eager backend: makes a piece callable by compiling its Python source.

Pieces are captured on the CPU, and their source names the CPU wherever it makes a tensor. `build` replaces
these operations for an accelerator. `cond` runs only the chosen body; `loop` runs its body `count` times.
"""

import functools
import math
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...errors import Error
from ...ir import Piece
from ...operations import LIBRARY, Body
from ...torch_private import LAYER_FUNCTIONS, TENSOR_FUNCTIONS, OpOverload, TorchDispatchMode, tree_leaves
from ..devices import CPU
from ..random_draws import draw

Code = Callable[[list[Any]], tuple[Tensor, ...]]

# Kernels that make the workspace of their backward only while gradients are enabled.
NEEDS_GRADIENTS_ON = ("aten.mkldnn_rnn_layer.default",)
# On accelerators kernels may return other strides than on the CPU, with which these views have to be copies.
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
# The number of operands that an operation needs contiguous on accelerators, and not on the CPU.
_CONTIGUOUS = {
    torch.ops.aten.native_group_norm.default: 1,
    torch.ops.aten.native_group_norm_backward.default: 2,
}


# ---- direct calls --------------------------------------------------------------------------------------------

# torch.ops.aten.view.default reaches the same kernel as Tensor.view, but its arguments are matched against the schema
# one by one: a training step of a small transformer layer takes 1.06 (width 64) to 1.2 times (width 16) as much CPU
# time with overloads. Here are the operations whose function chooses the same overload for every argument that a graph
# can hold; `test_direct_calls.py` checks the dispatched overloads.
_FUNCTIONS = """
    _log_softmax.default _softmax.default abs.default add.Tensor addmm.default amax.default
    bitwise_and.Tensor bitwise_not.default bmm.default cat.default clone.default convolution.default
    detach.default div.Tensor embedding.default eq.Scalar eq.Tensor erf.default exp.default ge.Scalar ge.Tensor
    gt.Scalar gt.Tensor le.Scalar le.Tensor log.default logical_and.default logical_not.default lt.Scalar
    lt.Tensor mm.default mul.Tensor native_batch_norm.default native_group_norm.default
    native_layer_norm.default ne.Scalar ne.Tensor neg.default pow.Tensor_Scalar reciprocal.default relu.default
    rsqrt.default select.int sigmoid.default sqrt.default squeeze.dim sub.Tensor sum.dim_IntList t.default
    tanh.default transpose.int unsqueeze.default where.self
"""
_METHODS = "expand.default permute.default view.default"
_LAYERS = "avg_pool2d.default gelu.default max_pool2d_with_indices.default silu.default"


DIRECT: dict[str, Callable[..., Any]] = {
    f"aten.{name}": getattr(home, name.partition(".")[0])
    for names, home in ((_FUNCTIONS, TENSOR_FUNCTIONS), (_METHODS, torch.Tensor), (_LAYERS, LAYER_FUNCTIONS))
    for name in names.split()
}


def operation_of(name: str) -> OpOverload:
    """Return the operation with a name, such as `torch.ops.aten.add.Tensor` for "aten.add.Tensor"."""
    namespace, packet, overload = name.rsplit("::", 1)[-1].split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def direct_function(operation: OpOverload) -> Callable[..., Any]:
    """Return an operation's function in `DIRECT`, which has less overhead, or else the operation's own."""
    function = DIRECT.get(str(operation))
    return operation._op if function is None else function


# ---- pieces --------------------------------------------------------------------------------------------------


def build(
    piece: Piece,
    # Returns what the source calls for an operation.
    call: Callable[[OpOverload], Callable[..., Any]] = direct_function,
    device: torch.device = CPU,
    after: str = "",  # a statement for the source, before the first operation and after each one: "; tick()"
    **variables: Any,  # further global variables of the source
) -> Code:
    """Return the function of a piece: it takes a list of inputs, empties this list, and returns the outputs."""
    names: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    names |= {"draw": draw if device.type == "cpu" else functools.partial(draw, on=device), **variables}
    for (name, is_drawn), written in piece.functions.items():
        operation = operation_of(name)
        function: Any = operation  # `draw` takes the operation itself
        if not is_drawn:
            function = _replacement_on_accelerator(operation, device) or call(operation)
        # In inference mode autograd records nothing, also where gradients are enabled.
        names[written] = torch.enable_grad()(function) if name in NEEDS_GRADIENTS_ON else function
    exec(compile(piece.source_with(after), f"<piece {piece}>", "exec"), names)
    return names["piece"]


def _replacement_on_accelerator(operation: OpOverload, device: torch.device) -> Callable[..., Any] | None:
    """Return the function that replaces an operation on an accelerator; None: the operation is called."""
    if device.type == "cpu":
        return None
    if operation in _VIEWS:
        return Tensor.reshape
    if operation in _CONTIGUOUS:
        count = _CONTIGUOUS[operation]
        return lambda *args: operation(*(value.contiguous() for value in args[:count]), *args[count:])
    if any(argument.name == "device" and argument.kwarg_only for argument in operation._schema.arguments):
        return lambda *args, **kwargs: operation(*args, **{**kwargs, "device": device, "pin_memory": None})
    return None


def user_line(piece: Piece, error: BaseException) -> str:
    """Return the user's line (file:line) of the operation that raised an error; "?" if it is not known."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == f"<piece {piece}>" and frame.lineno is not None:
            return piece.user_line(frame.lineno)
    return "?"


@functools.cache
def _body_function(body: str, device: torch.device) -> Code:
    """Return the function of a `Body` as text. Raises Error if the body gathers values over replicas."""
    piece = Body.from_text(body).piece
    if piece.gather_group_size:
        raise Error(
            "replicas can't gather values in a branch or a loop\n  fix: a layer that doesn't, or no poptorch.cond"
        )
    return build(piece, device=device)


def _run_body(body: str, values: list[Tensor], device: torch.device) -> list[Tensor]:
    """Run a `Body` given as text; return its results, made contiguous, as the graph around the body expects."""
    return [value.contiguous() for value in _body_function(body, device)(values)]


def _run_cond(
    condition: Tensor, then_body: str, then_inputs: list[Tensor], else_body: str, else_inputs: list[Tensor]
) -> list[Tensor]:
    """Run `then_body` if the condition is true, otherwise `else_body`; return the body's results."""
    body, inputs = (then_body, then_inputs) if bool(condition) else (else_body, else_inputs)
    return _run_body(body, list(inputs), condition.device)


def _run_loop(count: int, body: str, state: list[Tensor], invariants: list[Tensor]) -> list[Tensor]:
    """Run `state = body(state, others)` `count` times, and return the last state."""
    state = list(state)
    for _ in range(count):
        state = _run_body(body, [*state, *invariants], state[0].device)
    return state


for _suffix in ("", "_that_draws"):
    LIBRARY.impl(f"cond{_suffix}", _run_cond, "CompositeExplicitAutograd")
    LIBRARY.impl(f"loop{_suffix}", _run_loop, "CompositeExplicitAutograd")


# ---- floating point exceptions -------------------------------------------------------------------------------

# The results of these operations are uninitialized memory, in which NaN means nothing.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class FloatingPointException(ArithmeticError):
    """The error of `FiniteCheck`: an operation overflows, divides by zero, or makes or compares a NaN."""


class FiniteCheck(TorchDispatchMode):
    """A dispatch mode that raises FloatingPointException if an operation makes an infinity from finite inputs (unless
    an argument is infinite, as in a mask), makes a NaN from inputs without NaN, or compares a NaN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        taken, made = tree_leaves((args, kwargs)), tree_leaves(out)
        inputs, outputs = _floating_point_tensors(taken), _floating_point_tensors(made)
        if not inputs or func.overloadpacket.__name__ in _ALLOCATIONS:
            return out
        if any(bool(value.isnan().any()) for value in inputs):
            if made and all(isinstance(value, Tensor) and value.dtype == torch.bool for value in made):
                raise FloatingPointException(f"{func} compares a NaN")
        elif any(bool(value.isnan().any()) for value in outputs):
            raise FloatingPointException(f"{func} makes a NaN")
        is_written = any(isinstance(value, float) and math.isinf(value) for value in taken)
        overflows = any(bool(value.isinf().any()) for value in outputs) and not is_written
        if overflows and all(bool(value.isfinite().all()) for value in inputs):
            raise FloatingPointException(f"{func} makes an infinity: it overflows or divides by zero")
        return out


def _floating_point_tensors(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
