"""Loaders of combined batches, the rows of one call of an executor; a worker process can load them ahead."""

from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.loader import DataLoader

__all__ = ["AsynchronousDataAccessor", "DataLoader"]
