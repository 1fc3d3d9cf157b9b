"""The buffers that forward changes, of each replica of a run in this process.

Replica 0's are the user's own tensors. Those of the other replicas are here, each on the device of its replica, and
copies of replica 0's after the latest step: the model's differ from these if the user has written them.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..torch_private import bits_of
from . import devices


class ReplicaBuffers:
    """The buffers of all replicas, by replica and canonical name."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas  # of this process; a plan for an incomplete batch may have fewer
        self.values: list[dict[str, Tensor]] = []

    def follow(self, model: Mapping[str, Tensor]) -> None:
        """Give each replica a value of these buffers of the model. A buffer without a value, or one that the user has
        written, gets the model's value in all replicas."""
        self.values.extend({} for _ in range(self.replicas - len(self.values)))
        for key, value in model.items():
            value = value.detach()
            for replica, buffers in enumerate(self.values):
                has_kept = key in buffers and buffers[key].shape == value.shape
                is_here = replica and has_kept and devices.has_queue(buffers[key].device)
                like = value.dtype if is_here else value
                buffers[key] = buffers[key].to(like) if has_kept else value.clone()
            is_same = (bits_of(self.values[0][key]) == bits_of(value)).all()
            # Without a wait of the host for an accelerator.
            for buffers in self.values if devices.has_queue(value.device) or not is_same else ():
                to = buffers[key].device
                buffers[key].copy_(torch.where(is_same.to(to), buffers[key], value.to(to)))

    def read(self, replica: int, key: str, device: torch.device) -> Tensor:
        """Return a buffer of a replica, which moves to this device and which steps change in place."""
        buffers = self.values[replica]
        buffers[key] = buffers[key].to(device)
        return buffers[key]

    def write(self, replica: int, values: Mapping[str, Tensor]) -> None:
        """Store the values of a replica's buffers after a step."""
        for key, value in values.items():
            if (target := self.values[replica][key]) is not value:
                target.copy_(value)

    def flat_doubles(self, model: Mapping[str, Tensor], keys: Sequence[str]) -> list[Tensor]:
        """Return for each replica one tensor of float64 on the CPU, [elements of all these buffers]."""
        replicas: list[Mapping[str, Tensor]] = [model]
        if self.replicas > 1:
            self.follow({key: model[key] for key in keys})
            replicas += self.values[1 : self.replicas]
        doubles = ([held[key].to(devices.CPU, torch.float64).flatten() for key in keys] for held in replicas)
        return [torch.cat(values) if values else torch.empty(0) for values in doubles]

    def set_all(self, values: Mapping[str, Tensor]) -> None:
        """Set these buffers of all replicas to one value."""
        for buffers in self.values:
            buffers.update((key, value.detach().clone()) for key, value in values.items())

    def export(self, model: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the buffers of each replica, with those of the model that forward does not change."""
        if self.values:
            self.follow({key: model[key] for key in self.values[0].keys() & model.keys()})
        return [{key: held.get(key, value) for key, value in model.items()} for held in self.values or [{}]]

    def load(self, replicas: Iterable[Mapping[str, Tensor]]) -> None:
        """Replace all buffers by copies of an export's."""
        self.values = [{key: value.clone() for key, value in buffers.items()} for buffers in replicas]
