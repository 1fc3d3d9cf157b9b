"""A step of a LightningModule, recorded while it is captured.

A step runs once, with fake tensors. `self.log`, torchmetrics, manual optimization, and tensors in lists,
dictionaries and attributes become notes of the graph (`poptorch.compiling.outputs`), which `replaying.py`
repeats after each call, with values. Attributes that are replaced during the step are restored at its end.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from popengine.compile.recording.current_capture import Capture, current, is_traced
from popengine.compile.recording.graph_recorder import user_line
from popengine.errors import CaptureError
from poptorch.nested_values import tensors_of
from poptorch.notes import note

logger = logging.getLogger("poptorch::python")


class StepModule(nn.Module):
    """A module that runs the current step of a LightningModule; outside a Trainer's run, its forward.

    Parameters and buffers have the names that they have in the LightningModule.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._forward_module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self._forward_module
        step = _step_of(module)
        if step is None:
            return module(*args, **kwargs)
        if current() is None:
            return getattr(module, step)(*args, **kwargs)
        with Recording(module, step) as recording:
            output = getattr(module, step)(*args, **kwargs)
            recording.finish(output)
            return output

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.load_state_dict(*args, **kwargs)


_STEPS = {
    "training": "training_step",
    "testing": "test_step",
    "sanity_checking": "validation_step",
    "validating": "validation_step",
    "predicting": "predict_step",
}


def _step_of(module: Any) -> str | None:
    """Return the name of the step method that the module's Trainer runs now; None outside a run."""
    trainer = module._trainer
    return next(
        (step for flag, step in _STEPS.items() if trainer is not None and getattr(trainer, flag)), None
    )


def replace_until(undo: ExitStack, mapping: Any, key: str, value: Any) -> None:
    """Set an item of a mapping, such as an object's `vars`; closing `undo` restores or removes the item."""
    had, before = key in mapping, mapping.get(key)
    mapping[key] = value
    undo.callback(lambda: mapping.update({key: before}) if had else mapping.pop(key, None))


