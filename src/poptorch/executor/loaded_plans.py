"""The compiled plans of a model, their engines, and the state with which the next engine begins."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.run.engine import Engine
from popengine.torch_private import DisableTorchFunctionSubclass

from ..compiling.executable import Executable
from ..logs import logger
from ..options import Options
from ..options.freeze_options import chosen_device
from ..reporter import Reporter


@dataclass(frozen=True)
class KeptState:
    """The state with which an executor's next engine begins. None stands for the initial state."""

    random: tuple[int, int] | None = None  # seed, number of steps run
    optimizer: Mapping[str, dict[str, Tensor]] | None = None  # {parameter: {name of a state: tensor}}
    loss_factor: float = 1.0  # of automatic loss scaling
    buffers: list[dict[str, Tensor]] | None = None  # of each replica; None: the host's in all replicas


@dataclass(eq=False)
class LoadedPlan:
    """A compiled plan, the reporter of its profile (None: no profile) and its engine (None: not attached)."""

    executable: Executable
    reporter: Reporter | None = None
    engine: Engine | None = None
    synthetic: list[Tensor] | None = None  # inputs of `Options.enableSyntheticData`


class LoadedPlans:
    """The compiled plans of a model, and their engines. The engine of `current` has the newest weights."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.by_key: dict[Any, LoadedPlan] = {}  # by `Run.key`, in order of use, the latest last
        self.current: LoadedPlan | None = None
        self.first: Executable | None = None  # compiled first; calls are checked against its inputs
        self.kept = KeptState()
        self._process = -1  # id of the process that attached; a fork of it has no threads

    @property
    def executable(self) -> Executable | None:
        return self.current.executable if self.current is not None else None

    @property
    def engine(self) -> Engine | None:
        return self.current.engine if self.current is not None else None

    @property
    def reporter(self) -> Reporter | None:
        return self.current.reporter if self.current is not None else None

    def require_executable(self) -> Executable:
        """Return the executable of the current plan. Raises Error before compilation."""
        if self.executable is None:
            raise Error(
                "Model has not been compiled or has been destroyed.\n  fix: call it, or model.compile(*inputs)"
            )
        return self.executable

    def require_engine(self) -> Engine:
        """Return the engine of the current plan. Raises Error if the model is not attached, or in a fork."""
        self.require_executable()
        if self.engine is None:
            raise Error("the model is not attached to its devices\n  fix: call it, or model.attachToDevice()")
        if self.is_forked:
            raise Error(
                f"the model is attached to devices of process {self._process}, and this is a fork of it\n"
                "  why: os.fork() copies memory, but no threads: none would run the model here\n"
                "  fix: call detachFromDevice() before the fork, or start processes with 'spawn'"
            )
        return self.engine

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the process that attached the model. False if detached."""
        return self.engine is not None and self._process != os.getpid()

    # ---- plans ---------------------------------------------------------------------------------------------

    def add_plan(self, plan: LoadedPlan) -> None:
        """Add a plan under its key. If there is no current plan, set `current` and `first` to it."""
        self.by_key[plan.executable.key] = plan
        if self.current is None:
            self.current, self.first = plan, plan.executable

    def make_current(self, plan: LoadedPlan, weights: Mapping[str, Tensor]) -> None:
        """Make `plan` current. If the previous plan has an engine, its tensors pass to an engine of `plan`.

        Args: weights: the host's, by canonical name, for those that the previous engine does not have
        Raises: Error, in a fork of the process that attached the model
        """
        before = self.current
        if before is plan:
            return
        if before is not None and before.engine is not None:
            self.require_engine()
            if plan.engine is None:
                plan.engine = self._new_engine(plan, weights, before.engine)
                held = {unit.key for unit in before.engine.state.optimizer}
                kept = {key: state for key, state in (self.kept.optimizer or {}).items() if key not in held}
                plan.engine.state.write_optimizer(kept)  # of parameters that `before` does not train
            else:
                plan.engine.take_over(before.engine)
        self.current = plan

    def remove_plan(self, key: Any) -> None:
        """Remove a plan that is not current. If it has an engine, save its profile and close the engine."""
        self._close_engine(self.by_key.pop(key))

    def remove_oldest(self, keys: list[Any], most: int) -> None:
        """Remove all but the `most` plans used last. `keys`: of the latest call's plans, in order."""
        used = {key: number for number, key in enumerate(keys, 1)}
        plans = sorted(self.by_key.items(), key=lambda item: (item[1] is self.current, used.get(item[0], 0)))
        self.by_key = dict(plans)  # one assignment: no plan is lost by an interrupt
        for key, _ in plans[:-most]:
            self.remove_plan(key)
            logger.info("allowNewShapes(plans=%d): the plan used longest ago is dropped", most)

    def clear_plans(self) -> None:
        """Remove all plans. Their engines must be closed."""
        self.by_key.clear()
        self.current = self.first = None

    # ---- devices -------------------------------------------------------------------------------------------

    def attach(self, weights: Mapping[str, Tensor]) -> None:
        """Create the current plan's engine, from the host's weights (by name) and the state in `kept`."""
        plan, kept = self.current, self.kept
        assert plan is not None
        engine = self._new_engine(plan, weights)
        engine.state.random_state = self.random_state
        engine.state.write_optimizer(kept.optimizer or {}, kept.loss_factor)
        if kept.buffers is not None:
            engine.state.write(kept.buffers)
        self._process = os.getpid()
        plan.engine = engine  # last: an engine counts as attached when it is complete
        self.kept = replace(kept, buffers=None)

    def _new_engine(
        self, plan: LoadedPlan, weights: Mapping[str, Tensor], previous: Engine | None = None
    ) -> Engine:
        """Return a new engine for a plan, which shares the tensors of engine `previous`."""
        executable = plan.executable
        # An executable from a file runs on the device that this program's options name.
        device = chosen_device(self._options, executable.settings.training)
        settings = replace(executable.settings, device=device)
        with DisableTorchFunctionSubclass():
            engine = Engine(executable.plan, settings, weights, self._seed(), previous=previous)
        if plan.reporter is not None:
            plan.reporter.on_attach(engine, executable)
        return engine

    def detach(self) -> None:
        """Store the current engine's state, except weights, in `kept`; save profiles; close all engines. In a
        fork of the process that attached the model, only remove the references to the engines."""
        if not self.is_forked:
            self.kept = self.current_state()
        for plan in self.by_key.values():
            self._close_engine(plan)

    def _close_engine(self, plan: LoadedPlan) -> None:
        """Save a plan's profile, and close its engine, if any; in a fork only set `plan.engine` to None."""
        engine, plan.engine = plan.engine, None  # before its threads end
        if engine is None or self._process != os.getpid():  # its threads are the other process's
            return
        if plan.reporter is not None:
            plan.reporter.on_release()
        engine.close()

    def current_state(self, whole: bool = False) -> KeptState:
        """Return the state of the current engine, except weights and buffers; without an engine `kept`.

        Args: whole: gather an optimizer state that is sharded over instances; False: this instance's shard
        """
        kept = replace(self.kept, random=self.random_state, loss_factor=self.loss_factor)
        if self.engine is not None and self.engine.settings.training:
            optimizer = {**(kept.optimizer or {}), **(self.optimizer_states(whole) or {})}
            kept = replace(kept, optimizer=optimizer)
        return kept

    # ---- state of the engine, or of the next one -----------------------------------------------------------

    @property
    def random_state(self) -> tuple[int, int]:
        """Return (seed, number of steps run) of the engine; without an engine, those of the next engine."""
        if self.engine is not None:
            return self.engine.state.random_state
        return self.kept.random or (self._seed(), 0)

    @random_state.setter
    def random_state(self, state: tuple[int, int]) -> None:
        self.kept = replace(self.kept, random=state)
        if self.engine is not None:
            self.engine.state.random_state = state

    def _seed(self) -> int:
        """Return the seed of `Options.randomSeed`, by default torch's."""
        return self._options.random_seed if self._options.exists("random_seed") else torch.initial_seed()

    @property
    def is_optimizer_sharded(self) -> bool:
        """Return whether each instance has only a shard of the optimizer state. False before compilation."""
        settings = self.executable and self.executable.settings
        return settings is not None and settings.shard_optimizer is not None and settings.counts.instances > 1

    def optimizer_states(self, whole: bool = True) -> Mapping[str, dict[str, Tensor]] | None:
        """Return the optimizer state of each parameter: {canonical name: {name of the state: tensor}}.

        The states are copies of the engine's; without an engine they are the next engine's, None if initial.

        Args: whole: gather a sharded state, which waits for all instances; False: only this instance's shard
        Raises: Error, if a sharded state is to be gathered without an engine, or an instance is gone
        """
        if self.engine is not None:
            return self.engine.read_whole_optimizer() if whole else self.engine.state.read_optimizer()
        if whole and self.is_optimizer_sharded:
            raise Error(
                "the optimizer's state is shared out over the instances, and can be read while all are attached to"
                " their devices\n"
                "  fix: call state_dict() before detachFromDevice() or destroy(), or after attachToDevice()"
            )
        return self.kept.optimizer

    @property
    def loss_factor(self) -> float:
        return self.engine.state.loss_factor if self.engine is not None else self.kept.loss_factor
