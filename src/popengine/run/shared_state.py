"""Reading optimizer state that is shared out over instances: their parts travel as bytes, and are joined."""

from __future__ import annotations

import io
import weakref
from typing import Any

import torch
from torch import Tensor

from .instances.process_group import ProcessGroup
from .state import State

States = dict[str, dict[str, Tensor]]


class SharedState:
    """What this instance has of an engine's optimizer state, and the way to the rest; it keeps no engine alive."""

    def __init__(self, tensors: State, group: ProcessGroup) -> None:
        self._tensors, self._group = weakref.ref(tensors), group
        self._name = group.publish("the optimizer's state", self)
        self._last: States | None = None  # of an engine that is gone

    def part(self) -> Tensor:
        """This instance's part, as bytes."""
        tensors, file = self._tensors(), io.BytesIO()
        last = self._last
        if last is None:
            assert tensors is not None
            last = tensors.read_optimizer()
        torch.save(last, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def keep(self) -> None:
        """The engine goes; another instance may not have read its last state yet."""
        if (tensors := self._tensors()) is not None:
            self._last = tensors.read_optimizer()
            self._group.keep_until_barrier(self)

    def read(self) -> States:
        """The parts of all instances, in the order of the parameters."""
        parts: list[Any] = [
            torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=True)
            for part in self._group.read_parts(self._name)
        ]
        tensors = self._tensors()
        assert tensors is not None
        whole: States = {key: state for part in parts for key, state in part.items()}
        whole.update(parts[self._group.rank])  # of groups of replicas each instance has its own
        return {key: whole[key] for key in dict.fromkeys(tensors.trained) if key in whole}
