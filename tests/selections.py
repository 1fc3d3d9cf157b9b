"""Selections of products of parameters: chosen combinations run in `make test`, and all others are slow."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def by_turns(rows: Iterable[Any], columns: Sequence[Any], first: int = 0) -> list[Any]:
    """All pairs. Each row has one column in turn, beginning with the column of number `first`; the others are slow."""
    return [
        pytest.param(row, column, marks=[] if turn == (number + first) % len(columns) else pytest.mark.slow)
        for number, row in enumerate(rows)
        for turn, column in enumerate(columns)
    ]
