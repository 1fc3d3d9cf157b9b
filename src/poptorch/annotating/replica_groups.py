"""Per-replica parameters: in the model one row per group of replicas; in each replica the row of its group.

executor.weight.replicaGrouping(poptorch.CommGroupType.Consecutive, 2,
                                poptorch.VariableRetrievalMode.OnePerGroup)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from popengine.errors import Error
from popengine.settings import ReplicaGroups

from ..checks import checked
from ..enums import CommGroupType, VariableRetrievalMode

Grouping = tuple[CommGroupType, int, VariableRetrievalMode]  # the arguments of `replicaGrouping`


def _checked_grouping(name: str, given: Any) -> Grouping:
    match given:
        case (CommGroupType() as kind, int() as size, VariableRetrievalMode() as retrieval):
            return kind, size, retrieval
    raise Error(
        f"replicaGrouping of {name!r} takes a poptorch.CommGroupType, a number of replicas and a"
        f" poptorch.VariableRetrievalMode; found {given!r}\n"
        "  fix: (poptorch.CommGroupType.Consecutive, 2, poptorch.VariableRetrievalMode.OnePerGroup), for example"
    )


class GroupableParameter(nn.Parameter):
    """A view of a parameter, as executors return it, with the method `replicaGrouping`."""

    _grouping_target: Any

    @staticmethod
    def wrap(parameter: nn.Parameter, name: str, groupings: dict[str, Grouping] | None) -> GroupableParameter:
        """Return a view of a parameter, whose `replicaGrouping` adds to `groupings` (None: it is compiled)."""
        view = parameter.detach().as_subclass(GroupableParameter)
        view.requires_grad_(parameter.requires_grad)
        vars(view).update(vars(parameter))
        view.grad = parameter.grad
        view._grouping_target = (name, groupings)
        return view  # type: ignore[return-value]

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Give each group of replicas its own value, a row of the parameter's first dimension.

        Args:
            shards: replicas per group; ignored for All and NoGrouping
            variable_retrieval_mode: whether the host gets one value per group or per replica
        Raises: Error, if the model is compiled already, or an argument has a wrong type
        """
        name, groupings = self._grouping_target
        if groupings is None:
            raise Error(
                f"replicaGrouping of {name!r} comes after compilation, which has fixed the groups\n"
                "  fix: call it before the first call of the model, or call destroy() first"
            )
        groupings[name] = _checked_grouping(name, (comm_group_type, shards, variable_retrieval_mode))


def make_replica_groups(
    model: nn.Module, groupings: dict[str, Grouping], replicas: int
) -> dict[str, ReplicaGroups]:
    """Return the groups of replicas by parameter name. Raises Error if they do not fit the parameters."""
    groups_by_name = {}
    for name, given in groupings.items():
        # Checked again: programs may also write into `per_replica_params` themselves.
        kind, size, retrieval = _checked_grouping(name, given)
        size = {CommGroupType.All: replicas, CommGroupType.NoGrouping: 1}.get(kind, size)
        if size < 1 or replicas % size:
            raise Error(
                f"replicaGrouping: groups of {size} replicas do not divide the replication factor {replicas}"
            )
        count = replicas // size
        of = [r % count if kind is CommGroupType.Orthogonal else r // size for r in range(replicas)]
        groups = ReplicaGroups(tuple(of), retrieval is VariableRetrievalMode.AllReplicas)
        named = {name: value for name, value in model._parameters.items() if value is not None}
        parameter = named[checked("per_replica_params of the model's top level", name, tuple(named), Error)]
        if parameter.dim() == 0:
            raise Error(
                f"Scalars cannot be passed as per-replica weight tensor values: {name} has no dimensions\n"
                "  fix: give it a first dimension with one row a group"
            )
        if len(parameter) not in (count, len(groups.rows)):
            raise Error(
                f"parameter {name} has {len(parameter)} rows, but its replicaGrouping makes"
                f" {count} groups of {replicas} replicas\n"
                "  fix: its first dimension has one row a group"
            )
        groups_by_name[name] = groups
    return groups_by_name


@contextlib.contextmanager
def first_rows_only(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Replace the named parameters by their first rows, inside the `with`: a replica sees one row."""
    before = model._parameters
    rows = {
        name: nn.Parameter(parameter.detach()[0], parameter.requires_grad)
        for name in names
        if (parameter := before[name]) is not None
    }
    model.__dict__["_parameters"] = {**before, **rows}
    try:
        yield
    finally:
        model.__dict__["_parameters"] = before
