"""OpenMP's teams: the threads that help a thread within its operations, and stay with it.

GNU's library counts the threads of all teams. Where these are more than the cores, no team waits for its next
operation by spinning any more, and waking it takes longer than many operations do (a step of ResNet-18 took 1.4
times as long). So a thread lets go of its team before another one computes with several threads. A new team
is there within 0.1 ms.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

_SOFT = 1  # omp_pause_soft: the library's settings stay


def let_go_of_team() -> None:
    """End the threads that help the calling thread, where the library is GNU's."""
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], object]:
    try:
        # Only if it is loaded: torch has another one on some systems.
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return library.omp_pause_resource_all
    except (OSError, AttributeError):
        return lambda kind: None
