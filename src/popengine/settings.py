"""What the engine may know of the user's options: frozen values, made once by `poptorch.options.freeze`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

Mode = Literal["pipelined", "sharded", "phased"]
AutoRule = Literal["same_as_ipu", "auto_increment"]
Outputs = Literal["final", "every_n", "all", "sum"]
OptimizerKind = Literal["sgd", "adam", "adamw", "rmsprop", "lamb"]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage as the user wrote it: its blocks, and its ipu where one was named."""

    blocks: tuple[str, ...]
    ipu: int | None = None


@dataclass(frozen=True, slots=True)
class Strategy:
    """How the stages take turns, and which block belongs to which: by `stages`, or by the `auto` rule."""

    mode: Mode = "pipelined"
    auto: AutoRule | None = "same_as_ipu"
    stages: tuple[StagePlan, ...] = ()


@dataclass(frozen=True, slots=True)
class Counts:
    """The factors of a batch. The only place where they are multiplied."""

    iterations: int = 1  # device iterations: weight updates a call in training
    accumulation: int = 1  # micro-batches a weight update and replica
    replicas: int = 1  # in this process
    groups: int = 1  # input groups: replicas of one group read the same rows
    grouping: Literal["consecutive", "orthogonal"] = "consecutive"
    instances: int = 1  # processes that train together
    instance: int = 0  # this one

    @property
    def product(self) -> int:
        """Micro-batches in the combined batch of one call."""
        return self.iterations * self.accumulation * self.groups

    def group_of(self, replica: int) -> int:
        """The input group that a replica reads."""
        if self.grouping == "orthogonal":
            return replica % self.groups
        return replica // (self.replicas // self.groups)

    @property
    def global_replicas(self) -> int:
        return self.replicas * self.instances


@dataclass(frozen=True)
class Optimizer:
    """A weight update rule without its rates: what may not change after compilation.

    `group_of` gives the parameter group of each parameter by its canonical name; a parameter that is not
    in it is not updated. `state_types` holds the dtype of each state the rule keeps, by the state's name
    ("velocity"; "exp_avg", "exp_avg_sq"; ...).
    """

    kind: OptimizerKind
    group_of: dict[str, int]
    state_types: dict[str, torch.dtype] = field(default_factory=dict)
    accumulator_type: torch.dtype = torch.float32
    max_grad_norm: float = float("inf")
    centered: bool = False  # RMSprop
    tf_variant: bool = False  # RMSprop
    bias_correction: bool = True  # Adam, AdamW, LAMB
    torch_dampening: bool = False  # SGD: the first step is not dampened (torch.optim.SGD's rule)


@dataclass(frozen=True)
class Hyper:
    """The rates of one weight update: one dictionary a parameter group, and the loss scale.

    Keys of a group: SGD lr, momentum, dampening, weight_decay, nesterov, maximize; Adam, AdamW and LAMB
    lr, beta1, beta2, eps, weight_decay, maximize (LAMB also max_weight_norm); RMSprop lr, alpha, eps,
    weight_decay, momentum, maximize.
    """

    groups: tuple[dict[str, float], ...]
    loss_scaling: float = 1.0


@dataclass(frozen=True)
class Settings:
    """Everything the engine may know of the user's options."""

    training: bool
    counts: Counts = Counts()
    strategy: Strategy = Strategy()
    outputs: Outputs = "all"
    return_period: int = 1  # device iterations between outputs, for "every_n"
    optimizer: Optimizer | None = None
    reduction: Literal["mean", "sum"] = "mean"
    device: str = "cpu"
