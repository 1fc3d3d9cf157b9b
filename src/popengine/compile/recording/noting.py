"""Noting: find the values that a forward reads from Python while it is recorded (see `reads.py`).

`__getattribute__` of modules, and of the classes of objects that a forward reads, is replaced by a function that notes.
Of the functions that run, globals, outer variables, default values and attributes of classes are noted by the names in
their code. Containers are noted as a whole.
"""

import array
import contextlib
import functools
import gc
import os
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...torch_private import FakeTensor
from .current_capture import Capture, active
from .draws import Draws
from .graph_recorder import CaptureRecorder
from .reads import CLASS, LENGTH, MISSING, MOST_ITEMS, Read, Reads, contents_of, layout_of
from .user_code import (
    LOOKUPS,
    PANDO,
    globals_in,
    is_opaque,
    is_opaque_module,
    is_users,
    loaded_names,
    names_in,
    package_of,
    user_line,
)
from .watching import watch_class

# Modes are fixed by the first compilation; the others are bound by name, or change while forward is recorded.
_NOT_NOTED = {"training", "_parameters", "_buffers", "_compiled_call_impl"}
_NOT_NOTED |= {"_flat_weights", "_flat_weight_refs"}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
# Methods, partial functions and wrappers, and their attributes, which can't be set or are seldom set.
_CACHED = type(functools.cache(len))
_WRAPPERS = (types.MethodType, staticmethod, classmethod, partial, functools.partialmethod, property, _CACHED)
_PARTS_OF_FUNCTIONS = ("__func__", "__self__", "func", "args", "keywords", "fget", "__wrapped__")
_MUTABLE = {bytearray: bytes, memoryview: bytes, array.array: bytes, set: frozenset}  # compared as the other
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_READ_ENVIRONMENT = type(os.environ).__getitem__.__code__
_DEFAULTS = "the default values of"


