"""What an executor knows: its fields, declared in one place for the files that its methods are spread over."""

from __future__ import annotations

import inspect
import os
from typing import Any

from torch import Tensor, nn

from popengine import settings
from popengine.errors import Error
from popengine.run.engine import Engine

from ..annotating.replica_groups import Grouping
from ..compiling.executable import Executable
from ..optim.guard import OptimizerGuard
from ..optim.torch_link import Link
from ..options import Options
from ..reporting.reporter import Reporter
from .latest_call import LatestCall


class ExecutorState:
    """The fields of `PoplarExecutor`."""

    _user_model: nn.Module
    _model: nn.Module  # the user's model with its top level's flags and attributes as they were at wrapping
    _signature: inspect.Signature
    _options: Options
    _training: bool
    _executable: Executable | None  # None: not compiled
    _engine: Engine | None  # None: not attached
    _process: int  # that attached: threads do not live on in a fork of it
    _compilation_seconds: float | None
    per_replica_params: dict[str, Grouping]

    _host_weights_version: int
    _host_writes: list[int]  # when they were last equal to the devices'
    _seen_version: int | None  # the trainer's, when an inference executor uploaded last
    _kept_rng: tuple[int, int] | None  # while detached
    _kept_buffers: list[dict[str, Tensor]] | None  # of each replica, until there is an engine for them
    _kept_state: dict[str, dict[str, Tensor]] | None  # of the optimizer, while detached

    _guard: OptimizerGuard
    _optimizer: Any
    _link: Link | None  # to a torch optimizer
    _loaded_states: dict[str, dict[str, Tensor]]  # of a torch optimizer, to be uploaded
    _optimizer_settings: settings.Optimizer
    _hyper: settings.Hyper | None
    _kept_factor: float  # of automatic loss scaling, while detached

    _reporter: Reporter | None  # None: nobody asked for a profile
    _latest: LatestCall
    _synthetic: list[Tensor] | None

    def isCompiled(self) -> bool:
        return self._executable is not None

    def isAttachedToDevice(self) -> bool:
        return self._engine is not None

    @property
    def _stale(self) -> bool:
        """Whether the devices have newer weights than the host."""
        engine = self._engine
        return engine is not None and engine.snapshot.host_is_stale

    @property
    def _forked(self) -> bool:
        return self._engine is not None and self._process != os.getpid()

    @property
    def _is_attached(self) -> bool:
        return self._engine is not None

    def _need_executable(self) -> Executable:
        if self._executable is None:
            raise Error(
                "Model has not been compiled or has been destroyed\n  fix: call it, or model.compile(*inputs)"
            )
        return self._executable

    def _need_engine(self) -> Engine:
        self._need_executable()
        if self._engine is None:
            raise Error("the model is not attached to its devices\n  fix: call it, or model.attachToDevice()")
        if self._forked:
            raise Error(
                f"the model is attached to devices of process {self._process}, and this is a fork of it\n"
                "  why: os.fork() copies memory, but no threads: nobody would run the model here\n"
                "  fix: call detachFromDevice() before the fork, or start processes with 'spawn'"
            )
        return self._engine
