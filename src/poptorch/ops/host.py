"""Call Python functions from a compiled graph: `poptorch.CPU`, and the operation that custom operations become.

The graph holds a number, the handle of a function in this process: functions can't be saved in a graph.
"""

import itertools
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from popengine.compile.recording.current_capture import current, hidden
from popengine.errors import Error
from popengine.ir import Plan
from popengine.operations import calls_within

from .library import computed, listed


@dataclass(frozen=True)
class HostCall:
    """A function, and the shape and type of each tensor that it returns."""

    name: str
    function: Callable[..., Sequence[Tensor]]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    read_only: tuple[bool, ...]  # of each input, whether the function must not change it
    fix: str  # of the message for a function that writes into such an input
    weights: tuple[tuple[str, weakref.ref[Tensor]], ...]  # the model's on the host, which must not change


_calls: dict[int, HostCall] = {}  # by handle; graphs refer to them for as long as the process lives
# From a random number on, so that a graph that another process has saved never meets a function of this one.
_handles = itertools.count(secrets.randbits(40) << 20)


def host_call(
    name: str,
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    like: Sequence[Tensor],
    writes: Sequence[int] = (),
    scratch: Sequence[int] = (),
    fix: str = "",
) -> list[Tensor]:
    """Call `function(*inputs)` each time the graph runs; it returns tensors of the shapes and types of `like`.

    Args:
        writes:  the inputs that it changes in place; their new values come behind the outputs
        scratch: the inputs that it may change, and whose new values are dropped
        fix:     the end of the message for a function that writes into another input
    """
    wrong = [type(value).__name__ for value in like if not isinstance(value, Tensor)]
    if wrong:
        raise Error(f"{name} must return a tensor, or a list or tuple of tensors; found {', '.join(wrong)}")
    handle = next(_handles)
    changed = [inputs[position] for position in writes]
    read_only = tuple(i not in writes and i not in scratch for i in range(len(inputs)))

    def run(*given: Tensor) -> list[Tensor]:
        made = list(function(*given))
        return [*made, *(given[position] for position in writes)]

    shapes = tuple((tuple(value.shape), value.dtype) for value in (*like, *changed))
    capture = current()
    members = () if capture is None else capture.members
    weights = tuple((key, weakref.ref(value)) for key, value in members)
    _calls[handle] = HostCall(name, run if changed else function, shapes, read_only, fix, weights)
    return list(torch.ops.poptorch.host_call(list(inputs), handle))


def _find(handle: int) -> HostCall:
    if handle not in _calls:
        raise Error(
            "this graph calls a Python function on the host, and was compiled by another process, which had it\n"
            "  why: poptorch.CPU and custom_op can't be saved in an executable\n"
            "  fix: compile the model in this process, instead of loading an executable"
        )
    return _calls[handle]


def _run(inputs: list[Tensor], handle: int) -> list[Tensor]:
    call = _find(handle)
    device = inputs[0].device if inputs else torch.device("cpu")
    # Ordinary copies: the function may keep them or give them to numpy.
    with torch.inference_mode(False), torch.no_grad():
        given = [value.to("cpu", copy=True) for value in inputs]
        versions, weights = [value._version for value in given], _versions(call)
        made = [value.to(device) for value in call.function(*given)]
        if changed := [name for name, version in _versions(call).items() if version != weights[name]]:
            raise Error(
                f"{call.name} changes {', '.join(changed)} of the model on the host, and the compiled model keeps its"
                " own\n"
                "  why: what is written there is overwritten when the weights are next copied to the host\n"
                "  fix: give it to the function as an input, and declare that with `writes=[...]`"
            )
        for position, (value, before, version) in enumerate(zip(given, inputs, versions, strict=True)):
            if call.read_only[position] and (value._version != version or not _same(value, before)):
                raise Error(
                    f"{call.name} changes its input {position} in place, and nobody would see it\n"
                    "  why: the graph gives a function on the host copies of its tensors\n"
                    f"  fix: work on a copy, `inputs[{position}].clone()`; {call.fix}"
                )
    found = tuple((tuple(value.shape), value.dtype) for value in made)
    if found != call.outputs:
        raise Error(
            f"{call.name} returned {listed(found)}; the graph was compiled for {listed(call.outputs)}\n"
            "  fix: return the same shapes and types at every call"
        )
    return [value.contiguous() for value in made]


