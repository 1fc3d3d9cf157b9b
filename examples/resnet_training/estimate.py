"""What a training will need, said before anything is compiled, from one micro-batch in plain PyTorch."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from parts import Layout
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def lines(model: nn.Module, data: Any, layout: Layout) -> Iterator[str]:
    """Samples, memory and time of the first call on this machine."""
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    model = copy.deepcopy(model).train()  # its statistics move
    for _ in range(2):  # the first warms up
        kept.clear()
        started = time.perf_counter()
        with saved_tensors_hooks(keep, lambda value: value):
            loss = model(*blank(data, layout.micro))[0]
        loss.backward()
        seconds = time.perf_counter() - started
    cores = torch.get_num_threads()
    weights = sum(weight.nbytes for weight in model.parameters())
    micro_batches = layout.replicas * layout.accumulation * layout.iterations
    under_way = min(cores, micro_batches)
    memory = sum(kept.values()) * under_way + 5 * weights * layout.replicas
    yield (
        f"A call takes {layout.samples} images, about {_spoken(seconds * micro_batches)} on {cores} cores and"
        f" {memory / 2**30:.2f} GiB in each instance (by one micro-batch of {layout.micro})"
    )


def blank(data: Any, rows: int) -> tuple[Tensor, Tensor]:
    """A batch to compile with. It takes no memory: numpy's zeros are read-only pages until somebody writes."""
    images = torch.from_numpy(np.zeros((rows, *data.shape), torch.empty(0, dtype=data.form).numpy().dtype))
    return images, torch.from_numpy(np.zeros(rows, np.int64))


def _spoken(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
