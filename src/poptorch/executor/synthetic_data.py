"""Synthetic data: inputs that are made up once, on the device, so that runs measure computation alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from popengine.settings import Counts

_NORMAL, _UNIFORM = 2, 3  # popart.SyntheticDataMode; 1 is zeros


def synthetic_inputs(tensors: Sequence[Tensor], mode: int, counts: Counts) -> list[Tensor]:
    """One made-up micro-batch for each input, seen as a whole combined batch without being copied.

    Integers are zero, since they may be indices.
    """
    made = []
    for tensor in tensors:
        rows = tensor.shape[:1] and (tensor.shape[0] // counts.product,)
        value = torch.zeros((*rows, *tensor.shape[1:]), dtype=tensor.dtype)
        if value.is_floating_point() and mode == _NORMAL:
            value.normal_()
        elif value.is_floating_point() and mode == _UNIFORM:
            value.uniform_()
        made.append(value.expand(counts.product, *value.shape).reshape(tensor.shape))
    return made
