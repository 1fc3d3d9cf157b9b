"""`Options`: all that a user may choose about compiling and running a model, in one builder.

Setters check, store and return the object, so they chain. The first model or data loader that uses the
options freezes them; `clone()` gives a copy that can be changed.
"""

import os
from typing import Any, Self

from popengine.settings import Counts
from poptorch.annotating.strategies import PipelinedExecution
from poptorch.enums import CommGroupType
from poptorch.options import distributed, locations, precision, training  # names that no property hides
from poptorch.options.device import DeviceOptions
from poptorch.options.distributed import Distributed
from poptorch.options.execution import ExecutionOptions
from poptorch.options.load import load_file, load_json
from poptorch.options.locations import TensorLocations
from poptorch.options.option_base import Freezable, merged, printed
from poptorch.options.popart import Popart
from poptorch.options.precision import Jit, Precision
from poptorch.options.reporting import ReportingOptions
from poptorch.options.training import Training

_LIBRARIES = ("site-packages/torch", "src/poptorch", "site-packages/poptorch", "src/popengine")


class Options(ExecutionOptions, DeviceOptions, ReportingOptions):
    """All that a user may choose about compiling and running a model.

    >>> opts = poptorch.Options().deviceIterations(4).replicationFactor(2)
    >>> opts.Training.gradientAccumulation(8)
    >>> opts.device_iterations
    4
    """

    _renamed = {
        "Popart": "_Popart",
        "anchorMode": "outputMode",
        "defaultAnchorMode": "defaultOutputMode",
    }

    _distributed: distributed.Distributed
    _jit: precision.Jit
    _precision: precision.Precision
    _tensor_locations: locations.TensorLocations
    _training: training.Training

    def __init__(self) -> None:
        popart = Popart()
        super().__init__(popart)
        self._declare(
            _distributed=Distributed(),
            _jit=Jit(),
            _precision=Precision(popart),
            _tensor_locations=TensorLocations(),
            _training=Training(popart),
            _execution_strategy=PipelinedExecution(),
            _source_location_excludes=list(_LIBRARIES),
            _show_progress_bar=True,
            _relax_optimizer_checks=False,
            _module_namescope_enabled=True,
        )
        self._read_environment()

    @property
    def TensorLocations(self) -> TensorLocations:
        """Where tensors are kept, see `poptorch.options.TensorLocations`."""
        return self._tensor_locations

    @property
    def Distributed(self) -> Distributed:
        """Which of how many processes this is, see `poptorch.options.Distributed`."""
        return self._distributed

    @property
    def Jit(self) -> Jit:
        """Deprecated options of tracing, see `poptorch.options.Jit`."""
        return self._jit

    @property
    def Precision(self) -> Precision:
        """Number formats, see `poptorch.options.Precision`."""
        return self._precision

    @property
    def Training(self) -> Training:
        """How gradients become a weight update, see `poptorch.options.Training`."""
        return self._training

    @property
    def _Popart(self) -> Popart:
        """Settings by the names of the original's compiler."""
        return self._popart

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Apply a file of settings, one a line, as it is written after `options.`.

        Raises: ConfigFileError, naming the line that is no setting.
        """
        load_file(self, os.fspath(filepath))
        return self

    def from_json(self, string: str) -> Self:
        """Apply a JSON object: `{"Training.gradientAccumulation": 4, "outputMode": "OutputMode.All"}`."""
        load_json(self, string)
        return self

    def toDict(self) -> dict[str, Any]:
        """All values in one dictionary, those of the parts too.

        Raises: AssertionError, while the output mode is Default.
        """
        assert not self.defaultOutputMode(), (
            "An output mode must be picked before toDict(): call outputMode(...), or read the options of a "
            "model (model.options), where it is Final in training and All in inference"
        )
        parts = [self._execution_strategy.backendOptions(), self._popart.toDict()]
        parts += [nested.toDict() for nested in (self._training, self._distributed, self._tensor_locations)]
        everything = super().toDict()
        for part in parts:
            everything = merged(everything, part)
        return everything

    def _counts(self) -> Counts:
        """The factors of a batch."""
        return Counts(
            iterations=self.device_iterations,
            accumulation=self.Training.gradient_accumulation,
            replicas=self.replication_factor,
            groups=self.replication_factor // self.input_group_size,
            grouping="orthogonal" if self.input_cgt == CommGroupType.Orthogonal else "consecutive",
            instances=self.Distributed.numProcesses,
            instance=self.Distributed.processId,
        )

    def _printed(self) -> list[str]:
        private = [
            f"{name}={printed(value)}"
            for name, value in sorted(vars(self).items())
            if name not in ("_is_frozen", "_values") and not isinstance(value, Freezable)
        ]
        return [*super()._printed(), *private, *sorted(map(repr, self._nested()))]

    def _read_environment(self) -> None:
        cache = os.environ.get("POPTORCH_CACHE_DIR")
        if cache:
            self.enableExecutableCaching(cache)
        defaults = os.environ.get("POPTORCH_DEFAULT_OPTIONS")
        if defaults:
            try:
                self.from_json(defaults)
            except Exception as error:
                error.add_note(f"in the environment variable POPTORCH_DEFAULT_OPTIONS: {defaults}")
                raise