class Noting(TorchFunctionMode):
    """A function mode that notes the reads of a forward. torch's own functions read nothing of the user's, and run
    without the profile function that sees which functions are called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.reads = Reads()
        self.lines: dict[str, str] = {}  # by path, the user's line that sets a value after it was read
        self.draws = Draws()
        self._capture: Capture | None = None
        self._known: dict[int, tuple[Any, str]] = {id(m): (m, name) for name, m in module.named_modules()}
        self._done: set[tuple[int, Any]] = set()  # (id of a known object, name) that was read or written
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}  # that were read
        self._ran: dict[types.CodeType, set[Any]] = {}  # with the classes of their first argument
        self._scopes: list[tuple[dict[str, Any], frozenset[str]]] = []  # globals and names of the functions
        self._classes: dict[type, frozenset[str]] = {}  # that were met, with the names of their attributes
        self._new_classes: list[type] = []
        self._module_class = type("WatchedModule", (types.ModuleType,), {})
        self._tensors: list[tuple[Tensor, Read]] = []
        self._containers: list[tuple[str, int, int]] = []  # path, and the range of the container's reads
        self._unknown: list[types.CodeType] = []  # of functions that ran and were not read
        self._undo = contextlib.ExitStack()
        self._on_event = self._note_event

    @contextlib.contextmanager
    def of(self, capture: Capture) -> Iterator[None]:
        """Note the reads of the body, the forward of a capture."""
        self._capture = capture
        profiles = sys.getprofile() is None  # a profiler of the program's stays
        with self._undo:
            self._watch_class(nn.Module)
            self.note_functions([hook for hook, _ in capture.stand_ins.hooks], type(None))
            for name, real, _ in capture.stand_ins.members:  # stand-ins have the same attributes
                self._note_items(vars(real), name, ".")
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
        if any(names & LOOKUPS for _, names in self._scopes):
            for scope, names in self._scopes:
                self._note_names(scope, names)
        self._note_new_classes()
        keys = {id(value): key for key, value in recorder.constants.items()}
        contents = set(map(id, recorder.values_read))
        returned = set(map(id, self._capture.returned)) if self._capture is not None else ()
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
            elif id(value) in returned:  # the template has this tensor
                read.get, read.value = (lambda find=find: id(find())), id(value)
            elif recorder.stand_in_of(value) is value:  # not used, but perhaps compared with None
                read.get, read.value = (lambda find=find: type(find())), type(value)
        inner = {value for code in self._ran for value in code.co_consts if isinstance(value, types.CodeType)}
        unknown = [code for code in self._unknown if code not in inner]  # not made by forward itself
        for function in gc.get_referrers(*unknown) if unknown else ():
            if isinstance(function, types.FunctionType):
                self._note_variables(function)
        self.draws.finish(self._ran)
        return self.reads

    def containers(self) -> list[tuple[Any, str]]:
        """Return the containers that forward has read, with their paths, without default values of arguments."""
        known = [pair for pair in self._known.values() if isinstance(pair[0], dict | list | deque)]
        return [(value, path) for value, path in known if not path.startswith(_DEFAULTS)]

    # ---- attributes ----------------------------------------------------------------------------------------

    def _watch_class(self, kind: type) -> bool:
        return watch_class(kind, self, self._undo)

    def is_noting(self) -> bool:
        """Return whether the calling code runs in the forward that is recorded."""
        return active.get() is self._capture

    def after_read(self, owner: Any, name: str, value: Any, is_plain: bool) -> None:
        """Note that an attribute is `value`. `is_plain`: the class has no `__getattribute__` of its own."""
        if (known := self._known.get(id(owner))) is None:
            return
        if name == "__dict__":
            # Of modules torch reads it often.
            if not isinstance(owner, nn.Module) or is_users(sys._getframe(2).f_code.co_filename):
                self._note_items(value, known[1], ".")
        elif (id(owner), name) not in self._done and name not in _NOT_NOTED and not name.startswith("__"):
            self._note_attribute(owner, name, value, is_plain, f"{known[1]}.{name}".lstrip("."))

    def before_write(self, owner: Any, name: str, value: Any) -> None:
        """Note the user's line that sets an attribute that was read, and an attribute of a layer that is set. One that
        was read and is set to itself is left as it is."""
        if (known := self._known.get(id(owner))) is not None:
            is_read = (id(owner), name) in self._done
            if is_read and isinstance(owner, nn.Module) and vars(owner).get(name, MISSING) is value:
                return
            path = f"{known[1]}.{name}".lstrip(".")
            if is_read:
                self.lines.setdefault(path, user_line())
            self._done.add((id(owner), name))
            if isinstance(owner, nn.Module) and name not in _NOT_NOTED and self._capture is not None:
                self._capture.written[path] = vars(owner), name

    def _watch_module(self, module: types.ModuleType) -> None:
        """Note reads of a module's attributes, until the end."""
        if is_opaque_module(vars(module)) or id(module) in self._known:
            return
        self._known[id(module)] = module, module.__name__
        if type(module) is types.ModuleType:
            module.__class__ = self._module_class
            self._undo.callback(setattr, module, "__class__", types.ModuleType)
        self._watch_class(type(module))

    def _note_attribute(self, owner: Any, name: str, value: Any, is_plain: bool, path: str) -> None:
        """Note an attribute that was neither read nor written before."""
        if package_of(value) in PANDO or isinstance(value, FakeTensor):
            return
        own: dict[str, Any] = {}
        with contextlib.suppress(AttributeError):  # it has slots
            own = object.__getattribute__(owner, "__dict__")
        shelves = [own]
        if isinstance(owner, nn.Module):
            if name in vars(nn.Module) and name != "forward":
                return
            if value is MISSING:  # `__getattr__` looks there
                shelves += [own["_modules"], own["_buffers"], own["_parameters"]]
        self._done.add((id(owner), name))
        if (id(owner), CLASS) not in self._done and not isinstance(owner, types.ModuleType):
            self._done.add((id(owner), CLASS))
            what = f"the class of {self._known[id(owner)][1] or 'the model'}"
            self.reads.all.append(Read(what, "", owner, CLASS, type(owner)))
        for shelf in shelves:
            if name in shelf:
                if name in _HOOKS and not shelf[name]:  # of most layers; the dictionary is never replaced
                    self.reads.all.append(Read(path, "", shelf[name], LENGTH, ()))
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

    def _note_class_value(self, kind: type) -> None:
        """Note the attributes of a class that functions name, which have run or will run."""
        if kind in self._classes or is_opaque(kind):
            return
        own = kind.__mro__[: next(n for n, base in enumerate(kind.__mro__) if base in (nn.Module, object))]
        names = frozenset(name for base in own for name in vars(base) if not name.startswith("__"))
        self._classes[kind] = names
        self._new_classes.append(kind)

    def _note_new_classes(self) -> None:
        while self._new_classes:
            kind = self._new_classes.pop()
            for code in list(self._ran):
                self._note_class(kind, self._classes[kind] & names_in(code), f"{kind.__name__}.")

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
        if isinstance(value, _PLAIN):
            return
        if isinstance(value, set | frozenset):
            for item in value:
                self._look_into(Read(f"an item of {path}", "", None, None, item, lambda item=item: item))
        if isinstance(value, types.ModuleType):
            self._watch_module(value)
        elif isinstance(value, type):
            self._note_class_value(value)
        elif isinstance(value, Tensor):
            self._tensors.append((value, read))
        elif freeze := _MUTABLE.get(type(value)):
            find = read.finder()
            read.get, read.value = (lambda: freeze(find())), freeze(value)
        elif isinstance(value, numpy.ndarray):
            read.get, read.value = read.finder(), value.copy()
        elif value is not MISSING and id(value) not in self._known:
            self._known[id(value)] = value, path
            self._look_into_object(value, path)

    def _look_into_object(self, value: Any, path: str) -> None:
        if not isinstance(value, nn.Module):
            self._note_class_value(type(value))
        if isinstance(value, types.FunctionType):
            self._functions.setdefault(value.__code__, []).append(value)
            if value.__code__ in self._ran:
                self._note_variables(value)
        elif isinstance(value, dict | list | tuple | deque | types.MappingProxyType):
            self._note_items(value, path)
        elif type(value) is threading.local:
            self._note_items(vars(value), path, ".")
        elif isinstance(value, weakref.ref):
            self._look_into(Read(f"{path}()", "", None, None, value(), value))
        elif isinstance(value, ContextVar):
            read = Read(path, "", value, 0, MISSING, value.get)
            read.value = read.present()
            self._add(read)
        elif self.draws.note_source(value, path):
            pass
        elif isinstance(value, nn.Module):
            pass  # its attributes are noted when they are read
        elif isinstance(value, _WRAPPERS):
            parts = [getattr(value, name) for name in _PARTS_OF_FUNCTIONS if hasattr(value, name)]
            self._note_items(tuple(parts), path)
            if isinstance(value, _CACHED):  # it may know its result, and not run
                self.note_functions([value.__wrapped__], type(None))
        elif not is_opaque(type(value)) and not self._watch_class(type(value)):
            self._note_items(getattr(value, "__dict__", {}), path, ".")

    def _note_items(self, container: Any, path: str, dot: str = "") -> None:
        """Note the items of a container."""
        where, first = user_line() if container else "", len(self.reads.all)
        self.reads.all.append(Read(path, where, container, LENGTH, contents_of(container)))
        kinds = (kind for kind in (dict, list, tuple, deque) if isinstance(container, kind))
        base: Any = next(kinds, type(container))  # a subclass may make its items at each access
        is_plain = type(container).__getitem__ is base.__getitem__
        items = base.items(container) if hasattr(base, "items") else enumerate(base.__iter__(container))
        skipped = _PLAIN if len(container) > MOST_ITEMS else ()  # `contents_of` has them
        for key, item in items:
            if isinstance(item, skipped) or (dot and key in _NOT_NOTED):
                continue
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
        if code is _READ_ENVIRONMENT and event == "call":
            key = frame.f_locals["key"]
            if (id(os.environ), key) not in self._done:
                self._done.add((id(os.environ), key))
                find = partial(os.environ.get, key, MISSING)
                self._add(Read(f"os.environ[{key!r}]", user_line(), None, None, find(), find))
        # A method that dataclasses have made has no file, but its module's globals.
        if event == "call" and is_users(code.co_filename) and not is_opaque_module(frame.f_globals):
            self._note_new_classes()
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            self.note_function(code, frame.f_globals, first if isinstance(first, type) else type(first))
        elif event == "c_call":
            self.draws.note_call(code, argument)

    def note_function(self, code: types.CodeType, scope: dict[str, Any], kind: type) -> None:
        """Note globals, outer variables and defaults of a function that runs, and attributes of the class `kind`."""
        kinds = self._ran.setdefault(code, set())
        if kind in kinds:
            return
        names = names_in(code)
        if not kinds:
            self._scopes.append((scope, names))
            self._note_names(scope, names if names & LOOKUPS else globals_in(code))
            for function in self._functions.get(code, ()):
                self._note_variables(function)
            if code not in self._functions and {*code.co_freevars} - {"__class__"}:
                self._unknown.append(code)
            for known, own in list(self._classes.items()):
                self._note_class(known, names & own, f"{known.__name__}.")
        kinds.add(kind)
        if not is_opaque(kind):
            self._note_class(kind, names, f"{kind.__name__}.")

    def note_functions(self, functions: Iterable[Any], kind: type) -> None:
        """Note what functions, or methods of the class `kind`, read that run where the profile function is off."""
        for function in functions:
            if isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename):
                self._functions.setdefault(function.__code__, []).append(function)
                self.note_function(function.__code__, function.__globals__, kind)

    def _note_names(self, scope: dict[str, Any], names: frozenset[str]) -> None:
        """Note the names that are found in a module's globals; of a class among them, its attributes."""
        for name in names & scope.keys():
            value = scope[name]
            if (id(scope), name) in self._done or package_of(value) in PANDO:
                continue
            self._done.add((id(scope), name))
            self._add(Read(name, "", scope, name, value))
            if isinstance(value, types.FunctionType):
                self._note_items(vars(value), name, ".") if vars(value) else None
        for name in names:  # imported by the function itself
            for module in (sys.modules.get(name), sys.modules.get(f"{scope.get('__package__')}.{name}")):
                if isinstance(module, types.ModuleType):
                    self._watch_module(module)

    def _note_variables(self, function: types.FunctionType) -> None:
        """Note the outer variables and default values of a function, and its attributes."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not bound yet
                find = lambda cell=cell: cell.cell_contents  # noqa: E731
                self._add(Read(name, "", cell, name, find(), find))
        for values in (function.__defaults__, function.__kwdefaults__):
            if values:
                self._note_items(values, f"{_DEFAULTS} {function.__name__}")
        if vars(function):
            self._note_items(vars(function), function.__name__, ".")
