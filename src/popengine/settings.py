"""The engine's settings: frozen values that `poptorch.options.freeze_options` makes from user options."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

AutoRule = Literal["same_as_ipu", "auto_increment", "balance"]
Outputs = Literal["final", "every_n", "all", "sum"]
DeviceKind = Literal["cpu", "cuda", "xpu"]


class Place(NamedTuple):
    """Where an ipu's rows run and its values are: a process, by its index among those of the replica, and a device."""

    process: int = 0
    device: int = 0  # index in the process


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of the user's strategy: its blocks, and its ipu, if the user named one."""

    blocks: tuple[str, ...]
    ipu: int | None = None


@dataclass(frozen=True, slots=True)
class Strategy:
    """The execution strategy: how stages are scheduled, and how the stage of each block is chosen."""

    order: str = "1f1b"  # a key of `popengine.order.ORDERS`
    auto: AutoRule | None = "same_as_ipu"  # None: `stages` lists the blocks of each stage
    stages: tuple[StagePlan, ...] = ()
    ipus: int = 1  # on which the rule "balance" places the blocks
    or_sharded: bool = False  # a pipeline with too few micro-batches runs as "sharded", and is no error


@dataclass(frozen=True, slots=True)
class Counts:
    """The factors of a combined batch, and the numbers of replicas and instances."""

    iterations: int = 1  # device iterations: weight updates per call in training
    accumulation: int = 1  # micro-batches per weight update and replica
    replicas: int = 1  # in this process
    groups: int = 1  # input groups: replicas of one group read the same rows
    grouping: Literal["consecutive", "orthogonal"] = "consecutive"
    # Processes that train together: `instances` times `parts`. If a replica spans several processes, `parts` of them,
    # the index of this process in its replica is `part`, and `instance` is the index of the replica.
    instances: int = 1
    instance: int = 0
    parts: int = 1
    part: int = 0

    @property
    def product(self) -> int:
        """Return the number of micro-batches in the combined batch of one call."""
        return self.iterations * self.accumulation * self.groups

    def input_group_of(self, replica: int) -> int:
        """Return the index of a replica's input group."""
        if self.grouping == "orthogonal":
            return replica % self.groups
        return replica // (self.replicas // self.groups)

    @property
    def processes(self) -> int:
        """Return the number of processes that train together."""
        return self.instances * self.parts

    @property
    def process(self) -> int:
        """Return the index of this process among all."""
        return self.instance * self.parts + self.part

    def processes_of_replica(self) -> list[int]:
        """Return the processes that this process's replica spans, by part."""
        return [self.instance * self.parts + part for part in range(self.parts)]

    def processes_of_part(self) -> list[int]:
        """Return the processes that have the same ipus as this one, by instance."""
        return [instance * self.parts + self.part for instance in range(self.instances)]

    @property
    def global_replicas(self) -> int:
        """Return the number of replicas in all instances."""
        return self.replicas * self.instances


@dataclass(frozen=True)
class Optimizer:
    """The properties of an optimizer that may not change after compilation."""

    kind: str  # its name in messages, such as "ADAMW"
    state_types: dict[str, torch.dtype] = field(default_factory=dict)  # of each state, such as "exp_avg"
    accumulator_type: torch.dtype = torch.float32
    max_grad_norm: float = float("inf")
    max_grad_value: float = float("inf")

    def sum_dtype(self, weight: torch.dtype) -> torch.dtype:
        """Return the dtype of the gradient sums for a weight of dtype `weight`."""
        return weight if weight == torch.float64 or weight.is_complex else self.accumulator_type


