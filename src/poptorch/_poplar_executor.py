"""PopTorch's own path to the executor's class; programs import it from here for type checks."""

from .executor.executor import PoplarExecutor

__all__ = ["PoplarExecutor"]
