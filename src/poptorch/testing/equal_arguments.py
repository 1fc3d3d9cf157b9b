"""The arguments of `compare`: their types, and whether all ranks pass equal ones."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from popengine.errors import Error, user_line
from popengine.settings import Counts

from ..nested_values import spec_of, tensors_of
from .meeting import ranks_text


def check_arguments(
    model: Any, options: Any, optimizer: Any, update: Any, updates: Any, micro_batches: Any
) -> None:
    """Raise Error, if an argument of `compare` has another type than it must have, or does not fit the others."""
    is_options = options is None or hasattr(options, "deviceIterations")
    checks = (
        ("model", model, isinstance(model, nn.Module), "a torch.nn.Module"),
        ("options", options, is_options, "a poptorch.Options or None"),
        ("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer | None), "an optimizer or None"),
        (
            "update",
            update,
            update is None or callable(update),
            "a function of a model, an optimizer and a batch",
        ),
        ("updates", updates, isinstance(updates, int) and updates > 0, "a positive int"),
        (
            "micro_batches",
            micro_batches,
            micro_batches is None or (isinstance(micro_batches, int) and micro_batches > 0),
            "a positive int",
        ),
    )
    for name, value, is_right, needed in checks:
        if not is_right:
            raise Error(
                f"compare: {name} is of type {type(value).__name__}, and must be {needed}: {value!r:.60}\n"
                "  fix: compare(model, options, batch, optimizer, update=...)"
            )
    if options is not None and micro_batches is not None:
        raise Error(
            "compare: options already have the number of micro-batches\n  fix: leave out micro_batches"
        )
    if options is not None and options.exists("batch_dims"):
        raise Error(
            "compare: options.batchDims is not supported\n  fix: a model and inputs with rows in dimension 0"
        )
    own = {id(parameter) for parameter in model.parameters()}
    if any(
        id(p) not in own for group in (optimizer.param_groups if optimizer else ()) for p in group["params"]
    ):
        raise Error(
            "compare: the optimizer has parameters that are not the model's\n"
            "  fix: make it of model.parameters(), after the last change of the model"
        )


@dataclass(frozen=True)
class Fingerprint:
    """What must be equal on all ranks, by argument: texts (else ranks could wait for each other), hashes of values."""

    line: str  # of the call of `compare`
    texts: dict[str, list[str]]
    hashes: dict[str, dict[str, str]]


def fingerprint(
    model: nn.Module, counts: Counts, batch: Any, optimizer: torch.optim.Optimizer, update: Any, updates: int
) -> Fingerprint:
    """Return the fingerprint of the arguments of `compare` on this rank."""
    tensors = {"the model": dict([*model.named_parameters(), *model.named_buffers()])}
    tensors["the batch"] = {f"tensor {index}": tensor for index, tensor in enumerate(tensors_of(batch))}
    texts = {
        key: [f"{name} {[*t.shape]} {t.dtype}" for name, t in values.items()]
        for key, values in tensors.items()
    }
    texts["the batch"].append(str(spec_of(batch)))
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    texts["the optimizer"] = [type(optimizer).__name__, *map(str, groups)]
    texts["the number of micro-batches"] = [f"{counts.accumulation}, and {counts.global_replicas} replicas"]
    texts["updates"], texts["update"] = [str(updates)], ["an executor" if update is None else "a function"]
    hashes = {
        key: {name: _hash(tensor) for name, tensor in values.items()} for key, values in tensors.items()
    }
    return Fingerprint(user_line(), texts, hashes)


def _hash(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha1(data.data, usedforsecurity=False).hexdigest()


def differing_values(fingerprints: Sequence[Fingerprint]) -> str:
    """Return which values differ between ranks, as text; "" if none does. Raises Error, if other properties differ."""
    first, texts = fingerprints[0], []
    for rank, other in enumerate(fingerprints):
        for key, lines in first.texts.items():
            for one, another in zip_longest(lines, other.texts[key], fillvalue="nothing"):
                if one != another:
                    raise Error(
                        f"compare: rank {rank} passes another argument than rank 0: {key}\n"
                        f"  rank 0, {first.line}: {one}\n  rank {rank}, {other.line}: {another}\n"
                        "  fix: call compare with equal arguments on all ranks"
                    )
    for key, hashes in first.hashes.items():
        names = {i: [n for n in hashes if f.hashes[key][n] != hashes[n]] for i, f in enumerate(fingerprints)}
        names = {rank: of_rank for rank, of_rank in names.items() if of_rank}
        if names:
            name = next(iter(names.values()))[0]
            texts.append(f"{ranks_text(names)} passed other values of {key} than rank 0, first {name}")
    return "; ".join(texts)
