"""`poprun`: starts one program in several processes, on this host or on several, and watches them.

    poprun --num-replicas 4 --num-instances 2 python3 train.py

`command_line.py` parses the arguments; `hosts.py` starts a poprun on each host by ssh; `agent.py` starts the instances
of this host in each round; `nodes.py` says when rounds begin and end, in an elastic run by `rounds.py`, a pure function
of what all popruns write to a shared folder (`shared_folder.py`, `presence.py`); `guard.py` kills all processes when
one of poprun's own is killed.
"""

import sys
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Log:
    """Prints poprun's messages on standard error; `info` and `debug` only if `verbosity` is high enough."""

    verbosity: int  # 0: warnings and errors; 1: `info`, too; 2: `debug`, too

    def debug(self, text: str) -> None:
        self._print(2, "D", text)

    def info(self, text: str) -> None:
        self._print(1, "I", text)

    def warning(self, text: str) -> None:
        print(f"poprun: {text}", file=sys.stderr, flush=True)

    error = warning

    def _print(self, verbosity: int, level: str, text: str) -> None:
        if self.verbosity >= verbosity:
            clock = datetime.now().time().isoformat("milliseconds")
            print(f"{clock}  1  POPRUN [{level}] {text}", file=sys.stderr, flush=True)
