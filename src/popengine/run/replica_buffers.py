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
        """Let each replica have a value of these buffers of the model. A buffer that has none, or that the user has
        written, gets the model's value in all replicas."""
        self.values.extend({} for _ in range(self.replicas - len(self.values)))
        for key, value in model.items():
            value = value.detach()
            for replica, own in enumerate(self.values):
                has_kept = key in own and own[key].shape == value.shape
                is_here = replica and has_kept and devices.has_queue(own[key].device)
                like = value.dtype if is_here else value
                own[key] = own[key].to(like) if has_kept else value.clone()
            is_same = (bits_of(self.values[0][key]) == bits_of(value)).all()
            # Without a wait of the host for an accelerator.
            for own in self.values if devices.has_queue(value.device) or not is_same else ():
                to = own[key].device
                own[key].copy_(torch.where(is_same.to(to), own[key], value.to(to)))

    def read(self, replica: int, key: str, device: torch.device) -> Tensor:
        """Return a buffer of a replica, which moves to this device and which steps change in place."""
        own = self.values[replica]
        own[key] = own[key].to(device)
        return own[key]

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
        doubles = ([own[key].to(devices.CPU, torch.float64).reshape(-1) for key in keys] for own in replicas)
        return [torch.cat(each) if each else torch.empty(0) for each in doubles]

    def set_all(self, values: Mapping[str, Tensor]) -> None:
        """Set these buffers of all replicas to one value."""
        for own in self.values:
            own.update((key, value.detach().clone()) for key, value in values.items())

    def export(self, model: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the buffers of each replica, with those of the model that forward does not change."""
        if self.values:
            self.follow({key: model[key] for key in self.values[0].keys() & model.keys()})
        return [{key: own.get(key, value) for key, value in model.items()} for own in self.values or [{}]]

    def load(self, replicas: Iterable[Mapping[str, Tensor]]) -> None:
        """Replace all buffers by copies of an export's."""
        self.values = [{key: value.clone() for key, value in own.items()} for own in replicas]
