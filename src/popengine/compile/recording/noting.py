"""Noting: find the values that a forward reads from Python while it is recorded (see `reads.py`).

`__getattribute__` of modules, and of the classes of objects that a forward reads, is replaced by a function that notes.
Of the functions that run, globals, outer variables, default values and attributes of classes are noted by the names in
their code. Containers are noted as a whole.
"""

import contextlib
import dis
import gc
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any

import numpy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...torch_private import FakeTensor
from .current_capture import Capture, active
from .graph_recorder import CaptureRecorder
from .reads import CLASS, LENGTH, MISSING, Read, Reads, layout_of
from .user_code import (
    OPAQUE,
    PANDO,
    is_opaque,
    is_opaque_module,
    is_users,
    loaded_names,
    names_in,
    package_of,
    user_line,
)

# Modes are fixed by the first compilation; the others are bound by name, or change while forward is recorded.
_NOT_NOTED = {"training", "_parameters", "_buffers", "_compiled_call_impl"}
_NOT_NOTED |= {"_flat_weights", "_flat_weight_refs"}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
_MOST_ITEMS = 1000  # of a container; of a larger one only the length is noted
_CLOCKS = {"time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today", "urandom"}
# Attributes of methods, partial functions, properties and wrappers, which can't be set or are seldom set.
_PARTS_OF_FUNCTIONS = ("__func__", "__self__", "func", "args", "keywords", "fget", "__wrapped__")
_DEFAULTS = "the default values of"
_NOT_DRAWN = {"seed", "getstate", "setstate"}


