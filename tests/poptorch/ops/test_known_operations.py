"""Custom operations that public programs load from compiled libraries: found by name, with the numbers of torch."""

import pytest
import torch
from torch import nn

import poptorch
from poptorch.ops import known_operations


def used(name, *inputs, example=None, **attributes):
    (made,) = poptorch.custom_op(
        list(inputs), name, "any.domain", 1, [inputs[0] if example is None else example], attributes
    )
    return made


class Trained(nn.Module):
    """One or two weights through an operation; the loss weighs what comes out, so that gradients differ."""

    def __init__(self, function, *weights):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(weights)

    def forward(self):
        made = self.function(*self.weights)
        loss = (made * torch.arange(1.0, made.numel() + 1).view(made.shape)).sum()
        return made, poptorch.identity_loss(loss, "none")


class Whole(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def assert_computes_and_trains_as(function, plain, *weights):
    """Values and gradients of an operation, compiled, equal those of plain PyTorch."""
    torch.set_num_threads(1)
    ours, twin = (Trained(f, *(w.clone() for w in weights)) for f in (function, plain))
    options = poptorch.Options().showCompilationProgressBar(False)
    trainer = poptorch.trainingModel(ours, options, torch.optim.SGD(ours.parameters(), lr=1.0))
    found, _ = trainer()
    made, loss = twin()
    expected = made.detach().clone()
    loss.backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert torch.equal(found, expected)
    trainer.copyWeightsToHost()
    for given, wanted in zip(ours.weights, twin.weights, strict=True):
        assert torch.equal(given, wanted)
    assert torch.equal(function(*weights), plain(*weights))  # on the host


X, Y = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), torch.full((3, 5), 0.25)


@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (lambda x: used("CopyTensor", x), lambda x: x),
        (lambda x: used("RemapCE", x, grain_size=8), lambda x: x),
        (
            lambda x: used(
                "RemapCE", x, fwd_grain_size=8, bwd_grain_size=8, fwd_clone_layout=1, debug_str="x"
            ),
            lambda x: x,
        ),
        (lambda x: used("ExpMovAvg", x, Y, factor=0.75), lambda x: 0.75 * x + 0.25 * Y),
        (
            lambda x: used("ExpMovAvg", x, Y, torch.tensor(0.75)),
            lambda x: torch.tensor(0.75) * x + (1 - torch.tensor(0.75)) * Y,
        ),
    ],
    ids=["copy", "remap", "remap by names", "average", "average by a tensor"],
)
def test_copies_and_averages_have_the_values_and_gradients_of_torch(function, plain):
    assert_computes_and_trains_as(function, plain, X)


@pytest.mark.parametrize("reduction", ["mean", "sum", 1, 0])
def test_ctc_is_torchs(reduction):
    log_probs = torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    targets, lengths = torch.tensor([[1, 2, 2], [3, 1, 0]]), (torch.tensor([7, 6]), torch.tensor([3, 2]))

    def ours(x):
        return used("Ctc", x, targets, *lengths, example=torch.zeros(1), blank=0, reduction=reduction)

    def plain(x):
        name = {0: "sum", 1: "mean"}.get(reduction, reduction)
        return nn.functional.ctc_loss(x, targets, *lengths, blank=0, reduction=name).reshape(1)

    found, expected = Trained(ours, log_probs.clone()), Trained(plain, log_probs.clone())
    options = poptorch.Options().showCompilationProgressBar(False)
    trainer = poptorch.trainingModel(found, options, torch.optim.SGD(found.parameters(), lr=1.0))
    torch.testing.assert_close(trainer()[0], expected()[0].detach())
    expected()[1].backward()
    trainer.copyWeightsToHost()
    torch.testing.assert_close(found.weights[0], log_probs - expected.weights[0].grad)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("in_a_model", [True, False])
def test_ctc_has_poparts_attributes_and_returns_the_gradient_too(reduction, in_a_model):
    log_probs = torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    targets, lengths = torch.tensor([[1, 2, 2], [3, 1, 0]]), (torch.tensor([7, 6]), torch.tensor([3, 2]))

    def ours(x):
        attributes = {"blank": 0, "reduction": reduction, "zeroInfinity": 1}
        attributes |= {"enableReducedClassesInLabel": 1, "outDataType": "FLOAT"}
        examples = [torch.zeros(2 if reduction == "none" else 1), torch.zeros(7, 2, 4)]
        return poptorch.custom_op([x, targets, *lengths], "Ctc", "any.domain", 1, examples, attributes)

    options = poptorch.Options().showCompilationProgressBar(False)
    options.deviceIterations(1)
    found, gradient = (poptorch.inferenceModel(Whole(ours), options) if in_a_model else ours)(log_probs)
    twin = log_probs.clone().requires_grad_()
    expected = nn.functional.ctc_loss(twin, targets, *lengths, reduction=reduction, zero_infinity=True)
    expected.sum().backward()
    torch.testing.assert_close(found, expected.detach().reshape(found.shape))
    torch.testing.assert_close(gradient, twin.grad)


