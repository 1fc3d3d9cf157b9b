"""The weights of the model are those that train: contract of sections 7 and 4.1, without a second copy."""

import copy
import gc
import io
import pickle
import subprocess
import weakref

import pytest
import torch
from executor_models import Counting, Outer, Trained, batch, options, trainer
from torch import nn
from torch.nn.modules import module as torch_module

import poptorch
import quick_python
from poptorch._poplar_executor import PoplarExecutor
from small_models import module


class Buffered(Trained):
    """`Trained` with a buffer that forward reads, and one that forward writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, target=None):
        self.seen += 1
        return super().forward(x * self.scale, target)


def values(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain_steps(model, steps, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*batch())[1].backward()
        optimizer.step()


def equal(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])] == []


# ---- one copy ----------------------------------------------------------------------------------------------


def test_autograd_notices_that_a_call_has_written_to_the_weights():
    executor, model = trainer()
    executor(*batch())
    version = model.layer.weight._version
    executor(*batch())
    assert model.layer.weight._version > version


def test_weights_begin_at_64_bytes_while_an_executor_is_attached():
    room = torch.randn(7)
    model = Trained()
    model.layer.weight.data = room[1:].view(2, 3).clone()
    model.layer.bias = nn.Parameter(torch.randn(8).narrow(0, 1, 2).clone())
    executor, _ = trainer(model)
    executor(*batch())
    assert [value.data_ptr() % 64 for value in model.parameters()] == [0, 0]


def test_no_class_is_replaced_and_nothing_is_registered_on_all_modules():
    tables = [
        getattr(torch_module, name)
        for name in dir(torch_module)
        if name.startswith("_global_") and "hooks" in name
    ]
    sizes = [len(table) for table in tables if hasattr(table, "__len__")]
    executor, model = trainer(Buffered())
    evaluation = poptorch.inferenceModel(model, options())
    executor(*batch())
    evaluation(batch()[0])
    assert [len(table) for table in tables if hasattr(table, "__len__")] == sizes
    for part in model.modules():
        assert type(part) in (Buffered, nn.Linear)
        assert not part._forward_hooks and not part._forward_pre_hooks
    assert {type(value) for value in model.parameters()} == {nn.Parameter}
    assert {type(value) for value in model.buffers()} == {torch.Tensor}
    assert [vars(value) for value in model.parameters()] == [{}, {}]


# ---- the functions that copied -----------------------------------------------------------------------------


def test_a_program_with_explicit_copies_runs_as_without_them():
    executor, model = trainer(Buffered())
    evaluation = poptorch.inferenceModel(model, options())
    twin = copy.deepcopy(model)
    x, target = batch()
    for _ in range(3):
        executor(x, target)
        executor.copyWeightsToHost()
        saved = values(model)
        model.load_state_dict(saved)
        executor.copyWeightsToDevice()
        plain_steps(twin, 1)
        assert equal(values(model), values(twin))
        assert torch.equal(evaluation(x), twin(x).detach())
        evaluation.copyWeightsToHost()
        evaluation.copyWeightsToDevice()


def test_a_copy_to_the_host_is_a_version_and_a_needless_one_is_not():
    executor, model = trainer()
    executor(*batch())
    version = executor._host_weights_version
    executor.copyWeightsToHost()
    assert executor._host_weights_version == version + 1
    assert executor.copyWeightsToHostIfNeeded() is False
    assert model.copyWeightsToHostIfNeeded() is False
    assert executor._host_weights_version == version + 1


@pytest.mark.parametrize("name", ["copyWeightsToHost", "copyWeightsToDevice", "copyNamedBuffersToDevice"])
@pytest.mark.parametrize("training", [True, False])
def test_the_copies_need_a_compiled_and_attached_model(name, training):
    wrap = poptorch.trainingModel if training else poptorch.inferenceModel
    executor = wrap(Buffered(), options().updatableNamedBuffers(["scale"]))
    with pytest.raises(poptorch.Error, match=r"(?s)Model has not been compiled or has been destroyed.*fix:"):
        getattr(executor, name)()
    inputs = batch() if training else batch()[:1]
    executor(*inputs)
    getattr(executor, name)()
    executor.detachFromDevice()
    with pytest.raises(poptorch.Error, match=r"(?s)not attached.*fix:"):
        getattr(executor, name)()
    executor.attachToDevice()
    getattr(executor, name)()
    executor.destroy()
    with pytest.raises(poptorch.Error, match="Model has not been compiled or has been destroyed"):
        getattr(executor, name)()


def test_the_executor_loads_into_the_users_model():
    executor, model = trainer(lr=0.0)
    x, target = batch()
    zeros = {"layer.weight": torch.zeros(2, 3), "layer.bias": torch.ones(2)}
    for each in (executor, poptorch.inferenceModel(model, options())):
        keys = each.load_state_dict(zeros)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        assert torch.equal(model.layer.bias, torch.ones(2))
        assert torch.equal(executor(x, target)[0], torch.ones(2, 2))
        with pytest.raises(RuntimeError, match="Missing key"):
            each.load_state_dict({})
        assert each.load_state_dict({"other": torch.ones(1)}, strict=False).unexpected_keys == ["other"]


# ---- wrapping ----------------------------------------------------------------------------------------------


def test_a_wrapped_model_has_two_more_methods_and_loses_them():
    model = Trained()
    names = set(dir(model))
    executor, _ = trainer(model)
    executor(*batch())
    assert set(dir(model)) - names >= {"copyWeightsToHostIfNeeded", "destroy"}
    model.destroy()
    assert set(dir(model)) == names


def test_a_model_does_not_keep_its_executor_alive_and_outlives_it():
    executor, model = trainer()
    executor(*batch())
    before, watch = values(model), weakref.ref(executor)
    del executor
    gc.collect()
    assert watch() is None
    assert equal(values(model), before)
    poptorch.trainingModel(model, options())(*batch())
    assert not equal(values(model), before)


LOADS = """
import io, sys, torch
sys.meta_path.insert(0, type("No", (), {"find_spec": staticmethod(
    lambda name, *rest: (_ for _ in ()).throw(ImportError(name)) if name.split(".")[0] in ("poptorch", "popengine")
    else None)})())
