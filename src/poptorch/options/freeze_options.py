"""Convert the user's options into the engine's settings. Contradictory options raise Error here."""

import os
from typing import Any

import torch
from torch import nn

from popengine.errors import Error
from popengine.run import devices
from popengine.settings import Counts, DeviceKind, Optimizer, Outputs, Place, ReplicaGroups, Settings
from poptorch.annotating.blocks import strategy_of_marks
from poptorch.annotating.strategies import PipelinedExecution
from poptorch.checks import checked
from poptorch.enums import ConnectionType, MeanReductionStrategy, OutputMode, ReductionType
from poptorch.options.option_groups import BACKENDS, DEVICES
from poptorch.options.options import Options

OUTPUTS: tuple[Outputs, ...] = ("final", "every_n", "all", "sum")  # by OutputMode


def resolve_options(options: Options, training: bool, model: nn.Module | None = None) -> Options:
    """Return a frozen copy of the options, in which the output mode and the model's strategy are resolved."""
    resolved = options.clone()
    if resolved.defaultOutputMode():
        resolved.outputMode(OutputMode.Final if training else OutputMode.All)
    if model is not None:
        resolved._execution_strategy = strategy_of_marks(model, resolved._execution_strategy)
    accumulation = resolved.Training.gradient_accumulation
    if not training and accumulation != 1:
        is_pipelined = isinstance(resolved._execution_strategy, PipelinedExecution)
        hint = ", and raise deviceIterations instead to fill the pipeline" if is_pipelined else ""
        raise Error(
            f"Options().Training.gradientAccumulation is {accumulation}: it must be 1, or left alone, for"
            " poptorch.inferenceModel()\n"
            "  why: inference has no gradients to accumulate\n"
            f"  fix: use options without it{hint}"
        )
    resolved._freeze()
    return resolved


def engine_settings(
    options: Options,
    training: bool,
    optimizer: Optimizer | None,
    groups: dict[str, ReplicaGroups] | None = None,
) -> Settings:
    """Return the engine's settings for these options. Raises Error if the options contradict each other.

    Args: groups: the groups of replicas of each per-replica parameter, by canonical name
    """
    popart, update, counts = options._Popart, options.Training, options._counts()
    mode, period = options.output_mode, options.output_return_period
    if mode == OutputMode.EveryN and counts.iterations % period:
        raise Error(
            f"OutputMode.EveryN: output_return_period is {period} and must divide deviceIterations, which is"
            f" {counts.iterations}\n"
            f"  fix: options.outputMode(poptorch.OutputMode.EveryN, 1), or deviceIterations({period})"
        )
    is_mean = update.accumulation_and_replication_reduction_type == ReductionType.Mean
    is_running = update.mean_accumulation_and_replication_reduction_strategy == MeanReductionStrategy.Running
    if optimizer is not None and optimizer.accumulator_type == torch.float16:  # running means do not overflow
        is_running |= optimizer.kind != "SGD1"
    device, names = chosen_devices(options, training)
    state = options.TensorLocations.location_optimizer.toDict()
    is_sharded = training and counts.global_replicas > 1 and state.get("replicated_tensor_sharding", False)
    return Settings(
        training=training,
        counts=counts,
        strategy=options._execution_strategy.freeze(),
        outputs=OUTPUTS[mode],
        return_period=period,
        optimizer=optimizer,
        reduction="sum" if not is_mean else "running" if is_running else "mean",
        replica_groups=groups or {},
        automatic_loss_scaling=training and bool(popart("automaticLossScalingSettings.enabled")),
        stochastic_rounding=training and bool(popart("enableStochasticRounding")),
        finite_checks=bool(popart("enableFloatingPointChecks")),
        shard_optimizer=state.get("min_elements_for_replicated_tensor_sharding", 0) if is_sharded else None,
        recompute=training and bool(popart("autoRecomputation")),
        device=device,
        devices=tuple(dict.fromkeys(names)),
        places=_places_of_ipus(options, counts, names),
        spreads=counts.parts == 1 and not _has_list(options),
        backend=_option_or_variable(options, "backend", "POPTORCH_BACKEND", BACKENDS),
    )


def _places_of_ipus(options: Options, counts: Counts, names: tuple[str, ...]) -> tuple[Place, ...]:
    """Return the place of each ipu of a replica: on the devices of these names; or, if it spans several processes, each
    with as many consecutive ipus."""
    if counts.parts == 1:
        return tuple(Place(0, list(dict.fromkeys(names)).index(name)) for name in names)
    ipus = options._ipus_per_replica
    if ipus % counts.parts:
        raise Error(
            f"each replica spans {counts.parts} instances, and the options say that it has {ipus} ipus\n"
            "  fix: popdist.poptorch.Options(ipus_per_replica=...), with a multiple of the instances of a replica"
        )
    return tuple(Place(ipu * counts.parts // ipus) for ipu in range(ipus))


def chosen_devices(options: Options, training: bool) -> tuple[DeviceKind, tuple[str, ...]]:
    """Return the kind of device that the options or POPTORCH_DEVICE choose, and the name of each ipu's device if there
    are several. Raises Error if one is missing."""
    names = tuple(options.device_kind) if _has_list(options) else ()
    names = tuple(name if ":" in name or name == "cpu" else f"{name}:0" for name in names)
    kinds: list[Any] = [kind for kind in DEVICES[1:] if any(name.startswith(kind) for name in names)]
    if not kinds:
        chosen = "cpu" if names else _option_or_variable(options, "device_kind", "POPTORCH_DEVICE", DEVICES)
        kinds = [chosen]
    if len(kinds) > 1:
        raise Error(f"options.device({[*names]}): GPUs of two kinds\n  fix: {kinds[0]!r} or {kinds[1]!r}")
    if options.connection_type != ConnectionType.Never:
        counts = options._counts()
        devices.check_available(kinds[0], counts.processes if training or counts.parts > 1 else 1)
        count = 0 if kinds[0] == "cpu" else devices.accelerator_count()
        for name in names:
            checked(
                f"there is no {name}: options.device()",
                name,
                ("cpu", *(f"{kinds[0]}:{i}" for i in range(count))),
                Error,
            )
        if not names and count > 1:
            names = tuple(f"{kinds[0]}:{index}" for index in range(count))
    return kinds[0], names


def _has_list(options: Options) -> bool:
    return options.exists("device_kind") and isinstance(options.device_kind, list)


def _option_or_variable(options: Options, option: str, variable: str, choices: tuple[str, ...]) -> Any:
    """Return the value of `option` if it is set, else of the environment `variable`, else `choices[0]`."""
    name = options(option) if options.exists(option) else os.environ.get(variable, choices[0])
    fix = f"{variable}={' or '.join(choices)}"
    return checked(f"the environment variable {variable}", name, choices, Error, fix=fix)
