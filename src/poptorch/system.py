"""What programs ask about the machine. Ipus are logical devices here, so there is always one more."""


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """True: emulated ipus count, and as many as a model names can be had."""
    return num_ipus >= 0


def ipuHardwareVersion() -> int:
    """The generation of ipus that programs should prepare for: 2."""
    return 2  # programs ask for it to choose between the memory sizes of two generations
