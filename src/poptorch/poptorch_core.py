"""The errors under the name of the original's compiled core, where programs look for them."""

from popengine.errors import Error, RecoverableError, UnrecoverableError

__all__ = ["Error", "RecoverableError", "UnrecoverableError", "createPoptorchError"]


def createPoptorchError(msg: str) -> Error:
    """An error as the library raises it."""
    return Error(msg)
