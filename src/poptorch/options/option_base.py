"""Base classes of all option objects: named values with declared types, freezing, copying and printing.

A public value is declared as a `Setting` of its class and read as an attribute (`opts.device_iterations`); private
fields are declared with `_declare`. A frozen object refuses every write; a copy of it is not frozen.

Setters of names without effect here are decorated with `recorded` or `refused`, which begin their docstrings with the
reason. docs/reference/options.md is generated from the docstrings (`docs/options_reference.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, overload

from popengine.errors import did_you_mean

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
NOTHING: Any = object()
_WORDS: dict[type, str] = {bool: "a bool", int: "an int", str: "a string", dict: "a dictionary"}


class Setting(Generic[T]):
    """A public value of an `OptionsDict`. Without a default it exists only after a setter was called.

    Args:
        positive: refuse values below 1
    """

    def __init__(self, default: T = NOTHING, *, positive: bool = False) -> None:
        self.default, self.positive = default, positive

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: OptionsDict, owner: type) -> T: ...
    def __get__(self, instance: OptionsDict | None, owner: type) -> Self | T:
        if instance is None:
            return self
        if self.name not in instance._values:
            raise AttributeError(f"{self.name} has no value yet")  # Python calls `__getattr__` then
        return instance._values[self.name]

    def __set__(self, instance: OptionsDict, value: T) -> None:
        instance.set(**{self.name: value})


def recorded(why: str) -> Callable[[F], F]:
    """Return a decorator that prepends "Recorded: <why>." to the docstring of a setter whose value has no effect."""
    return _with_reason("Recorded", why)


def refused(why: str) -> Callable[[F], F]:
    """Return a decorator that prepends "Refused: <why>." to a setter's docstring; the setter raises the error."""
    return _with_reason("Refused", why)


def _with_reason(answer: str, why: str) -> Callable[[F], F]:
    def mark(setter: F) -> F:
        rest = f"\n\n{setter.__doc__}" if setter.__doc__ else ""
        setter.__doc__ = f"{answer}: {why}.{rest}"
        return setter

    return mark


def expect(setter: str, value: T, kind: type, error: type[Exception] = AssertionError) -> T:
    """Return a setter's argument. Raises `error` if it is not of this kind."""
    if not isinstance(value, kind):
        word = _WORDS.get(kind) or f"a {kind.__module__.removesuffix('.enums')}.{kind.__name__}"
        is_name = issubclass(kind, Enum) and isinstance(value, str) and value in kind.__members__
        raise error(
            f"{setter} takes {word}; found {value!r}" + (f"\n  fix: {word[2:]}.{value}" if is_name else "")
        )
    return value


