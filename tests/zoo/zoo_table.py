"""Writes the table of docs/guide/zoo.md: `python tests/zoo/zoo_table.py` runs the whole zoo, and takes minutes."""

import logging
import re
import warnings
from pathlib import Path

import torch
from zoo_configurations import ZOO
from zoo_layouts import DROPOUT, HALVES, LAYOUTS, TEN, answer, answer_in_half, answer_with_dropout

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "zoo.md"
MORE = (*HALVES, DROPOUT)
_TABLE = re.compile(r"^\| library \|.*?\n(?!\|)", re.MULTILINE | re.DOTALL)


def read() -> dict[tuple[str, str], str]:
    """Return the page's answer for each configuration and column."""
    found = _TABLE.search(PAGE.read_text())
    assert found is not None, f"{PAGE} has no table"
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()]
    return {(row[1], column): cell for row in rows for column, cell in zip(head[2:], row[2:], strict=True)}


def answers(name: str) -> list[str]:
    """Return the answers of a configuration, column by column."""
    found = [answer(name, layout) for layout in LAYOUTS]
    if name not in TEN:
        return [*found, *([""] * len(MORE))]
    halves = [answer_in_half(name, dtype) for dtype in HALVES.values()]
    return [*found, *halves, answer_with_dropout(name)]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    columns = ["library", "model", *LAYOUTS, *MORE]
    lines = [columns, ["---"] * len(columns)]
    for name, kind in ZOO.items():
        lines.append([kind.library, name, *answers(name)])
        print(" | ".join(lines[-1]), flush=True)
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    PAGE.write_text(_TABLE.sub(lambda _: table, PAGE.read_text()))


if __name__ == "__main__":
    main()
