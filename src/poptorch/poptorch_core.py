"""Names of PopTorch's compiled core: its errors, and internal functions, which raise Error when called."""

from typing import Any, NoReturn

from popengine.errors import Error, RecoverableError, UnrecoverableError

__all__ = ["Error", "RecoverableError", "UnrecoverableError", "createPoptorchError"]


def createPoptorchError(msg: str) -> Error:
    """Return, and don't raise, an Error with this message."""
    return Error(msg)


attributes_lists: list[dict[str, Any]] = []  # stays empty: custom operations keep their own attributes


def accessAttributes(attribute_id_str: str) -> NoReturn:
    """Raise Error: `poptorch.registerCustomOp` gives a custom operation its attributes by name."""
    raise _missing("accessAttributes", "poptorch.registerCustomOp gives an operation its attributes by name")


def getIpuTensorId(tensor: Any) -> NoReturn:
    """Raise Error: tensors of a compiled model have no ids. Compare the tensors themselves."""
    raise _missing("getIpuTensorId", "compare the tensors themselves")


def poptorchAtExit() -> NoReturn:
    """Raise Error, with the advice to call `destroy()`, which releases a model's devices."""
    raise _missing("poptorchAtExit", "model.destroy() releases a model's devices at once")


def importPoptorchMetadataFromFile(filename: str) -> NoReturn:
    """Raise Error: `poptorch.load(filename)` reads what `save()` wrote."""
    raise _missing("importPoptorchMetadataFromFile", "poptorch.load(filename) reads what save() wrote")


def _missing(name: str, instead: str) -> Error:
    return Error(
        f"poptorch.{name} is a part of the original's inside, which this implementation does not have\n"
        f"  fix: {instead}"
    )
