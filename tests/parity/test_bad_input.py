"""Mistakes and failures: each a clear error, and afterwards weights as before and an executor that works."""

import copy
import enum
import traceback

import pytest
import torch
from parity_models import Digits, annotated
from parity_runs import options
from torch import Tensor, nn
from torch.nn import functional

import popdist  # noqa: F401
import poptorch
from small_models import module

ROWS, SIZE = 2, 4


@torch.library.custom_op("parity_tests::fragile", mutates_args=())
def fragile(x: Tensor) -> Tensor:
    """The identity, but for values above 100."""
    if x.max() > 100:
        raise ValueError("too large")
    return x.clone()


@fragile.register_fake
def _(x):
    return torch.empty_like(x)


fragile.register_autograd(lambda ctx, gradient: gradient)


class Fragile(nn.Module):
    """Four stages; the third may fail."""

    def __init__(self):
        super().__init__()
        for name in "abcd":
            setattr(self, name, poptorch.BeginBlock(nn.Linear(SIZE, SIZE), name))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, target):
        size = x.abs().max()
        self.seen += 1
        x = self.c(self.b(self.a(x.clamp(-1, 1))))
        x = x + fragile(size) * 0
        return functional.mse_loss(self.d(x), target)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def four_stages():
    return poptorch.PipelinedExecution("a", "b", "c", "d")


def fragile_executor(**more):
    torch.manual_seed(0)
    model = Fragile()
    own = options(four_stages(), **more).broadcastBuffers(False)
    return poptorch.trainingModel(model, own, adam(model))


def batch(micro_batches):
    return torch.randn(micro_batches * ROWS, SIZE), torch.randn(micro_batches * ROWS, SIZE)


# ---- failures while the model runs ------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_failing_operation_names_its_place_and_leaves_what_finished_updates_have_made(replicas):
    failing, twin = fragile_executor(iterations=3, replicas=replicas), fragile_executor(replicas=replicas)
    good, later = batch(3 * 8 * replicas), batch(3 * 8 * replicas)
    update = 8 * replicas * ROWS  # rows
    failing(*good)
    for start in range(0, 3 * update, update):
        twin(*(value[start : start + update].clone() for value in good))
    bad = (later[0].clone(), later[1])
    bad[0][2 * update + 5] = 1000  # in the third device iteration, after two weight updates
    with pytest.raises(poptorch.Error) as caught:
        failing(*bad)
    message = str(caught.value)
    assert "forward of stage 2 (blocks c) failed on ipu 2" in message
    assert "ValueError: too large" in message
    assert "test_bad_input.py:" in message
    assert "2 of the 3 weight updates of this call were done, and the weights are those after them" in message
    assert failing.finished_updates == 2
    for start in (0, update):
        twin(*(value[start : start + update].clone() for value in later))
    assert failing.rng_state == twin.rng_state
    for name, value in failing.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name
    failing(*good)
    assert failing.finished_updates == 3
    for start in range(0, 3 * update, update):
        twin(*(value[start : start + update].clone() for value in good))
    for name, value in failing.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


def test_a_failure_of_the_first_call_leaves_the_initial_weights():
    executor = fragile_executor()
    before = copy.deepcopy(executor.model.state_dict())
    x, target = batch(8)
    with pytest.raises(poptorch.Error, match="too large"):
        executor(x * 1000, target)
    assert not executor.isCompiled()  # the host's weights are the only ones
    assert all(torch.equal(value, before[name]) for name, value in executor.model.state_dict().items())
    assert executor(x, target).shape == (8,)


def test_an_index_out_of_range_names_the_line_of_the_embedding():
    forward = lambda self, words: self.embedding(words)  # noqa: E731
    executor = poptorch.inferenceModel(module(forward, embedding=nn.Embedding(3, 2)))
    with pytest.raises(poptorch.Error, match="index out of range") as caught:
        executor(torch.tensor([0, 7]))
    assert f"{__file__}:{forward.__code__.co_firstlineno}" in str(caught.value)
    assert executor(torch.tensor([0, 2])).shape == (2, 2)


