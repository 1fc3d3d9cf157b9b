"""Scopes that name and annotate the operations in them. On plain PyTorch they do nothing."""

from typing import Any

from popengine.compile.recording.current_capture import current


class NameScope:
    """Operations inside carry this prefix in the compiled graph; scopes nest.

    with poptorch.NameScope("embedding"):
        x = self.table(tokens)
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), f"the name of a NameScope must be a string; found {name!r}"
        self.name = name

    def __enter__(self) -> None:
        push_name_scope(self.name)

    def __exit__(self, *_: object) -> None:
        pop_name_scope()


def push_name_scope(name: str) -> None:
    """Open a scope."""
    capture = current()
    if capture is not None:
        capture.scopes.append(name)


def pop_name_scope() -> None:
    """Close the innermost scope."""
    capture = current()
    if capture is not None and capture.scopes:
        capture.scopes.pop()


class Attribute:
    """Operations inside carry these attributes in the compiled graph, recorded in each node's `attributes`.

        with poptorch.Attribute(__outline={"layer": "embedding"}):
            x = self.table(tokens)

    Scopes nest; leaving one restores the values of the outer.
    """

    def __init__(self, **attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._outer: list[dict[str, dict[str, str]]] = []

    def __enter__(self) -> None:
        capture = current()
        if capture is not None:
            self._outer.append(capture.attributes)
            for attribute, entries in self._attributes.items():
                for key, value in entries.items():
                    set_attribute(attribute, key, value)

    def __exit__(self, *_: object) -> None:
        capture = current()
        if capture is not None and self._outer:
            capture.attributes = self._outer.pop()


def set_attribute(attribute: str, key: str, value: Any) -> None:
    """Set one entry of an attribute for the operations that follow."""
    capture = current()
    if capture is not None:
        entries = {**capture.attributes.get(attribute, {}), key: str(value)}
        capture.attributes = {**capture.attributes, attribute: entries}


def clear_attribute(attribute: str, key: str) -> None:
    """Take an entry away again."""
    capture = current()
    if capture is not None:
        entries = {k: v for k, v in capture.attributes.get(attribute, {}).items() if k != key}
        others = {k: v for k, v in capture.attributes.items() if k != attribute}
        capture.attributes = {**others, attribute: entries} if entries else others
