"""Wrapping: a wrapped model and its copies are plain models; how a wrapper lets go of its model."""

import io
import pickle

import pytest
import torch
from executor_models import Trained, batch, options, trainer
from torch import nn

import poptorch
from poptorch._impl import rewrapModelIfNecessary, unwrapModelIfNecessary
from poptorch._poplar_executor import PoplarExecutor


def is_wrapped(model):
    try:
        poptorch.trainingModel(model)
    except RuntimeError as error:
        assert "already been wrapped" in str(error)
        return True
    return False


def saved_and_loaded(value, **kwargs):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **kwargs)


def test_a_model_trains_in_one_wrapper_at_a_time():
    executor, model = trainer()
    for wrapped in (model, executor):
        with pytest.raises(RuntimeError, match=r"already been wrapped in 'poptorch.trainingModel'"):
            poptorch.trainingModel(wrapped)
    executor(*batch())
    model.destroy()
    assert type(model) is Trained
    trainer(model)


def test_a_model_infers_in_many():
    executor, model = trainer()
    executor(*batch())
    x, _ = batch()
    results = [poptorch.inferenceModel(m, options())(x) for m in (model, executor, model)]
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], model(x).detach())


def test_destroy_before_compilation_makes_the_model_an_ordinary_module():
    executor, model = trainer()
    executor.destroy()
    assert not is_wrapped(model)


def test_plain_functions_can_be_wrapped():
    executor = poptorch.inferenceModel(lambda a, b=2: a * b, options())
    assert executor(torch.ones(1)) == 2
    with pytest.raises(poptorch.Error, match="Value mismatch for b"):
        executor(torch.ones(1), b=3)


def test_what_is_passed_in_the_wrong_place_is_named_with_the_right_call():
    model = torch.nn.Linear(3, 2)
    with pytest.raises(poptorch.Error, match=r"poptorch\.trainingModel: the model is 'Linear', of type str"):
        poptorch.trainingModel("Linear")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(poptorch.Error, match=r"fix: poptorch\.trainingModel\(model, optimizer=optimizer\)"):
        poptorch.trainingModel(model, optimizer)
    with pytest.raises(AssertionError, match=r"builtins\.str\n  fix: an optimizer of the model's parameters"):
        poptorch.trainingModel(model, poptorch.Options(), "SGD")
    predict = poptorch.inferenceModel(model)
    predict(torch.ones(4, 3))
    with pytest.raises(
        poptorch.Error, match=r"Data type mismatch for input.*\n  fix: input\.to\(torch\.float32\)"
    ):
        predict(torch.ones(4, 3).double())
    with pytest.raises(poptorch.Error, match=r"Mandatory parameter input missing[^$]*\n  fix: pass input"):
        predict()


def test_other_options_are_refused():
    with pytest.raises(poptorch.Error, match=r"Invalid type: 'options'.*dict.*Options"):
        poptorch.inferenceModel(Trained(), {"device_iterations": 2})


def test_accumulation_has_no_meaning_in_inference():
    with pytest.raises(
        poptorch.Error, match=r"Training.gradientAccumulation.*poptorch.inferenceModel\(\)"
    ) as e:
        poptorch.inferenceModel(Trained(), options(accumulation=2))
    assert "deviceIterations" in str(e.value)


def test_the_output_mode_is_picked_on_the_clone():
    opts = options()
    assert poptorch.inferenceModel(Trained(), opts).options.output_mode == poptorch.OutputMode.All
    assert poptorch.trainingModel(Trained(), opts).options.output_mode == poptorch.OutputMode.Final
    assert opts.defaultOutputMode()


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_wrapping_freezes_the_users_options(wrap):
    opts = options(iterations=2)
    executor = wrap(Trained(), opts)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(3)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        executor.options.deviceIterations(3)
    wrap(Trained(), opts)  # one object may serve several models
    assert opts.clone().deviceIterations(3).device_iterations == 3


def test_options_that_inference_refuses_stay_writable():
    opts = options(accumulation=2)
    with pytest.raises(poptorch.Error, match="must be 1"):
        poptorch.inferenceModel(Trained(), opts)
    opts.Training.gradientAccumulation(1)
    assert poptorch.inferenceModel(Trained(), opts).options.Training.gradient_accumulation == 1


def test_describe_leaves_options_writable():
    opts = options()
    poptorch.describe(Trained(), opts, batch())
    assert opts.deviceIterations(2).device_iterations == 2


def test_the_top_levels_flags_are_fixed_at_wrapping():
    class Flagged(nn.Module):
        def forward(self, x):
            return x + (1 if self.training else 0)

    model = Flagged().eval()
    executor = poptorch.inferenceModel(model, options())
    model.train()
    assert executor(torch.zeros(1)) == 0


def test_an_inference_executor_pickles_before_compilation():
    executor = poptorch.inferenceModel(Trained(), options(iterations=2))
    loaded = saved_and_loaded(executor, weights_only=False)
    x, _ = batch()
    assert isinstance(loaded, PoplarExecutor)
    assert torch.equal(loaded(x), executor(x))
    with pytest.raises(poptorch.Error, match=r"save\(filename\)"):
        pickle.dumps(executor)


def test_integrations_can_unwrap_a_model_for_a_while():
    executor, model = trainer()
    executor(*batch())
    unwrapModelIfNecessary(model)
    assert not hasattr(model, "destroy")
    rewrapModelIfNecessary(model)
    assert is_wrapped(model)
    executor(*batch())
    plain = Trained()
    unwrapModelIfNecessary(plain)
    rewrapModelIfNecessary(plain)
    assert type(plain) is Trained


def test_the_executor_stands_for_the_users_model():
    executor, model = trainer()
    assert executor.model is model
    assert torch.equal(executor.layer.weight, model.layer.weight)
    assert repr(executor) == "Trained(\n  (layer): Linear(in_features=3, out_features=2, bias=True)\n)"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = executor.nothing_like_it


def test_a_parameter_can_be_a_buffer_of_a_model_for_inference():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", nn.Parameter(torch.full((2,), 3.0), requires_grad=False))

        def forward(self, x):
            return x * self.scale

    assert poptorch.inferenceModel(Model())(torch.ones(1, 2)).tolist() == [[3, 3]]
