"""Several processes read one dataset: equal shares, and every row in two epochs."""

import time

import pytest
import torch
from rows import FORK, Rows, SizedStream, numbers, rows_in

import popdist.poptorch
from popengine.errors import DataError
from poptorch.data import DataLoader
from poptorch.enums import DataLoaderMode
from poptorch.options import Options


def options(process: int, processes: int, seed: int | None = None) -> Options:
    opts = Options().deviceIterations(2)
    opts.Distributed.configureProcessId(process, processes)
    return opts if seed is None else opts.randomSeed(seed)


@pytest.mark.parametrize(
    "process, drop_last, expected",
    [(0, True, range(4)), (1, True, range(4, 8)), (0, False, range(6)), (1, False, range(6, 11))],
)
def test_eleven_rows_in_batches_of_four_for_two_processes(process, drop_last, expected):
    loader = DataLoader(options(process, 2), Rows(11), batch_size=2, drop_last=drop_last)
    assert rows_in(loader) == list(expected)


EXCLUDED = "is mutually exclusive with auto_distributed_partitioning=True"


@pytest.mark.parametrize(
    "message, error, dataset, how",
    [
        ("dataset of 7 elements is smaller than C × P = 4 × 2", DataError, Rows(7), {"batch_size": 2}),
        ("randomSeed", AssertionError, Rows(11), {"shuffle": True}),
        ("partitioning not supported for IterableDataset", AssertionError, SizedStream(8), {}),
        ("batch_size=None", AssertionError, Rows(8), {"batch_size": None}),
        (f"batch_sampler {EXCLUDED}", DataError, Rows(8), {"batch_sampler": [[0], [1]]}),
        (f"sampler {EXCLUDED}", DataError, Rows(8), {"sampler": [0, 1]}),
    ],
)
def test_what_can_not_be_shared_out_is_an_error(message, error, dataset, how):
    with pytest.raises(error, match=message):
        DataLoader(options(0, 2), dataset, **how)


def test_without_partitioning_each_process_reads_all():
    loader = DataLoader(options(1, 2), Rows(8), batch_size=2, auto_distributed_partitioning=False)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_shuffled_shares_begin_behind_the_leftovers_and_before_them_in_turn():
    loaders = [DataLoader(options(p, 2, seed=3), Rows(11), batch_size=2, shuffle=True) for p in range(2)]
    generator = torch.Generator().manual_seed(3)
    for leftovers in (3, 0, 3):
        permutation = torch.randperm(11, generator=generator).tolist()[leftovers:]
        assert [rows_in(loader) for loader in loaders] == [permutation[0:4], permutation[4:8]]


def test_shares_are_the_same_when_loaded_asynchronously():
    def epochs(mode):
        loader = DataLoader(
            options(1, 2, seed=3), Rows(11), batch_size=2, shuffle=True, mode=mode, async_options=FORK
        )
        return [numbers(loader) for _ in range(3)]

    assert epochs(DataLoaderMode.Async) == epochs(DataLoaderMode.Sync)


def test_without_dropping_a_process_that_has_one_batch_more_is_reported(caplog):
    DataLoader(options(0, 2), Rows(9), batch_size=2, drop_last=False)
    assert "one batch more" in caplog.text


ROWS, REPLICAS, ACCUMULATION, ITERATIONS, MICRO_BATCH = 115, 8, 2, 3, 1
SYNC = DataLoaderMode.Sync


