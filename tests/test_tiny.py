"""The smoke test, ten seconds: train, pipeline, save and load, two processes, a report, a file of an IPUJob."""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import pytest
import torch
from torch import nn

import ipujob.cli
import popdist
import poptorch
import popvision.cli

EXAMPLES = Path(__file__).parents[1] / "examples"
MICRO_BATCHES, ROWS = 4, 3


class Net(nn.Module):
    """Two blocks with a batch norm, for two ipus."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = poptorch.BeginBlock(nn.Linear(6, 8), "first", ipu_id=0)
        self.norm = nn.BatchNorm1d(8)
        self.last = poptorch.BeginBlock(nn.Linear(8, 4), "last", ipu_id=1)

    def forward(self, x, labels=None):
        scores = self.last(self.norm(self.first(x).relu()))
        return scores if labels is None else nn.functional.cross_entropy(scores, labels)


def options(strategy=None, kind=poptorch.Options):
    chosen = kind().showCompilationProgressBar(False).outputMode(poptorch.OutputMode.All)
    chosen.Training.gradientAccumulation(MICRO_BATCHES)
    return chosen if strategy is None else chosen.setExecutionStrategy(strategy)


def trainer(chosen=None, model=None, rule=torch.optim.AdamW):
    model = model or Net()
    return poptorch.trainingModel(model, chosen or options(), rule(model.parameters(), lr=0.1)), model


def batch(seed=1, rows=MICRO_BATCHES * ROWS):
    torch.manual_seed(seed)
    return torch.randn(rows, 6), torch.randint(0, 4, (rows,))


def update(model, rule, x, labels):
    """Make one weight update in plain PyTorch, and return the losses of its micro-batches."""
    rule.zero_grad()
    losses = []
    for rows in zip(x.split(ROWS), labels.split(ROWS), strict=True):
        losses.append(
            model(*(value.clone() for value in rows))
        )  # copies begin at 64 bytes, as an ipu's values do
        losses[-1].backward()
    for parameter in model.parameters():
        parameter.grad /= MICRO_BATCHES
    rule.step()
    return torch.stack(losses).detach()


def equal(model, other):
    """Return whether all weights and buffers of two models have the same bits."""
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def of_an_instance():
    popdist.init()
    executor, model = trainer(options(kind=popdist.poptorch.Options))
    replicas = (
        value.unflatten(0, (MICRO_BATCHES, 2, ROWS)) for value in batch(rows=2 * MICRO_BATCHES * ROWS)
    )
    executor(*(value[:, popdist.getInstanceIndex()].flatten(0, 1) for value in replicas))
    return {name: value.tolist() for name, value in model.named_parameters()}


@pytest.fixture(scope="module", autouse=True)
def instances():
    """How two processes end. They load torch while other tests run."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(processes.run, of_an_instance, 2)


def plain_training():
    """Make three updates in plain PyTorch, and return the model and the losses."""
    model = Net()
    rule = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, [update(model, rule, *batch(seed)) for seed in range(3)]


@pytest.mark.parametrize(
    "strategy",
    [
        None,
        poptorch.PipelinedExecution("first", "last", schedule="zero-bubble"),
        poptorch.ShardedExecution("first", "last"),
    ],
    ids=["pipelined", "zero bubble", "sharded"],
)
def test_a_pipeline_trains_as_plain_pytorch(one_thread, strategy):
    executor, model = trainer(options(strategy))
    twin, expected = plain_training()
    for seed, losses in enumerate(expected):
        assert torch.equal(executor(*batch(seed)), losses)
    assert equal(model, twin)


def test_two_updates_in_a_call_are_those_of_two_calls():
    once, model = trainer(options().deviceIterations(2))
    twice, other = trainer()
    rows = [batch(seed) for seed in range(2)]
    once(*map(torch.cat, zip(*rows, strict=True)))
    for each in rows:
        twice(*each)
    assert equal(model, other)


def test_two_replicas_train_on_the_mean_of_their_gradients():
    chosen = options(poptorch.ShardedExecution("first", "last")).replicationFactor(2)
    chosen.Training.gradientAccumulation(MICRO_BATCHES // 2)
    executor, model = trainer(chosen, rule=torch.optim.SGD)
    executor(*batch())
    other = Net()
    update(other, torch.optim.SGD(other.parameters(), lr=0.1), *batch())
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()))


def test_evaluation_has_the_weights_of_the_training():
    executor, model = trainer()
    executor(*batch())
    predictor = poptorch.inferenceModel(model.eval(), poptorch.Options().deviceIterations(2))
    x, _ = batch()
    torch.testing.assert_close(predictor(x), model(x).detach())


