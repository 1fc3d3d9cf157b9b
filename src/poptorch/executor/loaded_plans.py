"""The compiled plans of a model, and their engines."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from popengine.errors import Error
from popengine.run.elsewhere import is_elsewhere
from popengine.run.engine import Engine
from popengine.run.train_state import TrainState

from ..compiling.arguments import weights_of
from ..compiling.executable import Executable
from ..compiling.materializing import fill_weights
from ..compiling.runs import Run
from ..logs import logger
from ..options import Options
from ..reporter import Reporter


@dataclass(eq=False)
class LoadedPlan:
    """A compiled plan, the reporter of its profile (None: no profile) and its engine (None: not attached)."""

    executable: Executable
    reporter: Reporter | None = None
    engine: Engine | None = None
    calls: int = 0
    synthetic: list[Tensor] | None = None  # inputs of `Options.enableSyntheticData`


class LoadedPlans:
    """The compiled plans of a model, and their engines, which share one `TrainState`."""

    def __init__(self, options: Options, model: nn.Module) -> None:
        self._options, self._model = options, model
        self.state = TrainState(functools.partial(weights_of, model), replicas=options._counts().replicas)
        self._is_seeded = False  # whether `state.random_state` is set
        self.has_file_state = False  # whether the state was loaded from a file
        self.loaded: list[LoadedPlan] = []  # in order of use, the latest last
        self.current: LoadedPlan | None = None
        self.first: Executable | None = None  # compiled first; calls are checked against its inputs
        self._process = -1  # id of the process that attached; a fork of it has no threads

    @property
    def executable(self) -> Executable | None:
        return self.current.executable if self.current is not None else None

    @property
    def engine(self) -> Engine | None:
        return self.current.engine if self.current is not None else None

    @property
    def waits_for_first_call(self) -> bool:
        """Return whether the state was loaded from a file, and nothing is compiled yet."""
        return self.has_file_state and self.current is None

    def require_executable(self) -> Executable:
        """Return the executable of the current plan. Raises Error before compilation."""
        if self.executable is None:
            raise Error(
                "Model has not been compiled or has been destroyed.\n"
                "  fix: call the executor, as trainer(*batch), or trainer.compile(*batch)"
            )
        return self.executable

    def require_engine(self) -> Engine:
        """Return the engine of the current plan. Raises Error if the model is not attached, or in a fork."""
        engine = None if self.current is None else self.current.engine
        if engine is None:
            self.require_executable()
            raise Error("the model is not attached to its devices\n  fix: call it, or model.attachToDevice()")
        if self._process != os.getpid():
            raise Error(
                f"the model is attached to devices of process {self._process}, and this is a fork of it\n"
                "  why: os.fork() copies memory, but no threads: none would run the model here\n"
                "  fix: call detachFromDevice() before the fork, or start processes with 'spawn'"
            )
        return engine

    # ---- plans ---------------------------------------------------------------------------------------------

    def plans_of(self, key: Any) -> list[LoadedPlan]:
        """Return the plans of runs with this `Run.key`, each for other values of what forward reads."""
        return [plan for plan in self.loaded if plan.executable.key == key]

    def find_plan(self, run: Run) -> LoadedPlan | None:
        """Return the plan of a run for the present values of what forward reads; None without."""
        current, key, call = self.current, run.key, run.call
        if current is not None and current.executable.key == key and current.executable.holds(call):
            return current
        return next((plan for plan in self.plans_of(key) if plan.executable.holds(call)), None)

    def add_plan(self, plan: LoadedPlan) -> None:
        """Add a plan. If there is no current plan, set `current` and `first` to it."""
        self.loaded.append(plan)
        if self.current is None:
            self.current, self.first = plan, plan.executable

    def make_current(self, plan: LoadedPlan) -> None:
        """Make a plan current. If the previous plan has an engine, and this one has none, create it."""
        if self.engine is not None and plan.engine is None:
            self.require_engine()
            plan.engine = self._new_engine(plan)
        self.current = plan

    def replace_plan(self, plan: LoadedPlan, previous: LoadedPlan | None) -> None:
        """Remove a plan, and make `previous` current; if there is none, remove all plans."""
        if previous is None:
            self.clear_plans()
        else:
            self.make_current(previous)
            self.loaded.remove(plan)
            self._close_engine(plan)

    def remove_oldest(self, used: list[LoadedPlan], most: int) -> None:
        """Remove all but the `most` plans used last. `used`: those of the latest call, in order."""
        self.loaded = [*(plan for plan in self.loaded if plan not in used), *dict.fromkeys(used)]
        for plan in self.loaded[:-most]:
            self.loaded.remove(plan)
            self._close_engine(plan)
            logger.info("allowNewShapes(plans=%d): the plan used longest ago is dropped", most)

    def clear_plans(self) -> None:
        """Close all engines, and remove all plans."""
        self.detach()
        self.loaded.clear()
        self.current = self.first = None

    @property
    def random_state(self) -> tuple[int, int]:
        """Return (seed, number of steps run). By default the seed is torch's at the first attach."""
        if self._is_seeded:
            return self.state.random_state
        return self._options.random_seed if self._options.exists("random_seed") else torch.initial_seed(), 0

    @random_state.setter
    def random_state(self, state: Sequence[int]) -> None:
        if not (isinstance(state, list | tuple) and len(state) == 2 and all(type(n) is int for n in state)):
            raise Error(
                f"a random state is the list of two integers that rng_state gave; found {state!r}\n"
                "  fix: state = executor.rng_state; ...; executor.rng_state = state"
            )
        self.state.random_state, self._is_seeded = (state[0], state[1]), True

    def export(self) -> dict[str, Any]:
        """Return `TrainState.export`; before the first attach, with the random state that it will have."""
        return {**self.state.export(), "random": self.random_state}

    def load(self, state: Mapping[str, Any], copies: bool = True) -> None:
        """Replace the state by that of an `export`: see `TrainState.load`."""
        self._is_seeded |= "random" in state
        self.state.load(state, copies)

    # ---- devices -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Create the current plan's engine."""
        assert self.current is not None
        self.random_state = self.random_state
        engine = self._new_engine(self.current)
        self._process = os.getpid()
        self.current.engine = engine  # last: an engine counts as attached when it is complete

    def _new_engine(self, plan: LoadedPlan) -> Engine:
        executable, settings = plan.executable, plan.executable.settings
        fill_weights(self._model, executable.plan.holders(), settings.counts.part)
        engine = Engine(executable.plan, settings, self.state, executable.present_tensors)
        if plan.reporter is not None:
            plan.reporter.on_attach(engine, executable)
        return engine

    def detach(self) -> None:
        """Save profiles, and close all engines. Weights and optimizer state return to the CPU."""
        for plan in self.loaded:
            self._close_engine(plan)
        if self._process == os.getpid():
            self.state.move_to_host()

    def _close_engine(self, plan: LoadedPlan) -> None:
        """Save a plan's profile, and close its engine, if any; in a fork only set `plan.engine` to None."""
        engine, plan.engine = plan.engine, None  # before its threads end
        if engine is None or self._process != os.getpid():  # its threads are the other process's
            return
        if plan.reporter is not None:
            plan.reporter.on_release()
        engine.close()

    def fill_elsewhere(self) -> None:
        """If the model is attached, give it the weights that other processes of the replica hold: waits for these."""
        if self.engine is not None and self.engine.settings.counts.parts > 1:
            names = [key for key, value in self.state.find_weights().items() if is_elsewhere(value)]
            self.state.fill_elsewhere(self.state.read_elsewhere(names)["weights"])
