"""Updates by the `step()` of the user's optimizer, for optimizers that have no rule in `optimizer_rules.py`."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from .group_update import Chunk, ParameterUpdate

# Steps on gradients, by canonical name of the parameter, and writes weights and optimizer state.
StepFunction = Callable[[Mapping[str, Tensor]], None]


class OwnStep:
    """One update of all parameters at once. Has the methods of `UpdateStep` that run an update."""

    trust_ratios = None

    def __init__(self, step: StepFunction, keys: Sequence[str], updates: Sequence[ParameterUpdate]) -> None:
        self._step, self._keys, self._updates = step, keys, updates

    def increment_counts(self) -> None:
        """Do nothing: the optimizer counts its steps itself."""

    def views(self, chunk: Chunk) -> list[ParameterUpdate]:
        """Return the updates of all parameters: there is one chunk."""
        return list(self._updates)

    def apply(self, views: Sequence[ParameterUpdate]) -> None:
        """Step on the gradients, in the parameters' dtypes."""
        pairs = zip(self._keys, views, strict=True)
        self._step({key: view.gradient.to(view.parameter.dtype) for key, view in pairs})
