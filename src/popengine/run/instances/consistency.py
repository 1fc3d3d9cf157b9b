"""Fingerprints: texts that have to be equal in all instances, and the error that lists their differences."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir import Plan
from ...settings import Hyper, Place, Settings
from ...torch_private import bits_of, hash_of_bits

# Texts by section and name. A section "NAME@SCOPE" is compared among the instances that have it only.
Fingerprint = Mapping[str, Mapping[str, str]]

HEADER = 384  # bytes
_MAX_SHOWN = 6  # differences that the error lists
_MAX_LISTED = 8  # constants with more elements are shown as a hash
_MAX_WIDTH = 120  # characters of a value that are shown
_BLOCK = 4096  # bytes


def barrier_header(what: str, fingerprint: Fingerprint) -> Tensor:
    """Return the header of barrier `what`, uint8 [HEADER]: hashes of the fingerprint, and `what`, cut to fit."""
    common = {name: texts for name, texts in fingerprint.items() if "@" not in name}
    digest = hashlib.sha256(json.dumps(common).encode()).hexdigest()
    scoped = {
        name: _hash_of_bytes(json.dumps(texts).encode()) for name, texts in fingerprint.items() if "@" in name
    }
    text = f"{digest}|{json.dumps(scoped)}|{what}".encode()[:HEADER]
    return torch.frombuffer(bytearray(text.ljust(HEADER, b"\0")), dtype=torch.uint8)


def _split_header(value: Tensor) -> list[str]:
    return bytes(value.numpy()).rstrip(b"\0").decode(errors="replace").split("|", 2)


def barrier_name(value: Tensor) -> str:
    """Return the barrier's name in a header that `barrier_header` made."""
    return _split_header(value)[2]


def headers_are_equal(headers: Sequence[Tensor]) -> bool:
    """Return whether all headers have equal names, and equal hashes of each section that they have: the same result in
    all instances, also in those that lack a section that differs."""
    seen: dict[str, object] = {}
    for digest, scoped, what in map(_split_header, headers):
        for name, value in {**json.loads(scoped), "": (digest, what)}.items():
            if seen.setdefault(name, value) != value:
                return False
    return True


