"""The two copies of the weights: the user's on the host, and the executor's on its devices.

Training makes the host's copy stale. Whoever looks at it there first causes one copy; what the user changes
there reaches the devices only when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error

from ..reporting.reporter import noting
from . import marked_model
from .state import ExecutorState


class HostWeights(ExecutorState):
    """The part of an executor that moves weights."""

    def _host_weights(self) -> dict[str, Tensor]:
        """The user's parameters and buffers, by canonical name, without asking for newer values."""
        found = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        if self._executable is not None:
            slots = self._executable.plan.partition.signature.slots
            lost = [s.key for s in slots if s.role in ("parameter", "buffer") and s.key not in found]
            if lost:
                raise Error(
                    f"the model has lost {', '.join(lost)} since it was compiled\n"
                    "  why: its parameters and buffers are those of the compilation; one of them was removed, or"
                    " became the same object as another one\n"
                    "  fix: put it back, or change the model before it is wrapped"
                )
        return found

    def copyWeightsToHost(self) -> None:
        """Copy the devices' weights and buffers into the user's model."""
        engine = self._need_engine()
        with noting(self._reporter, "weights to host"):
            self._put_on_host(engine.read())
        # Last: while the host has got but some of them, the next look at its weights copies all again.
        engine.host_has_read()

    def _put_on_host(self, values: Mapping[str, Tensor]) -> None:
        """Copy these into the user's model."""
        host = self._host_weights()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for name, value in values.items():
                if host[name].shape == value.shape:
                    host[name].copy_(value)
                else:  # a per-replica parameter of which the host receives every replica's value
                    host[name].data = value.clone()
        self._host_weights_version += 1
        self._host_writes = self._count_writes()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if the devices have newer ones; whether they had."""
        if not self._stale:
            return False
        self.copyWeightsToHost()
        return True

    def _count_writes(self) -> list[int]:
        """How often each of the host's weights was written to in place."""
        with torch._C.DisableTorchFunctionSubclass():
            return [weight._version for weight in self._host_weights().values()]

    def hostWeightsChanged(self) -> bool:
        """Were weights written to since they were last copied here? (Writes through `.data` are not seen. Ours.)"""
        return not self._stale and bool(self._host_writes) and self._host_writes != self._count_writes()

    def copyWeightsToDevice(self) -> None:
        """Upload the user's weights; training done since they were last copied to the host is discarded."""
        engine = self._need_engine()
        with noting(self._reporter, "weights to devices"), torch._C.DisableTorchFunctionSubclass():
            weights = self._host_weights()
            self._check_shapes(weights)
            engine.write(weights)
        self._host_writes = self._count_writes()

    def _check_shapes(self, weights: dict[str, Tensor]) -> None:
        """Raises Error, where the user has given a weight another shape since the compilation."""
        executable = self._need_executable()
        for slot in executable.plan.partition.signature.slots:
            weight = weights.get(slot.key) if slot.role in ("parameter", "buffer") else None
            if weight is None:
                continue
            shape = weight.shape[1:] if slot.key in executable.settings.replica_groups else weight.shape
            if tuple(shape) != slot.shape:
                raise Error(
                    f"{slot.role} {slot.key} has the shape {list(weight.shape)} now, and the model is compiled for"
                    f" {list(slot.shape)}\n"
                    "  fix: give it values of its shape, or call destroy() and compile the model again"
                )

    def copyNamedBuffersToDevice(self) -> None:
        """Upload the buffers named in `Options.updatableNamedBuffers`, and nothing else."""
        names = self._updatable_buffers()
        if not names:
            raise Error(
                "No named buffers marked as updatable\n"
                "  fix: options.updatableNamedBuffers(['name']) before wrapping"
            )
        buffers = dict(self._model.named_buffers())
        with torch._C.DisableTorchFunctionSubclass():
            self._need_engine().write({name: buffers[name] for name in names})

    def _updatable_buffers(self) -> list[str]:
        """Raises Error, where the options name a buffer that the model has not got."""
        names = self._options._Popart.options.get("updatableNamedBuffers", [])
        known = dict(self._model.named_buffers())
        unknown = [name for name in names if name not in known]
        if unknown:
            raise Error(
                f"updatableNamedBuffers names {', '.join(unknown)}; the model's buffers are"
                f" {', '.join(known) or 'none'}"
            )
        return names

    def _refresh_from_trainer(self) -> None:
        """On a model that is also wrapped for training, validate with the newest weights."""
        trainer = marked_model.owner_of(self._user_model)
        if trainer is None:
            return
        self._user_model.copyWeightsToHostIfNeeded()  # type: ignore[operator]
        version = trainer._host_weights_version
        if version != self._seen_version:
            self.copyWeightsToDevice()
            self._seen_version = version

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user model's, with the newest weights."""
        return self._user_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load into the user's model, and upload if attached; returns missing and unexpected keys."""
        self.copyWeightsToHostIfNeeded()  # what the dictionary lacks keeps its newest value
        keys = self._user_model.load_state_dict(state_dict, strict)
        if self._engine is not None:
            self.copyWeightsToDevice()
        return keys