def test_more_ipus_than_cores_take_turns():
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return poptorch.identity_loss(x, "sum")

    model = module(
        forward,
        layers=nn.ModuleList(poptorch.BeginBlock(nn.Linear(SIZE, SIZE), ipu_id=ipu) for ipu in range(24)),
    )
    executor = poptorch.trainingModel(model, options(accumulation=47), adam(model))
    assert executor(batch(47)[0]).shape == (47,)


def test_an_executor_that_is_gone_leaves_no_threads():
    import gc
    import threading
    import time

    executor = fragile_executor()
    executor(*batch(8))
    cores = [thread for thread in threading.enumerate() if thread.name.startswith("core ")]
    assert len(cores) >= torch.get_num_threads()
    before = len(threading.enumerate())
    left = before - torch.get_num_threads()
    del executor
    gc.collect()
    deadline = time.time() + 240
    while len(threading.enumerate()) > left and time.time() < deadline:
        time.sleep(0.01)
    assert len(threading.enumerate()) <= left


# ---- models and options that don't fit together -----------------------------------------------------------


def digits_executor(strategy, **more):
    torch.manual_seed(0)
    model = annotated(Digits())
    return poptorch.trainingModel(model, options(strategy, **more), adam(model))


def assert_unchanged_and_usable(executor):
    """A compilation that failed has touched nothing; the same model trains with options that fit."""
    torch.manual_seed(0)
    fresh = Digits().state_dict()
    model = executor.model
    assert all(torch.equal(value, fresh[name]) for name, value in model.state_dict().items())
    assert not executor.isCompiled()
    poptorch.removeBlocks(model)
    assert executor(*Digits.data(16))[1].shape == (8,)


def test_a_block_that_the_strategy_does_not_know_is_named_with_those_it_knows():
    executor = digits_executor(poptorch.PipelinedExecution("a", "b", "c"))
    with pytest.raises(AssertionError, match="Unknown Block 'd'") as caught:
        executor(*Digits.data(16))
    assert isinstance(caught.value, poptorch.Error)
    assert "'a', 'b', 'c'" in str(caught.value)
    assert "parity_models.py:" in str(caught.value)
    assert_unchanged_and_usable(executor)


def test_a_misspelt_block_is_named_with_the_one_that_is_meant():
    model = nn.Sequential(poptorch.BeginBlock(nn.Linear(2, 2), "encoder"))
    strategy = poptorch.PipelinedExecution("ENCODR", "head")
    executor = poptorch.inferenceModel(model, poptorch.Options().setExecutionStrategy(strategy))
    with pytest.raises(AssertionError, match=r"Unknown Block 'encoder'[\s\S]*did you mean 'encoder'\?"):
        executor(torch.zeros(2, 2))


def test_a_block_without_an_ipu_under_same_as_ipu_is_refused():
    executor = digits_executor(None)
    with pytest.raises(AssertionError, match=r"AutoStage.SameAsIpu.*no IPU was specified.*'a'"):
        executor(*Digits.data(16))
    assert_unchanged_and_usable(executor)


