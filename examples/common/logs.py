"""Lines as programs that parse them expect: to stderr, from instance 0 alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

WIDTH = 59
logger = logging.getLogger("examples")


def start(shows: bool) -> None:
    """`shows`: this is instance 0; the others are silent."""
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO if shows else logging.ERROR)


def say(line: str) -> None:
    logger.info("%s", line)


def dashes() -> None:
    say("-" * WIDTH)


def heading(title: str) -> None:
    say(f" {title} ".center(WIDTH, "-"))


@contextmanager
def phase(title: str, done: str) -> Iterator[None]:
    """A heading, then what was done in how many seconds, then dashes. `done`: with {} for the seconds."""
    heading(title)
    started = time.perf_counter()
    yield
    say(done.format(time.perf_counter() - started))
    dashes()
