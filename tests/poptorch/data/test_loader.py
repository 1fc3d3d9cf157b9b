"""One batch of the loader is what one call of an executor consumes, in every mode."""

import copy
import os
from collections import namedtuple

import pytest
import torch
from rows import FORK, Rows, SizedStream, Stream, numbers, rows_in
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from popengine.errors import DataError, Error
from poptorch.data import DataLoader
from poptorch.data.rows import concatenate_batches, rebatch_rows
from poptorch.enums import CommGroupType, DataLoaderMode, SharingStrategy
from poptorch.options import Options

MODES = list(DataLoaderMode)


def options(iterations: int = 2) -> Options:
    return Options().deviceIterations(iterations)


def loader_of(dataset, mode=DataLoaderMode.Sync, **kwargs) -> DataLoader:
    return DataLoader(options(), dataset, mode=mode, async_options=dict(FORK), **kwargs)


def test_the_combined_batch_is_the_product_of_all_factors():
    opts = options(3).replicationFactor(4).inputReplicaGrouping(2, CommGroupType.Consecutive)
    opts.Training.gradientAccumulation(5)
    loader = DataLoader(opts, Rows(130), batch_size=2)
    assert loader.combinedBatchSize == loader._combined_batch_size == 2 * 3 * 5 * (4 // 2)
    assert len(loader) == 2 and [len(batch[0]) for batch in loader] == [60, 60]


def test_the_users_options_are_kept_and_frozen():
    opts = options()
    loader = DataLoader(opts, Rows(4))
    assert loader.options is opts
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(3)


def test_anything_but_options_is_refused():
    with pytest.raises(AssertionError):
        DataLoader(Rows(4), options())  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("drop_last", [True, False])
def test_all_modes_give_the_same_batches_and_lengths(mode, drop_last):
    loader = loader_of(Rows(10), mode, batch_size=2, drop_last=drop_last)
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]][: 2 if drop_last else 3]
    assert len(loader) == len(expected)
    for _ in range(2):
        assert numbers(loader) == expected


@pytest.mark.parametrize("mode", [DataLoaderMode.Async, DataLoaderMode.AsyncRebatched])
def test_workers_of_the_worker_keep_the_order(mode):
    loader = loader_of(Rows(13), mode, batch_size=2, num_workers=2, rebatched_worker_size=3)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_shuffle_is_the_one_that_torch_would_make(mode):
    torch.manual_seed(5)
    expected = numbers(torch.utils.data.DataLoader(Rows(8), batch_size=4, shuffle=True))
    torch.manual_seed(5)
    assert numbers(loader_of(Rows(8), mode, batch_size=2, shuffle=True)) == expected


@pytest.mark.parametrize("strategy", [SharingStrategy.SharedMemory, SharingStrategy.ForkServer])
def test_a_generator_of_the_users_own_goes_to_the_worker(strategy):
    # Its state used to be gone from shared memory before a spawned worker opened it.
    def order(mode):
        generator, how = torch.Generator().manual_seed(5), {"sharing_strategy": strategy}
        loader = DataLoader(
            Options(), torch.arange(12), 3, shuffle=True, mode=mode, async_options=how, generator=generator
        )
        return [batch.tolist() for batch in loader]

    assert order("Async") == order("Sync")


