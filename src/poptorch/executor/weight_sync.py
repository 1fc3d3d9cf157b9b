"""The two copies of the weights: the user's on the host, and the executor's on its devices.

Training makes the host's copy stale, and the next read of a weight on the host copies all weights. Values
that the user writes on the host reach the devices by `copyWeightsToDevice`; a call before that logs a warning.
The peers of an executor are the other executors of its model, or of some layers of its model.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from popengine.errors import Error
from popengine.torch_private import DisableTorchFunctionSubclass

from ..compiling.arguments import weights_of
from ..logs import listed, logger
from ..reporter import recording_event
from .loaded_plans import LoadedPlans
from .marked_model import WrappedModel, executor_of, mark_tensors

Fingerprint = tuple[int, int, bool]  # of a weight on the host: version counter, address, requires_grad


class WeightSync:
    """The transfer of weights between a model and the devices of its executor.

    `version` counts the copies to the host. `mode` is the flag `training` of the user's model at compilation.
    """

    def __init__(self, model: WrappedModel, plans: LoadedPlans) -> None:
        self._model, self._plans = model, plans
        self.version = 0
        self._is_behind = False  # whether a peer has trained or uploaded newer weights
        self._peers: weakref.WeakSet[WeightSync] = weakref.WeakSet()
        self._is_replaced = False  # whether a layer, parameter or buffer was replaced since the latest call
        self._warned: set[str] = set()
        self.store_compiled_flags()

    def store_compiled_flags(self) -> None:
        """Store the model's layers, modes and `requires_grad`, for a later `warn_of_changes`."""
        self._layers, self._flags = (
            dict(self._model.traced.named_modules()),
            _training_flags_of(self._model.traced),
        )
        self.mode = self._model.user.training
        self._synced: dict[str, Tensor] = {}  # the host's weights when they were last equal to the devices'
        self._fingerprints: dict[str, Fingerprint] = {}  # of the weights in `_synced` at that time

    @contextlib.contextmanager
    def with_compiled_flags(self) -> Iterator[None]:
        """Set modes and `requires_grad` of the model to those of the first compilation, inside the `with`."""
        now = _training_flags_of(self._model.traced)
        _set_training_flags(self._model.traced, self._flags)
        try:
            yield
        finally:
            _set_training_flags(self._model.traced, now)

    def host_weights(self) -> dict[str, Tensor]:
        """Return the user's parameters and buffers by canonical name; they may be stale.

        Raises: Error, if a weight of the compiled model was removed, or has another shape or dtype
        """
        host, executable = weights_of(self._model.traced), self._plans.executable
        if executable is None:
            return host
        slots = executable.plan.partition.signature.parameters_and_buffers
        lost = [slot.key for slot in slots if slot.key not in host]
        if lost:
            raise Error(
                f"the model has lost {', '.join(lost)} since it was compiled\n"
                "  why: its parameters and buffers are those of the compilation; one of them was removed, or"
                " became the same object as another one\n"
                "  fix: put it back, or change the model before it is wrapped"
            )
        shapes = self._model.shapes(executable.settings.replica_groups)
        for slot in slots:
            with DisableTorchFunctionSubclass():
                shape, dtype = shapes[slot.key], host[slot.key].dtype
            if (shape, dtype) != (slot.shape, slot.dtype):
                is_cast = shape == slot.shape
                now, before = (dtype, slot.dtype) if is_cast else (list(shape), list(slot.shape))
                raise Error(
                    f"{slot.role} {slot.key} has the {'type' if is_cast else 'shape'} {now} now, and the model is"
                    f" compiled for {before}\n"
                    "  why: half(), to(), another layer in its place or an assignment to .data has changed it\n"
                    "  fix: change it back, or call destroy() and compile the model again"
                )
        return host

    # ---- to the host -------------------------------------------------------------------------------------

    @property
    def host_is_stale(self) -> bool:
        """Return whether the devices have newer weights than the host."""
        engine = self._plans.engine
        return engine is not None and engine.state.host_is_stale

    def copyWeightsToHost(self) -> None:
        """Copy the devices' weights and buffers into the user's model. Raises: Error, if not attached"""
        engine = self._plans.require_engine()
        with recording_event(self._plans.reporter, "weights to host"), engine.state.weights_lock:
            self.write_to_host(engine.state.read())
        # Last: after an interrupted copy the next read of a weight copies all of them again.
        engine.state.host_is_stale = False

    def write_to_host(self, values: Mapping[str, Tensor]) -> None:
        """Copy values, by canonical name, into the user's model; in training notify the peers."""
        host = self.host_weights()
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for name, value in values.items():
                if host[name].shape == value.shape:
                    host[name].copy_(value)
                else:  # a per-replica parameter: the host gets one row per group of replicas
                    host[name].data = value.clone()
        self.version += 1
        self._mark_synced(host)
        if self._model.training:
            self._mark_peers_behind()

    # ---- to the devices ----------------------------------------------------------------------------------

    def copyWeightsToDevice(self) -> None:
        """Upload the user's parameters and buffers. Updates since the last copy to the host are lost.

        Raises: Error, if the model is not compiled or not attached
        """
        self._upload_weights()
        self._mark_peers_behind()

    def _upload_weights(self, names: Sequence[str] | None = None) -> None:
        """Upload the user's weights of these canonical names (None: all). Peers are not notified."""
        engine, host = self._plans.require_engine(), self.host_weights()
        weights = host if names is None else {name: host[name] for name in names}
        event = recording_event(self._plans.reporter, "weights to devices")
        with event, DisableTorchFunctionSubclass():
            engine.write(weights)
        self._mark_synced(weights, is_behind=self._is_behind and names is not None)

    def copyNamedBuffersToDevice(self) -> None:
        """Upload only the buffers of `Options.updatableNamedBuffers`.

        Raises: Error, if the option names none, or the model is not compiled or not attached
        """
        names = self._model.updatable_buffers()
        if not names:
            raise Error(
                "No named buffers marked as updatable\n"
                "  fix: options.updatableNamedBuffers(['name']) before wrapping"
            )
        self._upload_weights(names)
        self._mark_peers_behind()

    # ---- what is changed on the host ---------------------------------------------------------------------

    def hostWeightsChanged(self) -> bool:
        """*Pando*: return whether weights were written on the host since the last upload or download. False
        while the devices have newer weights. Writes into `weight.data` are not detected."""
        return bool(self._synced and not self.host_is_stale and self._changed_names(self.host_weights()))

    def warn_of_changes(self) -> None:
        """Warn, once per kind, of changes to the model since its compilation: calls ignore such changes.

        Kinds are written or replaced weights, replaced layers and, in training, modes and `requires_grad`.

        Raises: Error, if a weight was removed, or its dtype or shape has changed
        """
        if self._model.training and self._model.user.training != self.mode:
            modes = ("eval", "train") if self.mode else ("train", "eval")
            self._warn_once(
                "the model is in {}() mode now, and was compiled in {}() mode".format(*modes),
                "trains it in that mode",
                "set the mode before the first call, or call destroy() on the executor; wrap the model with"
                " poptorch.inferenceModel to evaluate it",
            )
        if not self._is_replaced and _fingerprints_of(self._synced) == self._fingerprints:
            return
        host, layers = self.host_weights(), dict(self._model.traced.named_modules())
        replaced = [name for name, layer in self._layers.items() if layers.get(name, layer) is not layer]
        if replaced:
            self._warn_once(
                f"{listed(replaced)} has another layer in its place since the compilation",
                "computes what the layer before did",
            )
        elif written := self._changed_names(host):
            self._warn_once(
                f"{listed(written)} changed on the host",
                "uses the values that the devices have",
                "call copyWeightsToDevice() on the executor after weights were loaded or written",
            )
        self._warn_of_flags(host)
        self._is_replaced = False

    def _warn_of_flags(self, host: Mapping[str, Tensor]) -> None:
        """In training, warn, once each, of parameters frozen or made trainable since compilation."""
        if not self._model.training:
            return
        results = self._plans.require_executable().plan.partition.signature.results
        trained = [result.key for result in results if result.kind == "gradient"]
        with DisableTorchFunctionSubclass():
            frozen = [name for name in trained if not host[name].requires_grad]
            freed = [n for n, weight in host.items() if weight.requires_grad and self._flags.get(n) is False]
        if frozen:
            self._warn_once(f"{listed(frozen)} was frozen after the compilation", "trains it as before")
        if freed:
            self._warn_once(f"{listed(freed)} was made trainable after the compilation", "does not train it")

    def _warn_once(
        self,
        change: str,
        effect: str,
        fix: str = "call destroy() on the executor: its next call compiles the model as it is",
    ) -> None:
        """Log "`change`, and the compiled program `effect`" with a fix, unless `effect` was logged before."""
        if effect not in self._warned:
            self._warned.add(effect)
            logger.warning("%s, and the compiled program %s\n  fix: %s", change, effect, fix)

    def _changed_names(self, host: Mapping[str, Tensor]) -> list[str]:
        """Return the names of weights replaced or written on the host since the last upload or download."""
        now = _fingerprints_of(host)
        return [
            n
            for n, w in host.items()
            if self._synced.get(n) is not w or self._fingerprints[n][:2] != now[n][:2]
        ]

    def _mark_synced(self, weights: dict[str, Tensor], is_behind: bool = False) -> None:
        """Record that these host weights equal the devices' now; `is_behind`: others are older than a peer's."""
        self._synced |= weights
        self._fingerprints |= _fingerprints_of(weights)
        self._is_behind = is_behind

    # ---- other executors of the model ----------------------------------------------------------------------

    def newest_host_weights(self) -> dict[str, Tensor]:
        """Find the peers, copy trained weights of peers to the host, and return the host's weights."""
        _watch_registrations_in_all_modules()
        self._find_peers(self._model.user)
        self._copy_peers_weights_to_host()
        host = self.host_weights()
        self._warn_of_flags(host)
        self._mark_synced(host)
        return host

    def _find_peers(self, layer: nn.Module) -> None:
        """Make this executor and all others of a module, or of its submodules, peers of each other."""
        for module in layer.modules():
            users = _syncs_of_module.setdefault(module, weakref.WeakSet())
            for peer in set(users) - {self}:
                self._peers.add(peer)
                peer._peers.add(self)
            users.add(self)

    def upload_if_host_is_newer(self) -> None:
        """Upload the host's weights if a peer has trained or uploaded newer weights."""
        self._copy_peers_weights_to_host()
        if self._is_behind:
            self._upload_weights()

    def _copy_peers_weights_to_host(self) -> None:
        """Copy the newest weights of all peers that train to the host."""
        for peer in list(self._peers):
            executor = executor_of(peer._model.user) if peer._model.training else None
            if executor is not None:
                executor.copyWeightsToHostIfNeeded()

    def _mark_peers_behind(self) -> None:
        """Record in the peers that the host has new weights. Peers for inference upload these at their next
        run; peers that train keep their own weights, of which `mark_model` has warned."""
        for peer in self._peers:
            if peer._model.training:
                peer._fingerprints = _fingerprints_of(peer._synced)
            else:
                peer._is_behind = True


