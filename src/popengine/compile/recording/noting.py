"""Noting: find the values that a forward reads from Python while it is recorded (see `reads.py`).

`__getattribute__` of modules, and of the classes of objects that a forward reads, is replaced by a function that notes.
Of the functions that run, code, globals, outer variables, default values and attributes of classes are noted by the
names in their code. Containers are noted as a whole, without items that no function reads.
"""

import array
import contextlib
import functools
import sys
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from types import NoneType
from typing import Any

import numpy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...torch_private import FakeTensor
from .current_capture import Capture, active
from .draws import Draws
from .graph_recorder import CaptureRecorder
from .leftovers import Shelves
from .reads import MISSING, Read, Reads, layout_of
from .user_code import (
    PANDO,
    WHOLE,
    globals_in,
    is_opaque,
    is_opaque_module,
    is_users,
    names_in,
    package_of,
    user_line,
    uses_in,
)
from .watching import watch_class

# Modes are fixed by the first compilation; the others are bound by name, or change while forward is recorded.
_NOT_NOTED = {"training", "_parameters", "_buffers", "_compiled_call_impl"}
_NOT_NOTED |= {"_flat_weights", "_flat_weight_refs"}
# Parts of functions, methods, partial functions and wrappers, which can be set or have attributes.
_PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__func__", "__self__")
_PARTS += ("func", "args", "keywords", "fget", "__wrapped__")
_CACHED = type(functools.cache(len))
_WRAPPERS = (types.MethodType, staticmethod, classmethod, partial, functools.partialmethod, property, _CACHED)
# Values that change in place, and what they are compared as.
_VIEWS: dict[type, Callable[[Any], Any]] = {cls: bytes for cls in (bytearray, memoryview, array.array)}
_VIEWS |= {set: frozenset, numpy.ndarray: numpy.copy}
_CONTAINERS = (dict, list, tuple, deque, types.MappingProxyType)
_ITEM_CONTAINERS = (*_CONTAINERS, types.SimpleNamespace)  # of which all items are noted
_ITEM_READS = {len, tuple, *(cls.__getitem__ for cls in _CONTAINERS)}
_PLAIN = (bool, int, float, complex, str, bytes, NoneType)


_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
_SHELVES = [lambda m, name=name: vars(m)[name] for name in ("_modules", "_buffers", "_parameters")]


def _identity(value: Any) -> Any:
    return value


def _dictionary_of(value: Any) -> dict[str, Any]:
    return object.__getattribute__(value, "__dict__")


