"""When an executor holds devices: from `attachToDevice` (or the first call) to `detachFromDevice` or `destroy`."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import torch

from popengine.errors import Error
from popengine.run.engine import Engine
from popengine.update import group_update

from ..enums import ConnectionType
from ..options.freeze_options import device_of
from . import marked_model
from .host_weights import HostWeights
from .latest_call import LatestCall
from .optimizer_link import OptimizerOwner


class DeviceOwner(HostWeights, OptimizerOwner):
    """The part of an executor that takes and releases devices."""

    def attachToDevice(self) -> None:
        """Take the devices: start their threads, upload weights, optimizer state and the random state."""
        executable = self._need_executable()
        if self._engine is not None:
            raise Error("Device is already attached")
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to attach a model to an offline device (ConnectionType.Never)"
        )
        # What was compiled elsewhere runs on the devices of this program.
        settings = replace(executable.settings, device=device_of(self._options))
        with torch._C.DisableTorchFunctionSubclass():
            engine = Engine(executable.plan, settings, self._host_weights(), group_update, self._seed())
        if self._kept_rng is not None:
            engine.random_state = self._kept_rng
        if self._kept_state is not None:
            engine.write_optimizer(self._kept_state, self._kept_factor)
        if self._kept_buffers is not None:
            engine.write_buffers(self._kept_buffers)
            self._kept_buffers = None
        if self._reporter is not None:
            self._reporter.attached(engine, executable.graph)
        trainer = marked_model.owner_of(self._user_model)
        self._seen_version = trainer._host_weights_version if trainer is not None else None
        self._link_optimizer()
        self._process = os.getpid()
        self._engine = engine  # last: now it has all that was kept

    def detachFromDevice(self) -> None:
        """Release the devices; weights, optimizer state and the random state stay on the host."""
        self._need_executable()
        if self._engine is None:
            raise Error("Device is not attached")
        self._let_go()

    def _let_go(self) -> None:
        if self._forked:
            self._engine = None  # its threads are the other process's
            return
        engine = self._need_engine()
        if self._training:
            self.copyWeightsToHostIfNeeded()
            self._kept_state, self._kept_factor = engine.read_optimizer(), engine.loss_factor
        self._kept_rng = engine.random_state
        if self._reporter is not None:
            self._reporter.released()
        self._engine = None  # before its threads end
        engine.close()

    def destroy(self) -> None:
        """Free the devices and the compiled program; the user's model is plain again, with its weights."""
        if self._executable is None:
            return
        if self._engine is not None:
            self._let_go()
        self._release_optimizer()  # while it is known what its state is the state of
        self._forget_executable()
        self._unmark()

    def _forget_executable(self) -> None:
        if self._engine is not None:
            self._let_go()
        self._executable = self._synthetic = None
        self._latest = LatestCall()

    def _unmark(self) -> None:
        # While an executor dies its model sees no owner any more.
        if self._training and marked_model.owner_of(self._user_model) in (self, None):
            marked_model.unmark(self._user_model)

    def __del__(self) -> None:
        # Nobody can ask for newer weights from now on: leave them with the model. At the interpreter's exit
        # parts of torch may be gone already.
        with contextlib.suppress(Exception):
            self.destroy()
            self._release_optimizer()
            self._unmark()

    # ---- random numbers ----------------------------------------------------------------------------------

    def _seed(self) -> int:
        return self._options.random_seed if self._options.exists("random_seed") else torch.initial_seed()

    @property
    def rng_state(self) -> list[int]:
        """[seed, steps run]: with the same state a model draws the same random numbers."""
        self._need_executable()
        if self._engine is not None:
            return list(self._engine.random_state)
        return list(self._kept_rng or (self._seed(), 0))

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._need_executable()
        if not (isinstance(state, list | tuple) and len(state) == 2 and all(type(n) is int for n in state)):
            raise Error(
                f"a random state is the list of two integers that rng_state gave; found {state!r}\n"
                "  fix: state = executor.rng_state; ...; executor.rng_state = state"
            )
        self._kept_rng = state[0], state[1]
        if self._engine is not None:
            self._engine.random_state = self._kept_rng
