"""Register the shorthands of this package in `torch.ops.poptorch`, under the names that programs use.

Marks and computed operations are registered in the modules that define them.
"""

import json

import torch
from torch import Tensor

from popengine.errors import Error

from ..annotating.blocks import Block
from . import host, marks, tensor_ops
from .library import register_shorthand

_CASTS = {"FLOAT": torch.float32, "FLOAT16": torch.float16}
_REDUCTIONS = ("sum", "mean", "none")


def _internal_cast(tensor: Tensor, dtype: str) -> Tensor:
    if dtype not in _CASTS:
        raise Error(f"internal_cast: the type must be one of {', '.join(_CASTS)}; found {dtype!r}")
    return tensor.to(_CASTS[dtype])


def _identity_loss(tensor: Tensor, reduction: int) -> Tensor:
    assert 0 <= reduction < len(_REDUCTIONS), f"Unsupported reduction type! found {reduction}"
    return marks.identity_loss(tensor, _REDUCTIONS[reduction])


def _custom_operation(
    inputs: list[Tensor], name: str, domain: str, version: int, outputs: list[Tensor], attributes: str
) -> list[Tensor]:
    given = json.loads(attributes) if attributes else None
    return host.custom_op(inputs, name, domain, version, outputs, given)


register_shorthand("internal_cast(Tensor input, str dtype) -> Tensor", _internal_cast)
register_shorthand("push_name_scope(str name) -> ()", marks.push_name_scope)
register_shorthand("pop_name_scope() -> ()", marks.pop_name_scope)
register_shorthand("set_attribute(str attribute, str key, str value) -> ()", marks.set_attribute)
register_shorthand("clear_attribute(str attribute, str key) -> ()", marks.clear_attribute)
register_shorthand(
    "begin_ipu_block(int stage, int phase, int ipu) -> ()",
    lambda stage, phase, ipu: Block.start(str(stage), ipu),
)
register_shorthand("end_ipu_block() -> ()", Block.end)
register_shorthand("identity_loss(Tensor input, int reduction) -> Tensor", _identity_loss)
register_shorthand(
    "dynamic_slice(Tensor input, int dim, Tensor start, int size, int step) -> Tensor",
    tensor_ops.dynamic_slice,
)
register_shorthand(
    "dynamic_update(Tensor input, Tensor src, int dim, Tensor start, int size) -> Tensor",
    tensor_ops.dynamic_update,
)
register_shorthand(
    "custom_operation(Tensor[] inputs, str name, str domain, int version, Tensor[] outputs, str attributes) ->"
    " Tensor[]",
    _custom_operation,
)
# No effect: the group of a parameter comes from the optimizer.
register_shorthand("optimizer_group(int group, Tensor[] tensors) -> ()", lambda group, tensors: None)