class Noting(TorchFunctionMode):
    """A function mode that notes the reads of a forward. torch's own functions read nothing of the user's, and run
    without the profile function that notes calls."""

    def __init__(self, module: nn.Module, shelves: Shelves) -> None:
        """`shelves` gets the globals, and the attributes of classes and of other modules, that forward may set."""
        super().__init__()
        self._shelves = shelves
        self.reads = Reads()
        self.lines: dict[str, str] = {}  # by path, the user's line that sets a value after it was read
        self.draws = Draws()
        self._capture: Capture | None = None
        # Objects that forward has reached, by id, with their paths, and the reads that have found them.
        self._reached: dict[int, tuple[Any, str, Read | None]] = {
            id(m): (m, name, None) for name, m in module.named_modules()
        }
        self._layers = set(self._reached)
        self._accessed: set[tuple[int, Any]] = set()  # (id of a known object, name) that was read or written
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}  # that were read
        self._ran: dict[types.CodeType, None] = {}
        self._names: frozenset[str] = frozenset()  # in the functions that ran
        self._classes: dict[type, frozenset[str]] = {}  # that were met, with the names of their attributes
        self._module_class = type("WatchedModule", (types.ModuleType,), {})
        self._tensors: list[Read] = []
        self._undo = contextlib.ExitStack()
        self._on_event: Any = None  # the profile function
        self._caches: list[tuple[Any, Any]] = []  # of functions, with their `cache_info()` before

    @contextlib.contextmanager
    def note_reads(self, capture: Capture, arguments: Iterable[tuple[Any, str]]) -> Iterator[None]:
        """Note the reads of the body, the forward of a capture. `arguments`: objects that are passed to forward, with
        their paths."""
        self._capture = capture
        with self._undo:
            watch_class(nn.Module, self, self._undo)
            for value, path in (*arguments, *capture.stand_ins.hooks):
                self._add_read(Read(path, _identity, value))
            self.note_functions(hook for hook, _ in capture.stand_ins.hooks)
            for name, real, _ in capture.stand_ins.members:  # stand-ins have the same attributes
                self._note_items(vars(real), name, None, dot=".")
            self._undo.callback(self._clear_caches)
            with self:
                if sys.getprofile() is None:  # a profiler of the program's stays
                    self._on_event = self._note_event
                    self._undo.callback(sys.setprofile, None)
                    sys.setprofile(self._on_event)
                yield

    def _clear_caches(self) -> None:
        """Clear the caches of functions that have new results, which may hold fake tensors."""
        for cached, info in self._caches:
            if cached.cache_info() != info:
                cached.cache_clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._on_event is None or sys.getprofile() is None:
            return func(*args, **(kwargs or {}))
        sys.setprofile(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(self._on_event)

    def finish(self, recorder: CaptureRecorder, returned: Iterable[Tensor]) -> Reads:
        """Return the reads. Plain tensors that are constants of the graph are bound by its keys, unless forward has
        read their values. `returned`: tensors that forward returns as they are."""
        self._drop_unused_items()
        owners = {read.parent for read in self.reads.all if read.get is not type}
        places = Counter(id(read.value) for read in self.reads.all)
        for read in self.reads.all:  # an object in two places is no content of one
            read.is_content &= read in owners and places[id(read.value)] == 1
        keys = {id(value): key for key, value in recorder.constants.items()}
        contents, as_they_are = set(map(id, recorder.values_read)), set(map(id, returned))
        for read in self._tensors:
            value = read.value
            if id(value) in contents:
                read.view = lambda value: value.detach().clone()
            elif id(value) in keys:
                self.reads.tensors[keys[id(value)]] = read.unviewed
                read.view = layout_of
            elif id(value) in as_they_are:  # the template has this tensor
                read.view = id
            elif recorder.stand_in_of(value) is value:  # not used, but perhaps compared with None
                read.view = type
            if read.view is not None:
                read.value = read.view(value)  # as it was noted: forward may have replaced it
        self.draws.finish(self._ran)
        return self.reads

    def _drop_unused_items(self) -> None:
        """Leave out items of dictionaries and namespaces that no function reads, such as `history` beside
        `self.table["scale"]`, and all items of lists that functions only append to."""
        uses: defaultdict[str, set[Any]] = defaultdict(set)
        for code in self._ran:
            for name, used in uses_in(code).items():
                uses[name] |= used
        kept, unused = list[Read](), set[Read]()
        for read in self.reads.all:
            used, parent = {WHOLE}, read.parent
            if parent is not None and isinstance(parent.value, _ITEM_CONTAINERS):
                used = uses.get(parent.path.rpartition(".")[2], used)
            if read.parent in unused or (not used and read.get in _ITEM_READS):
                unused.add(read)
            elif WHOLE in used or read.get not in _ITEM_READS or not isinstance(read.args[0], dict):
                kept.append(read)
            elif read.get is dict.__getitem__:
                (kept.append if read.args[1] in used else unused.add)(read)
            else:  # in place of all keys, the used ones that were absent
                part = partial(Read, parent=read.parent, locate=read.locate)
                for key in used.difference(read.value if read.get is tuple else ()):
                    kept.append(part(f"{read.path}[{key!r}]", dict.get, read.args[0], key, MISSING))
                    kept[-1].value = MISSING
        self.reads.all, self._tensors = kept, [read for read in self._tensors if read not in unused]

    def containers(self) -> list[tuple[Any, str]]:
        """Return the containers that forward has read, with their paths, without default values of arguments."""
        pairs = [pair[:2] for pair in self._reached.values() if isinstance(pair[0], dict | list | deque)]
        return [
            (value, path)
            for value, path in pairs
            if "__defaults__" not in path and "__kwdefaults__" not in path
        ]

    # ---- attributes ----------------------------------------------------------------------------------------

    def is_noting(self) -> bool:
        """Return whether the calling code runs in the forward that is recorded."""
        return active.get() is self._capture

    def after_read(self, owner: Any, name: str, value: Any, is_plain: bool) -> None:
        """Note that an attribute is `value`. `is_plain`: the class has no `__getattribute__` of its own."""
        reached = self._reached.get(id(owner))
        if reached is None or name in _NOT_NOTED or (id(owner), name) in self._accessed:
            return
        if name[:2] != "__":
            self._note_attribute(owner, name, value, is_plain, *reached[1:])
        elif name == "__dict__" and not isinstance(owner, nn.Module):  # of modules torch reads it often
            self._accessed.add((id(owner), name))
            self._note_items(value, *reached[1:], _dictionary_of, ".")

    def before_write(self, owner: Any, name: str, value: Any) -> None:
        """Note the user's line that sets an attribute that was read, and an attribute of a layer that is set. One that
        was read and is set to itself is left as it is."""
        is_other = isinstance(owner, nn.Module) and id(owner) not in self._layers
        if is_other and id(vars(owner)) not in self._shelves:  # a layer that forward makes, mostly
            path = f"{user_line()}: {type(owner).__name__}"
            for shelf in (vars(owner), owner._parameters, owner._buffers):
                self._shelves.add(shelf, shelf, path)
        if (reached := self._reached.get(id(owner))) is not None:
            is_read = (id(owner), name) in self._accessed
            if is_read and isinstance(owner, nn.Module) and vars(owner).get(name, MISSING) is value:
                return
            path = f"{reached[1]}.{name}".lstrip(".")
            if is_read:
                self.lines.setdefault(path, user_line())
            self._accessed.add((id(owner), name))
            if isinstance(owner, nn.Module) and name not in _NOT_NOTED and self._capture is not None:
                self._capture.written[path] = _dictionary_of(owner), name

    def _watch_module(self, module: types.ModuleType) -> None:
        """Note reads of a module's attributes, until the end."""
        if is_opaque_module(vars(module)) or id(module) in self._reached:
            return
        self._reached[id(module)] = module, module.__name__, None
        if type(module) is types.ModuleType:
            module.__class__ = self._module_class
            self._undo.callback(setattr, module, "__class__", types.ModuleType)
        watch_class(type(module), self, self._undo)

    def _note_attribute(
        self, owner: Any, name: str, value: Any, is_plain: bool, path: str, parent: Read | None
    ) -> None:
        """Note an attribute that was neither read nor written before."""
        if package_of(value) in PANDO or isinstance(value, FakeTensor):
            return
        if isinstance(owner, nn.Module) and name in vars(nn.Module) and name != "forward":
            return
        self._accessed.add((id(owner), name))
        note = partial(Read, f"{path}.{name}".lstrip("."), parent=parent)
        if (id(owner), type) not in self._accessed and not isinstance(owner, types.ModuleType):
            self._accessed.add((id(owner), type))
            self.reads.all.append(Read(path or "the model", type, owner, parent=parent, locate=_identity))
        shelves = ()
        with contextlib.suppress(AttributeError):  # it has slots
            attributes = _dictionary_of(owner)
            # Most layers have no hooks, and the dictionary is never replaced.
            if name in _HOOKS and not attributes.get(name, True):
                self.reads.all.append(note(len, attributes[name], locate=lambda m: vars(m)[name]))
                return
            shelves = (_dictionary_of, *(_SHELVES if isinstance(owner, nn.Module) else ()))
        self._note_class(type(owner), {name})
        in_class = next((vars(b)[name] for b in _users_bases(type(owner)) if name in vars(b)), MISSING)
        containing = [locate for locate in shelves if name in locate(owner)][:1]
        for locate in containing or (shelves if value is MISSING else shelves[:1]):
            self._add_read(note(dict.get, locate(owner), name, MISSING, locate=locate))
            if name in locate(owner):
                return
        is_slot = isinstance(in_class, types.MemberDescriptorType)
        is_of_object = is_slot or not (hasattr(in_class, "__get__") or (is_plain and in_class is value))
        if value is not MISSING and is_of_object:
            # From a slot, or by a `__getattribute__` of its own.
            self._add_read(note(getattr, owner, name, locate=_identity))

    def _note_class(self, cls: type, names: Iterable[str]) -> None:
        """Note these attributes of a class and its bases, also for `super()`."""
        for name, base in product(names, _users_bases(cls)):
            if (id(base), name) not in self._accessed:
                self._accessed.add((id(base), name))
                path, get = f"{cls.__name__}.{name}", types.MappingProxyType.get
                self._add_read(Read(path, get, vars(base), name, MISSING))

    def _note_class_value(self, cls: type) -> None:
        """Note the attributes of a class that functions name, which have run or will run."""
        if cls not in self._classes and not is_opaque(cls):
            attributes: dict[str, Any] = {}
            for base in _users_bases(cls):
                self._shelves.add(base, vars(base), base.__name__)
                attributes |= vars(base)
            self._classes[cls] = names = frozenset(name for name in attributes if name[:2] != "__")
            methods = {n for n, f in attributes.items() if isinstance(f, types.FunctionType)} - names
            self._note_class(cls, methods | names & self._names)

    # ---- values --------------------------------------------------------------------------------------------

    def _add_read(self, read: Read) -> None:
        """Note a read and the content of its value: the items of a container, and the attributes of an object once they
        are read."""
        value = read.value
        if isinstance(value, FakeTensor) or package_of(value) in PANDO:
            return
        self.reads.all.append(read)
        if value is MISSING or type(value) in _PLAIN:
            return
        if isinstance(value, types.ModuleType):
            self._watch_module(value)
        elif isinstance(value, type):
            self._note_class_value(value)
        elif isinstance(value, Tensor):
            self._tensors.append(read)
            if vars(value):
                self._note_items(vars(value), read.path, read, vars, ".")
        elif id(value) not in self._reached:
            self._reached[id(value)] = value, read.path, read
            self._note_content(value, read)
        elif self._reached[id(value)][2] is None:  # a layer
            self._reached[id(value)] = value, self._reached[id(value)][1], read
            read.is_content = _is_without_weights(value)

    def _note_content(self, value: Any, read: Read) -> None:
        """Note the content of the value of a read."""
        cls = type(value)
        view = next((view for viewed, view in _VIEWS.items() if isinstance(value, viewed)), None)
        read.is_content = view is not None or isinstance(value, (*_ITEM_CONTAINERS, *_WRAPPERS))
        if view is not None:
            self.reads.all.append(Read(read.path, _identity, value, parent=read, locate=_identity, view=view))
            for item in value if isinstance(value, set) else ():
                self._add_read(Read(f"an item of {read.path}", _identity, item, parent=read))
        elif isinstance(value, _CONTAINERS):
            self._note_items(value, read.path, read)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
            if vars(value):
                self._note_items(vars(value), value.__name__, read, vars, ".")
        elif isinstance(value, _WRAPPERS):
            self._note_parts(value, read)
            if isinstance(value, _CACHED):  # it may return a cached result, and not run
                self._caches.append((value, value.cache_info()))
                self.note_functions([value.__wrapped__])
        elif isinstance(value, nn.Module):
            read.is_content = _is_without_weights(value)
        elif not self.draws.note_generator(value) and not is_opaque(cls):
            read.is_content |= not isinstance(value, _PLAIN)
        if not is_opaque(cls):
            self._note_class_value(cls)
            if not watch_class(cls, self, self._undo) and hasattr(value, "__dict__"):
                self._note_items(_dictionary_of(value), read.path, read, _dictionary_of, ".")

    def _note_items(
        self,
        container: Any,
        path: str,
        parent: Read | None,
        locate: Callable[[Any], Any] = _identity,
        dot: str = "",
    ) -> None:
        """Note the items of a container, of the value of the read `parent`; `locate` finds it there."""
        part = partial(Read, path, parent=parent, locate=locate, where=user_line() if container else "")
        is_mapping = isinstance(container, dict | types.MappingProxyType)
        self.reads.all.append(part(tuple if is_mapping and container else len, container))
        # A subclass may make its items at each access.
        base: Any = next(cls for cls in _CONTAINERS if isinstance(container, cls))
        items = base.items(container) if is_mapping else enumerate(base.__iter__(container))
        for key, _ in items:
            if not (dot and key in _NOT_NOTED):
                name = f"{path}.{key}".lstrip(".") if dot else f"{path}[{key!r}]"
                self._add_read(Read(name, base.__getitem__, container, key, parent=parent, locate=locate))

    # ---- functions -----------------------------------------------------------------------------------------

    def _note_event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        """The profile function: note the reads of the functions that run, and calls of clocks and random number
        generators."""
        code = frame.f_code
        if active.get() is not self._capture:
            return
        # A method that dataclasses have made has no file, but its module's globals.
        if event == "call" and is_users(code.co_filename) and not is_opaque_module(frame.f_globals):
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            self.note_function(code, frame.f_globals, first if isinstance(first, type) else type(first))
            if isinstance(first, type):
                self.note_function(code, frame.f_globals, type(first))
        elif event == "c_call":
            self.draws.note_call(code, argument)

    def note_function(self, code: types.CodeType, scope: dict[str, Any], cls: type = NoneType) -> None:
        """Note the reads of a function that runs, and the attributes of the class `cls` of its first argument."""
        self._note_class_value(cls)
        if code in self._ran:
            return
        self._ran[code] = None
        self._shelves.add(scope, scope, str(scope.get("__name__")))
        self._note_names(scope, globals_in(code))
        new = names_in(code) - self._names
        self._names |= new
        for met_class, attributes in list(self._classes.items()):
            self._note_class(met_class, new & attributes)
        for function in self._functions.get(code, ()):
            self._note_function_parts(function)

    def note_functions(self, functions: Iterable[Any], cls: type = NoneType) -> None:
        """Note the reads of functions, or of methods of the class `cls`, that run while the profile function is off."""
        for function in functions:
            if isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename):
                self._add_function(function)
                self.note_function(function.__code__, function.__globals__, cls)

    def _add_function(self, function: Any) -> None:
        """Note a function that may run, and the functions that it wraps."""
        while isinstance(function, types.FunctionType):
            self._functions.setdefault(function.__code__, []).append(function)
            if function.__code__ in self._ran:
                self._note_function_parts(function)
            function = getattr(function, "__wrapped__", None)

    def _note_names(self, scope: dict[str, Any], names: frozenset[str]) -> None:
        """Note the names that are found in a module's globals."""
        for name in names & scope.keys():
            if (id(scope), name) not in self._accessed:
                self._accessed.add((id(scope), name))
                self._add_read(Read(name, dict.get, scope, name, MISSING))
        for name in names:  # imported by the function itself
            for module in (sys.modules.get(name), sys.modules.get(f"{scope.get('__package__')}.{name}")):
                if isinstance(module, types.ModuleType):
                    self._watch_module(module)

    def _note_function_parts(self, function: types.FunctionType) -> None:
        """Note the code, outer variables and default values of a function, and its attributes."""
        *_, read = self._reached.get(id(function), (None,))
        if read is not None:
            read.is_content = True
        self._note_parts(function, read)
        for index, (name, cell) in enumerate(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        ):
            variable = Read(
                name,
                getattr,
                cell,
                "cell_contents",
                parent=read,
                locate=lambda f, index=index: f.__closure__[index],
            )
            if variable.value is not MISSING:  # bound
                self._add_read(variable)

    def _note_parts(self, value: Any, read: Read | None) -> None:
        for name in _PARTS:
            if hasattr(value, name):
                path = f"{value.__name__}.{name}" if read is None else f"{read.path}.{name}"
                self._add_read(Read(path, getattr, value, name, parent=read, locate=_identity))


def _users_bases(cls: type) -> list[type]:
    """Return a class and its bases, without nn.Module and object."""
    return [base for base in cls.__mro__ if base not in (nn.Module, object)]


def _is_without_weights(layer: nn.Module) -> bool:
    attributes = _dictionary_of(layer)
    return not (attributes["_modules"] or attributes["_parameters"] or attributes["_buffers"])
