"""The arguments of `compare`: their types, and whether all ranks pass equal ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from popengine.errors import Error
from popengine.settings import Counts
from popengine.torch_private import hash_of_bits

from ..checks import checked
from ..nested_values import spec_of, tensors_of
from .meeting import ranks_text


def check_arguments(
    model: Any, options: Any, optimizer: Any, update: Any, updates: Any, micro_batches: Any
) -> None:
    """Raise Error, if an argument of `compare` has another type than it must have, or does not fit the others."""
    from ..options import Options  # loads all strategies

    fix = f"compare({'trainer.' * hasattr(model, 'destroy')}model, options, batch, optimizer, update=...)"
    check = partial(checked, error=Error, fix=f"{fix}, where a batch is one tuple")
    check("compare: model", model, nn.Module)
    classes = (options, Options), (optimizer, torch.optim.Optimizer), (update, Callable)
    for name, (value, cls) in zip(("options", "optimizer", "update"), classes, strict=True):
        if value is not None:
            check(f"compare: {name}", value, cls)
    check("compare: updates", updates, int, least=1)
    check("compare: micro_batches", 1 if micro_batches is None else micro_batches, int, least=1)
    if options is not None and micro_batches is not None:
        raise Error("compare: options have a number of micro-batches\n  fix: leave out micro_batches")
    if options is not None and options.exists("batch_dims"):
        raise Error("compare: options.batchDims is not supported\n  fix: inputs with rows in dimension 0")
    ids, groups = {id(p) for p in model.parameters()}, optimizer.param_groups if optimizer else ()
    if any(id(parameter) not in ids for group in groups for parameter in group["params"]):
        raise Error(
            "compare: the optimizer has parameters that are not the model's\n"
            "  fix: make it of model.parameters(), after the last change of the model"
        )


@dataclass(frozen=True)
class Fingerprint:
    """What must be equal on all ranks: (argument, what it is, a hash of its values) of each tensor and setting."""

    line: str  # of the call of `compare`
    items: list[tuple[str, str, str]]


def fingerprint(
    model: nn.Module, counts: Counts, batch: Any, optimizer: torch.optim.Optimizer, update: Any, updates: int
) -> Fingerprint:
    """Return the fingerprint of the arguments of `compare` on this rank."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    settings = {
        "the number of micro-batches": f"{counts.accumulation}, and {counts.global_replicas} replicas",
        "the optimizer": f"{type(optimizer).__name__} {groups}",
        "updates": str(updates),
        "update": "an executor" if update is None else "a function",
        "the batch": str(spec_of(batch)),
    }
    named = {"the model": [*model.named_parameters(), *model.named_buffers()]}
    named["the batch"] = [(f"tensor {index}", tensor) for index, tensor in enumerate(tensors_of(batch))]
    items = [(argument, text, "") for argument, text in settings.items()]
    for argument, tensors in named.items():
        items += [(argument, f"{name} {[*t.shape]} {t.dtype}", hash_of_bits(t)) for name, t in tensors]
    from popengine.compile.recording.user_code import user_line  # loads the compiler

    return Fingerprint(user_line(), items)


def differing_values(fingerprints: Sequence[Fingerprint]) -> str:
    """Return which values differ between ranks, as text; "" if none does. Raises Error, if other properties differ:
    ranks could wait for each other."""
    first, other_values = fingerprints[0], dict[str, tuple[str, set[int]]]()
    for rank, peer in enumerate(fingerprints):
        for one, another in zip_longest(first.items, peer.items, fillvalue=("the model", "nothing", "")):
            if one[:2] != another[:2]:
                raise Error(
                    f"compare: rank {rank} passes another argument than rank 0: {one[0]}\n"
                    f"  rank 0, {first.line}: {one[1]}\n  rank {rank}, {peer.line}: {another[1]}\n"
                    "  fix: call compare with equal arguments on all ranks"
                )
            if one != another:
                other_values.setdefault(one[0], (one[1], set()))[1].add(rank)
    return "; ".join(
        f"{ranks_text(ranks)} passed other values of {argument} than rank 0, first {name}"
        for argument, (name, ranks) in other_values.items()
    )
