"""Several processes read one dataset: equal shares, and every row in two epochs."""

from typing import Any

import pytest
import torch
from rows import FORK, Rows, SizedStream, numbers, rows_in

from popengine.errors import DataError, Error
from poptorch.data import DataLoader
from poptorch.data.dataset_shares import Share, share_of
from poptorch.enums import DataLoaderMode
from poptorch.options import Options


def options(process: int, processes: int, seed: int | None = None) -> Options:
    opts = Options().deviceIterations(2)
    opts.Distributed.configureProcessId(process, processes)
    return opts if seed is None else opts.randomSeed(seed)


@pytest.mark.parametrize(
    "process, drop_last, expected",
    [
        (0, True, Share(0, 4, 3)),
        (1, True, Share(4, 4, 3)),
        (0, False, Share(0, 6)),
        (1, False, Share(6, 5)),
    ],
)
def test_eleven_rows_in_batches_of_four_for_two_processes(process, drop_last, expected):
    assert share_of(11, 4, 2, process, drop_last) == expected


def test_too_little_data_for_all_processes_is_an_error():
    with pytest.raises(Error, match="dataset of 7 elements is smaller than C × P = 4 × 2"):
        DataLoader(options(0, 2), Rows(7), batch_size=2)


def test_each_process_reads_its_own_block():
    blocks = [numbers(DataLoader(options(process, 2), Rows(11), batch_size=2)) for process in range(2)]
    assert blocks == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


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


def test_shuffling_needs_a_common_seed():
    with pytest.raises(AssertionError, match="randomSeed"):
        DataLoader(options(0, 2), Rows(11), shuffle=True)


def test_an_iterable_dataset_is_not_partitioned():
    with pytest.raises(
        AssertionError, match="auto_distributed_partitioning not supported for IterableDataset"
    ):
        DataLoader(options(0, 2), SizedStream(8))


def test_complete_batches_are_not_partitioned():
    with pytest.raises(AssertionError, match="batch_size=None"):
        DataLoader(options(0, 2), Rows(8), batch_size=None)


@pytest.mark.parametrize("name", ["batch_sampler", "sampler"])
def test_a_sampler_of_ones_own_and_partitioning_exclude_each_other(name):
    arguments: dict[str, Any] = {name: [[0], [1]]}
    with pytest.raises(
        DataError, match=f"{name} is mutually exclusive with auto_distributed_partitioning=True"
    ):
        DataLoader(options(0, 2), Rows(8), **arguments)


def test_without_dropping_a_process_that_has_one_batch_more_is_reported(caplog):
    DataLoader(options(0, 2), Rows(9), batch_size=2, drop_last=False)
    assert "one batch more" in caplog.text