@dataclass(frozen=True, slots=True)
class Anchor:
    """A value that a call returns beside the outputs of forward, with its own output mode."""

    # A gradient is an output of the graph that is divided by the loss scale; "weight": a weight at the start of each
    # step; "updated": after its update.
    source: Literal["output", "gradient", "weight", "updated", "loss_scale"]
    key: str  # the text of the output's index in the graph's results; of a weight its canonical name
    outputs: Outputs
    return_period: int = 1

    @property
    def is_output(self) -> bool:
        return self.source in ("output", "gradient")


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """The groups of a per-replica parameter: the replicas of a group share a value, and reduce gradients."""

    of: tuple[int, ...]  # the index of each replica's group; the host's tensor has a row per group
    all_rows: bool = False  # the host receives a row for every replica, and not for the first of each group

    def members(self, replica: int) -> tuple[int, ...]:
        """Return the replicas in the group of `replica`, in ascending order."""
        return tuple(member for member, group in enumerate(self.of) if group == self.of[replica])

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the replicas whose values the host receives, in the order of its tensor's rows."""
        if self.all_rows:
            return tuple(range(len(self.of)))
        return tuple(self.of.index(group) for group in sorted(set(self.of)))

    @property
    def repeated_rows(self) -> list[int]:
        """Return for each row the first row of its group, if any row repeats another one; else []."""
        firsts = [self.of.index(group) for group in self.of]
        return firsts if self.all_rows and len(set(firsts)) < len(firsts) else []


@dataclass(frozen=True)
class Hyper:
    """The rates of a call: those of each parameter group by their key (a rate that `step()` changes is changed here,
    too), and the loss scale."""

    groups: tuple[dict[str, Any], ...]
    loss_scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class StepPart:
    """The part of a step that a plan computes: all, unless the last micro-batch is smaller than the others."""

    ends_step: bool = True  # False: the next plan continues with the gradient sums, and updates the weights
    before: int = 0  # the number of micro-batches of the step that the previous plan has summed
    weight: float = 1.0  # rows of a micro-batch, as a multiple of the rows of each micro-batch before


@dataclass(frozen=True)
class Settings:
    """All settings of the engine for one plan."""

    training: bool
    counts: Counts = Counts()
    strategy: Strategy = Strategy()
    outputs: Outputs = "all"
    return_period: int = 1  # device iterations between outputs, for "every_n"
    optimizer: Optimizer | None = None
    # Of gradients over micro-batches and replicas; "running": a mean that each micro-batch updates.
    reduction: Literal["mean", "sum", "running"] = "mean"
    automatic_loss_scaling: bool = False
    stochastic_rounding: bool = False  # of weight updates in half precision
    finite_checks: bool = False  # floating point exceptions: an infinity or a NaN is an error
    shard_optimizer: int | None = None  # shard the state of parameters of at least this many elements
    recompute: bool = False  # compute activations again in backward, instead of keeping them
    device: DeviceKind = "cpu"
    # Names of the devices of this process ("cuda:0"), by `Place.device`; (): one device of the kind `device`.
    devices: tuple[str, ...] = ()
    backend: Literal["eager", "inductor"] = "eager"  # what runs the pieces
    # Products of half types, such as "mm of bfloat16": chosen by the options and the processor.
    products_in_float32: tuple[str, ...] = ()
    anchors: tuple[Anchor, ...] = ()
    replica_groups: dict[str, ReplicaGroups] = field(default_factory=dict)  # by canonical name
    step_part: StepPart = StepPart()
    places: tuple[Place, ...] = ()  # of each ipu of a replica; (): all ipus are at one place
    spreads: bool = False  # whether further ipus, and the next replicas, are at these places again
    # Of weights and buffers that a process of several of a replica holds already: this process, by canonical name.
    holders: dict[str, int] = field(default_factory=dict)
    cores: int = 0  # of all places, if there are several, for bounds of the order; 0: each ipu is a device

    @property
    def is_eager(self) -> bool:
        """Return whether pieces run uncompiled, as `finite_checks` needs: they check each operation."""
        return self.backend == "eager" or self.finite_checks

    def place_of(self, ipu: int) -> Place:
        """Return the place of an ipu."""
        return self.places[ipu % len(self.places)] if self.places else Place()

    def shifts(self, ipus: int) -> tuple[int, ...]:
        """Return for each local replica of so many ipus by how many devices its ipus are behind those of replica 0: ipu
        i of replica r is on device r * ipus + i, modulo their number. () if all replicas are on the same devices."""
        replicas = range(self.counts.replicas if self.spreads and self.places and self.devices else 0)
        shifts = tuple(replica * ipus % len(self.devices) for replica in replicas)
        return shifts if any(shifts) else ()

    def sharing_replicas(self, key: str, replica: int) -> tuple[int, ...]:
        """Return the replicas that share a parameter with `replica`: its replica group, or all replicas."""
        groups = self.replica_groups.get(key)
        return groups.members(replica) if groups is not None else tuple(range(self.counts.replicas))
