"""Convert errors that torch raises during a capture: add the user's line, a reason and a fix."""

import contextlib
import functools
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from ...errors import CaptureError, Error
from ...texts import HINTS_OF_VALUES, Hints, hint_for
from ...torch_private import FAKE_TENSOR_LOG, VALUE_READS
from .user_code import TORCH, user_line

# The errors that torch raises, subclasses first. The error that explains one has its class, too.
_ERROR_CLASSES = (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError, AssertionError)
_PANDO_MODES = str(Path(__file__).parents[1])  # the capture's modes: their frames are between those of torch


ROWS_DIFFER = "different numbers of rows"  # words of `given`, see `explaining_torch_errors`


# Words of errors that C++ raises where the user's code calls it, without a frame of torch.
_NUMPY = "'numpy.ndarray' and 'FakeTensor'"
_SUBCLASS = "Creating a new Tensor subclass"

_HINTS: Hints = {  # also match `given`
    _NUMPY: (
        "a tensor has no values for numpy while the model is compiled",
        "compute with tensors: torch.from_numpy(array)",
    ),
    _SUBCLASS: (
        "forward makes or uses a tensor of a subclass, and operations are recorded on plain tensors only",
        "leave the subclass out of forward, or wrap what forward returns; `value.as_subclass(torch.Tensor)` before the"
        " call makes a constant plain",
    ),
    **HINTS_OF_VALUES,
    "more than 1 value per channel": (
        "batch normalization in training needs two values or more for each channel",
        "micro-batches of two rows or more: poptorch.DataLoader(options, dataset, batch_size=2)",
    ),
    "not NoneType": (
        "an argument of the operation is None: perhaps an optional argument of forward that the call leaves out",
        "pass this argument in the call of the model",
    ),
    r"must be Tensor, not (list|tuple|dict)[\s\S]*\[[^]]+\]: torch\.": (
        "an argument of forward is a list or dictionary of tensors, and the operation takes one tensor",
        "pass the tensors as separate arguments: model(*batch), of a dictionary model(**batch)",
    ),
    "not DataLoader": ("a call takes one batch", "for batch in loader: model(*batch)"),
    "must be Tensor, not|must be tuple of Tensors, not|must be Tensor or|received an invalid combination": (
        "an argument that is no tensor is a constant of the compiled model",
        "pass tensors: torch.from_numpy(array), torch.tensor(numbers)",
    ),
    "devices,? (meta and cpu|cpu, meta|meta, cpu)": (
        "under torch.func.vmap torch's forward-mode derivatives make tensors that the recording does not know",
        "use reverse mode: torch.func.jacrev(torch.func.jacrev(f)) in place of torch.func.hessian(f)",
    ),
    "makes a tensor on|cuda|CUDA": (
        "the options say where a compiled model runs, and its tensors are there already",
        "leave `.cuda()` and `.to(device)` out of forward",
    ),
    "fake impl|UnsupportedOperator|fake tensor": (
        "torch does not know which shapes the operation returns",
        "register them with torch.library.register_fake, or call the operation by poptorch.CPU",
    ),
    "data pointer|doesn't have storage|'meta' device|[Mm]eta tensor|sparse|Sparse": (
        "the operation reads memory, and tensors have none while the model is compiled; or it is none of dense tensors",
        "compute with other operations on dense tensors, or on the host: poptorch.CPU(function, name)",
    ),
    ROWS_DIFFER: (
        "the arguments have different numbers of rows in a micro-batch",
        "pass as many rows of each, such as a label for each image",
    ),
    "same reduction dim|shapes cannot be multiplied": (
        "the last dimension of an argument is not the number of features that the layer takes",
        "such as `images.flatten(1)` for images that are rows of a linear layer; or another order of the arguments",
    ),
    "": (  # all others
        "torch refuses this operation on tensors of such shapes and types",
        "compare the shapes and types that forward was given with those that this line takes; `model(*micro_batch)` in"
        " plain PyTorch shows the same",
    ),
}


@contextlib.contextmanager
def explaining_torch_errors(given: str) -> Iterator[None]:
    """Raise CaptureError, with an explanation, in place of errors that torch raises in the body (not the user's code).

    Args: given: a description of forward's arguments, for the message; has the words `ROWS_DIFFER` if so
    """
    before, FAKE_TENSOR_LOG.disabled = FAKE_TENSOR_LOG.disabled, True
    try:
        yield
    except VALUE_READS as error:
        why = f"the shape of what {error.func} returns depends on data"
        if error.func is torch.ops.aten._local_scalar_dense.default:
            why = "only constants have the value that `tensor.item()`, `.tolist()` or `if tensor:` needs (or one_hot"
            why += " without num_classes: num classes must be specified)"
        raise CaptureError(
            f"{user_line(error)}: the forward reads a value out of a tensor, which has none while the model is"
            f" compiled\n  why: one graph is compiled for all inputs, and {why}\n"
            "  fix: compute with tensors (torch.where, masks that keep the shape; in inference poptorch.cond), or"
            " pass the number as a Python argument of forward; to print it, poptorch.ipu_print_tensor(tensor)\n"
            "  a layer that initializes itself by its first batch: keep its flag as a Python bool, and run the model"
            " once in plain PyTorch, `model(*micro_batch)`, before it is wrapped"
        ).with_traceback(error.__traceback__) from None
    except _ERROR_CLASSES as error:
        *_, innermost = traceback.extract_tb(error.__traceback__)
        is_raised_by_torch = innermost.filename.startswith((TORCH, _PANDO_MODES)) or any(
            words in str(error) for words in (_NUMPY, _SUBCLASS)
        )
        if isinstance(error, (Error, RecursionError)) or not is_raised_by_torch:
            raise
        words = f"{type(error).__name__}: {error}".partition(" You may have run into this message")[0]
        raise _capture_error_class(next(cls for cls in _ERROR_CLASSES if isinstance(error, cls)))(
            f"{user_line(error)}: torch fails in the forward: {words}\n"
            f"  forward was given {given or 'no arguments'}" + hint_for(f"{words}\n{given}", _HINTS)
        ).with_traceback(error.__traceback__) from None
    finally:
        FAKE_TENSOR_LOG.disabled = before


@functools.cache
def _capture_error_class(cls: type[Exception]) -> type[CaptureError]:
    """Return a class derived from CaptureError and `cls`, so that `except cls` also catches its errors."""
    return type("CaptureError", (CaptureError, cls), {"__module__": CaptureError.__module__})
