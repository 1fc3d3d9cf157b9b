"""What poprun itself says, on standard error."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Log:
    """Warnings and errors always; what it does with `-v`, and every process with `-vv`."""

    verbosity: int

    def debug(self, text: str) -> None:
        if self.verbosity > 1:
            self._note("D", text)

    def info(self, text: str) -> None:
        if self.verbosity:
            self._note("I", text)

    def warning(self, text: str) -> None:
        print(f"poprun: {text}", file=sys.stderr, flush=True)

    error = warning

    @staticmethod
    def _note(level: str, text: str) -> None:
        now = time.time()
        clock = f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03}"
        print(f"{clock}  1  POPRUN [{level}] {text}", file=sys.stderr, flush=True)
