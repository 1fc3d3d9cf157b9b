"""Data: batches as large as one call of an executor consumes, loaded ahead of it in a worker process."""

from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.loader import DataLoader

__all__ = ["AsynchronousDataAccessor", "DataLoader"]
