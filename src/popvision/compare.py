"""Comparison of two runs: the same figures of both, and which run is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from popengine.profile import Profile

from .analysis import Figures, figures, grouped_rows
from .times import on_the_stages_clock
from .units import rate, seconds, share, size


@dataclass(frozen=True)
class Row:
    """One figure of both runs. `spread`: the share by which it differs between equal runs. `better` names the better
    run, or none if they differ by less than that, or by less than 1 %."""

    name: str
    first: float | None
    second: float | None
    kind: Literal["rate", "seconds", "share", "bytes", "count"]
    more_is_better: bool = False
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
        return "second" if (self.second > self.first) == self.more_is_better else "first"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "first": shown(self.first, self.kind),
            "second": shown(self.second, self.kind),
            "ratio": self.ratio,
            "spread": self.spread,
            "better": self.better,
        }


def shown(value: float | None, kind: str) -> str:
    if value is None:
        return "–"
    forms: dict[str, Callable[[float], str]] = {
        "rate": rate,
        "seconds": seconds,
        "share": share,
        "bytes": size,
        "count": lambda count: f"{count:,.0f}",
    }
    return forms[kind](value)


def compare(first: Profile, second: Profile) -> list[Row]:
    """Return the figures that at least one of two runs has."""
    a, b = figures(first), figures(second)

    of_steps, of_costs = a.step_spread + b.step_spread, a.spread + b.spread

    def both(
        name: str, read: Callable[[Figures], float | None], kind: Any, more: bool = False, spread: float = 0.0
    ) -> Row:
        return Row(name, read(a), read(b), kind, more, spread)

    rows = [
        both("throughput", lambda f: f.samples_per_second, "rate", True, of_steps),
        both(
            "throughput with the time between calls",
            lambda f: f.samples_per_second_overall,
            "rate",
            True,
            of_steps,
        ),
        both("time of a step", lambda f: f.step_seconds, "seconds", spread=of_steps),
        both("a step on separate devices", lambda f: f.step_apart, "seconds", spread=of_costs),
        both("a step here", lambda f: f.step_here, "seconds", spread=of_costs),
        both("compilation", lambda f: f.compile_seconds, "seconds"),
        both("bubble, measured", lambda f: f.bubble_measured, "share"),
        both("bubble, ideal", lambda f: f.bubble_ideal, "share"),
        both("largest ipu", lambda f: max((need.total for need in f.needs), default=None), "bytes"),
        both("all ipus", lambda f: sum(need.total for need in f.needs) if f.needs else None, "bytes"),
        both("activations", lambda f: sum(need.activations for need in f.needs), "bytes"),
    ]
    for stage in range(max(len(a.stages), len(b.stages))):
        for phase in ("forward", "backward", "update"):
            one, other = _stage(a, stage, phase), _stage(b, stage, phase)
            if one or other:
                rows.append(Row(f"stage {stage}, {phase}", one, other, "seconds", spread=of_costs))
    return rows + _blocks(first, second)


def _stage(found: Figures, stage: int, phase: str) -> float | None:
    return getattr(found.stages[stage], phase) / 1e9 if stage < len(found.stages) else None


def _blocks(first: Profile, second: Profile) -> list[Row]:
    times: list[dict[tuple[str, str], float]] = []
    for profile in (first, second):
        rows: dict[tuple[str, str], float] = {}
        for row in grouped_rows(on_the_stages_clock(profile), "block"):
            key = row["block"], "forward" if row["phase"] == "F" else "backward"
            rows[key] = rows.get(key, 0.0) + row["ns"] / max(row["calls"], 1) / 1e9
        times.append(rows)
    keys = dict.fromkeys([*times[0], *times[1]])
    return [
        Row(f"block {block}, {phase}", times[0].get((block, phase)), times[1].get((block, phase)), "seconds")
        for block, phase in keys
    ]


def text(first: Profile, second: Profile, names: tuple[str, str]) -> str:
    """Return a table for the terminal; `<` stands beside the better figure."""
    lines = [f"{'':40} {names[0][-24:]:>26} {names[1][-24:]:>26}    ratio   spread"]
    for row in compare(first, second):
        marks = ["<" if row.better == side else " " for side in ("first", "second")]
        ratio = "" if row.ratio is None else f"{row.ratio:8.2f}"
        spread = f"± {row.spread:.0%}" if row.spread >= 0.005 else ""
        cells = [shown(value, row.kind) for value in (row.first, row.second)]
        lines.append(
            f"{row.name[:40]:40} {cells[0]:>24} {marks[0]} {cells[1]:>24} {marks[1]} {ratio:8} {spread}"
        )
    return "\n".join(lines) + "\n"