@pytest.mark.parametrize(
    ("strategy", "needed"),
    [
        (lambda: poptorch.PipelinedExecution("a", "b", "c", "d"), 7),
        (lambda: poptorch.PipelinedExecution(["a", "b"], ["c", "d"]), 3),
        (lambda: poptorch.PipelinedExecution("a", "b", poptorch.Stage("c", "d").ipu(0)), 5),
        (lambda: poptorch.PipelinedExecution(*(poptorch.Stage(b).ipu(0) for b in "abcd")), 1),
        (
            lambda: poptorch.PipelinedExecution(
                *(poptorch.Stage(b).ipu(i) for b, i in zip("abcd", (1, 2, 3, 4), strict=True))
            ),
            9,
        ),
        (lambda: poptorch.ShardedExecution("a", "b", "c", "d"), 1),
    ],
)
def test_a_pipeline_needs_two_micro_batches_for_each_forward_stage_less_one(strategy, needed):
    if needed > 1:
        executor = digits_executor(strategy(), accumulation=needed - 1)
        with pytest.raises(poptorch.Error, match=rf"number of pipeline stages \({needed}\)") as caught:
            executor(*Digits.data(2 * (needed - 1)))
        message = str(caught.value)
        assert "Training.gradientAccumulation" in message
        assert "must be greater than or equal to" in message
        assert "PipelinedExecution" in message
        forward = (needed + 1) // 2
        assert f"{forward} forward stages bring {forward - 1} more in training" in message
        assert f"gradientAccumulation({2 * (needed - 1)}); or options.setExecutionStrategy(" in message
    assert digits_executor(strategy(), accumulation=needed)(*Digits.data(2 * needed))[1].numel() == needed


def test_a_pipeline_in_inference_needs_a_device_iteration_for_each_stage():
    def executor(iterations):
        own = poptorch.Options().deviceIterations(iterations).setExecutionStrategy(four_stages())
        return poptorch.inferenceModel(annotated(Digits()), own.showCompilationProgressBar(False))

    with pytest.raises(poptorch.Error, match=r"deviceIterations .* number of pipeline stages \(4\)"):
        executor(3)(*Digits.data(6))
    assert executor(4)(*Digits.data(8))[1].shape == (4,)


def test_a_loss_of_one_element_is_a_scalar():
    def forward(self, x, target):
        loss = functional.mse_loss(self.layer(x), target)
        return poptorch.identity_loss(loss.reshape(self.shape), reduction="none")

    rows, losses, weights = batch(2), [], []
    for shape in ((), (1,), (1, 1)):
        torch.manual_seed(0)
        model = module(forward, layer=nn.Linear(SIZE, SIZE), shape=shape)
        losses.append(poptorch.trainingModel(model, options(accumulation=2), adam(model))(*rows))
        weights.append(model.layer.weight)
    assert [loss.shape for loss in losses] == [(2,), (2,), (2, 1)]
    for loss, weight in zip(losses, weights, strict=True):
        assert torch.equal(loss.flatten(), losses[0])
        assert torch.equal(weight, weights[0])


# ---- models that would not train --------------------------------------------------------------------------


class Frozen(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(SIZE, SIZE), loss

    def forward(self, x):
        return poptorch.identity_loss(self.loss(self.layer, x), "mean")


def test_a_model_that_computes_in_inference_mode_is_refused():
    model = Frozen(lambda layer, x: torch.inference_mode()(layer)(x))
    executor = poptorch.trainingModel(model, options(accumulation=1), adam(model))
    with pytest.raises(poptorch.Error, match=r"(?s)gets a gradient.*torch.inference_mode.*inferenceModel"):
        executor(batch(1)[0])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "loss",
    [
        lambda layer, x: layer(x).detach(),
        lambda layer, x: torch.no_grad()(layer)(x),
        lambda layer, x: nn.functional.dropout(x, 0.5, training=False),
        lambda layer, x: layer(x).argmax(1).float(),
        lambda layer, x: layer.requires_grad_(False)(x),
    ],
    ids=["detached", "no_grad", "left out", "in integers", "frozen"],
)
def test_a_model_whose_loss_depends_on_no_parameter_runs_with_a_warning(loss, accumulation, caplog):
    """As in the original: for example dropout in eval mode within a model that is trained."""
    model = Frozen(loss)
    loss(model.layer, batch(1)[0])  # one of them freezes the layer
    before = {name: value.clone() for name, value in model.state_dict().items()}
    executor = poptorch.trainingModel(model, options(accumulation=accumulation), adam(model))
    rows = batch(1)[0]
    for _ in range(2):
        losses = executor(torch.cat([rows] * accumulation))
    executor.copyWeightsToHost()
    assert torch.allclose(losses.reshape(-1)[0], loss(model.layer, rows).mean())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert sum("no parameter gets a gradient" in record.message for record in caplog.records) == 1
    executor.destroy()


