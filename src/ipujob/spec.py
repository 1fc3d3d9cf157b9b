"""The values that an IPUJob becomes: a `Job`, which has passed every rule, or `Fault`s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_HOST = 63  # characters of a host name

Images = Sequence[tuple[str, str]]  # (pattern, image): the first match replaces the template's image


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
        """Return whether an instance that has ended must start again.

        Args:
            failed:   whether one of its workers failed
            code:     that worker's exit code, if it has one
            restarts: the number of restarts of the instance so far
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
    image: str = ""  # of the worker; empty, if it is not used
    device: str = "cpu"  # or cuda
    ipus_per_gpu: int = 1
    drops: tuple[str, ...] = ()  # of "resources", "security": fields of the template that pods don't get
    mode: str = "single"  # or joined, launched
    launch: tuple[str, ...] = ()
    launch_env: tuple[dict[str, Any], ...] = ()
    restarts: Restarts = Restarts()
    clean: str = "None"  # or Workers, All
    ttl: int | None = None  # seconds, of an interactive job
    seconds_kept: int | None = None  # after its end; then the IPUJob is deleted

    @property
    def worker(self) -> dict[str, Any]:
        """Return the template's first container, in which the program runs."""
        return self.template["spec"]["containers"][0]

    @property
    def has_service(self) -> bool:
        return self.mode != "single"


def exit_codes(text: str) -> set[int]:
    """Return the exit codes in a text such as "1,3-5"; codes above 255 are left out."""
    codes: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        codes |= set(range(int(first), min(int(last or first), 255) + 1))
    return codes


def count(number: int, word: str) -> str:
    """Return a number with its noun, such as "2 workers"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


Place = tuple[str | int, ...]  # the path to a part of a document: keys and indices, from the top


class Fault(NamedTuple):
    """An error in a document: the path to the faulty part, a message, and a fix ("": none is known)."""

    place: Place
    message: str
    fix: str = ""