# For each module, the executors that have been attached to devices with it.
_syncs_of_module: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[WeightSync]] = (
    weakref.WeakKeyDictionary()
)


def _on_registration(module: nn.Module, name: str, value: Any) -> None:
    """Record a new layer, parameter or buffer in a module's executors. torch calls this before the change.

    The next call of these executors looks for changes. For an executor that trains, this also copies newer
    weights to the host, and marks the new parameters and buffers.
    """
    old = (module._modules, module._parameters, module._buffers)
    if any(names.get(name) is value for names in old):
        return
    for sync in list(_syncs_of_module.get(module, ())):
        sync._is_replaced = True
        executor = executor_of(sync._model.user) if sync._model.training else None
        if executor is not None and isinstance(value, Tensor | nn.Module):
            with contextlib.suppress(Error):  # the copy fails while a removed weight is missing
                executor.copyWeightsToHostIfNeeded()
            mark_tensors(value, weakref.ref(executor))
        if isinstance(value, nn.Module):
            sync._find_peers(value)


@functools.cache
def _watch_registrations_in_all_modules() -> None:
    """Let torch call `_on_registration` before a layer, parameter or buffer of any module is set."""
    nn.modules.module.register_module_module_registration_hook(_on_registration)
    nn.modules.module.register_module_parameter_registration_hook(_on_registration)
    nn.modules.module.register_module_buffer_registration_hook(_on_registration)


def _fingerprints_of(weights: Mapping[str, Tensor]) -> dict[str, Fingerprint]:
    """Return the fingerprint of each weight by name. Tensors made in inference mode have version 0."""
    with DisableTorchFunctionSubclass():
        return {
            name: (0 if weight.is_inference() else weight._version, weight.data_ptr(), weight.requires_grad)
            for name, weight in weights.items()
        }


def _training_flags_of(model: nn.Module) -> dict[str, bool]:
    """Return the flags `training` of layers and `requires_grad` of parameters, by name."""
    with DisableTorchFunctionSubclass():
        modes = {name: layer.training for name, layer in model.named_modules()}
        return modes | {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def _set_training_flags(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Set the flags of layers and parameters to `flags`, as returned by `_training_flags_of`. Other names stay."""
    with DisableTorchFunctionSubclass():
        for name, layer in model.named_modules():
            vars(layer)["training"] = flags.get(name, layer.training)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad != flags.get(name, parameter.requires_grad):
                parameter.requires_grad = flags[name]
