"""Which options differ from their defaults, and with which strategy and optimizer a model runs, for profiles."""

from dataclasses import fields
from typing import Any

import torch

from popengine import profile
from popengine.settings import Optimizer

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


def strategy_in_words(options: Options, mode: str) -> str:
    """The user's strategy and the mode that it has here: a pipeline with few micro-batches may run sharded."""
    name = type(options._execution_strategy).__name__
    return name if name.lower().startswith(mode) else f"{name}, run {mode}"


def optimizer_in_words(optimizer: Optimizer | None) -> str:
    """Its rule, what it updates, and what differs from the rule's defaults; not its rates, which change."""
    if optimizer is None:
        return "none"
    groups, plain = len(set(optimizer.group_of.values())), Optimizer(optimizer.kind, optimizer.group_of)
    many = counted(len(optimizer.group_of), "parameter")
    words = [f"{optimizer.kind}, {many} in {counted(groups, 'group')}"]
    for name in [field.name for field in fields(optimizer)]:
        value = getattr(optimizer, name)
        if name == "state_types":
            words += [f"{k} in {v}" for k, v in value.items() if v != torch.float32]
        elif value != getattr(plain, name):
            words.append(f"{name.replace('_', ' ')} {value}")
    return "; ".join(words)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('h') else 's'}"


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
