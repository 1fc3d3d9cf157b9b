"""Partition: which rows of a dataset one of several processes reads, the same number in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from popengine.errors import DataError
from poptorch.options import Options
from poptorch.reporting.logs import logger


@dataclass(frozen=True, slots=True)
class Share:
    """The block of (permuted) positions that belongs to one process."""

    start: int
    size: int
    leftovers: int = 0  # rows at the end that no process reads


def share_of(rows: int, batch: int, processes: int, process: int, drop_last: bool) -> Share:
    """Contiguous blocks: whole batches with `drop_last`, otherwise all rows, the first processes one more.

    Raises: DataError, if there isn't a whole batch for each process.
    """
    if not drop_last:
        size, longer = divmod(rows, processes)
        return Share(process * size + min(process, longer), size + (process < longer))
    size = rows // (batch * processes) * batch
    if size == 0:
        raise DataError(
            f"a dataset of {rows} elements is smaller than C × P = {batch} × {processes}: not every process "
            f"gets a combined batch\n"
            f"  fix: fewer processes, a smaller batch_size, fewer device iterations or less accumulation"
        )
    return Share(process * size, size, rows % size)


def partition_of(
    options: Options,
    dataset: Any,
    combined: int | None,
    shuffle: bool,
    drop_last: bool,
    others: Mapping[str, Any],
) -> PartitionSampler:
    """The rows of this process.

    Args:
        combined: rows of a combined batch; None: not known
        others:   arguments of the loader that decide the same, by name; None: not given

    Raises:
        DataError: one of these is given, or there isn't a batch for each process
        AssertionError: the dataset can't be partitioned
    """
    distributed = options.Distributed
    for name, value in others.items():
        if value is not None:
            raise DataError(
                f"{name} is mutually exclusive with auto_distributed_partitioning=True: both decide "
                f"what process {distributed.processId} of {distributed.numProcesses} reads\n"
                f"  fix: auto_distributed_partitioning=False, and a {name} that reads one share"
            )
    assert not isinstance(dataset, IterableDataset), (
        "auto_distributed_partitioning not supported for IterableDataset: yield each process's own share "
        "(options.Distributed.processId) and set auto_distributed_partitioning=False"
    )
    assert combined is not None, (
        "batch_size=None leaves nothing to partition: set auto_distributed_partitioning=False"
    )
    assert not shuffle or options.exists("random_seed"), (
        "shuffling in several processes needs one seed for all of them: call options.randomSeed(seed)"
    )
    rows, count = len(dataset), distributed.numProcesses
    share = share_of(rows, combined, count, distributed.processId, drop_last)
    if not drop_last and rows % count and rows // count % combined == 0:
        logger.warning(
            "drop_last=False with %d elements gives the first of %d processes one batch more than the "
            "last, which will wait for ever in a collective; set drop_last=True",
            rows,
            count,
        )
    return PartitionSampler(rows, share, options.random_seed if shuffle else None)


class PartitionSampler(Sampler[int]):
    """Positions of one process's share, of a new permutation in each epoch where a `seed` is given.

    The permutation is one for all processes: each draws it whole, from a generator with the same seed. The
    shares start behind the leftovers in the first epoch and before them in the second, so that two epochs
    reach every position.
    """

    def __init__(self, rows: int, share: Share, seed: int | None) -> None:
        self.rows = rows
        self.share = share
        self.behind = False
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.share.size

    def __iter__(self) -> Iterator[int]:
        start, end = self.share.start, self.share.start + self.share.size
        if self.generator is None:
            return iter(range(start, end))
        permutation = torch.randperm(self.rows, generator=self.generator)
        self.behind = not self.behind
        offset = self.share.leftovers if self.behind else 0
        return iter(permutation[start + offset : end + offset].tolist())
