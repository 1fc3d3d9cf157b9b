"""Groups of an optimizer, and the parameters in a model, may change between calls: as in plain PyTorch."""

import parity_runs
import pytest
import torch
from test_any_optimizer import ACCUMULATION, ARGUMENTS, REFUSED, ROWS, Lion
from torch import nn
from torch.nn.utils import prune

import poptorch

KINDS = ("SGD", "AdamW", "Adadelta", "Lion")  # torch's, and one of the user
LEFT_OUT = (
    {"Adagrad"} if torch.__version__.startswith("2.10.") else set()
)  # it makes no state for a new group
OPTIMIZERS = [
    *KINDS,
    *sorted(ARGUMENTS.keys() - REFUSED.keys() - {*KINDS} - LEFT_OUT),
    "poptorch.LAMB",
    "poptorch.AdamW",
]


class Square(nn.Module):
    """Layers of one shape, two of them with one weight. Only matrices, for Muon."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.d, self.e = nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False)
        self.d.weight = self.c.weight

    def forward(self, x, target):
        output = self.e(torch.tanh(self.d(self.c(torch.tanh(self.b(self.a(x)))))))
        return output, nn.functional.mse_loss(output, target)

    @staticmethod
    def data(rows):
        return [torch.randn(rows, 4), torch.randn(rows, 3)]


def made_optimizer(name, groups):
    if name == "Lion":
        return Lion(groups)
    if name.startswith("poptorch."):
        return getattr(poptorch.optim, name.removeprefix("poptorch."))(groups, lr=0.05)
    return getattr(torch.optim, name)(groups, **ARGUMENTS[name])


def add_a_group(model, optimizer):
    optimizer.add_param_group({"params": [model.e.weight], "lr": 0.01})


def take_a_parameter_out(model, optimizer):
    del optimizer.param_groups[0]["params"][1]


def take_a_group_out(model, optimizer):
    del optimizer.param_groups[0]


def move_a_parameter(model, optimizer):
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def swap_layers(model, optimizer):
    model.a, model.b = model.b, model.a


def swap_parameters_of_groups(model, optimizer):
    model.b.weight, model.c.weight = model.c.weight, model.b.weight


def untie(model, optimizer):
    model.d.weight = nn.Parameter(model.c.weight.detach() * 0.5)


def untie_and_add_a_group(model, optimizer):
    untie(model, optimizer)
    optimizer.add_param_group({"params": [model.d.weight]})


def tie(model, optimizer):
    model.b.weight = model.a.weight


def replace_and_add_a_group(model, optimizer):
    model.a.weight = nn.Parameter(torch.ones(4, 4) / 4)
    optimizer.add_param_group({"params": [model.a.weight]})


def mask_a_parameter(model, optimizer):
    prune.custom_from_mask(model.a, "weight", torch.eye(4))


def unmask_a_parameter(model, optimizer):
    """The same parameter at the same place, with its first name again."""
    prune.remove(model.a, "weight")


CHANGES = [
    mask_a_parameter,
    add_a_group,
    take_a_parameter_out,
    take_a_group_out,
    move_a_parameter,
    swap_layers,
    swap_parameters_of_groups,
    untie,
    untie_and_add_a_group,
    tie,
    replace_and_add_a_group,
]


class Trainings:
    """One training by an executor and one in plain PyTorch, which must be equal after each update."""

    def __init__(self, name, **options):
        self.models = [parity_runs.made(Square) for _ in range(2)]
        self.optimizers = [
            made_optimizer(name, [{"params": [m.a.weight, m.b.weight]}, {"params": [m.c.weight], "lr": 0.02}])
            for m in self.models
        ]
        own = parity_runs.options(accumulation=ACCUMULATION, **options)
        self.executor = poptorch.trainingModel(self.models[0], own, self.optimizers[0])
        self.data = iter(parity_runs.batches(self.models[0], 12, ACCUMULATION * ROWS))

    def change(self, change):
        for pair in zip(self.models, self.optimizers, strict=True):
            change(*pair)

    def step(self):
        rows, (_, model), (_, optimizer) = next(self.data), self.models, self.optimizers
        losses = self.executor(*rows)[1]
        model.zero_grad()  # the optimizer may not hold all of its parameters, and others instead
        expected = parity_runs.plain_update(model, optimizer, parity_runs.cut(ROWS, *rows))
        assert torch.equal(losses, torch.stack(expected))
        states = [optimizer.state for optimizer in self.optimizers]
        assert len(states[0]) == len(states[1])
        for ours, plain in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.equal(ours, plain)
            found, wanted = states[0].get(ours, {}), states[1].get(plain, {})
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_change_counts_at_the_next_call_as_in_plain_pytorch(name, change):
    both = Trainings(name)
    both.step()
    both.change(change)
    both.step()
    both.step()


@pytest.mark.parametrize("name", ["SGD", "Adadelta"])
def test_changes_follow_each_other(name):
    both = Trainings(name)
    both.step()
    masks = mask_a_parameter, unmask_a_parameter
    for change in (
        *masks,
        add_a_group,
        swap_layers,
        move_a_parameter,
        swap_parameters_of_groups,
        take_a_group_out,
    ):
        both.change(change)
        both.step()


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adadelta"])
def test_a_saved_executor_goes_on_with_the_groups_of_the_program_that_loads_it(name, tmp_path):
    both = Trainings(name)
    both.step()
    both.change(add_a_group)
    both.step()
    both.executor.save(tmp_path / "saved.poptorch")
    model = both.models[0]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    both.executor.destroy()
    both.models[0] = parity_runs.made(Square)
    both.models[0].load_state_dict(weights)
    groups = [
        {"params": [getattr(both.models[0], key).weight for key in keys], "lr": group["lr"]}
        for keys, group in zip(("ab", "c", "e"), both.optimizers[0].param_groups, strict=True)
    ]
    own = parity_runs.options(accumulation=ACCUMULATION)
    few = made_optimizer(name, groups[:2])
    both.executor = poptorch.trainingModel(both.models[0], own, few)
    with pytest.raises(
        poptorch.Error, match=r"(?s)state of e\.weight, which the optimizer does not hold.*fix:"
    ):
        both.executor.loadExecutable(tmp_path / "saved.poptorch")
    both.executor.destroy()
    both.optimizers[0] = made_optimizer(name, groups)
    both.executor = poptorch.trainingModel(both.models[0], own, both.optimizers[0])
    both.executor.loadExecutable(tmp_path / "saved.poptorch")
    both.step()
