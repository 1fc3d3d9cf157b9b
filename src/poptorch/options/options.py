"""`Options`: all that a user may choose about compiling and running a model, also from a file or a JSON text.

A setter checks and stores its arguments and returns the object, so that calls can be chained. The first model
or data loader that uses the options freezes them; `clone()` returns a copy that can be changed.
"""

import ast
import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch

from popengine.settings import Counts
from poptorch import enums
from poptorch.annotating import strategies
from poptorch.checks import checked
from poptorch.enums import CommGroupType, member_by_name
from poptorch.options import option_parts
from poptorch.options.option_base import OptionsDict, merge_disjoint, sorted_repr
from poptorch.options.option_groups import DeviceOptions, ExecutionOptions, ReportingOptions


class Options(ExecutionOptions, DeviceOptions, ReportingOptions):
    """All that a user can choose about compiling and running a model.

    >>> opts = poptorch.Options().deviceIterations(4).replicationFactor(2)
    >>> opts.Training.gradientAccumulation(8)
    >>> opts.device_iterations
    4

    Setters return the object, so that calls can be chained. Some are in the groups `Training`, `Precision`,
    `Distributed` and `TensorLocations`. An executor or loader freezes its options: change a copy, `opts.clone()`.
    """

    _renamed = {
        "Popart": "_popart",
        "_Popart": "_popart",
        "anchorMode": "outputMode",
        "defaultAnchorMode": "defaultOutputMode",
    }

    _ipus_per_replica: int = 1
    # The parts can't be assigned.
    _Popart: option_parts.Popart
    Distributed: option_parts.Distributed
    Jit: option_parts.Jit
    Precision: option_parts.Precision
    TensorLocations: option_parts.TensorLocations
    Training: option_parts.Training

    def __init__(self) -> None:
        popart = option_parts.Popart()
        super().__init__(popart)
        vars(self).update(
            Distributed=option_parts.Distributed(),
            Jit=option_parts.Jit(),
            Precision=option_parts.Precision(popart),
            TensorLocations=option_parts.TensorLocations(),
            Training=option_parts.Training(popart),
        )
        if cache := os.environ.get("POPTORCH_CACHE_DIR"):
            self.enableExecutableCaching(cache)
        if defaults := os.environ.get("POPTORCH_DEFAULT_OPTIONS"):
            try:
                self.from_json(defaults)
            except Exception as error:
                error.add_note(f"in the environment variable POPTORCH_DEFAULT_OPTIONS: {defaults}")
                raise

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Apply a file with one setting per line, written as after `options.`, such as `deviceIterations(4)`.

        Blank lines and lines that begin with # are skipped. Settings before a faulty line remain applied.

        >>> options.loadFromFile("options.txt")  # with lines such as: deviceIterations(4)

        Raises: ConfigFileError for a line that is not a setting; the setter's error for a bad value.
        """
        path = Path(filepath)
        lines = enumerate(map(str.strip, path.read_text(encoding="utf-8").splitlines()), start=1)
        settings = [(number, line) for number, line in lines if line and not line.startswith("#")]
        for count, (line_number, setting) in enumerate(settings, start=1):
            try:
                _run_options_line(self, f"options.{setting}")
            except SyntaxError as error:
                raise ConfigFileError(  # as in PopTorch, `count` leaves out comments and blank lines
                    f"SyntaxError at line {count} of {path.name}: {error.msg}\n> options.{setting}\n"
                    f"(line {line_number} of {path})"
                ) from error
            except Exception as error:
                error.add_note(f"at line {line_number} of {path}: {setting}")
                raise
        return self

    def from_json(self, string: str) -> Self:
        """Apply a JSON object: `{"Training.gradientAccumulation": 4, "outputMode": "OutputMode.All"}`.

        A list holds several positional arguments. A string (not in a list) that names an enum's member
        becomes that member.

        >>> options.from_json('{"deviceIterations": 4}')

        Raises: ValueError for other JSON; AttributeError for an unknown setting; the setter's own errors.
        """
        settings = json.loads(string)
        for name, value in checked("a JSON object of options", settings, dict, ValueError).items():
            setter = self
            for part in name.removeprefix("options.").split("."):
                _refuse_private_name(part)
                setter = getattr(setter, part)
            if not callable(setter):
                raise AttributeError(f"{name!r} is no setter of options, so it can't be given in JSON")
            setter(*(value if isinstance(value, list) else [_as_enum_member(value)]))
        return self

    def toDict(self) -> dict[str, Any]:
        """Return all values in one dictionary, including those of the parts. Raises AssertionError if the
        output mode is Default."""
        if self.defaultOutputMode():
            raise AssertionError(
                "An output mode must be picked before toDict(): call outputMode(...), or read the options of a "
                "model (model.options), where it is Final in training and All in inference"
            )
        parts = (self._popart, self.Training, self.Distributed, self.TensorLocations)
        values = (super().toDict(), self._execution_strategy.backendOptions(), *(p.toDict() for p in parts))
        return functools.reduce(merge_disjoint, values)

    def _counts(self) -> Counts:
        """Return the factors of a combined batch, and the number and id of the processes."""
        instance, instances = self.Distributed._dataset_share
        return Counts(
            iterations=self.device_iterations,
            accumulation=self.Training.gradient_accumulation,
            replicas=self.replication_factor,
            groups=self.replication_factor // self.input_group_size,
            grouping="orthogonal" if self.input_cgt == CommGroupType.Orthogonal else "consecutive",
            instances=instances,
            instance=instance,
            parts=self.Distributed.instances_per_replica,
            part=self.Distributed.processId % self.Distributed.instances_per_replica,
        )

    def _printed_fields(self) -> list[str]:
        private = [
            f"{name}={sorted_repr(value)}"
            for name, value in sorted(vars(self).items())
            if name.startswith("_") and name != "_is_frozen" and not isinstance(value, OptionsDict)
        ]
        return [*super()._printed_fields(), *private, *sorted(map(repr, self._parts()))]


# Files and JSON -------------------------------------------------------------------------------------------

_STRATEGIES = "Stage Phase PipelinedExecution ShardedExecution SerialPhasedExecution ParallelPhasedExecution"
_POPTORCH = SimpleNamespace(
    **{name: getattr(enums, name) for name in enums.__all__},
    **{name: getattr(strategies, name) for name in _STRATEGIES.split()},
    TensorLocationSettings=option_parts.TensorLocationSettings,
)
_TORCH = SimpleNamespace(
    float=torch.float, float32=torch.float32, half=torch.half, float16=torch.float16, bfloat16=torch.bfloat16
)
_SYNTAX = (
    *(ast.Module, ast.Expr, ast.Assign, ast.Call, ast.keyword, ast.Attribute, ast.Name, ast.Load, ast.Store),
    *(ast.Constant, ast.UnaryOp, ast.USub, ast.List, ast.Tuple, ast.Dict),
)


class ConfigFileError(Exception):
    """The error for a line of an options file that is not a setting."""


def _as_enum_member(value: Any) -> Any:
    """Return the member that a string such as "OutputMode.All" names; return any other value unchanged."""
    name, dot, member = value.partition(".") if isinstance(value, str) else ("", "", "")
    return member_by_name(getattr(enums, name), member) if dot and name in enums.__all__ else value


def _run_options_line(options: Any, source: str) -> None:
    """Run one line of an options file, such as "options.deviceIterations(4)", on the object `options`.

    Only names, calls and literals are allowed, since a file may be from an unknown source.
    """
    names = {"options": options, "poptorch": _POPTORCH, "torch": _TORCH}
    tree = ast.parse(source)
    match tree.body:
        case [ast.Assign() | ast.Expr(value=ast.Call())]:
            pass
        case _:
            raise SyntaxError("a line holds one setting, such as deviceIterations(4)")
    for node in ast.walk(tree):
        if not isinstance(node, _SYNTAX):
            raise SyntaxError(
                f"{ast.unparse(node)!r} is more than an options file may hold: calls, names and literals"
            )
        if isinstance(node, ast.Attribute):
            _refuse_private_name(node.attr)
        if isinstance(node, ast.Name) and node.id not in names:
            raise NameError(f"name {node.id!r} is not defined: options files know {', '.join(names)}")
    exec(compile(tree, "<options>", "exec"), {"__builtins__": {}, **names})


def _refuse_private_name(name: str) -> None:
    """Raise AttributeError for a private name other than `_Popart`: private names can reach all of Python."""
    if name.startswith("_") and name not in ("_Popart", "_popart"):
        raise AttributeError(f"Invalid attribute {name!r}: private names can't be used in option texts")
