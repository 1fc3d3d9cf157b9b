"""The module of the executor's class in PopTorch, from which programs import it for type checks."""

from .executor.executor import PoplarExecutor

__all__ = ["PoplarExecutor"]
