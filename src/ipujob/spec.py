"""The values that an IPUJob file becomes: documents that know their lines, faults, and the job.

A `Document` is one YAML document of a file, with the line of each of its parts. A `Job` has passed every rule.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

API = "graphcore.ai/v1alpha1"
MAX_NAME = 50  # characters; pods are called NAME-worker-K, and a host name holds 63
MAX_HOST = 63

# Annotations: the pattern of their values, and its description for error messages.
DEVICE, IPUS_PER_GPU, IMAGE = "pando/device", "pando/ipus-per-gpu", "pando/image"
RESOURCES, SECURITY, TTL = "pando/resources", "pando/security", "pando/ttl-seconds-after-finished"
ANNOTATIONS = {
    DEVICE: ("cpu|cuda", "cpu or cuda"),
    IPUS_PER_GPU: ("[1-9][0-9]{0,3}", "a whole number of at least 1"),
    RESOURCES: ("keep|drop", "keep or drop"),
    SECURITY: ("keep|drop", "keep or drop"),
    IMAGE: (r"\S+", "an image"),
    TTL: ("[0-9]{1,9}", "a whole number of seconds"),
}


@dataclass(frozen=True)
class Shape:
    """The numbers of instances, workers, replicas and ipus. Pod k is worker k % workers of instance k // workers."""

    instances: int
    workers: int  # of an instance
    replicas: int  # of a worker
    ipus: int  # of an instance

    @property
    def ipus_per_worker(self) -> int:
        return self.ipus // self.workers

    @property
    def ipus_per_replica(self) -> int:
        return self.ipus // (self.workers * self.replicas)


@dataclass(frozen=True)
class Restarts:
    """The restart policy of each instance."""

    policy: str = "Never"
    limit: int = 0  # restarts of an instance
    codes: str = ""

    def wanted(self, failed: bool, code: int | None, restarts: int) -> bool:
        """Return whether an instance that ended is to start again.

        Args:
            failed:   whether one of its workers failed
            code:     that worker's exit code, if it has one
            restarts: how many times the instance was restarted before
        """
        if restarts >= self.limit:
            return False
        if self.policy == "ExitCode":
            return failed and code in exit_codes(self.codes)
        return self.policy == "Always" or (self.policy == "OnFailure" and failed)


@dataclass(frozen=True)
class Job:
    """A valid IPUJob."""

    name: str
    namespace: str
    shape: Shape
    template: dict[str, Any] = field(repr=False)
    mode: str = "single"  # or joined, launched
    launch: tuple[str, ...] = ()
    launch_env: tuple[dict[str, Any], ...] = ()
    restarts: Restarts = Restarts()
    clean: str = "None"  # or Workers, All
    ttl: int | None = None  # seconds, of an interactive job
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def worker(self) -> dict[str, Any]:
        """The template's first container, in which the program runs."""
        return self.template["spec"]["containers"][0]

    @property
    def has_service(self) -> bool:
        return self.mode != "single"


def exit_codes(text: str) -> set[int]:
    """Parse a list of exit codes, such as "1,3-5"."""
    codes: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        codes |= set(range(int(first), min(int(last or first), 255) + 1))
    return codes


def count(number: int, word: str) -> str:
    """Return a number with its noun, such as "2 workers"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


# ---- documents ----------------------------------------------------------------------------------------------------

Place = tuple[str | int, ...]  # keys and indices, from the top of a document


@dataclass(frozen=True)
class Fault:
    """An error in a document: its place, the message, and what to write instead."""

    place: Place
    message: str
    fix: str = ""


class Faults(Exception):
    """All errors in files, each a line of the form `FILE:LINE: message`."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Document:
    """One YAML document of a file, with the line of each of its parts."""

    file: str
    value: Any
    line: int
    lines: dict[Place, int] = field(repr=False)
    faults: tuple[Fault, ...] = ()  # duplicate keys

    def is_job(self) -> bool:
        return isinstance(self.value, dict) and self.value.get("kind") == "IPUJob"

    def kind(self) -> str:
        return str(self.value.get("kind")) if isinstance(self.value, dict) else type(self.value).__name__

    def locate(self, place: Place, message: str, fix: str = "") -> str:
        """Return the message with its file and line; a place that is missing has the line of the part around it."""
        while place not in self.lines and place:
            place = place[:-1]
        text = f"{self.file}:{self.lines.get(place, self.line)}: {message}"
        return f"{text}\n  fix: {fix}" if fix else text


def read(file: str) -> list[Document]:
    """Return the documents of a file that aren't empty; "-" is standard input.

    Raises:
        Faults: the file can't be read, is no YAML, or holds nothing
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't text"
        raise Faults([f"{file}: can't be read: {reason}"]) from None
    loader = yaml.SafeLoader(text)
    documents = []
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None
            lines: dict[Place, int] = {}
            duplicates = tuple(_walk(node, (), lines, set()))
            value = loader.construct_document(node)
            if value is not None:
                documents.append(Document(file, value, node.start_mark.line + 1, lines, duplicates))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise Faults([f"{file}:{line}: not YAML: {error.problem or error.context}"]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Faults([f"{file}:1: not YAML: {error}"]) from None
    finally:
        loader.dispose()
    if not documents:
        raise Faults([f"{file}:1: the file is empty\n  fix: write an IPUJob into it"])
    return documents


def _walk(node: yaml.Node, place: Place, lines: dict[Place, int], above: set[int]) -> Iterator[Fault]:
    """Write each part's line into `lines`, and yield a fault for each duplicate key (YAML would keep the last)."""
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
