"""The division of a dataset's rows among processes.

With `Options.Distributed.rowsByReplica` the replicas of all processes divide each global batch. Otherwise, as
in PopTorch, each process reads a contiguous share of the dataset, in the dataset's order or shuffled.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from popengine.errors import DataError
from poptorch.logs import logger
from poptorch.options import Options


def sampler_of_process(
    options: Options,
    dataset: Any,
    micro_batch: int | None,
    shuffle: bool,
    drop_last: bool,
    arguments: Mapping[str, Any],
) -> Sampler[int] | None:
    """Return a sampler of the rows that this process reads; None: torch's own sampler is to be used.

    Args: arguments: further arguments of torch's loader; a "generator" replaces the seed in a single process
    """
    distributed, counts = options.Distributed, options._counts()
    (share_index, processes), by_replica = distributed._dataset_share, distributed.rows_by_replica
    samplers = [name for name in ("batch_sampler", "sampler") if arguments.get(name) is not None]
    is_iterable = isinstance(dataset, IterableDataset)
    if processes == 1:
        # The options' seed orders the rows of a single process, too: any number of processes has the same order.
        has_seed = options.exists("random_seed") and arguments.get("generator") is None
        is_seeded = by_replica and shuffle and has_seed
        if not is_seeded or samplers or micro_batch is None or is_iterable:
            return None
    if samplers:
        raise DataError(
            f"{samplers[0]} is mutually exclusive with auto_distributed_partitioning=True: both decide "
            f"what process {distributed.processId} of {processes} reads\n"
            f"  fix: auto_distributed_partitioning=False, and a {samplers[0]} that reads one share"
        )
    if is_iterable:
        raise AssertionError(
            "auto_distributed_partitioning not supported for IterableDataset: yield each process's own share "
            "(options.Distributed.processId) and set auto_distributed_partitioning=False"
        )
    if micro_batch is None:
        raise AssertionError(
            "batch_size=None leaves nothing to partition: set auto_distributed_partitioning=False"
        )
    if shuffle and not options.exists("random_seed"):
        raise AssertionError(
            "shuffling in several processes needs one seed for all of them: call options.randomSeed(seed)"
        )
    rows, combined = len(dataset), micro_batch * counts.product
    index_count, leftovers = rows, 0
    if drop_last:
        share = rows // (combined * processes) * combined
        if share == 0:
            raise DataError(
                f"a dataset of {rows} elements is smaller than C × P = {combined} × {processes}: not every process "
                f"gets a combined batch\n"
                f"  fix: fewer processes, a smaller batch_size, fewer device iterations or less accumulation"
            )
        index_count, leftovers = share * processes, 0 if by_replica else rows % share
    elif options.exists("new_shapes"):
        # All processes run the incomplete batch together: shares are equal, and the last share wraps to the first rows.
        index_count = -(-rows // processes) * processes
    width = micro_batch * counts.groups if by_replica else None
    get_indices = partial(_indices_of_process, index_count, width, processes)
    first, last = (-(-len(get_indices(p)) // combined) for p in (0, processes - 1))
    if first != last:
        logger.warning(
            "drop_last=False with %d elements gives the first of %d processes one batch more than the "
            "last, which will wait for ever in a collective; set drop_last=True",
            rows,
            processes,
        )
    seed = options.random_seed if shuffle else None
    return ProcessSampler(rows, seed, partial(get_indices, share_index), leftovers)


class ProcessSampler(Sampler[int]):
    """A sampler of the rows of one process, from an order of all rows that is the same in all processes.

    With a `seed` each epoch draws a new order, and the first, third, ... epoch adds `leftovers`, the number of rows
    that no process reads, to the indices, so that two epochs together read every row of the order.
    """

    def __init__(
        self, rows: int, seed: int | None, get_indices: Callable[[], torch.Tensor], leftovers: int
    ) -> None:
        self.rows, self.get_indices, self.leftovers, self.is_shifted = rows, get_indices, leftovers, False
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.get_indices())

    def __iter__(self) -> Iterator[int]:
        self.is_shifted = self.generator is not None and not self.is_shifted
        indices = (self.get_indices() + (self.leftovers if self.is_shifted else 0)) % self.rows
        if self.generator is not None:
            indices = torch.randperm(self.rows, generator=self.generator)[indices]
        return iter(indices.tolist())


def _indices_of_process(index_count: int, width: int | None, processes: int, process: int) -> torch.Tensor:
    """Return those of `index_count` indices that a process reads: a contiguous share; or in turn with the other
    processes `width` rows, a micro-batch of its replicas, so that a replica's rows don't depend on their number."""
    indices = torch.arange(index_count)
    if width is None:
        return indices.tensor_split(processes)[process]
    whole = index_count - index_count % (width * processes)
    rest = index_count - whole
    pieces = indices // width
    if rest and rest % processes == 0:  # the last groups, one for each process, are shorter
        pieces[whole:] = torch.arange(rest) // (rest // processes)
    return indices[pieces % processes == process]