def test_small_tails_of_each_worker_are_lost_only_without_rebatching():
    def rows(mode):
        return rows_in(loader_of(Stream(11), mode, num_workers=2, worker_init_fn=int))

    assert len(rows(DataLoaderMode.Async)) == 2 * (5 // 2 + 6 // 2)
    assert sorted(rows(DataLoaderMode.AsyncRebatched)) == list(range(10))


def test_a_break_starts_a_new_epoch_in_every_mode():
    for mode in MODES:
        loader = loader_of(Rows(10), mode)
        assert next(iter(loader))[1].tolist() == [0, -1]
        assert numbers(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_an_incomplete_last_batch_is_announced(caplog):
    loader_of(Rows(10), batch_size=2, drop_last=False)
    assert "the last combined batch has 2 of 4 rows" in caplog.text
    caplog.clear()
    loader_of(Rows(8), batch_size=2, drop_last=False)
    assert not caplog.text


def test_complete_batches_come_from_the_dataset_as_they_are():
    for mode in (DataLoaderMode.Sync, DataLoaderMode.Async):
        loader = loader_of(Rows(3), mode, batch_size=None)
        assert loader.combinedBatchSize is None and len(loader) == 3
        assert [batch[0].tolist() for batch in loader] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_batches_of_a_batch_sampler_are_combined(mode):
    sampler = BatchSampler(SequentialSampler(Rows(15)), batch_size=3, drop_last=True)
    loader = loader_of(Rows(15), mode, batch_sampler=sampler)
    assert loader.combinedBatchSize == 6 and len(loader) == 2
    assert numbers(loader) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_a_batch_sampler_may_have_no_length():
    class Unsized(Sampler):
        def __iter__(self):
            return iter(range(6))

    loader = loader_of(Rows(6), batch_sampler=BatchSampler(Unsized(), batch_size=1, drop_last=True))
    assert len(list(loader)) == 6 // loader.combinedBatchSize


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_that_are_left_out_are_logged_once(mode, shuffle, caplog):
    """At level INFO if shuffled: then each row has its turn in another epoch."""
    with caplog.at_level("INFO", "poptorch::python"):
        loader = loader_of(Rows(11), mode, batch_size=2, shuffle=shuffle)
        assert [len(numbers(loader)) for _ in range(2)] == [2, 2]
    found = [each.levelname for each in caplog.records if "leaves out 3 of 11 rows" in each.getMessage()]
    assert found == ["INFO" if shuffle else "WARNING"]


def test_micro_batches_that_are_left_out_are_logged_too(caplog):
    loader_of(Rows(6), batch_sampler=[[0, 1], [2, 3], [4, 5]])
    assert "leaves out 1 of 3 micro-batches in each epoch, since a call takes 2" in caplog.text


def test_the_tail_of_a_batch_sampler_is_kept_only_if_asked(caplog):
    sampler = [[0, 1], [2, 3], [4, 5]]
    for mode in MODES:
        loader = loader_of(Rows(6), mode, batch_sampler=sampler, drop_last=False)
        assert len(loader) == 2 and numbers(loader) == [[0, 1, 2, 3], [4, 5]]
    assert "the last combined batch has 1 of 2 micro-batches" in caplog.text
    caplog.clear()
    loader_of(Rows(6), batch_sampler=iter(sampler), drop_last=False)
    assert "may be incomplete" in caplog.text


@pytest.mark.parametrize("arguments", [{"batch_size": 2}, {"shuffle": True}])
def test_a_batch_sampler_excludes_batch_size_and_shuffle(arguments):
    with pytest.raises(Error, match="mutually exclusive"):
        loader_of(Rows(6), batch_sampler=[[0]], **arguments)


def test_an_iterable_dataset_has_a_length_only_if_it_defines_one():
    assert len(loader_of(SizedStream(9), batch_size=2)) == 2
    assert len(loader_of(SizedStream(9), DataLoaderMode.AsyncRebatched, batch_size=2, drop_last=False)) == 3
    with pytest.raises(TypeError):
        len(loader_of(Stream(9)))


def test_workers_that_read_a_whole_iterable_dataset_are_reported(caplog):
    loader_of(Stream(9), num_workers=2)
    assert "every element will appear 2 times" in caplog.text


def test_more_workers_than_cores_are_capped_with_one_warning(caplog):
    cores = len(os.sched_getaffinity(0))
    assert loader_of(Rows(4), num_workers=cores + 1).num_workers == cores
    assert len(caplog.records) == 1


def test_workers_persist_by_default():
    assert loader_of(Rows(4), num_workers=1).persistent_workers
    assert not loader_of(Rows(4)).persistent_workers
    assert not loader_of(Rows(4), num_workers=1, persistent_workers=False).persistent_workers


def test_a_worker_batch_is_no_larger_than_the_combined_one():
    with pytest.raises(AssertionError, match="rebatched_worker_size"):
        loader_of(Rows(8), DataLoaderMode.AsyncRebatched, rebatched_worker_size=3)


def test_the_rebatched_size_is_not_an_async_option():
    with pytest.raises(AssertionError, match="rebatched_size"):
        DataLoader(options(), Rows(8), mode=DataLoaderMode.Async, async_options={"rebatched_size": 2})


def test_terminate_ends_async_loading_and_nothing_else():
    loader = loader_of(Rows(4))
    loader.terminate()
    assert numbers(loader) == [[0, 1], [2, 3]]
    loader = loader_of(Rows(4), DataLoaderMode.Async)
    loader.terminate()
    loader.terminate()
    with pytest.raises(AssertionError, match="terminated"):
        iter(loader)


def test_a_copy_of_an_async_loader_loads_by_itself():
    twin = copy.copy(loader_of(Rows(4), DataLoaderMode.Async))
    assert not twin.is_asynchronous and numbers(twin) == [[0, 1], [2, 3]]


def test_a_loader_keeps_its_arguments_so_that_lightning_can_rebuild_it():
    # Lightning gave the combined size as batch_size to the loader it built, and missed the options.
    loader = DataLoader(options(3), Rows(12), batch_size=2, shuffle=True)
    arguments = vars(loader)["__pl_saved_kwargs"]
    twin = DataLoader(**{**arguments, "shuffle": False, "sampler": SequentialSampler(loader.dataset)})
    assert numbers(twin) == [list(range(6)), list(range(6, 12))]
    assert twin.options is loader.options


@pytest.mark.parametrize("strategy", SharingStrategy.__members__)
def test_modes_and_strategies_may_be_given_by_name(strategy):
    loader = DataLoader(options(), Rows(4), mode="Async", async_options={"sharing_strategy": strategy})
    assert numbers(loader) == [[0, 1], [2, 3]]
    loader.terminate()
    with pytest.raises(
        ValueError, match=r"DataLoaderMode takes one of .*; found 'Asynch'; did you mean 'Async'"
    ):
        DataLoader(options(), Rows(4), mode="Asynch")


@pytest.mark.parametrize("dataset", [Rows(3), Stream(3)], ids=["rows", "stream"])
def test_a_loader_without_a_single_batch_warns_once(dataset, caplog):
    loader = loader_of(dataset, batch_size=2)
    for _ in range(2):
        assert list(loader) == []
    count = 3 if isinstance(dataset, Rows) else "too few"
    (record,) = caplog.records
    assert f"yields no batch: its dataset has {count} rows, and a call takes 4" in record.getMessage()
    with pytest.raises(DataError, match=r"not a single \(complete\) batch"):
        loader_of(dataset, DataLoaderMode.Async, batch_size=2)


def test_a_loader_that_yields_does_not_warn(caplog):
    loader = loader_of(Rows(4), batch_size=2)
    state = loader.state_dict()
    assert len(numbers(loader)) == 1
    loader = loader_of(Rows(4), batch_size=2)
    loader.load_state_dict({**state, "position": 1})
    assert numbers(loader) == [] and not caplog.records


# Batches are put together and cut along dimension 0, whatever they are nested in.


Pair = namedtuple("Pair", "x y")


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_nested_batches_are_concatenated():
    result = concatenate_batches(
        [{"a": [rows(1)], "p": Pair(rows(2), 5)}, {"a": [rows(3)], "p": Pair(rows(4), 5)}]
    )
    assert result["a"][0].tolist() == [1, 3]
    assert isinstance(result["p"], Pair) and result["p"].x.tolist() == [2, 4] and result["p"].y == 5


def test_constants_that_differ_are_refused():
    with pytest.raises(DataError, match="differ in more than their tensors"):
        concatenate_batches([[rows(1), "a"], [rows(2), "b"]])


def test_rows_can_only_be_cut_where_all_tensors_have_as_many():
    with pytest.raises(DataError, match=r"\[2\], \[3\]"):
        list(rebatch_rows([[torch.ones(2), torch.ones(3)]], 2, keep_tail=False))