def test_a_new_learning_rate_counts_in_the_next_call():
    executor, model = trainer(rule=torch.optim.SGD)
    executor(*batch())
    before = copy.deepcopy(dict(model.named_parameters()))
    executor.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    executor(*batch())
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


def test_a_model_saved_and_loaded_continues_with_the_same_bits(tmp_path):
    executor, model = trainer()
    executor(*batch(0))
    executor.save(str(tmp_path / "net.poptorch"))
    executor(*batch(1))
    loaded = poptorch.load(str(tmp_path / "net.poptorch"))
    loaded(*batch(1))
    assert equal(model, loaded)


def test_a_checkpoint_resumes_with_the_same_bits(tmp_path):
    executor, model = trainer()
    checkpoint = popdist.Checkpoint(tmp_path)
    checkpoint.restore(executor)
    executor(*batch(0))
    checkpoint.step()
    executor(*batch(1))
    checkpoint.wait()
    resumed, other = trainer()
    assert popdist.Checkpoint(tmp_path).restore(resumed) == 1
    resumed(*batch(1))
    assert equal(model, other)


def test_a_loader_makes_combined_batches():
    rows = torch.utils.data.TensorDataset(torch.arange(24.0))
    loader = poptorch.DataLoader(options().deviceIterations(2), rows, batch_size=3)
    assert [values.tolist() for (values,) in loader] == [list(range(24))]


def test_a_report_shows_the_stages(tmp_path, capsys):
    chosen = options()
    chosen.enableProfiling(str(tmp_path))
    executor, _ = trainer(chosen)
    executor(*batch())
    executor.destroy()
    assert popvision.cli.main(["summary", str(tmp_path)]) == 0
    assert "1f1b training, 2 stages on 2 ipus" in capsys.readouterr().out
    assert popvision.cli.main([str(tmp_path), "--no-browser"]) == 0
    assert "<html" in (tmp_path / "report.html").read_text()


def test_a_job_is_checked_and_an_unknown_field_named(tmp_path, capsys):
    text = (EXAMPLES / "ipujob/one_ipu.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text)
    assert ipujob.cli.main(["check", str(tmp_path / "job.yaml")]) == 0
    (tmp_path / "job.yaml").write_text(text.replace("jobInstances", "jobInstance"))
    assert ipujob.cli.main(["check", str(tmp_path / "job.yaml")]) == 2
    assert "spec.jobInstance" in capsys.readouterr().err


def test_compare_says_that_all_is_equal_and_names_a_wrong_loop():
    model = Net()
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    assert poptorch.testing.compare(model, options(), batch(), rule).equal
    sums = options()
    sums.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    assert "4 times plain" in str(poptorch.testing.compare(model, sums, batch(), rule))


def test_describe_shows_the_plan_before_a_call():
    assert "first" in str(poptorch.describe(Net(), options(), batch()))


def test_a_failed_call_leaves_the_weights_of_the_last_update():
    executor, model = trainer()
    executor(*batch())
    before = copy.deepcopy(model.state_dict())
    x, labels = batch()
    with pytest.raises(poptorch.Error):
        executor(x, labels + 4)  # there are four classes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_block_without_a_stage_is_named():
    with pytest.raises(poptorch.Error, match="last"):
        trainer(options(poptorch.PipelinedExecution("first")))[0](*batch())


def test_options_cannot_change_under_an_executor():
    chosen = options()
    trainer(chosen)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        chosen.deviceIterations(2)


def test_the_output_mode_selects_losses():
    losses = {}
    for mode in (poptorch.OutputMode.All, poptorch.OutputMode.Final, poptorch.OutputMode.Sum):
        losses[mode] = trainer(options().outputMode(mode))[0](*batch())
    every = losses[poptorch.OutputMode.All]
    assert len(every) == MICRO_BATCHES and losses[poptorch.OutputMode.Final] == every[-1]
    torch.testing.assert_close(losses[poptorch.OutputMode.Sum], every.sum())


def test_a_loop_of_calls_learns():
    executor, _ = trainer()
    losses = [executor(*batch()).mean() for _ in range(10)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.kind("two processes are one")
def test_two_processes_train_as_one(instances):
    executor, model = trainer(options().replicationFactor(2))
    executor(*batch(rows=2 * MICRO_BATCHES * ROWS))
    expected = {name: value.tolist() for name, value in model.named_parameters()}
    assert [ended.value or ended.error for ended in instances.result()] == [expected] * 2
