"""Weights of ipus of other processes: no function returns a value, and the same object gets its memory back."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from popengine.errors import Error
from popengine.run.elsewhere import Mark, mark_of, set_mark, swap_memory

READS = {
    "item": lambda w: w[0, 0].item(),
    "float": lambda w: float(w.detach().view(-1)[0]),
    "numpy": lambda w: w.detach().numpy(),
    "asarray": lambda w: np.asarray(w.data),
    "tolist": lambda w: w.tolist(),
    "sum": lambda w: w.sum(),
    "compared": lambda w: (w == w).all(),
    "equal": lambda w: torch.equal(w, w),
    "clone": lambda w: w.data.clone(),
    "cpu": lambda w: w.detach().cpu(),
    "copied to": lambda w: torch.zeros(3, 3).copy_(w),
    "out": lambda w: torch.add(w, 1, out=torch.zeros(3, 3)),
    "a layer": lambda w: functional.linear(torch.ones(2, 3), w),  # torch itself returns unwritten memory
    "a product": lambda w: torch.ones(2, 3) @ w,
    "deepcopy": lambda w: copy.deepcopy(w),
    "pickle": lambda w: pickle.dumps(w),
}


def parameter_elsewhere():
    layer = nn.Linear(3, 3)
    swap_memory("layer.weight", layer.weight, layer.weight.detach().to("meta"), elsewhere=True)
    return layer.weight


@pytest.mark.parametrize("read", READS)
def test_reading_a_weight_of_another_process_is_an_error_with_its_name(read):
    with pytest.raises(Error, match=r"layer.weight has no value in this process(.|\n)*model.state_dict\(\)"):
        READS[read](parameter_elsewhere())


def test_a_weight_of_another_process_has_attributes_and_takes_writes():
    weight = parameter_elsewhere()
    assert weight.is_meta and isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
    assert (weight.shape, weight.dtype, weight.numel(), len(weight)) == ((3, 3), torch.float32, 9, 3)
    assert "meta" in repr(weight)
    with torch.no_grad():
        weight.mul_(2)
        weight[0] = 1
    weight.data.copy_(torch.ones(3, 3))
    with pytest.raises(RuntimeError, match="size of tensor"):
        weight.data.copy_(torch.ones(4, 3))


def test_a_weight_gets_its_memory_back_in_the_same_object():
    norm = nn.BatchNorm1d(3)
    for key, value in {"weight": norm.weight, "mean": norm.running_mean}.items():
        kind, before, mark = type(value), value.detach().clone(), Mark(0, value)
        set_mark(value, mark)
        with torch.no_grad():
            value.mul_(1)
        swap_memory(key, value, value.detach().to("meta"), elsewhere=True)
        swap_memory(key, value, before)
        assert type(value) is kind and torch.equal(value, before) and value.is_leaf
        assert mark_of(value) is mark and mark.writes(value) == 1
    assert norm.weight.requires_grad
    assert norm(torch.ones(2, 3)).shape == (2, 3)
