"""Load combined batches, each with the rows of one call of an executor; a worker process can load ahead."""

from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.loader import DataLoader

__all__ = ["AsynchronousDataAccessor", "DataLoader"]
