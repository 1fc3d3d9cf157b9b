"""Names of the original's insides. They can be imported; what they did has no meaning here, so a call is refused."""

from typing import Any, NoReturn

from popengine.errors import Error

attributes_lists: list[dict[str, Any]] = []  # custom operations keep their attributes themselves


def accessAttributes(attribute_id_str: str) -> NoReturn:
    """Refused: attributes reach a custom operation by name."""
    raise _refusal("accessAttributes", "poptorch.registerCustomOp gives an operation its attributes by name")


def getIpuTensorId(tensor: Any) -> NoReturn:
    """Refused: there are no tensors of another framework behind torch's."""
    raise _refusal("getIpuTensorId", "compare the tensors themselves")


def poptorchAtExit() -> NoReturn:
    """Refused: executors release their devices by themselves."""
    raise _refusal("poptorchAtExit", "model.destroy() releases a model's devices at once")


def importPoptorchMetadataFromFile(filename: str) -> NoReturn:
    """Refused: executables of the original can't run here."""
    raise _refusal("importPoptorchMetadataFromFile", "poptorch.load(filename) reads what save() wrote")


def _refusal(name: str, instead: str) -> Error:
    return Error(
        f"poptorch.{name} is a part of the original's inside, which this implementation does not have\n"
        f"  fix: {instead}"
    )
