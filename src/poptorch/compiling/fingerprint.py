"""One number for all that a capture reads: equal in every process for the same model, options and inputs."""

import enum
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from popengine.settings import Settings

from ..executor.arguments import Call
from ..nested_values import describe, tensors_of
from ..version import __version__

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_HERE = Path(__file__).parents[2]
_LIBRARIES = tuple(
    {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(torch.__file__).parents[1])}
)


class Unstable(Exception):
    """Something has no description that is the same in another process."""


def fingerprint(model: nn.Module, call: Call, options: Any, settings: Settings) -> str:
    """A name for what compiling this model for these arguments gives.

    Raises:
        Unstable: an attribute of the model, or an argument, can't be described
    """
    digest = _Digest()
    digest.add((__version__, torch.__version__, sys.version, _own_source(), torch.get_default_dtype()))
    digest.add(repr(settings))
    digest.add(options)
    for name, value in call.bound.arguments.items():
        shapes = [(tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in tensors_of(value)]
        digest.add((name, [describe(value), shapes]))
    digest.add(model)
    digest.add(sorted(_sources(digest.modules)))
    return digest.hexdigest()


class _Digest:
    """Walks values and hashes what it finds; each object once."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no id is used twice
        self.modules: set[str] = set()  # of the classes and functions that were met

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:32]

    def add(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._say(type(value).__name__, repr(value))
            return
        if isinstance(value, type):
            self._class(value)
            return
        if id(value) in self._seen:
            self._say("again", str(self._seen[id(value)]))
            return
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        self._object(value)

    def _say(self, *words: str) -> None:
        for word in words:
            data = word.encode()
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def _object(self, value: Any) -> None:
        if isinstance(value, enum.Enum):
            self._say("enum", type(value).__qualname__, value.name)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._say("method")
            self._items((value.__func__, value.__self__))
        elif isinstance(value, types.BuiltinFunctionType | types.ModuleType):
            self._say("builtin", value.__name__)
        elif isinstance(value, Mapping):
            self._class(type(value))
            self._items([item for pair in value.items() for item in pair])
        elif isinstance(value, set | frozenset):
            self._say("set")
            self._items(sorted(value, key=repr))
        elif isinstance(value, list | tuple):
            self._class(type(value))
            self._items(value)
        else:
            self._any(value)

    def _items(self, values: Iterable[Any]) -> None:
        values = list(values)
        self._say("items", str(len(values)))
        for value in values:
            self.add(value)

    def _tensor(self, value: Tensor) -> None:
        """A constant of the model: its contents."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            plain = value.detach().cpu().contiguous()
            self._say("tensor", str(plain.dtype), str(tuple(plain.shape)))
            self._hash.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())

    def _module(self, module: nn.Module) -> None:
        """Its class and attributes; of parameters and buffers only what they look like."""
        self._class(type(module))
        with torch._C.DisableTorchFunctionSubclass():
            for kind in ("_parameters", "_buffers"):
                for name, weight in vars(module)[kind].items():
                    self._say(kind, name)
                    if weight is None or id(weight) in self._seen:
                        self._say(str((weight is None and "none") or self._seen[id(weight)]))
                        continue
                    self._seen[id(weight)] = len(self._seen)
                    self._say(str(weight.dtype), str(tuple(weight.shape)), str(weight.stride()))
                    self._say(str(weight.requires_grad))
        attributes = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers")}
        for name in sorted(attributes):
            self._say(name)
            try:
                self.add(attributes[name])
            except Unstable as error:
                raise Unstable(f"{type(module).__name__}.{name}: {error}") from None

    def _function(self, function: types.FunctionType) -> None:
        self.modules.add(function.__module__)
        self._say("function", function.__qualname__)
        self._code(function.__code__)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        self._items([function.__defaults__, function.__kwdefaults__, *cells])
        for name in sorted(set(function.__code__.co_names)):  # settings that are global variables
            value = function.__globals__.get(name)
            if isinstance(value, _PLAIN) and value is not None:
                self._say(name, repr(value))

    def _code(self, code: types.CodeType) -> None:
        self._hash.update(code.co_code)
        self._say(*code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                ordered = sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
                self._say(repr(ordered))

    def _class(self, kind: type) -> None:
        """Its name and, where it is the user's, its functions: all that its instances may run."""
        for base in kind.__mro__:
            self._say("class", base.__module__, base.__qualname__)
            if id(base) in self._seen or _is_library(base.__module__):
                continue
            self._seen[id(base)] = len(self._seen)
            self.modules.add(base.__module__)
            for name, value in sorted(vars(base).items()):
                # Of static methods and properties, too.
                value = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(value, types.FunctionType):
                    self._function(value)
                elif isinstance(value, _PLAIN) and not name.startswith("__"):
                    self._say(name, repr(value))

    def _any(self, value: Any) -> None:
        self._class(type(value))
        if isinstance(value, functools.partial):
            self._items((value.func, value.args, value.keywords))
        elif hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
            names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
            self._items([item for name in names for item in (name, getattr(value, name, None))])
        else:
            raise Unstable(
                f"a {type(value).__qualname__} has no description that another process can compare"
            )


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_library(module_name: str) -> bool:
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is None:  # built in, or typed in by hand
        return module_name != "__main__"
    return file.startswith((*_LIBRARIES, str(_HERE)))


def _sources(names: set[str]) -> set[str]:
    """The hashes of the source files of these modules and of the user's modules that they mention."""
    waiting, found = set(names), {}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None or name in found or _is_library(name):
            continue
        file = getattr(module, "__file__", None)
        source = Path(file).read_bytes() if file and Path(file).exists() else b""
        found[name] = hashlib.sha256(source).hexdigest()
        for value in list(vars(module).values()):
            mentioned = (
                value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            )
            if isinstance(mentioned, str):
                waiting.add(mentioned)
    return set(found.values())


@functools.cache
def _own_source() -> str:
    """A change of this package compiles anew, also between versions."""
    files = sorted([*_HERE.glob("popengine/**/*.py"), *_HERE.glob("poptorch/**/*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
