"""Repeats a step's actions on the host (logging, metrics, attributes) after each call, with its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from poptorch.nested_values import tensors_of, with_tensors


def replay(
    module: Any, notes: Sequence[tuple[Any, Any]], reduce_over_instances: Callable[..., Tensor]
) -> None:
    """Repeat the actions that a recorded step noted, in their order; lists are extended last.

    Args:
        notes: pairs of an action (kind, *details) and its value, with tensors [n, ...], n micro-batches
        reduce_over_instances: the strategy's `reduce`, for `sync_dist=True`
    """
    appended: dict[str, list[Any]] = {}
    metric_values: dict[int, Any] = {}  # values of metrics, by the number of the call that made them

    def metric_or_value(metric: str | int) -> Any:
        """Return a metric by its path, or a metric's value by the number of the call that made it."""
        return metric_values[metric] if isinstance(metric, int) else module.get_submodule(metric)

    for action, value in notes:
        match action:
            case "log", name, options:
                reduced = _reduce_value(value, options, reduce_over_instances)
                module.log(name, reduced, **{**options, "sync_dist": False})
            case "log_metric", name, metric, options:
                module.log(name, metric_or_value(metric), **options)
            case "log_metrics", metric, args, kwargs:
                module.log_dict(metric_or_value(metric), *args, **kwargs)
            case "metric", path, method, call:
                rows = (t.flatten(0, 1) if t.dim() > 1 else t for t in tensors_of(value))
                args, kwargs = with_tensors(value, rows)
                metric_values[call] = getattr(module.get_submodule(path), method)(*args, **kwargs)
            case "append", name:
                appended.setdefault(name, []).append(value)
            case "key", name, key:
                getattr(module, name)[key] = _of_micro_batch(value, -1)
            case "set", name:
                setattr(module, name, _of_micro_batch(value, -1))
            case ("optimizer_step",):
                (optimizer,) = module.trainer.strategy._lightning_optimizers
                optimizer._on_before_step()
                optimizer._on_after_step()
    for name, values in appended.items():  # in the order of micro-batches
        n = len(tensors_of(values[0])[0])
        getattr(module, name).extend(_of_micro_batch(v, i) for i in range(n) for v in values)


def _reduce_value(value: Any, options: dict[str, Any], reduce_over_instances: Callable[..., Tensor]) -> Any:
    """Return a logged tensor, reduced over micro-batches by the option `reduce_fx`, and over instances with
    `sync_dist`; other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    reduce: Any = options.get("reduce_fx", "mean")
    if isinstance(reduce, str):
        reduce = getattr(torch, "mean" if reduce == "avg" else reduce)
    value = reduce(value.float())
    return reduce_over_instances(value, reduce_op=reduce.__name__) if options.get("sync_dist") else value


def _of_micro_batch(value: Any, index: int) -> Any:
    return with_tensors(value, iter([tensor[index].clone() for tensor in tensors_of(value)]))
