"""The options that a user sets: `Options`, its parts, and the error for a faulty options file."""

from poptorch.options.option_base import OptionsDict
from poptorch.options.option_parts import (
    Distributed,
    Jit,
    Popart,
    Precision,
    TensorLocations,
    TensorLocationSettings,
    Training,
)
from poptorch.options.options import ConfigFileError, Options

__all__ = [name for name, value in vars().items() if isinstance(value, type)]  # pyright: ignore
