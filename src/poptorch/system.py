"""Queries about ipus, which are logical devices here: any number of them is available."""


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return True, since any number of logical ipus is available; False for a negative number."""
    return num_ipus >= 0


def ipuHardwareVersion() -> int:
    """Return 2, the hardware version of the ipus. Programs choose memory sizes by it."""
    return 2
