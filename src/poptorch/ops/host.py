"""Python functions that a compiled graph calls on the host: `poptorch.CPU` and custom operations.

A function can't be saved in a graph, so the graph contains a handle, the number of a HostCall in this
process. C++ operators for IPUs can't run here, so `custom_op` runs an implementation of the same name in
Python, which was registered by `registerCustomOp`.
"""

import itertools
import json
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from popengine.compile.recording.current_capture import current, hidden_from_capture
from popengine.errors import Error
from popengine.run.train_state import has_same_bits

from ..checks import checked
from .library import (
    check_tensors,
    raise_in_training,
    register_computed,
    register_shorthand,
    shapes_and_dtypes_of,
    shapes_text,
)


@dataclass(frozen=True)
class HostFunction:
    """A function that runs on the host each time a graph runs. Without `backward`, autograd differentiates it."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None  # backward(gradients, inputs)

    def __call__(self, inputs: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Record a call in the captured graph; return its outputs, of the shapes and dtypes of `like`."""
        return list(_HostAutogradFunction.apply(self, like, *inputs))


@dataclass(frozen=True)
class HostCall:
    """A call of a function's forward on the host in a compiled graph, and what the call is checked for."""

    function: HostFunction
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shapes and dtypes
    scratch: int  # the number of first inputs that the function may change
    weights: tuple[tuple[str, weakref.ref[Tensor]], ...]  # of the model, which it must not change

    def __str__(self) -> str:
        forward = self.function.forward
        return f"{self.function.name} {getattr(forward, '__code__', forward)}"


# By handle; a call lives as long as the graph that contains the handle.
_host_calls: weakref.WeakValueDictionary[int, HostCall] = weakref.WeakValueDictionary()
_handles = itertools.count(2**40)  # no other number of a graph, see `graph_lines`


def _record_host_call(
    function: HostFunction, inputs: Sequence[Tensor], like: Sequence[Tensor], scratch: int = 0
) -> list[Tensor]:
    """Record an operation that calls the function in each run of the captured graph; return its outputs."""
    check_tensors(f"{function.name} must return a tensor, or a list or tuple of tensors", *like)
    capture = current()
    assert capture is not None
    weights = tuple((member.name, weakref.ref(member.real)) for member in capture.stand_ins.members)
    handle = next(_handles)
    _host_calls[handle] = call = HostCall(function, shapes_and_dtypes_of(like), scratch, weights)
    capture.held.append((handle, call))
    return list(torch.ops.poptorch.host_call(list(inputs), handle))


def _call_on_host(inputs: list[Tensor], handle: int) -> list[Tensor]:
    """Call a HostCall's function with copies of the inputs in the host's memory, and return its outputs.

    Raises: Error, if the function changes an input or weight, or returns other shapes than at compilation
    """
    call = _host_calls[handle]
    function, name = call.function, call.function.name
    device = inputs[0].device if inputs else torch.device("cpu")
    # Copies, and no inference tensors: the function may keep its inputs or convert them to numpy.
    with torch.inference_mode(False), torch.no_grad():
        given = [value.to("cpu", copy=True) for value in inputs]
        weights = _version_counters(call)
        made = [value.to(device) for value in as_list(function.forward(*given))]
        if changed := [name for name, version in _version_counters(call).items() if version != weights[name]]:
            raise Error(
                f"{name} changes {', '.join(changed)} of the model in the middle of a step\n"
                "  why: other stages may have read the weight before, so this write comes too late for them\n"
                "  fix: return the new value, and copy it into the weight in forward: `weight.copy_(returned)`"
            )
        for i in range(call.scratch, len(inputs)):
            if not has_same_bits(given[i], inputs[i].cpu()):
                raise Error(
                    f"{name} changes its input {i} in place, and the change would be lost\n"
                    "  why: the graph gives a function on the host copies of its tensors\n"
                    f"  fix: work on a copy, `inputs[{i}].clone()`, or return the new value, and copy it in forward"
                )
    if shapes_and_dtypes_of(made) != call.outputs:
        raise Error(
            f"{name} returned {shapes_text(shapes_and_dtypes_of(made))}; the graph was compiled for"
            f" {shapes_text(call.outputs)}\n"
            "  fix: return the same shapes and types at every call"
        )
    return [value.contiguous() for value in made]


