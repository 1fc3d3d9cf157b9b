"""The budget of `make test`: which items of a test function run there, by the CPU seconds that were measured.

`make durations` writes the table. An item beyond the budget gets the mark `slow`, and runs in `make test-all`.
"""

import json
from collections import defaultdict
from pathlib import Path

TABLE = Path(__file__).with_name("durations.json")
FUNCTION = 1.0  # CPU seconds of the items of a function that run, and of a fixture that they share
CHEAP, MOST = 0.5, 4  # at most so many items of a function run, if all of them cost more than so many seconds
ALL = 400.0  # CPU seconds of all functions together
UNMEASURED = 0.1  # CPU seconds of an item of a function that the table does not have

Table = dict[str, tuple[float, int]]  # CPU seconds of an item, and the number of items, of each function


def function_of(node: str) -> str:
    """Return the function of a node id, without its parameters."""
    return node.partition("[")[0]


def load(path: Path = TABLE) -> Table:
    """Return the table. Fixtures of a module or session have rows, too: their names begin with "fixture"."""
    table = json.loads(path.read_text()) if path.exists() else {}
    return {f"{file}::{name}": tuple(row) for file, rows in table.items() for name, row in rows.items()}


def save(table: Table, path: Path = TABLE) -> None:
    """Write a table with a line for each function, so that changes can be read and merged."""
    files: dict[str, list[str]] = defaultdict(list)
    for function, row in sorted(table.items()):
        file, _, name = function.partition("::")
        files[file].append(f"  {json.dumps(name)}: {json.dumps(row)}")
    text = ",\n".join(f"{json.dumps(file)}: {{\n" + ",\n".join(rows) + "\n}" for file, rows in files.items())
    path.write_text(f"{{\n{text}\n}}\n")


def chosen(function: str, nodes: list[str], fixtures: list[str], always: bool, table: Table) -> set[str]:
    """Return the items of a function that run in `make test`.

    fixtures: the names of the fixtures that it uses
    always:   one item runs whatever it costs (the mark `kind`)
    """
    seconds, _ = table.get(function, (UNMEASURED, 1))
    file = function.partition("::")[0]
    shared = max((table.get(f"{file}::fixture {name}", (0.0, 1))[0] for name in fixtures), default=0.0)
    affordable = int(FUNCTION / max(seconds, 1e-3)) if shared <= FUNCTION else 0
    if seconds * len(nodes) > CHEAP:
        affordable = min(affordable, MOST)
    return by_kind(nodes, min(len(nodes), max(affordable, always)))


def by_kind(nodes: list[str], count: int) -> set[str]:
    """Choose `count` items of a function, which together have as many values of its parameters as possible.

    The values are read from the ids: `test[two-4]` has "two" and "4", also if one list has both parameters.
    """
    if count >= len(nodes):
        return set(nodes)
    values = {node: set(enumerate(node.partition("[")[2].rstrip("]").split("-"))) for node in nodes}
    seen: set[tuple[int, str]] = set()
    found: set[str] = set()
    while len(found) < count:
        best = max((node for node in nodes if node not in found), key=lambda node: len(values[node] - seen))
        found.add(best)
        seen |= values[best]
    return found