class Noting(TorchFunctionMode):
    """A function mode that notes the reads of a forward. torch's own functions read nothing of the user's, and run
    without the profile function that sees which functions are called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.reads = Reads()
        self.lines: dict[str, str] = {}  # by path, the user's line that sets a value after it was read
        self.draws: dict[str, str] = {}  # by the user's line, what it draws or asks for
        self._capture: Capture | None = None
        self._known: dict[int, tuple[Any, str]] = {id(m): (m, name) for name, m in module.named_modules()}
        self._done: set[tuple[int, Any]] = set()  # (id of a known object, name) that was read or written
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}  # that were read
        self._ran: dict[types.CodeType, set[Any]] = {}  # with the classes of their first argument
        self._tensors: list[tuple[Tensor, Read]] = []
        self._containers: list[tuple[str, int, int]] = []  # path, and the range of the container's reads
        self._generators: list[tuple[Any, bytes, str]] = []  # with their states, and the user's line
        self._unknown: list[types.CodeType] = []  # of functions that ran and were not read
        self._undo = contextlib.ExitStack()
        self._on_event = self._note_event

    @contextlib.contextmanager
    def of(self, capture: Capture) -> Iterator[None]:
        """Note the reads of the body, the forward of a capture."""
        self._capture = capture
        self._generators.append(
            (numpy.random.random.__self__, pickle.dumps(numpy.random.random.__self__), "")
        )
        profiles = sys.getprofile() is None  # a profiler of the program's stays
        with self._undo:
            self._watch_class(nn.Module)
            self.note_functions([hook for hook, _ in capture.stand_ins.hooks], type(None))
            self._on_event = self._note_event if profiles else None
            with self:
                sys.setprofile(self._on_event) if profiles else None
                try:
                    yield
                finally:
                    sys.setprofile(None) if profiles else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._on_event is None or sys.getprofile() is None:
            return func(*args, **(kwargs or {}))
        sys.setprofile(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(self._on_event)

    def finish(self, recorder: CaptureRecorder) -> Reads:
        """Return the reads. Plain tensors that are constants of the graph are bound by its keys, unless forward has
        read their values."""
        keys = {id(value): key for key, value in recorder.constants.items()}
        contents = set(map(id, recorder.values_read))
        loaded = [*map(loaded_names, self._ran)]
        appended = frozenset().union(*(a for a, _ in loaded)) - frozenset().union(*(r for _, r in loaded))
        unread = [range(i, j) for path, i, j in self._containers if path.rpartition(".")[2] in appended]
        hidden = {number for numbers in unread for number in numbers}
        self.reads.all = [read for number, read in enumerate(self.reads.all) if number not in hidden]
        for value, read in self._tensors:
            find = read.finder()
            if id(value) in contents:
                read.get, read.value = find, value.detach().clone()
            elif id(value) in keys:
                self.reads.tensors[keys[id(value)]] = find
                read.get, read.value = (lambda find=find: layout_of(find())), layout_of(value)
            elif recorder.stand_in_of(value) is value:  # not used, but perhaps compared with None
                read.get, read.value = (lambda find=find: type(find())), type(value)
        inner = {value for code in self._ran for value in code.co_consts if isinstance(value, types.CodeType)}
        unknown = [code for code in self._unknown if code not in inner]  # not made by forward itself
        for function in gc.get_referrers(*unknown) if unknown else ():
            if isinstance(function, types.FunctionType):
                self._note_variables(function)
        for generator, state, where in self._generators:
            if pickle.dumps(generator) != state:
                self.draws.setdefault(where or self._line_of_numpy(), "random numbers")
        return self.reads

    def _line_of_numpy(self) -> str:
        """Return the first line of a function that ran which names a function of numpy.random."""
        for code in self._ran:
            line = code.co_firstlineno
            for step in dis.get_instructions(code):
                line = step.starts_line or line
                if step.argval in vars(numpy.random) and not str(step.argval).startswith("_"):
                    return f"{code.co_filename}:{line}"
        return "a function that forward calls"

    def containers(self) -> list[tuple[Any, str]]:
        """Return the containers that forward has read, with their paths, without default values of arguments."""
        known = [pair for pair in self._known.values() if isinstance(pair[0], dict | list | deque)]
        return [(value, path) for value, path in known if not path.startswith(_DEFAULTS)]

    # ---- attributes ----------------------------------------------------------------------------------------

    def _watch_class(self, kind: type) -> bool:
        """Note reads of attributes of a class's known objects, until the end; return False if that can't be."""
        if any(getattr(vars(base).get("__getattribute__"), "noting", None) is self for base in kind.__mro__):
            return True
        read: Any = kind.__getattribute__
        write: Any = kind.__setattr__
        is_plain = read is object.__getattribute__

        def reading(owner: Any, name: str) -> Any:
            if active.get() is not self._capture:
                return read(owner, name)
            try:
                value = read(owner, name)
            except AttributeError:
                self._note_attribute(owner, name, MISSING, is_plain)
                raise
            self._note_attribute(owner, name, value, is_plain)
            return value

        def writing(owner: Any, name: str, value: Any) -> None:
            if active.get() is self._capture and (known := self._known.get(id(owner))) is not None:
                if (id(owner), name) in self._done:
                    self.lines.setdefault(f"{known[1]}.{name}".lstrip("."), user_line())
                self._done.add((id(owner), name))
            write(owner, name, value)

        reading.noting = self  # pyright: ignore[reportFunctionMemberAccess]
        for name, function in (("__getattribute__", reading), ("__setattr__", writing)):
            before = vars(kind).get(name)
            try:
                setattr(kind, name, function)
            except (TypeError, AttributeError):  # a class of C, or one that refuses
                return False
            self._undo.callback(
                partial(delattr, kind, name) if before is None else partial(setattr, kind, name, before)
            )
        return True

    def _note_attribute(self, owner: Any, name: str, value: Any, is_plain: bool) -> None:
        """Note that the attribute `name` of an object is `value`, unless it was read or written before. `is_plain`: the
        class has no `__getattribute__` of its own."""
        key = id(owner), name
        if key in self._done or name in _NOT_NOTED or name.startswith("__"):
            return
        known = self._known.get(id(owner))
        if known is None or package_of(value) in PANDO or isinstance(value, FakeTensor):
            return
        path, own = f"{known[1]}.{name}".lstrip("."), {}
        with contextlib.suppress(AttributeError):  # it has slots
            own = object.__getattribute__(owner, "__dict__")
        shelves = [own]
        if isinstance(owner, nn.Module):
            if name in vars(nn.Module) and name != "forward":
                return
            if value is MISSING:  # `__getattr__` looks there
                shelves += [own["_modules"], own["_buffers"], own["_parameters"]]
        self._done.add(key)
        if (id(owner), CLASS) not in self._done:
            self._done.add((id(owner), CLASS))
            self.reads.all.append(
                Read(f"the class of {known[1] or 'the model'}", "", owner, CLASS, type(owner))
            )
        for shelf in shelves:
            if name in shelf:
                if name in _HOOKS and not shelf[name]:  # of most layers; the dictionary is never replaced
                    self.reads.all.append(Read(path, "", shelf[name], LENGTH, 0))
                else:
                    self._add(Read(path, "", shelf, name, shelf[name]))
                return
        in_class = self._note_class(type(owner), {name}, f"{type(owner).__name__}.")
        if not hasattr(in_class, "__get__") and not (is_plain and in_class is value):
            in_class = MISSING
        if value is MISSING or not hasattr(in_class, "__set__"):
            for shelf in shelves:
                self._add(Read(path, "", shelf, name, MISSING))
        if value is not MISSING and (in_class is MISSING or isinstance(in_class, types.MemberDescriptorType)):
            # From a slot, or by a `__getattribute__` of its own.
            self._add(Read(path, "", owner, name, value, partial(getattr, owner, name)))

    def _note_class(self, kind: type, names: Iterable[str], prefix: str) -> Any:
        """Note these attributes of a class, and return the last one that is found, or MISSING."""
        found = MISSING
        for name in names:
            for base in kind.__mro__:
                if base in (nn.Module, object):
                    break
                if name in vars(base):
                    found = vars(base)[name]
                if (id(base), name) not in self._done:
                    self._done.add((id(base), name))
                    self._add(Read(f"{prefix}{name}", "", vars(base), name, vars(base).get(name, MISSING)))
                if name in vars(base):
                    break
        return found

    # ---- values --------------------------------------------------------------------------------------------

    def _add(self, read: Read) -> None:
        """Note a read, and what its value contains."""
        if isinstance(read.value, FakeTensor) or package_of(read.value) in PANDO:
            return
        self.reads.all.append(read)
        self._look_into(read)

    def _look_into(self, read: Read) -> None:
        """Note what the value of a read contains: items, or attributes when they are read."""
        value, path = read.value, read.path
        if value is None or isinstance(value, bool | int | float | str | Enum | types.ModuleType | type):
            return
        if isinstance(value, Tensor):
            self._tensors.append((value, read))
        elif isinstance(value, set):
            find = read.finder()
            read.get, read.value = (lambda: frozenset(find())), frozenset(value)
        elif isinstance(value, numpy.ndarray):
            read.get, read.value = read.finder(), value.copy()
        elif value is not MISSING and id(value) not in self._known:
            self._known[id(value)] = value, path
            self._look_into_object(value, path)

    def _look_into_object(self, value: Any, path: str) -> None:
        if isinstance(value, types.FunctionType):
            self._functions.setdefault(value.__code__, []).append(value)
            if value.__code__ in self._ran:
                self._note_variables(value)
        elif isinstance(value, dict | list | tuple | deque):
            self._note_items(value, path)
        elif isinstance(value, ContextVar):
            read = Read(path, "", value, 0, MISSING, value.get)
            read.value = read.present()
            self._add(read)
        elif isinstance(value, random.Random | numpy.random.Generator | numpy.random.RandomState):
            with contextlib.suppress(NotImplementedError):  # of the system
                self._generators.append((value, pickle.dumps(value), user_line()))
        elif isinstance(value, nn.Module):
            pass  # its attributes are noted when they are read
        elif parts := [getattr(value, name) for name in _PARTS_OF_FUNCTIONS if hasattr(value, name)]:
            self._note_items(tuple(parts), path)
        elif not is_opaque(type(value)) and not self._watch_class(type(value)):
            self._note_items(getattr(value, "__dict__", {}), path, ".")

    def _note_items(self, container: Any, path: str, dot: str = "") -> None:
        """Note the items of a container."""
        where, first = user_line() if container else "", len(self.reads.all)
        self.reads.all.append(Read(path, where, container, LENGTH, len(container)))
        if len(container) <= _MOST_ITEMS:
            kinds = (kind for kind in (dict, list, tuple, deque) if isinstance(container, kind))
            base: Any = next(kinds, type(container))  # a subclass may make its items at each access
            is_plain = type(container).__getitem__ is base.__getitem__
            items = base.items(container) if hasattr(base, "items") else enumerate(base.__iter__(container))
            for key, item in items:
                get = None if is_plain else partial(base.__getitem__, container, key)
                name = f"{path}.{key}" if dot else f"{path}[{key!r}]"
                self._add(Read(name, where, container, key, item, get))
        self._containers.append((path, first, len(self.reads.all)))

    # ---- functions -----------------------------------------------------------------------------------------

    def _note_event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        """The profile function: note what the functions that run read, and clocks and random numbers."""
        code = frame.f_code
        if active.get() is not self._capture:
            return
        # A method that dataclasses have made has no file, but its module's globals.
        if event == "call" and is_users(code.co_filename) and not is_opaque_module(frame.f_globals):
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            self.note_function(code, frame.f_globals, first if isinstance(first, type) else type(first))
        elif event == "c_call":
            self._note_call(code, argument)

    def _note_call(self, code: types.CodeType, function: Any) -> None:
        """Note a call of a function of C, if it draws random numbers or reads a clock."""
        name, owner = function.__name__, getattr(function, "__self__", None)
        if isinstance(owner, random.Random):
            if name not in _NOT_DRAWN:
                self.draws.setdefault(user_line(), "random numbers")
        elif name in _CLOCKS and (is_users(code.co_filename) or name == "urandom"):
            module = getattr(owner, "__name__", "") if isinstance(owner, types.ModuleType | type) else ""
            if module in ("time", "posix", "nt", "datetime", "date"):
                what = "random numbers" if name == "urandom" else "the time"
                self.draws.setdefault(user_line(), what)

    def note_function(self, code: types.CodeType, scope: dict[str, Any], kind: type) -> None:
        """Note globals, outer variables and defaults of a function that runs, and attributes of the class `kind`."""
        kinds = self._ran.setdefault(code, set())
        if kind in kinds:
            return
        names = names_in(code)
        if not kinds:
            self._note_names(scope, names)
            for function in self._functions.get(code, ()):
                self._note_variables(function)
            if code not in self._functions and {*code.co_freevars} - {"__class__"}:
                self._unknown.append(code)
        kinds.add(kind)
        if not is_opaque(kind):
            self._note_class(kind, names, f"{kind.__name__}.")

    def note_functions(self, functions: Iterable[Any], kind: type) -> None:
        """Note what functions, or methods of the class `kind`, read that run where the profile function is off."""
        for function in functions:
            if isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename):
                self._functions.setdefault(function.__code__, []).append(function)
                self.note_function(function.__code__, function.__globals__, kind)

    def _note_names(self, scope: dict[str, Any], names: frozenset[str], prefix: str = "") -> None:
        """Note the names that are found in a module's globals; of a module and a class among them, their attributes."""
        for name in names & scope.keys():
            value = scope[name]
            if (id(scope), name) in self._done or package_of(value) in PANDO:
                continue
            self._done.add((id(scope), name))
            if isinstance(value, types.ModuleType):
                if value.__name__.partition(".")[0] not in OPAQUE:
                    self._note_names(vars(value), names, f"{prefix}{name}.")
                continue
            self._add(Read(f"{prefix}{name}", "", scope, name, value))
            if isinstance(value, type) and not is_opaque(value):
                self._note_class(value, names, f"{prefix}{name}.")
            if isinstance(value, types.FunctionType):
                self._note_items(vars(value), f"{prefix}{name}", ".") if vars(value) else None

    def _note_variables(self, function: types.FunctionType) -> None:
        """Note the outer variables and default values of a function, and its attributes."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not bound yet
                value = cell.cell_contents
                self._add(Read(name, "", cell, name, value, lambda cell=cell: cell.cell_contents))
                if isinstance(value, type) and not is_opaque(value) and name != "__class__":
                    self._note_class(value, names_in(function.__code__), f"{name}.")
        for values in (function.__defaults__, function.__kwdefaults__):
            if values:
                self._note_items(values, f"{_DEFAULTS} {function.__name__}")
        if vars(function):
            self._note_items(vars(function), function.__name__, ".")
