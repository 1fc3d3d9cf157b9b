"""Templates: what a recorded forward yields beside tensors, such as names, numbers and the structure of its outputs.

A template is a nested value with an empty tensor on "meta" in place of each tensor of a call, and a `Handed` in place
of each argument that forward hands through. A call fills both with its own.
"""

from collections import UserDict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import Capture, is_traced, recording_paused
from popengine.compile.recording.leftovers import fake_tensors_in
from popengine.errors import CaptureError

from ..logs import logger
from ..nested_values import Constant, constants_of, copy_with_parts, map_parts, parts_of
from .arguments import BoundCall


class Handed:
    """An argument that forward hands through, as it was recorded, and the paths of all arguments that were this one:
    several, if they were equal numbers or texts."""

    def __init__(self, value: Any, paths: frozenset[str]) -> None:
        self.value, self.paths = value, paths


def arguments_by_id(call: BoundCall) -> dict[int, tuple[Any, frozenset[str]]]:
    """Return each argument or part of one that has no tensors, with its paths, by id."""
    arguments: dict[int, tuple[Any, frozenset[str]]] = {}
    for path, value in call.constants.items():
        _, paths = arguments.get(id(value), (None, frozenset()))
        arguments[id(value)] = value, paths | {path}
    return arguments


def make_template(
    value: Any, path: str, capture: Capture, arguments: Mapping[int, tuple[Any, frozenset[str]]]
) -> tuple[Any, list[Tensor]]:
    """Return the template of a nested value, and its traced tensors. Tensors in objects that are no containers are
    cleared, see `_clear_traced_tensors`.

    Args:
        path:      the value's name in messages
        arguments: as of `arguments_by_id`
    """
    for part, place, is_named in constants_of(value, path):
        _clear_traced_tensors(part, place, is_named, capture.forward_line)
    traced: list[Tensor] = []

    def as_template(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return Handed(*arguments[id(part)]) if id(part) in arguments else part
        tensor = capture.recorder.stand_in_of(part)
        with recording_paused():
            if not is_traced(tensor):
                capture.returned.append(part)
                return tensor.detach()
            traced.append(tensor)
            return torch.empty(0, device="meta")

    return map_parts(value, as_template), traced


def _clear_traced_tensors(part: Any, path: str, is_named: bool, where: str) -> None:
    """Replace traced tensors in `part`, an object that is no container, by "meta" tensors, in place, and
    warn: no call fills them, but programs often do not read them (a language model's cache). Raises
    CaptureError if its key is no string (`is_named` is False), or it has no `__dict__`."""
    leftovers = fake_tensors_in(part, path)
    if not leftovers:
        return
    type_name = f"{type(part).__module__}.{type(part).__qualname__}"
    what = f"{path}, a {type_name}, holds tensors: {', '.join(leftover.path for leftover in leftovers[:3])}"
    fix = (
        "return tensors in tuples, lists, dictionaries or dataclasses, or make the type known with"
        " poptorch.registerCustomArgParser"
    )
    if not is_named or not hasattr(part, "__dict__"):
        raise CaptureError(
            f"what forward returns can't be filled with a call's values: {what}\n"
            f"  returned by the function at {where}\n"
            "  why: only containers can be filled with each call's values; elsewhere a tensor would have none\n"
            f"  fix: {fix}"
        )
    logger.warning("%s; they have no values outside of the compiled model\n  fix: %s", what, fix)
    with recording_paused():
        for leftover in leftovers:
            leftover.put(torch.empty(leftover.value.shape, dtype=leftover.value.dtype, device="meta"))


@dataclass(frozen=True, eq=False)
class Template:
    """What a recorded forward yields beside tensors: the templates of what it has returned, of its notes, and of the
    attributes that it has set on layers, by path; `owners` are the `__dict__` and the name of each attribute."""

    returned: Any
    notes: list[tuple[Any, Any]]
    attributes: dict[str, Any]
    owners: dict[str, tuple[dict[str, Any], str]]

    def joined(self, other: "Template") -> "Template | None":
        """Return the template that yields what both yield, with other arguments; None if they differ."""
        one, two = ((template.returned, template.notes, template.attributes) for template in (self, other))
        joined = _join(one, two)
        if joined is _DIFFERENT:
            return None
        returned, notes, attributes = joined
        return Template(returned, notes, attributes, other.owners)

    def __eq__(self, other: Any) -> bool:
        """Return whether another template has equal returned values and notes."""
        return _join((self.returned, self.notes), (other.returned, other.notes)) is not _DIFFERENT

    def difference(self, other: "Template") -> str:
        """Return in words which part of another template differs; "" if they are equal."""
        parts = {"returned": "what forward returns", "notes": "its notes"}
        differing = (w for n, w in parts.items() if _join(getattr(self, n), getattr(other, n)) is _DIFFERENT)
        both = self.attributes.keys() & other.attributes.keys()  # a cache may be set only once
        changed = (p for p in both if _join(self.attributes[p], other.attributes[p]) is _DIFFERENT)
        return next(chain(differing, changed), "")

    def without(self, paths: Container[str]) -> "Template":
        """Return the template without the attributes with these paths."""
        kept = {path: value for path, value in self.attributes.items() if path not in paths}
        return replace(self, attributes=kept)

    def fill(
        self, outputs: Iterable[Tensor], noted: Iterable[Tensor], call: BoundCall
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        """Set the attributes on layers; return what forward returns and its notes, filled with a call's tensors."""
        for path, value in self.attributes.items():
            owner, name = self.owners[path]
            owner[name] = _fill(value, iter(()), call)
        return _fill(self.returned, iter(outputs), call), _fill(self.notes, iter(noted), call)


def _fill(template: Any, tensors: Iterator[Tensor], call: BoundCall) -> Any:
    """Return a template with `tensors`, in their order, in place of its "meta" tensors, and with the call's arguments.
    Lists and dictionaries are copied, since the program may change them."""

    def as_present(part: Any) -> Any:
        if isinstance(part, Tensor):
            return next(tensors) if part.is_meta else part
        if isinstance(part, Handed):
            return call.constants[min(part.paths)]
        return part

    return map_parts(template, as_present, copied=(list, dict))


_DIFFERENT = object()


def _join(one: Any, other: Any) -> Any:
    """Return the value that yields what both yield, in the form of `other`; _DIFFERENT if there is none."""
    if isinstance(one, Handed) and isinstance(other, Handed) and one.paths & other.paths:
        return Handed(other.value, one.paths & other.paths)
    one, other = (v.value if isinstance(v, Handed) else v for v in (one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_same = (one.is_meta and other.is_meta) or one.is_set_to(other)
        return other if is_same else _DIFFERENT
    parts, other_parts = parts_of(one), parts_of(other)
    if parts is None or other_parts is None:
        return other if Constant(one) == Constant(other) else _DIFFERENT
    if type(one) is not type(other) or _keys_in_order(one, parts) != _keys_in_order(other, other_parts):
        return _DIFFERENT
    joined = {key: _join(part, other_parts[key]) for key, part in parts.items()}
    if any(part is _DIFFERENT for part in joined.values()):
        return _DIFFERENT
    is_other = all(part is other_parts[key] for key, part in joined.items())
    return other if is_other else copy_with_parts(other, joined)


def _keys_in_order(value: Any, parts: dict[Any, Any]) -> list[Any]:
    return [(type(key), key) for key in (value if isinstance(value, dict | UserDict) else parts)]
