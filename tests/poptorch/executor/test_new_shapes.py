"""`Options.allowNewShapes`: calls with other shapes and incomplete batches give what plain PyTorch gives.

Plain PyTorch accumulates over the same micro-batches: equal ones to the last bit.
"""

import copy
import functools
import logging

import pytest
import torch
from executor_models import recordings
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset

import poptorch
from popengine import profile
from small_models import module

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """A mean over any length of the sequence, batch norm, an optional second input with weights of its own."""

    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(6, 8), "first", ipu_id=0)
        self.norm = nn.BatchNorm1d(8)
        self.extra = nn.Linear(6, 8)
        self.last = poptorch.BeginBlock(nn.Linear(8, 3), "last", ipu_id=1)

    def forward(self, x, target, mask=None):
        hidden = self.first(x).mean(1)
        if mask is not None:
            hidden = hidden + self.extra(mask)
        scores = self.last(self.norm(hidden).relu())
        return scores, nn.functional.cross_entropy(scores, target)


def options(accumulation=1, plans=8, **more):
    found = poptorch.Options().showCompilationProgressBar(False).allowNewShapes(plans)
    found.setExecutionStrategy(poptorch.ShardedExecution())
    found.Training.gradientAccumulation(accumulation)
    for name, value in more.items():
        getattr(found, name)(*(value if isinstance(value, tuple) else (value,)))
    return found


def started(opts, rule=torch.optim.SGD, lr=0.1, norm=True):
    """Return a trainer, its model, a twin, and the function that makes an update of the twin in plain PyTorch."""
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    if not norm:
        model.norm, twin.norm = nn.Identity(), nn.Identity()
    plain = rule(twin.parameters(), lr=lr)
    trainer = poptorch.trainingModel(model, opts, rule(model.parameters(), lr=lr))
    return trainer, model, twin, functools.partial(plain_step, twin, plain)


def batch(rows, length=5):
    return torch.randn(rows, length, 6), torch.randint(3, (rows,))


def plain_step(twin, optimizer, micro_batches):
    """Accumulate the gradients of micro-batches, each weighted by its rows, and update."""
    rows = [len(inputs[0]) for inputs in micro_batches]
    optimizer.zero_grad()
    losses = []
    for inputs, count in zip(micro_batches, rows, strict=True):
        loss = twin(*(value.clone() for value in inputs))[1]
        losses.append(loss.detach())
        if len(set(rows)) == 1:
            loss.backward()
        else:
            (loss * count / sum(rows)).backward()
    for parameter in twin.parameters():
        if parameter.grad is not None and len(set(rows)) == 1:
            parameter.grad /= len(rows)
    optimizer.step()
    return torch.stack(losses)


def cut(inputs, size):
    return [tuple(value[i : i + size] for value in inputs) for i in range(0, len(inputs[0]), size)]


def assert_equal(model, twin, exact=True):
    for (name, value), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(value, other) if exact else torch.allclose(value, other, atol=1e-6), name


@pytest.fixture
def compilations():
    """An item for each compilation in the test."""
    with recordings() as found:
        yield found


