"""Custom operations: a name in the model, an implementation in Python.

A library of C++ operators for IPUs has nothing to run here, so the name is looked up among the operations that were
registered with `registerCustomOp`, then in `known_operations`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import current
from popengine.errors import Error

from .host import as_list, host_call, written_back
from .known_operations import KNOWN, computed_here

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class _Implementation:
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    writes: tuple[int, ...]


_registered: dict[tuple[str, str, int], _Implementation] = {}


def registerCustomOp(
    name: str,
    domain: str,
    version: int,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    writes: Sequence[int] = (),
) -> None:
    """Set what `custom_op(..., name, domain, version, ...)` computes.

    Both functions run on the host, on CPU tensors, each time the graph runs.

    Args:
        forward:  `forward(*inputs, **attributes)` returns a tensor or several
        backward: `backward(gradients, inputs, **attributes)` returns a gradient, or None, for each input;
            by default forward is differentiated by autograd
        writes:   the positions of the inputs that forward changes in place: a buffer's new value is kept. A write
            into another input is an error when the graph runs
    """
    _registered[name, domain, version] = _Implementation(forward, backward, tuple(writes))


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[Tensor]:
    """Run a custom operation: a registered one, or one of those that public programs load (`known_operations`).

    Args:
        example_outputs: tensors of the shapes and types that it returns
        attributes: floats, integers, strings, or lists of one of them; given to the implementation by name
    Raises:
        Error: nothing is known under this name, and the model is being compiled
    """
    attributes = {} if attributes is None else attributes
    _check(attributes)
    found = _registered.get((name, domain, domain_version))
    if found is None and name in KNOWN:
        return computed_here(name, inputs, attributes, example_outputs)
    if current() is None:
        if found is None:
            return [torch.zeros_like(example) for example in example_outputs]
        return as_list(found.forward(*inputs, **attributes))
    if found is None:
        known = ", ".join(f"{d}.{n} {v}" for n, d, v in sorted(_registered)) or "none"
        raise Error(
            f"the custom operation {domain}.{name}, version {domain_version}, has no implementation here\n"
            f"  why: operators compiled for IPUs can't run on this hardware; registered are: {known}\n"
            f"  fix: poptorch.registerCustomOp({name!r}, {domain!r}, {domain_version}, forward), where forward"
            " computes the outputs with torch"
        )
    wrong = [position for position in found.writes if not 0 <= position < len(inputs)]
    if wrong:
        raise Error(
            f"the custom operation {domain}.{name} writes input {wrong[0]}, and has {len(inputs)} inputs"
        )
    like = [(tuple(example.shape), example.dtype) for example in example_outputs]
    made = _HostFunction.apply(f"{domain}.{name}", found, attributes, like, *inputs)
    return written_back(inputs, found.writes, list(made))


class _HostFunction(torch.autograd.Function):
    """A host call in forward, and one in backward."""

    @staticmethod
    def forward(
        ctx: Any, name: str, op: _Implementation, attributes: dict[str, Any], like: Any, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.name, ctx.op, ctx.attributes = name, op, attributes
        # Backward reads the inputs as they were before forward wrote to them.
        ctx.save_for_backward(*(v.clone() if i in op.writes else v for i, v in enumerate(inputs)))
        examples = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in like]

        def run(*given: Tensor) -> list[Tensor]:
            return as_list(op.forward(*given, **attributes))

        fix = "or say which inputs it writes: poptorch.registerCustomOp(..., writes=[...])"
        made = host_call(f"the custom operation {name}", run, inputs, examples, op.writes, fix=fix)
        ctx.mark_non_differentiable(*made[len(examples) :])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = ctx.saved_tensors
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        op, attributes = ctx.op, ctx.attributes
        count = len(gradients) - len(op.writes)
        gradients = gradients[:count]

        def run(*given: Tensor) -> list[Tensor]:
            sums, values = list(given[:count]), list(given[count:])
            if op.backward is None:
                return _differentiated(op.forward, attributes, sums, values, wanted)
            made = as_list(op.backward(sums, values, **attributes))
            return [torch.zeros_like(values[i]) if made[i] is None else made[i] for i in wanted]

        like = [inputs[i] for i in wanted]
        name = f"the backward of the custom operation {ctx.name}"
        # A backward may change its gradients; and autograd, which runs forward again, may change the inputs, too.
        scratch = range(count if op.backward is not None else count + len(inputs))
        fix = "inputs that forward writes can't be written by backward"
        made = dict(
            zip(wanted, host_call(name, run, [*gradients, *inputs], like, (), scratch, fix), strict=True)
        )
        return (None, None, None, None, *(made.get(i) for i in range(len(inputs))))


def _differentiated(
    forward: Callable[..., Any],
    attributes: dict[str, Any],
    gradients: list[Tensor],
    inputs: list[Tensor],
    wanted: list[int],
) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [value.requires_grad_(i in wanted) for i, value in enumerate(inputs)]
        pairs = [
            (output, gradient)
            for output, gradient in zip(as_list(forward(*leaves, **attributes)), gradients, strict=True)
            if output.requires_grad
        ]
        outputs, passed = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return list(
            torch.autograd.grad(
                outputs, [leaves[i] for i in wanted], passed, allow_unused=True, materialize_grads=True
            )
        )


def _check(attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"attribute names must be strings; found {key!r}")
        _check_ascii(key)
        items = value if isinstance(value, (list, tuple)) else [value]
        wrong = next((item for item in items if not isinstance(item, (float, int, str))), None)
        if wrong is not None:
            raise ValueError(
                f"attribute {key!r} must be a float, an int, a string, or a list of them; found"
                f" {type(wrong).__name__}"
            )
        if len({type(item) for item in items}) > 1:
            raise ValueError(f"the values of attribute {key!r} must all be the same type; found {value!r}")
        for item in items:
            if isinstance(item, str):
                _check_ascii(item)
            elif isinstance(item, float) and abs(item) > _LARGEST and abs(item) != float("inf"):
                raise Error(
                    f"{item} is too {'high' if item > 0 else 'low'} for a float attribute ({key!r}): 32 bits hold"
                    f" ±{_LARGEST:.3e}"
                )


def _check_ascii(text: str) -> None:
    if not text.isascii():
        raise ValueError(f"{text} contains non-ASCII characters.")