def test_ctc_refuses_an_unknown_output_type():
    inputs = torch.zeros(3, 1, 2), torch.ones(1, 1, dtype=torch.long), torch.tensor([3]), torch.tensor([1])
    with pytest.raises(poptorch.Error, match=r"outDataType takes one of .*; found 'INT32'"):
        used("Ctc", *inputs, example=torch.zeros(1), outDataType="INT32")


def over_replicas(function, replicas=4):
    """Return what an operation makes of x on each replica, and the gradients of x there.

    x is [2, 3] on each replica, and the loss weighs each element of the result by the replica's own weights.
    """
    torch.manual_seed(0)
    x, weights = torch.randn(replicas, 2, 3), torch.randn(replicas, *function(torch.zeros(2, 3)).shape)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.zeros = nn.Parameter(torch.zeros(replicas, 2, 3))

        def forward(self, x, weights, place):
            own = (self.zeros * place[0, :, None, None]).sum(0)  # its gradient has a place for each replica
            made = function(x[0] + own)
            return made[None], poptorch.identity_loss((made * weights[0]).sum(), "none")

    model = Model()
    options = poptorch.Options().showCompilationProgressBar(False).replicationFactor(replicas)
    options.outputMode(poptorch.OutputMode.All)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    made, _ = trainer(x, weights, torch.eye(replicas))
    trainer.copyWeightsToHost()
    return x, weights, made, -model.zeros.detach()


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("backwards", [0, 1])
def test_an_all_reduce_sums_over_groups_in_forward_or_backward(group, backwards):
    def reduced(x):
        return used(
            "ReplicatedAllReduceTP",
            x,
            op="sum",
            backwards=backwards,
            __collectiveReplicaGrouping=[4, 1, group],
        )

    def sums(values):
        return (
            values.view(4 // group, group, 2, 3)
            .sum(1, keepdim=True)
            .expand(-1, group, -1, -1)
            .reshape(4, 2, 3)
        )

    x, weights, made, gradients = over_replicas(reduced)
    torch.testing.assert_close(made, x if backwards else sums(x))
    torch.testing.assert_close(gradients, sums(weights) if backwards else weights)


@pytest.mark.parametrize("attributes", [{}, {"op": "max"}, {"__collectiveReplicaGrouping": [4, 2, 2]}])
def test_an_all_reduce_of_another_kind_is_refused(attributes):
    attributes = {"__collectiveReplicaGrouping": [4, 1, 2], **attributes} if attributes else {}
    with pytest.raises(poptorch.Error, match=r'ReplicatedAllReduceTP has op[^$]*fix: op="sum"'):
        used("ReplicatedAllReduceTP", X, **attributes)


def test_an_all_gather_stacks_the_values_of_all_replicas():
    x, weights, made, gradients = over_replicas(lambda x: used("AllGather", x, example=torch.zeros(4, 2, 3)))
    assert torch.equal(made, x.expand(4, 4, 2, 3))
    torch.testing.assert_close(gradients, weights.sum(0))


def test_an_all_to_all_exchanges_rows():
    x, weights, made, gradients = over_replicas(lambda x: used("AllToAll", x), replicas=2)
    assert torch.equal(made, x.transpose(0, 1))
    torch.testing.assert_close(gradients, weights.transpose(0, 1))


def test_a_proxy_gives_the_first_value_and_its_gradient_to_the_second():
    def plain(value, proxy):
        return value.detach() + proxy - proxy.detach()

    exact = torch.arange(4.0)  # so that plain PyTorch rounds nothing
    assert_computes_and_trains_as(lambda *both: used("AutogradProxy", *both), plain, exact, exact / 4)


@pytest.mark.parametrize("p", [1, 2])
def test_distances_are_those_of_each_row_and_each_other(p):
    first, second = X, torch.cat([X[:1], Y[:1]])  # one pair is equal, where a root has no gradient

    def ours(*both):
        return used(f"L{p}Distance", *both, example=torch.zeros(3, 2), root_path="codelets.cpp")

    def plain(one, other):
        return torch.cdist(one, other, p=p, compute_mode="donot_use_mm_for_euclid_dist")

    found, expected = (Trained(f, first.clone(), second.clone()) for f in (ours, plain))
    options = poptorch.Options().showCompilationProgressBar(False)
    trainer = poptorch.trainingModel(found, options, torch.optim.SGD(found.parameters(), lr=1.0))
    torch.testing.assert_close(trainer()[0], expected()[0].detach())
    expected()[1].backward()
    trainer.copyWeightsToHost()
    for weight, twin in zip(found.weights, expected.weights, strict=True):
        torch.testing.assert_close(weight, (twin - twin.grad).detach())


def test_quantisation_to_nearest_is_that_of_the_smaller_format():
    """Five bits of exponent and ten of mantissa are float16, but for its largest exponent."""
    x = torch.cat(
        [torch.randn(1000), torch.randn(1000) * 2e-7, torch.tensor([0.0, -0.0, 65504.0, 3e38, -1e9])]
    )
    found = used("SimulatedQuant", x, exponent_bits=5, mantissa_bits=10, rounding="nearest")
    assert torch.equal(found[:1000], x[:1000].half().float())
    assert found[-3:].tolist() == [65504.0, 65504.0, -65504.0]
    assert (found[1000:2000] * 2**25 % 1 == 0).all()  # the smallest subnormal is half of float16's
    assert (found[1000:2000] - x[1000:2000]).abs().max() <= 2.0**-26
    levels = used(
        "SimulatedQuant", torch.linspace(-2, 2, 999), exponent_bits=2, mantissa_bits=1, rounding="nearest"
    )
    assert levels.unique().tolist() == [-2, -1.5, -1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1, 1.5, 2]


def test_quantisation_passes_the_gradient_as_it_is_or_quantised():
    def quantised(x, **which):
        return used("SimulatedQuant", x, exponent_bits=4, mantissa_bits=1, rounding="nearest", **which)

    found = {}
    for fwd, bwd in ((1, 0), (0, 1), (True, "ste"), (False, "quantise"), (True, "stop")):
        model = Trained(lambda x, f=fwd, b=bwd: quantised(x, fwd=f, bwd=b), torch.full((7,), 1.2))
        options = poptorch.Options().showCompilationProgressBar(False)
        trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
        made, _ = trainer()
        trainer.copyWeightsToHost()
        found[fwd, bwd] = made, (torch.full((7,), 1.2) - model.weights[0]).detach()
    torch.testing.assert_close(found[1, 0][0], torch.full((7,), 1.0))
    torch.testing.assert_close(found[1, 0][1], torch.arange(1.0, 8))
    torch.testing.assert_close(found[0, 1][0], torch.full((7,), 1.2))
    torch.testing.assert_close(
        found[0, 1][1], torch.tensor([1.0, 2, 3, 4, 4, 6, 8])
    )  # 5 and 7 lie between two
    for by_name, by_number in (((True, "ste"), (1, 0)), ((False, "quantise"), (0, 1))):
        assert all(map(torch.equal, found[by_name], found[by_number]))
    torch.testing.assert_close(found[True, "stop"][1], torch.zeros(7))


def test_stochastic_quantisation_is_right_on_average_and_the_same_in_every_layout():
    def made(layout):
        def forward(x):
            with poptorch.Block("a", ipu_id=0):
                x = x + 0
            with poptorch.Block("b", ipu_id=layout):
                return used("SimulatedQuant", x, exponent_bits=4, mantissa_bits=2)

        options = poptorch.Options().randomSeed(3).deviceIterations(4).showCompilationProgressBar(False)
        return poptorch.inferenceModel(forward, options)(torch.full((40_000,), 1.3))

    one = made(0)
    assert set(one.unique().tolist()) == {1.25, 1.5}
    assert one.mean().item() == pytest.approx(1.3, abs=5 * 0.1 / 200)  # five standard errors
    assert torch.equal(made(1), one)


def test_a_known_operation_is_logged_once(caplog):
    known_operations._warned_names.clear()
    for _ in range(2):
        used("RemapCE", X)
    said = "the custom operation RemapCE is computed by poptorch's own: Return the same values; on IPUs their"
    assert [record.message for record in caplog.records] == [f"{said} layout in memory changes."]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: used("SimulatedQuant", x, man_bits=3),
            r"attributes \['man_bits'\](?s:.*)exponent_bits: int",
        ),
        *(
            (
                lambda x, given=given: used("SimulatedQuant", x, exponent_bits=4, mantissa_bits=1, **given),
                f"SimulatedQuant: {next(iter(given))} takes one of .*; found 'up'",
            )
            for given in ({"rounding": "up"}, {"fwd": "up"}, {"bwd": "up"})
        ),
        (lambda x: used("AutogradProxy", x), "called with 1 inputs"),
        (
            lambda x: used("L1Distance", x, x),
            r"makes torch.float32 \(3, 3\); the program's example_outputs are",
        ),
    ],
)
def test_other_inputs_attributes_or_outputs_are_an_error(call, message):
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(call)(X)


def test_a_registered_operation_of_the_same_name_wins(monkeypatch):
    poptorch.registerCustomOp("CopyTensor", "test.known", 1, lambda x: x * 2)
    found = poptorch.inferenceModel(lambda x: poptorch.custom_op([x], "CopyTensor", "test.known", 1, [x])[0])(
        X
    )
    assert torch.equal(found, X * 2)
