"""What an executor was compiled for, to which later calls are held."""

import inspect
from dataclasses import is_dataclass
from typing import Any

import torch

from popengine.errors import BatchError
from popengine.settings import Counts
from poptorch.nested_values import Spec, describe

from .arguments import Call, factors

_HINT = (
    "\n  why: a compiled model has fixed inputs\n"
    "  fix: wrap the model once more for these inputs, or call destroy() on this one first"
)


class CompiledInputs:
    """The structure, constants, dtypes and shapes of a call's arguments."""

    def __init__(self, call: Call, counts: Counts, wide: bool) -> None:
        self._counts = counts
        self.wide = wide  # see `narrowed`
        self._spec = {name: describe(value) for name, value in call.bound.arguments.items()}
        self._positional = len(call.bound.args)
        self._tensors = [(tensor.dtype, tensor.shape) for tensor in call.tensors]

    def check(self, call: Call) -> None:
        """Raises BatchError unless a call has the structure, constants, dtypes and shapes that were compiled."""
        if len(call.bound.args) != self._positional:  # only `*args` can differ
            raise _differs("Number of positional arguments mismatch", self._positional, len(call.bound.args))
        for name, value in call.bound.arguments.items():
            kind = call.bound.signature.parameters[name].kind
            _compare(self._spec[name], describe(value), name, kind is inspect.Parameter.VAR_KEYWORD)
        for (dtype, shape), tensor, path in zip(self._tensors, call.tensors, call.paths, strict=True):
            if tensor.dtype != dtype:
                raise _differs(f"Data type mismatch for {path}", dtype, tensor.dtype)
            if tensor.shape != shape:
                explained = self._explained(shape, tensor.shape)
                raise _differs(f"Shape mismatch for {path}", shape, f"{tensor.shape}{explained}")

    def _explained(self, expected: torch.Size, found: torch.Size) -> str:
        """What to say to somebody who passes micro-batches, as torch's own loader makes them."""
        whole = self._counts.product
        if whole == 1 or not found or found[1:] != expected[1:] or found[0] * whole != expected[0]:
            return ""
        return (
            f"\n  {expected[0]} = micro-batch {found[0]} x {factors(self._counts)}\n"
            f"  fix: load combined batches: poptorch.DataLoader(options, dataset, batch_size={found[0]})"
        )


def _compare(expected: Spec, found: Spec, path: str, keywords: bool = False) -> None:
    """Raise unless both are equal; `keywords`: what is compared are the parts of **kwargs, which have names."""
    if expected == found:
        return
    if expected.type is not found.type:
        raise _differs(f"Type mismatch for {path}", expected.type, found.type)
    if expected.keys != found.keys:
        missing = [str(key) for key in expected.keys if key not in found.keys]
        unexpected = [str(key) for key in found.keys if key not in expected.keys]
        words = [f"Missing arguments: {', '.join(missing)}."] if missing else []
        words += [f"Unexpected arguments: {', '.join(unexpected)}."] if unexpected else []
        raise BatchError(f"Keys mismatch for {path}: {' '.join(words)}{_HINT}")
    if len(expected.children) != len(found.children):
        raise _differs(f"Length mismatch for {path}", len(expected.children), len(found.children))
    if expected.constant != found.constant:
        raise _differs(f"Value mismatch for {path}", expected.constant, found.constant)
    names = expected.keys or range(len(expected.children))
    for name, one, other in zip(names, expected.children, found.children, strict=True):
        record = is_dataclass(expected.type) and not issubclass(expected.type, dict)
        step = f".{name}" if record else f"[{name!r}]".replace("'", '"')
        _compare(one, other, str(name) if keywords else path + step)


def _differs(what: str, expected: Any, found: Any) -> BatchError:
    return BatchError(f"{what}: expected {expected} but got {found}{_HINT}")
