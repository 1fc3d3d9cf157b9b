"""Modes, `requires_grad`, attributes and hooks: which of their changes count, and which are told once."""

import contextlib
import copy
import logging
import math
import pickle

import pytest
import torch
from executor_models import options, recordings
from torch import nn

import poptorch
from small_models import module

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


class Net(nn.Module):
    """Two layers with BatchNorm and dropout between them; an attribute; a loss if the model is trained."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.second = nn.Linear(8, 2)
        self.scale, self.name = 2.0, "net"

    def forward(self, x):
        return self.second(self.drop(self.norm(self.first(x)))) * self.scale


class Loss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return poptorch.identity_loss(self.net(x).square().sum(), "none")


def made():
    torch.manual_seed(0)
    return Net()


def trainer(model, lr=0.1):
    return poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=lr))


def inference(model):
    return poptorch.inferenceModel(model, options())


def in_eval(model, x=X):
    """The output of a copy of the model in eval mode."""
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- modes of an inference executor ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: (inference(model.eval()), model.train())[0],  # in eval mode when wrapped
        lambda model: (inference(model), model.eval())[0],  # in eval mode at the first call
        lambda model: inference(model).eval(),
        lambda model: (executor := inference(model), executor.model.eval())[0],
    ],
)
def test_an_inference_executor_computes_in_eval_mode_what_was_in_eval_mode(wrap, caplog):
    # Flags of submodules were those of the first call: it ran with dropout and with statistics of the batch.
    model = made()
    executor = wrap(model)
    found = [executor(X) for _ in range(3)]
    assert all(torch.equal(output, in_eval(model)) for output in found)
    model.train()
    assert torch.equal(executor(X), in_eval(model))
    assert warnings(caplog) == []


def test_one_submodule_in_eval_mode_is_computed_in_eval_mode():
    model = made()
    model.drop.eval()
    executor = inference(model)
    model.train()
    model.norm.eval()
    assert torch.equal(executor(X), in_eval(model))


def test_an_executor_trained_in_between_does_not_change_the_mode_of_inference():
    net = made()
    net.eval()
    evaluation = inference(net)
    net.train()
    executor = trainer(Loss(net))
    for _ in range(2):
        executor(X)
        assert torch.equal(evaluation(X), in_eval(net))


@pytest.mark.parametrize("set_mode", [lambda e: e.eval(), lambda e: e.model.eval()])
def test_eval_of_an_inference_executor_leaves_the_models_mode(set_mode):
    # BatchNorm was then trained in eval mode: its submodules are the trained model's.
    net = made()
    set_mode(inference(net))
    assert all(module.training for module in net.modules())
    executor = trainer(Loss(net))
    executor(X)
    assert not torch.equal(net.norm.running_mean, torch.zeros(8))


def test_train_of_an_inference_executor_is_its_own_mode_too():
    net = made().eval()
    executor = inference(net).train()
    assert not any(module.training for module in net.modules())
    assert not torch.equal(executor(X), executor(X))  # dropout
    assert not any(module.training for module in net.modules())


def test_a_model_that_sets_its_own_modes_is_asked():
    class Frozen(Net):
        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            self.drop.eval()
            return self

    torch.manual_seed(0)
    net = Frozen().train()
    executor = inference(net.eval()).train()
    assert torch.equal(executor(X), in_eval(net))


def test_eval_of_dropout_after_the_compilation_of_inference_in_train_mode_is_told_once(caplog):
    net = made()
    executor = inference(net)
    executor(X)
    net.drop.eval()
    for _ in range(2):
        executor(X)
    (message,) = warnings(caplog)
    assert "drop is in eval() mode now" in message and "fix:" in message


# ---- modes of an executor that trains ----------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "net", "net.norm"])
@pytest.mark.parametrize("first", [True, False])
def test_a_mode_changed_after_the_compilation_of_a_trainer_is_told_once(part, first, caplog):
    # Only a change of the whole model was told.
    model = Loss(made())
    model.train(first)
    executor = trainer(model, lr=0.0)
    losses = [executor(X)]
    model.get_submodule(part).train(not first)
    losses += [executor(X) for _ in range(2)]
    (message,) = warnings(caplog)
    assert (part or "the model") in message
    assert ("eval() mode now" if first else "train() mode now") in message
    assert "destroy()" in message
    assert (len(set(map(float, losses))) == 1) is not first  # dropout as compiled


def test_modes_set_back_before_the_next_call_are_not_told(caplog):
    model = Loss(made())
    executor = trainer(model)
    evaluation = inference(model.net.eval())
    model.train()
    for _ in range(3):
        executor(X)
        model.eval()
        evaluation(X)
        model.train()
    assert warnings(caplog) == []


# ---- attributes and methods of the model -------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_an_attribute_set_between_wrapping_and_the_first_call_counts(training):
    torch.manual_seed(0)
    model = module(
        lambda self, x: poptorch.identity_loss(self.layer(x).sum() * self.scale, "none"),
        layer=nn.Linear(2, 2),
        scale=2.0,
    )
    executor = trainer(model, lr=0.0) if training else inference(model)
    model.scale = 5.0
    assert torch.equal(executor(X).reshape(()), (model.layer(X).sum() * 5).detach())


def test_the_attributes_of_the_executors_model_are_those_of_the_users():
    net = made().eval()
    executor = inference(net)
    executor.model.scale = 3.0
    assert net.scale == 3.0
    net.scale, executor.model.extra = 5.0, "new"
    assert (executor.model.scale, net.extra) == (5.0, "new")
    assert torch.equal(executor(X), in_eval(net))


def test_the_executors_model_is_of_the_users_class_and_its_copies_are_plain():
    net = made()
    executor = inference(net)
    own = executor.model.eval()
    assert isinstance(own, Net) and not own.training and net.training
    for copied in (copy.copy(own), copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert type(copied) is Net and not copied.training
        assert copied.state_dict().keys() == net.state_dict().keys()
    assert list(own.parameters()) == list(net.parameters())
    own.first.weight.data.zero_()
    assert torch.equal(executor(X), in_eval(net))


# ---- requires_grad -----------------------------------------------------------------------------------------


def test_each_set_of_trained_parameters_is_compiled_once():
    model = Loss(made())
    executor = trainer(model)
    with recordings() as runs:
        for number in range(6):
            model.net.first.requires_grad_(number % 2 == 0)
            before = [value.detach().clone() for value in model.net.first.parameters()]
            executor(X)
            same = [torch.equal(*pair) for pair in zip(before, model.net.first.parameters(), strict=True)]
            assert same == [number % 2 == 1] * 2
    assert len(runs) == 2


def test_freezing_does_not_matter_to_inference():
    net = made().eval()
    executor = inference(net)
    with recordings() as runs:
        for requires in (True, False):
            executor(X)
            net.requires_grad_(requires)
        executor(X)
    assert len(runs) == 1


def test_copy_weights_to_device_does_not_train_frozen_weights():
    model = Loss(made())
    executor = trainer(model)
    executor(X)
    model.requires_grad_(False)
    executor.copyWeightsToDevice()
    before = {name: value.clone() for name, value in model.net.named_parameters()}
    executor(X)  # computes its outputs
    assert all(torch.equal(value, before[name]) for name, value in model.net.named_parameters())
    model.requires_grad_(True)
    executor(X)
    assert not torch.equal(model.net.second.bias, before["second.bias"])


# ---- attributes of the optimizer ---------------------------------------------------------------------------


def steps(executor, count=1):
    for _ in range(count):
        executor(X)


@pytest.mark.parametrize("name", ["max_grad_norm", "max_grad_value"])
def test_a_bound_set_after_wrapping_and_before_the_first_call_clips(name):
    def trained(set_late):
        model = Loss(made().eval())
        model.net.first.requires_grad_(False)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        if not set_late:
            setattr(optimizer, name, 0.001)
        executor = poptorch.trainingModel(model, options(), optimizer)
        if set_late:
            setattr(optimizer, name, 0.001)
        executor(X)
        return model.state_dict()

    late, early = trained(True), trained(False)
    assert [key for key, value in late.items() if not torch.equal(value, early[key])] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_grad_norm", 0.001),
        ("max_grad_value", 0.001),
        ("accum_type", torch.float16),
        ("first_order_momentum_accum_type", torch.float16),
        ("bias_correction", False),
    ],
)
def test_an_attribute_that_is_compiled_in_and_changes_is_refused_at_the_next_call(name, value):
    model = Loss(made())
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(), optimizer)
    executor(X)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    old = getattr(optimizer, name, math.inf)
    setattr(optimizer, name, value)
    with pytest.raises((poptorch.Error, ValueError), match=r"(?s)(is|are already|already) compiled.*fix:"):
        executor(X)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    setattr(optimizer, name, old)
    executor(X)
    setattr(optimizer, name, value)
    executor.destroy()
    executor(X)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_seed_set_after_compilation_is_told_once_if_the_model_draws_numbers(dropout, caplog):
    model = made()
    model.drop.p = dropout
    run = trainer(Loss(model))
    run(X)
    for seed in (3, 4):
        torch.manual_seed(seed)
        run(X)
    assert caplog.text.count("torch.manual_seed was called after the compilation") == (dropout > 0)


def test_autocast_around_a_call_is_followed_as_in_plain_pytorch():
    model = made().eval()
    run, expected = inference(model), model(X)
    assert torch.equal(run(X), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(X), model(X))
        assert run(X).dtype == torch.bfloat16
    assert torch.equal(run(X), expected)


# A program that means to evaluate, and trains or changes statistics, is told so, with its line.


class Model(nn.Module):
    def __init__(self, returns=True):
        super().__init__()
        self.layer, self.norm, self.returns = nn.Linear(2, 2), nn.BatchNorm1d(2), returns

    def forward(self, x):
        loss = poptorch.identity_loss(self.norm(self.layer(x)).square().mean(), "none")
        return loss if self.returns else None


@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "eval"])
def test_a_training_call_in_an_evaluation_warns_once_with_its_line(name, caplog):
    model = Model()
    trainer = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer(X)
    before, words = model.layer.weight.clone(), "trains: each call updates the weights"
    assert words not in caplog.text
    if name == "eval":
        trainer.eval()
    with contextlib.nullcontext() if name == "eval" else getattr(torch, name)():
        for _ in range(2):
            trainer(X)
    assert caplog.text.count(words) == 1 and "poptorch.inferenceModel(model) evaluates" in caplog.text
    assert f"{__file__}:" in caplog.text
    assert not torch.equal(model.layer.weight, before)


@pytest.mark.parametrize("part", ["", "norm"])
def test_an_inference_that_would_change_statistics_in_eval_mode_is_an_error(part):
    # It was a warning, and an evaluation went on with statistics that each call changed.
    model = Model().train()
    executor = poptorch.inferenceModel(model, options())
    executor(X)
    model.get_submodule(part).eval()
    before = model.norm.running_mean.clone()
    with pytest.raises(poptorch.Error, match=r"norm is in eval\(\) mode now"):
        executor(X)
    assert torch.equal(model.norm.running_mean, before)
    executor.destroy()
    assert torch.equal(executor(X), model(X).detach())


def test_a_training_forward_that_returns_nothing_is_named(caplog):
    model = Model(returns=False)
    trainer = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert trainer(X) is None
    assert caplog.text.count("forward returns nothing") == 1


def test_a_mode_that_comes_after_the_compilation_is_a_warning(caplog):
    net = made().eval()
    executor = inference(net)
    executor(X)
    executor.train()
    assert "come too late" in caplog.text
    assert torch.equal(executor(X), in_eval(net))
    executor.destroy()
    assert not torch.equal(executor(X), in_eval(net))


def test_an_evaluation_before_the_first_training_call_is_a_warning(caplog):
    trainer = poptorch.trainingModel(Model(returns=False), options())
    trainer.model.eval()
    trainer(X)
    assert "is in eval() mode, and the compiled program trains without dropout" in caplog.text


# Parameters that take the place of others after wrapping.


ONES = torch.ones(1, 2)


def scaled():
    return module(
        lambda self, x: poptorch.identity_loss(self.a(x).sum() * self.scale, "none"),
        a=nn.Linear(2, 2, bias=False),
        scale=torch.ones(()),
    )


def trained(model):
    return poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


# As in plain PyTorch the optimizer goes on with the parameters that it was made of.


@pytest.mark.parametrize(
    "replace",
    [
        lambda model: setattr(model.a, "weight", nn.Parameter(torch.full((2, 2), 5.0))),
        lambda model: model.load_state_dict(
            {"a.weight": torch.full((2, 2), 5.0), "scale": torch.tensor(1.0)}, assign=True
        ),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_parameter_that_replaces_another_trains_with_an_optimizer_that_holds_it(replace, compiled, caplog):
    model = scaled()
    executor = trained(model)
    if compiled:
        executor(ONES)
    replace(model)
    for _ in range(2):
        assert executor(ONES).item() == 20
    assert torch.equal(model.a.weight, torch.full((2, 2), 5.0))
    (message,) = caplog.messages
    assert message.startswith("the optimizer does not hold these parameters of the model")
    assert "so they are not updated: a.weight\n" in message
    assert "fix: executor.setOptimizer" in message
    executor.setOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    assert executor(ONES).item() == 20
    assert torch.equal(model.a.weight, torch.full((2, 2), 4.0))
    assert len(caplog.messages) == 1


def test_a_parameter_that_is_gone_is_an_error_until_there_is_one():
    model = scaled()
    executor = trained(model)
    executor(ONES)
    del model.a.weight
    with pytest.raises(poptorch.Error, match=r"the model has lost a\.weight since it was compiled"):
        executor.copyWeightsToHost()
    model.a.weight = nn.Parameter(torch.zeros(2, 2))
    executor.copyWeightsToHost()
    assert executor(ONES) == 0


def test_float64_inputs_become_float32_with_one_warning(caplog):
    model = nn.Linear(2, 2)
    executor = poptorch.inferenceModel(model, poptorch.Options().deviceIterations(2))
    x = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        found = executor(x)
        executor(x)
    assert torch.equal(found, model(x.float()).detach())
    assert sum("become float32" in record.message for record in caplog.records) == 1


def test_a_model_of_float64_takes_and_returns_float64():
    model = nn.Linear(2, 2).double()
    x = torch.tensor([[0.1, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(poptorch.inferenceModel(model)(x), model(x).detach(), rtol=1e-14, atol=1e-15)
