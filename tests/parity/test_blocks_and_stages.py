"""Models whose data does not simply run from block to block: skips, returns, shared weights, replicas."""

import pytest
import torch
from parity_runs import LAYOUTS, Trained, batches, cut, differing, options, plain, plain_update, trained
from torch import nn
from torch.nn import functional

import poptorch

SIZE = 6


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Rows(nn.Module):
    """Four linear layers; subclasses say how data runs through them."""

    def __init__(self):
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Linear(SIZE, SIZE))

    def through(self, x):
        raise NotImplementedError

    def forward(self, x, target):
        output = self.through(x)
        return output, functional.mse_loss(output, target)

    @staticmethod
    def data(rows):
        return [torch.randn(rows, SIZE), torch.randn(rows, SIZE)]


class Skips(Rows):
    def through(self, x):
        a = torch.tanh(self.a(x))
        b = torch.relu(self.b(a))
        c = self.c(a + b)
        return self.d(c * b) + a + x


class UsesOneWeightTwice(Rows):
    def through(self, x):
        return self.d(
            functional.linear(self.c(self.b(torch.tanh(self.a(x)))), self.a.weight) @ self.b.weight.t()
        )


class SumsGradientsOfFourStages(Rows):
    def through(self, x):
        parts = [x]
        for layer in (self.a, self.b, self.c, self.d):
            parts.append(torch.tanh(layer(sum(parts))))
        return sum(parts)


class WorksBeforeTheFirstBlock(Rows):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)

    def through(self, x):
        x = torch.relu(self.first(x * 2))
        return self.d(self.c(self.b(self.a(x))))


class LeavesAWeightUnused(Rows):
    def through(self, x):
        return self.d(self.b(self.a(x)).detach() + self.c(x))


MODELS = [Skips, UsesOneWeightTwice, SumsGradientsOfFourStages, WorksBeforeTheFirstBlock, LeavesAWeightUnused]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_equals_plain_pytorch_however_its_data_runs(model, layout):
    assert trained(model, sgd, LAYOUTS[layout](), updates=6).differs_from(plain(model, sgd, updates=6)) == []


class OpensABlockTwice(Rows):
    """Stage "a" runs twice before "b" takes over; with `Block`, since a BeginBlock is a layer's first use."""

    def through(self, x):
        with poptorch.Block("a"):
            x = self.a(x)
        with poptorch.Block("a"):
            x = torch.relu(self.b(x))
        poptorch.Block.start("b")
        return self.d(self.c(x))


class ReturnsToItsFirstIpu(Rows):
    def through(self, x):
        for number, layer in enumerate((self.a, self.b, self.c, self.d)):
            with poptorch.Block("ab"[number % 2], ipu_id=number % 2):
                x = torch.tanh(layer(x))
        return x

    def forward(self, x, target):
        output = self.through(x)
        with poptorch.Block("b"):
            return output, functional.mse_loss(output, target)


def test_a_pipeline_refuses_data_that_flows_back_and_names_the_way_out():
    user = _model(ReturnsToItsFirstIpu)
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu)
    executor = poptorch.trainingModel(user, options(strategy), sgd(user.parameters()))
    with pytest.raises(poptorch.Error, match="flows back from stage 1") as caught:
        executor(*ReturnsToItsFirstIpu.data(16))
    assert "AutoStage.AutoIncrement" in str(caught.value)
    assert "test_blocks_and_stages.py:" in str(caught.value)


class EntersFourBlocks(Rows):
    def through(self, x):
        for number, layer in enumerate((self.a, self.b, self.c, self.d)):
            poptorch.Block.start(f"block {number}", ipu_id=(0, 1, 2, 0)[number])
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(
    ("model", "strategy", "stages"),
    [
        (OpensABlockTwice, poptorch.PipelinedExecution("a", "b"), [(0, "a"), (1, "b")]),
        (
            ReturnsToItsFirstIpu,
            poptorch.ShardedExecution(poptorch.AutoStage.SameAsIpu),
            [(0, "a"), (1, "b"), (0, "a"), (1, "b")],
        ),
        (
            EntersFourBlocks,
            poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement),
            [(0, "block 0"), (1, "block 1"), (2, "block 2"), (0, "block 3")],
        ),
    ],
    ids=["opened twice", "by turns", "one stage each"],
)
def test_blocks_may_be_opened_again_and_return_to_an_ipu(model, strategy, stages):
    user = _model(model)
    executor = poptorch.trainingModel(user, options(strategy), sgd(user.parameters()))
    executor(*model.data(16))
    assert [(ipu, names) for _, ipu, names, _ in executor.plan.stages] == stages
    executor.destroy()
    assert _trained_as_marked(model, strategy).differs_from(plain(model, sgd, updates=6)) == []


# ---- replicas ---------------------------------------------------------------------------------------------


def test_replicas_draw_different_random_numbers():
    class Drops(Rows):
        def through(self, x):
            return functional.dropout(self.a(x), 0.5)

    user = _model(Drops)
    own = options(accumulation=1, replicas=2)
    executor = poptorch.trainingModel(user, own, sgd(user.parameters()))
    x, target = Drops.data(4)
    output, _ = executor(x[:2].repeat(2, 1), target)
    assert not torch.equal(output[:2] == 0, output[2:] == 0)


def _model(make):
    torch.manual_seed(0)
    return make()


def _trained_as_marked(make, strategy):
    """As `trained`, but the model has blocks of its own."""
    user = _model(make)
    data = batches(user, 6)
    executor = poptorch.trainingModel(user, options(strategy), sgd(user.parameters()))
    losses = torch.cat([executor(*rows)[1] for rows in data])
    executor.destroy()
    return Trained(losses, {name: value.clone() for name, value in user.state_dict().items()})


class NormedTwice(nn.Module):
    """One layer with running statistics that two blocks use, around a part of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x):
        with poptorch.Block("a"):
            x = self.norm(x)
        with poptorch.Block("b"):
            x = self.layer(x)
        with poptorch.Block("c"):
            x = self.norm(x * 2)
        with poptorch.Block("d"):
            return poptorch.identity_loss((self.layer(x) ** 2).mean(), "none")


@pytest.mark.parametrize("ipus", [(0, 1, 2, 3), (0, 1, 0, 1)])
@pytest.mark.parametrize(
    ("kind", "accumulation"),
    [(poptorch.ShardedExecution, 2), (poptorch.PipelinedExecution, 7)],
)
def test_stages_may_share_a_layer_with_buffers(kind, accumulation, ipus):
    """The first stage hands the buffer's old value on, and waits for the last stage of the micro-batch before."""
    size = 4 * accumulation
    x = torch.randn(size * 3, 3, generator=torch.Generator().manual_seed(1))
    found = {}
    for name in ("split", "whole", "plain"):
        torch.manual_seed(0)
        model = NormedTwice()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if name == "plain":
            for (update,) in cut(size, x):
                plain_update(model, optimizer, cut(4, update))
        else:
            stages = [poptorch.Stage(block).ipu(ipu) for block, ipu in zip("abcd", ipus, strict=True)]
            strategy = kind(*stages) if name == "split" else kind(poptorch.Stage(*"abcd"))
            own = options(strategy, accumulation=accumulation, iterations=3)
            poptorch.trainingModel(model, own, optimizer)(x)
        found[name] = {key: value.clone() for key, value in model.state_dict().items()}
    for name, value in found["whole"].items():
        assert torch.equal(value, found["split"][name]), name
        torch.testing.assert_close(value, found["plain"][name])


