"""Batch norm over groups of replicas: G replicas of micro-batch n equal one of micro-batch G·n, in every layout."""

import processes
import pytest
import torch
from torch import Tensor, nn

import popdist
import poptorch
from small_models import module

CALLS, ITERATIONS, ACCUMULATION, ROWS = 2, 2, 2, 8  # rows of a micro-batch of all replicas
SINGLE = torch.float64


class Net(nn.Module):
    """Two convolutions with norms; the first may begin a block of its own."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(2, 4, 3, padding=1, bias=False), norm(4)
        self.second, self.norm2 = nn.Conv2d(4, 6, 3), norm(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with poptorch.Block("a"):
            x = self.norm1(self.first(x)).relu()
        with poptorch.Block("b"):
            x = self.norm2(self.second(x)).relu().mean((2, 3))
            return nn.functional.cross_entropy(self.last(x), labels)


def batches(dtype=SINGLE):
    numbers = torch.Generator().manual_seed(3)
    for _ in range(CALLS):
        shape = (ITERATIONS * ACCUMULATION, ROWS)
        images = torch.randn(*shape, 2, 6, 6, generator=numbers, dtype=torch.float64)
        yield (3 * images + 2).to(dtype), torch.randint(3, shape, generator=numbers)


def trained(norm, replicas=1, opts=None, dtype=SINGLE, change=None, stages=1, instance=0, instances=1):
    """Losses [micro-batches], each the mean over replicas; and the state after some calls."""
    opts = poptorch.Options().replicationFactor(replicas) if opts is None else opts
    opts.deviceIterations(ITERATIONS).showCompilationProgressBar(False).randomSeed(1)
    opts.outputMode(poptorch.OutputMode.All).Training.gradientAccumulation(ACCUMULATION)
    places = poptorch.Stage("a").ipu(0), poptorch.Stage("b").ipu(stages - 1)
    opts.setExecutionStrategy(poptorch.ShardedExecution(*places))
    if change:
        change(opts)
    torch.manual_seed(0)
    model = Net(norm).to(dtype)
    rule = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    executor = poptorch.trainingModel(model, opts, rule)
    losses = []
    for images, labels in batches(dtype):
        mine = slice(instance * ROWS // instances, (instance + 1) * ROWS // instances)
        found = executor(images[:, mine].flatten(0, 1), labels[:, mine].flatten(0, 1))
        losses.append(found.view(ITERATIONS * ACCUMULATION, -1).double().mean(1))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    executor.destroy()
    return torch.cat(losses), state


def grouped(size):
    return lambda channels: poptorch.GroupedBatchNorm2d(channels, size)


def assert_close(found, expected, tolerance):
    (losses, state), (other_losses, other_state) = found, expected
    torch.testing.assert_close(losses, other_losses, atol=1e-6, rtol=0)  # outputs are float32
    for name, value in state.items():
        torch.testing.assert_close(value, other_state[name], atol=tolerance, rtol=0, msg=name)


@pytest.fixture(scope="module")
def whole():
    """One replica that sees all rows, with torch's own batch norm."""
    return trained(nn.BatchNorm2d)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_group_of_all_replicas_equals_one_of_their_joined_micro_batch(whole, replicas):
    assert_close(trained(grouped(replicas), replicas), whole, 1e-12)


def test_two_groups_of_two_are_those_of_a_program_in_plain_pytorch():
    """Each group's rows go through batch norm together; running statistics on the host are the first group's."""
    torch.manual_seed(0)
    model = Net(nn.BatchNorm2d).to(SINGLE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms, losses = (model.norm1, model.norm2), []
    for images, labels in batches():
        for update in range(ITERATIONS):
            optimizer.zero_grad()
            for micro_batch in range(update * ACCUMULATION, (update + 1) * ACCUMULATION):
                loss = torch.zeros((), dtype=SINGLE)
                for group, rows in enumerate((slice(0, 4), slice(4, 8))):
                    for norm in norms:  # the second group's running statistics are not looked at
                        norm.track_running_stats = group == 0
                        norm.momentum = 0.1 if group == 0 else 0.0
                    loss = loss + model(images[micro_batch, rows], labels[micro_batch, rows]) / 2
                (loss / ACCUMULATION).backward()
                losses.append(loss.detach())
            optimizer.step()
    state = {n: v for n, v in model.state_dict().items() if "num_batches" not in n}
    found_losses, found = trained(grouped(2), replicas=4)
    assert_close((found_losses, {name: found[name] for name in state}), (torch.stack(losses), state), 1e-12)


CHANGES = {
    "none": None,
    "recomputed": lambda opts: opts._Popart.set("autoRecomputation", 1),
    "checked": lambda opts: opts.Precision.enableFloatingPointExceptions(True),
}


@pytest.fixture(scope="module")
def in_groups_of_two():
    return trained(grouped(2), replicas=4, dtype=torch.float32)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("threads", [1, 3])
def test_all_layouts_of_a_process_give_the_same_bits(in_groups_of_two, change, stages, threads):
    losses, state = in_groups_of_two
    torch.set_num_threads(threads)
    found = trained(grouped(2), 4, dtype=torch.float32, change=CHANGES[change], stages=stages)
    assert torch.equal(losses, found[0])
    assert [name for name in state if not torch.equal(state[name], found[1][name])] == []


def test_a_profile_has_the_time_of_pieces_that_wait(tmp_path, whole):
    assert_close(trained(grouped(2), 2, change=lambda o: o.enableProfiling(str(tmp_path))), whole, 1e-12)
    assert list(tmp_path.rglob("profile*"))


def test_compiled_pieces_wait_for_other_replicas_too(whole):
    assert_close(trained(grouped(2), 2, change=lambda o: o.compiler("inductor")), whole, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_half_precision_are_made_in_float32(whole, dtype):
    losses, state = trained(grouped(4), replicas=4, dtype=dtype)
    assert state["norm1.running_mean"].dtype == dtype
    torch.testing.assert_close(losses, whole[0], atol=0.05, rtol=0)


def test_without_momentum_running_statistics_are_means_of_all():
    def norm(channels):
        return poptorch.GroupedBatchNorm2d(channels, 2, momentum=None)

    opts = poptorch.Options().replicationFactor(2).deviceIterations(3).showCompilationProgressBar(False)
    model = module(
        lambda self, x: poptorch.identity_loss(self.norm(x) * self.weight, reduction="mean"),
        norm=norm(2),
        weight=nn.Parameter(torch.ones(2, 1, 1)),
    )
    rows = torch.randn(3 * 2 * 4, 2, 3, 3) + 5
    executor = poptorch.trainingModel(model, opts)
    executor(rows)
    torch.testing.assert_close(model.norm.running_mean.clone(), rows.mean((0, 2, 3)))
    assert model.norm.num_batches_tracked.item() == 3
    executor.destroy()


def test_in_evaluation_and_in_plain_pytorch_it_is_batch_norm():
    torch.manual_seed(0)
    mine, theirs = poptorch.GroupedBatchNorm2d(3, 4), nn.BatchNorm2d(3)
    x = torch.randn(5, 3, 2, 2)
    assert torch.equal(mine(x), theirs(x))
    theirs.load_state_dict(mine.state_dict())
    inference = poptorch.inferenceModel(mine.eval(), poptorch.Options().showCompilationProgressBar(False))
    assert torch.equal(inference(x), theirs.eval()(x))


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 2), (3, 4)])
def test_groups_that_do_not_divide_the_replicas_are_an_error(size, replicas):
    with pytest.raises(
        poptorch.Error, match=rf"groups of {size} replicas, of {replicas}, with {replicas} in"
    ):
        trained(grouped(size), replicas)


