"""What `setOptimizer` lets change after compilation, and what it warns about."""

import logging
import math

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from executor_models import Trained, batch, options

import poptorch
from popengine.errors import Error
from poptorch.optim import SGD, Adam, AdamW
from small_models import Signed, module

MODEL = torch.nn.Linear(3, 2)


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return poptorch.identity_loss(self.model(x).sum(), "none")


def compiled_with(optimizer, **flags):
    """Returns setOptimizer of a model that is compiled with an optimizer."""
    own = options()
    own.relaxOptimizerAttributesChecks(flags.get("relaxed", False))
    own.Training.setAutomaticLossScaling(flags.get("automatic_loss_scaling", False))
    executor = poptorch.trainingModel(Loss(MODEL), own, optimizer)
    executor.compile(torch.ones(2, 3))

    def set_optimizer(later):
        executor.setOptimizer(later)
        return executor._optimizer_link.frozen, executor._optimizer_link.hyper

    return set_optimizer


def test_an_argument_that_was_given_may_change():
    set_optimizer = compiled_with(SGD(MODEL.parameters(), lr=0.1, momentum=0.5))
    _, hyper = set_optimizer(SGD(MODEL.parameters(), lr=0.2, momentum=0.6))
    assert (hyper.groups[0]["lr"], hyper.groups[0]["momentum"]) == (0.2, 0.6)


def test_all_changes_are_in_one_error():
    set_optimizer = compiled_with(Adam(MODEL.parameters(), lr=0.1))
    with pytest.raises(Error) as caught:
        set_optimizer(Adam(MODEL.parameters(), lr=0.2, eps=0.5, weight_decay=0.25, max_grad_norm=1.0))
    assert str(caught.value).splitlines()[1:4] == [
        "  the clipping (max_grad_norm): it was inf, now it is 1.0",
        "  modified constant attribute 'eps': it was [1e-08], now it is [0.5]",
        "  modified constant attribute 'weight_decay': it was [0.0], now it is [0.25]",
    ]


def test_marks_decide():
    first = Adam(MODEL.parameters(), lr=0.1)
    first.variable_attrs.markAsConstant("lr")
    first.variable_attrs.markAsVariable("betas")
    set_optimizer = compiled_with(first)
    set_optimizer(Adam(MODEL.parameters(), lr=0.1, betas=(0.5, 0.5)))
    with pytest.raises(Error, match="modified constant attribute 'lr'"):
        set_optimizer(Adam(MODEL.parameters(), lr=0.2))


def test_rates_of_torch_optimizers_may_change():
    set_optimizer = compiled_with(torch.optim.AdamW(MODEL.parameters()))
    _, hyper = set_optimizer(
        torch.optim.AdamW(MODEL.parameters(), lr=7.0, betas=(0.5, 0.25), eps=0.1, weight_decay=0.4)
    )
    assert {name: hyper.groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 7.0,
        "betas": (0.5, 0.25),
        "eps": 0.1,
        "weight_decay": 0.4,
    }
    set_optimizer = compiled_with(torch.optim.RMSprop(MODEL.parameters()))
    _, hyper = set_optimizer(torch.optim.RMSprop(MODEL.parameters(), alpha=0.5))
    assert hyper.groups[0]["alpha"] == 0.5


def test_a_momentum_of_torchs_rmsprop_may_not_begin_later_as_its_state_is_missing():
    set_optimizer = compiled_with(torch.optim.RMSprop(MODEL.parameters()))
    with pytest.raises(Error, match=r"modified constant attribute 'momentum': it was .0"):
        set_optimizer(torch.optim.RMSprop(MODEL.parameters(), momentum=0.5))


def test_the_loss_scaling_is_constant_unless_given_or_automatic():
    later = SGD(MODEL.parameters(), lr=0.1, loss_scaling=2.0)
    with pytest.raises(Error, match="modified constant attribute 'loss_scaling'"):
        compiled_with(SGD(MODEL.parameters(), lr=0.1))(later)
    compiled_with(SGD(MODEL.parameters(), lr=0.1, loss_scaling=1.0))(later)
    compiled_with(SGD(MODEL.parameters(), lr=0.1), automatic_loss_scaling=True)(later)


