"""Loaders become loaders of combined batches; evaluation says what it leaves out, prediction loses nothing."""

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import IPUStrategy
from lightning_models import Classifier, assert_fits_as_on_the_cpu, dataset, loader, made, trainer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

import poptorch


def strategy(**more):
    return {"accelerator": "auto", "strategy": IPUStrategy(**more)}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(dataset()))


class Backwards(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    "make",
    [
        loader,
        lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
        lambda: DataLoader(Stream(), batch_size=4),
        lambda: DataLoader(dataset(), batch_sampler=BatchSampler(range(64), 4, False)),
        lambda: Backwards(dataset(), batch_size=4),
    ],
    ids=["torch", "shuffled", "stream", "batch sampler", "own iteration"],
)
def test_each_kind_of_loader_trains_as_on_the_cpu(make):
    assert_fits_as_on_the_cpu(data=make, accumulate_grad_batches=2)


def test_a_loader_of_ours_is_used_itself_with_its_own_options():
    options = poptorch.Options().deviceIterations(2)
    given = poptorch.DataLoader(options, dataset(), batch_size=4)
    run = trainer(**strategy(training_opts=options, inference_opts=options))
    run.fit(made(), given)
    assert run.train_dataloader is given
    assert run.global_step == 8


def test_a_shuffled_loader_of_ours_can_be_overfitted_on():
    options = poptorch.Options().deviceIterations(2)
    given = poptorch.DataLoader(options, dataset(), batch_size=4, shuffle=True)
    run = trainer(overfit_batches=2, **strategy(training_opts=options))
    run.fit(made(), given)
    assert isinstance(run.train_dataloader.sampler, SequentialSampler)
    assert run.train_dataloader.combinedBatchSize == 8
    assert run.global_step == 2


def test_a_loader_that_is_shorter_than_a_call_is_refused():
    run = trainer(devices=8, **strategy(device_iterations=32))
    with pytest.raises(Exception, match="a call takes 256 micro-batches, the loader for train has 16"):
        run.fit(made(), loader())


def test_evaluation_says_what_it_leaves_out(caplog):
    trainer(devices=4).validate(made(), loader(70), verbose=False)
    assert "leaves out 6 of 70 rows in each epoch, since a call takes 16" in caplog.text
    with pytest.warns(
        UserWarning, match=r"the last 2 of 18 micro-batches \(validate\) are left out: a call takes 4"
    ):
        trainer(devices=4).validate(made(), Backwards(dataset(72), batch_size=4), verbose=False)


def test_counters_count_calls():
    module, run = made(), trainer(devices=2, max_epochs=1)
    seen = []
    module.on_train_start = lambda: seen.append(run.estimated_stepping_batches)
    run.fit(module, loader(64, 1))
    assert seen == [32] and run.global_step == 32


@pytest.mark.parametrize(
    "make",
    [lambda: loader(70), lambda: DataLoader(dataset(70), batch_sampler=BatchSampler(range(70), 4, False))],
)
@pytest.mark.parametrize("devices", [1, 4])
def test_predictions_are_those_of_the_cpu_row_by_row(make, devices):
    found = trainer(devices=devices).predict(made(), make())
    expected = trainer("cpu").predict(made(), make())
    assert torch.cat(found).shape == (70, 3)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))


class MicroBatchRows(Classifier):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return torch.full_like(self(batch[0]), len(batch[0]))


def test_each_loader_of_a_prediction_has_micro_batches_of_its_own_size():
    loaders = [loader(20, 8), loader(12)]
    found = trainer(devices=2).predict(made(MicroBatchRows), loaders)
    assert [torch.cat(each).unique().tolist() for each in found] == [[8.0], [4.0]]


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch")
        self.indices = []

    def write_on_batch_end(self, trainer, module, prediction, indices, *rest):
        self.indices.append((len(prediction), list(indices)))


def test_a_prediction_writer_gets_the_indices_of_the_whole_call():
    writer = Writer()
    trainer(devices=4, callbacks=[writer]).predict(made(), loader(24))
    assert writer.indices == [(16, list(range(16))), (8, list(range(16, 24)))]