def _version_counters(call: HostCall) -> dict[str, int]:
    """Return the version counter of each weight of the model on the host, by name; a write increments it."""
    return {name: value._version for name, link in call.weights if (value := link()) is not None}


def _fake_outputs(inputs: list[Tensor], handle: int) -> list[Tensor]:
    device, outputs = inputs[0].device if inputs else "cpu", _host_calls[handle].outputs
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs]


register_computed("host_call", _call_on_host, _fake_outputs)


class _HostAutogradFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: HostFunction, like: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        ctx.save_for_backward(*inputs)
        return tuple(_record_host_call(op, inputs, like))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, op, count = ctx.saved_tensors, ctx.op, len(gradients)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]

        def compute_gradients(*given: Tensor) -> list[Tensor]:
            sums, values = list(given[:count]), list(given[count:])
            if op.backward is None:
                return _autograd_gradients(op.forward, sums, values, wanted)
            made = as_list(op.backward(sums, values))
            return [torch.zeros_like(values[i]) if made[i] is None else made[i] for i in wanted]

        function = HostFunction(f"the backward of {op.name}", compute_gradients)
        made = _record_host_call(function, [*gradients, *inputs], [inputs[i] for i in wanted], scratch=count)
        by_index = dict(zip(wanted, made, strict=True))
        return (None, None, *(by_index.get(i) for i in range(len(inputs))))


def _autograd_gradients(
    forward: Callable[..., Any], gradients: list[Tensor], inputs: list[Tensor], wanted: list[int]
) -> list[Tensor]:
    """Return the gradients of the inputs with indices `wanted`, by running `forward` again under autograd."""
    with torch.enable_grad():
        leaves = [value.requires_grad_(i in wanted) for i, value in enumerate(inputs)]
        pairs = zip(as_list(forward(*leaves)), gradients, strict=True)
        pairs = [(output, gradient) for output, gradient in pairs if output.requires_grad]
        outputs, sums = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        sources = [leaves[i] for i in wanted]
        return list(torch.autograd.grad(outputs, sources, sums, allow_unused=True, materialize_grads=True))


