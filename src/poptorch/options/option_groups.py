"""The setters of `Options` itself, in three groups: execution, device, and reporting."""

import contextlib
import json
import os
import re
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Self

import torch

from poptorch.annotating.strategies import ExecutionStrategy, PipelinedExecution
from poptorch.checks import checked
from poptorch.enums import CommGroupType, ConnectionType, OutputMode, SyncPattern
from poptorch.logs import logger
from poptorch.options.option_base import OptionsDict

BACKENDS = ("eager", "inductor")
DEVICES = ("cpu", "cuda", "xpu")
MEMORY_FORMATS = ("preserve", "channels_last", "auto")
_NO_LIMIT = 2**64 - 1
_SYNTHETIC_NORMAL = 2  # popart.SyntheticDataMode.RandomNormal


class ExecutionOptions(OptionsDict):
    """Options for the work of one call, its replicas, and the outputs that it returns."""

    _execution_strategy: ExecutionStrategy = PipelinedExecution()
    _relax_optimizer_checks: bool = False

    anchored_tensors: dict[str, list[Any]] = {}  # short name -> [long name, use default, mode, period]
    backend: str
    broadcast_buffers: bool = True
    check_recording: bool | str
    device_iterations: int = 1
    input_cgt: CommGroupType = CommGroupType.Consecutive
    input_group_size: int = 1
    loss_is_marked: bool
    loss_output: str | int
    memory_format: str
    new_shapes: int
    output_mode: int = OutputMode.Default.value
    output_return_period: int = 1
    random_seed: int
    replication_factor: int = 1

    def deviceIterations(self, device_iterations: int) -> Self:
        """Set the number of weight updates per call (default: 1); in inference, of micro-batches per replica."""
        return self.set(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Set the number of copies of the model in this process (default: 1), each with its own rows."""
        return self.set(replication_factor=replication_factor)

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Self:
        """Give the replicas of a group the same rows of the batch. Call `replicationFactor` before.

        Raises: ValueError if the group size does not divide the replication factor, or for the type All.
        """
        checked("inputReplicaGrouping", input_group_type, CommGroupType, ValueError)
        if input_group_type is CommGroupType.All:
            raise ValueError(
                "input_group_type cannot be All: for the same input on all replicas use Consecutive with "
                f"input_group_size={self.replication_factor}"
            )
        if input_group_type is CommGroupType.NoGrouping:
            return self.set(input_group_size=1, input_cgt=CommGroupType.Consecutive)
        replicas = self.replication_factor
        sizes = tuple(size for size in range(1, replicas + 1) if replicas % size == 0)
        checked(
            f"input_group_size of {replicas} replicas (replicationFactor)",
            input_group_size,
            sizes,
            ValueError,
        )
        return self.set(input_group_size=input_group_size, input_cgt=input_group_type)

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Choose which buffers forward may change if this process has several replicas. True (default):
        running statistics only; any other changed buffer raises Error at compilation. False: any buffer. Each
        replica keeps its own value of a changed buffer, and the host reads that of replica 0."""
        return self.set(broadcast_buffers=broadcast_buffers)

    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> Self:
        """Set which blocks form a stage, and in which order the stages run (default: `PipelinedExecution()`).

        >>> options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
        """
        name = getattr(strategy, "__name__", "")  # of a class
        fix = f"options.setExecutionStrategy(poptorch.{name}())" if name.endswith("Execution") else ""
        self._execution_strategy = checked("setExecutionStrategy", strategy, ExecutionStrategy, fix=fix)
        return self

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Choose the outputs that a call returns. Only EveryN uses the return period (device iterations).

        >>> options.outputMode(poptorch.OutputMode.EveryN, 4)
        """
        period = _return_period(checked("outputMode", output_mode, OutputMode), output_return_period)
        return self.set(output_mode=output_mode, output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Return whether the output mode is Default, which means Final in training and All in inference."""
        return self.output_mode == OutputMode.Default

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> None:
        """Make each call keep the values of a tensor, which `getAnchoredTensor(short_name)` returns.
        As in PopTorch, this is allowed for frozen options.

        >>> options.anchorTensor("slope", "Gradient___first.weight", poptorch.OutputMode.All)

        Args:
            long_name: a name of `getTensorNames()`; another one raises Error at compilation
            output_mode: which values are kept; by default the model's output mode applies
            output_return_period: the n of EveryN, in device iterations
        """
        mode = OutputMode.Default if output_mode is None else checked("anchorTensor", output_mode, OutputMode)
        period = 1 if mode != OutputMode.EveryN else _return_period(mode, output_return_period)
        self.anchored_tensors[short_name] = [long_name, output_mode is None, mode.value, period]

    def randomSeed(self, random_seed: int) -> Self:
        """Set the seed of the model's random numbers, and call `torch.manual_seed` with this seed at once."""
        self.createOrSet(random_seed=checked("randomSeed", random_seed, int, fix="options.randomSeed({})"))
        torch.manual_seed(random_seed)
        return self

    def enableSyntheticData(self, enabled: bool | int) -> Self:
        """Choose whether calls replace their inputs by values that are generated once: normally distributed
        for True, else as a `popart.SyntheticDataMode` says. Outputs are then meaningless."""
        checked("enableSyntheticData", enabled, tuple(range(4)), fix="options.enableSyntheticData(True)")
        mode = enabled * _SYNTHETIC_NORMAL if isinstance(enabled, bool) else int(enabled)
        return self._set_popart("syntheticDataMode", mode)

    def compiler(self, backend: str) -> Self:
        """*Pando*: choose how operations run: one by one ("eager", default) or in fused kernels ("inductor").
        Takes precedence over the environment variable POPTORCH_BACKEND."""
        return self.createOrSet(backend=checked("compiler", backend, BACKENDS))

    def memoryFormat(self, memory_format: Literal["preserve", "channels_last", "auto"]) -> Self:
        """*Pando*: choose the layout of convolutions: the model's ("preserve", default), "channels_last", "auto".

        "auto" is "channels_last" if the model pools or resizes images of 8 channels or more, which is 2 to 10
        times as fast in that layout on CPUs, else "preserve". "preserve" (default) gives the bits of plain
        PyTorch; the results of "channels_last" differ by rounding. `executor.memory_format` is the layout of
        a compiled model.
        """
        return self.createOrSet(memory_format=checked("memoryFormat", memory_format, MEMORY_FORMATS))

    def allowNewShapes(self, plans: int = 8) -> Self:
        """*Pando*: allow calls with other shapes, with fewer arguments, or with an incomplete combined batch.

        Each new combination of shapes compiles another plan for the same weights, optimizer state and random
        state. The `plans` most recently used plans are kept. The log (INFO) has the time of each compilation.
        """
        return self.createOrSet(new_shapes=checked("allowNewShapes", plans, int, least=1))

    def batchDims(self, dims: dict[str, int | None]) -> Self:
        """*Pando*: name the inputs that are not split into micro-batches along dimension 0.

        >>> options.batchDims({"tokens": 1, "adjacency": None})

        Outputs are still concatenated along dimension 0.

        Args:
            dims: by argument of forward (or path, as messages show it: `b[0]`) the dimension to split along, such
                as 1 for time-major sequences [time, batch, ...]; None: each micro-batch gets the whole tensor
        """
        for name, dim in checked("batchDims", dims, dict).items():
            if not isinstance(name, str) or (dim is not None and type(dim) is not int):
                raise AssertionError(
                    f"batchDims takes the name of an input, and its dimension or None; found {name!r}: {dim!r}"
                )
        return self.createOrSet(batch_dims=dict(dims))

    def checkRecording(self, enabled: bool = True) -> Self:
        """*Pando*: choose whether calls 8, 64, 512, ... of a plan record forward again, to compare (default: True).

        A change of a value that forward reads is followed, except where Python does not show it: in files, in the
        environment, in objects of C. If the graph, or what forward returns beside tensors, then differs, the call
        raises Error. It changes no weights, and the next call records anew.
        """
        return self.createOrSet(check_recording=checked("checkRecording", enabled, bool))

    def loss(self, output: str | int | None = None, *, marked: bool = False) -> Self:
        """*Pando*: name the output that is the loss by its key, attribute or index ("total", "out.loss", 0).

        By default the loss is a scalar that forward marks, else one that it returns: docs/guide/options.md.
        `marked=True` is PopTorch's rule: the loss is the result of `identity_loss` or of a loss function of
        torch, and values that forward computes from it are not trained.
        """
        if (output is None) != marked or (output is not None and type(output) not in (str, int)):
            raise AssertionError(
                f"loss takes the name or the index of an output, or marked=True; found {output!r}, marked={marked!r}"
            )
        self.createOrSet(loss_is_marked=marked).deleteIfExists("loss_output")
        return self if output is None else self.createOrSet(loss_output=output)

    def enableStableNorm(self, enabled: bool) -> Self:
        """Has no effect; kept for compatibility: PyTorch's norms are numerically stable."""
        return self._set_popart("enableStableNorm", checked("enableStableNorm", enabled, bool))

    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """Name the buffers for `copyNamedBuffersToDevice`, which copies nothing: calls use the current buffers."""
        names = checked("updatableNamedBuffers", buffers, list)
        return self._set_popart("updatableNamedBuffers", list(names))

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Set at which level setOptimizer logs attributes and group entries of an optimizer that Pando does not
        use, such as `optimizer.foo`: DEBUG (True), or WARN, which is the default."""
        self._relax_optimizer_checks = checked("relaxOptimizerAttributesChecks", relax, bool)
        return self


def _return_period(mode: OutputMode, period: Any) -> int:
    if mode == OutputMode.EveryN:
        return checked("OutputMode.EveryN needs output_return_period, which", period, int, least=1)
    if period is not None:
        logger.info("output_return_period=%s is ignored: it is for OutputMode.EveryN only", period)
    return 1


class DeviceOptions(OptionsDict):
    """Options for the device that a model runs on, and for when the model is attached to it."""

    auto_round_num_ipus: bool = False
    available_memory_proportion: dict[int, float] = {}
    connection_type: int = ConnectionType.Always.value
    device_kind: str | list[str]
    ipu_id: int
    ipu_version: int
    sync_pattern: int = SyncPattern.Full.value
    use_model: bool

    def device(self, kind: str | list[str]) -> Self:
        """*Pando*: compute on the "cpu" (default), or on GPUs: "cuda" (NVIDIA, AMD) or "xpu" (Intel). With several
        GPUs, ipu i of replica r is on GPU r · ipus + i, modulo their number. A list has the device of each ipu, for
        all replicas: `["cuda:0", "cuda:1"]` or `["cpu", "cuda:0"]`. Takes precedence over the environment variable
        POPTORCH_DEVICE.

        >>> options.device("cuda")
        """
        for name in (kind if isinstance(kind, list) else ()) or [kind]:
            if name is kind or not re.fullmatch(r"cpu|(cuda|xpu)(:\d+)?", str(name)):
                checked("device", name, DEVICES)
        return self.createOrSet(device_kind=kind)

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Has no effect; kept for compatibility: any number of ipus is allowed."""
        return self.set(auto_round_num_ipus=auto_round_num_ipus)

    def useIpuModel(self, use_model: bool) -> Self:
        """Has no effect; kept for compatibility: all ipus are models here."""
        return self.createOrSet(use_model=checked("useIpuModel", use_model, bool))

    def useIpuId(self, ipu_id: int) -> Self:
        """Has no effect; kept for compatibility: ipus are logical devices, so there are none to choose from."""
        return self.createOrSet(ipu_id=checked("useIpuId", ipu_id, int, least=0))

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Set the connection type Never: no device is attached, and calling a model raises AssertionError."""
        self.createOrSet(ipu_version=checked("useOfflineIpuTarget", ipu_version, int))
        return self.connectionType(ConnectionType.Never)

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """Choose when the device is attached: at compilation (`Always`, the default, and `OnDemand`) or never
        (`Never`): then `compile`, `compileAndExport` and `describe` work, and a call raises AssertionError."""
        return self.set(connection_type=checked("connectionType", connection_type, ConnectionType))

    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Has no effect; kept for compatibility: threads wait only for the values that they need."""
        return self.set(sync_pattern=checked("syncPattern", sync_pattern, SyncPattern))

    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Self:
        """Has no effect; kept for compatibility: all ipus share the memory of the machine."""
        given = checked("setAvailableMemoryProportion", available_memory_proportion, dict)
        for key, value in given.items():
            if not re.fullmatch(r"IPU\d+", str(key)) or not isinstance(value, Real):
                raise AssertionError(
                    'setAvailableMemoryProportion takes a dictionary whose keys start with "IPU", and whose values are'
                    f" numbers; found {key!r}: {value!r}"
                )
        return self.set(available_memory_proportion={int(key[3:]): value for key, value in given.items()})


class ReportingOptions(OptionsDict):
    """Options for logs, profiles and source locations."""

    _module_namescope_enabled: bool = True
    _show_progress_bar: bool = True
    _source_location_excludes: list[str] = []

    log_dir: str = "."
    max_repeat_logs: int = 4
    model_name: str

    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Self:
        """Has no effect; kept for compatibility: a model compiles in seconds, at each start."""
        self._popart._store("enableEngineCaching", path is not None)
        return self._set_popart("cachePath", "" if path is None else os.fspath(path))

    def logDir(self, log_dir: str | os.PathLike[str]) -> Self:
        """Has no effect; kept for compatibility: the only log file is the one that POPTORCH_LOG_DEST names."""
        return self.set(log_dir=os.fspath(log_dir))

    def modelName(self, name: str) -> Self:
        """Set the model's name in profiles, which is also the name of their folder."""
        return self.createOrSet(model_name=checked("modelName", name, str))

    def maxRepeatLogs(self, max_lines: int | None = None) -> Self:
        """Has no effect; kept for compatibility: the log has each line."""
        return self.set(max_repeat_logs=_NO_LIMIT if max_lines is None else max_lines)

    def logCycleCount(self, log_cycle_count: bool) -> Self:
        """Has no effect; kept for compatibility: only an IPU counts cycles. `getPerfCounters` has seconds."""
        is_on = checked("logCycleCount", log_cycle_count, bool)
        return self._set_popart("instrumentWithHardwareCycleCounter", is_on)

    def enableProfiling(self, profile_dir: str | os.PathLike[str] | None = None) -> Self:
        """Write a report page, `report.html`, into the folder `profile_dir` (default: the current directory), and a
        profile into a folder in it. This folder has the name of the model (`modelName`), else "training" or
        "inference".

        >>> options.enableProfiling("report")
        """
        given = "." if profile_dir is None else profile_dir
        directory = os.fspath(checked("enableProfiling", given, str | os.PathLike, TypeError))
        wanted = {"autoReport.all": "true", "autoReport.directory": directory}
        if clash := ", ".join(sorted(wanted.keys() & _engine_options_of_environment().keys())):
            logger.warning("POPLAR_ENGINE_OPTIONS sets %s too: enableProfiling takes precedence", clash)
        self._popart._merge("engineOptions", wanted)
        return self

    def _profile_directory(self, training: bool) -> Path | None:
        engine = {**_engine_options_of_environment(), **self._popart("engineOptions")}
        if str(engine.get("autoReport.all", "")).lower() != "true":
            return None
        mode = "training" if training else "inference"
        name = self.model_name if self.exists("model_name") else mode
        return Path(engine.get("autoReport.directory", ".")) / name

    def disableModuleNamescope(self) -> Self:
        """Has no effect; kept for compatibility: operations are named by `NameScope` only, not by modules."""
        self._module_namescope_enabled = False
        return self

    def sourceLocationExcludes(self, excludes: list[str]) -> Self:
        """Has no effect; kept for compatibility: messages show the innermost line outside of torch and Pando."""
        self._source_location_excludes = list(checked("sourceLocationExcludes", excludes, list))
        return self

    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """Has no effect; kept for compatibility: see `sourceLocationExcludes`, to whose fragments it adds."""
        fragments = [checked("appendToLocationExcludes", fragment, str) for fragment in excludes]
        self._source_location_excludes = [*self._source_location_excludes, *fragments]
        return self

    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Set whether compilation shows a progress bar. Without the bar `compilationTime()` raises Error."""
        self._show_progress_bar = checked("showCompilationProgressBar", show, bool)
        return self


def _engine_options_of_environment() -> dict[str, Any]:
    """Return POPLAR_ENGINE_OPTIONS as a dictionary; {} with a warning if it is no JSON object."""
    text = os.environ.get("POPLAR_ENGINE_OPTIONS") or "{}"
    with contextlib.suppress(json.JSONDecodeError):
        if isinstance(options := json.loads(text), dict):
            return options
    logger.warning("POPLAR_ENGINE_OPTIONS is ignored, since it is no JSON object: %s", text)
    return {}
