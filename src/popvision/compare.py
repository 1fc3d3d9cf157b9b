"""Comparison of two runs: the same figures of both, and which run is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from popengine.profile import Profile

from .analysis import Figures, figures, grouped_rows
from .times import on_the_stages_clock
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
    more_is_better: bool = False

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
        return "second" if (self.second > self.first) == self.more_is_better else "first"

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON; `first` and `second` are texts with units."""
        return {
            "name": self.name,
            "first": self.in_words(self.first),
            "second": self.in_words(self.second),
            "ratio": self.ratio,
            "spread": self.spread,
            "better": self.better,
        }


def compare(first: Profile, second: Profile) -> list[Row]:
    """Return a row for each figure of two runs, also if only one run has the stage or block."""
    a, b = figures(first), figures(second)
    of_steps, of_costs = a.step_spread + b.step_spread, a.spread + b.spread

    def row(name: str, read: Callable[[Figures], float | None], *more: Any) -> Row:
        return Row(name, read(a), read(b), *more)

    rows = [
        row("throughput", lambda f: f.samples_per_second, rate, of_steps, True),
        row(
            "throughput with the time between calls",
            lambda f: f.samples_per_second_overall,
            rate,
            of_steps,
            True,
        ),
        row("time of a step", lambda f: f.step_seconds, seconds, of_steps),
        row("a step on separate devices", lambda f: f.step_apart, seconds, of_costs),
        row("a step here", lambda f: f.step_here, seconds, of_costs),
        row("compilation", lambda f: f.compile_seconds, seconds),
        row("bubble, measured", lambda f: f.bubble_measured, share),
        row("bubble, ideal", lambda f: f.bubble_ideal, share),
        row("largest ipu", lambda f: max((need.total for need in f.needs), default=None), size),
        row("all ipus", lambda f: sum(need.total for need in f.needs) if f.needs else None, size),
        row("activations", lambda f: sum(need.activations for need in f.needs), size),
    ]
    for stage in range(max(len(a.stages), len(b.stages))):
        for phase in ("forward", "backward", "update"):
            times = [
                getattr(found.stages[stage], phase) / 1e9 if stage < len(found.stages) else None
                for found in (a, b)
            ]
            if any(times):
                rows.append(Row(f"stage {stage}, {phase}", times[0], times[1], seconds, of_costs))
    blocks = [_block_times(first, a), _block_times(second, b)]
    return rows + [
        Row(f"block {', '.join(key)}", blocks[0].get(key), blocks[1].get(key), seconds)
        for key in {**blocks[0], **blocks[1]}
    ]


def _block_times(profile: Profile, found: Figures) -> dict[tuple[str, str], float]:
    """Return the seconds per micro-batch, by (block, phase)."""
    times: dict[tuple[str, str], float] = {}
    for row in grouped_rows(on_the_stages_clock(profile, found.stages), "block"):
        key = row["block"], "forward" if row["phase"] == "F" else "backward"
        times[key] = times.get(key, 0.0) + row["ns"] / max(row["calls"], 1) / 1e9
    return times


def text(first: Profile, second: Profile, names: tuple[str, str]) -> str:
    """Return a table for the terminal; `<` stands beside the better figure."""
    rows = [["", names[0][-24:], names[1][-24:], "ratio", "spread"]]
    for row in compare(first, second):
        marks = [" <" if row.better == side else "" for side in ("first", "second")]
        cells = [row.in_words(row.first) + marks[0], row.in_words(row.second) + marks[1]]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        rows.append([row.name[:40], *cells, ratio, f"± {row.spread:.0%}" if row.spread >= 0.005 else ""])
    return table(rows) + "\n"
