"""Functions that make executors (`trainingModel`, `inferenceModel`, `load`), and `describe`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from popengine.errors import Error
from popengine.torch_private import optimized_module_type

from ..compiling.arguments import bind
from ..compiling.compilation_log import Overview
from ..compiling.executable import compile_model
from ..compiling.runs import Run
from ..logs import logger
from ..nested_values import arguments_of
from ..options import Options
from ..options.freeze_options import resolve_options
from . import executable_file, wrapped_model
from .calls import outside_inference_mode
from .compilation import set_modes
from .executor import PoplarExecutor


@outside_inference_mode
def trainingModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: Any = None,
    loss: str | int | None = None,
) -> PoplarExecutor:
    """Return an executor whose calls train a model: forward, backward and weight updates.

    >>> trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> output, loss = trainer(images, labels)

    Args:
        model:     a module, whose forward computes the loss and returns it
        options:   by default `poptorch.Options()`. They are frozen: change a copy, `options.clone()`
        optimizer: an optimizer of torch.optim or poptorch.optim; by default poptorch.optim.SGD with lr 0.01
        loss:      *Pando*: key, attribute or index of the loss in what forward returns, as for `Options.loss`
    Returns: an executor. It takes the arguments of forward as combined batches: the first dimension has
        micro-batch × device iterations × gradient accumulation × replicas rows. It updates the model's own tensors
    Raises:
        RuntimeError: the model is wrapped for training already
        Error: the options are not a `poptorch.Options`, or the optimizer has parameters that the model lacks
    """
    model = _unwrap_module(model)
    if loss is not None:
        given = Options() if options is None else options
        options = given.clone().loss(loss)
        given._freeze()
    executor = PoplarExecutor(model, options, training=True, optimizer=optimizer)
    if optimizer is None:
        logger.warning("poptorch.trainingModel: without an optimizer the model trains with SGD and lr=0.01")
    return executor


@outside_inference_mode
def inferenceModel(
    model: nn.Module | PoplarExecutor | Callable[..., Any], options: Options | None = None
) -> PoplarExecutor:
    """Return an executor whose calls run the forward of a model, or a function of tensors.

    >>> predict = poptorch.inferenceModel(model.eval(), poptorch.Options().deviceIterations(4))
    >>> predict(torch.randn(4 * 8, 16)).shape  # 4 micro-batches of 8 rows
    torch.Size([32, 10])

    Args:
        model:   a module, or a function of tensors. It can be wrapped for training at the same time: both
            executors use the same weights
        options: by default `poptorch.Options()`. They are frozen: change a copy, `options.clone()`
    Returns: an executor. It takes the arguments of forward as combined batches: the first dimension has
        micro-batch × device iterations × replicas rows. It returns what forward returns, for all rows by default
    Raises: Error, if the options are not a `poptorch.Options`, or a part of the model is a module of torch.jit
    """
    return PoplarExecutor(_unwrap_module(model), options, training=False)


def _unwrap_module(model: Any) -> Any:
    """Return the module inside an executor or torch.compile's wrapper, else `model`. Refuse classes and torch.jit."""
    if isinstance(model, type):
        raise Error(
            f"the model is the class {model.__name__}, and an executor needs an object of it\n"
            f"  fix: model = {model.__name__}(...), and an optimizer of model.parameters()"
        )
    owner, name = getattr(model, "__self__", None), getattr(model, "__name__", "forward")
    if isinstance(owner, nn.Module) and name in vars(nn.Module) and name != "forward":
        raise Error(
            f"the model is a method, {name}\n  fix: parentheses: poptorch.inferenceModel(model.{name}())"
        )
    if isinstance(model, optimized_module_type()):
        logger.warning(
            "torch.compile is left out: the module inside is wrapped, and compiled by its executor"
        )
        return model._orig_mod
    if isinstance(model, nn.Module) and any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise Error(
            "the model is, or has, a module of torch.jit\n"
            "  why: its forward is no Python, which is what is captured here\n"
            "  fix: wrap the module that torch.jit.script or trace was given"
        )
    if isinstance(model, PoplarExecutor):
        return model._user_model
    return model._user if isinstance(model, wrapped_model.ModelWithOwnModes) else model


@outside_inference_mode
def load(filename: str, edit_opts_fn: Callable[[Options], Any] | None = None) -> PoplarExecutor:
    """Build an executor from a file that `save` or `compileAndExport` wrote, and restore its state. Its first call
    compiles the model.

    The file is a pickle: load only files that you trust.

    >>> trainer = poptorch.load("trainer.poptorch", lambda options: options.deviceIterations(2))

    Args:
        filename:     the file
        edit_opts_fn: called with the saved options, which it may change
    Raises: AssertionError, if the file is missing, was written by another version, or has no model
    """
    saved = executable_file.read_file(filename)
    if saved.model is None:
        raise AssertionError(
            f"{filename} holds no model (export_model=False)\n"
            "  fix: wrap the model as it was wrapped then, and call loadExecutable(filename)"
        )
    options = saved.options
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    set_modes(saved.model, saved.modes)
    executor = PoplarExecutor(saved.model, options, training=saved.training, optimizer=saved.optimizer)
    executor._restore(saved)
    return executor


@outside_inference_mode
def describe(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    batch: Any = (),
    *,
    training: bool = True,
) -> Overview:
    """*Pando*: return an overview of what would run. Compiles as the first call does, but uses no devices.

    >>> print(poptorch.describe(model, options, (images, labels)))

    Args:
        model:    a module, or an executor
        options:  by default those of the executor, if the model is wrapped already
        batch:    a combined batch, as for a call: a tensor, a tuple or list, or a dictionary of arguments
        training: for a module: compile as `trainingModel` does; False: as `inferenceModel` does
    Raises: Error, if the model can't be compiled for such a batch
    """
    if options is not None:
        wrapped_model.checked_options(options, "describe(model, options, batch)")
    executor: Any = model
    temporary: PoplarExecutor | None = None
    if not isinstance(model, PoplarExecutor):
        model = _unwrap_module(model)
        executor = wrapped_model.executor_of(model) if training else None
        if executor is None:
            executor = temporary = PoplarExecutor(model, options and options.clone(), training=training)
            options = None
    try:
        wrapped, (args, kwargs) = executor._wrapped, arguments_of(batch)
        resolved = resolve_options(options, wrapped.training, wrapped.user) if options else wrapped.options
        run = Run(bind(executor._compilation.signature, args, kwargs), resolved._counts())
        settings = executor._compilation.settings_of(run, resolved)
        compiled = compile_model(wrapped.user, run, resolved, settings, is_plan_only=True)
        return Overview(compiled.plan, compiled.settings, compiled.graph)
    finally:
        if temporary is not None:
            temporary.destroy()
