"""`trainingModel`, `inferenceModel` and the executor behind both: compiles a model at its first call, runs it.

The only caller of `popengine.compile` and `popengine.run`: it turns the user's arguments into batches for the
engine and its results into the user's outputs, and decides when weights move between host and devices.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from popengine import profile
from popengine.compile import compile_graph, update
from popengine.compile.capture import capture
from popengine.compile.schedule import draw
from popengine.errors import Error
from popengine.ir import Plan
from popengine.run.engine import Engine
from popengine.run.recorder import Recorder
from popengine.settings import Hyper, Settings

from . import arguments, hooks, wrapping
from .blocks import module_repr
from .enums import ConnectionType
from .logs import logger
from .optim import SGD
from .optim import Optimizer as PoptorchOptimizer
from .optim.guard import OptimizerGuard
from .optim.state import rate_entries, state_entries, states_of
from .options import Options
from .options.freeze import freeze, resolved

_PASSES = ("capture", "partition", "schedule", "lower", "load")


def trainingModel(
    model: nn.Module | PoplarExecutor, options: Options | None = None, optimizer: Any = None
) -> PoplarExecutor:
    """Wrap a model whose forward computes a loss: calling it trains it.

    Args:
        optimizer: poptorch.optim's or torch.optim's; by default poptorch.optim.SGD with lr 0.01
    Raises:
        RuntimeError: the model is wrapped for training already
    """
    model = model._user_model if isinstance(model, PoplarExecutor) else model
    if wrapping.owner_of(model) is not None:
        raise RuntimeError(
            "this model has already been wrapped in 'poptorch.trainingModel'\n"
            "  fix: call model.destroy() to unwrap it first"
        )
    return PoplarExecutor(model, options, training=True, optimizer=optimizer)


def inferenceModel(
    model: nn.Module | PoplarExecutor | Callable[..., Any], options: Options | None = None
) -> PoplarExecutor:
    """Wrap a model, or a function of tensors: calling it runs its forward."""
    model = model._user_model if isinstance(model, PoplarExecutor) else model
    return PoplarExecutor(model, options, training=False)


class _Function(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class PoplarExecutor:
    """A wrapped model. Compiled once, at the first call or `compile`; holds the devices until `destroy`."""

    def __init__(self, model: Any, options: Options | None, *, training: bool, optimizer: Any = None) -> None:
        if options is not None and not isinstance(options, Options):
            raise Error(
                f"Invalid type: 'options' is {type(options)}, expected {Options}\n"
                "  fix: options = poptorch.Options()"
            )
        options = Options() if options is None else options
        options._freeze()
        self._options = resolved(options, training)
        self._training = training
        self._user_model = model if isinstance(model, nn.Module) else _Function(model)
        wrapping.check_buffers(self._user_model)
        # Flags of the top level are fixed now; everything below is shared with the user's model.
        self._model = wrapping.shallow_copy(self._user_model)
        self._signature = inspect.signature(self._model.forward)
        self._plan: Plan | None = None
        self._settings: Settings | None = None
        self._engine: Engine | None = None
        self._compiled_for: arguments.Compiled | None = None
        self._template: Any = None
        self._compilation_seconds: float | None = None
        self._stale = False  # the devices have newer weights than the host
        self._host_weights_version = 0
        self._seen_version: int | None = None
        self._kept_rng: tuple[int, int] | None = None
        self._kept_state: dict[str, dict[str, Tensor]] | None = None
        self._recorder = Recorder() if self._options._profile_directory(training) else None
        self._optimizer: Any = None
        self._hyper: Hyper | None = None
        if training:
            relaxed = self._options._relax_optimizer_checks
            scaling = bool(self._options._Popart.options.get("automaticLossScalingSettings.enabled", False))
            self._guard = OptimizerGuard(relaxed, scaling)
            if optimizer is None:
                optimizer = SGD(self._user_model.parameters(), lr=0.01)
            self.setOptimizer(optimizer)
            wrapping.mark(self._user_model, self)

    # ---- calling -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one combined batch: all device iterations. Compiles at the first call.

        Raises:
            Error: the model can't be compiled, the batch is not what was compiled for, or the run failed;
                weights are then as before the call, and the model can be called again
        """
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never)\n"
            "  fix: use model.compile(...) or compileAndExport(...) only, or another connection type"
        )
        call = arguments.bind(self._signature, args, kwargs)
        if self._plan is None:
            self._compile(call)
        self._check(call)
        if self._engine is None:
            self.attachToDevice()
        if not self._training:
            self._refresh_from_trainer()
        return self._run(call)

    def _run(self, call: arguments.Call) -> Any:
        assert self._engine is not None
        self._upload_pending_state()
        results = self._engine.run(arguments.prepared(call), self._hyper, self._recorder)
        if self._training:
            self._stale = True
        with torch.no_grad():
            for position, value in results.inputs().items():
                key = self._engine.plan.partition.graph.results[position].key
                call.tensors[int(key)].copy_(value.reshape(call.tensors[int(key)].shape))
        return arguments.returned(self._template, [_marked_as_output(value) for value in results.outputs()])

    def _check(self, call: arguments.Call) -> None:
        assert self._compiled_for is not None
        self._compiled_for.check(call)

    # ---- compiling ---------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments, the same as those of a call, and load the weights; runs nothing."""
        if self._plan is not None:
            logger.warning("Call to compile() ignored: the model is compiled already")
            return
        self._compile(arguments.bind(self._signature, args, kwargs))

    def _compile(self, call: arguments.Call) -> None:
        settings = freeze(self._options, self._training, self._optimizer_settings if self._training else None)
        arguments.check_batch(call, settings.counts)
        self._options._Popart.check_names()
        started = time.perf_counter()
        samples = [arguments.sample(tensor, settings.counts) for tensor in call.tensors]
        template = None

        def forward(tensors: list[Tensor]) -> list[Tensor]:
            nonlocal template
            output = call.given_to(self._model, tensors)
            template, outputs = arguments.traced_outputs(output)
            return outputs

        with self._progress() as done:
            hooks.before_compilation()
            self._options._execution_strategy.onStartTracing()
            try:
                graph = capture(self._model, forward, samples, training=self._training)
            finally:
                self._options._execution_strategy.onEndTracing()
                hooks.after_compilation()
            done("capture")
            plan = compile_graph(graph, settings, done)
            self._check_buffers_of_replicas(plan, settings)
            self._plan, self._settings, self._template = plan, settings, template
            self._compiled_for = arguments.Compiled(call)
            try:
                if self._options.connection_type != ConnectionType.Never:
                    self.attachToDevice()
            except BaseException:
                self._plan = None
                raise
            done("load")
        self._compilation_seconds = time.perf_counter() - started

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[str], None]]:
        shown = self._options._show_progress_bar
        layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}]"
        with tqdm(total=len(_PASSES), desc="Graph compilation", disable=not shown, bar_format=layout) as bar:
            yield lambda name: (bar.update(), None)[1]

    def _check_buffers_of_replicas(self, plan: Plan, settings: Settings) -> None:
        """Replicas whose buffers drift apart can't be meant to be equal."""
        if settings.counts.replicas == 1 or not self._options.broadcast_buffers:
            return
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        changed = [
            result.key
            for result in plan.partition.graph.results
            if result.kind == "buffer" and result.key.rsplit(".", 1)[-1] not in statistics
        ]
        if changed:
            raise Error(
                f"a model that updates buffers ({', '.join(changed)}) on {settings.counts.replicas} replicas does not"
                " support broadcasting buffers\n"
                "  why: each replica sees other data, so its buffers become its own\n"
                "  fix: options.broadcastBuffers(False), if the model tolerates that; the host gets replica 0's"
            )

    # ---- weights -----------------------------------------------------------------------------------------

    def _host_weights(self) -> dict[str, Tensor]:
        """The user's parameters and buffers, by canonical name, without asking for newer values."""
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def copyWeightsToHost(self) -> None:
        """Copy the devices' weights and buffers into the user's model."""
        engine = self._need_engine()
        self._stale = False
        host = self._host_weights()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for name, value in engine.read().items():
                host[name].copy_(value)
        self._host_weights_version += 1

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if the devices have newer ones; whether they had."""
        if not self._stale or self._engine is None:
            return False
        self._stale = False
        self.copyWeightsToHost()
        return True

    def copyWeightsToDevice(self) -> None:
        """Upload the user's weights; training done since they were last copied to the host is discarded."""
        engine = self._need_engine()
        self._stale = False
        with torch._C.DisableTorchFunctionSubclass():
            engine.write(self._host_weights())

    def copyNamedBuffersToDevice(self) -> None:
        """Upload the buffers named in `Options.updatableNamedBuffers`, and nothing else."""
        names = self._options._Popart.options.get("updatableNamedBuffers")
        if not names:
            raise Error(
                "No named buffers marked as updatable\n  fix: options.updatableNamedBuffers(['name']) before wrapping"
            )
        buffers = dict(self._model.named_buffers())
        unknown = [name for name in names if name not in buffers]
        if unknown:
            raise Error(
                f"updatableNamedBuffers names {unknown}, but the model's buffers are {sorted(buffers)}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            self._need_engine().write({name: buffers[name] for name in names})

    def _refresh_from_trainer(self) -> None:
        """On a model that is also wrapped for training, validate with the newest weights."""
        trainer = wrapping.owner_of(self._user_model)
        if trainer is None:
            return
        trainer.copyWeightsToHostIfNeeded()
        if trainer._host_weights_version != self._seen_version:
            self._seen_version = trainer._host_weights_version
            self.copyWeightsToDevice()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user model's, with the newest weights."""
        return self._user_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load into the user's model, and upload if attached; returns missing and unexpected keys."""
        self._stale = False
        keys = self._user_model.load_state_dict(state_dict, strict)
        if self._engine is not None:
            self.copyWeightsToDevice()
        return keys

    # ---- optimizer ---------------------------------------------------------------------------------------

    def setOptimizer(self, optimizer: Any) -> None:
        """Use this optimizer's rates, as they are now, from the next call on.

        Raises:
            Error: something changed that is compiled in (10.4 of the contract), or the model is for inference
        """
        if not self._training:
            raise Error("setOptimizer needs a model that trains: use poptorch.trainingModel")
        with torch._C.DisableTorchFunctionSubclass():
            names = {id(parameter): name for name, parameter in self._user_model_parameters()}
        frozen, self._hyper = self._guard.accept(optimizer, names, self._plan is not None)
        if self._plan is None:
            self._optimizer_settings = frozen
            lost = [
                n for n, p in self._user_model_parameters() if p.requires_grad and n not in frozen.group_of
            ]
            if lost:
                logger.warning("parameters in no group of the optimizer are not updated: %s", ", ".join(lost))
        if optimizer is self._optimizer:
            return
        if isinstance(self._optimizer, PoptorchOptimizer):
            self._optimizer._release()
        self._optimizer = optimizer
        self._link_optimizer()

    def _user_model_parameters(self) -> list[tuple[str, Any]]:
        return list(nn.Module.named_parameters(self._user_model))

    def _link_optimizer(self) -> None:
        """A poptorch optimizer reads its state from the devices of the executor it belongs to."""
        if isinstance(self._optimizer, PoptorchOptimizer) and self._engine is not None:
            link = weakref.ref(self)
            self._optimizer._state_reader = lambda: ((own := link()) and own._read_state()) or (None, None)

    def _read_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        assert self._hyper is not None
        states = self._engine.read_optimizer() if self._engine is not None else self._kept_state or {}
        frozen = self._optimizer_settings
        return state_entries(frozen.kind, states), rate_entries(frozen, self._hyper)

    def _upload_pending_state(self) -> None:
        optimizer = self._optimizer
        if isinstance(optimizer, PoptorchOptimizer) and optimizer._pending_state is not None:
            assert self._engine is not None
            loaded = states_of(self._optimizer_settings.kind, optimizer._pending_state[0] or {})
            missing = sorted(set(self._engine.read_optimizer()) - set(loaded))
            if missing:
                logger.warning(
                    "the loaded optimizer state has nothing for %s: kept as it is", ", ".join(missing)
                )
            self._engine.write_optimizer(loaded)
            optimizer._pending_state = None

    # ---- devices -----------------------------------------------------------------------------------------

    def isCompiled(self) -> bool:
        return self._plan is not None

    def isAttachedToDevice(self) -> bool:
        return self._engine is not None

    @property
    def _is_attached(self) -> bool:
        return self._engine is not None

    @property
    def _executable(self) -> Plan | None:
        return self._plan

    def attachToDevice(self) -> None:
        """Take the devices: start their threads, upload weights, optimizer state and the random state."""
        self._need_plan()
        assert self._plan is not None and self._settings is not None
        if self._engine is not None:
            raise Error("Device is already attached")
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to attach a model to an offline device (ConnectionType.Never)"
        )
        seed = self._options.random_seed if self._options.exists("random_seed") else torch.initial_seed()
        with torch._C.DisableTorchFunctionSubclass():
            self._engine = Engine(self._plan, self._settings, self._host_weights(), update, seed)
        if self._kept_rng is not None:
            self._engine.seed, self._engine.step = self._kept_rng
        if self._kept_state is not None:
            self._engine.write_optimizer(self._kept_state)
        self._stale = False
        self._link_optimizer()
        trainer = wrapping.owner_of(self._user_model)
        self._seen_version = trainer._host_weights_version if trainer is not None else None

    def detachFromDevice(self) -> None:
        """Release the devices; weights, optimizer state and the random state stay on the host."""
        self._need_plan()
        if self._engine is None:
            raise Error("Device is not attached")
        self._let_go()

    def _let_go(self) -> None:
        assert self._engine is not None
        if self._training:
            self.copyWeightsToHostIfNeeded()
            self._kept_state = self._engine.read_optimizer()
        self._kept_rng = self._engine.seed, self._engine.step
        self._save_profile()
        self._engine.close()
        self._engine = None

    def destroy(self) -> None:
        """Free the devices and the compiled program; the user's model is plain again, with its weights."""
        if self._plan is None:
            return
        if self._engine is not None:
            self._let_go()
        if isinstance(self._optimizer, PoptorchOptimizer):
            self._optimizer._release()
        self._plan = self._compiled_for = self._settings = None
        if wrapping.owner_of(self._user_model) is self:
            wrapping.unmark(self._user_model)

    def _need_plan(self) -> None:
        if self._plan is None:
            raise Error(
                "the model has not been compiled or has been destroyed\n  fix: call it, or model.compile(*inputs)"
            )

    def _need_engine(self) -> Engine:
        self._need_plan()
        if self._engine is None:
            raise Error("the model is not attached to its devices\n  fix: call it, or model.attachToDevice()")
        return self._engine

    # ---- the rest ----------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The user's model."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The executor's own frozen options, with an output mode picked."""
        return self._options

    @property
    def rng_state(self) -> list[int]:
        """[seed, steps run]: with the same state a model draws the same random numbers."""
        self._need_plan()
        if self._engine is not None:
            return [self._engine.seed, self._engine.step]
        return list(self._kept_rng or (0, 0))

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._need_plan()
        self._kept_rng = state[0], state[1]
        if self._engine is not None:
            self._engine.seed, self._engine.step = self._kept_rng

    def compilationTime(self) -> timedelta:
        """How long the compilation took."""
        if not self._options._show_progress_bar:
            raise Error("compilationTime() needs options.showCompilationProgressBar(True)")
        if self._compilation_seconds is None:
            raise Error(
                "compile the model before obtaining compilation time: call it, or model.compile(*inputs)"
            )
        return timedelta(seconds=self._compilation_seconds)

    def cycleCount(self) -> int:
        """Refused: there are no cycles to count here."""
        if not self._options._Popart.options.get("instrumentWithHardwareCycleCounter"):
            raise Error("Cycle count logging is disabled\n  fix: options.logCycleCount(True)")
        raise Error(
            "cycleCount() is only supported on actual IPU hardware; see getPerfCounters() for seconds"
        )

    def _save_profile(self) -> None:
        directory = self._options._profile_directory(self._training)
        if directory is None or self._plan is None or self._settings is None or self._recorder is None:
            return
        partition, counts = self._plan.partition, self._settings.counts
        facts = {
            "iterations": counts.iterations,
            "accumulation": counts.accumulation,
            "replicas": counts.replicas,
            "compile_seconds": self._compilation_seconds,
        }
        profile.Profile(
            self._training,
            partition.ipus,
            partition.names,
            draw(self._plan.schedule),
            tuple(self._recorder.events),
            facts,
        ).save(directory / "profile.pop")

    def __repr__(self) -> str:
        return module_repr(self._user_model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and "_user_model" not in self.__dict__:
            raise AttributeError(name)  # while the executor is being made or unpickled
        return getattr(self._user_model, name)


def _marked_as_output(value: Tensor) -> Tensor:
    if value.is_floating_point():
        value.backward = _refuse_backward
    return value


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly on a model's output: the call of the model has trained it\n"
        "  fix: leave it out; wrap the model with poptorch.trainingModel to have it trained"
    )
