"""Register the shorthands: operations of `torch.ops.poptorch` that call functions of this package.

The captured graph contains the operations that these functions call, and not the shorthand itself.

Marks and computed operations are registered in the modules that define them.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error

from ..annotating.blocks import Block
from ..checks import checked
from . import marks
from .ctc import REDUCTIONS
from .host import custom_op
from .library import LIBRARY
from .tensor_ops import dynamic_slice, dynamic_update

_CASTS = {"FLOAT": torch.float32, "FLOAT16": torch.float16}


def _internal_cast(tensor: Tensor, dtype: str) -> Tensor:
    return tensor.to(_CASTS[checked("internal_cast", dtype, tuple(_CASTS), Error)])


def _identity_loss(tensor: Tensor, reduction: int) -> Tensor:
    return marks.identity_loss(tensor, dict(enumerate(REDUCTIONS)).get(reduction, str(reduction)))


def _begin_block(stage: int, phase: int, ipu: int) -> None:
    Block.start(str(stage), ipu)


def _call_custom_op(
    inputs: list[Tensor], name: str, domain: str, version: int, outputs: list[Tensor], attributes: str
) -> list[Tensor]:
    return custom_op(inputs, name, domain, version, outputs, json.loads(attributes) if attributes else None)


_SHORTHANDS: dict[str, Callable[..., Any]] = {
    "internal_cast(Tensor input, str dtype) -> Tensor": _internal_cast,
    "push_name_scope(str name) -> ()": marks.push_name_scope,
    "pop_name_scope() -> ()": marks.pop_name_scope,
    "set_attribute(str attribute, str key, str value) -> ()": marks.set_attribute,
    "clear_attribute(str attribute, str key) -> ()": marks.clear_attribute,
    "begin_ipu_block(int stage, int phase, int ipu) -> ()": _begin_block,
    "end_ipu_block() -> ()": Block.end,
    "identity_loss(Tensor input, int reduction) -> Tensor": _identity_loss,
    "dynamic_slice(Tensor input, int dim, Tensor start, int size, int step) -> Tensor": dynamic_slice,
    "dynamic_update(Tensor input, Tensor src, int dim, Tensor start, int size) -> Tensor": dynamic_update,
    "custom_operation(Tensor[] inputs, str name, str domain, int version, Tensor[] outputs, str attributes)"
    " -> Tensor[]": _call_custom_op,
    # No effect: the group of a parameter comes from the optimizer.
    "optimizer_group(int group, Tensor[] tensors) -> ()": lambda group, tensors: None,
}
for _schema, _function in _SHORTHANDS.items():
    LIBRARY.impl(LIBRARY.define(_schema), _function, "CompositeImplicitAutograd")
