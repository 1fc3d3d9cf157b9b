"""A step of a LightningModule, recorded while it is captured.

A step runs once, with fake tensors. `self.log`, torchmetrics, manual optimization, and tensors in lists, dictionaries
and attributes become notes of the graph (`poptorch.annotating.notes`), and `replaying.py` repeats them after each
call, with values. Attributes of the module that are replaced meanwhile are restored at the end of the step.
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
from poptorch.nested_values import tensors_of


class StepModule(nn.Module):
    """Holds a LightningModule; its forward is that module's step, and outside a trainer its forward.

    Its parameters and buffers have the names that they have in the LightningModule.
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
            return recording.finished(getattr(module, step)(*args, **kwargs))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.load_state_dict(*args, **kwargs)


def _step_of(module: Any) -> str | None:
    """Return the name of the step that the module's trainer runs now; None outside a run."""
    trainer = module._trainer
    if trainer is None:
        return None
    if trainer.training:
        return "training_step"
    if trainer.testing:
        return "test_step"
    if trainer.sanity_checking or trainer.validating:
        return "validation_step"
    return "predict_step" if trainer.predicting else None


logger = logging.getLogger("poptorch::python")


def replace_until(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute until `undo` is closed."""
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    attributes[name] = value
    undo.callback(lambda: attributes.update({name: before}) if had else attributes.pop(name, None))


class MetricValue:
    """Placeholder for a metric's value, which the host computes after the step. It can be logged, and nothing else."""

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
    """A context that records one step of a LightningModule."""

    def __init__(self, module: Any, step: str) -> None:
        self._module, self._step = module, step
        self._undo = ExitStack()
        self._events = 0
        self._metrics = _metrics_of(module)

    def __enter__(self) -> Recording:
        self._changes = AttributeChanges(self._module)
        replace = partial(replace_until, self._undo)
        replace(self._module, "log", self._log)
        replace(self._module, "log_dict", self._log_dict)
        for path, metric in self._metrics.items():
            replace(metric, "forward", self._of_metric(path, metric, "forward"))
            replace(metric, "update", self._of_metric(path, metric, "update"))
            replace(metric, "compute", MetricValue(path, -1)._refuse)
        self._undo.enter_context(CounterWatch(self._module))
        self._manual = None
        if self._step == "training_step" and not self._module.automatic_optimization:
            self._manual = ManualSteps(self._module, replace)
        return self

    def __exit__(self, *details: Any) -> None:
        self._undo.close()
        self._changes.undo()

    # ---- logging -----------------------------------------------------------------------------------------

    def _log(self, *args: Any, **kwargs: Any) -> None:
        if self._step == "predict_step":
            raise CaptureError(
                "self.log in predict_step: Lightning has no place for it; return the value instead"
            )
        options = inspect.signature(type(self._module).log).bind(self._module, *args, **kwargs).arguments
        name, value = options.pop("name"), options.pop("value")
        options.pop("self", None)
        path = self._path_of(value)
        if path is not None:
            note(("log_metric", name, path, options), None)
        elif isinstance(value, MetricValue):
            note(("log_metric_value", name, value._event, options), None)
        else:
            self._log_value(name, value, options)

    def _log_value(self, name: str, value: Any, options: dict[str, Any]) -> None:
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
        note(("log", name, options), value.detach() if isinstance(value, Tensor) else value)

    def _log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        options = (
            inspect.signature(type(self._module).log_dict)
            .bind(self._module, dictionary, *args, **kwargs)
            .arguments
        )
        options = {name: value for name, value in options.items() if name not in ("self", "dictionary")}
        path = self._path_of(dictionary)
        if path is not None:
            note(("log_dict_metric", path, options), None)
        elif isinstance(dictionary, MetricValue):
            note(("log_dict_metric_value", dictionary._event, options), None)
        else:
            for name, value in dictionary.items():
                self._log(name, value, **options)

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
        """Choose the loss, and note what the step left in the module. Returns: the step's output, unchanged."""
        self._changes.note()
        if self._manual is not None:
            self._manual.finish()
        elif self._step == "training_step":
            _choose_loss(output, self._module)
        return output


def _metrics_of(module: Any) -> dict[str, Any]:
    """Return the torchmetrics objects in a module by path; a collection comes before its members."""
    try:
        from torchmetrics import Metric, MetricCollection
    except ImportError:
        return {}
    kinds = (Metric, MetricCollection)
    return {path: part for path, part in nn.Module.named_modules(module) if isinstance(part, kinds)}


def _choose_loss(output: Any, module: Any) -> None:
    """Train the loss that training_step returns. Raises: CaptureError, if it returns none."""
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


_INTERNAL = {"_parameters", "_buffers", "_modules"}  # the capture restores these


class AttributeChanges:
    """Traced tensors that a step puts into attributes of its module: they are noted, and removed again."""

    def __init__(self, module: Any) -> None:
        self._attributes = vars(module)
        self._before = {name: _copied(value) for name, value in self._attributes.items()}

    def note(self) -> None:
        """Note traced tensors that were appended to a list, put into a dictionary or assigned, and remove them.

        Raises:
            CaptureError: something else holds a traced tensor
        """
        for name, value in self._attributes.items():
            if name not in _INTERNAL:
                _note(name, self._before.get(name), value)
        left = [
            name
            for name, value in self._attributes.items()
            if name not in _INTERNAL and _holds_traced(value) and not _is_computed(value)
        ]
        self.undo()
        if left:
            raise CaptureError(
                f"the step leaves a tensor that has no values yet in self.{left[0]}\n"
                "  why: a step is captured once; of what it leaves, tensors in attributes, in lists that it appends to"
                " and in dictionaries come back after each call, and others don't\n"
                f"  fix: make self.{left[0]} one of these, or return the value and keep it in a hook"
            )

    def undo(self) -> None:
        """Restore the lists, dictionaries and attributes that hold a traced tensor."""
        for name, now in list(self._attributes.items()):
            before = self._before.get(name)
            if name in _INTERNAL or not _holds_traced(now):
                continue
            if isinstance(now, list) and isinstance(before, list):
                now[:] = [item for item in now if not _is_computed(item)]
            elif isinstance(now, dict) and isinstance(before, dict):
                for key in [key for key, item in now.items() if _is_computed(item)]:
                    now.pop(key)
                    if key in before:
                        now[key] = before[key]
            else:
                self._attributes.pop(name)
                if name in self._before:
                    self._attributes[name] = before


def _note(name: str, before: Any, now: Any) -> None:
    """Note traced tensors that were appended to a list, put into a dictionary or assigned."""
    if isinstance(now, list) and isinstance(before, list):
        for item in now[len(before) :]:
            if _is_computed(item):
                note(("append", name), item)
    elif isinstance(now, dict) and isinstance(before, dict):
        for key, item in now.items():
            if _is_computed(item) and item is not before.get(key):
                note(("key", name, key), item)
    elif _is_computed(now):
        note(("set", name), now)


def _copied(value: Any) -> Any:
    if type(value) in (list, dict):
        return value.copy()
    return value


def _is_computed(value: Any) -> bool:
    return any(is_traced(tensor) for tensor in tensors_of(value))


def _holds_traced(value: Any) -> bool:
    if isinstance(value, (set, frozenset)) or type(value).__name__ == "deque":
        value = list(value)
    return _is_computed(value)


class ManualSteps:
    """Replaces the calls of manual optimization while a step is captured, and checks their order."""

    def __init__(self, module: Any, replace: Callable[[Any, str, Any], None]) -> None:
        self._module, self._done = module, []
        (real,) = module.trainer.strategy.optimizers
        stand_in = _Optimizer(real, self._step)
        replace(module, "optimizers", lambda *args, **kwargs: stand_in)
        replace(module, "manual_backward", self._backward)
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            replace(module, name, lambda *args, **kwargs: None)
        replace(
            module,
            "clip_gradients",
            _refusal("self.clip_gradients", "set optimizer.max_grad_norm = ... in configure_optimizers"),
        )
        replace(
            module, "lr_schedulers", _refusal("self.lr_schedulers", "step schedulers in on_train_batch_end")
        )

    def _backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(loss, Tensor) or not is_traced(loss):
            raise CaptureError(f"manual_backward at {user_line()} takes a loss that is computed in the step")
        self._done.append("backward")
        capture = current()
        assert capture is not None
        capture.choose_loss(loss, user_line())

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self._done.append("step")
        note(("optimizer_step",), None)

    def finish(self) -> None:
        """Check that there was one backward, followed by one step. Raises: CaptureError, if not."""
        if self._done != ["backward", "step"]:
            raise CaptureError(
                "manual optimization in training_step must be one `self.manual_backward(loss)`, followed by one"
                f" `optimizer.step()`; found {', '.join(self._done) or 'neither'}\n"
                "  why: the step is compiled into one backward pass and one weight update at its end\n"
                "  fix: sum the losses, or use automatic optimization and return the loss; accumulate with"
                " Trainer(accumulate_grad_batches=...)"
            )


class _Optimizer:
    """The optimizer of a captured step: its rates can be read, and `step` is recorded."""

    def __init__(self, real: Any, step: Callable[..., None]) -> None:
        self._real, self.step = real, step

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: each update has gradients of its own."""

    def toggle_model(self, *args: Any, **kwargs: Any) -> Any:
        return _refusal("optimizer.toggle_model", "leave it out: there is one optimizer")()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _refusal(what: str, fix: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise CaptureError(f"{what} at {user_line()} can't be a part of a compiled step\n  fix: {fix}")

    return refuse


COUNTERS = ("current_epoch", "global_step")

logger = logging.getLogger("poptorch::python")


class CounterWatch:
    """Warns of reads of counters: the classes of a module and its trainer are replaced by subclasses meanwhile."""

    def __init__(self, module: Any) -> None:
        self._owners = [owner for owner in (module, module._trainer) if isinstance(type(owner), type)]
        self._allowed = getattr(module._trainer.strategy, "recompile_on", ())
        self._read: set[str] = set()

    def __enter__(self) -> CounterWatch:
        self._classes = [type(owner) for owner in self._owners]
        for owner, kind in zip(self._owners, self._classes, strict=True):
            owner.__class__ = type(
                kind.__name__, (kind,), {name: self._property(kind, name) for name in COUNTERS}
            )
        return self

    def _property(self, kind: type, name: str) -> property:
        def read(owner: Any) -> Any:
            self._read.add(name)
            return getattr(super(type(owner), owner), name)

        return property(read)

    def __exit__(self, *details: Any) -> None:
        for owner, kind in zip(self._owners, self._classes, strict=True):
            owner.__class__ = kind
        for name in sorted(self._read - set(self._allowed)):
            logger.warning(
                "the step reads %s, which is a constant once the step is compiled. To compile anew when it has changed:"
                " strategy.recompile_on = (%r,)",
                name,
                name,
            )