for line in sys.stdin.read().split():
    value = torch.load(io.BytesIO(bytes.fromhex(line)), weights_only=False)
    print(type(value).__name__)
"""


def test_what_is_saved_loads_without_the_package():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2))
    loss = Outer(nn.Sequential(model, nn.Flatten(0)))

    wrapped = module(lambda self, x: poptorch.identity_loss(self.inner(x).sum(), "none"), inner=loss)
    poptorch.trainingModel(wrapped, options(), torch.optim.SGD(wrapped.parameters(), lr=0.1))(batch()[0])
    lines = []
    for value in (model, model[0].weight, model.state_dict(), list(model.parameters())):
        file = io.BytesIO()
        torch.save(value, file)
        lines.append(file.getvalue().hex())
    found = subprocess.run(
        [*quick_python.words(), "-c", LOADS],
        input=" ".join(lines),
        text=True,
        capture_output=True,
        check=False,
    )
    assert found.stdout.split() == ["Sequential", "Parameter", "OrderedDict", "list"], found.stderr


def test_a_shallow_copy_stays_wrapped_and_a_deep_one_is_plain():
    executor, model = trainer()
    executor(*batch())
    assert copy.copy(model).copyWeightsToHostIfNeeded() is False
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(copy.copy(model), options())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert getattr(other, "destroy", None) is None
        assert equal(values(other), values(model))
        before = values(model)
        poptorch.trainingModel(other, options())(*batch())
        assert equal(values(model), before)
    del executor


@pytest.mark.parametrize("training", [True, False])
def test_buffers_must_be_plain_tensors_in_training(training):
    model = Counting()
    model._buffers["seen"] = nn.Parameter(torch.zeros(1), requires_grad=False)
    if training:
        with pytest.raises(
            poptorch.Error, match=r"All buffers must be an instance of torch\.Tensor.*Parameter"
        ):
            poptorch.trainingModel(model, options())
    else:
        poptorch.inferenceModel(model, options())


def test_a_model_trains_in_one_wrapper_at_a_time():
    executor, model = trainer()
    for wrapped in (model, executor):
        with pytest.raises(RuntimeError, match=r"already been wrapped in 'poptorch.trainingModel'"):
            poptorch.trainingModel(wrapped)
    executor.destroy()  # before compilation
    executor, _ = trainer(model)
    executor(*batch())
    model.destroy()
    assert type(model) is Trained
    trainer(model)


def test_plain_functions_can_be_wrapped():
    executor = poptorch.inferenceModel(lambda a, b=2: a * b, options())
    assert executor(torch.ones(1)) == 2
    with pytest.raises(poptorch.Error, match="Value mismatch for b"):
        executor(torch.ones(1), b=3)


def test_what_is_passed_in_the_wrong_place_is_named_with_the_right_call():
    model = torch.nn.Linear(3, 2)
    with pytest.raises(
        poptorch.Error,
        match=r"poptorch\.trainingModel: the model takes a module or a function; found 'Linear'",
    ):
        poptorch.trainingModel("Linear")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(poptorch.Error, match=r"fix: poptorch\.trainingModel\(model, optimizer=optimizer\)"):
        poptorch.trainingModel(model, optimizer)
    with pytest.raises(AssertionError, match=r"builtins\.str\n  fix: make an object: torch.optim.SGD"):
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


def test_an_inference_executor_pickles_before_compilation(tmp_path):
    executor = poptorch.inferenceModel(Trained(), options(iterations=2))
    torch.save(executor, tmp_path / "executor")
    loaded = torch.load(tmp_path / "executor", weights_only=False)
    x, _ = batch()
    assert isinstance(loaded, PoplarExecutor)
    assert torch.equal(loaded(x), executor(x))
    with pytest.raises(poptorch.Error, match=r"save\(filename\)"):
        pickle.dumps(executor)


def test_the_executor_stands_for_the_users_model():
    executor, model = trainer()
    assert executor.model is model
    assert torch.equal(executor.layer.weight, model.layer.weight)
    assert repr(executor) == "Trained(\n  (layer): Linear(in_features=3, out_features=2, bias=True)\n)"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = executor.nothing_like_it
