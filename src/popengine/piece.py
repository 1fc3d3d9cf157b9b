"""A piece: the code of one phase of one stage, as a list of operations, and as the Python that runs them."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .order import Phase
from .torch_private import leaves_of

GETITEM = "getitem"  # the call that selects one of an operation's results
GATHER = "popengine.gather_over_replicas.default"  # the call that reads values of other replicas


@dataclass(frozen=True, slots=True)
class Value:
    """A reference to a value of a piece, among the arguments of an operation."""

    name: str


class Line(NamedTuple):
    """One operation: `name = call(*arguments, **named)`. Arguments, also those in lists, may be of type `Value`."""

    name: str
    call: str  # as torch prints an overload: "aten.add.Tensor"; or GETITEM
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...] = ()
    where: str = "?"  # file:line of the user's code
    draw: int | None = None  # the index of its draw of random numbers in the model

    def operands(self) -> list[str]:
        """Return the names of the values that the operation reads, in the order of the arguments."""
        return [value.name for value in leaves_of(Value, (self.arguments, self.named))]


@dataclass(frozen=True, eq=False)
class Piece:
    """The code of one phase of one stage: a function from the values `reads` to the values `writes`."""

    phase: Phase
    stage: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    lines: tuple[Line, ...]
    part: int = 0  # its index among the pieces into which the phase is cut

    def __str__(self) -> str:
        return f"{self.phase}{self.stage}" + (f" part {self.part}" if self.part else "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Piece) and self._code == other._code

    def __hash__(self) -> int:
        return hash(self._code)

    @property
    def _code(self) -> Any:  # as text, in which 1, 1.0 and True differ
        return self.phase, self.stage, self.part, self.source, tuple(self.functions)

    @cached_property
    def draws(self) -> tuple[int, ...]:
        """Return the index in the model of each draw of random numbers; if there are any, the key for the draws is the
        piece's last input."""
        return tuple(line.draw for line in self.lines if line.draw is not None)

    @cached_property
    def gather_group_size(self) -> int:
        """Return the size of the largest group of replicas from which the piece gathers values, else 0."""
        return max((line.arguments[1] for line in self.lines if line.call == GATHER), default=0)

    @cached_property
    def values_to_free(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of values to free before the first line, then after each line: neither read later, nor
        written by the piece."""
        used = [self.reads, *(dict.fromkeys((line.name, *line.operands())) for line in self.lines)]
        last = {name: index for index, names in enumerate(used) for name in names}
        last |= dict.fromkeys(self.writes, -1)
        return tuple(tuple(n for n in names if last[n] == index) for index, names in enumerate(used))

    @cached_property
    def functions(self) -> dict[tuple[str, bool], str]:
        """Return the name of each called function in the source, by (operation, whether it draws random numbers)."""
        names: dict[tuple[str, bool], str] = {}
        for line in self.lines:
            if line.call != GETITEM and (line.call, line.draw is not None) not in names:
                name = re.sub(r"\W", "_", line.call)
                while name in names.values():
                    name += "_"
                names[line.call, line.draw is not None] = name
        return names

    @property
    def calls(self) -> tuple[str, ...]:
        """Return the names of the operations that the piece calls, each once."""
        return tuple(dict.fromkeys(call for call, _ in self.functions))

    @cached_property
    def source(self) -> str:
        """Return the source of `piece(values)`, which empties the list, so that tensors are freed at their last use."""
        return self.source_with()

    def source_with(self, after: str = "") -> str:
        """Return the source with a text, such as "; tick()", before the first operation and after each one."""
        head = self._head_lines()
        statements = ["    values.clear()", *map(self._statement, self.lines)]
        freed = map(release_text, self.values_to_free)
        body = (statement + text + after for statement, text in zip(statements, freed, strict=True))
        writes = "".join(name + ", " for name in self.writes)
        return "\n".join([*head, *body, f"    return ({writes})"]) + "\n"

    def user_line(self, number: int) -> str:
        """Return the user's `file:line` for a line of the source (from 1); "?" if that line has no operation."""
        index = number - 2 - len(self._head_lines())
        return self.lines[index].where if 0 <= index < len(self.lines) else "?"

    def _head_lines(self) -> list[str]:
        taken = [*self.reads, "key"] if self.draws else self.reads
        return ["def piece(values):", f"    {', '.join(taken)}, = values"][: 1 + bool(taken)]

    def _statement(self, line: Line) -> str:
        if line.call == GETITEM:
            value = "{}[{}]".format(*map(_python_text, line.arguments))
        else:
            call = self.functions[line.call, line.draw is not None]
            given = [_python_text(argument) for argument in line.arguments]
            given += [f"{name}={_python_text(argument)}" for name, argument in line.named]
            if line.draw is not None:
                call, given = "draw", [call, "key", str(line.draw), *given]
            value = f"{call}({', '.join(given)})"
        return f"    {line.name} = {value}"


def release_text(names: Any) -> str:
    """Return the text "; a = b = None", which drops the references to the named values; "" without names."""
    return f"; {' = '.join([*names, 'None'])}" if names else ""


def _python_text(argument: Any) -> str:
    """Return an argument as Python text, which may use the names `inf`, `nan`, `torch` and `device`."""
    if isinstance(argument, Value):
        return argument.name
    if isinstance(argument, (list, tuple)):
        inside = "".join(_python_text(item) + ", " for item in argument)
        return f"[{inside}]" if isinstance(argument, list) else f"({inside})"
    return repr(argument)
