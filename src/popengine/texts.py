"""Parts of texts for users: counted nouns and tables."""

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural, as text: "1 stage", "2,000 stages", "2 batches"."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('h') else 's'}"


def table_text(rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """Return a text with a line for each row of cells; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(gap.join(map(str.ljust, row, widths)).rstrip() for row in rows)
