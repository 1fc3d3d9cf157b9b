"""PopTorch's programming model on ordinary machines: mark the blocks of a model, wrap it, call it.

>>> options = poptorch.Options().deviceIterations(10)  # weight updates in a call
>>> options.Training.gradientAccumulation(8)  # micro-batches in an update
>>> poptorch.BeginBlock(model.last, "last", ipu_id=1)  # from this layer on ipu 1
>>> trainer = poptorch.trainingModel(model, options, torch.optim.AdamW(model.parameters()))
>>> for x, labels in poptorch.DataLoader(options, dataset, batch_size=16, shuffle=True):
...     scores, loss = trainer(x, labels)  # forward returns these
>>> scores = poptorch.inferenceModel(model.eval())(x)

Begin with `help(poptorch.trainingModel)`, `Options`, `BeginBlock`, `DataLoader`, `describe` and `testing.compare`.
"""

# The public names are listed in `__init__.pyi`. A name's module is imported when the name is first used: processes
# that only load data never import the compiler.

import ast as _ast
import importlib as _importlib
import os as _os
from enum import EnumType as _EnumType
from pathlib import Path as _Path
from types import FunctionType as _FunctionType
from typing import Any as _Any

import torch as _torch

from popengine.errors import did_you_mean as _did_you_mean
from popengine.errors import without_internal_frames as _without_internal_frames
from popengine.torch_private import OpNamespace as _OpNamespace

from .logs import log_ignored_variables as _log_ignored_variables
from .logs import log_untested_torch as _log_untested_torch


def _read_stub() -> tuple[dict[str, tuple[str, str | None]], list[str]]:
    """Read the stub. Return each name's module and its name there (None: it is a module), and `__all__`."""
    where: dict[str, tuple[str, str | None]] = {}
    public: list[str] = []
    for statement in _ast.parse(_Path(__file__).with_suffix(".pyi").read_text("utf-8")).body:
        if isinstance(statement, _ast.Assign):
            public = _ast.literal_eval(statement.value)
        elif isinstance(statement, _ast.ImportFrom):
            module = f"{'.' * statement.level}{statement.module or ''}"
            for alias in statement.names:
                where[alias.name] = (f".{alias.name}", None) if module == "." else (module, alias.name)
    return where, public


_WHERE, __all__ = _read_stub()


@_without_internal_frames
def __getattr__(name: str) -> _Any:
    if name not in _WHERE:
        meant = _did_you_mean(name, [*__all__, "Checkpoint"], shown={"Checkpoint": "popdist.Checkpoint"})
        raise AttributeError(f"module 'poptorch' has no attribute {name!r}{meant}")
    place, inner = _WHERE[name]
    module = _importlib.import_module(place, __name__)
    value = module if inner is None else getattr(module, inner)
    if isinstance(value, type | _FunctionType) and not issubclass(type(value), _EnumType):
        value = _without_internal_frames(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Operations(_OpNamespace):
    """The namespace `torch.ops.poptorch`, whose operations are registered when one is first read."""

    def __getattr__(self, op_name: str) -> _Any:
        _importlib.import_module(".ops", __name__)
        return super().__getattr__(op_name)


setattr(_torch.ops, "poptorch", _Operations("poptorch"))  # noqa: B010
_log_ignored_variables(_os.environ)
_log_untested_torch(_torch.__version__)
if _os.getenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
    # Torch did not call the entry points of packages; Pando's entry point registers the ipus with Lightning.
    from importlib.metadata import entry_points as _entry_points

    for _entry_point in _entry_points(group="torch.backends", name="pando"):
        _entry_point.load()()
