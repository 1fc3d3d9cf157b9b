"""Recording of a LightningModule's step while it is captured.

A step runs once, with fake tensors. `self.log`, torchmetrics, and tensors in lists, dictionaries and attributes
become notes of the graph (`poptorch.compiling.outputs`), which the strategy repeats after each call, with
values. Attributes that are replaced during the step are restored at its end.
"""

import copy
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from popengine.compile.recording.current_capture import Capture, current, is_traced
from popengine.compile.recording.user_code import user_line
from popengine.errors import CaptureError
from poptorch.logs import logger
from poptorch.nested_values import tensors_of
from poptorch.notes import note


class StepModule(nn.Module):
    """A module around a LightningModule, with the same names of parameters, whose forward runs the Trainer's
    present step, recorded in a capture; outside a Trainer's run, the LightningModule's forward."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._forward_module = module
        for name in ("named_parameters", "named_buffers", "state_dict", "load_state_dict"):
            vars(self)[name] = getattr(module, name)

    def train(self, mode: bool = True) -> "StepModule":
        """Set the mode of the LightningModule. After validation Lightning resets no mode but this."""
        self._forward_module.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self._forward_module
        step = next((step for flag, step in _STEPS.items() if getattr(module._trainer, flag, False)), None)
        if step is None:  # outside a Trainer's run
            return module(*args, **kwargs)
        capture = current()
        run = getattr(module, step) if capture is None else Recording(module, step, capture).run
        return run(*args, **kwargs)


_STEPS = {
    "training": "training_step",
    "testing": "test_step",
    "sanity_checking": "validation_step",
    "validating": "validation_step",
    "predicting": "predict_step",
}


def set_until_closed(undo: ExitStack, mapping: Any, key: str, value: Any) -> None:
    """Set `mapping[key]` until `undo` is closed."""
    had, before = key in mapping, mapping.get(key)
    mapping[key] = value
    undo.callback(lambda: mapping.update({key: before}) if had else mapping.pop(key, None))


class Recording:
    """One run of a LightningModule's method `step` while it is captured, which makes its actions notes."""

    def __init__(self, module: Any, step: str, capture: Capture) -> None:
        from torchmetrics import Metric, MetricCollection

        self._module, self._step, self._capture = module, step, capture
        self._calls = itertools.count()  # numbers the calls of metrics
        named = nn.Module.named_modules(module)  # a collection precedes its metrics
        self._metrics = {path: part for path, part in named if isinstance(part, (Metric, MetricCollection))}
        self._log_signature = inspect.signature(module.log)
        self._attributes_before = {
            name: copy.copy(value) if isinstance(value, (list, dict, set, deque)) else value
            for name, value in _plain_attributes(module).items()
        }

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, choose its loss, restore the module's attributes and methods, and return the output."""
        module = self._module
        with ExitStack() as undo:
            undo.callback(_restore_attributes, module, self._attributes_before)
            set_until_closed(undo, vars(module), "log", self._record_log)
            set_until_closed(undo, vars(module), "log_dict", self._record_log_dict)
            for path, metric in self._metrics.items():
                for name in ("forward", "update"):
                    set_until_closed(undo, vars(metric), name, self._recording_method(path, name))
                set_until_closed(undo, vars(metric), "compute", MetricValue(path)._refuse_use)
            output = getattr(module, self._step)(*args, **kwargs)
            self._record_attributes()
        if self._step == "training_step":
            where = f"the return of {type(module).__name__}.training_step"
            self._capture.choose_loss(_find_loss(output, where), where)
        return output

    def _record_attributes(self) -> None:
        """Record the tensors that the step has left in attributes. Raises CaptureError for one in a set."""
        for name, now, old in _changed_attributes(self._module, self._attributes_before):
            self._capture.written_by_host.add(f"_forward_module.{name}")
            if isinstance(now, list) and isinstance(old, list) and not _has_traced_tensors(now[: len(old)]):
                for item in filter(_has_traced_tensors, now[len(old) :]):
                    note(("append", name), item)
            elif isinstance(now, dict) and isinstance(old, dict):
                for key, item in now.items():
                    if _has_traced_tensors(item):
                        note(("key", name, key), item)
            elif tensors_of(now):
                note(("set", name), copy.copy(now) if isinstance(now, list) else now)
            else:
                raise CaptureError(
                    f"the step leaves a tensor that has no values yet in self.{name}\n"
                    "  why: a step is captured once; of what it leaves, tensors in attributes, in lists that it appends"
                    " to and in dictionaries come back after each call, and others don't\n"
                    f"  fix: make self.{name} one of these, or return the value and keep it in a hook"
                )

    # ---- logging -----------------------------------------------------------------------------------------

    def _record_log(self, *args: Any, **kwargs: Any) -> None:
        if self._step == "predict_step":
            raise CaptureError(
                "self.log in predict_step: Lightning has no place for it; return the value instead"
            )
        options = self._log_signature.bind(*args, **kwargs).arguments
        name, value = options.pop("name"), options.pop("value")
        metric_key = self._metric_key(value)
        if metric_key is not None:
            note(("log_metric", name, metric_key, options), None)
            return
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"`self.log({name}, ...)` was called, but the tensor must have a single element; it has shape"
                f" {list(value.shape)}. You can try doing `self.log({name}, value.mean())`"
            )
        if not isinstance(value, Tensor) or not is_traced(value):
            logger.warning(
                "self.log(%r, ...): the value was a number when the model was compiled, and is logged unchanged: log"
                " what changes between calls in on_train_batch_end",
                name,
            )
        note(("log", name, options), value.detach() if isinstance(value, Tensor) else value)

    def _record_log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        metric_key = self._metric_key(dictionary)
        if metric_key is not None:
            note(("log_metrics", metric_key, args, kwargs), None)
            return
        for name, value in dictionary.items():
            self._record_log(name, value, *args, **kwargs)

    def _metric_key(self, value: Any) -> str | int | None:
        """Return a metric's path; for a MetricValue the number of its call; None for other values."""
        if isinstance(value, MetricValue):
            return value._call
        return next((path for path, metric in self._metrics.items() if metric is value), None)

    def _recording_method(self, path: str, method: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            call = next(self._calls)
            note(("metric", path, method, call), (args, kwargs))
            return MetricValue(path, call) if method == "forward" else None

        return noted


class MetricValue:
    """A placeholder for a metric's value. It can be logged; any other use raises a CaptureError."""

    def __init__(self, path: str, call: int | None = None) -> None:
        self._path, self._call = path, call

    def _refuse_use(self, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"the value of the metric {self._path!r} is known on the host, after the step\n"
            f"  used at {user_line()}\n"
            "  fix: log it (`self.log(name, value)`), or compute with it in a hook: `metric.compute()` in"
            " on_train_epoch_end"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse_use()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_use
    __lt__ = __gt__ = __le__ = __ge__ = __neg__ = __float__ = __int__ = __bool__ = __getitem__ = _refuse_use
    __iter__ = __len__ = _refuse_use

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(value for value in args if isinstance(value, MetricValue))._refuse_use()


def _find_loss(output: Any, where: str) -> Tensor:
    """Return the output of training_step or its item "loss", if it is a floating point tensor of the step."""
    loss: Any = output.get("loss") if isinstance(output, dict) else output
    if not is_traced(loss) or not loss.is_floating_point():
        cause = f"training needs a loss that is computed in the step; found {type(loss).__name__}"
        if loss is None:
            cause = (
                "Skipping backward by returning `None` from your `training_step` is not possible with IPUs"
            )
        raise CaptureError(
            f"{cause}\n  {where}\n  why: the step is compiled, and trains at each call\n"
            '  fix: return a floating point tensor with one element, or a dictionary with the key "loss"'
        )
    return loss


# ---- what a step leaves in attributes --------------------------------------------------------------------


def _plain_attributes(module: Any) -> dict[str, Any]:
    """Return a module's attributes by name, without its parameters, buffers and submodules."""
    parts = ("_parameters", "_buffers", "_modules")
    return {name: value for name, value in vars(module).items() if name not in parts}


def _has_traced_tensors(value: Any) -> bool:
    is_set = isinstance(value, (set, frozenset, deque))
    return any(map(is_traced, tensors_of(list(value) if is_set else value)))


def _changed_attributes(module: Any, before: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, value in `before` or None) of each attribute that holds traced tensors."""
    for name, now in _plain_attributes(module).items():
        if _has_traced_tensors(now):
            yield name, now, before.get(name)


def _restore_attributes(module: Any, before: dict[str, Any]) -> None:
    """Set each attribute that holds traced tensors to its value in `before`; lists and dictionaries in place."""
    for name, now, old in _changed_attributes(module, before):
        if isinstance(now, list) and isinstance(old, list):
            now[:] = old
        elif isinstance(now, dict) and isinstance(old, dict):
            now.clear()
            now.update(old)
        elif name in before:
            vars(module)[name] = old
        else:
            del vars(module)[name]