def test_before_compilation_anything_may_change():
    executor = poptorch.trainingModel(Loss(MODEL), options(), SGD(MODEL.parameters(), lr=0.1))
    executor.setOptimizer(AdamW(MODEL.parameters()))
    executor(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        (
            SGD(MODEL.parameters(), lr=0.1),
            AdamW(MODEL.parameters()),
            "type can't change .* it was SGD2, this one is ADAMW",
        ),
        (AdamW(MODEL.parameters()), AdamW(MODEL.parameters(), bias_correction=False), "type can't change"),
        (AdamW(MODEL.parameters()), AdamW(MODEL.parameters(), max_grad_norm=1.0), "clipping"),
        (
            AdamW(MODEL.parameters()),
            AdamW(MODEL.parameters(), second_order_momentum_accum_type=torch.float16),
            "dtype of the state 'exp_avg_sq'",
        ),
    ],
)
def test_what_is_compiled_in_may_not_change(first, later, words):
    with pytest.raises(Error, match=words):
        compiled_with(first)(later)


def test_a_half_accumulator_after_compilation_names_the_strategy():
    set_optimizer = compiled_with(SGD(MODEL.parameters(), lr=0.1))
    with pytest.raises(
        ValueError, match=r"setMeanAccumulationAndReplicationReductionStrategy.*already compiled"
    ):
        set_optimizer(SGD(MODEL.parameters(), lr=0.1, accum_type=torch.float16))


def test_what_was_refused_leaves_the_guard_as_it_was():
    set_optimizer = compiled_with(SGD(MODEL.parameters(), lr=0.1))
    for _ in range(2):
        with pytest.raises(Error):
            set_optimizer(AdamW(MODEL.parameters()))
    set_optimizer(SGD(MODEL.parameters(), lr=0.3))


def test_unexpected_attributes_are_reported_once(caplog):
    optimizer = SGD(MODEL.parameters(), lr=0.1)
    set_optimizer = compiled_with(optimizer)
    vars(optimizer).update(mine=1, _step_count=1)
    optimizer.defaults["other"] = 2
    optimizer.param_groups[0]["x"] = 3
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds initial_lr, and counts calls in a `step` of its own
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        set_optimizer(optimizer)
        set_optimizer(optimizer)
    assert caplog.messages == [
        "Ignoring unexpected optimizer attribute in SGD2 optimizer: ['mine']",
        "Ignoring unexpected default group variable in SGD2 optimizer: ['other']",
        "Ignoring unexpected group 0 attribute in SGD2 optimizer: ['x']",
    ]


@pytest.mark.parametrize("kind", [SGD, torch.optim.SGD, torch.optim.Adagrad])
def test_a_number_named_step_is_an_unexpected_attribute(kind, caplog):
    optimizer = kind(MODEL.parameters(), lr=0.1)
    executor = poptorch.trainingModel(Loss(MODEL), options(), optimizer)
    executor(torch.ones(2, 3))
    optimizer.step = 0
    before = MODEL.weight.detach().clone()
    for _ in range(2):
        executor.setOptimizer(optimizer)
        executor(torch.ones(2, 3))
    assert [text.partition(" in ")[0] for text in caplog.messages if "'step'" in text] == [
        "Ignoring unexpected optimizer attribute"
    ]
    assert torch.all(MODEL.weight != before)
    executor.destroy()


def test_loading_a_state_is_not_reported(caplog):
    optimizer = poptorch.optim.LAMB(MODEL.parameters())
    set_optimizer = compiled_with(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    set_optimizer(optimizer)
    assert caplog.messages == []


HOOKS = {
    "pre": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "post": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
    "all pre": lambda optimizer, hook: torch_optimizer.register_optimizer_step_pre_hook(hook),
    "all post": lambda optimizer, hook: torch_optimizer.register_optimizer_step_post_hook(hook),
}


@pytest.mark.parametrize("kind", [SGD, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("where", HOOKS)
def test_hooks_of_steps_run_once_for_each_update(kind, where):
    model, calls = Trained(), []
    optimizer = kind(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(), optimizer)
    executor(*batch())
    handle = HOOKS[where](optimizer, lambda one, *_: calls.append(one))
    try:
        executor(*batch())
    finally:
        handle.remove()
    executor(*batch())
    assert calls == [optimizer]


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.param_groups[0].update(lr=0.5),
        lambda optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.5)),
        lambda optimizer: setattr(optimizer, "loss_scaling", 2.0),
    ],
)
def test_rates_that_change_without_set_optimizer_are_one_warning(caplog, change):
    model, x, target = Trained(), *batch()
    optimizer = SGD(model.parameters(), lr=0.25, loss_scaling=1.0)
    executor = poptorch.trainingModel(model, options(), optimizer)
    executor(x, target)
    executor.setOptimizer(optimizer)
    executor(x, target)
    assert caplog.messages == []
    change(optimizer)
    for _ in range(2):
        executor(x, target)
    (message,) = caplog.messages
    assert message.startswith(
        "the optimizer's rates changed after setOptimizer, and calls use those from before: l"
    )
    assert "fix: call setOptimizer(optimizer)" in message


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [SGD, torch.optim.SGD])
def test_a_scheduler_with_set_optimizer_is_no_warning(kind, caplog):
    model, x, target = Trained(), *batch()
    optimizer = kind(model.parameters(), lr=0.25)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    executor = poptorch.trainingModel(model, options(), optimizer)
    for _ in range(3):
        executor(x, target)
        scheduler.step()
        executor.setOptimizer(optimizer)
    assert caplog.messages == []
    scheduler.step()
    executor(x, target)
    assert "lr is 0.015625, and was 0.03125" in caplog.text


