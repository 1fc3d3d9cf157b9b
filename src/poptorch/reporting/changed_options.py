"""Which options differ from their defaults, for profiles."""

from __future__ import annotations

from typing import Any

from popengine import profile

from ..options import Options
from ..options.freeze_options import resolved
from ..options.option_base import OptionsDict


def changed_options(options: Options, training: bool) -> list[profile.Option]:
    """The options that differ from their defaults, in words."""
    mine, default = _flat(options), _flat(resolved(Options(), training))
    return [
        profile.Option(name, mine.get(name, "not set"), default.get(name, "not set"))
        for name in sorted(mine.keys() | default.keys())
        if mine.get(name) != default.get(name)
    ]


def _flat(options: Options) -> dict[str, str]:
    """Every value by its dotted name."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        values = value.toDict() if isinstance(value, OptionsDict) else value
        if isinstance(values, dict) and all(isinstance(key, str) for key in values):
            for name, inner in values.items():
                walk(f"{prefix}.{name}" if prefix else name, inner)
        elif prefix.rpartition(".")[2] not in found:  # what the top level repeats is shown once
            found[prefix] = str(value)

    walk("", options)
    for name, nested in vars(options).items():
        if isinstance(nested, OptionsDict):
            walk(name.lstrip("_"), nested)
    found["execution_strategy"] = type(options._execution_strategy).__name__
    return found
