"""Bodies: graphs inside a graph, and the two operations that run them, a branch and a loop.

A body travels as text in an argument of the operation, so that a piece stays source and nothing else. This
file says what the operations look like; `compile/subgraph.py` makes bodies and `run/control.py` runs them.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .ir import Piece


@dataclass(frozen=True)
class Body:
    """A function from tensors to tensors, and the shape and type of each that it returns."""

    piece: Piece
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    draws: bool  # somewhere in it random numbers are drawn

    def packed(self) -> str:
        outputs = [[list(shape), str(dtype).removeprefix("torch.")] for shape, dtype in self.outputs]
        return json.dumps({"piece": asdict(self.piece), "outputs": outputs, "draws": self.draws})

    @staticmethod
    @functools.cache
    def unpacked(text: str) -> Body:
        entries = json.loads(text)
        outputs = tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in entries["outputs"])
        parts: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in entries["piece"].items()
        }
        return Body(Piece(**parts), outputs, entries["draws"])


LIBRARY = torch.library.Library("popengine", "DEF")
_COND = (
    "(Tensor condition, str then_body, Tensor[] then_inputs, str else_body, Tensor[] else_inputs) -> Tensor[]"
)
_LOOP = "(int count, str body, Tensor[] state, Tensor[] others) -> Tensor[]"
# A second name for bodies that draw random numbers: the tag has them drawn as those of any operation are.
LIBRARY.define("cond" + _COND)
LIBRARY.define("loop" + _LOOP)
LIBRARY.define("cond_that_draws" + _COND, tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.define("loop_that_draws" + _LOOP, tags=(torch.Tag.nondeterministic_seeded,))


def _like(body: str, device: torch.device) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in Body.unpacked(body).outputs]


def _pretend_cond(
    condition: Tensor, then_body: str, then_inputs: list[Tensor], else_body: str, else_inputs: list[Tensor]
) -> list[Tensor]:
    return _like(then_body, condition.device)


def _pretend_loop(count: int, body: str, state: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return _like(body, state[0].device)


for _suffix in ("", "_that_draws"):
    torch.library.register_fake(f"popengine::cond{_suffix}", _pretend_cond, lib=LIBRARY)
    torch.library.register_fake(f"popengine::loop{_suffix}", _pretend_loop, lib=LIBRARY)
