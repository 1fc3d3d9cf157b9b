"""Parts of texts for users: counted nouns, tables, and explanations of errors that torch raises."""

import re
from collections.abc import Mapping, Sequence

Hints = Mapping[str, tuple[str, str]]  # by a regular expression for an error's text, the reason and the fix

# Of values that a call passes. Some operations check them while forward is recorded, others when it runs.
HINTS_OF_VALUES: Hints = {
    "the same dtype": ("a layer's inputs have the type of its weights", "convert the input: `x.float()`"),
    "class probabilities, got": (
        "probabilities of classes are floats",
        "convert them: `one_hot(labels, classes).float()`; or pass the class numbers, `labels`",
    ),
    "int32/int64|Long|Integers are expected": (
        "indices and classes are integers of 64 bits",
        "`labels.long()`",
    ),
    "0D or 1D target tensor expected": (
        "class numbers are one dimension less than the scores of the classes",
        "remove the dimension: `labels.squeeze(1)`; or pass probabilities, as floats of the scores' shape",
    ),
    "index out of range|out of bounds": (
        "n rows or classes have the indices 0 to n - 1",
        "count from 0, or make the embedding or the last layer larger: `labels.max() + 1` classes",
    ),
}


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural, as text: "1 stage", "2,000 stages", "2 batches"."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('h') else 's'}"


def table_text(rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """Return a text with a line for each row of cells; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(gap.join(map(str.ljust, row, widths)).rstrip() for row in rows)


def hint_for(text: str, hints: Hints = HINTS_OF_VALUES) -> str:
    """Return the lines "why" and "fix" of the first hint that matches an error's text; "" if none does."""
    matching = (hint for words, hint in hints.items() if re.search(words, text))
    return next((f"\n  why: {why}\n  fix: {fix}" for why, fix in matching), "")
