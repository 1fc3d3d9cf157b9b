"""Blocks that are opened and ended by hand, and how annotated models print."""

import pytest
import torch
from torch import nn

import poptorch


def run(forward, *inputs):
    return poptorch.inferenceModel(forward)(*inputs)


def test_a_block_that_was_started_can_be_ended():
    def forward(x):
        poptorch.Block.start("a", ipu_id=0)
        x = x + 1
        poptorch.Block.end()
        with poptorch.Block("b", ipu_id=0):
            return x * 2

    assert run(forward, torch.zeros(1)).item() == 2
    assert forward(torch.zeros(1)).item() == 2


def test_what_runs_after_the_end_belongs_to_no_block():
    def forward(x):
        poptorch.Block.start("a", ipu_id=0)
        x = x + 1
        poptorch.Block.end()
        return x * 2

    with pytest.raises(poptorch.Error, match="No active Block, all the ops must belong to a Block") as caught:
        run(forward, torch.zeros(1))
    assert f"{__file__}:{forward.__code__.co_firstlineno + 4}" in str(caught.value)


def test_a_block_in_a_block_ends_the_outer_one():
    def forward(x):
        with poptorch.Block("a", ipu_id=0):
            with poptorch.Block("b", ipu_id=0):
                x = x + 1
            return x * 2

    with pytest.raises(poptorch.Error, match="No active Block, all the ops must belong to a Block"):
        run(forward, torch.zeros(1))


def test_print_shows_where_blocks_begin(capsys):
    model = nn.Sequential(poptorch.BeginBlock(nn.Linear(2, 2), "A", ipu_id=3), nn.ReLU())
    poptorch.print(model)
    assert capsys.readouterr().out == (
        "Sequential(\n"
        "  (0): BeginBlock(user_id=A, ipu_id=3): Linear(in_features=2, out_features=2, bias=True)\n"
        "  (1): ReLU()\n"
        ")\n"
    )
    assert "BeginBlock" not in repr(model)
    assert "BeginBlock(user_id=A, ipu_id=3)" in repr(poptorch.inferenceModel(model))


def test_a_model_with_marks_is_loaded_with_weights_only(tmp_path):
    model = nn.Sequential(poptorch.BeginBlock(nn.Linear(2, 2), "a", 1))
    torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear]):
        loaded = torch.load(tmp_path / "model.pt")
    with pytest.raises(
        poptorch.Error, match="already been assigned to a block: BeginBlock\\(user_id=a, ipu_id=1"
    ):
        poptorch.BeginBlock(loaded[0])
