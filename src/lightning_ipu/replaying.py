"""Repeats a step's actions on the host (logging, metrics, attributes) after each call, with the call's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from poptorch.nested_values import tensors_of, with_tensors


class Replay:
    """A replay of the notes of a recorded step, in their order.

    Args:
        over_instances: the strategy's `reduce`, for `sync_dist=True`
    """

    def __init__(self, module: Any, over_instances: Callable[..., Tensor]) -> None:
        self._module, self._over_instances = module, over_instances
        self._values: dict[int, Any] = {}  # values of metrics, by the number of the call that made them

    def run(self, notes: Sequence[tuple[Any, Any]]) -> None:
        """Repeat the notes of one call.

        Args: notes: pairs of (kind, *details) and a value with tensors [n, ...], n micro-batches
        """
        appended: dict[str, list[Any]] = {}
        for (kind, *details), value in notes:
            if kind == "append":
                appended.setdefault(details[0], []).append(value)
            else:
                getattr(self, f"_{kind}")(value, *details)
        for name, values in appended.items():  # in the order of micro-batches
            n = len(tensors_of(values[0])[0])
            getattr(self._module, name).extend(_of_micro_batch(v, i) for i in range(n) for v in values)

    def _log(self, value: Any, name: str, options: dict[str, Any]) -> None:
        if isinstance(value, Tensor):
            reduce: Any = options.get("reduce_fx", "mean")
            if isinstance(reduce, str):
                reduce = getattr(torch, "mean" if reduce == "avg" else reduce)
            value = reduce(value.float())
            if options.get("sync_dist"):
                value = self._over_instances(value, reduce_op=reduce.__name__)
        self._module.log(name, value, **{**options, "sync_dist": False})

    def _log_metric(self, _: Any, name: str, metric: str | int, options: dict[str, Any]) -> None:
        self._module.log(name, self._metric_or_value(metric), **options)

    def _log_metrics(self, _: Any, metric: str | int, args: Any, kwargs: Any) -> None:
        self._module.log_dict(self._metric_or_value(metric), *args, **kwargs)

    def _metric_or_value(self, metric: str | int) -> Any:
        """Return a metric by its path, or a metric's value by the number of the call that made it."""
        return self._values[metric] if isinstance(metric, int) else self._module.get_submodule(metric)

    def _metric(self, arguments: Any, path: str, method: str, call: int) -> None:
        rows = (t.flatten(0, 1) if t.dim() > 1 else t for t in tensors_of(arguments))
        args, kwargs = with_tensors(arguments, rows)
        self._values[call] = getattr(self._module.get_submodule(path), method)(*args, **kwargs)

    def _key(self, value: Any, name: str, key: Any) -> None:
        getattr(self._module, name)[key] = _of_micro_batch(value, -1)

    def _set(self, value: Any, name: str) -> None:
        setattr(self._module, name, _of_micro_batch(value, -1))

    def _optimizer_step(self, _: Any) -> None:
        (optimizer,) = self._module.trainer.strategy._lightning_optimizers
        optimizer._on_before_step()
        optimizer._on_after_step()


def _of_micro_batch(value: Any, place: int) -> Any:
    return with_tensors(value, iter([tensor[place].clone() for tensor in tensors_of(value)]))
