"""The accessor lends batches of shared memory, in the order and of the structure of its dataset."""

import time
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from rows import FORK, Faulty, Rows, Stream, forked, numbers

from popengine.errors import DataError, Error
from poptorch.data import AsynchronousDataAccessor, DataLoader
from poptorch.enums import DataLoaderMode, SharingStrategy
from poptorch.nested_values import ICustomArgParser, registerCustomArgParser
from poptorch.options import Options

Pair = namedtuple("Pair", "x y")


@dataclass
class Box:
    inside: torch.Tensor


class BoxParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.inside

    def reconstruct(self, original_structure, tensor_iterator):
        return Box(next(tensor_iterator))


def loader_of(dataset, **kwargs) -> DataLoader:
    return DataLoader(Options().deviceIterations(2), dataset, **kwargs)


@pytest.mark.parametrize("strategy", [SharingStrategy.ForkServer, SharingStrategy.FileSystem])
def test_a_dataset_can_be_pickled_to_its_worker(strategy):
    registerCustomArgParser(Box, BoxParser())
    try:
        accessor = AsynchronousDataAccessor(
            [Box(torch.ones(2)), Box(torch.zeros(2))], sharing_strategy=strategy
        )
        assert [box.inside.tolist() for box in accessor] == [[1, 1], [0, 0]]
        accessor.terminate()
    finally:
        registerCustomArgParser(Box, None)


def test_the_error_for_a_dataset_that_can_not_be_pickled_has_a_fix():
    class Local(Rows):
        pass

    with pytest.raises(DataError, match=r"can't be pickled(.|\n)*SharingStrategy.Fork"):
        AsynchronousDataAccessor(Local(4))
    assert len(list(forked(Local(4)))) == 4


def test_structure_is_kept_and_tuples_become_lists():
    batch = ({"a": torch.ones(2), "n": 5}, Pair(torch.zeros(1), None), (torch.ones((), dtype=torch.bool),))
    (first,) = forked([batch])
    assert isinstance(first, list) and isinstance(first[1], Pair) and isinstance(first[2], list)
    assert first[0]["a"].tolist() == [1, 1] and first[0]["n"] == 5 and first[1].y is None
    assert first[2][0].dtype == torch.bool and first[2][0].item() is True


def test_constants_may_differ_from_batch_to_batch():
    words = [["a", torch.ones(1)], ["b", torch.ones(1)]]
    assert [batch[0] for batch in forked(words)] == ["a", "b"]


def test_batches_are_views_of_shared_memory_that_are_used_again():
    accessor = forked([torch.full((2,), float(n)) for n in range(8)], buffer_size=2)
    addresses = set()
    for number, batch in enumerate(accessor):
        assert batch.is_shared() and batch.tolist() == [number, number]
        addresses.add(batch.data_ptr())
    assert len(addresses) == 2
    assert batch.tolist() == [7, 7]  # the last one is in the user's hands until the next epoch


@pytest.mark.parametrize("keeps", [True, False])
def test_batches_that_are_kept_without_a_copy_are_one_warning(caplog, keeps):
    accessor = forked([torch.tensor([n]) for n in range(8)])
    kept = [batch if keeps else batch.clone() for batch in accessor]
    lines = [record.getMessage() for record in caplog.records if "is kept" in record.getMessage()]
    assert (
        len(kept) == 8
        and [line.rpartition("fix: ")[2] for line in lines] == ["keep copies, tensor.clone()"] * keeps
    )


def test_epochs_follow_each_other():
    accessor = forked([torch.tensor([n]) for n in range(3)])
    for _ in range(3):
        assert numbers(accessor) == [[0], [1], [2]]
    assert len(accessor) == 3


@pytest.mark.parametrize("load_indefinitely", [True, False])
def test_iter_in_the_middle_starts_from_the_beginning(load_indefinitely):
    accessor = forked([torch.tensor([n]) for n in range(5)], load_indefinitely=load_indefinitely)
    for taken in (1, 3, 5):
        iterator = iter(accessor)
        assert numbers(next(iterator) for _ in range(taken)) == [[0], [1], [2], [3], [4]][:taken]
    assert numbers(accessor) == [[0], [1], [2], [3], [4]]


