"""What was wrapped: the user's model, how its forward is called, its options, and whether it trains."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from popengine.errors import Error

from ..annotating.replica_groups import Grouping
from ..compiling.arguments import weights_of
from ..options import Options
from . import marked_model


@dataclass(frozen=True)
class WrappedModel:
    """A model as an executor has it.

    Args:
        user:        the user's model
        traced:      a copy of its top level, with the flags and attributes that it had at wrapping; parts are shared
        per_replica: groups of replicas, by the names of the parameters that have one value for each
    """

    user: nn.Module
    traced: nn.Module
    options: Options
    training: bool
    per_replica: dict[str, Grouping] = field(default_factory=dict)

    def weights(self) -> dict[str, Tensor]:
        """The user's parameters and buffers, by canonical name, without asking for newer values."""
        return weights_of(self.traced)

    def shapes(self, groups: Container[str]) -> dict[str, tuple[int, ...]]:
        """Of the weights, as a replica has them; `groups`: the names of those with a row for each group of replicas."""
        with torch._C.DisableTorchFunctionSubclass():
            return {n: tuple(w.shape[1:] if n in groups else w.shape) for n, w in self.weights().items()}

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        # The class's own names: a wrapper may leave out its prefix. And those of a marked model would copy weights.
        return marked_model.plain_class(self.user).named_parameters(self.user)

    def parameter_names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.parameters()}

    def updatable_buffers(self) -> list[str]:
        """Raises Error, where the options name a buffer that the model has not got."""
        names = self.options._Popart.options.get("updatableNamedBuffers", [])
        known = dict(self.traced.named_buffers())
        unknown = [name for name in names if name not in known]
        if unknown:
            raise Error(
                f"updatableNamedBuffers names {', '.join(unknown)}; the model's buffers are"
                f" {', '.join(known) or 'none'}"
            )
        return names
