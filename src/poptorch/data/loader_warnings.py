"""Warnings about arguments that do what they say, which may not be what was meant."""

import os
from typing import Any

from torch.utils.data import IterableDataset

from poptorch.logs import logger


def capped(num_workers: int, dataset: Any) -> int:
    """At most one worker a core. An iterable dataset is left alone: what it yields depends on the number."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers <= cores or isinstance(dataset, IterableDataset):
        return num_workers
    logger.warning("num_workers=%d is more than this machine's cores: using %d", num_workers, cores)
    return cores


def warn_about_copies(dataset: Any, num_workers: int, worker_init_fn: Any) -> None:
    if isinstance(dataset, IterableDataset) and num_workers > 1 and worker_init_fn is None:
        logger.warning(
            "each of %d workers reads the whole IterableDataset: every element will appear %d times. Pass a "
            "worker_init_fn that gives each worker its own part (torch.utils.data.get_worker_info)",
            num_workers,
            num_workers,
        )


def warn_about_tail(rows: int | None, combined: int | None, batch_sampler: Any, group: int) -> None:
    """With drop_last=False: say how large the last batch will be."""
    advice = "An executor compiled for the other batches can't run it; drop_last=True leaves it out"
    if batch_sampler is not None:
        if not hasattr(batch_sampler, "__len__"):
            logger.warning("drop_last=False: the last combined batch may be incomplete. %s", advice)
        elif left := len(batch_sampler) % group:
            logger.warning(
                "drop_last=False: the last combined batch has %d of %d micro-batches. %s", left, group, advice
            )
    elif rows is not None and combined is not None and (left := rows % combined):
        logger.warning(
            "drop_last=False: the last batch will have %d rows instead of %d. %s", left, combined, advice
        )


def warn_about_nothing(rows: int | None, combined: int | None) -> None:
    """Warn of an epoch without a batch."""
    logger.warning(
        "the DataLoader yields no batch: its dataset has %s rows, and a call takes %s (batch_size x device iterations "
        "x accumulation x replicas). Use more data, or lower one of these",
        "too few" if rows is None else rows,
        "more" if combined is None else combined,
    )