def _versions(call: HostCall) -> dict[str, int]:
    """Return the version of each of the model's tensors on the host: each write raises it."""
    with torch._C.DisableTorchFunctionSubclass():  # a look at them is no use of them
        return {name: value._version for name, link in call.weights if (value := link()) is not None}


def _same(value: Tensor, before: Tensor) -> bool:
    """Return whether two tensors hold the same bits; a write by numpy does not raise a tensor's version."""
    value, before = value.contiguous(), before.to("cpu").contiguous()
    return torch.equal(value.view(-1).view(torch.uint8), before.view(-1).view(torch.uint8))


def _pretend(inputs: list[Tensor], handle: int) -> list[Tensor]:
    device = inputs[0].device if inputs else "cpu"
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in _find(handle).outputs]


computed("host_call(Tensor[] inputs, int handle) -> Tensor[]", _run, _pretend)


def calls_host(plan: Plan) -> bool:
    """Return whether a compiled model, or a body of its branches, calls functions of this process."""
    calls = {call for piece in plan.partition.pieces for call in calls_within(piece)}
    return any(call.startswith("poptorch.host_call.") for call in calls)


def written_back(inputs: Sequence[Tensor], writes: Sequence[int], made: Sequence[Tensor]) -> list[Tensor]:
    """Write the new values of changed inputs, and return the outputs of a host call."""
    count = len(made) - len(writes)
    with torch.no_grad():
        for position, value in zip(writes, made[count:], strict=True):
            inputs[position].copy_(value)
    return list(made[:count])


class CPU:
    """A function or layer that runs on the host at every execution of the graph. In inference only.

        self.log = poptorch.CPU(self.count_zeros, "count")

    The call returns a tensor, or a list or tuple of tensors, whose shapes and types depend on nothing but those
    of its inputs. While the model is compiled it runs once, on zeros, to learn them.

    Args:
        writes: positions of the inputs that the layer changes in place, buffers of the model for example. (Ours.)
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str, writes: Sequence[int] = ()) -> None:
        self._layer, self._name, self._writes = layer_to_call, ID, tuple(writes)
        if isinstance(layer_to_call, nn.Module):
            layer_to_call.requires_grad_(False)

    def __call__(self, *inputs: Tensor) -> Any:
        capture = current()
        if capture is None:
            return self._layer(*inputs)
        if capture.training:
            raise Error(
                f"poptorch.CPU ({self._name!r}) is only supported in inference\n"
                "  why: it has no gradient\n  fix: poptorch.registerCustomOp, with a backward of your own"
            )
        wrong = [type(value).__name__ for value in inputs if not isinstance(value, Tensor)]
        if wrong:
            raise Error(f"poptorch.CPU ({self._name!r}) takes tensors; found {', '.join(wrong)}")
        example = self._example(inputs)
        many = isinstance(example, (list, tuple))
        made = host_call(
            f"poptorch.CPU {self._name!r}",
            lambda *given: as_list(self._layer(*given)),
            inputs,
            as_list(example),
            self._writes,
            fix=f"or say which inputs it writes: poptorch.CPU(layer, {self._name!r}, writes=[...])",
        )
        made = written_back(inputs, self._writes, made)
        return type(example)(made) if many else made[0]

    def _example(self, inputs: Sequence[Tensor]) -> Any:
        """Return what the layer returns for fake tensors; for zeros, if it reads values."""
        with hidden() as fake, torch.no_grad():
            try:
                with fake:  # a part of the model has fake weights now
                    return self._layer(*(torch.empty_like(value) for value in inputs))
            except Exception:
                return self._layer(*(torch.zeros(value.shape, dtype=value.dtype) for value in inputs))


def as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