# ---- messages ------------------------------------------------------------------------------------------------


def loss_of(scores, labels):
    return nn.functional.cross_entropy(scores, labels)


TENSORS, MODEL, OPTIONS = [torch.zeros(2, 4), torch.zeros(2, 4)], nn.Linear(4, 4), poptorch.Options()
PAIR = module(lambda self, x: (y := self.layer(x), y.sum()), layer=MODEL)
infer = poptorch.inferenceModel
MISTAKES = {  # of the first hour: the end of the message
    "infer(MODEL)(TENSORS)": "pass the tensors as separate arguments: model(*batch), of a dictionary model(**batch)",
    "infer(loss_of)(TENSORS)": "fix: model(*batch)",
    "infer(MODEL)({'input': TENSORS[0]})": "as separate arguments: model(*batch), of a dictionary model(**batch)",
    "infer(loss_of)(TENSORS[0], torch.zeros(2, 1, dtype=torch.long))": "probabilities, as floats of the scores' shape",
    "infer(loss_of)(TENSORS[0], torch.zeros(2, dtype=torch.int32))": "fix: `labels.long()`",
    "infer(nn.Identity)": "fix: model = Identity(...), and an optimizer of model.parameters()",
    "infer(MODEL, poptorch.Options)": "fix: options = poptorch.Options()",
    "poptorch.Options(gradientAccumulation=4)": "= poptorch.Options(); options.Training.gradientAccumulation(4)",
    "poptorch.Options().deviceIterations(16 / 4)": "fix: options.deviceIterations(4)",
    "poptorch.Options(device_iteration=4)": "did you mean 'deviceIterations'?\n  fix: options = poptorch.Options()",
    "poptorch.describe(MODEL, TENSORS[0])": "fix: describe(model, options, batch)",
    "poptorch.testing.compare(MODEL, TENSORS[0], OPTIONS)": "optimizer, update=...), where a batch is one tuple",
    "poptorch.Options().enableProfiling(True)": 'enableProfiling("report")',
    "poptorch.DataLoader(OPTIONS, [], batchsize=8)": "did you mean 'batch_size'?",
    "poptorch.DataLoader(OPTIONS, iter(()))": "IterableDataset whose __iter__ makes it",
    "poptorch.identity_loss(TENSORS[0], 'avg')": ' ** 2, reduction="mean")',
    "poptorch.trainingModel(PAIR, loss='los')(TENSORS[0])": "of 2\n  fix: loss=1",
    "poptorch.trainingModel(MODEL, None, torch.optim.AdamW)": "fix: make an object: AdamW(model.parameters(), lr=0.1)",
    "poptorch.testing.compare(infer(MODEL), OPTIONS, TENSORS[0])": "update=...), where a batch is one tuple",
    "poptorch.split(MODEL, '2')": "found '2'\n  fix: poptorch.split(model, 2)",
    "poptorch.annotate(4, {'a': 0})": '{"bert.encoder.layer.0-5": 0, "bert.encoder.layer.*": 1, "cls": 0})',
    "poptorch.BeginBlock(MODEL, 1)": "fix: for an ipu write ipu_id=1",
    "poptorch.BeginBlock(nn.ModuleList([MODEL]))": "fix: mark the first layer inside: poptorch.BeginBlock(layers[0])",
    "poptorch.BeginBlock(nn.Linear, 'a', ipu_id=0)": 'fix: poptorch.BeginBlock(Linear(...), "name", ipu_id=0)',
    "poptorch.BeginBlock('first', MODEL)": "swapped?\n  fix: poptorch.BeginBlock(layer, 'first')",
    "poptorch.BeginBlock(TENSORS[0], 'a')": 'fix: in __init__, self.a = poptorch.BeginBlock(self.a, "a")',
    "poptorch.BeginBlock([MODEL], 'a')": "fix: mark the first layer inside: poptorch.BeginBlock(layers[0])",
    "poptorch.Block(nn.Linear(8, 16))": 'mark a layer by poptorch.BeginBlock(layer, "name", ipu_id=0)',
    "poptorch.Block('a', -1)": "fix: ipu_id=0",
    "poptorch.PipelinedExecution('a').ipu(0)": "did you mean 'Stage(\"block\").ipu(0)'?",
    "poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution)": "Strategy(poptorch.ShardedExecution())",
    "poptorch.Options().Precision.half()": "did you mean 'model.half()'?",
    "exec('with poptorch.Block: pass')": 'fix: with poptorch.Block("name", ipu_id=0):',
    "poptorch.annotate(MODEL, [0])": '"bert.encoder.layer.*": 1, "cls": 0})',
    "poptorch.optim.AdamW(MODEL)": "fix: model.parameters()",
    "popdist.Checkpoint('folder', MODEL)": 'fix: checkpoint = popdist.Checkpoint("checkpoints", every=100)',
    "popdist.Checkpoint('folder').restore(MODEL)": "loader), with what poptorch.trainingModel returns",
    "poptorch.describe(MODEL, OPTIONS, *TENSORS)": "fix: print(poptorch.describe(model, options, (images, labels)))",
    "poptorch.Stage('first', ipu=0)": '"layer0").ipu(0), poptorch.Stage("layer1").ipu(1)]',
    "infer(MODEL).compil()": "has no attribute 'compil', and its executor has none; did you mean 'compile'?",
    "popdist.resumable([], popdist.Checkpoint('x'), None)": 'popdist.Checkpoint("checkpoints"), trainer, epochs=3):',
    "infer(MODEL).plan": "fix: call the executor, as trainer(*batch), or trainer.compile(*batch)",
    "poptorch.PipelinedExecution([poptorch.Stage('a')])": "fix: PipelinedExecution(*stages), in place of a list",
    "poptorch.trainingModel(MODEL, None, torch.optim.lr_scheduler.StepLR(adam(MODEL), 1))": "after scheduler.step()",
    "infer(MODEL.eval)": "fix: parentheses: poptorch.inferenceModel(model.eval())",
    "infer(loss_of)({'scores': TENSORS[0]})": "fix: model(**batch)",
    "infer(loss_of)(TENSORS[0], target=TENSORS[1])": "labels), the parameters of forward(scores, labels)",
    "infer(loss_of)(TENSORS[0], TENSORS[1].long())": "classes).float()`; or pass the class numbers, `labels`",
    "popdist.Checkpoint('folder').save(MODEL)": " # of what checkpoint.restore(trainer, loader) was given",
    "poptorch.DataLoader(OPTIONS, torch.utils.data.Dataset())": "IterableDataset whose __iter__ makes it",
    "poptorch.DataLoader(OPTIONS, [], mode='Async', async_options={'bufer': 3})": 'async_options={"buffer_size": 4}',
    "poptorch.DataLoader(OPTIONS, [1], batch_size='8')": "found '8'\n  fix: batch_size=8",
    "poptorch.Stage('a').ipu('0')": 'fix: poptorch.Stage("block").ipu(0)',
    "poptorch.Options().from_json(\"{'deviceIterations': 4}\")": "fix: options.from_json('{\"deviceIterations\": 4}')",
    "poptorch.Options().outputMode(poptorch.OutputMode.EveryN)": "options.outputMode(poptorch.OutputMode.EveryN, 4)",
    "setattr(poptorch.Options(), 'deviceIterations', 4)": "is a method\n  fix: options.deviceIterations(4)",
    "poptorch.Options().loadFromFile(__file__)": "with lines such as: deviceIterations(4)",
    "poptorch.PipelinedExecution(poptorch.Stage('a'), 3)": "or PipelinedExecution(poptorch.AutoStage.AutoIncrement)",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_first_hour_shows_what_to_write_and_no_frame_of_ours(mistake):
    with pytest.raises(Exception) as caught:
        eval(mistake)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert text.endswith(MISTAKES[mistake]), text
    files = [entry.filename for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert {*files} <= {__file__, "<string>"}, files


@pytest.mark.parametrize("name", sorted(set(poptorch.__all__) - {"print", "setLogLevel"}))
def test_a_public_function_that_is_called_wrongly_shows_no_frame_of_ours(name):
    function = getattr(poptorch, name)
    if not callable(function) or isinstance(function, enum.EnumType):
        return
    for arguments in [(), *[(object(),) * count for count in (1, 2, 3, 9)]]:
        try:
            function(*arguments)
        except Exception as error:
            files = [entry.filename for entry in traceback.extract_tb(error.__traceback__)]
            assert {*files} <= {__file__}, (arguments, files)


class Faulty(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise KeyError(index)


def test_a_dataset_that_fails_shows_its_own_lines_and_none_of_ours():
    with pytest.raises(KeyError) as caught:
        list(poptorch.DataLoader(OPTIONS, Faulty(), batch_size=2))
    assert {entry.filename for entry in traceback.extract_tb(caught.value.__traceback__)} == {__file__}


def test_a_block_in_a_constructor_warns_that_it_has_no_effect(caplog):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            with poptorch.Block("a"):
                self.layer = nn.Linear(2, 2)

    Model()
    assert f"{__file__}:" in caplog.text
    assert "a Block in __init__ has no effect" in caplog.text


def test_a_block_that_forward_makes_but_does_not_enter_warns_with_its_line(caplog):
    forward = lambda self, x: poptorch.Block("a", ipu_id=0) and self.layer(x)  # noqa: E731
    infer(module(forward, layer=MODEL))(TENSORS[0])
    line = f"{__file__}:{forward.__code__.co_firstlineno}"
    assert f"{line}: a Block without `with` has no effect\n  fix: `with poptorch.Block(...):`" in caplog.text


def test_stages_in_the_wrong_order_are_listed_in_the_order_of_the_data():
    layers = {name: poptorch.BeginBlock(nn.Linear(2, 2), name) for name in "abc"}
    model = module(lambda self, x: self.c(self.b(self.a(x))), **layers)
    own = poptorch.Options().deviceIterations(3)
    own.setExecutionStrategy(poptorch.PipelinedExecution("c", "b", "a"))
    executor = poptorch.inferenceModel(model, own)
    with pytest.raises(poptorch.Error, match=r"fix: list the stages in the order of the data: a; b; c$"):
        executor(torch.zeros(3, 2))


def test_a_step_of_the_optimizer_after_a_call_says_once_that_it_does_nothing(caplog):
    model = nn.Linear(2, 1)
    for kind in (torch.optim.SGD, poptorch.optim.SGD):
        optimizer = kind(model.parameters(), lr=0.1)
        trainer = poptorch.trainingModel(
            module(lambda self, x: self.layer(x).sum(), layer=model), None, optimizer
        )
        for _ in range(2):
            trainer(torch.ones(1, 2))
            optimizer.step()
        trainer.destroy()
    lines = [record.getMessage() for record in caplog.records if "did nothing" in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].endswith(
        "SGD.step() did nothing: each call of the executor has updated the weights\n  fix: leave step() out;"
        " clip_grad_norm_ does nothing either: set optimizer.max_grad_norm"
    )


def test_a_message_does_not_print_a_thousand_arguments():
    with pytest.raises(poptorch.Error, match="and 988 more") as caught:
        poptorch.inferenceModel(nn.Linear(4, 4))([0.0] * 1000)
    assert len(str(caught.value)) < 1000


def test_a_folder_that_can_not_hold_a_profile_is_refused_before_the_run(tmp_path):
    (tmp_path / "report").write_text("a file")
    options = poptorch.Options().enableProfiling(tmp_path / "report")
    with pytest.raises(
        poptorch.Error, match=r"profile can't be written to .*report[\s\S]*fix: options.enable"
    ):
        poptorch.inferenceModel(nn.Linear(1, 1), options)


def test_a_copy_of_an_executor_is_refused_with_what_to_copy():
    model = poptorch.inferenceModel(nn.Linear(1, 1))
    model(torch.zeros(1, 1))
    with pytest.raises(
        poptorch.Error, match=r"fix: wrap a copy of its model, copy.deepcopy\(executor.model\)"
    ):
        copy.deepcopy(model)


def test_a_mark_on_a_layer_that_forward_never_calls_is_one_line_of_the_log(caplog):
    options = poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution("used", "spare"))
    poptorch.inferenceModel(
        module(
            lambda self, x: self.used(x),
            used=poptorch.BeginBlock(nn.Linear(2, 2), "used"),
            spare=poptorch.BeginBlock(nn.Linear(2, 2), "spare"),
        ),
        options,
    )(torch.zeros(2, 2))
    lines = [
        record.getMessage() for record in caplog.records if "its mark has no effect" in record.getMessage()
    ]
    assert lines == ["no block begins at spare: forward doesn't call it, so its mark has no effect"]


# ---- tracebacks ----------------------------------------------------------------------------------------------


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(2, 2), error

    def forward(self, x):
        return self.fail(self.layer(x))

    def fail(self, x):
        if self.error is not None:
            raise self.error
        return x @ x.T @ x[:, :1].T  # shapes that do not fit


@pytest.mark.parametrize("error", [None, ValueError("mine"), RuntimeError("mine")])
def test_a_traceback_has_the_users_frames_and_none_of_ours(error):
    model = poptorch.inferenceModel(Failing(error))
    with pytest.raises(Exception) as caught:
        model(torch.zeros(3, 2))
    names = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["forward", "fail"]
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 20


def test_all_frames_are_shown_on_request(monkeypatch):
    monkeypatch.setenv("POPTORCH_FULL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="mine") as caught:
        poptorch.inferenceModel(Failing(ValueError("mine")))(torch.zeros(3, 2))
    names = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert {"__call__", "capture", "forward", "fail"} <= set(names)


# ---- methods of the model ------------------------------------------------------------------------------------

RETURN_SELF = {
    "to": [torch.float32],
    "type": [torch.float32],
    "apply": [lambda module: None],
    "to_empty": [],
    **{name: [] for name in ("float", "double", "half", "bfloat16", "cpu", "requires_grad_", "share_memory")},
    **{name: [] for name in ("train", "eval")},
}


@pytest.mark.parametrize("name", RETURN_SELF)
def test_methods_that_return_the_model_return_the_executor(name):
    model = nn.Linear(2, 2)
    trainer = poptorch.trainingModel(model)
    more = {"device": "cpu"} if name == "to_empty" else {}
    assert getattr(trainer, name)(*RETURN_SELF[name], **more) is trainer
    assert isinstance(getattr(model, name)(*RETURN_SELF[name], **more), nn.Linear)


def test_a_method_of_the_users_that_returns_the_model_returns_the_executor():
    class Model(nn.Linear):
        def with_bias(self, value):
            """Sets the bias."""
            nn.init.constant_(self.bias, value)
            return self

    trainer = poptorch.trainingModel(Model(2, 2))
    assert trainer.with_bias(3.0) is trainer and trainer.bias[0] == 3
    assert trainer.with_bias.__doc__ == "Sets the bias."


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cuda(),
        lambda model: model.to("cuda"),
        lambda model: model.to(device=torch.device("cuda", 1)),
        lambda model: model.to(0),
    ],
)
def test_moving_an_executor_to_a_gpu_names_the_option(move):
    with pytest.raises(poptorch.Error, match=r'fix: options.device\("cuda"\) before wrapping'):
        move(poptorch.trainingModel(nn.Linear(2, 2)))
