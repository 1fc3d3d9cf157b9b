"""What a forward may do with torch while it is traced."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import poptorch
from small_models import module

PROBABILITIES = torch.randn(2, 5, 4)  # two sequences of five steps, four classes
LABELS, STEPS, LENGTHS = torch.tensor([[1, 2], [2, 3]]), torch.tensor([5, 4]), torch.tensor([2, 1])


class Judged(nn.Module):
    """A linear layer, and a loss of what it gives."""

    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 4), loss

    def forward(self, x, *targets):
        return self.loss(self.layer(x), *targets)


def trained(loss, *inputs):
    """The loss and the weight after one update: of an executor, and of plain PyTorch."""
    torch.manual_seed(0)
    model = Judged(loss)
    plain = copy.deepcopy(model)
    expected = plain(*inputs)
    expected.backward()
    trainer = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))
    found = trainer(*inputs)
    weight = plain.layer.weight.detach() - 0.1 * plain.layer.weight.grad
    return (found, model.layer.weight.detach().clone()), (expected.detach(), weight)


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_ctc_loss_trains_as_in_pytorch(reduction, zero_infinity):
    def loss(scores, labels, steps, lengths):
        log_probs = scores.permute(1, 0, 2).log_softmax(-1)
        value = functional.ctc_loss(log_probs, labels, steps, lengths, 0, reduction, zero_infinity)
        return poptorch.identity_loss(value, "mean") if reduction == "none" else value

    found, expected = trained(loss, PROBABILITIES, LABELS, STEPS, LENGTHS)
    torch.testing.assert_close(found, expected)


def test_the_ctc_loss_takes_lengths_as_python_integers_and_labels_in_a_row():
    def loss(scores, labels):
        return nn.CTCLoss()(scores.permute(1, 0, 2).log_softmax(-1), labels, (5, 5), (2, 1))

    found, expected = trained(loss, PROBABILITIES, LABELS.flatten()[:3].repeat(1))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"full": True, "reduction": "sum"}])
def test_the_gaussian_loss_trains_as_in_pytorch(options):
    def loss(scores, target):
        return functional.gaussian_nll_loss(scores, target, target.abs() + 1, **options)

    found, expected = trained(loss, torch.randn(3, 4), torch.randn(3, 4))
    torch.testing.assert_close(found, expected)


def test_distributions_do_not_check_their_parameters_by_reading_them():
    def forward(x):
        drawn = torch.distributions.Normal(x, torch.ones(2)).rsample()
        return drawn + torch.distributions.Uniform(torch.zeros(2), torch.ones(2)).sample()

    assert poptorch.inferenceModel(forward)(torch.zeros(3, 2)).shape == (3, 2)
    with pytest.raises(ValueError, match="constraint"):  # they do so on the host, before and after
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


def test_a_traced_tensor_prints_as_unavailable(capsys):
    def forward(self, x):
        print(x * self.weight, f"{self.weight}", f"{x.sum():.3f} {torch.tensor(2.0):.3f}")
        return x

    poptorch.inferenceModel(module(forward, weight=nn.Parameter(torch.ones(2))))(torch.ones(1, 2))
    out = capsys.readouterr().out
    assert "tensor(<unavailable>, size=(1, 2), dtype=torch.float32)" in out
    assert "Parameter containing: tensor(<unavailable>, size=(2,), dtype=torch.float32)" in out
    assert out.endswith("tensor(<unavailable>, size=(), dtype=torch.float32) 2.000\n")


def test_backward_inside_forward_is_refused():
    def forward(x):
        x.sum().backward()
        return x

    with pytest.raises(poptorch.Error, match=r"backward\(\) can't be called inside a forward"):
        poptorch.inferenceModel(forward)(torch.ones(2))


@pytest.mark.parametrize("lengths", [[5, 3, 3], [2, 5, 1]])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences_with_constant_lengths_train(lengths, layer, batch_first):
    def forward(self, x):
        x = x if batch_first else x.transpose(0, 1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x, torch.tensor(lengths), batch_first, enforce_sorted=False
        )
        found, steps = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first, -1.0, 6)
        found = found if batch_first else found.transpose(0, 1)
        return found, steps, poptorch.identity_loss(found.square().mean(), "none")

    torch.manual_seed(0)
    model = module(forward, layer=layer(4, 4, batch_first=batch_first))
    plain, x = copy.deepcopy(model), torch.randn(3, 5, 4)
    found, steps, loss = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(
        x
    )
    expected, its_steps, its_loss = plain(x)
    its_loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close((found, loss), (expected.detach(), its_loss.detach()))
    assert steps.tolist() == its_steps.tolist()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_packing_by_lengths_of_the_batch_is_an_error():
    def pack(x, lengths):
        return nn.utils.rnn.pack_padded_sequence(x, lengths, True).data

    with pytest.raises(
        poptorch.Error, match=r"test_traced_functions.py:\d+: a sequence is packed by lengths"
    ):
        poptorch.inferenceModel(pack)(torch.ones(2, 3, 4), torch.tensor([3, 2]))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_batch_norm_without_momentum_averages_over_all_micro_batches(kind):
    torch.manual_seed(0)
    rest = (2, 2) if kind is nn.BatchNorm2d else ()
    model = nn.Sequential(kind(4, momentum=None), nn.Flatten(), nn.Linear(4 * 4 if rest else 4, 4))
    model.forward = lambda x: poptorch.identity_loss(nn.Sequential.forward(model, x).square().mean(), "none")
    plain = copy.deepcopy(model)
    plain.forward = lambda x: nn.Sequential.forward(plain, x)
    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(2):
        x = torch.randn(12, 4, *rest)
        trainer(x)
        for rows in x.split(4):
            plain(rows)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, g: torch.rand(3, generator=g),
        lambda x, g: torch.randint(9, (3,), generator=g),
        lambda x, g: torch.randint(1, 9, (3,), generator=g),
        lambda x, g: torch.randperm(3, generator=g),
        lambda x, g: torch.normal(0.0, 1.0, (3,), generator=g),
        lambda x, g: torch.bernoulli(x, generator=g),
        lambda x, g: torch.poisson(x, generator=g),
        lambda x, g: torch.multinomial(x, 2, generator=g),
        lambda x, g: x.clone().uniform_(generator=g),
    ],
)
def test_a_generator_has_no_effect_and_a_warning_says_so(draw, caplog):
    generator = torch.Generator()
    before = generator.get_state()
    executor = poptorch.inferenceModel(lambda x: draw(x, generator), poptorch.Options().randomSeed(1))
    found = executor(torch.full((3,), 0.5))
    again = poptorch.inferenceModel(lambda x: draw(x, None), poptorch.Options().randomSeed(1))
    assert torch.equal(found, again(torch.full((3,), 0.5)))
    assert torch.equal(generator.get_state(), before)
    assert caplog.text.count("is given a generator, which has no effect") == 1


def test_a_seed_set_in_forward_is_told(caplog):
    def forward(x):
        torch.manual_seed(4711)
        return x + torch.rand(3) + torch.rand(3)

    state = torch.get_rng_state()
    poptorch.inferenceModel(forward)(torch.ones(3))
    assert caplog.text.count("random numbers are drawn after torch.manual_seed in forward") == 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.parametrize("product", [torch.sparse.mm, torch.mm, torch.matmul, torch.spmm, lambda a, x: a @ x])
def test_a_sparse_constant_is_a_factor(product, layout):
    torch.manual_seed(0)
    graph = torch.randn(4, 4).relu()

    sparse = getattr(graph, layout)()
    model = module(
        lambda self, x: poptorch.identity_loss(product(sparse, self.layer(x)).square().mean(), "none"),
        layer=nn.Linear(4, 3),
    )
    weight, bias = (value.detach().clone().requires_grad_() for value in model.layer.parameters())
    x = torch.randn(4, 4)
    expected = (graph @ functional.linear(x, weight, bias)).square().mean()
    expected.backward()
    loss = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(x)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.layer.weight.detach(), weight.detach() - 0.1 * weight.grad)
