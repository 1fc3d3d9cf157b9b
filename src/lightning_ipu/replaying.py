"""Repeats the recorded actions of a step on the host (logging, metrics, attributes) with a call's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from poptorch.nested_values import tensors_of, with_tensors


def replay(
    module: Any, notes: Sequence[tuple[Any, Any]], reduce_over_instances: Callable[..., Tensor]
) -> None:
    """Repeat the actions of a recorded step on its LightningModule, in their order, but extend lists last.

    Args:
        notes: pairs of an action (kind, *details) and its value, whose tensors are [micro-batches, ...]
        reduce_over_instances: the strategy's `reduce`, for `sync_dist=True`
    """
    appended: dict[str, list[Any]] = {}
    metric_values: dict[int, Any] = {}  # results of calls of metrics, by the number of the call

    def metric_or_value(metric: str | int) -> Any:
        """Return the metric with this path; for a number, the result of the call with this number."""
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
                getattr(module, name)[key] = _select_row(value, -1)
            case "set", name:
                setattr(module, name, _select_row(value, -1))
            case ("optimizer_step",):
                (optimizer,) = module.trainer.strategy._lightning_optimizers
                optimizer._on_before_step()
                optimizer._on_after_step()
    for name, values in appended.items():  # in the order of micro-batches
        n = len(tensors_of(values[0])[0])
        getattr(module, name).extend(_select_row(v, i) for i in range(n) for v in values)


def _reduce_value(value: Any, options: dict[str, Any], reduce_over_instances: Callable[..., Tensor]) -> Any:
    """Return the value to log: a tensor is reduced over micro-batches by `options["reduce_fx"]` (else the
    mean), and with `sync_dist` also over instances. A value that is no tensor is returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    reduce: Any = options.get("reduce_fx", "mean")
    if isinstance(reduce, str):
        reduce = getattr(torch, "mean" if reduce == "avg" else reduce)
    value = reduce(value.float())
    return reduce_over_instances(value, reduce_op=reduce.__name__) if options.get("sync_dist") else value


def _select_row(value: Any, index: int) -> Any:
    """Return a nested value in which each tensor is replaced by a copy of its row `index`."""
    return with_tensors(value, iter([tensor[index].clone() for tensor in tensors_of(value)]))
