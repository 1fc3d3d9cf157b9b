"""What can be asked of an executor: its latest call's times and anchors, its names, how long it took to compile."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Any, Self

from torch import Tensor, nn

from popengine.errors import Error

from ..annotating.blocks import module_repr
from ..annotating.replica_groups import GroupableParameter
from ..options import Options
from ..reporting.logs import logger
from ..reporting.perf_counters import Latency, Times
from .state import ExecutorState


class Inquiries(ExecutorState):
    """The part of an executor that only answers."""

    @property
    def model(self) -> Any:
        """The user's model; of an executor for inference, its own copy of the top level: weights and parts are
        shared, and its flags are what forward finds when it is compiled."""
        return self._user_model if self._training else self._model

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model (in training: of its parts; what forward finds at the top is as at wrapping).

        The compilation has the modes of its moment for good; afterwards this is a warning, until `destroy`.
        """
        if self._executable is not None:
            logger.warning("train() and eval() come too late: the model is compiled, and its mode with it")
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """`train(False)`."""
        return self.train(False)

    @property
    def options(self) -> Options:
        """The executor's own frozen options, with an output mode picked."""
        return self._options

    # ---- times -------------------------------------------------------------------------------------------

    @property
    def memory_format(self) -> str:
        """*Ours*: the layout of the compiled model's convolutions, "preserve" or "channels_last": what "auto" chose.

        Raises: Error, before compilation.
        """
        return self._need_executable().memory_format

    def getPerfCounters(self) -> dict[str, Times]:
        """When the latest call's micro-batches were staged and its outputs arrived.

        Keys input, input_complete, output, output_complete; for each tensor a list of seconds (host clock,
        arbitrary zero): one for each micro-batch, and one for each output that the output mode keeps.
        """
        return asdict(self._latest.counters)

    def getLatency(self) -> Latency:
        """(min, max, mean) seconds from the staging of a micro-batch to the arrival of its outputs."""
        return self._latest.counters.round_trip()

    def getHostIpuLatency(self) -> Latency:
        """(min, max, mean) seconds that it took to stage a micro-batch."""
        return self._latest.counters.host_to_ipu()

    def getComputeLatency(self) -> Latency:
        """(min, max, mean) seconds between the staging of a micro-batch and its first output."""
        return self._latest.counters.compute()

    def getIpuHostLatency(self) -> Latency:
        """(min, max, mean) seconds that it took outputs to arrive."""
        return self._latest.counters.ipu_to_host()

    def compilationTime(self) -> timedelta:
        """How long the compilation took."""
        if not self._options._show_progress_bar:
            raise Error("compilationTime() needs options.showCompilationProgressBar(True)")
        if self._compilation_seconds is None:
            raise Error(
                "compile the model before obtaining compilation time: call it, or model.compile(*inputs)"
            )
        return timedelta(seconds=self._compilation_seconds)

    def cycleCount(self) -> int:
        """Refused: there are no cycles to count here."""
        if not self._options._Popart.options.get("instrumentWithHardwareCycleCounter"):
            raise Error("Cycle count logging is disabled\n  fix: options.logCycleCount(True)")
        if self._latest.has_run:
            raise Error(
                "cycleCount() is only supported on actual IPU hardware; getPerfCounters() has seconds"
            )
        raise Error("cycleCount() is for a model that has run: run the model at least once")

    # ---- tensors -----------------------------------------------------------------------------------------

    def getTensorNames(self) -> list[str]:
        """The names of tensors, all of which `Options.anchorTensor` takes."""
        assert self._executable is not None, (
            "getTensorNames() needs a compiled model: call it, or model.compile(*inputs), before"
        )
        return list(self._executable.anchors.names)

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """The latest call's value of a tensor that `Options.anchorTensor(short_name, ...)` asked for."""
        assert short_name in self._latest.anchored, (
            f"No tensor with name {short_name} found. Known now: {', '.join(self._latest.anchored) or 'none'}\n"
            "  fix: options.anchorTensor(short_name, long_name) before wrapping, and call the model"
        )
        return self._latest.anchored[short_name]

    @property
    def notes(self) -> list[tuple[Any, Any]]:
        """What the forward has noted (`poptorch.annotating.notes`), with the latest call's values."""
        return list(self._latest.notes)

    def _debugGetPopartIR(self) -> str:
        """Refused: there is no PopART graph here."""
        raise Error("_debugGetPopartIR: this implementation has no PopART graph to show")

    # ---- the user's model --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return module_repr(self._user_model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and "_user_model" not in self.__dict__:
            raise AttributeError(name)  # while the executor is being made
        value = getattr(self.model, name)
        if isinstance(value, nn.Parameter) and name in self._user_model._parameters:
            groupings = self.per_replica_params if self._executable is None else None
            return GroupableParameter.of(value, name, groupings)
        return value
