"""What all option objects share: named values with declared types, freezing, copying and printing.

Public values live in a dictionary and are read as attributes (`opts.device_iterations`); private fields
are declared once with `_declare`. A frozen object refuses every write; a copy of it is not frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, ClassVar, Self


class Freezable:
    """An object that can be made read-only, with all option objects it holds."""

    _is_frozen: bool

    def __init__(self) -> None:
        self._declare(_is_frozen=False)

    def checkIsFrozen(self) -> None:
        """Raises: AttributeError, if this object is frozen."""
        if self._is_frozen:
            raise AttributeError(
                "Can't modify frozen Options: a model or a data loader uses them already. "
                "Set them before, or change a copy: opts = opts.clone()"
            )

    def clone(self) -> Self:
        """A deep copy that is not frozen."""
        return copy.deepcopy(self)

    __copy__ = clone  # a shallow copy would share the dictionaries of a frozen object

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_is_frozen": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            kind = "private attribute" if name.startswith("_") else "attribute"
            raise AttributeError(f"Invalid {kind} {name!r} for {type(self).__name__}")
        self.checkIsFrozen()
        self.__dict__[name] = value

    def _declare(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def _freeze(self) -> None:
        self._set_frozen(True)

    def _unfreeze(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        self.__dict__["_is_frozen"] = frozen
        for nested in self._nested():
            nested._set_frozen(frozen)

    def _nested(self) -> Iterator[Freezable]:
        return (field for field in self.__dict__.values() if isinstance(field, Freezable))


class OptionsDict(Freezable):
    """Named values: `set` keeps their types, `createOrSet` makes those that have no default."""

    _values: dict[str, Any]
    _positive: ClassVar[frozenset[str]] = frozenset()  # counts: 0 of them makes no sense
    _renamed: ClassVar[dict[str, str]] = {}  # old name -> its new name, which means the same

    def __init__(self, **defaults: Any) -> None:
        super().__init__()
        self._declare(_values=defaults)

    def set(self, **values: Any) -> Self:
        """Change values. Raises: AssertionError, for an unknown name or another type than it has now."""
        for name in values:
            assert name in self._values, (
                f"Invalid option {name}, valid options are {', '.join(sorted(self._values))}"
            )
        return self.createOrSet(**values)

    def createOrSet(self, **values: Any) -> Self:
        """As `set`, and also for values that have no default."""
        self.checkIsFrozen()
        for name, value in values.items():
            self._check(name, value)
        self._values.update({name: self._stored(name, value) for name, value in values.items()})
        return self

    def exists(self, name: str) -> bool:
        return name in self._values

    def deleteIfExists(self, name: str) -> Self:
        """Forget a value. As in PopTorch, frozen options allow it."""
        self._values.pop(name, None)
        return self

    def update(self, other: dict[str, Any]) -> dict[str, Any]:
        """`other` and these values in one dictionary. Raises: AssertionError, if they share a name."""
        return merged(other, self.toDict())

    def toDict(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in self._values.items()}

    def __call__(self, name: str) -> Any:
        assert name in self._values, (
            f"Invalid option {name}, valid options are {', '.join(sorted(self._values))}"
        )
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})  # absent while an object is being unpickled
        if name in values:
            return values[name]
        if name in self._renamed:
            return getattr(self, self._renamed[name])
        raise AttributeError(f"Invalid attribute {name!r} for {type(self).__name__}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self.set(**{name: value})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._printed())})"

    def _printed(self) -> list[str]:
        return [f"{name}={printed(self._values[name])}" for name in sorted(self._values)]

    def _check(self, name: str, value: Any) -> None:
        if name in self._values:
            expected = type(self._values[name])
            assert isinstance(value, expected), (
                f"Unexpected type {type(value).__name__} for option {name}: {value!r}. "
                f"Expected {expected.__name__}"
            )
        assert name not in self._positive or value > 0, f"Option {name} must be 1 or more; found {value}"

    def _stored(self, name: str, value: Any) -> Any:
        """Enum members become integers where integers are kept, so that equal options print equally."""
        return int(value) if type(self._values.get(name)) is int and isinstance(value, IntEnum) else value

    def _nested(self) -> Iterator[Freezable]:
        yield from super()._nested()
        yield from (value for value in self._values.values() if isinstance(value, Freezable))


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both in one. Raises: AssertionError, if they share a name."""
    shared = sorted(first.keys() & second.keys())
    assert not shared, f"Can't merge dictionaries: both contain {', '.join(shared)}"
    return {**first, **second}


def plain(value: Any) -> Any:
    """Nested options as dictionaries, anything else as a copy."""
    return value.toDict() if isinstance(value, OptionsDict) else copy.deepcopy(value)


def printed(value: Any) -> str:
    """As `repr`, with dictionaries in the order of their keys: equal values print equally."""
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: repr(item[0]))
        return "{" + ", ".join(f"{key!r}: {printed(item)}" for key, item in items) + "}"
    return repr(value)
