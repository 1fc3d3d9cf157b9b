"""Datasets whose rows say where they come from, for the tests beside this file."""

import os
import signal
import time

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from poptorch.data import AsynchronousDataAccessor
from poptorch.enums import SharingStrategy

FORK = {"sharing_strategy": SharingStrategy.Fork}


class Rows(Dataset):
    """Row i is [i, i] and -i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return torch.full((2,), float(index)), -index


class Stream(IterableDataset):
    """The numbers below `count`; each of several workers yields its own part."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from range(self.count * number // workers, self.count * (number + 1) // workers)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


class Faulty(Rows):
    """Something happens at row 5."""

    def __init__(self, what: str) -> None:
        super().__init__(8)
        self.what = what

    def __getitem__(self, index: int):
        if index == 5:
            if self.what == "raise":
                raise ValueError("row five is broken")
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "sleep":
                time.sleep(1000)
        return super().__getitem__(index)


def forked(dataset, **options) -> AsynchronousDataAccessor:
    return AsynchronousDataAccessor(dataset, sharing_strategy=SharingStrategy.Fork, **options)


def numbers(batches) -> list[list[int]]:
    """Which rows each batch holds; copied, as batches of an accessor are only lent."""
    return [(batch[0][:, 0] if isinstance(batch, list) else batch).int().tolist() for batch in batches]


def rows_in(batches) -> list[int]:
    """The rows of all batches, one after the other."""
    return [row for batch in numbers(batches) for row in batch]
