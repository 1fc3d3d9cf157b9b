"""An instance that ends while instance 0, which serves the store, is stopped; that one dies while Python finalizes.

`python leaving.py <a fifo>`: instance 0 leaves its process id there, and instance 1 reads it.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import popdist


class KillsAtFinalization:
    """Kills the process when Python clears the modules."""

    def __init__(self, pid):
        self._kill, self._sleep = partial(os.kill, pid, signal.SIGKILL), partial(time.sleep, 1.0)

    def __del__(self):
        self._kill()
        self._sleep()  # threads that waited for that process return to Python now


if __name__ == "__main__":
    popdist.init()
    popdist.synchronize()
    if popdist.getInstanceIndex() == 0:
        Path(sys.argv[1]).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    pid = int(Path(sys.argv[1]).read_text())
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    sys.killer = KillsAtFinalization(pid)