@pytest.mark.parametrize("scaling", [0, 0.0, -2.0, math.inf, float("nan")])
def test_a_loss_scaling_that_scales_nothing_back_is_refused(scaling):
    model = Trained()
    with pytest.raises(AssertionError, match="loss_scaling"):
        poptorch.trainingModel(model, options(), SGD(model.parameters(), lr=0.1, loss_scaling=scaling))
    executor = poptorch.trainingModel(
        model, options(), optimizer := SGD(model.parameters(), lr=0.1, loss_scaling=8.0)
    )
    optimizer.loss_scaling = scaling
    with pytest.raises(AssertionError, match="loss_scaling"):
        executor.setOptimizer(optimizer)
    optimizer.loss_scaling = 4.0
    executor.setOptimizer(optimizer)
    executor(*batch())


@pytest.mark.parametrize("name", ["max_grad_norm", "max_grad_value"])
def test_a_negative_bound_of_gradients_is_refused(name):
    model = Trained()
    optimizer = SGD(model.parameters(), lr=0.1)
    setattr(optimizer, name, -1.0)
    with pytest.raises(AssertionError, match=f"{name} has to be 0 or more, and is -1"):
        poptorch.trainingModel(model, options(), optimizer)


def test_relaxed_checks_report_in_debug_messages(caplog):
    optimizer = SGD(MODEL.parameters(), lr=0.1)
    set_optimizer = compiled_with(optimizer, relaxed=True)
    optimizer.param_groups[0]["x"] = 1
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        set_optimizer(optimizer)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "Ignoring unexpected group 0 attribute in SGD2 optimizer: ['x']")
    ]


def test_a_poptorch_optimizer_after_a_torch_one_is_no_warning(caplog):
    set_optimizer = compiled_with(torch.optim.SGD(MODEL.parameters(), lr=0.1))
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        set_optimizer(SGD(MODEL.parameters(), lr=0.2))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("arguments", "reduction"),
    [
        ({"accum_type": torch.float16}, "running"),
        ({"accum_type": torch.float16, "use_combined_accum": True}, "mean"),
        ({}, "mean"),
    ],
)
def test_an_accumulator_in_float16_makes_means_running(arguments, reduction):
    executor = poptorch.trainingModel(Loss(MODEL), options(), SGD(MODEL.parameters(), lr=0.1))
    executor.setOptimizer(SGD(MODEL.parameters(), lr=0.1, **arguments))
    executor.compile(torch.ones(2, 3))
    assert executor._executable.settings.reduction == reduction
    executor.destroy()
    executor.setOptimizer(SGD(MODEL.parameters(), lr=0.1))
    executor.compile(torch.ones(2, 3))
    assert executor._executable.settings.reduction == "mean"


def test_half_weights_are_float32_in_a_step_and_rounded_once():
    seen = []

    class Watching(Signed):
        def step(self, closure=None):
            (group,) = self.param_groups
            seen.extend((each.dtype, each.grad.dtype) for each in group["params"])
            super().step(closure)

    model = module(
        lambda self, x: poptorch.identity_loss(self.layer(x) ** 2, "mean"),
        layer=torch.nn.Linear(3, 2, dtype=torch.float16),
    )
    optimizer = Watching(model.parameters(), lr=0.1)
    expected = (model.layer.weight.float() - 0.1 * torch.ones(())).half()
    executor = poptorch.trainingModel(model, options(), optimizer)
    before = model.layer.weight.clone()
    memory = model.layer.weight.data_ptr()
    executor(batch()[0].half())
    assert seen == [(torch.float32, torch.float32)] * 2
    assert (model.layer.weight.dtype, model.layer.weight.data_ptr()) == (torch.float16, memory)
    down, up = expected, (before.float() + 0.1 * torch.ones(())).half()
    assert ((model.layer.weight == down) | (model.layer.weight == up)).all()
    assert optimizer.state[model.layer.weight]["mean"].dtype == torch.float32