class CPU:
    """A function or layer that runs on the host each time the graph runs. In inference only.

        self.log = poptorch.CPU(self.count_zeros, "count")

    The function returns a tensor, or a list or tuple of tensors, whose shapes and dtypes depend only on those
    of the inputs. To find them, compilation calls the function with fake tensors, or if that fails with
    zeros. Compilation for training raises Error. The constructor freezes a layer's parameters.

    Args:
        layer_to_call: a module, or a function of tensors
        ID:            the operation's name in error messages
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._function = HostFunction(f"poptorch.CPU {ID!r}", layer_to_call)
        if isinstance(layer_to_call, nn.Module):
            layer_to_call.requires_grad_(False)

    def __call__(self, *inputs: Tensor) -> Any:
        capture = current()
        if capture is None:
            return self._function.forward(*inputs)
        fix = "poptorch.registerCustomOp, with a backward of your own"
        raise_in_training(capture, self._function.name, fix)
        check_tensors(f"{self._function.name} takes tensors", *inputs)
        example = self._example_outputs(inputs)
        made = self._function(inputs, as_list(example))
        return type(example)(made) if isinstance(example, (list, tuple)) else made[0]

    def _example_outputs(self, inputs: Sequence[Tensor]) -> Any:
        """Call the layer with fake tensors, or if that raises with zeros, unrecorded; return its outputs."""
        with hidden_from_capture() as fake, torch.no_grad():
            try:
                with fake:  # during capture the model's weights are fake
                    return self._function.forward(*map(torch.empty_like, inputs))
            except Exception:
                zeros = (torch.zeros(value.shape, dtype=value.dtype) for value in inputs)
                return self._function.forward(*zeros)


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


# Custom operations ---------------------------------------------------------------------------------------


_registered: dict[tuple[str, str, int], HostFunction] = {}


def registerCustomOp(
    name: str,
    domain: str,
    version: int,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
) -> None:
    """Register the implementation of `custom_op(..., name, domain, version, ...)`, or replace it.

    >>> poptorch.registerCustomOp("Cube", "com.acme", 1, lambda x: x**3)

    Both functions run on the host, on copies of the tensors, each time the graph runs. A change of an input
    raises Error.

    Args:
        forward:  `forward(*inputs, **attributes)` returns a tensor, or a list or tuple of tensors
        backward: `backward(gradients, inputs, **attributes)` returns a gradient, or None, for each input;
            by default forward is differentiated by autograd
    """
    _registered[name, domain, version] = HostFunction(
        f"the custom operation {domain}.{name}", forward, backward
    )


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[Tensor]:
    """Return the outputs of an operation that `registerCustomOp` registered.

    >>> (cube,) = poptorch.custom_op([x], "Cube", "com.acme", 1, example_outputs=[x])

    Args:
        inputs: the operands
        name, domain, domain_version: those of the registration
        example_outputs: tensors with the shapes and dtypes of the outputs
        attributes: floats, integers, strings, or lists of one type; passed to the implementation by name
    Raises:
        Error: there is no implementation, in a compiled model (outside of it, the outputs are zeros); or a
            float attribute does not fit into 32 bits
        ValueError: an attribute has another type, or text in it is not ASCII
    """
    attributes = {} if attributes is None else attributes
    _check_attributes(attributes)
    operation = _registered.get((name, domain, domain_version))
    if current() is None:
        if operation is None:
            return [torch.zeros_like(example) for example in example_outputs]
        return as_list(operation.forward(*inputs, **attributes))
    if operation is None:
        names = ", ".join(f"{d}.{n} {v}" for n, d, v in sorted(_registered)) or "none"
        raise Error(
            f"the custom operation {domain}.{name}, version {domain_version}, has no implementation here\n"
            f"  why: operators compiled for IPUs can't run on this hardware; registered are: {names}\n"
            f"  fix: poptorch.registerCustomOp({name!r}, {domain!r}, {domain_version}, forward), where forward"
            " computes the outputs with torch; examples/by_feature/known_operations.py registers operations of public"
            " programs"
        )
    backward = None if operation.backward is None else partial(operation.backward, **attributes)
    function = replace(operation, forward=partial(operation.forward, **attributes), backward=backward)
    return function(inputs, example_outputs)


def _check_attributes(attributes: dict[str, Any]) -> None:
    largest = torch.finfo(torch.float32).max
    for key, value in attributes.items():
        items = as_list(value)
        checked("attribute names must be strings: custom_op", key, str, ValueError)
        for item in items:
            checked(f"attribute {key!r}", item, float | int | str, ValueError)
        if len({type(item) for item in items}) > 1:
            raise ValueError(f"the values of attribute {key!r} must all be the same type; found {value!r}")
        for item in (key, *items):
            if isinstance(item, str) and not item.isascii():
                raise ValueError(f"{item} contains non-ASCII characters.")
            if isinstance(item, float) and largest < abs(item) < math.inf:
                raise Error(
                    f"{item} is too {'high' if item > 0 else 'low'} for a float attribute ({key!r}): 32 bits hold"
                    f" ±{largest:.3e}"
                )


def _call_custom_op(
    inputs: list[Tensor], name: str, domain: str, version: int, outputs: list[Tensor], attributes: str
) -> list[Tensor]:
    return custom_op(inputs, name, domain, version, outputs, json.loads(attributes) if attributes else None)


register_shorthand(
    "custom_operation(Tensor[] inputs, str name, str domain, int version, Tensor[] outputs, str attributes)"
    " -> Tensor[]",
    _call_custom_op,
)
