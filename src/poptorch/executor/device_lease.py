"""The lease of devices: what is compiled, the engine that it is loaded into, and what stays when that is let go."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.run.engine import Engine

from ..compiling.executable import Executable
from ..enums import ConnectionType
from ..options import Options
from ..options.freeze_options import device_of
from ..reporting.reporter import Reporter


@dataclass(frozen=True)
class KeptState:
    """What the next devices begin with. None: with what a new executor has."""

    random: tuple[int, int] | None = None
    optimizer: Mapping[str, dict[str, Tensor]] | None = None
    loss_factor: float = 1.0  # of automatic loss scaling
    buffers: list[dict[str, Tensor]] | None = None  # of each replica; else they have the host's


class DeviceLease:
    """An executable (None: not compiled), and its engine (None: not attached)."""

    def __init__(self, options: Options, reporter: Reporter | None) -> None:
        self._options, self._reporter = options, reporter
        self.executable: Executable | None = None
        self.engine: Engine | None = None
        self.kept = KeptState()
        self._process = -1  # that attached: threads do not live on in a fork of it

    def isCompiled(self) -> bool:
        return self.executable is not None

    def isAttachedToDevice(self) -> bool:
        return self.engine is not None

    def need_executable(self) -> Executable:
        if self.executable is None:
            raise Error(
                "Model has not been compiled or has been destroyed.\n  fix: call it, or model.compile(*inputs)"
            )
        return self.executable

    def need_engine(self) -> Engine:
        self.need_executable()
        if self.engine is None:
            raise Error("the model is not attached to its devices\n  fix: call it, or model.attachToDevice()")
        if self.forked:
            raise Error(
                f"the model is attached to devices of process {self._process}, and this is a fork of it\n"
                "  why: os.fork() copies memory, but no threads: nobody would run the model here\n"
                "  fix: call detachFromDevice() before the fork, or start processes with 'spawn'"
            )
        return self.engine

    @property
    def forked(self) -> bool:
        """Whether the devices belong to the process that this one is a fork of."""
        return self.engine is not None and self._process != os.getpid()

    def check_free(self) -> None:
        """Raises Error or AssertionError, unless devices can be taken."""
        self.need_executable()
        if self.engine is not None:
            raise Error("Device is already attached")
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to attach a model to an offline device (ConnectionType.Never)"
        )

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Start the devices' threads; upload weights, and all that was kept."""
        executable, kept = self.need_executable(), self.kept
        # What was compiled elsewhere runs on the devices of this program.
        settings = replace(executable.settings, device=device_of(self._options, executable.settings.training))
        with torch._C.DisableTorchFunctionSubclass():
            engine = Engine(executable.plan, settings, weights, self._seed())
        if kept.random is not None:
            engine.state.random_state = kept.random
        if kept.optimizer is not None:
            engine.state.write_optimizer(kept.optimizer, kept.loss_factor)
        if kept.buffers is not None:
            engine.state.write_buffers(kept.buffers)
        if self._reporter is not None:
            self._reporter.attached(engine, executable.graph, executable.hints)
        self._process = os.getpid()
        self.engine = engine  # last: now it has all that was kept
        self.kept = replace(kept, buffers=None)

    def let_go(self) -> None:
        """End the devices' threads, and keep what the next ones begin with. Weights are their owner's matter."""
        if self.forked:
            self.engine = None  # its threads are the other process's
            return
        engine = self.need_engine()
        self.kept = self.to_keep()
        if self._reporter is not None:
            self._reporter.released()
        self.engine = None  # before its threads end
        engine.close()

    def to_keep(self, with_random_state: bool = True, whole: bool = False) -> KeptState:
        """What other devices would go on from; `whole`: also those of other instances."""
        engine, kept = self.engine, self.kept
        if engine is not None and engine.settings.training:
            states = self.whole_optimizer_states() if whole else engine.state.read_optimizer()
            kept = replace(
                kept,
                optimizer={**(kept.optimizer or {}), **(states or {})},
                loss_factor=engine.state.loss_factor,
            )
        return replace(kept, random=self.random_state if with_random_state else None)

    # ---- what devices have, or the next ones will have -----------------------------------------------------

    @property
    def random_state(self) -> tuple[int, int]:
        """(seed, steps run)."""
        return (
            self.engine.state.random_state
            if self.engine is not None
            else self.kept.random or (self._seed(), 0)
        )

    @random_state.setter
    def random_state(self, state: tuple[int, int]) -> None:
        self.kept = replace(self.kept, random=state)
        if self.engine is not None:
            self.engine.state.random_state = state

    def _seed(self) -> int:
        return self._options.random_seed if self._options.exists("random_seed") else torch.initial_seed()

    @property
    def optimizer_states(self) -> Mapping[str, dict[str, Tensor]] | None:
        """The state of each parameter; None before there were devices."""
        return self.engine.state.read_optimizer() if self.engine is not None else self.kept.optimizer

    @property
    def shares_state(self) -> bool:
        """Whether `optimizer_states` is a part: other instances keep the rest."""
        if self.executable is None:
            return False
        settings = self.executable.settings
        return settings.shard_optimizer is not None and settings.counts.instances > 1

    def whole_optimizer_states(self) -> Mapping[str, dict[str, Tensor]] | None:
        """As `optimizer_states`, but always of all parameters.

        Raises:
            Error: the state is shared out over instances, and is not on devices; or another instance is gone
        """
        if not self.shares_state:
            return self.optimizer_states
        if self.engine is None:
            raise Error(
                "the optimizer's state is shared out over the instances, and can be read while all are attached to"
                " their devices\n"
                "  fix: call state_dict() before detachFromDevice() or destroy(), or after attachToDevice()"
            )
        return self.engine.read_whole_optimizer()

    @property
    def loss_factor(self) -> float:
        return self.engine.state.loss_factor if self.engine is not None else self.kept.loss_factor