def test_a_group_size_that_is_no_number_is_an_error():
    with pytest.raises(poptorch.Error, match="group_size takes an int from 1; found 0"):
        poptorch.GroupedBatchNorm2d(3, 0)


def test_a_failure_in_one_replica_ends_the_wait_of_the_others():
    """And the model trains afterwards as if it had not been called."""
    opts = poptorch.Options().replicationFactor(2).showCompilationProgressBar(False)
    opts.setExecutionStrategy(poptorch.ShardedExecution("a", "b"))
    model = Net(grouped(2)).to(SINGLE)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
    images, labels = torch.randn(8, 2, 6, 6, dtype=SINGLE), torch.arange(8) % 3
    executor.compile(images, labels)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(poptorch.Error, match="replica 1"):
        executor(images, torch.where(torch.arange(8) < 4, labels, 7))
    after = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    executor(images, labels)
    executor.destroy()


# ---- several instances --------------------------------------------------------------------------------------

LAYOUTS = {"norm of 2": 2, "norm of 4": 4}


def in_one_of(instances):
    popdist.init()
    place = {"instance": popdist.getInstanceIndex(), "instances": instances}
    found = {}
    for name, size in LAYOUTS.items():
        losses, state = trained(grouped(size), opts=popdist.poptorch.Options(), dtype=torch.float32, **place)
        found[name] = losses.tolist(), {key: value.tolist() for key, value in state.items()}
    return found


@pytest.mark.parametrize("instances", [2, 4])
def test_groups_over_several_instances_give_the_bits_of_one_process(instances):
    ended = processes.run(in_one_of, instances, instances, replicas=4 // instances)
    assert [one.error for one in ended] == [""] * instances
    for name, size in LAYOUTS.items():
        losses, state = trained(grouped(size), replicas=4, dtype=torch.float32)
        expected = {key: value.tolist() for key, value in state.items()}
        first = ended[0].value[name][1]
        assert [key for key in expected if first[key] != expected[key]] == []
        everybody = torch.tensor([one.value[name][0] for one in ended], dtype=torch.float64).mean(0)
        torch.testing.assert_close(everybody, losses)
        weights = [key for key in expected if "running" not in key]
        for one in ended:
            assert [key for key in weights if one.value[name][1][key] != expected[key]] == []


def failing_in_the_second(calls):
    """What two instances say of a call in which one fails, and of the next."""
    popdist.init()
    opts = popdist.poptorch.Options().showCompilationProgressBar(False)
    opts.setExecutionStrategy(
        poptorch.ShardedExecution(poptorch.Stage("a").ipu(0), poptorch.Stage("b").ipu(0))
    )
    torch.manual_seed(0)
    model = Net(grouped(2))
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
    images, labels = torch.randn(4, 2, 6, 6), torch.arange(4) % 3
    found = []
    for call in range(calls):
        wrong = call == 1 and popdist.getInstanceIndex() == 1
        try:
            found.append(float(executor(images, labels + 7 if wrong else labels)))
        except poptorch.Error as error:
            found.append(str(error))
    return found


def test_an_instance_that_fails_wakes_those_who_wait_for_its_values():
    first, second = (one.value for one in processes.run(failing_in_the_second, 2, 3, replicas=1))
    assert "another instance failed" in first[1] and "forward of stage 0" in second[1]
    assert first[0] == second[0] and first[2] == second[2]
