"""Runs branches and loops: of a branch only the chosen body, of a loop its body as often as it says."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from popengine.control_flow import Body
from popengine.errors import Error

from .eager import Code, build


@functools.cache
def _code(body: str, device: torch.device) -> Code:
    piece = Body.unpacked(body).piece
    if piece.gathers:
        raise Error(
            "replicas can't gather values in a branch or a loop\n  fix: a layer that doesn't, or no poptorch.cond"
        )
    return build(piece, device=device)


def _run(body: str, values: list[Tensor], device: torch.device) -> list[Tensor]:
    # The graph around counts on contiguous tensors, as it was told when it was captured.
    return [value.contiguous() for value in _code(body, device)(values)]


def _cond(
    condition: Tensor, then_body: str, then_inputs: list[Tensor], else_body: str, else_inputs: list[Tensor]
) -> list[Tensor]:
    if bool(condition):
        return _run(then_body, list(then_inputs), condition.device)
    return _run(else_body, list(else_inputs), condition.device)


def _loop(count: int, body: str, state: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    state = list(state)
    for _ in range(count):
        state = _run(body, [*state, *others], state[0].device)
    return state


_library = torch.library.Library("popengine", "IMPL")
for _suffix in ("", "_that_draws"):
    _library.impl(f"cond{_suffix}", _cond, "CompositeExplicitAutograd")
    _library.impl(f"loop{_suffix}", _loop, "CompositeExplicitAutograd")
