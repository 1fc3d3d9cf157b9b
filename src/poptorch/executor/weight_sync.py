"""The two copies of the weights: the user's on the host, and the executor's on its devices.

Training makes the host's copy stale. Whoever looks at it there first causes one copy; what the user changes
there reaches the devices only when asked for.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from popengine.errors import Error

from ..reporting.reporter import Reporter, noting
from . import marked_model
from .device_lease import DeviceLease
from .wrapped_model import WrappedModel


class WeightSync:
    """Moves weights between a model and the devices of its executor.

    `version` counts the copies to the host.
    """

    def __init__(self, model: WrappedModel, lease: DeviceLease, reporter: Reporter | None) -> None:
        self._model, self._lease, self._reporter = model, lease, reporter
        self.version = 0
        self._writes: list[int] = []  # to the host's weights, when they were last equal to the devices'
        self._seen_version: int | None = None  # the trainer's, when an inference executor uploaded last

    def on_host(self) -> dict[str, Tensor]:
        """The user's parameters and buffers. Raises Error, if one has gone since compilation."""
        found = self._model.weights()
        if self._lease.executable is not None:
            slots = self._lease.executable.plan.partition.signature.slots
            lost = [s.key for s in slots if s.role in ("parameter", "buffer") and s.key not in found]
            if lost:
                raise Error(
                    f"the model has lost {', '.join(lost)} since it was compiled\n"
                    "  why: its parameters and buffers are those of the compilation; one of them was removed, or"
                    " became the same object as another one\n"
                    "  fix: put it back, or change the model before it is wrapped"
                )
        return found

    # ---- to the host -------------------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether the devices have newer weights than the host."""
        engine = self._lease.engine
        return engine is not None and engine.snapshot.host_is_stale

    def copyWeightsToHost(self) -> None:
        """Copy the devices' weights and buffers into the user's model."""
        engine = self._lease.need_engine()
        with noting(self._reporter, "weights to host"), engine.still:
            self.put_on_host(engine.read())
        # Last: while the host has got but some of them, the next look at its weights copies all again.
        engine.host_has_read()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if the devices have newer ones; whether they had."""
        if not self.stale:
            return False
        self.copyWeightsToHost()
        return True

    def put_on_host(self, values: Mapping[str, Tensor]) -> None:
        """Copy these into the user's model."""
        host = self.on_host()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for name, value in values.items():
                if host[name].shape == value.shape:
                    host[name].copy_(value)
                else:  # a per-replica parameter of which the host receives every replica's value
                    host[name].data = value.clone()
        self.version += 1
        self._writes = self._count_writes()

    def hostWeightsChanged(self) -> bool:
        """*Ours*: were weights written to since they were last copied here? Writes through `.data` are not seen."""
        return not self.stale and bool(self._writes) and self._writes != self._count_writes()

    def _count_writes(self) -> list[int]:
        """How often each of the host's weights was written to in place."""
        with torch._C.DisableTorchFunctionSubclass():
            return [weight._version for weight in self.on_host().values()]

    # ---- to the devices ----------------------------------------------------------------------------------

    def copyWeightsToDevice(self) -> None:
        """Upload the user's weights; training done since they were last copied to the host is discarded."""
        engine = self._lease.need_engine()
        with noting(self._reporter, "weights to devices"), torch._C.DisableTorchFunctionSubclass():
            weights = self.on_host()
            self._check_shapes()
            engine.write(weights)
        self._writes = self._count_writes()

    def averageRunningStatistics(self) -> None:
        """*Ours*: give all replicas the mean of their running statistics, over the replicas of all instances.

        Each replica sees other rows, and the host gets those of replica 0 of its instance: call it before a validation
        or a checkpoint. All floating point buffers that forward changes are averaged. In several instances all call it.

        Raises: Error, if the model is not attached to its devices
        """
        self._lease.need_engine().average_buffers()

    def _check_shapes(self) -> None:
        """Raises Error, where the user has given a weight another shape since the compilation."""
        executable = self._lease.need_executable()
        shapes = self._model.shapes(executable.settings.replica_groups)
        for slot in executable.plan.partition.signature.slots:
            shape = shapes.get(slot.key) if slot.role in ("parameter", "buffer") else None
            if shape is not None and shape != slot.shape:
                raise Error(
                    f"{slot.role} {slot.key} has the shape {list(shape)} now, and the model is compiled for"
                    f" {list(slot.shape)}\n"
                    "  fix: give it values of its shape, or call destroy() and compile the model again"
                )

    def copyNamedBuffersToDevice(self) -> None:
        """Upload the buffers named in `Options.updatableNamedBuffers`, and nothing else."""
        names = self._model.updatable_buffers()
        if not names:
            raise Error(
                "No named buffers marked as updatable\n"
                "  fix: options.updatableNamedBuffers(['name']) before wrapping"
            )
        buffers = self._model.weights()
        with torch._C.DisableTorchFunctionSubclass():
            self._lease.need_engine().write({name: buffers[name] for name in names})

    # ---- of a model that is wrapped for training, too --------------------------------------------------------

    def refresh_from_trainer(self) -> None:
        """Validate with the newest weights."""
        trainer = marked_model.owner_of(self._model.user)
        if trainer is None:
            return
        trainer.copyWeightsToHostIfNeeded()
        version = trainer._host_weights_version
        if version != self._seen_version:
            self.copyWeightsToDevice()
            self._seen_version = version

    def see_trainer(self) -> None:
        """Devices that are taken now begin with the weights that the host has."""
        trainer = marked_model.owner_of(self._model.user)
        self._seen_version = trainer._host_weights_version if trainer is not None else None