def test_an_epoch_that_has_ended_stays_ended_until_iter():
    accessor = forked([torch.ones(1)])
    assert len(list(accessor)) == 1
    with pytest.raises(StopIteration):
        next(accessor)


def test_a_generator_gives_one_epoch_and_then_empty_ones():
    accessor = forked(torch.tensor([n]) for n in range(3))
    assert [numbers(accessor) for _ in range(3)] == [[[0], [1], [2]], [], []]


@pytest.mark.parametrize("early_preload, loaded", [(True, 3), (False, 1)])
def test_early_preload_fills_the_ring_before_the_first_iter(early_preload, loaded):
    counter = torch.zeros(1).share_memory_()

    def counted():
        for _ in range(5):
            counter.add_(1)
            yield counter.clone()

    accessor = forked(counted(), early_preload=early_preload, buffer_size=3)
    deadline = time.monotonic() + 240
    while counter.item() < loaded and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert counter.item() == loaded
    assert numbers(accessor) == [[1], [2], [3], [4], [5]]


def test_rows_are_rebatched():
    source = torch.utils.data.DataLoader(Stream(10), batch_size=1)
    assert numbers(forked(source, rebatched_size=4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(forked(torch.utils.data.DataLoader(Rows(10)), rebatched_size=4)) == 2
    with pytest.raises(AssertionError, match="rebatched_size"):
        forked(source, rebatched_size=1)


def test_the_next_batch_is_loaded_meanwhile_and_the_next_epochs_too():
    loaded = torch.zeros(1).share_memory_()

    class Counted:
        def __iter__(self):
            for _ in range(2):
                loaded.add_(1)
                yield torch.ones(1)

    iterator = iter(forked(Counted()))
    for taken in (1, 2):
        next(iterator)
        deadline = time.monotonic() + 240
        while loaded.item() <= taken and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loaded.item() > taken


def test_a_loader_that_is_asynchronous_is_refused():
    loader = loader_of(Rows(4), mode=DataLoaderMode.Async, async_options=dict(FORK))
    with pytest.raises(Error, match="already uses an AsynchronousDataAccessor"):
        forked(loader)


def test_a_loader_that_keeps_its_tail_must_be_rebatched():
    with pytest.raises(AssertionError, match=r"'drop_last=False'.*'rebatched_size'"):
        forked(loader_of(Rows(5), drop_last=False))
    accessor = forked(loader_of(Rows(5), drop_last=False), rebatched_size=2)
    assert numbers(accessor) == [[0, 1], [2, 3]] and len(accessor) == 2


@pytest.mark.parametrize("dataset", [[], Stream(0)])
def test_an_empty_dataset_fails_at_the_start(dataset):
    with pytest.raises(Error, match=r"AsynchronousDataAccessor worker thread failed to start.*empty"):
        forked(dataset)


def test_a_dataset_that_fails_at_once_fails_at_the_start():
    def broken():
        raise ValueError("no first row")
        yield

    with pytest.raises(Error, match=r"worker thread failed to start(.|\n)*no first row"):
        forked(broken())


def test_a_dataset_that_fails_later_fails_the_consumer():
    accessor = forked(Faulty("raise"))
    taken = []
    with pytest.raises(
        AssertionError, match=r"An error occurred in the data fetcher(.|\n)*row five is broken"
    ):
        for batch in accessor:
            taken.append(batch[1])
    assert taken == [0, -1, -2, -3, -4]
    with pytest.raises(AssertionError, match="terminated"):
        iter(accessor)


def test_a_batch_of_another_shape_or_dtype_than_the_first_arrives_as_it_is():
    batches = [torch.tensor([1, 2]), torch.tensor([0.5, 2.5]), torch.tensor([3, 4, 5])]
    found = [batch.clone() for batch in forked(batches)]
    assert [batch.dtype for batch in found] == [torch.int64, torch.float32, torch.int64]
    assert all(map(torch.equal, found, batches))
