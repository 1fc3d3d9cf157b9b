"""What a step leaves in its module's lists, dictionaries and attributes: tensors that have no values yet."""

from __future__ import annotations

from typing import Any

from popengine.compile.recording.current_capture import is_traced
from popengine.errors import CaptureError
from poptorch.annotating.notes import note
from poptorch.nested_values import tensors_of

_INTERNAL = {"_parameters", "_buffers", "_modules"}  # capture looks after these


class Left:
    """The attributes of a module before a step: finds what the step adds to them, and takes it out again."""

    def __init__(self, module: Any) -> None:
        self._attributes = vars(module)
        self._before = {name: _copied(value) for name, value in self._attributes.items()}

    def note(self) -> None:
        """Note what was appended to a list, put into a dictionary or assigned, and take it out.

        Raises:
            CaptureError: something else holds a traced tensor
        """
        for name, value in self._attributes.items():
            if name not in _INTERNAL:
                _note(name, self._before.get(name), value)
        left = [
            name
            for name, value in self._attributes.items()
            if name not in _INTERNAL and _holds_traced(value) and not _is_computed(value)
        ]
        self.take_back()
        if left:
            raise CaptureError(
                f"the step leaves a tensor that has no values yet in self.{left[0]}\n"
                "  why: a step is captured once; of what it leaves, tensors in attributes, in lists that it appends to"
                " and in dictionaries come back after each call, and others don't\n"
                f"  fix: make self.{left[0]} one of these, or return the value and keep it in a hook"
            )

    def take_back(self) -> None:
        """Lists, dictionaries and attributes as they were, where they have got a traced tensor."""
        for name, now in list(self._attributes.items()):
            before = self._before.get(name)
            if name in _INTERNAL or not _holds_traced(now):
                continue
            if isinstance(now, list) and isinstance(before, list):
                now[:] = [item for item in now if not _is_computed(item)]
            elif isinstance(now, dict) and isinstance(before, dict):
                for key in [key for key, item in now.items() if _is_computed(item)]:
                    now.pop(key)
                    if key in before:
                        now[key] = before[key]
            else:
                self._attributes.pop(name)
                if name in self._before:
                    self._attributes[name] = before


def _note(name: str, before: Any, now: Any) -> None:
    """Note what was appended to a list, put into a dictionary or assigned."""
    if isinstance(now, list) and isinstance(before, list):
        for item in now[len(before) :]:
            if _is_computed(item):
                note(("append", name), item)
    elif isinstance(now, dict) and isinstance(before, dict):
        for key, item in now.items():
            if _is_computed(item) and item is not before.get(key):
                note(("key", name, key), item)
    elif _is_computed(now):
        note(("set", name), now)


def _copied(value: Any) -> Any:
    if type(value) in (list, dict):
        return value.copy()
    return value


def _is_computed(value: Any) -> bool:
    return any(is_traced(tensor) for tensor in tensors_of(value))


def _holds_traced(value: Any) -> bool:
    if isinstance(value, (set, frozenset)) or type(value).__name__ == "deque":
        value = list(value)
    return _is_computed(value)