class Freezable:
    """Base class of objects that can be made read-only, with the option objects in their fields."""

    _is_frozen: bool

    def __init__(self) -> None:
        self._declare(_is_frozen=False)

    def checkIsFrozen(self) -> None:
        """Raise AttributeError if a model or loader uses these options."""
        if self._is_frozen:
            raise AttributeError(
                "Can't modify frozen Options: a model or a data loader uses them already. "
                "Set them before, or change a copy: opts = opts.clone()"
            )

    def clone(self) -> Self:
        """Return a deep copy that is not frozen."""
        return copy.deepcopy(self)

    __copy__ = clone  # a shallow copy would share the dictionaries of a frozen object

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_is_frozen": False}

    if not TYPE_CHECKING:  # so that type checkers find misspelt names

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self.__dict__:
                kind = "private attribute" if name.startswith("_") else "attribute"
                raise AttributeError(f"Invalid {kind} {name!r} for {type(self).__name__}")
            self.checkIsFrozen()
            self.__dict__[name] = value

    def _declare(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def _freeze(self, frozen: bool = True) -> None:
        self.__dict__["_is_frozen"] = frozen
        for nested in self._nested():
            nested._freeze(frozen)

    def _unfreeze(self) -> None:
        self._freeze(False)

    def _nested(self) -> Iterator[Freezable]:
        return (field for field in self.__dict__.values() if isinstance(field, Freezable))


class OptionsDict(Freezable):
    """Named values: the base class of `Options` and its parts."""

    _values: dict[str, Any]
    _popart: Any  # the `Popart` object, for setters that write to it
    _renamed: ClassVar[dict[str, str]] = {}  # old name of PopTorch -> new name

    def __init__(self, popart: Any = None) -> None:
        super().__init__()
        declared = self._declared().items()
        values = {n: copy.copy(v.default) for n, v in declared if v.default is not NOTHING}
        self._declare(_values=values, _popart=popart)

    @classmethod
    def _declared(cls) -> dict[str, Setting[Any]]:
        return {n: v for base in cls.__mro__ for n, v in vars(base).items() if isinstance(v, Setting)}

    def set(self, **values: Any) -> Self:
        """Change values by name.

        Raises: AssertionError for an unknown name or a value of another type than the present one.
        """
        for name in values:
            self._check_known(name)
        return self.createOrSet(**values)

    def createOrSet(self, **values: Any) -> Self:
        """Change or create values by name."""
        self.checkIsFrozen()
        for name, value in values.items():
            self._check(name, value)
        self._values.update({name: self._stored(name, value) for name, value in values.items()})
        return self

    def exists(self, name: str) -> bool:
        """Return whether there is such a value."""
        return name in self._values

    def deleteIfExists(self, name: str) -> Self:
        """Delete a value. As in PopTorch, this is allowed for frozen options."""
        self._values.pop(name, None)
        return self

    def update(self, other: dict[str, Any]) -> dict[str, Any]:
        """Return these values and those of another dictionary in one dictionary.

        Raises: AssertionError if both have a name.
        """
        return merged(other, self.toDict())

    def toDict(self) -> dict[str, Any]:
        """Return the values by name; for `Options` with those of its parts."""
        return {name: plain(value) for name, value in self._values.items()}

    def __call__(self, name: str) -> Any:
        self._check_known(name)
        return self._values[name]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            values = self.__dict__.get("_values", {})  # absent while an object is being unpickled
            if name in values:
                return values[name]
            if name in self._renamed:
                return getattr(self, self._renamed[name])
            known = {name for name in dir(type(self)) if not name.startswith("_")} - self._declared().keys()
            raise AttributeError(
                f"Invalid attribute {name!r} for {type(self).__name__}{did_you_mean(name, {*known, *values})}"
            )

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                super().__setattr__(name, value)
            else:
                self.set(**{name: value})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._printed())})"

    def _printed(self) -> list[str]:
        return [f"{name}={printed(self._values[name])}" for name in sorted(self._values)]

    def _set_popart(self, name: str, value: Any) -> Self:
        self._popart.set(name, value)
        return self

    def _check_known(self, name: str) -> None:
        assert name in self._values, (
            f"Invalid option {name}, valid options are {', '.join(sorted(self._values))}"
            f"{did_you_mean(name, self._values)}"
        )

    def _check(self, name: str, value: Any) -> None:
        if name in self._values:
            expected = type(self._values[name])
            assert isinstance(value, expected), (
                f"Unexpected type {type(value).__name__} for option {name}: {value!r}. "
                f"Expected {expected.__name__}"
            )
        declared = self._declared().get(name)
        assert declared is None or not declared.positive or value > 0, (
            f"Option {name} must be 1 or more; found {value}"
        )

    def _stored(self, name: str, value: Any) -> Any:
        """Return integers for enum members of integer values, so that equal options print equally."""
        return int(value) if type(self._values.get(name)) is int and isinstance(value, IntEnum) else value

    def _nested(self) -> Iterator[Freezable]:
        yield from super()._nested()
        yield from (value for value in self._values.values() if isinstance(value, Freezable))


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return both dictionaries in one. Raises AssertionError if both have a name."""
    shared = sorted(first.keys() & second.keys())
    assert not shared, f"Can't merge dictionaries: both contain {', '.join(shared)}"
    return {**first, **second}


def plain(value: Any) -> Any:
    """Return nested options as a dictionary, anything else as a copy."""
    return value.toDict() if isinstance(value, OptionsDict) else copy.deepcopy(value)


def printed(value: Any) -> str:
    """Return the `repr`, with dictionaries sorted by key, so that equal values print equally."""
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: repr(item[0]))
        return "{" + ", ".join(f"{key!r}: {printed(item)}" for key, item in items) + "}"
    return repr(value)
