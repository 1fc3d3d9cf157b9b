"""YAML files as values that know on which line each of their parts stands."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Place = tuple[str | int, ...]  # keys and indices, from the top of a document


@dataclass(frozen=True)
class Fault:
    """What is wrong with a document, where, and what to write instead."""

    place: Place
    message: str
    fix: str = ""


class Faults(Exception):
    """All that is wrong with some files, one a line: `FILE:LINE: message`."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Document:
    """One document of a file."""

    file: str
    value: Any
    line: int
    lines: dict[Place, int] = field(repr=False)
    faults: tuple[Fault, ...] = ()  # keys that stand twice

    def is_job(self) -> bool:
        return isinstance(self.value, dict) and self.value.get("kind") == "IPUJob"

    def kind(self) -> str:
        return str(self.value.get("kind")) if isinstance(self.value, dict) else type(self.value).__name__

    def say(self, place: Place, message: str, fix: str = "") -> str:
        """The message with file and line: the line of what is nearest, where the place itself is missing."""
        while place not in self.lines and place:
            place = place[:-1]
        text = f"{self.file}:{self.lines.get(place, self.line)}: {message}"
        return f"{text}\n  fix: {fix}" if fix else text


def read(file: str) -> list[Document]:
    """The documents of a file (`-`: of standard input) that aren't empty.

    Raises:
        Faults: the file can't be read, is no YAML, or holds nothing
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't text"
        raise Faults([f"{file}: can't be read: {reason}"]) from None
    loader = yaml.SafeLoader(text)
    found = []
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None
            lines: dict[Place, int] = {}
            twice = tuple(_walk(node, (), lines, set()))
            value = loader.construct_document(node)
            if value is not None:
                found.append(Document(file, value, node.start_mark.line + 1, lines, twice))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise Faults([f"{file}:{line}: not YAML: {error.problem or error.context}"]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Faults([f"{file}:1: not YAML: {error}"]) from None
    finally:
        loader.dispose()
    if not found:
        raise Faults([f"{file}:1: the file is empty\n  fix: write an IPUJob into it"])
    return found


def _walk(node: yaml.Node, place: Place, lines: dict[Place, int], above: set[int]) -> Iterator[Fault]:
    """Note the line of every part; yield a fault for each key that stands twice (YAML would keep the last)."""
    lines.setdefault(place, node.start_mark.line + 1)
    if id(node) in above:  # an alias within itself
        raise yaml.YAMLError("an alias that holds itself")
    above = above | {id(node)}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*place, str(key.value))
            if inner in lines and key.value != "<<":
                yield Fault(
                    inner, f"{key.value} stands twice here, first on line {lines[inner]}", "keep one of them"
                )
            lines[inner] = key.start_mark.line + 1
            yield from _walk(value, inner, lines, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _walk(value, (*place, index), lines, above)
