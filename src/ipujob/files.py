"""IPUJob files: YAML documents with the line number of each node, and the jobs in them."""

import copy
import dataclasses
import itertools
import random
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .rules import Fault, Images, Job, child_path, job_warnings, parse

_MOST_NODES = 100_000  # of a document
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"  # an API server draws from the same letters for `generateName`


class InputError(Exception):
    """An error that lists all faults in files, each as `FILE:LINE: message`, or in arguments."""


@dataclass(frozen=True)
class Document:
    """One YAML document of a file."""

    file: str
    value: Any
    lines: dict[str, int] = field(repr=False)  # the line number of each node, by its path
    faults: list[Fault] = field(default_factory=list)  # duplicate keys

    @property
    def kind(self) -> str:
        return str(self.value.get("kind")) if isinstance(self.value, dict) else type(self.value).__name__

    def line(self, path: str) -> int:
        """Return the line number of `path`, or of its nearest known parent."""
        while path not in self.lines:
            path = re.sub(r"(^|[.\[])[^.\[]*$", "", path)
        return self.lines[path]

    def located_message(self, path: str, message: str, fix: str = "") -> str:
        """Return "FILE:LINE: message" and the fix."""
        text = f"{self.file}:{self.line(path)}: {message}"
        return f"{text}\n  fix: {fix}" if fix else text

    def error(self, faults: Iterable[Fault]) -> InputError:
        ordered = sorted(faults, key=lambda fault: self.line(fault.path))
        return InputError("\n".join(self.located_message(*fault) for fault in ordered))


def read_documents(file: str) -> list[Document]:
    """Return the documents of a YAML file that are not empty; "-" is standard input. Raises: InputError"""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't text"
        fix = "name a YAML file, or - for standard input"
        raise InputError(f"{file}: can't be read: {reason}\n  fix: {fix}") from None
    documents = []
    try:
        for node in yaml.compose_all(text, yaml.SafeLoader):
            lines: dict[str, int] = {}
            duplicates = list(_collect_line_numbers(node, "", lines, itertools.count()))
            value = yaml.SafeLoader("").construct_document(node)
            if value is not None:
                documents.append(Document(file, value, lines, duplicates))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        reason = getattr(error, "problem", None) or error
        raise InputError(
            f"{file}:{line}: not YAML: {reason}\n  fix: correct this line; a file of IPUJobs is YAML"
        ) from None
    if not documents:
        raise InputError(f"{file}:1: the file is empty\n  fix: write an IPUJob into it")
    return documents


def _collect_line_numbers(
    node: yaml.Node, path: str, lines: dict[str, int], visits: Iterator[int]
) -> Iterator[Fault]:
    """Add the line number of each YAML node to `lines`, in place; yield a fault for each duplicate key. Raises:
    ValueError, if `visits` counts too many nodes: nested aliases stand for exponentially many"""
    if next(visits) > _MOST_NODES:
        raise ValueError(f"its aliases stand for more than {_MOST_NODES:,} values")
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = child_path(path, str(key.value))
            if inner in lines and key.value != "<<":
                message = f"{key.value} stands twice here, first on line {lines[inner]}"
                yield Fault(inner, message, "keep one of them")
            lines[inner] = key.start_mark.line + 1
            yield from _collect_line_numbers(value, inner, lines, visits)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _collect_line_numbers(value, child_path(path, index), lines, visits)


def load_job(document: Document, device: str = "cpu", images: Images | None = ()) -> Job:
    """Return the job of a document; print its warnings on standard error. `device` and `images`: as in
    `rules.parse`. Raises: InputError, with all faults of the document"""
    if not isinstance(document.value, dict):
        message = f"this is a {document.kind}, not an IPUJob"
        raise document.error([Fault("", message, "kind: IPUJob")])
    job, faults = parse(document.value, device, images)
    if job is None or document.faults:
        raise document.error(document.faults + faults)
    for path, text in job_warnings(job, document.value):
        print(document.located_message(path, f"warning: {text}"), file=sys.stderr)
    return job


def with_overrides(document: Document, name: str | None = None, command: str | None = None) -> Document:
    """Return a document with metadata.name (`name`, else its own, else its generateName with five letters), and
    the bash script `command` for worker and launcher; a malformed document is returned unchanged."""
    value = copy.deepcopy(document.value)
    try:
        metadata = value["metadata"]
        start = metadata.pop("generateName", None)
        metadata["name"] = name or metadata.get("name") or start + "".join(random.choices(_LETTERS, k=5))
        if command is not None:
            container = value["spec"]["workers"]["template"]["spec"]["containers"][0]
            container |= {"command": ["/bin/bash", "-c", command], "args": []}
            if "launcher" in value["spec"]:
                value["spec"]["launcher"]["command"] = container["command"]
    except (KeyError, TypeError, IndexError, AttributeError):
        return document
    return dataclasses.replace(document, value=value)
