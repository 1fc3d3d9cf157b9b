"""The two copies of the weights: the user's on the host, and the executor's on its devices.

Training makes the host's copy stale: the next read of a weight there copies all of them. Values that the user writes on
the host reach the devices by `copyWeightsToDevice`; a call before it logs a warning, once.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from popengine.errors import Error

from ..logs import listed, logger
from ..reporting.reporter import noting
from .device_lease import DeviceLease
from .marked_model import WrappedModel, watch_registrations

# Of a weight on the host: its version counter, its address, whether it requires a gradient.
Mark = tuple[int, int, bool]


class WeightSync:
    """The transfer of weights between a model and the devices of its executor.

    `version` counts the copies to the host.
    """

    def __init__(self, model: WrappedModel, lease: DeviceLease, executor: weakref.ref[Any]) -> None:
        self._model, self._lease, self._executor = model, lease, executor
        self.version = 0
        self._is_behind = False  # another executor of the model has trained, or uploaded, newer weights
        self._trainers: list[weakref.ref[WeightSync]] | None = None  # of other executors; None: unknown
        self._equal: dict[str, Tensor] = {}  # the host's weights when they were last equal to the devices'
        self._marks: dict[str, Mark] = {}  # of the weights in `_equal` at that time
        self._checked: dict[str, Mark] = {}  # of the same weights at the latest call
        self._compiled: Any = None  # the executable to which `_new_layers` belongs
        self._new_layers: list[str] = []  # names of layers that were replaced
        self._is_replaced = False  # whether a layer, parameter or buffer was replaced since the latest call
        self._warned: set[str] = set()

    def on_host(self) -> dict[str, Tensor]:
        """Return the user's parameters and buffers by canonical name.

        Raises: Error, if a weight of the compiled model was removed, or has another shape or dtype
        """
        host, executable = self._model.weights(), self._lease.executable
        if executable is None:
            return host
        weights = executable.plan.partition.signature.weights
        lost = [slot.key for slot in weights if slot.key not in host]
        if lost:
            raise Error(
                f"the model has lost {', '.join(lost)} since it was compiled\n"
                "  why: its parameters and buffers are those of the compilation; one of them was removed, or"
                " became the same object as another one\n"
                "  fix: put it back, or change the model before it is wrapped"
            )
        shapes = self._model.shapes(executable.settings.replica_groups)
        for slot in weights:
            with torch._C.DisableTorchFunctionSubclass():
                dtype = host[slot.key].dtype
            for what, now, before in (
                ("shape", list(shapes[slot.key]), list(slot.shape)),
                ("type", dtype, slot.dtype),
            ):
                if now != before:
                    raise Error(
                        f"{slot.role} {slot.key} has the {what} {now} now, and the model is compiled for {before}\n"
                        "  why: half(), to(), another layer in its place or an assignment to .data has changed it\n"
                        "  fix: change it back, or call destroy() and compile the model again"
                    )
        return host

    # ---- to the host -------------------------------------------------------------------------------------

    @property
    def host_is_stale(self) -> bool:
        """Return whether the devices have newer weights than the host."""
        engine = self._lease.engine
        return engine is not None and engine.state.host_is_stale

    def copyWeightsToHost(self) -> None:
        """Copy the devices' weights and buffers into the user's model. Raises: Error, if not attached"""
        engine = self._lease.need_engine()
        with noting(self._lease.reporter, "weights to host"), engine.state.still:
            self.put_on_host(engine.state.read())
        # Last: after an interrupted copy the next read of a weight copies all of them again.
        engine.state.host_is_stale = False

    def put_on_host(self, values: Mapping[str, Tensor]) -> None:
        """Copy values, by canonical name, into the user's model."""
        host = self.on_host()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for name, value in values.items():
                if host[name].shape == value.shape:
                    host[name].copy_(value)
                else:  # a per-replica parameter: the host gets one row per group of replicas
                    host[name].data = value.clone()
        self.version += 1
        self._note_equal(host)
        if self._model.training:
            self._mark_other_executors()

    # ---- to the devices ----------------------------------------------------------------------------------

    def copyWeightsToDevice(self) -> None:
        """Upload the user's weights; training done since they were last copied to the host is discarded."""
        self.upload()
        self._mark_other_executors()

    def upload(self) -> None:
        """Upload the user's weights to this executor's devices only."""
        engine = self._lease.need_engine()
        weights = self.on_host()
        with noting(self._lease.reporter, "weights to devices"), torch._C.DisableTorchFunctionSubclass():
            engine.write(weights)
        self._note_equal(weights)

    def averageRunningStatistics(self) -> None:
        """*Pando*: replace running statistics by their mean over the replicas of all instances.

        Each replica processes different rows, and the host gets the buffers of replica 0 of its instance: call this
        method before a validation or a checkpoint, in all instances. Running statistics are all floating point buffers
        that forward changes.

        Raises: Error, if the model is not attached to its devices
        """
        self._lease.need_engine().average_buffers()

    def copyNamedBuffersToDevice(self) -> None:
        """Upload only the buffers of `Options.updatableNamedBuffers`. Raises: Error, if it names none"""
        names = self._model.updatable_buffers()
        if not names:
            raise Error(
                "No named buffers marked as updatable\n"
                "  fix: options.updatableNamedBuffers(['name']) before wrapping"
            )
        host = self.on_host()
        buffers = {name: host[name] for name in names}
        with torch._C.DisableTorchFunctionSubclass():
            self._lease.need_engine().write(buffers)
        self._equal |= buffers
        self._marks |= _marks(buffers)
        self._mark_other_executors()

    # ---- what is changed on the host ---------------------------------------------------------------------

    def hostWeightsChanged(self) -> bool:
        """*Pando*: return whether weights were written on the host since the last upload or download. Writes
        into `weight.data` are not detected."""
        return not self.host_is_stale and bool(self._equal) and bool(self._written(self.on_host()))

    def check_host(self) -> None:
        """Warn, once per kind of change, if the model was changed after its compilation, which calls ignore.

        These are written or replaced weights, replaced layers and, in training, a changed `requires_grad`.

        Raises:
            Error: a weight was removed, or its dtype or shape has changed
        """
        marks = _marks(self._equal)
        if marks == self._checked and not self._is_replaced:
            return
        host = self.on_host()
        if self._new_layers:
            self._warn(
                f"{listed(self._new_layers)} has another layer in its place since the compilation",
                "computes what the layer before did",
            )
        elif written := self._written(host):
            self._warn(
                f"{listed(written)} changed on the host",
                "uses the values that the devices have",
                "call copyWeightsToDevice() on the executor after weights were loaded or written",
            )
        self._check_flags(host)
        self._checked, self._is_replaced, self._new_layers = marks, False, []

    def _check_flags(self, host: Mapping[str, Tensor]) -> None:
        """In training, warn if parameters were frozen or made trainable since the compilation."""
        if not self._model.training:
            return
        results = self._lease.need_executable().plan.partition.signature.results
        trained = {result.key for result in results if result.kind == "gradient"}
        with torch._C.DisableTorchFunctionSubclass():
            frozen = [n for n, w in host.items() if n in trained and not w.requires_grad]
            untrained = [n for n, w in host.items() if n not in trained and w.requires_grad]
        freed = [n for n in untrained if n in self._checked and not self._checked[n][2]]
        if frozen:
            self._warn(f"{listed(frozen)} was frozen after the compilation", "trains it as before")
        if freed:
            self._warn(f"{listed(freed)} was made trainable after the compilation", "does not train it")

    def _warn(
        self,
        change: str,
        effect: str,
        fix: str = "call destroy() on the executor: its next call compiles the model as it is",
    ) -> None:
        if effect not in self._warned:
            self._warned.add(effect)
            logger.warning("%s, and the compiled program %s\n  fix: %s", change, effect, fix)

    def _written(self, host: Mapping[str, Tensor]) -> list[str]:
        """Return the names of weights that were replaced or written since the last upload or download."""
        now = _marks(host)
        return [n for n, w in host.items() if self._equal.get(n) is not w or self._marks[n][:2] != now[n][:2]]

    def _note_equal(self, host: dict[str, Tensor]) -> None:
        """Record that the host's weights are now equal to those of the devices."""
        self._equal, self._marks = host, _marks(host)
        self._checked, self._is_behind = self._marks, False

    # ---- other executors of the model ----------------------------------------------------------------------

    def begin(self) -> dict[str, Tensor]:
        """Return the weights for a new engine: the newest of all executors of the model."""
        executable = self._lease.need_executable()
        if executable is not self._compiled:
            self._compiled, self._new_layers = executable, []
        for module in self._model.user.modules():
            _users.setdefault(module, weakref.WeakSet()).add(self)
        for other in self._others():
            other._trainers = None
        watch_registrations(_registered)
        self._pull()
        host = self.on_host()
        self._check_flags(host)
        self._note_equal(host)
        return host

    def refresh(self) -> None:
        """Upload the weights if another executor of the model has trained or uploaded newer ones."""
        self._pull()
        if self._is_behind:
            self.upload()

    def _pull(self) -> None:
        """Copy to the host the newest weights of the model's other training executors."""
        if self._trainers is None:
            self._trainers = [weakref.ref(other) for other in self._others() if other._model.training]
        for trainer in self._trainers:
            sync = trainer()
            executor = sync and sync._executor()
            if executor is not None:
                executor.copyWeightsToHostIfNeeded()

    def _mark_other_executors(self) -> None:
        """Record in the executors that share a layer with this one that the host has new weights.

        Inference executors upload them before their next run. Training executors keep their own weights,
        without a warning: there was one when the model was wrapped.
        """
        for other in self._others():
            if other._model.training:
                other._marks = other._checked = _marks(other._equal)
            else:
                other._is_behind = True

    def _others(self) -> set["WeightSync"]:
        """Return the `WeightSync` of each other executor that shares a layer with this one."""
        return {other for module in self._model.user.modules() for other in _users.get(module, ())} - {self}


# By module, the executors that are, or were, attached to devices with it.
_users: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[WeightSync]] = weakref.WeakKeyDictionary()


def _registered(module: nn.Module, name: str, value: Any) -> None:
    """Record in each executor of a module that one of its layers, parameters or buffers is being replaced."""
    old = (module._modules, module._parameters, module._buffers)
    if not any(names.get(name) is value for names in old):
        for sync in _users.get(module, ()):
            sync._is_replaced = True
            if isinstance(value, nn.Module):
                sync._new_layers.append(name)


def _marks(weights: Mapping[str, Tensor]) -> dict[str, Mark]:
    """Return the `Mark` of each weight. Tensors made in inference mode have no version counter: 0."""
    with torch._C.DisableTorchFunctionSubclass():
        return {
            name: (0 if weight.is_inference() else weight._version, weight.data_ptr(), weight.requires_grad)
            for name, weight in weights.items()
        }
