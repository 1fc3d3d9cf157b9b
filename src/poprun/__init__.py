"""`poprun`: starts one training in several processes, on this host or on several, and watches over them.

    poprun --num-replicas 4 --num-instances 2 python3 train.py

`command_line.py` parses the words to a value; `agent.py` gives it to torch.distributed.elastic, which starts the
instances, watches them and starts all again; `nodes.py` is how several popruns meet; `hangs.py` ends what stands still;
`guard.py` sees to it that no process is left when any of these is killed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Log:
    """Poprun's own messages, on standard error: warnings and errors always, others as `verbosity` says."""

    verbosity: int  # 1: what is done; 2: every process

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
