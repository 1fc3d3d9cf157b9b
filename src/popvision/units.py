"""Texts of numbers with units."""

from popengine.profile import Profile


def three_digits(value: float) -> str:
    """Return a number with three significant digits, without an exponent: "0.0123", "1.5", "16,700"."""
    return f"{value:.3g}" if 1e-4 < abs(value) < 999.5 or not value else f"{float(f'{value:.3g}'):,.0f}"


def size_text(count: float | None) -> str:
    """Return a number of bytes with a unit, such as "1.5 MiB"; "–" for None."""
    if count is None:
        return "–"
    if abs(count) < 1024:
        return f"{count:.0f} B"
    unit = 1 if abs(count) < 1 << 20 else 2 if abs(count) < 1 << 30 else 3
    return f"{three_digits(count / 1024**unit)} {('KiB', 'MiB', 'GiB')[unit - 1]}"


def seconds_text(value: float | None) -> str:
    """Return seconds with a unit, such as "2.5 ms"; "–" for None."""
    if value is None:
        return "–"
    factor, unit = (1, "s") if value >= 1 else (1e3, "ms") if value * 1e3 >= 1 else (1e6, "µs")
    return f"{three_digits(value * factor)} {unit}"


def rate_text(value: float | None) -> str:
    """Return samples per second as a text; "–" for None."""
    return "–" if value is None else f"{value:,.0f} samples/s"


def share_text(value: float | None) -> str:
    """Return a fraction in percent, such as "12.5%"; "–" for None."""
    return "–" if value is None else f"{value:.1%}"


def cores_text(profile: Profile, used: int) -> str:
    """Return how many of the machine's cores ran tasks: "1 of 2 cores", "2 cores". `used`: those of the trace, or 0."""
    count, machine = used or profile.facts.get("threads", 0), profile.facts.get("cores", 0)
    of_all = f" of {machine}" if count < machine else ""
    return f"{count}{of_all} core{'s' * ((machine if of_all else count) != 1)}"
