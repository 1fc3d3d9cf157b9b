"""Registers `accelerator="ipu"` with an imported Lightning (`popengine.import_hook` says when).

`add_ipus` registers the accelerator and the strategy, adds the classes that Lightning no longer has, and wraps the
method that chooses strategies. The classes are built at their first use; this module imports the standard library
only. A Lightning with IPU classes of its own (1.x, 2.0) is not changed.
"""

import functools
import importlib
import sys
import types
import warnings
from typing import Any

from popengine.import_hook import CONNECTORS, install

__all__ = ["PACKAGES", "add_ipus", "install"]  # `install`: older installations have it as torch's entry point

PACKAGES = tuple(CONNECTORS.values())
_CLASSES = {
    "strategies": ("IPUStrategy",),
    "accelerators": ("IPUAccelerator",),
    "plugins": ("IPUPrecision", "IPUPrecisionPlugin"),
    "plugins.precision": ("IPUPrecision", "IPUPrecisionPlugin"),
}


def add_ipus() -> None:
    """Add ipus to each imported Lightning package. Warn if this fails."""
    try:
        for name, package in CONNECTORS.items():
            if name in sys.modules:
                _patch_package(package, sys.modules[name])
    except Exception as error:
        warnings.warn(f"Pando can't add ipus to Lightning: {error}", stacklevel=2)


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
            if not _is_of_pando(self._strategy_flag, "ipu_strategy"):
                words = f"found strategy={self._strategy_flag!r}\n  fix: leave it out; poprun starts several processes"
                raise ValueError(f'Trainer(accelerator="ipu") has a strategy of its own; {words}')
            if self._precision_plugin_flag is None:
                self._precision_plugin_flag = _import_classes(package)["IPUPrecision"](self._precision_flag)
        return result

    connector._check_config_and_set_final_flags = with_ipus


def _is_of_pando(flag: Any, name: str = "") -> bool:
    """Return whether an argument of a Trainer is an instance of a class of Pando, or the text `name`."""
    return flag == name if isinstance(flag, str) else getattr(type(flag), "_is_of_pando", False)
