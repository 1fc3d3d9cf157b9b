"""Options from text: a file with one setting a line, or a JSON object.

A line may call the methods of options, with literals, enum members, strategies and location settings as arguments. Its
syntax tree is checked before it runs, and it runs without Python's builtins, so that it reaches nothing else.
"""

import ast
import enum
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from poptorch import enums
from poptorch.annotating import strategies
from poptorch.options.locations import TensorLocationSettings

_STRATEGIES = (
    strategies.Stage,
    strategies.Phase,
    strategies.PipelinedExecution,
    strategies.ShardedExecution,
    strategies.SerialPhasedExecution,
    strategies.ParallelPhasedExecution,
)
_POPTORCH = SimpleNamespace(
    **{name: getattr(enums, name) for name in enums.__all__},
    **{strategy.__name__: strategy for strategy in _STRATEGIES},
    TensorLocationSettings=TensorLocationSettings,
)
_TORCH = SimpleNamespace(
    float=torch.float, float32=torch.float32, half=torch.half, float16=torch.float16, bfloat16=torch.bfloat16
)
_PRIVATE_BUT_USED = ("_Popart", "_popart")
# The syntax of a setting: calls, attributes and literals. No comprehension, lambda, subscript or unpacking.
_SYNTAX = (
    *(ast.Module, ast.Expr, ast.Assign, ast.Call, ast.keyword, ast.Attribute, ast.Name, ast.Load, ast.Store),
    *(ast.Constant, ast.UnaryOp, ast.USub, ast.List, ast.Tuple, ast.Dict),
)


class ConfigFileError(Exception):
    """A line of an options file can't be read."""


def load_file(options: Any, path: str | Path) -> None:
    """Apply a file to `options`: one setting a line, as it is written after `options.`.

    Raises: ConfigFileError, for a line that is no setting; whatever a setter raises, for a bad value.
    """
    path = Path(path)
    kept = 0
    for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        setting = line.strip()
        if not setting or setting.startswith("#"):
            continue
        kept += 1  # the number in the message, as PopTorch counts
        try:
            _apply(options, f"options.{setting}")
        except SyntaxError as error:
            raise ConfigFileError(
                f"SyntaxError at line {kept} of {path.name}: {error.msg}\n> options.{setting}\n"
                f"(line {line_number} of {path})"
            ) from error
        except Exception as error:
            error.add_note(f"at line {line_number} of {path}: {setting}")
            raise


def load_json(options: Any, text: str) -> None:
    """Apply a JSON object to `options`, as `{"deviceIterations": 4, "outputMode": "OutputMode.All"}`.

    A list holds several positional arguments; a string that names an enum's member becomes that member.
    Raises: AttributeError, for an unknown setting; whatever a setter raises, for a bad value.
    """
    settings = json.loads(text)
    if not isinstance(settings, dict):
        raise ValueError(f"options are a JSON object, from setting to argument; found {text}")
    for name, value in settings.items():
        setter = options
        for part in name.split("."):
            _check_attribute(part)
            setter = getattr(setter, part)
        if not callable(setter):
            raise AttributeError(f"{name!r} is no setter of options, so it can't be given in JSON")
        setter(*(value if isinstance(value, list) else [_enum_member(value)]))


def _enum_member(value: Any) -> Any:
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    enum_name, member = value.split(".")
    kind = getattr(_POPTORCH, enum_name, None)
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return value  # "model.v2" is an ordinary string
    if member not in kind.__members__:
        raise ValueError(
            f"poptorch.{enum_name} has no member {member!r}; it has {', '.join(kind.__members__)}"
        )
    return kind[member]


def _apply(options: Any, source: str) -> None:
    """Run one setting, in which nothing but calls, public attributes and literals may stand.

    Raises: SyntaxError, if the source is not one setting.
    """
    names = {"options": options, "poptorch": _POPTORCH, "torch": _TORCH}
    tree = ast.parse(source)
    match tree.body:
        case [ast.Expr(ast.Call())] | [ast.Assign([ast.Attribute()])]:
            pass
        case _:
            raise SyntaxError("a line holds one setting, such as deviceIterations(4)")
    for node in ast.walk(tree):
        if not isinstance(node, _SYNTAX):
            raise SyntaxError(
                f"{ast.unparse(node)!r} is more than an options file may hold: calls, names and literals"
            )
        if isinstance(node, ast.Attribute):
            _check_attribute(node.attr)
        if isinstance(node, ast.Name) and node.id not in names:
            raise NameError(f"name {node.id!r} is not defined: options files know {', '.join(names)}")
    exec(compile(tree, "<options>", "exec"), {"__builtins__": {}, **names})


def _check_attribute(name: str) -> None:
    """Raise AttributeError, if option texts may not use an attribute of this name."""
    if name.startswith("_") and name not in _PRIVATE_BUT_USED:
        raise AttributeError(f"Invalid attribute {name!r}: private names can't be used in option texts")
