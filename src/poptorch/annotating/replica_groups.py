"""Per-replica parameters: the host's value has one row per group of replicas; a replica has its group's row.

executor.weight.replicaGrouping(poptorch.CommGroupType.Consecutive, 2,
                                poptorch.VariableRetrievalMode.OnePerGroup)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from popengine.errors import Error
from popengine.settings import ReplicaGroups

from ..enums import CommGroupType, VariableRetrievalMode

Grouping = tuple[CommGroupType, int, VariableRetrievalMode]  # the arguments of `replicaGrouping`


def _checked_grouping(name: str, given: Any) -> Grouping:
    """Return `given` if it has the types of a `Grouping`. Raises Error otherwise, with the parameter's `name`."""
    match given:
        case (CommGroupType() as kind, int() as size, VariableRetrievalMode() as retrieval):
            return kind, size, retrieval
    raise Error(
        f"replicaGrouping of {name!r} takes a poptorch.CommGroupType, a number of replicas and a"
        f" poptorch.VariableRetrievalMode; found {given!r}\n"
        "  fix: (poptorch.CommGroupType.Consecutive, 2, poptorch.VariableRetrievalMode.OnePerGroup), for example"
    )


def _replica_groups(grouping: Grouping, replicas: int) -> ReplicaGroups:
    """Return a grouping as the engine's value. Raises Error if the groups' size does not divide `replicas`."""
    kind, size, retrieval = grouping
    size = {CommGroupType.All: replicas, CommGroupType.NoGrouping: 1}.get(kind, size)
    if size < 1 or replicas % size:
        raise Error(
            f"replicaGrouping: groups of {size} replicas do not divide the replication factor {replicas}"
        )
    neighbours = [replica // size for replica in range(replicas)]
    every_nth = [replica % (replicas // size) for replica in range(replicas)]
    of = every_nth if kind is CommGroupType.Orthogonal else neighbours
    return ReplicaGroups(tuple(of), retrieval is VariableRetrievalMode.AllReplicas)


class GroupableParameter(nn.Parameter):
    """A view of a parameter, as executors return it, with the method `replicaGrouping`."""

    _grouping_target: Any

    @staticmethod
    def of(parameter: nn.Parameter, name: str, groupings: dict[str, Grouping] | None) -> GroupableParameter:
        """Return a view of a parameter, with the same memory, attributes and `.grad`.

        Args: groupings: the executor's groupings by name, which `replicaGrouping` writes; None after compilation
        """
        with torch._C.DisableTorchFunctionSubclass():
            view = torch.Tensor._make_subclass(
                GroupableParameter, parameter.detach(), parameter.requires_grad
            )
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
        Raises:
            Error: the model is compiled already, or an argument has a wrong type
        """
        name, groupings = self._grouping_target
        if groupings is None:
            raise Error(
                f"replicaGrouping of {name!r} comes after compilation, which has fixed the groups\n"
                "  fix: call it before the first call of the model, or call destroy() first"
            )
        groupings[name] = _checked_grouping(name, (comm_group_type, shards, variable_retrieval_mode))


def groups_of(model: nn.Module, groupings: dict[str, Grouping], replicas: int) -> dict[str, ReplicaGroups]:
    """Return the engine's groups of replicas by parameter name, checked against the parameters.

    Raises:
        Error: a name that is no parameter of the model itself (submodules' are refused), a bad grouping, a 0-d
            parameter, or a first dimension that is neither the number of groups nor, with AllReplicas, of replicas
    """
    # Programs may also write into `per_replica_params` themselves, so the groupings are checked here.
    groups_by_name = {
        name: _replica_groups(_checked_grouping(name, given), replicas) for name, given in groupings.items()
    }
    for name, groups in groups_by_name.items():
        parameter = model._parameters.get(name)
        if parameter is None:
            raise Error(
                f"per_replica_params has {name!r}, and the model's top level has no parameter of this name\n"
                f"  fix: use one of {', '.join(model._parameters) or 'its parameters: it has none'}"
            )
        if parameter.dim() == 0:
            raise Error(
                f"Scalars cannot be passed as per-replica weight tensor values: {name} has no dimensions\n"
                "  fix: give it a first dimension with one row a group"
            )
        rows = {max(groups.of) + 1, len(groups.rows)}
        if len(parameter) not in rows:
            raise Error(
                f"parameter {name} has {len(parameter)} rows, but its replicaGrouping makes"
                f" {max(groups.of) + 1} groups of {replicas} replicas\n"
                "  fix: its first dimension has one row a group"
            )
    return groups_by_name


@contextlib.contextmanager
def first_rows_only(model: nn.Module, names: dict[str, Any]) -> Iterator[None]:
    """Replace the named parameters by their first rows inside the `with`, since a replica has one row."""
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