def describe_differences(
    whats: Sequence[str], fingerprints: Sequence[Fingerprint], ranks: Sequence[int]
) -> str:
    """Return the error message for instances at different barriers or with different fingerprints."""
    if len(set(whats)) > 1:
        return (
            f"the instances are at different places: {_values_text(whats, ranks)}\n"
            "  why: all instances have to make the same calls, in the same order; one has made fewer, or more\n"
            "  fix: give each instance the same number of batches (poptorch.DataLoader does)"
        )
    sections = dict.fromkeys(section for of_instance in fingerprints for section in of_instance)
    # The first section that differs may be the cause of differences in later sections.
    differences = ((section, _differing_lines(section, fingerprints, ranks)) for section in sections)
    section, lines = next(pair for pair in differences if pair[1])
    fix = (
        "torch.manual_seed(0) in the first line of the program"
        if section == "seed"
        else "run the same program with the same options in all; popdist.collectives.broadcast(model.state_dict())"
        " makes the first weights equal; load and write weights and optimizer state in all instances, after"
        " copyWeightsToHost() with functions that skip meta tensors"
    )
    rest = [f"and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else []
    return (
        f"the instances differ at {whats[0]}, so they would train apart:\n"
        + "".join(f"  {line}\n" for line in [*lines[:_MAX_SHOWN], *rest])
        + f"  nothing has changed in any instance\n  fix: {fix}"
    )


def _differing_lines(section: str, fingerprints: Sequence[Fingerprint], ranks: Sequence[int]) -> list[str]:
    """Return a line for each text of a section that differs; in section "operation" for the first only."""
    if "@" in section:
        ranks = [rank for rank, texts in zip(ranks, fingerprints, strict=True) if section in texts]
        fingerprints = [texts for texts in fingerprints if section in texts]
    of_instances = [of_instance.get(section, {}) for of_instance in fingerprints]
    section = section.partition("@")[0]
    lines = []
    for name in dict.fromkeys(name for texts in of_instances for name in texts):
        values = [texts.get(name, "none") for texts in of_instances]
        if len(set(values)) > 1:
            called = name if section in ("options", "rates", "versions", "seed") else f"{section} of {name}"
            lines.append(f"{called}: {_values_text(values, ranks)}")
    return lines[:1] if section == "operation" else lines


def _values_text(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Return a text of the values and their instances, such as '3 in instances 0, 1; 4 in instance 2'."""
    ranks_of: dict[str, list[str]] = {}
    for rank, value in zip(ranks, values, strict=True):
        ranks_of.setdefault(value, []).append(str(rank))
    return "; ".join(
        f"{value if len(value) <= _MAX_WIDTH else value[: _MAX_WIDTH - 3] + '...'} in"
        f" instance{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
        for value, numbers in ranks_of.items()
    )


# ---- the texts -----------------------------------------------------------------------------------------------


def fingerprint_of_plan(
    plan: Plan, settings: Settings, weights: Mapping[str, Tensor], seed: int
) -> Fingerprint:
    """Return the texts that must be equal in all instances that load a plan, from versions to hashes of the
    parameters."""
    counts, signature = dataclasses.replace(settings.counts, instance=0, part=0), plan.partition.signature
    forms: dict[str, dict[str, str]] = {"shape": {}, "input": {}}
    for slot in signature.slots:
        if slot.role != "constant":
            section = "input" if slot.role == "input" else "shape"
            forms[section][slot.key] = f"{tuple(slot.shape)} {slot.dtype}"
    here = {name for names in plan.slots_at(Place(settings.counts.part)).values() for name in names}
    keys = (slot.key for slot in signature.slots if slot.role == "parameter" and slot.name in here)
    first = {key: weights[key] for key in keys if key in weights and not weights[key].is_meta}
    constants = _constant_texts(plan)
    code = repr((plan.tasks, constants)) + "".join(piece.source for piece in plan.partition.pieces)
    return {
        "versions": {"torch": torch.__version__, "Python": sys.version.split()[0]},
        "options": _flat_fields(dataclasses.replace(settings, counts=counts)),
        **forms,
        "constant": constants,
        "operation": _operation_texts(plan),
        "plan": {"the step": _hash_of_bytes(code.encode())},
        "seed": {"random seed": str(seed)},
        "first value" + f"@part {settings.counts.part}" * bool(plan.places): hash_weights(first),
    }


def _operation_texts(plan: Plan) -> dict[str, str]:
    """Return the source of each operation, by its location (text) in the user's code and the pieces."""
    return {
        f"{piece.user_line(number)}, line {number} of piece {index}": line.partition("; ")[0].strip()
        for index, piece in enumerate(plan.partition.pieces)
        for number, line in enumerate(piece.source.splitlines(), 1)
        if piece.user_line(number) != "?"
    }


def _constant_texts(plan: Plan) -> dict[str, str]:
    """Return shape, dtype and values (or their hash) of each constant, by its name and the operation that reads it."""
    constants, texts = plan.partition.signature.constants, {}
    for line in (line for piece in plan.partition.pieces for line in piece.lines):
        for name in (name for name in line.operands() if name in constants):
            value = constants[name]
            text = str(value.tolist()) if value.numel() <= _MAX_LISTED else hash_of_bits(value)[:12]
            described = f"{tuple(value.shape)} {value.dtype} {text}"
            texts[f"{name}, which {line.call} reads at {line.where}"] = described
    return texts


def hash_weights(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a hash of each weight's values, by canonical name."""
    return {key: hash_of_bits(value)[:12] for key, value in sorted(weights.items())}


def hash_of_sample(value: Tensor) -> str:
    """Return a hash of at most 64 blocks of a weight, because a file-mapped one is read page by page."""
    if value.is_meta:
        return "no values"
    memory = bits_of(value.detach().cpu())
    step = max(_BLOCK, len(memory) // 64 // _BLOCK * _BLOCK)
    blocks = [memory[start : start + _BLOCK] for start in range(0, len(memory), step)]
    return _hash_of_bytes(torch.cat([*blocks, memory[-_BLOCK:]]).numpy().data)


def rates_as_texts(hyper: Hyper) -> dict[str, str]:
    """Return the `repr` of each rate of a call, by "NAME of parameter group N", and of the loss scaling."""
    texts = {"loss scaling": repr(hyper.loss_scaling)}
    for index, group in enumerate(hyper.groups):
        texts |= {f"{name} of parameter group {index}": repr(value) for name, value in group.items()}
    return texts


_NAMES = {  # dotted names of settings, in the words of the options
    "counts.iterations": "device iterations",
    "counts.accumulation": "gradient accumulation",
    "counts.replicas": "local replicas",
    "counts.instances": "instances",
    "optimizer.kind": "optimizer",
    "products_in_float32": "products in float32 (by Precision.halfKernels and the processor)",
}


def _flat_fields(value: Any, name: str = "") -> dict[str, str]:
    """Return the `repr` of each field of nested dataclasses, by dotted name or its text in `_NAMES`."""
    if not dataclasses.is_dataclass(value):
        return {_NAMES.get(name, name): repr(value)}
    texts: dict[str, str] = {}
    for field in dataclasses.fields(value):
        texts |= _flat_fields(getattr(value, field.name), f"{name}.{field.name}".lstrip("."))
    return texts


def _hash_of_bytes(value: bytes | memoryview) -> str:
    return hashlib.sha256(value).hexdigest()[:12]
