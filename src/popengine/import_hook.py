"""Adds `accelerator="ipu"` to Lightning when a program imports it: torch calls `install` at the end of `import torch`.

The hook is a finder (PEP 451). After the import of the module in which Lightning chooses strategies, it calls
`lightning_ipu.autoload.add_ipus`. Until then nothing of Lightning or of `lightning_ipu` is imported. With
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` torch calls nothing, and the import of `poptorch` does.
"""

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

CONNECTORS = {  # the modules in which Lightning chooses strategies, and their packages
    f"{package}.trainer.connectors.accelerator_connector": package
    for package in ("lightning.pytorch", "pytorch_lightning")
}


def install() -> None:
    """Add ipus to each imported Lightning package, and to others after their import. Warn if this fails."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # pyright: ignore[reportArgumentType]
    if any(name in sys.modules for name in CONNECTORS):
        importlib.import_module("lightning_ipu.autoload").add_ipus()


class _Finder:
    """A meta path finder that calls `install` after the import of a module of `CONNECTORS`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in CONNECTORS:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: types.ModuleType) -> None:
                execute(module)
                install()

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec
