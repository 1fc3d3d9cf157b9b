"""Models as they are written: captured by one run of forward, trained as plain PyTorch trains them."""

import pytest
import torch
from parity_runs import assert_trains_as_plain_pytorch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import poptorch
from small_models import module

IN_FOUR = poptorch.PipelinedExecution("a", "b", "c", "d")


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


# ---- models -----------------------------------------------------------------------------------------------


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = poptorch.BeginBlock(nn.Embedding(11, 6), "a")
        self.b = poptorch.BeginBlock(nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True), "b")
        self.c = poptorch.BeginBlock(nn.GRU(10, 4, batch_first=True), "c")
        self.d = poptorch.BeginBlock(nn.Linear(4, 3), "d")

    def forward(self, words, labels):
        states, _ = self.c(self.b(self.a(words))[0])
        return functional.cross_entropy(self.d(states[:, -1]), labels)

    @staticmethod
    def data(rows):
        return [torch.randint(0, 11, (rows, 7)), torch.randint(0, 3, (rows,))]


class Unet(nn.Module):
    """Down, down, up, up: each level's features skip to the same level on the other side."""

    def __init__(self):
        super().__init__()
        self.a = poptorch.BeginBlock(nn.Conv2d(1, 4, 3, padding=1), "a")
        self.b = poptorch.BeginBlock(nn.Conv2d(4, 8, 3, padding=1, stride=2), "b")
        self.c = poptorch.BeginBlock(nn.ConvTranspose2d(8, 4, 2, stride=2), "c")
        self.d = poptorch.BeginBlock(nn.Conv2d(9, 2, 3, padding=1), "d")

    def forward(self, image, classes):
        a = torch.relu(self.a(image))
        b = torch.relu(self.b(a))
        c = torch.relu(self.c(b))
        return functional.cross_entropy(self.d(torch.cat([image, a, c], 1)), classes)

    @staticmethod
    def data(rows):
        return [torch.randn(rows, 1, 8, 8), torch.randint(0, 2, (rows, 8, 8))]


class Cube(torch.autograd.Function):
    """x³ with a derivative of its own: 2x², so that a test sees which one was used."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x * x


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "abcd":
            setattr(self, name, poptorch.BeginBlock(nn.Linear(5, 5), name))

    def forward(self, x, target):
        x = Cube.apply(self.b(torch.tanh(self.a(x))))
        return functional.mse_loss(self.d(self.c(x)), target)

    @staticmethod
    def data(rows):
        return [torch.randn(rows, 5), torch.randn(rows, 5)]


class InPlace(OwnFunction):
    """Operations in place on values, on slices of them, and through views."""

    def forward(self, x, target):
        x = self.a(x)
        x += 1
        x = functional.relu(self.b(x), inplace=True)
        y = self.c(x).mul_(2)
        y[:, 1:3] = y[:, 1:3] * 3
        y[0].add_(1)
        half = y.view(-1)[:2]
        half.neg_()
        return functional.mse_loss(self.d(y), target)


class Counts(OwnFunction):
    """Buffers that the forward writes: each micro-batch sees what the one before left."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("scale", torch.full((5,), 0.5))

    def forward(self, x, target):
        x = self.a(x) * self.scale
        self.seen += 1
        x = x + self.seen * 0.01
        x = self.c(self.b(x))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.mean[0] = 7
        return functional.mse_loss(self.d(x) + self.mean, target)


class Frozen(OwnFunction):
    """Parts without gradients."""

    def forward(self, x, target):
        with torch.no_grad():
            x = self.a(x)
        x = x + self.b(x).detach()
        return functional.mse_loss(self.d(self.c(x)), target)


class Attends(OwnFunction):
    """Multi-head attention with a mask made in the forward."""

    def __init__(self):
        super().__init__()
        self.b = poptorch.BeginBlock(nn.MultiheadAttention(5, 1, batch_first=True), "b")

    def forward(self, x, target):
        x = self.a(x)
        mask = torch.triu(torch.full((4, 4), float("-inf")), diagonal=1)
        x, _ = self.b(x, x, x, attn_mask=mask)
        positions = torch.arange(4, dtype=x.dtype)[None, :, None] / 4
        return functional.l1_loss(self.d(self.c(x + positions)), target)

    @staticmethod
    def data(rows):
        return [torch.randn(rows, 4, 5), torch.randn(rows, 4, 5)]


@pytest.mark.parametrize("split", [False, True], ids=["unsplit", "four stages"])
@pytest.mark.parametrize("model", [Lstm, Unet, OwnFunction, InPlace, Counts, Frozen, Attends])
def test_a_model_trains_as_plain_pytorch(model, split):
    assert_trains_as_plain_pytorch(model, adam, strategy=IN_FOUR if split else None, updates=4)


# ---- what capture leaves alone ----------------------------------------------------------------------------


def test_random_numbers_are_fresh_in_every_micro_batch_and_call():
    class Draws(nn.Module):
        def forward(self, x):
            return x + torch.rand(2, 8), torch.randn_like(x), torch.randperm(50), torch.bernoulli(x + 0.5)

    own = poptorch.Options().showCompilationProgressBar(False).deviceIterations(3).randomSeed(1)
    executor = poptorch.inferenceModel(Draws(), own)
    x = torch.zeros(6, 8)
    first, second = executor(x), executor(x)
    for one, two in zip(first, second, strict=True):
        parts = [*one.chunk(3), *two.chunk(3)]
        assert all(not torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])
    again = poptorch.inferenceModel(Draws(), own.clone())(x)
    assert all(map(torch.equal, first, again))


# ---- what capture refuses ---------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("y", torch.ones(3))
        self.change = change

    def forward(self, x):
        self.change(self)
        return self.layer(x)


def test_a_rebound_parameter_is_refused_with_the_way_to_write_it():
    def rebind(model):
        model.layer._parameters["bias"] = model.layer.bias + 1

    user = Buffered(rebind)
    before = user.layer.bias
    executor = poptorch.inferenceModel(user)
    with pytest.raises(poptorch.Error, match=r"Parameter layer\.bias is reassigned") as caught:
        executor(torch.zeros(2, 3))
    assert "self.bias.copy_(src)" in str(caught.value)
    assert user.layer.bias is before


def test_a_removed_buffer_is_refused():
    user = Buffered(lambda model: delattr(model, "y"))
    executor = poptorch.inferenceModel(user)
    with pytest.raises(poptorch.Error, match="Buffer y is removed from the model"):
        executor(torch.zeros(2, 3))
    assert torch.equal(user.y, torch.ones(3))


def test_a_buffer_of_a_child_is_named_in_full():
    with pytest.raises(poptorch.Error, match=r"Buffer child\.y is reassigned"):
        poptorch.inferenceModel(
            module(lambda self, x: self.child(x), child=Buffered(lambda model: setattr(model, "y", None)))
        )(torch.zeros(2, 3))


# ---- arguments of torch's functions -----------------------------------------------------------------------


def test_a_size_among_the_arguments_of_a_function_stays_a_size():
    """What capture puts in place of a weight leaves the other arguments of a function as they are."""

    # torch.Size became a tuple, of which `Tensor.new` makes a tensor with these values.
    def forward(self, x):
        rate = nn.functional.softplus(self.weight).expand(4, 3)
        drawn = torch.distributions.Exponential(rate).sample(x.size())
        return x.new(x.size()).zero_() + self.weight.new(self.weight.size()).zero_(), drawn

    model = module(forward, weight=nn.Parameter(torch.ones(3)))
    zeros, drawn = poptorch.inferenceModel(model)(torch.ones(2, 3))
    assert torch.equal(zeros, torch.zeros(2, 3))
    assert drawn.shape == (2, 3, 4, 3)


# torch.utils.checkpoint inside a model: the part that is computed again draws the same random numbers.


class Dropping(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 4)
        self.dropout = nn.Dropout(0.5)
        self.checkpointed = checkpointed

    def part(self, x):
        return torch.relu(self.dropout(self.first(x)))

    def forward(self, x):
        h = checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x)
        return poptorch.identity_loss(self.last(self.dropout(h)).pow(2), "mean")


def trained(checkpointed):
    model = Dropping(checkpointed)
    opts = poptorch.Options().randomSeed(5).showCompilationProgressBar(False)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
    before = torch.get_rng_state()
    losses = [executor(torch.ones(8, 24)) for _ in range(3)]
    assert torch.equal(before, torch.get_rng_state())  # tracing leaves the user's random state alone
    return losses, model.state_dict()


def test_a_checkpoint_with_dropout_changes_no_bit():
    # Backward used to draw another mask than forward: wrong gradients, and no word about it.
    losses, weights = trained(checkpointed=False)
    same_losses, same_weights = trained(checkpointed=True)
    assert all(map(torch.equal, losses, same_losses))
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
