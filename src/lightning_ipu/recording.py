"""What a step does on the host, written down while it is captured.

A step runs once, with tensors that have no values yet. `self.log`, torchmetrics, lists that are appended to, attributes
that are set (both in `left.py`): each becomes a note of the graph (`poptorch.annotating.notes`), and `replaying.py`
does it again after each call, with values. All that is put in place of the module's own is taken out again at the end.
"""

from __future__ import annotations

import inspect
import logging
import numbers
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from popengine.compile.recording.current_capture import current, is_traced
from popengine.compile.recording.graph_recorder import user_line
from popengine.errors import CaptureError
from poptorch.annotating.notes import note

from .left import Left
from .manual import ManualSteps
from .watching import Watch

logger = logging.getLogger("poptorch::python")


def put_meanwhile(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Put a value in place of an attribute, until `undo` is closed."""
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    attributes[name] = value
    undo.callback(lambda: attributes.update({name: before}) if had else attributes.pop(name, None))


class MetricValue:
    """What a metric gives inside a step: the host knows it after the step. It can be logged, and nothing else."""

    def __init__(self, path: str, event: int) -> None:
        self._path, self._event = path, event

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"the value of the metric {self._path!r} is known on the host, after the step\n"
            f"  used at {user_line()}\n"
            "  fix: log it (`self.log(name, value)`), or compute with it in a hook: `metric.compute()` in"
            " on_train_epoch_end"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __neg__ = __float__ = __int__ = __bool__ = __getitem__ = _refuse
    __iter__ = __len__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(value for value in args if isinstance(value, MetricValue))._refuse()


class Recording:
    """Records one step of a LightningModule; a context around it."""

    def __init__(self, module: Any, step: str) -> None:
        self._module, self._step = module, step
        self._undo = ExitStack()
        self._events = 0
        self._metrics = _metrics_of(module)

    def __enter__(self) -> Recording:
        self._left = Left(self._module)
        replace = partial(put_meanwhile, self._undo)
        replace(self._module, "log", self._log)
        replace(self._module, "log_dict", self._log_dict)
        for path, metric in self._metrics.items():
            replace(metric, "forward", self._of_metric(path, metric, "forward"))
            replace(metric, "update", self._of_metric(path, metric, "update"))
            replace(metric, "compute", MetricValue(path, -1)._refuse)
        self._undo.enter_context(Watch(self._module))
        self._manual = None
        if self._step == "training_step" and not self._module.automatic_optimization:
            self._manual = ManualSteps(self._module, replace)
        return self

    def __exit__(self, *details: Any) -> None:
        self._undo.close()
        self._left.take_back()

    # ---- logging -----------------------------------------------------------------------------------------

    def _log(self, *args: Any, **kwargs: Any) -> None:
        if self._step == "predict_step":
            raise CaptureError(
                "self.log in predict_step: Lightning has no place for it; return the value instead"
            )
        given = inspect.signature(type(self._module).log).bind(self._module, *args, **kwargs).arguments
        name, value = given.pop("name"), given.pop("value")
        given.pop("self", None)
        path = self._path_of(value)
        if path is not None:
            note(("log_metric", name, path, given), None)
        elif isinstance(value, MetricValue):
            note(("log_metric_value", name, value._event, given), None)
        else:
            self._log_value(name, value, given)

    def _log_value(self, name: str, value: Any, given: dict[str, Any]) -> None:
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"`self.log({name}, ...)` was called, but the tensor must have a single element; it has shape"
                f" {list(value.shape)}. You can try doing `self.log({name}, value.mean())`"
            )
        if not isinstance(value, (Tensor, numbers.Number)):
            kind = type(value).__name__
            raise ValueError(f"`self.log({name}, {value})` was called, but `{kind}` values cannot be logged")
        if not isinstance(value, Tensor) or not is_traced(value):
            logger.warning(
                "self.log(%r, ...): the value was a number when the model was compiled, and is logged unchanged: log"
                " what changes between calls in on_train_batch_end",
                name,
            )
        note(("log", name, given), value.detach() if isinstance(value, Tensor) else value)

    def _log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        given = (
            inspect.signature(type(self._module).log_dict)
            .bind(self._module, dictionary, *args, **kwargs)
            .arguments
        )
        given = {name: value for name, value in given.items() if name not in ("self", "dictionary")}
        path = self._path_of(dictionary)
        if path is not None:
            note(("log_dict_metric", path, given), None)
        elif isinstance(dictionary, MetricValue):
            note(("log_dict_metric_value", dictionary._event, given), None)
        else:
            for name, value in dictionary.items():
                self._log(name, value, **given)

    def _path_of(self, value: Any) -> str | None:
        return next((path for path, metric in self._metrics.items() if metric is value), None)

    def _of_metric(self, path: str, metric: Any, method: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            event, self._events = self._events, self._events + 1
            note(("metric", path, method, event), (args, kwargs))
            return MetricValue(path, event) if method == "forward" else None

        return noted

    # ---- the end of a step -------------------------------------------------------------------------------

    def finished(self, output: Any) -> Any:
        """The step has returned: choose the loss, and note what it left in the module."""
        self._left.note()
        if self._manual is not None:
            self._manual.finish()
        elif self._step == "training_step":
            _choose_loss(output, self._module)
        return output


def _metrics_of(module: Any) -> dict[str, Any]:
    """torchmetrics' objects in a module, by path; collections as a whole, before their members."""
    try:
        from torchmetrics import Metric, MetricCollection
    except ImportError:
        return {}
    kinds = (Metric, MetricCollection)
    return {path: part for path, part in nn.Module.named_modules(module) if isinstance(part, kinds)}


def _choose_loss(output: Any, module: Any) -> None:
    """The loss that training_step returns is the one that is trained."""
    where = f"the return of {type(module).__name__}.training_step"
    loss = output.get("loss") if isinstance(output, dict) else output
    capture = current()
    assert capture is not None
    if loss is None:
        raise CaptureError(
            "Skipping backward by returning `None` from your `training_step` is not possible with IPUs\n"
            f"  {where}\n"
            "  why: the step is compiled, and trains at each call\n"
            '  fix: return the loss, or a dictionary with the key "loss"'
        )
    if not isinstance(loss, Tensor) or not is_traced(loss) or not loss.is_floating_point():
        raise CaptureError(
            f"{where} is {type(loss).__name__}, and training needs a loss that is computed in the step\n"
            '  fix: return a floating point tensor with one element, or a dictionary with the key "loss"'
        )
    capture.choose_loss(loss, where)
