"""The base class of all option objects: named values with declared types, freezing, copying and printing.

Options are the public annotations of a class, its private annotations are other fields. Each has a default, or no
value until a setter creates it. Writes to a frozen object raise AttributeError; copies are not frozen.

The docstring of a setter without effect begins with "Has no effect; kept for compatibility: "; its first call logs the
reason that follows. One that always raises begins with "Refused: ". docs/reference/options.md is generated from the
docstrings (`make reference`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pprint
import re
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

from popengine.errors import did_you_mean, without_internal_frames
from poptorch.checks import meant_number
from poptorch.logs import log_no_effect

T = TypeVar("T")
NO_EFFECT = "Has no effect; kept for compatibility: "
_POSITIVE = ("device_iterations", "gradient_accumulation", "replication_factor")


def _log_after(method: Callable[..., T], name: str, why: str) -> Callable[..., T]:
    """Return the method of an option without effect, which logs its name and reason at its first call."""

    @functools.wraps(method)
    def logged(*args: Any, **kwargs: Any) -> T:
        result = method(*args, **kwargs)
        log_no_effect(name, why.partition(". ")[0].removesuffix("."))
        return result

    return logged


@without_internal_frames
class OptionsDict:
    """A set of named values, which can be frozen; the base class of `Options` and its parts."""

    _is_frozen = False
    _path = "options"  # the expression for an object of this class, such as "options.Training"
    _popart: Any  # the `Popart` object, for setters that write to it
    _renamed = dict[str, str]()  # old name of PopTorch -> new name

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            _, is_without_effect, why = (method.__doc__ or "").partition(NO_EFFECT)
            if is_without_effect:
                setattr(cls, name, _log_after(method, f"{cls._path}.{name}", " ".join(why.split())))
        without_internal_frames(cls)

    def __init__(self, popart: Any = None) -> None:
        vars(self)["_popart"] = popart
        for name in itertools.chain(*map(inspect.get_annotations, type(self).__mro__)):
            if hasattr(type(self), name):
                vars(self)[name] = copy.copy(getattr(type(self), name))

    def checkIsFrozen(self) -> None:
        """Raise AttributeError if these options are frozen, as they are once a model or loader uses them."""
        if self._is_frozen:
            raise AttributeError(
                "Can't modify frozen Options: a model or a data loader uses them already\n"
                "  fix: set them before; or change a copy, options = options.clone(), destroy() the executor, and wrap"
                " the model with the copy"
            )

    def clone(self) -> Self:
        """Return a deep copy that is not frozen."""
        return copy.deepcopy(self)

    __copy__ = clone  # a shallow copy would share the dictionaries of a frozen object

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_is_frozen": False}

    def _freeze(self, frozen: bool = True) -> None:
        vars(self)["_is_frozen"] = frozen
        for part in self._parts():
            part._freeze(frozen)

    def _unfreeze(self) -> None:
        self._freeze(False)

    def _parts(self) -> list[OptionsDict]:
        return [field for field in vars(self).values() if isinstance(field, OptionsDict)]

    @property
    def _values(self) -> dict[str, Any]:
        """Return the public values by name, without the parts of options, whose names begin with a capital."""
        return {name: value for name, value in vars(self).items() if name[0].islower()}

    def _printed_fields(self) -> list[str]:
        return [f"{name}={sorted_repr(value)}" for name, value in sorted(self._values.items())]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._printed_fields())})"

    def set(self, **values: Any) -> Self:
        """Change existing values, given by name, and return the object. Raises AssertionError for an unknown
        name, and the errors of `createOrSet`."""
        for name in values:
            self._check_exists(name)
        return self.createOrSet(**values)

    def createOrSet(self, **values: Any) -> Self:
        """Change or create values, given by name, and return the object. Raises AttributeError if frozen, and
        AssertionError for another type than the old value's, or for a count below 1."""
        self.checkIsFrozen()
        vars(self).update({name: self._checked_value(name, value) for name, value in values.items()})
        return self

    def exists(self, name: str) -> bool:
        """Return whether a value of this name exists."""
        return name[:1].islower() and name in vars(self)

    def deleteIfExists(self, name: str) -> Self:
        """Delete a value, if it exists, and return the object. As in PopTorch, frozen options allow this."""
        if self.exists(name):
            del vars(self)[name]
        return self

    def update(self, other: dict[str, Any]) -> dict[str, Any]:
        """Return a new dictionary with the object's values and those of `other`; unlike dict.update, change
        nothing. Raises AssertionError if a name is in both."""
        return merge_disjoint(other, self.toDict())

    def toDict(self) -> dict[str, Any]:
        """Return the values by name; for `Options`, including the values of its parts."""
        return {name: plain_copy(value) for name, value in self._values.items()}

    def __call__(self, name: str) -> Any:
        self._check_exists(name)
        return self._values[name]

    if not TYPE_CHECKING:  # so that type checkers find misspelt names

        @without_internal_frames
        def __getattr__(self, name: str) -> Any:
            if name in self._renamed:
                return getattr(self, self._renamed[name])
            if name.startswith("__"):  # `copy` and `pickle` look for such methods, and need no suggestion
                raise AttributeError(f"Invalid attribute {name!r}", name=name)
            words = f"Invalid attribute {name!r} for {type(self).__name__}{self._meant(name)}"
            raise AttributeError(words, name=name)  # the name keeps Python from a second suggestion

        @without_internal_frames
        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_"):
                self._check_exists(name, repr(value))
                self.createOrSet(**{name: value})
            elif name not in vars(self):
                raise AttributeError(f"Invalid private attribute {name!r} for {type(self).__name__}")
            else:
                self.checkIsFrozen()
                vars(self)[name] = value

    def _fix_of_keywords(self, values: dict[str, Any]) -> str:
        """Return the setters that are meant by keywords of a call, such as `Options(deviceIterations=4)`."""
        setters = {name: text for name, text in names_of_groups().items() if "_" not in name}
        calls = [f"{setters[name]}({value!r})" for name, value in values.items() if name in setters]
        meant = "".join(did_you_mean(name, setters) for name in values.keys() - setters.keys())
        fix = "; ".join(["options = poptorch.Options()", *calls])
        return f"options are set by methods{meant}\n  fix: {fix}"

    def _set_popart(self, name: str, value: Any) -> Self:
        self._popart._store(name, value)
        return self

    def _meant(self, name: str) -> str:
        """Return which option or setter, also of another part of the options, `did_you_mean`."""
        texts = {"half": "model.half()", **names_of_groups(), **{name: name for name in _public_names(self)}}
        return did_you_mean(name, texts, shown=texts)

    def _check_exists(self, name: str, value: str = "value") -> None:
        if hasattr(type(self), name) and not self.exists(name):
            raise AssertionError(f"{name} is a method\n  fix: {self._path}.{name}({value})")
        if not self.exists(name):
            raise AssertionError(
                f"Invalid option {name}, valid options are {', '.join(sorted(self._values))}{self._meant(name)}"
            )

    def _checked_value(self, name: str, value: Any) -> Any:
        expected = type(vars(self).get(name, value))
        setter = re.sub("_(.)", lambda letter: letter[1].upper(), name)
        fix = f"\n  fix: {self._path}.{setter}({meant_number(value, 1)})" if name in _POSITIVE else ""
        if not isinstance(value, expected):
            raise AssertionError(
                f"Unexpected type {type(value).__name__} for option {name}: {value!r}."
                f" Expected {expected.__name__}{fix}"
            )
        if name in _POSITIVE and value <= 0:
            raise AssertionError(f"Option {name} must be 1 or more; found {value}{fix}")
        # With ints in place of enum members, equal options print equally.
        return int(value) if expected is int and isinstance(value, IntEnum) else value


def _public_names(thing: Any) -> list[str]:
    """Return the names of the methods and values of an option object, or of a class of options."""
    return [name for name in (*dir(thing), *vars(thing)) if not name.startswith("_")]


def names_of_groups(cls: type[OptionsDict] = OptionsDict) -> dict[str, str]:
    """Return, by name, the expression for each setter and value of the subclasses of `cls`."""
    expressions = {}
    for group in cls.__subclasses__():
        expressions |= names_of_groups(group)
        expressions |= {name: f"{group._path}.{name}" for name in _public_names(group)}
    return expressions


def merge_disjoint(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return a new dictionary with the entries of both. Raises AssertionError if a key is in both."""
    shared = sorted(first.keys() & second.keys())
    if shared:
        raise AssertionError(f"Can't merge dictionaries: both contain {', '.join(shared)}")
    return {**first, **second}


def plain_copy(value: Any) -> Any:
    """Return a deep copy of a value; for an option object, the dictionary of its values."""
    return value.toDict() if isinstance(value, OptionsDict) else copy.deepcopy(value)


def sorted_repr(value: Any) -> str:
    """Return the `repr` of a value, with dictionaries sorted by key, so that equal values print equally."""
    return pprint.pformat(value, width=sys.maxsize)
