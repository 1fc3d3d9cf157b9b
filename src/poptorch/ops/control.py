"""`cond` and `for_loop`: control flow that depends on values, in inference only."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import current
from popengine.compile.recording.functional import trace_body
from popengine.errors import Error
from popengine.torch_private import tree_map_only

from ..checks import checked
from .host import as_list
from .library import check_tensors, raise_in_training, shapes_and_dtypes_of, shapes_text

_FIX_IN_TRAINING = "torch.where over both results, or a Python loop, which is unrolled"


def cond(
    condition: Tensor,
    then_body: Callable[..., Any],
    then_inps: list[Tensor],
    else_body: Callable[..., Any],
    else_inps: list[Tensor],
) -> list[Tensor]:
    """Return `then_body(*then_inps)` if `condition` is true, else `else_body(*else_inps)`, always as a list.

    Compilation traces both bodies; a call, compiled or not, runs the chosen body. Both must return the same number of
    tensors, of the same shapes and dtypes. A body may read tensors of the surrounding forward. In-place
    changes of its inputs are lost, since the inputs are copies; those of other tensors are an error.

    >>> (y,) = poptorch.cond(x.sum() > 0, lambda x: x * 2, [x], lambda x: x - 1, [x])

    Args: condition: a bool tensor with one element
    Raises:
        ValueError: `then_inps` or `else_inps` is not a list
        Error: in a compiled model: it is for training, a body writes into a tensor that isn't its own, or the bodies'
            outputs differ in number, shape or dtype
    """
    checked("(Object is not list) then_inps", then_inps, list, ValueError)
    checked("(Object is not list) else_inps", else_inps, list, ValueError)
    capture = current()
    if capture is None:
        body, given = (then_body, then_inps) if bool(condition) else (else_body, else_inps)
        return _call_body("cond", body, tree_map_only(Tensor, torch.clone, given))
    raise_in_training(capture, "poptorch.cond()", _FIX_IN_TRAINING)
    words = "poptorch.cond() takes a bool tensor with one element as condition"
    check_tensors(words, condition)
    if condition.numel() != 1:
        raise Error(f"{words}; found {tuple(condition.shape)}")
    bodies, inputs = [], []
    for body, given in ((then_body, then_inps), (else_body, else_inps)):
        traced, outer = trace_body(capture, partial(_call_body, "cond", body), given)
        bodies.append(traced)
        inputs.append([*given, *outer])
    if bodies[0].outputs != bodies[1].outputs:
        raise Error(
            "the bodies of poptorch.cond() must return the same number of tensors, of the same shapes and types\n"
            f"  then_body returns {shapes_text(bodies[0].outputs)}\n"
            f"  else_body returns {shapes_text(bodies[1].outputs)}"
        )
    library = torch.ops.popengine
    run = library.cond_that_draws if any(body.draws for body in bodies) else library.cond
    return list(run(condition, bodies[0].as_text(), inputs[0], bodies[1].as_text(), inputs[1]))


def for_loop(count: int, body: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Call `inputs = body(*inputs)` `count` times, and return the last outputs, always as a list.

    The body returns as many tensors as it takes, of the same shapes and dtypes. In-place changes of its
    inputs are lost, since the inputs are copies; those of other tensors are an error in a compiled model. `count` is an
    integer, known at compile time.

    >>> (y,) = poptorch.for_loop(3, lambda x: x * 2, [x])

    Raises:
        ValueError: `inputs` is not a list of tensors
        Error: the model is compiled for training; or outputs and inputs differ in number, shape or dtype
    """
    checked("(Object is not list) inputs", inputs, list, ValueError)
    checked("poptorch.for_loop(): a count, which is known at compile time,", count, int, Error, least=0)
    for index, value in enumerate(inputs):
        words = f"(Object contained in list at index {index} is not torch.tensor) for_loop takes tensors"
        check_tensors(words, value, error=ValueError)
    capture = current()
    if capture is None:
        values = list(inputs)
        for _ in range(count):
            values = _call_body("for_loop", body, tree_map_only(Tensor, torch.clone, values))
        return values
    raise_in_training(capture, "poptorch.for_loop()", _FIX_IN_TRAINING)
    if not inputs:
        raise Error("poptorch.for_loop() takes at least one input: it returns what the turns make of it")
    traced, outer = trace_body(capture, partial(_call_body, "for_loop", body), inputs)
    if traced.outputs != shapes_and_dtypes_of(inputs):
        raise Error(
            "the body of poptorch.for_loop() must return tensors of the shapes and types of its inputs, which are"
            f" fed to the next turn\n  it takes {shapes_text(shapes_and_dtypes_of(inputs))}\n"
            f"  it returns {shapes_text(traced.outputs)}"
        )
    run = torch.ops.popengine.loop_that_draws if traced.draws else torch.ops.popengine.loop
    return list(run(count, traced.as_text(), list(inputs), outer))


def _call_body(name: str, body: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    """Return the outputs of `body(*inputs)` as a list. Raises Error if an output is not a tensor."""
    values = as_list(body(*inputs))
    check_tensors(f"a body of poptorch.{name}() returns a tensor, or a list or tuple of tensors", *values)
    return values