class Recording(ExitStack):
    """A context manager that notes the host actions of a LightningModule's step. At its end call `finish`."""

    def __init__(self, module: Any, step: str) -> None:
        super().__init__()
        self._module, self._step = module, step
        self._calls = itertools.count()  # numbers of calls of metrics
        self._metrics = _metrics_of(module)
        self._log_signature = inspect.signature(module.log)
        self._is_manual = step == "training_step" and not module.automatic_optimization
        self._manual_calls: list[str] = []  # calls of manual optimization
        self._attributes_before = {
            name: copy.copy(value) if isinstance(value, (list, dict, set, deque)) else value
            for name, value in _attributes(module).items()
        }

    def __enter__(self) -> Recording:
        self.callback(_restore_attributes, self._module, self._attributes_before)
        replaced: dict[str, Any] = {"log": self._log, "log_dict": self._log_dict}
        if self._is_manual:
            replaced |= self._manual_optimization()
        for name, value in replaced.items():
            replace_until(self, vars(self._module), name, value)
        for path, metric in self._metrics.items():
            replace_until(self, vars(metric), "forward", self._noting_function(path, "forward"))
            replace_until(self, vars(metric), "update", self._noting_function(path, "update"))
            replace_until(self, vars(metric), "compute", MetricValue(path)._raise_unknown)
        _watch_counters(self._module._trainer, self)
        return self

    def finish(self, output: Any) -> None:
        """Note the tensors that the step left in the module's attributes, restore these attributes, and
        choose the training loss. Raises CaptureError if one of these is not possible."""
        for what, value in _restore_attributes(self._module, self._attributes_before):
            if what is None:
                raise CaptureError(
                    f"the step leaves a tensor that has no values yet in self.{value}\n"
                    "  why: a step is captured once; of what it leaves, tensors in attributes, in lists that it appends"
                    " to and in dictionaries come back after each call, and others don't\n"
                    f"  fix: make self.{value} one of these, or return the value and keep it in a hook"
                )
            note(what, value)
        if self._is_manual:
            self._check_manual()
        elif self._step == "training_step":
            _choose_loss(output, self._module)

    # ---- logging -----------------------------------------------------------------------------------------

    def _log(self, *args: Any, **kwargs: Any) -> None:
        if self._step == "predict_step":
            raise CaptureError(
                "self.log in predict_step: Lightning has no place for it; return the value instead"
            )
        options = self._log_signature.bind(*args, **kwargs).arguments
        name, value = options.pop("name"), options.pop("value")
        metric = self._metric_of(value)
        if metric is not None:
            note(("log_metric", name, metric, options), None)
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

    def _log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        metric = self._metric_of(dictionary)
        if metric is not None:
            note(("log_metrics", metric, args, kwargs), None)
            return
        for name, value in dictionary.items():
            self._log(name, value, *args, **kwargs)

    def _metric_of(self, value: Any) -> str | int | None:
        """Return the path of a metric, or the number of the call that made a MetricValue; else None."""
        if isinstance(value, MetricValue):
            return value._call
        return next((path for path, metric in self._metrics.items() if metric is value), None)

    def _noting_function(self, path: str, method: str) -> Callable[..., Any]:
        """Return a function that notes each call of a metric's method; `forward`'s returns a MetricValue."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            call = next(self._calls)
            note(("metric", path, method, call), (args, kwargs))
            return MetricValue(path, call) if method == "forward" else None

        return noted

    # ---- manual optimization -----------------------------------------------------------------------------

    def _manual_optimization(self) -> dict[str, Any]:
        """Return replacements of the module's methods for manual optimization, by name."""
        (optimizer,) = self._module.trainer.strategy.optimizers
        # A stand-in for the optimizer: its attributes can be read, and `step` is only recorded.
        stand_in = object.__new__(type(optimizer))
        vars(stand_in).update(
            vars(optimizer),
            step=self._optimizer_step,
            zero_grad=_do_nothing,
            toggle_model=_raising_function("optimizer.toggle_model", "leave it out: there is one optimizer"),
        )
        return {
            "optimizers": lambda *args, **kwargs: stand_in,
            "manual_backward": self._manual_backward,
            "toggle_optimizer": _do_nothing,
            "untoggle_optimizer": _do_nothing,
            "clip_gradients": _raising_function(
                "self.clip_gradients", "set optimizer.max_grad_norm = ... in configure_optimizers"
            ),
            "lr_schedulers": _raising_function("self.lr_schedulers", "step schedulers in on_train_batch_end"),
        }

    def _manual_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        if not is_traced(loss):
            raise CaptureError(f"manual_backward at {user_line()} takes a loss that is computed in the step")
        self._manual_calls.append("backward")
        _current_capture().choose_loss(loss, user_line())

    def _optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._manual_calls.append("step")
        note(("optimizer_step",), None)

    def _check_manual(self) -> None:
        """Raise a CaptureError, unless the step made one backward, followed by one optimizer step."""
        if self._manual_calls != ["backward", "step"]:
            raise CaptureError(
                "manual optimization in training_step must be one `self.manual_backward(loss)`, followed by one"
                f" `optimizer.step()`; found {', '.join(self._manual_calls) or 'neither'}\n"
                "  why: the step is compiled into one backward pass and one weight update at its end\n"
                "  fix: sum the losses, or use automatic optimization and return the loss; accumulate with"
                " Trainer(accumulate_grad_batches=...)"
            )


def _metrics_of(module: Any) -> dict[str, Any]:
    """Return the torchmetrics objects in a module, by path; a collection precedes its members."""
    from torchmetrics import Metric, MetricCollection

    kinds = (Metric, MetricCollection)
    return {path: part for path, part in nn.Module.named_modules(module) if isinstance(part, kinds)}


