"""Registers `accelerator="ipu"` with Lightning: torch calls `install` at the end of `import torch`.

If Lightning is imported later, a finder (PEP 451) calls `install` again after the import of the module that
chooses strategies. Then `install` registers the accelerator and the strategy, adds the classes that Lightning
no longer has, and wraps the method that chooses strategies. The classes are built at their first use; this
module imports the standard library only. A Lightning with IPU classes of its own (1.x, 2.0) is not changed.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` prevents torch's call.
"""

import functools
import importlib
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from typing import Any

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_CONNECTORS = {f"{package}.trainer.connectors.accelerator_connector": package for package in PACKAGES}
_CLASSES = {
    "strategies": ("IPUStrategy",),
    "accelerators": ("IPUAccelerator",),
    "plugins": ("IPUPrecision", "IPUPrecisionPlugin"),
    "plugins.precision": ("IPUPrecision", "IPUPrecisionPlugin"),
}


def install() -> None:
    """Add ipus to each imported Lightning package, and to others after their import. Warn if this fails."""
    try:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())  # pyright: ignore[reportArgumentType]
        for name, package in _CONNECTORS.items():
            if name in sys.modules:
                _patch_package(package, sys.modules[name])
    except Exception as error:
        warnings.warn(f"Pando can't add ipus to Lightning: {error}", stacklevel=2)


class _Finder:
    """A meta path finder that calls `install` after the import of a module that chooses strategies."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _CONNECTORS:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: types.ModuleType) -> None:
                execute(module)
                install()

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _patch_package(package: str, connector: types.ModuleType) -> None:
    registry = getattr(sys.modules[f"{package}.accelerators"], "AcceleratorRegistry", None)
    if registry is None or "ipu" in registry:
        return  # an older Lightning with its own IPU classes, or patched already
    for path, names in _CLASSES.items():
        module = sys.modules[f"{package}.{path}"]
        _add_lazy_classes(package, module, names)
        if path != "plugins":  # older releases had a module for each kind of class
            old = types.ModuleType(f"{module.__name__}.ipu")
            _add_lazy_classes(package, old, names)
            sys.modules[old.__name__] = vars(module)["ipu"] = old

    def build(name: str, **arguments: Any) -> Any:
        return _import_classes(package)[name](**arguments)

    accelerator: Any = functools.partial(build, "IPUAccelerator")
    accelerator.is_available = lambda: True  # an error of Lightning lists the accelerators that are available
    registry.register("ipu", accelerator, description="Pando's ipus")
    strategy = functools.partial(build, "IPUStrategy")
    strategies = sys.modules[f"{package}.strategies"]
    strategies.StrategyRegistry.register("ipu_strategy", strategy, description="Pando's ipus")
    _wrap_connector(package, connector)


def _add_lazy_classes(package: str, module: types.ModuleType, names: tuple[str, ...]) -> None:
    """Replace a module's `__getattr__` (PEP 562) by one that builds the classes `names` at first use."""
    before = vars(module).get("__getattr__")

    def get_class(name: str) -> Any:
        if name in names:
            return _import_classes(package)[name]
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = get_class


def _import_classes(package: str) -> dict[str, type]:
    return importlib.import_module("lightning_ipu.family").build_classes(package)


def _wrap_connector(package: str, module: types.ModuleType) -> None:
    """Wrap Lightning's check of a Trainer's arguments: if either Pando's accelerator or Pando's strategy is
    given, the other one and Pando's precision become the defaults."""
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
        result = original(self, *args, **kwargs)
        if _is_of_pando(self._accelerator_flag, "ipu") or _is_of_pando(self._strategy_flag, "ipu_strategy"):
            if self._accelerator_flag == "auto":
                self._accelerator_flag = "ipu"
            if self._strategy_flag == "auto":
                self._strategy_flag = "ipu_strategy"
            if self._precision_plugin_flag is None:
                self._precision_plugin_flag = _import_classes(package)["IPUPrecision"](self._precision_flag)
        return result

    connector._check_config_and_set_final_flags = with_ipus


def _is_of_pando(flag: Any, name: str = "") -> bool:
    """Return whether an argument of a Trainer is an instance of a class of Pando, or the text `name`."""
    return flag == name if isinstance(flag, str) else getattr(type(flag), "_is_of_pando", False)