class Twice(Rows):
    """A network in stages "a" and "b" that is evaluated on its input, and again on `again(x)`, made in between."""

    again = staticmethod(lambda self, x: x)

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([1.0, 0.0] * (SIZE // 2)))

    def network(self, x):
        poptorch.Block.start("a")
        x = torch.tanh(self.b(torch.relu(self.a(x))))
        poptorch.Block.start("b")
        return self.d(torch.tanh(self.c(x)))

    def through(self, x):
        first = self.network(x)
        return first - self.network(type(self).again(self, x)) * 0.5


class Teaches(Twice):
    def through(self, x):
        with torch.no_grad():
            wanted = self.network(x)
        return self.network(x.flip(1)) - wanted


class Penalizes(Twice):
    def through(self, x):
        first = self.network(x)
        scale = torch.rand(len(x), 1) * 0 + 0.25
        mixed = scale * x + (1 - scale) * x.roll(1, 0)
        return first + (self.network(mixed) - self.network(mixed + 0.01)).square()


BETWEEN = {
    "nothing": lambda self, x: x,
    "flip": lambda self, x: x.flip(1),
    "noise": lambda self, x: x + torch.randn_like(x) * 0,
    "a mask": lambda self, x: torch.where(x > 0, x, torch.zeros_like(x)),
    "a buffer": lambda self, x: x * self.mask,
    "a constant": lambda self, x: x * torch.arange(float(SIZE)),
    "another shape": lambda self, x: x.reshape(-1, 2, SIZE // 2).transpose(1, 2).reshape(-1, SIZE),
    "rows": lambda self, x: torch.cat([x[1:], x[:1]]),
    "several operations": lambda self, x: ((x.roll(1, 0) - x.mean(0)) / (x.std() + 1)).clamp(-1, 1),
}
MODELS_TWICE = [type(name, (Twice,), {"again": staticmethod(f)}) for name, f in BETWEEN.items()]
MODELS_TWICE += [Teaches, Penalizes]


@pytest.mark.parametrize("model", MODELS_TWICE, ids=lambda model: model.__name__)
def test_a_network_is_evaluated_twice_in_its_two_stages(model):
    expected = plain(model, sgd, updates=6)
    strategy = poptorch.PipelinedExecution("a", "b")
    assert _trained_as_marked(model, strategy).differs_from(expected) == []


@pytest.mark.parametrize("model", MODELS_TWICE, ids=lambda model: model.__name__)
def test_two_stages_of_a_network_that_is_evaluated_twice_need_three_micro_batches(model):
    strategy = poptorch.PipelinedExecution("a", "b")
    user = _model(model)
    own = poptorch.Options().showCompilationProgressBar(False).setExecutionStrategy(strategy)
    own.Training.gradientAccumulation(3)
    executor = poptorch.trainingModel(user, own, sgd(user.parameters()))
    executor(*model.data(12))
    assert [ipu for _, ipu, _, _ in executor.plan.stages] == [0, 1]
    own = own.clone()
    own.Training.gradientAccumulation(2)
    user = _model(model)
    with pytest.raises(poptorch.Error, match=r"pipeline stages \(3\)"):
        poptorch.trainingModel(user, own, sgd(user.parameters()))(*model.data(12))


class GoesBack(Twice):
    again = staticmethod(lambda self, x: self.d(x))


def test_a_layer_between_two_evaluations_is_not_moved_from_its_stage():
    user = _model(GoesBack)
    executor = poptorch.trainingModel(
        user, options(poptorch.PipelinedExecution("a", "b")), sgd(user.parameters())
    )
    with pytest.raises(poptorch.Error, match="flows back from stage 1"):
        executor(*GoesBack.data(16))


# A weight that forward returns is the one that was used, however early its home is updated.


class Returned(nn.Module):
    """Stage 0 reads a weight that is trained in stage 1, forward and backward; forward returns it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        with poptorch.Block("a"):
            x = self.a(x) @ self.b.weight.detach()
        with poptorch.Block("b"):
            return poptorch.identity_loss((self.b(x) ** 2).mean(), "none"), self.b.weight


@pytest.mark.parametrize("strategy", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
def test_a_returned_weight_is_that_of_the_step_in_every_stage_that_reads_it(strategy):
    # The value that stage 1 returns was handed to stage 0 too, whose last backward then raced with the update.
    torch.manual_seed(0)
    x, updates = torch.randn(40, 3), 5
    model = Returned()
    twin = Returned()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(
        model, options(strategy("a", "b"), accumulation=4, iterations=updates), optimizer
    )
    losses, returned = executor(x)
    seen, kept, step = [], [], torch.optim.SGD(twin.parameters(), lr=0.1)
    for rows in cut(8, x):
        kept += [twin.b.weight.detach().clone()] * 4
        seen += plain_update(twin, step, cut(2, *rows))
    assert torch.equal(losses, torch.stack(seen))
    assert torch.equal(returned, torch.cat(kept))
    assert differing(model, twin) == []
