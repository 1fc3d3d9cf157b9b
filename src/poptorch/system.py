"""Queries about ipus, which are logical devices here: any number of them is available."""


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return True: any number of logical ipus is available."""
    return num_ipus >= 0


def ipuHardwareVersion() -> int:
    """Return the generation of ipus, 2. Programs choose memory sizes by it."""
    return 2
