"""Marks from outside: names, ranges, wildcards and classes place the modules of a model that one did not write."""

import copy

import pytest
import torch
from torch import nn

import poptorch
from poptorch.annotating.blocks import find_begin_hook

ROWS, ACCUMULATION = 2, 9


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.dense(x).tanh()


class Foreign(nn.Module):
    """A model as a library has it: no marks, a list of layers, a loss."""

    def __init__(self, layers=6):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(4, 4)

    def forward(self, x, y):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), y)


def places(model):
    """{name of a module: (its block, its ipu)}"""
    hooks = {name: find_begin_hook(module) for name, module in model.named_modules()}
    return {name: (hook.user_id, hook.ipu_id) for name, hook in hooks.items() if hook is not None}


def options(strategy=None, accumulation=ACCUMULATION):
    opts = poptorch.Options().showCompilationProgressBar(False)
    opts.Training.gradientAccumulation(accumulation)
    return opts if strategy is None else opts.setExecutionStrategy(strategy)


def batch():
    torch.manual_seed(1)
    return torch.randn(ROWS * ACCUMULATION, 4), torch.randn(ROWS * ACCUMULATION, 4)


def stages(model, opts=None):
    """[(ipu, blocks)]"""
    return [
        (ipu, blocks)
        for _, ipu, blocks, _ in poptorch.describe(model, options() if opts is None else opts, batch()).stages
    ]


def trained(model, opts=None):
    torch.manual_seed(0)
    executor = poptorch.trainingModel(
        model, options() if opts is None else opts, torch.optim.AdamW(model.parameters())
    )
    for _ in range(2):
        executor(*batch())
    executor.destroy()
    return list(model.state_dict().values())


def test_an_earlier_range_precedes_a_later_wildcard_and_an_ipu_may_come_again():
    model = Foreign()
    assert poptorch.annotate(model, {"layers.0-2": 0, "layers.*": 1, "head": 0}) is model
    assert places(model) == {
        **{f"layers.{i}": ("layers.0-2", 0) for i in (0, 1, 2)},
        **{f"layers.{i}": ("layers.*", 1) for i in (3, 4, 5)},
        "head": ("head", 0),
    }
    assert stages(model) == [(0, "no block, layers.0-2"), (1, "layers.*"), (0, "head")]


def test_wildcards_and_classes_get_the_modules_that_are_left():
    marks: dict[str | type, int] = {"layers.3": 2, "layers.5": 3, "layers.0-1": 1, "layers.*": 0, Layer: 4}
    with pytest.raises(poptorch.Error, match="place the same module"):
        poptorch.annotate(Foreign(), marks)
    del marks[Layer]
    assert [ipu for _, ipu in places(poptorch.annotate(Foreign(), marks)).values()] == [1, 1, 0, 2, 0, 3]


def test_a_class_places_each_of_its_modules_and_a_wildcard_ends_at_a_dot():
    assert list(places(poptorch.annotate(Foreign(2), {Layer: 1})).values()) == [("Layer", 1)] * 2
    assert list(places(poptorch.annotate(Foreign(2), {"*": 1}))) == ["embed", "layers", "head"]
    assert list(places(poptorch.annotate(Foreign(2), {"layers.*.dense": 1}))) == [
        "layers.0.dense",
        "layers.1.dense",
    ]


def test_layers_per_ipu_counts_the_layers_of_the_one_stack():
    model = poptorch.annotate(Foreign(), layers_per_ipu=[0, 3, 1, 2])
    assert list(places(model).values()) == [
        *[("layers.0 to layers.2", 1)] * 3,
        ("layers.3", 2),
        *[("layers.4 to layers.5", 3)] * 2,
    ]


def test_layers_per_ipu_takes_all_stacks_in_turn_where_one_is_not_enough():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Foreign(2), Foreign(3)

    model = poptorch.annotate(Two(), layers_per_ipu=[4, 1])
    assert [ipu for _, ipu in places(model).values()] == [0, 0, 0, 0, 1]
    model = poptorch.annotate(Two(), layers_per_ipu=[2, 1])
    assert list(places(model)) == [f"decoder.layers.{i}" for i in range(3)]


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"layer.0": 0}, "no module is named 'layer.0'; did you mean 'layers.0'"),
        ({"encoder": 0}, r"(?s)no module is named 'encoder'.*the model's modules: .*layers.0, "),
        ({"layer.*": 0}, r"no module is named 'layer.\*'; did you mean 'layers.\*'"),
        ({"layers.4-6": 0}, "no module is named 'layers.6', of 'layers.4-6'; did you mean 'layers.5'"),
        ({nn.Conv2d: 0}, "no module is a Conv2d; there are Foreign, Layer, Linear, ModuleList"),
        (
            {"layers.0-2": 0, "layers.2-3": 1},
            "'layers.0-2', and after it 'layers.2-3', place the same module",
        ),
        ({"layers.*": 0, "layers.2": 1}, r"'layers.\*', and after it 'layers.2', place the same module"),
        ({"layers.0-5": 0, "layers.*": 1}, r"'layers.0-5', and after it 'layers.\*', place the same module"),
        ({"head": -1}, "the ipu_id of a block takes an int from 0; found -1"),
    ],
)
def test_keys_that_do_not_fit_are_errors_and_mark_nothing(marks, message):
    model = Foreign()
    with pytest.raises(poptorch.Error, match=message):
        poptorch.annotate(model, marks)
    assert places(model) == {}