STRATEGIES = {
    "sharded": poptorch.ShardedExecution,
    "pipelined": poptorch.PipelinedExecution,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_calls_of_other_lengths_train_the_same_weights(strategy):
    opts = options(3, setExecutionStrategy=STRATEGIES[strategy]())
    trainer, model, twin, step = started(opts, torch.optim.AdamW, 0.01)
    for length in (5, 7, 5, 2, 7):
        inputs = batch(12, length)
        _, loss = trainer(*inputs)
        assert torch.equal(loss, step(cut(inputs, 4))[-1])
    assert_equal(model, twin)


def test_an_optional_argument_may_be_left_out_and_its_weights_then_rest():
    """Without the argument its weights have no gradient, so AdamW leaves them and their step count as they are."""
    trainer, model, twin, step = started(options(), torch.optim.AdamW, 0.01)
    for has_mask in (False, True, False, True, True):
        inputs = (*batch(4), torch.randn(4, 6))[: 3 if has_mask else 2]
        trainer(*inputs)
        step([inputs])
    assert_equal(model, twin)


def test_a_shape_that_returns_is_not_compiled_again(caplog, compilations):
    poptorch.setLogLevel("INFO")
    with caplog.at_level(logging.INFO):
        trainer = poptorch.trainingModel(Model(), options())
        for length in (3, 4, 5, 3, 4, 5):
            trainer(*batch(4, length))
    poptorch.setLogLevel("WARN")
    assert len(compilations) == 3
    lines = [record.message for record in caplog.records if record.message.startswith("plan ")]
    assert [line.split(", took")[0] for line in lines] == [
        "plan 2, for inputs [4, 4, 6], [4]",
        "plan 3, for inputs [4, 5, 6], [4]",
    ]


def test_the_plan_used_longest_ago_is_dropped(compilations):
    trainer = poptorch.trainingModel(Model(), options(plans=2))
    for length in (3, 4, 3, 5, 3, 4):
        trainer(*batch(4, length))
    assert len(compilations) == 4, "3, 4, 5, and 4 once more"


def test_the_plans_used_last_are_kept_also_those_of_incomplete_batches(compilations):
    trainer = poptorch.trainingModel(Model(), options(plans=2, replicationFactor=2))
    for rows in (8, 3, 2, 3):
        trainer(*batch(rows))
    assert len(compilations) == 3, "of 8, 3 and 2 rows"


def test_other_types_are_still_refused_and_a_constant_that_matters_has_a_plan_of_its_own():
    trainer = poptorch.inferenceModel(lambda x, scale=2.0: x * scale, options())
    trainer(torch.ones(4))
    with pytest.raises(poptorch.Error, match="Data type mismatch for x"):
        trainer(torch.ones(5, dtype=torch.int64))
    assert trainer(torch.ones(4), 3.0).tolist() == [3.0] * 4
    assert trainer(torch.ones(2), 2.0).tolist() == [2.0, 2.0]


def test_without_the_option_the_error_names_it():
    trainer = poptorch.inferenceModel(Model(), poptorch.Options().deviceIterations(2))
    trainer(*batch(4))
    with pytest.raises(poptorch.Error, match=r"Shape mismatch for x(.|\n)*fix: options.allowNewShapes\(\)"):
        trainer(*batch(4, 3))


def test_modes_are_those_of_the_first_compilation():
    trainer, model, twin, step = started(options())
    for length in (5, 3):
        inputs = batch(4, length)
        trainer(*inputs)
        step([inputs])
        model.eval()  # as before a validation
    assert_equal(model, twin)
    assert not model.norm.training


def test_weights_and_optimizer_state_move_with_the_plans():
    """The host's reads and writes, and a detach, see one model, whichever plan has run last."""
    trainer, model, twin, step = started(options(), torch.optim.AdamW, 0.01)
    for number, length in enumerate((5, 3, 5, 4, 3)):
        inputs = batch(4, length)
        trainer(*inputs)
        step([inputs])
        if number == 1:
            trainer.detachFromDevice()
        if number == 2:
            with torch.no_grad():
                model.last.bias.fill_(0.5)
                twin.last.bias.fill_(0.5)
            trainer.copyWeightsToDevice()
    assert_equal(model, twin)
    states = [optimizer.state_dict()["state"] for optimizer in (trainer._optimizer, step.args[1])]
    assert torch.equal(states[0][0]["exp_avg"], states[1][0]["exp_avg"])


def test_a_plan_can_be_compiled_ahead_of_its_first_call(compilations):
    executor = poptorch.inferenceModel(nn.Linear(3, 2), options(deviceIterations=2))
    for rows in (4, 3):
        executor.compile(torch.ones(rows, 3))
    compiled = len(compilations)
    assert [len(executor(torch.ones(rows, 3))) for rows in (3, 4)] == [3, 4]
    assert len(compilations) == compiled == 2, "of two rows and of one"


# ---- incomplete batches ----------------------------------------------------------------------------------


def assert_incomplete_batches_train(opts, sizes, micro_batch, step_rows, exact=False, **how):
    """Assert that calls with so many rows train as plain PyTorch does with micro-batches and updates of these rows."""
    trainer, model, twin, step = started(opts.outputMode(poptorch.OutputMode.All), **how)
    for size in sizes:
        inputs = batch(size)
        scores, losses = trainer(*inputs)
        expected = torch.cat([step(cut(update, micro_batch)) for update in cut(inputs, step_rows)])
        assert torch.allclose(losses.reshape(-1), expected, rtol=0, atol=0 if exact else 1e-6)
        assert len(scores) == size and trainer.finished_updates == -(-size // step_rows)
    assert_equal(model, twin, exact)


@pytest.mark.parametrize("rows", [48, 40, 36, 24, 20, 8, 4])
def test_a_batch_with_fewer_micro_batches_trains_on_those_that_are_there(rows):
    """A call has two steps of six micro-batches of four rows."""
    how = {"rule": torch.optim.AdamW, "lr": 0.01, "exact": True}
    assert_incomplete_batches_train(options(6, deviceIterations=2), (48, rows, 48), 4, 24, **how)


@pytest.mark.parametrize("rows", [47, 26, 23, 20, 7, 3])
def test_a_smaller_last_micro_batch_is_weighted_by_its_rows(rows):
    assert_incomplete_batches_train(options(3, deviceIterations=2), (48, rows, 48), 8, 24)


@pytest.mark.parametrize("rows", [12, 9, 6, 2])
def test_replicas_train_on_an_incomplete_batch(rows):
    assert_incomplete_batches_train(options(2, replicationFactor=2), (16, rows, 16), 4, 16, norm=False)


@pytest.mark.parametrize("reduction", ["sum", "running"])
def test_other_reductions_weight_the_last_micro_batch_as_documented(reduction):
    opts = options(4)
    if reduction == "sum":
        opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    else:
        running = poptorch.MeanReductionStrategy.Running
        opts.Training.setMeanAccumulationAndReplicationReductionStrategy(running)
    trainer, model, twin, step = started(opts, lr=0.01)
    trainer.compile(*batch(32))
    inputs = batch(27)
    trainer(*inputs)
    if reduction == "sum":
        sum(twin(*each)[1] for each in cut(inputs, 8)).backward()
        step.args[1].step()
    else:
        step(cut(inputs, 8))
    assert_equal(model, twin, exact=False)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("rows", [24, 20, 13, 8, 3])
def test_inference_returns_all_rows_of_an_incomplete_batch(rows, replicas):
    model = Model().eval()
    opts = options(deviceIterations=6 // replicas, replicationFactor=replicas)
    executor = poptorch.inferenceModel(model, opts)
    for size in (24, rows, 24):
        inputs = batch(size)
        scores, losses = executor(*inputs)
        expected = [model(*each) for each in cut(inputs, 4)]
        assert torch.allclose(scores, torch.cat([one for one, _ in expected]), atol=1e-6)
        assert torch.allclose(losses, torch.stack([one for _, one in expected]), atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "period", "expected"),
    [
        ("Final", 1, [5.0]),
        ("Sum", 1, [15.0]),
        ("EveryN", 2, [2.0, 4.0]),
        ("All", 1, [1.0, 2.0, 3.0, 4.0, 5.0]),
    ],
)
def test_output_modes_of_an_incomplete_batch(mode, period, expected):
    opts = options(deviceIterations=8)
    opts.outputMode(poptorch.OutputMode[mode], period if mode == "EveryN" else None)
    executor = poptorch.inferenceModel(lambda x: x.sum(), opts)
    executor(torch.ones(16))
    found = executor(torch.tensor([0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 5.0]))
    assert found.reshape(-1).tolist() == expected


def test_a_sum_over_micro_batches_of_different_sizes_is_refused():
    opts = options(deviceIterations=3, outputMode=poptorch.OutputMode.Sum)
    executor = poptorch.inferenceModel(lambda x: x + 1, opts)
    executor(torch.ones(6))
    with pytest.raises(poptorch.Error, match="another size"):
        executor(torch.ones(5))


def test_inputs_that_end_apart_are_refused():
    executor = poptorch.inferenceModel(lambda x, y: x.sum() + y.sum(), options(deviceIterations=4))
    executor(torch.ones(8, 2), torch.ones(8))
    with pytest.raises(AssertionError, match="Invalid batch dimension: x has shape"):
        executor(torch.ones(5, 2), torch.ones(3))


def test_a_failed_last_micro_batch_leaves_the_weights_of_the_last_whole_step():
    model = Model()
    trainer = poptorch.trainingModel(model, options(3), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer(*batch(12))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, target = batch(10)
    target[-1] = 77  # out of range: the last micro-batch fails
    with pytest.raises(poptorch.Error):
        trainer(x, target)
    assert trainer.finished_updates == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trainer(*batch(12))


def test_inputs_that_are_written_to_come_back_whole():
    def forward(self, x):
        x += 1
        return x.sum()

    executor = poptorch.inferenceModel(module(forward), options(deviceIterations=3))
    executor(torch.zeros(6))
    x = torch.zeros(5)
    executor(x)
    assert x.tolist() == [1.0] * 5


def test_each_plan_has_a_profile(tmp_path):
    opts = options().enableProfiling(str(tmp_path))
    trainer = poptorch.trainingModel(Model(), opts)
    for length in (5, 3, 5):
        trainer(*batch(4, length))
    trainer.destroy()
    found = {path.parent.name: profile.load(path) for path in tmp_path.glob("*/profile.pop")}
    assert {name: each.facts["calls"] for name, each in found.items()} == {
        "training": 2,
        "training_2": 1,
    }


# ---- batches whose rows are not the items of the dataset -------------------------------------------------


def pack(items):
    """Return a row for each three items."""
    return torch.stack([torch.stack(items[i : i + 3]).sum(0) for i in range(0, len(items), 3)])


def keep(items):
    return torch.stack(items)


def double(items):
    return torch.stack([item for item in items for _ in range(2)])


class Stream(IterableDataset):
    """A stream of items, with a length that is not theirs, as where each worker reads a part."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return 7


@pytest.mark.parametrize("mode", ["Sync", "Async"])
@pytest.mark.parametrize("count", [27, 24, 21, 12, 30, 4])
@pytest.mark.parametrize("collate_fn", [pack, keep, double])
def test_micro_batches_are_those_of_torchs_loader_however_many_rows_collate_fn_makes(collate_fn, count, mode):
    """A call has three micro-batches of three items; the last call of an epoch may have fewer."""
    data = list(torch.randn(count, 2))
    how = {"batch_size": 3, "collate_fn": collate_fn}
    executor = poptorch.inferenceModel(lambda x: x.sum(0, keepdim=True), options(deviceIterations=3))
    loader = poptorch.DataLoader(
        executor.options, data, drop_last=False, mode=mode, async_options={"sharing_strategy": "Fork"}, **how
    )
    expected = [batch.sum(0, keepdim=True) for batch in torch.utils.data.DataLoader(data, **how)]
    for _ in range(2):
        assert torch.allclose(
            torch.cat([executor(batch) for batch in loader]), torch.cat(expected), atol=1e-5
        )


def sampled(batches):
    return lambda opts: poptorch.DataLoader(
        opts, list(torch.arange(24.0)), batch_sampler=batches, collate_fn=keep, drop_last=False
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda opts: poptorch.DataLoader(
                opts, Stream(list(torch.ones(20))), batch_size=3, collate_fn=pack
            ),
            [3.0] * 6,
        ),
        (
            lambda opts: poptorch.DataLoader(
                opts, Stream(list(torch.ones(20))), batch_size=3, collate_fn=keep, drop_last=False
            ),
            [3.0] * 6 + [2.0],
        ),
        (sampled(BatchSampler(range(11), 4, False)), [6.0, 22.0, 27.0]),
        (
            sampled([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11], [12, 13, 14, 15]]),
            [6.0, 22.0, 17.0, 21.0, 54.0],
        ),
    ],
    ids=["stream", "incomplete stream", "batch sampler", "batches of several sizes"],
)
def test_micro_batches_of_streams_and_batch_samplers_stay_apart(make, expected):
    executor = poptorch.inferenceModel(lambda x: x.sum(0, keepdim=True), options(deviceIterations=2))
    assert torch.cat([executor(batch) for batch in make(executor.options)]).tolist() == expected


def test_the_last_micro_batch_of_a_full_call_may_be_smaller():
    """Nine rows of a batch sampler of four are 4, 4 and 1: three equal parts would be as many micro-batches."""
    executor = poptorch.inferenceModel(lambda x: x.sum(0, keepdim=True), options(deviceIterations=3))
    (batch,) = sampled(BatchSampler(range(9), 4, False))(executor.options)
    assert executor(batch).tolist() == [6.0, 22.0, 8.0]


def test_rows_that_make_no_equal_micro_batches_are_refused():
    executor = poptorch.inferenceModel(lambda x: x.sum(0, keepdim=True), options(deviceIterations=3))
    data = [torch.ones(())] * 9
    loader = poptorch.DataLoader(executor.options, data, 3, collate_fn=lambda items: torch.ones(7))
    with pytest.raises(AssertionError, match="Invalid batch dimension: x has shape"):
        executor(next(iter(loader)))
