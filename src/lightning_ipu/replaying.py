"""Repeats a step's actions on the host (logging, metrics, attributes) after each call, with the call's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from poptorch.nested_values import tensors_of, with_tensors

_NAMES = {torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", "avg": "mean"}
_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "min": torch.min,
    "max": torch.max,
}


class Replay:
    """Repeats the notes of a recorded step, in their order.

    Args:
        over_instances: reduces a logged value ("mean", "sum", "min", "max") over processes, for `sync_dist=True`
    """

    def __init__(self, module: Any, over_instances: Callable[[Tensor, str], Tensor]) -> None:
        self._module, self._over_instances = module, over_instances
        self._parts: dict[str, Any] = {}  # the module's, by path
        self._values: dict[int, Any] = {}  # of the metrics, by the number of their call

    def run(self, notes: Sequence[tuple[Any, Any]]) -> None:
        """Repeat the notes of one call.

        Args: notes: (kind and details, value) pairs; each tensor of a value has [n, ...], n micro-batches
        """
        if any("metric" in what[0] for what, _ in notes):
            self._parts = dict(torch.nn.Module.named_modules(self._module))
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
            reduction = options.get("reduce_fx") or "mean"
            word: Any = _NAMES.get(reduction, reduction)
            reduce: Any = _REDUCTIONS.get(word, reduction)
            value = reduce(value.float())
            if options.get("sync_dist"):
                value = self._over_instances(value, word)
        self._module.log(name, value, **{**options, "sync_dist": False})

    def _log_metric(self, _: Any, name: str, path: str, options: dict[str, Any]) -> None:
        self._module.log(name, self._parts[path], **options)

    def _log_metric_value(self, _: Any, name: str, event: int, options: dict[str, Any]) -> None:
        self._module.log(name, self._values[event], **options)

    def _log_dict_metric(self, _: Any, path: str, options: dict[str, Any]) -> None:
        self._module.log_dict(self._parts[path], **options)

    def _log_dict_metric_value(self, _: Any, event: int, options: dict[str, Any]) -> None:
        self._module.log_dict(self._values[event], **options)

    def _metric(self, value: Any, path: str, method: str, event: int) -> None:
        arguments = with_tensors(value, iter([_rows(tensor) for tensor in tensors_of(value)]))
        args, kwargs = arguments
        self._values[event] = getattr(self._parts[path], method)(*args, **kwargs)

    def _key(self, value: Any, name: str, key: Any) -> None:
        getattr(self._module, name)[key] = _of_micro_batch(value, -1)

    def _set(self, value: Any, name: str) -> None:
        setattr(self._module, name, _of_micro_batch(value, -1))

    def _optimizer_step(self, _: Any) -> None:
        (optimizer,) = self._module.trainer.strategy._lightning_optimizers
        optimizer._on_before_step()
        optimizer._on_after_step()


def _rows(values: Tensor) -> Tensor:
    """Join micro-batches: [n, rows, ...] becomes [n * rows, ...]."""
    return values.flatten(0, 1) if values.dim() > 1 else values


def _of_micro_batch(value: Any, place: int) -> Any:
    return with_tensors(value, iter([tensor[place].clone() for tensor in tensors_of(value)]))