def test_layers_are_in_lists_and_in_sequences_that_repeat():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
            self.blocks = nn.ModuleList([Foreign(2), Layer()])
            self.tail = nn.Sequential(Layer(), nn.ReLU(), Layer())

    model = poptorch.split(Mixed(), ipus=4)
    assert list(places(model)) == ["blocks.0", "blocks.1", "tail.0", "tail.2"]


def test_counts_that_fit_no_stack_are_an_error_with_the_stacks():
    with pytest.raises(poptorch.Error, match=r"places 5 layers; .* layers are layers \(6 layers\)"):
        poptorch.annotate(Foreign(), layers_per_ipu=[3, 2])
    with pytest.raises(poptorch.Error, match="its repeated layers are none"):
        poptorch.split(nn.Linear(4, 4), 2)
    with pytest.raises(poptorch.Error, match="either marks or layers_per_ipu"):
        poptorch.annotate(Foreign(), {})


def test_a_module_that_begins_a_block_already_is_an_error():
    model = poptorch.annotate(Foreign(), {"layers.1": 0})
    with pytest.raises(poptorch.Error, match="already been assigned to a block"):
        poptorch.annotate(model, {"layers.*": 0})
    assert list(places(model)) == ["layers.1"]


def test_a_strategy_knows_the_keys_as_blocks():
    model = poptorch.annotate(Foreign(), {"layers.0-2": 0, "layers.*": 1, "head": 0})
    opts = options(poptorch.PipelinedExecution(["layers.0-2"], ["layers.*", "head"]))
    with pytest.raises(poptorch.Error, match="can't be on ipu 1 and on ipu 0"):
        stages(model, opts)
    strategy = poptorch.ShardedExecution("layers.0-2", "layers.*", "head")
    assert stages(model, options(strategy)) == [(0, "no block, layers.0-2"), (1, "layers.*"), (0, "head")]


def test_split_and_auto_balance_are_all_that_a_user_writes():
    model, unmarked = poptorch.split(Foreign(), ipus=3), Foreign()
    balanced = options(poptorch.PipelinedExecution(poptorch.AutoBalance(3)))
    for found in (stages(model), stages(unmarked, balanced)):
        assert [ipu for ipu, _ in found] == [0, 1, 2]
        assert ", ".join(blocks for _, blocks in found) == "no block, " + ", ".join(
            f"layers.{i}" for i in range(6)
        )
    assert "AutoBalance" in repr(poptorch.trainingModel(model, options()).options)
    assert places(unmarked) == {}


def test_split_runs_its_stages_in_turns_where_a_pipeline_would_not_be_full():
    torch.manual_seed(0)
    model, same = Foreign(), Foreign()
    same.load_state_dict(model.state_dict())
    found = trained(poptorch.split(model, ipus=3), options(accumulation=1))
    assert all(map(torch.equal, found, trained(same, options(accumulation=1))))


def test_or_sharded_of_the_default_strategy_holds_for_the_marks():
    model = poptorch.annotate(Foreign(), {"layers.0-2": 0, "layers.*": 1, "head": 0})
    with pytest.raises(poptorch.Error, match=r"number of pipeline stages \(5\)"):
        trained(model, options(accumulation=3))
    poptorch.removeBlocks(model)
    poptorch.annotate(model, {"layers.0-2": 0, "layers.*": 1, "head": 0})
    found = stages(model, options(poptorch.PipelinedExecution().orSharded(), accumulation=3))
    assert [ipu for ipu, _ in found] == [0, 1, 0]


def test_auto_balance_leaves_the_blocks_of_the_models_own_code_as_they_are():
    class Own(Foreign):
        def forward(self, x, y):
            with poptorch.Block("first"):
                for layer in self.layers[:4]:
                    x = layer(x)
            with poptorch.Block("last"):
                for layer in self.layers[4:]:
                    x = layer(x)
                return nn.functional.mse_loss(self.head(x), y)

    found = stages(Own(), options(poptorch.PipelinedExecution(poptorch.AutoBalance(2))))
    assert found == [(0, "first"), (1, "last")]


def test_remove_blocks_takes_all_off():
    model = poptorch.split(Foreign(), ipus=3)
    poptorch.removeBlocks(model)
    assert places(model) == {} and stages(model) == [(0, "no block")]


def test_the_bits_are_those_of_the_unmarked_model():
    torch.manual_seed(0)
    model = Foreign()
    plain = trained(copy.deepcopy(model))
    for mark in (
        lambda model: poptorch.annotate(model, {"layers.0-2": 0, "layers.*": 1, "head": 0}),
        lambda model: poptorch.annotate(model, layers_per_ipu=[3, 3]),
        lambda model: poptorch.split(model, 2),
    ):
        assert all(map(torch.equal, plain, trained(mark(copy.deepcopy(model)))))


def test_a_block_that_only_the_strategy_has_is_a_warning(caplog):
    model = poptorch.annotate(Foreign(), {"layers.3": 1})
    strategy = poptorch.ShardedExecution("layers.3", "haed")
    batch = torch.randn(ROWS * ACCUMULATION, 4), torch.randn(ROWS * ACCUMULATION, 4)
    poptorch.trainingModel(model, options(strategy)).compile(*batch)
    assert "forward has no operation: 'haed'; blocks of forward: 'layers.3'" in caplog.text
