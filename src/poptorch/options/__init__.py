"""The options a user builds: `Options`, its parts, and the error of a faulty options file."""

from poptorch.options.distributed import Distributed
from poptorch.options.load import ConfigFileError
from poptorch.options.locations import TensorLocations, TensorLocationSettings
from poptorch.options.option_base import OptionsDict
from poptorch.options.options import Options
from poptorch.options.popart import Popart
from poptorch.options.precision import Jit, Precision
from poptorch.options.training import Training

__all__ = [
    "ConfigFileError",
    "Distributed",
    "Jit",
    "Options",
    "OptionsDict",
    "Popart",
    "Precision",
    "TensorLocationSettings",
    "TensorLocations",
    "Training",
]