def dealt(processes: int, process: int, mode=SYNC, iterations=ITERATIONS, **how) -> DataLoader:
    """The loader of one of some processes, which have 8 replicas in all."""
    opts = options(process, processes, seed=3).deviceIterations(iterations)
    opts.replicationFactor(REPLICAS // processes).Training.gradientAccumulation(ACCUMULATION)
    opts.Distributed.rowsByReplica(True)
    how = {"shuffle": True, **how}
    if mode != SYNC:
        how["async_options"] = FORK
    if mode == DataLoaderMode.AsyncRebatched:
        how["rebatched_worker_size"] = 5
    return DataLoader(opts, Rows(ROWS), batch_size=MICRO_BATCH, mode=mode, **how)


def by_replica(loaders, calls=None):
    """[update, replica, micro-batch]: the rows that each replica reads; of some calls of an epoch."""
    found = []
    for loader in loaders:
        batches = iter(loader)
        rows = [torch.tensor(numbers([batch])) for _, batch in zip(range(calls or 99), batches, strict=False)]
        found.append(torch.cat(rows).reshape(-1, ACCUMULATION, REPLICAS // len(loaders)))
    return torch.cat(found, dim=2).transpose(1, 2).tolist()


def of_all(processes: int, *args, **how) -> list[DataLoader]:
    return [dealt(processes, process, *args, **how) for process in range(processes)]


def end(loaders):
    for loader in loaders:
        loader.terminate()


@pytest.mark.parametrize("mode", DataLoaderMode, ids=lambda mode: mode.name)
def test_the_rows_of_a_replica_are_the_same_in_any_number_of_processes(mode):
    generator = torch.Generator().manual_seed(3)
    several = {processes: of_all(processes, mode) for processes in (1, 2, 4)}
    for _ in range(2):
        order = torch.randperm(ROWS, generator=generator)[: ROWS // 48 * 48]
        expected = order.reshape(-1, ACCUMULATION, REPLICAS).transpose(1, 2).tolist()
        for processes, loaders in several.items():
            assert by_replica(loaders) == expected, f"{processes} processes"
    for loaders in several.values():
        end(loaders)


@pytest.mark.parametrize("change", [(4, 2), (2, 8), (4, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("mode", DataLoaderMode, ids=str)
def test_another_number_of_processes_goes_on_in_the_middle_of_an_epoch(change, mode):
    before, after = change
    whole = [dealt(1, 0)]
    by_replica(whole)  # an epoch
    expected = by_replica(whole)
    first = of_all(before, mode)
    by_replica(first)
    begun = by_replica(first, calls=1)
    state = first[0].state_dict()
    assert (state["epoch"], state["position"]) == (1, 1)
    end(first)
    second = of_all(after, mode)
    for loader in second:
        loader.load_state_dict(state)
    assert begun + by_replica(second) == expected
    third = by_replica(whole)
    assert by_replica(second) == third  # the epoch that follows
    end(second)


def test_calls_of_another_size_go_on_where_the_rows_end():
    whole, first, second = dealt(1, 0, iterations=1), dealt(2, 0, iterations=2), of_all(4, iterations=1)
    expected = by_replica([whole])
    next(iter(first))
    for loader in second:
        loader.load_state_dict(first.state_dict())
        assert loader.state_dict()["position"] == 2
    assert by_replica(second) == expected[2:]
    other = dealt(4, 0, iterations=3)
    with pytest.raises(
        DataError, match=r"in calls of 32 rows, and here are one order for all in calls of 48"
    ):
        other.load_state_dict(first.state_dict())


def test_an_incomplete_last_batch_is_dealt_out_too_and_every_row_is_read_once():
    loaders = of_all(4, drop_last=False)
    found = [numbers(loader) for loader in loaders]
    assert sorted(row for rows in found for batch in rows for row in batch) == list(range(ROWS))
    assert [len(batches[-1]) for batches in found] == [6, 5, 4, 4]  # 19 rows in turns of 2
    assert [len(loader) for loader in loaders] == [len(batches) for batches in found]


@pytest.mark.parametrize("mode", [DataLoaderMode.Async, DataLoaderMode.AsyncRebatched])
def test_after_a_break_an_epoch_has_the_rows_of_its_number_however_far_the_worker_has_read(mode):
    expected = dealt(2, 0)
    list(expected)
    second = numbers(expected)
    loader = dealt(2, 0, mode)
    for number, _ in enumerate(loader):
        if number == 1:
            break  # the last batch but none: the worker loads the next epoch meanwhile, or has
    time.sleep(0.3)
    assert numbers(loader) == second
    loader.terminate()


def test_options_of_popdist_deal_rows_to_replicas_and_others_do_as_poptorch():
    assert popdist.poptorch.Options().Distributed.rows_by_replica
    assert not Options().Distributed.rows_by_replica


def test_a_state_of_another_kind_of_shuffling_is_refused():
    plain = DataLoader(Options(), Rows(ROWS), shuffle=True)
    with pytest.raises(DataError, match="another kind of shuffling"):
        plain.load_state_dict(dealt(1, 0).state_dict())
