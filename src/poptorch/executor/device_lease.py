"""The plans of a model, the engine that runs one of them, and the state that remains when devices are released."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.run.engine import Engine

from ..compiling.executable import Executable
from ..enums import ConnectionType
from ..logs import logger
from ..options import Options
from ..options.freeze_options import device_of
from ..reporting.reporter import Reporter


@dataclass(frozen=True)
class KeptState:
    """The state that the next devices begin with. None: that of a new executor."""

    random: tuple[int, int] | None = None
    optimizer: Mapping[str, dict[str, Tensor]] | None = None
    loss_factor: float = 1.0  # of automatic loss scaling
    buffers: list[dict[str, Tensor]] | None = None  # of each replica; else they have the host's


@dataclass(eq=False)
class LoadedPlan:
    """A compiled plan, the reporter of its profile, and its engine (None: not attached)."""

    executable: Executable
    reporter: Reporter | None = None
    engine: Engine | None = None
    synthetic: list[Tensor] | None = None  # inputs of `Options.enableSyntheticData`


class DeviceLease:
    """The plans of a model by the inputs that they are for; `current` is the one that holds the weights."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.plans: dict[Any, LoadedPlan] = {}  # the latest used is the last
        self.current: LoadedPlan | None = None
        self.first: Executable | None = None  # of this compilation, with which later plans agree
        self.kept = KeptState()
        self._process = -1  # that attached: threads do not live on in a fork of it

    @property
    def executable(self) -> Executable | None:
        return self.current.executable if self.current is not None else None

    @property
    def engine(self) -> Engine | None:
        return self.current.engine if self.current is not None else None

    @property
    def reporter(self) -> Reporter | None:
        return self.current.reporter if self.current is not None else None

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
                "  why: os.fork() copies memory, but no threads: none would run the model here\n"
                "  fix: call detachFromDevice() before the fork, or start processes with 'spawn'"
            )
        return self.engine

    @property
    def forked(self) -> bool:
        """Whether the devices belong to the process that this one is a fork of."""
        return self.engine is not None and self._process != os.getpid()

    # ---- plans ---------------------------------------------------------------------------------------------

    def add(self, key: Any, plan: LoadedPlan) -> None:
        """Add a plan, which is the current one if it is the first."""
        self.plans[key] = plan
        if self.current is None:
            self.current, self.first = plan, plan.executable

    def use(self, plan: LoadedPlan, weights: Mapping[str, Tensor]) -> None:
        """Make a plan the current one: with the tensors of the one before, if that is on devices.

        Args: weights: the host's; read only for what the plan before has not got
        """
        before = self.current
        if before is plan:
            return
        if before is not None and before.engine is not None:
            self.need_engine()
            if plan.engine is None:
                plan.engine = self._load(plan, weights, before.engine)
                held = {unit.key for unit in before.engine.state.optimizer}
                kept = {key: state for key, state in (self.kept.optimizer or {}).items() if key not in held}
                plan.engine.state.write_optimizer(kept)  # of parameters that no plan has trained since
            else:
                plan.engine.take_over(before.engine)
        self.current = plan

    def remove(self, key: Any) -> None:
        """Forget a plan that is not the current one."""
        plan = self.plans.pop(key)
        self._release(plan)

    def keep_latest(self, keys: list[Any], most: int) -> None:
        """Note that plans were used, and forget those that were not used for the longest time."""
        latest = {key: self.plans[key] for key in keys}
        plans = {key: plan for key, plan in self.plans.items() if key not in latest} | latest
        dropped = [key for key in list(plans)[:-most] if plans[key] is not self.current]
        self.plans = plans  # one assignment: an interrupt leaves all plans
        for key in dropped:
            self.remove(key)
            logger.info("allowNewShapes(plans=%d): the plan used longest ago is dropped", most)

    def forget(self) -> None:
        """Forget all plans; none is on devices."""
        self.plans.clear()
        self.current = self.first = None

    # ---- devices -------------------------------------------------------------------------------------------

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
        plan, kept = self.current, self.kept
        assert plan is not None
        engine = self._load(plan, weights)
        if kept.random is not None:
            engine.state.random_state = kept.random
        if kept.optimizer is not None:
            engine.state.write_optimizer(kept.optimizer, kept.loss_factor)
        if kept.buffers is not None:
            engine.state.write(kept.buffers)
        self._process = os.getpid()
        plan.engine = engine  # last: now it has all that was kept
        self.kept = replace(kept, buffers=None)

    def _load(
        self, plan: LoadedPlan, weights: Mapping[str, Tensor], previous: Engine | None = None
    ) -> Engine:
        executable = plan.executable
        # What was compiled elsewhere runs on the devices of this program.
        settings = replace(executable.settings, device=device_of(self._options, executable.settings.training))
        with torch._C.DisableTorchFunctionSubclass():
            engine = Engine(executable.plan, settings, weights, self._seed(), previous=previous)
        if plan.reporter is not None:
            plan.reporter.attached(engine, executable.graph, executable.hints)
        return engine

    def let_go(self) -> None:
        """End the devices' threads, and keep the state that the next ones begin with. Weights are in `WeightSync`."""
        if not self.forked:
            self.need_engine()
            self.kept = self.to_keep()
        for plan in self.plans.values():
            self._release(plan)

    def _release(self, plan: LoadedPlan) -> None:
        engine, plan.engine = plan.engine, None  # before its threads end
        if engine is None or self._process != os.getpid():  # or its threads are the other process's
            return
        if plan.reporter is not None:
            plan.reporter.released()
        engine.close()

    def to_keep(self, with_random_state: bool = True, whole: bool = False) -> KeptState:
        """What other devices would go on from; `whole`: also those of other instances."""
        engine, kept = self.engine, self.kept
        if engine is not None and engine.settings.training:
            optimizer = {**(kept.optimizer or {}), **(self.optimizer_states(whole) or {})}
            kept = replace(kept, optimizer=optimizer, loss_factor=engine.state.loss_factor)
        return replace(kept, random=self.random_state if with_random_state else None)

    # ---- what devices have, or the next ones will have -----------------------------------------------------

    @property
    def random_state(self) -> tuple[int, int]:
        """(seed, steps run)."""
        if self.engine is not None:
            return self.engine.state.random_state
        return self.kept.random or (self._seed(), 0)

    @random_state.setter
    def random_state(self, state: tuple[int, int]) -> None:
        self.kept = replace(self.kept, random=state)
        if self.engine is not None:
            self.engine.state.random_state = state

    def _seed(self) -> int:
        return self._options.random_seed if self._options.exists("random_seed") else torch.initial_seed()

    @property
    def shares_state(self) -> bool:
        """Whether this instance has a part of the optimizer's state: other instances keep the rest."""
        if self.executable is None:
            return False
        settings = self.executable.settings
        return settings.shard_optimizer is not None and settings.counts.instances > 1

    def optimizer_states(self, whole: bool = True) -> Mapping[str, dict[str, Tensor]] | None:
        """Return the optimizer state of each parameter: {canonical name: {name of the state: tensor}}.

        On devices a copy of their state; else the state kept for the next devices, or None if there is none.

        Args: whole: of all parameters, also if other instances keep a part of the state
        Raises:
            Error: the state is sharded over instances, and is not on devices; or another instance is gone
        """
        if not whole or not self.shares_state:
            return self.engine.state.read_optimizer() if self.engine is not None else self.kept.optimizer
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
