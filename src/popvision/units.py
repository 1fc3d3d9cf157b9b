"""Numbers for people."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def seconds(value: float | None) -> str:
    """Seconds."""
    if value is None:
        return "–"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1 or unit == "µs":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError


def rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} samples/s"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
