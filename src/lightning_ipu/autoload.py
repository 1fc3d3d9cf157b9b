"""How `accelerator="ipu"` gets into Lightning without an import: torch calls `install` at the end of `import torch`.

A finder waits for a few of Lightning's modules and adds our names to each after it has run: it registers the
accelerator and the strategy, answers for classes that Lightning no longer has, and wraps the one method that picks
strategies. Nothing is loaded until it is used; only the standard library is imported here. Where Lightning has IPU
classes of its own (1.x, 2.0) nothing is done. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches the call off.

Cost, measured: about 1.3 ms at the end of `import torch` (13 ms the first time, without bytecode), and 0.05
microseconds for each module that is imported later.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from typing import Any

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_CLASSES = {
    "strategies": ("IPUStrategy",),
    "accelerators": ("IPUAccelerator",),
    "plugins": ("IPUPrecision", "IPUPrecisionPlugin"),
    "plugins.precision": ("IPUPrecision", "IPUPrecisionPlugin"),
}
_OLD_MODULES = ("strategies.ipu", "accelerators.ipu", "plugins.precision.ipu")
_CONNECTOR = "trainer.connectors.accelerator_connector"


def install() -> None:
    """Add ipus to Lightning, whether it is imported before or after this call. Never raises: a failure is a warning."""
    try:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())  # pyright: ignore[reportArgumentType]
        for name in _PATCHED:
            if name in sys.modules:
                _patch(sys.modules[name])
    except Exception as error:
        warnings.warn(f"Pando can't add ipus to Lightning: {error}", stacklevel=2)


def _patch(module: types.ModuleType) -> None:
    """Add Pando's names to a module of Lightning, once."""
    if module.__dict__.get("_pando_patched"):
        return
    module.__dict__["_pando_patched"] = True
    package, part = _PATCHED[module.__name__]
    if part == _CONNECTOR:
        _wrap_connector(package, module)
        return
    names = _CLASSES[part]
    if any(name in module.__dict__ for name in names):
        return  # an older Lightning, which has its own
    _add_lazy_classes(package, module, names)
    if part == "strategies":
        module.StrategyRegistry.register(
            "ipu_strategy", functools.partial(_build, package, "IPUStrategy"), description="Pando's ipus"
        )
    elif part == "accelerators":
        module.AcceleratorRegistry.register("ipu", _LazyAccelerator(package), description="Pando's ipus")


def _add_lazy_classes(package: str, module: types.ModuleType, names: tuple[str, ...]) -> None:
    """Add classes to a module through its `__getattr__` (PEP 562); they are built at their first use."""
    before = module.__dict__.get("__getattr__")

    def get_class(name: str) -> Any:
        if name in names:
            return _classes(package)[name]
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__dict__["__getattr__"] = get_class


def _classes(package: str) -> dict[str, type]:
    return importlib.import_module("lightning_ipu.family").classes(package)


def _build(package: str, name: str, **arguments: Any) -> Any:
    return _classes(package)[name](**arguments)


class _LazyAccelerator:
    """The registry's entry for the accelerator: builds the class at its first use."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __call__(self, **arguments: Any) -> Any:
        return _build(self._package, "IPUAccelerator", **arguments)

    @staticmethod
    def is_available() -> bool:
        return True


def _wrap_connector(package: str, module: types.ModuleType) -> None:
    """Wrap the method that picks strategies: Pando's accelerator or strategy alone selects both, and the precision."""
    if f"{package}.strategies.ipu" in sys.modules and "IPUStrategy" in vars(
        sys.modules[f"{package}.strategies"]
    ):
        return  # an older Lightning chooses by itself
    connector = getattr(module, "_AcceleratorConnector", None)
    original = getattr(connector, "_check_config_and_set_final_flags", None)
    if connector is None or original is None:
        warnings.warn(
            'This Lightning is too new for `accelerator="ipu"` alone: write Trainer(accelerator="ipu",'
            ' strategy=IPUStrategy(), plugins=IPUPrecision("32-true")), with both from lightning_graphcore',
            stacklevel=2,
        )
        return

    @functools.wraps(original)
    def with_ipus(self: Any, *args: Any, **kwargs: Any) -> Any:
        for flag in kwargs.values():
            if _is_pandos(flag) and type(flag).lightning.name != package:
                raise TypeError(
                    f"{type(flag).__name__} of `{type(flag).lightning.name}` was given to the Trainer of `{package}`:"
                    f" import it from there, `from {package}.strategies import IPUStrategy`"
                )
        result = original(self, *args, **kwargs)
        if _is_pandos(self._accelerator_flag, "ipu") or _is_pandos(self._strategy_flag, "ipu_strategy"):
            if self._accelerator_flag == "auto":
                self._accelerator_flag = "ipu"
            if self._strategy_flag == "auto":
                self._strategy_flag = "ipu_strategy"
            if self._precision_plugin_flag is None:
                self._precision_plugin_flag = _classes(package)["IPUPrecision"](self._precision_flag)
        return result

    connector._check_config_and_set_final_flags = with_ipus


def _is_pandos(flag: Any, name: str = "") -> bool:
    """Return whether a Trainer's argument is an object of Pando's classes, or the registered `name` of one."""
    return flag == name if isinstance(flag, str) else getattr(type(flag), "_is_pandos", False)


# ---- the finder ------------------------------------------------------------------------------------------

_PATCHED = {
    f"{package}.{part}": (package, part)
    for package in PACKAGES
    for part in (*_CLASSES, *_OLD_MODULES, _CONNECTOR)
}


class _Finder:
    """A meta path finder that has the modules of `_PATCHED` loaded by a `_PatchingLoader`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _PATCHED:
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self and spec is None and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
        package, part = _PATCHED[name]
        if spec is None and part in _OLD_MODULES:
            return ModuleSpec(name, _OldModule(package, _CLASSES[part.removesuffix(".ipu")]))  # pyright: ignore
        if spec is not None and spec.loader is not None and part not in _OLD_MODULES:
            spec.loader = _PatchingLoader(spec.loader)  # pyright: ignore[reportAttributeAccessIssue]
        return spec


class _PatchingLoader:
    """Loads a module with its own loader, then patches the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            _patch(module)
        except Exception as error:
            warnings.warn(f"Pando can't add ipus to {module.__name__}: {error}", stacklevel=2)


class _OldModule:
    """Loads `strategies.ipu`, `accelerators.ipu` and `plugins.precision.ipu`, which Lightning no longer has."""

    def __init__(self, package: str, names: tuple[str, ...]) -> None:
        self._package, self._names = package, names

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__doc__ = "Pando's classes, under the module name of older Lightning releases."
        _add_lazy_classes(self._package, module, self._names)