class MetricValue:
    """A placeholder for a metric's value. It can be logged; any other use raises a CaptureError."""

    def __init__(self, path: str, call: int | None = None) -> None:
        self._path, self._call = path, call

    def _raise_unknown(self, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"the value of the metric {self._path!r} is known on the host, after the step\n"
            f"  used at {user_line()}\n"
            "  fix: log it (`self.log(name, value)`), or compute with it in a hook: `metric.compute()` in"
            " on_train_epoch_end"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._raise_unknown()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _raise_unknown
    __lt__ = __gt__ = __le__ = __ge__ = __neg__ = __float__ = __int__ = __bool__ = __getitem__ = (
        _raise_unknown
    )
    __iter__ = __len__ = _raise_unknown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(value for value in args if isinstance(value, MetricValue))._raise_unknown()


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _raising_function(what: str, fix: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise CaptureError(f"{what} at {user_line()} can't be a part of a compiled step\n  fix: {fix}")

    return refuse


def _choose_loss(output: Any, module: Any) -> None:
    """Choose the loss to train in the output of training_step. Raises CaptureError if there is no loss."""
    where = f"the return of {type(module).__name__}.training_step"
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
    _current_capture().choose_loss(loss, where)


def _current_capture() -> Capture:
    capture = current()
    assert capture is not None
    return capture


# ---- what a step leaves in attributes --------------------------------------------------------------------


def _attributes(module: Any) -> dict[str, Any]:
    """Return the module's attributes by name, except parameters, buffers and submodules."""
    parts = ("_parameters", "_buffers", "_modules")
    return {name: value for name, value in vars(module).items() if name not in parts}


def _holds_traced(value: Any) -> bool:
    is_set = isinstance(value, (set, frozenset, deque))
    return any(map(is_traced, tensors_of(list(value) if is_set else value)))


def _restore_attributes(module: Any, before: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Undo the assignments of traced tensors to attributes, and return them as pairs (action, tensor).

    Lists and dictionaries are restored in place. An action is ("append", name), ("key", name, key) or
    ("set", name). If an attribute holds traced tensors in any other way, its pair is (None, name).
    """
    notes: list[tuple[Any, Any]] = []
    for name, now in _attributes(module).items():
        if not _holds_traced(now):
            continue
        old: Any = before.get(name)
        are_lists, are_dicts = (all(isinstance(v, kind) for v in (now, old)) for kind in (list, dict))
        if are_lists and not _holds_traced(now[: len(old)]):
            notes += [(("append", name), item) for item in now[len(old) :] if _holds_traced(item)]
        elif are_dicts:
            notes += [(("key", name, key), item) for key, item in now.items() if _holds_traced(item)]
        elif tensors_of(now):
            notes.append((("set", name), list(now) if are_lists else now))
        else:
            notes.append((None, name))
        if are_lists:
            now[:] = old
        elif are_dicts:
            now.clear()
            now.update(old)
        elif name in before:
            vars(module)[name] = old
        else:
            del vars(module)[name]
    return notes


# ---- counters --------------------------------------------------------------------------------------------


def _watch_counters(trainer: Any, undo: ExitStack) -> None:
    """Make closing `undo` warn of each counter that was read before and is not in `strategy.recompile_on`.

    Until then the Trainer's class is a subclass that records reads of `current_epoch` and `global_step`.
    """
    read: set[str] = set()
    kind = type(trainer)

    def watched(name: str) -> property:
        def get(owner: Any) -> Any:
            read.add(name)
            return getattr(kind, name).__get__(owner)

        return property(get)

    def restore() -> None:
        trainer.__class__ = kind
        for name in sorted(read - set(trainer.strategy.recompile_on)):
            logger.warning(
                "the step reads %s, which is a constant once the step is compiled. To compile anew when it has changed:"
                " strategy.recompile_on = (%r,)",
                name,
                name,
            )

    undo.callback(restore)
    counters = {name: watched(name) for name in ("current_epoch", "global_step")}
    trainer.__class__ = type(kind.__name__, (kind,), counters)
