"""Comparison of two runs: the same figures of both, and which run is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .analysis import Figures
from .units import rate, seconds, share, size, table


@dataclass(frozen=True)
class Row:
    """One figure of both runs. `spread`: the share by which the figure differs between equal runs. `better`:
    the better run; "" if the difference is below `spread` or 1 %."""

    name: str
    first: float | None
    second: float | None
    in_words: Callable[[float | None], str]
    spread: float = 0.0

    @property
    def ratio(self) -> float | None:
        return self.second / self.first if self.first and self.second is not None else None

    @property
    def better(self) -> Literal["first", "second", ""]:
        if self.first is None or self.second is None:
            return ""
        top = max(abs(self.first), abs(self.second))
        if abs(self.first - self.second) <= max(0.01, self.spread) * top:
            return ""
        more_is_better = self.in_words is rate
        return "second" if (self.second > self.first) == more_is_better else "first"

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON; `first` and `second` are texts with units."""
        words = {"first": self.in_words(self.first), "second": self.in_words(self.second)}
        return {"name": self.name, **words, "ratio": self.ratio, "spread": self.spread, "better": self.better}


def compare(a: Figures, b: Figures) -> list[Row]:
    """Return a row for each figure of two runs, also if only one run has the stage or block."""
    of_steps, of_costs = a.step_spread + b.step_spread, a.spread + b.spread
    rows = [
        Row(name, getattr(a, field), getattr(b, field), in_words, spread)
        for name, field, in_words, spread in (
            ("throughput", "samples_per_second", rate, of_steps),
            ("throughput with the time between calls", "samples_per_second_overall", rate, of_steps),
            ("time of a step", "step_seconds", seconds, of_steps),
            ("a step on separate devices", "step_apart", seconds, of_costs),
            ("a step here", "step_here", seconds, of_costs),
            ("compilation", "compile_seconds", seconds, 0.0),
            ("bubble, measured", "bubble_measured", share, 0.0),
            ("bubble, ideal", "bubble_ideal", share, 0.0),
        )
    ]
    totals = [[need.total for need in found.needs] for found in (a, b)]
    activations = (sum(need.activations for need in found.needs) for found in (a, b))
    rows += [
        Row("largest ipu", *(max(sizes, default=None) for sizes in totals), in_words=size),
        Row("all ipus", *(sum(sizes) if sizes else None for sizes in totals), in_words=size),
        Row("activations", *activations, in_words=size),
    ]
    stages, blocks = [_stage_times(a), _stage_times(b)], [_block_times(a), _block_times(b)]
    for times, spread in ((stages, of_costs), (blocks, 0.0)):
        for name in {**times[0], **times[1]}:
            rows.append(Row(name, times[0].get(name), times[1].get(name), seconds, spread))
    return rows


def _stage_times(found: Figures) -> dict[str, float]:
    """Return the seconds of each stage's phases, by the name of the row."""
    return {
        f"stage {stage.stage}, {phase}": getattr(stage, phase) / 1e9
        for stage in found.stages
        for phase in ("forward", "backward", "update")
        if getattr(stage, phase)
    }


def _block_times(found: Figures) -> dict[str, float]:
    """Return the seconds of each block's phases for a micro-batch, by the name of the row."""
    times: dict[str, float] = {}
    for row in found.groups["block"]:
        name = f"block {row['block']}, {'forward' if row['phase'] == 'F' else 'backward'}"
        times[name] = times.get(name, 0.0) + row["ns"] / max(row["calls"], 1) / 1e9
    return times


def text(rows: Sequence[Row], names: tuple[str, str]) -> str:
    """Return a table for the terminal; `<` stands beside the better figure."""
    lines = [["", names[0][-24:], names[1][-24:], "ratio", "spread"]]
    for row in rows:
        cells = [
            row.in_words(value) + (" <" if row.better == side else "")
            for side, value in (("first", row.first), ("second", row.second))
        ]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append([row.name[:40], *cells, ratio, f"± {row.spread:.0%}" if row.spread >= 0.005 else ""])
    return table(lines) + "\n"