class Rows(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        value = super().validation_step(batch, batch_idx)
        self.log("accuracy", value)


def test_several_loaders_may_have_batches_of_several_shapes():
    run, expected = trainer(devices=2), trainer("cpu")
    for each in (run, expected):
        each.validate(made(Rows), [loader(), loader(32, 8)], verbose=False)
    assert run.callback_metrics.keys() == expected.callback_metrics.keys()
    for name, value in expected.callback_metrics.items():
        torch.testing.assert_close(run.callback_metrics[name], value)


def pack(items):
    """Return a row for each two items."""
    return [torch.stack(values).reshape(len(items) // 2, 2, -1).sum(1) for values in zip(*items, strict=True)]


class Sums(Classifier):
    def validation_step(self, batch):
        self.log("loss", self(batch[0]).sum(0).square().sum(), batch_size=1)


class LargeAndSmall(DataLoader):
    def __iter__(self):
        return ([x[: 4 - i % 4 // 2 * 2] for x in batch] for i, batch in enumerate(super().__iter__()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(collate_fn=pack),
        lambda: DataLoader(dataset(), batch_sampler=BatchSampler(range(64), 4, False), collate_fn=pack),
        lambda: LargeAndSmall(dataset(), batch_size=4),
    ],
    ids=["packed", "packed, batch sampler", "of several sizes"],
)
def test_micro_batches_of_evaluation_are_those_of_the_cpu(make):
    run, expected = trainer(devices=2), trainer("cpu")
    for each in (run, expected):
        module = made(Sums)
        each.validate(module, make(), verbose=False)
    torch.testing.assert_close(run.callback_metrics["loss"], expected.callback_metrics["loss"])


class Hooked(Classifier):
    seen = ()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.seen = (*self.seen, "before")
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.seen = (*self.seen, str(device), len(batch[0]))
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.seen = (*self.seen, "after")
        return [batch[0] * 2, batch[1]]


def test_batch_transfer_hooks_run_on_the_combined_batch():
    modules = assert_fits_as_on_the_cpu(Hooked, accumulate_grad_batches=2)
    assert modules["ipu"].seen[:4] == ("before", "cpu", 8, "after")


def test_a_random_sampler_of_ones_own_is_kept():
    sampler = RandomSampler(dataset(), generator=torch.Generator().manual_seed(2))
    run = trainer(devices=2)
    run.fit(made(), DataLoader(dataset(), batch_size=4, sampler=sampler))
    assert isinstance(run.train_dataloader, poptorch.DataLoader)
    assert run.train_dataloader.sampler is sampler


def read_by_instance(loader, instance, instances):
    """The rows of an epoch of the loader that one of some instances makes of a torch loader."""
    options = poptorch.Options().randomSeed(1)
    options.Distributed.configureProcessId(instance, instances).rowsByReplica(True)
    made_for = IPUStrategy(training_opts=options)
    rows = [row for x, _ in made_for._prepare_dataloader(loader, mode="train") for row in x]
    return [next(i for i, (x, _) in enumerate(dataset()) if torch.equal(x, row)) for row in rows]


def test_instances_share_a_plain_loader_and_another_sampler_is_read_as_it_is():
    plain = [read_by_instance(loader(shuffle=True), i, 2) for i in range(2)]
    alone = read_by_instance(loader(shuffle=True), 0, 1)
    assert sorted(plain[0] + plain[1]) == list(range(64)) and sorted(alone) == list(range(64))
    assert alone[:8] == plain[0][:4] + plain[1][:4]
    own = [DistributedSampler(dataset(), 2, rank) for rank in range(2)]
    for rank, sampler in enumerate(own):
        assert read_by_instance(DataLoader(dataset(), 4, sampler=sampler), rank, 2) == list(sampler)
    with pytest.warns(UserWarning, match="each of 2 instances reads all rows of its own SubsetRandomSampler"):
        found = read_by_instance(DataLoader(dataset(), 4, sampler=SubsetRandomSampler(range(8))), 1, 2)
    assert sorted(found) == list(range(8))
