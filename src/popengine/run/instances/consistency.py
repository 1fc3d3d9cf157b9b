"""The facts that have to be equal in all instances, and the error message that lists their differences."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir import Plan
from ...settings import Hyper, Settings

Facts = Mapping[str, Mapping[str, str]]  # by section and name

HEADER = 256  # bytes
_SHOWN = 6  # differences that are listed
_LISTED = 8  # constants with more elements are shown as a hash
_WIDTH = 120  # characters of a value that are shown


def header(what: str, facts: Facts) -> Tensor:
    """Return a barrier's first message, uint8 [HEADER]: a digest of the facts, and the barrier's name."""
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    text = f"{digest} {what}".encode()[:HEADER]
    return torch.frombuffer(bytearray(text.ljust(HEADER, b"\0")), dtype=torch.uint8)


def barrier_name(value: Tensor) -> str:
    """Return the name of the barrier that a header contains."""
    return bytes(value.numpy()).rstrip(b"\0").decode(errors="replace").partition(" ")[2]


def differences(whats: Sequence[str], facts: Sequence[Facts], names: Sequence[int]) -> str:
    """Return the error message for instances that are at different barriers or have different facts.

    Args:
        whats: name of each instance's barrier
        facts: facts of each instance
        names: global rank of each instance
    """
    if len(set(whats)) > 1:
        return (
            f"the instances are at different places: {_values_by_instance(whats, names)}\n"
            "  why: all instances have to make the same calls, in the same order; one has made fewer, or more\n"
            "  fix: give each instance the same number of batches (poptorch.DataLoader does)"
        )
    sections = dict.fromkeys(section for one in facts for section in one)
    # Later sections may differ only because the first one does.
    lines = next(filter(None, (_differing(section, facts, names) for section in sections)))
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return (
        f"the instances differ at {whats[0]}, so they would train apart:\n"
        + "".join(f"  {line}\n" for line in [*lines[:_SHOWN], *more])
        + "  nothing has changed in any instance\n"
        "  fix: run the same program with the same options in all; torch.manual_seed(...) before the model is built,"
        " or popdist.collectives.broadcast(model.state_dict()), makes the first weights equal"
    )


def _differing(section: str, facts: Sequence[Facts], names: Sequence[int]) -> list[str]:
    """Return a line for each fact of a section that differs; of operations only the first line."""
    of_instances = [one.get(section, {}) for one in facts]
    found = []
    for name in dict.fromkeys(name for one in of_instances for name in one):
        values = [one.get(name, "none") for one in of_instances]
        if len(set(values)) > 1:
            called = name if section in ("options", "rates", "versions", "seed") else f"{section} of {name}"
            found.append(f"{called}: {_values_by_instance(values, names)}")
    return found[:1] if section == "operation" else found


def _values_by_instance(values: Sequence[str], names: Sequence[int]) -> str:
    """Return a text of the values and their instances, such as '3 in instances 0, 1; 4 in instance 2'."""
    places: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        places.setdefault(value, []).append(str(name))
    return "; ".join(
        f"{value if len(value) <= _WIDTH else value[: _WIDTH - 3] + '...'} in"
        f" instance{'s' if len(found) > 1 else ''} {', '.join(found)}"
        for value, found in places.items()
    )


# ---- the facts -----------------------------------------------------------------------------------------------


def facts_of_plan(plan: Plan, settings: Settings, weights: Mapping[str, Tensor], seed: int) -> Facts:
    """Return the facts that have to be equal in all instances before the first call."""
    counts, signature = dataclasses.replace(settings.counts, instance=0), plan.partition.signature
    forms: dict[str, dict[str, str]] = {"shape": {}, "input": {}}
    for slot in signature.slots:
        if slot.role != "constant":
            section = "input" if slot.role == "input" else "shape"
            forms[section][slot.key] = f"{tuple(slot.shape)} {slot.dtype}"
    parameters = {slot.key for slot in signature.slots if slot.role == "parameter"}
    code = repr(plan.tasks) + "".join(piece.source for piece in plan.partition.pieces)
    return {
        "versions": {"torch": torch.__version__, "Python": sys.version.split()[0]},
        "options": _flat_fields(dataclasses.replace(settings, counts=counts)),
        **forms,
        "constant": _constants(plan),
        "operation": _operations(plan),
        "plan": {"the step": _hashed(code.encode())},
        "seed": {"random seed": str(seed)},
        "first value": hashes_of({key: value for key, value in weights.items() if key in parameters}),
    }


def _operations(plan: Plan) -> dict[str, str]:
    """Return the source of each operation, by a text with the user's line, piece, and line of the piece."""
    return {
        f"{piece.user_line(number)}, line {number} of piece {place}": line.partition("; ")[0].strip()
        for place, piece in enumerate(plan.partition.pieces)
        for number, line in enumerate(piece.source.splitlines(), 1)
        if piece.user_line(number) != "?"
    }


def _constants(plan: Plan) -> dict[str, str]:
    """Return shape, dtype and value (or hash) of each constant, by the operation that reads it."""
    constants, found = plan.partition.signature.constants, {}
    for line in (line for piece in plan.partition.pieces for line in piece.lines):
        for name in (name for name in line.operands() if name in constants):
            value = constants[name]
            text = str(value.tolist()) if value.numel() <= _LISTED else _hashed_tensor(value)
            described = f"{tuple(value.shape)} {value.dtype} {text}"
            found[f"{name}, which {line.call} reads at {line.where}"] = described
    return found


def hashes_of(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a hash of each weight."""
    return {key: _hashed_tensor(value) for key, value in sorted(weights.items())}


def facts_of_rates(hyper: Hyper) -> dict[str, str]:
    """Return the text of each rate of a call, by its name and parameter group."""
    groups = {
        f"{name} of parameter group {index}": repr(value)
        for index, group in enumerate(hyper.groups)
        for name, value in group.items()
    }
    return {**groups, "loss scaling": repr(hyper.loss_scaling)}


_NAMES = {
    "counts.iterations": "device iterations",
    "counts.accumulation": "gradient accumulation",
    "counts.replicas": "local replicas",
    "counts.instances": "instances",
    "optimizer.kind": "optimizer",
    "products_in_float32": "products in float32 (by Precision.halfKernels and the processor)",
}


def _flat_fields(value: Any, name: str = "") -> dict[str, str]:
    """Return the `repr` of each field of nested dataclasses, by dotted name, or by its name in `_NAMES`."""
    if not dataclasses.is_dataclass(value):
        return {_NAMES.get(name, name): repr(value)}
    found: dict[str, str] = {}
    for field in dataclasses.fields(value):
        found |= _flat_fields(getattr(value, field.name), f"{name}.{field.name}".lstrip("."))
    return found


def _hashed(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()[:12]


def _hashed_tensor(value: Tensor) -> str:
    plain = value.detach().cpu().contiguous().reshape(-1)
    return _hashed(plain.view(torch.uint8).numpy().tobytes())
