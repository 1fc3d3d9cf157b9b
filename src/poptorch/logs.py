"""The log of this package: one logger, `poptorch::python`, whose level and destination the user chooses.

`POPTORCH_LOG_LEVEL` (TRACE, DEBUG, INFO, WARN, ERR, OFF) and `POPTORCH_LOG_DEST` (stderr, stdout or a path)
are read at import; `setLogLevel` changes the level later.
"""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from popengine.errors import did_you_mean

TRACE = 5
OFF = logging.CRITICAL + 1

LEVELS = {
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": OFF,
}
LEVEL_NUMBERS = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}  # 5 is not in use

# PopTorch's environment variables that have no effect here, and why. The log lists those that are set.
RECORDED = {
    "POPTORCH_IPU_MODEL": "all ipus are models here",
    "POPTORCH_SMALL_IPU_MODEL": "ipus have no size here",
    "POPTORCH_IPU_MODEL_VERSION": "ipus have no version here",
    "POPTORCH_WAIT_FOR_IPU": "there is always an ipu: they are logical devices",
    "POPTORCH_EXPORT_PROTO_FILE": "there is no ONNX graph",
    "POPTORCH_EXPORT_PROTO_AS_BINARY": "there is no ONNX graph",
    "POPTORCH_MAX_GRAPH_LEN": "there is no ONNX graph",
    "PVTI_OPTIONS": "profiles are asked for with options.enableProfiling() or POPLAR_ENGINE_OPTIONS",
    "POPART_LOG_LEVEL": "there is one log: POPTORCH_LOG_LEVEL",
    "POPLAR_LOG_LEVEL": "there is one log: POPTORCH_LOG_LEVEL",
}

NEWEST_TORCH = "2.15"  # the newest version of torch on which the tests have run

logger = logging.getLogger("poptorch::python")
logging.getLogger("popengine").parent = logger  # the engine's lines go to the same handlers


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Log only errors while the body runs: it does again what has been said before."""
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(level)


class _Formatter(logging.Formatter):
    """The format of a line: `[07:12:00.123] [poptorch::python] [warning] text`."""

    def format(self, record: logging.LogRecord) -> str:
        record.word = "trace" if record.levelno == TRACE else record.levelname.lower()
        return super().format(record)


class _LiveStreamHandler(logging.StreamHandler):
    """A handler that looks up `sys.stderr` or `sys.stdout` for each line, so that redirection works.

    If a handler of the root logger writes to the terminal this handler writes nothing: a line appears once.
    """

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._stream_name = name

    def filter(self, record: logging.LogRecord) -> bool:
        terminal = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
        is_written = logger.propagate and any(
            getattr(handler, "stream", None) in terminal or type(handler).__name__ == "RichHandler"
            for handler in logging.getLogger().handlers
        )
        return bool(super().filter(record)) and not is_written

    @property
    def stream(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(sys, self._stream_name)


def setLogLevel(level: int | str) -> None:
    """Set the lowest level that is logged.

    >>> poptorch.setLogLevel("INFO")

    Args: level: a number or a name: 0 TRACE, 1 DEBUG, 2 INFO, 3 WARN, 4 ERR, 6 OFF
    Raises: ValueError, for any other number or name
    """
    if isinstance(level, int) and level not in LEVEL_NUMBERS:
        valid = ", ".join(f"{number} {name}" for number, name in LEVEL_NUMBERS.items())
        raise ValueError(f"Invalid log level integer {level}. Valid values are {valid}")
    level = LEVEL_NUMBERS[level] if isinstance(level, int) else level
    if level not in LEVELS:
        valid = f"Valid values are {', '.join(sorted(LEVELS))}{did_you_mean(level, LEVELS)}"
        raise ValueError(f"Unknown log level: {level}. {valid}")
    logger.setLevel(LEVELS[level])


def configure(level: str, destination: str) -> None:
    """Set the log's destination (stderr, stdout or a file) and level; an unknown level is logged, and WARN is set."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    is_stream = destination in ("stderr", "stdout")
    handler = _LiveStreamHandler(destination) if is_stream else logging.FileHandler(destination, delay=True)
    form = "[%(asctime)s.%(msecs)03d] [%(name)s] [%(word)s] %(message)s"
    handler.setFormatter(_Formatter(form, "%H:%M:%S"))
    logger.addHandler(handler)
    try:
        setLogLevel(level)
    except ValueError as error:
        setLogLevel("WARN")
        logger.warning("%s (from POPTORCH_LOG_LEVEL); using WARN", error)


def log_ignored_variables(environment: Mapping[str, str]) -> None:
    """Log at INFO each environment variable in `RECORDED` that is set, and why it has no effect."""
    for name, why in RECORDED.items():
        if name in environment:
            logger.info("%s=%s has no effect: %s", name, environment[name], why)


@functools.cache
def log_no_effect(name: str, why: str) -> None:
    """Log at INFO, once in a process, that an option has no effect here, and why."""
    logger.info("%s has no effect: %s", name, why)


def log_untested_torch(version: str) -> None:
    """Log a warning if a version of torch, such as "2.16.0+cpu", is newer than `NEWEST_TORCH`."""
    if tuple(map(int, version.split(".")[:2])) > tuple(map(int, NEWEST_TORCH.split("."))):
        logger.warning(
            "torch %s is newer than %s, the newest that Pando was tested with: compare results with plain PyTorch's",
            version,
            NEWEST_TORCH,
        )


def listed(names: Sequence[str]) -> str:
    """Return at most five names, and the number of further names, as text: "a, b, c, d, e and 3 more"."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


configure(os.environ.get("POPTORCH_LOG_LEVEL", "WARN"), os.environ.get("POPTORCH_LOG_DEST", "stderr"))
