"""Float types: layers run in the float type of their input, where plain PyTorch raises an error."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .graph_recorder import map_leaves

# The weights of a layer are cast to the float type of its input. So a half input through float32 weights gives a half
# output, where plain PyTorch raises an error. All other operations follow PyTorch's own promotion.
_BY_FIRST = {  # by owner, names of functions: all tensors are cast to the dtype of the first
    functional: """
        linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm group_norm
        rms_norm prelu multi_head_attention_forward scaled_dot_product_attention
    """,
    torch: """
        matmul mm bmm mv dot inner tensordot layer_norm group_norm lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """,
    Tensor: "matmul __matmul__ mm bmm mv dot",
}
_BY_SECOND = {torch: "addmm addmv baddbmm addbmm einsum", Tensor: "addmm addmv baddbmm addbmm"}
# From a function to the position of the tensor that gives the dtype.
_LAYERS: dict[Any, int] = {
    getattr(owner, name): position
    for position, names_of in enumerate((_BY_FIRST, _BY_SECOND))
    for owner, names in names_of.items()
    for name in names.split()
}
_STATISTICS = (functional.batch_norm, functional.instance_norm)


def call_with_matching_types(func: Any, args: Any, kwargs: Any) -> Any:
    """Return `func(...)`. For layers, norms and products, first match the dtypes of the float tensors."""
    if func in _STATISTICS:
        return _call_norm(func, args, kwargs)
    position = _LAYERS.get(func)
    if position is not None:
        like = args[position] if position < len(args) else next(iter(kwargs.values()), None)
        if isinstance(like, list | tuple) and like:  # einsum takes a list, too
            like = like[0]
        if isinstance(like, Tensor) and like.is_floating_point():
            args, kwargs = map_leaves(lambda value: _cast(value, like.dtype), (args, kwargs))
    return func(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    has_other_dtype = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype
    return value.to(dtype) if has_other_dtype else value


def _call_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a batch or instance norm, in float32 if dtypes differ, cast to the input's dtype; update statistics."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if len({value.dtype for value in tensors.values()}) <= 1:
        return func(*args, **kwargs)
    in_float32 = {name: value.float() for name, value in tensors.items()}
    result = func(**{**given, **in_float32})
    for name in ("running_mean", "running_var"):
        if name in tensors and in_float32[name] is not tensors[name]:
            tensors[name].copy_(in_float32[name])
    return result.to(tensors["input"].dtype)
