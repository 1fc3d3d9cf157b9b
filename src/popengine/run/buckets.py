"""Buckets: gradients that processes exchange together, and the flat tensors that hold their sums.

The gradients of a bucket are complete at about the same time, because pieces are cut there
(`piece_parts.py`). So a bucket is exchanged while the rest of the backward runs. Gradient sums are views of
its flat tensor, so the exchange copies nothing before or after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ir import Plan
from .state import State

_ALIGNED = 64  # bytes; each gradient begins at a multiple, as torch's own allocations do


@dataclass(frozen=True)
class Bucket:
    """Gradients of one piece and one dtype, of parameters that are equal in the same local replicas.

    keys:    canonical names of the parameters, in the order of their memory
    members: the local replicas in which these parameters are equal
    flats:   the gradient sums of each member, 1-d; the all-reduce writes the total into the first
    cuts:    element offsets at which the shard of each process begins, and the end; None: not sharded
    """

    keys: tuple[str, ...]
    members: tuple[int, ...]
    flats: tuple[Tensor, ...]
    cuts: tuple[int, ...] | None


def buckets_of(plan: Plan, piece: int, state: State) -> list[Bucket]:
    """Return the buckets of piece number `piece`, and make `state.sums` views of the buckets' `flats`."""
    settings, writes = state.settings, plan.partition.pieces[piece].writes
    results = plan.partition.signature.results
    keys = {result.key for result in results if result.kind == "gradient" and result.name in writes}
    kinds: dict[tuple[tuple[int, ...], torch.dtype, bool], list[str]] = {}
    for unit in state.units:
        if unit.key in keys:
            assert settings.optimizer is not None
            dtype = settings.optimizer.type_for(state.weight(unit).dtype)
            kind = settings.members(unit.key, unit.replica), dtype, unit.key in state.owner
            kinds.setdefault(kind, []).append(unit.key)
    return [_bucket(mine, *kind, state) for kind, mine in kinds.items()]


def _bucket(
    keys: Sequence[str], members: tuple[int, ...], dtype: torch.dtype, is_sharded: bool, state: State
) -> Bucket:
    weights = {key: state.values[members[0]][state.slot_of[key]] for key in keys}
    step = max(1, _ALIGNED // dtype.itemsize)
    cuts, starts = [0], {}
    for owner in range(state.settings.counts.instances) if is_sharded else [None]:
        end = cuts[-1]
        for key in (key for key in keys if state.owner.get(key) == owner):
            starts[key] = end
            end += -(-weights[key].numel() // step) * step
        cuts.append(end)
    flats = tuple(torch.zeros(cuts[-1], dtype=dtype, device=state.device) for _ in members)
    for replica, flat in zip(members, flats, strict=True):
        for key, start in starts.items():
            weight = weights[key]
            state.sums[replica][key] = flat.as_strided(weight.shape, weight.stride(), start)
    return Bucket(tuple(starts), members, flats, tuple(cuts) if is_sharded else None)
