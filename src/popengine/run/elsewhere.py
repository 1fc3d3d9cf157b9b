"""Weights of ipus of other processes: tensors without memory ("meta") whose reads raise an error."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import Error
from ..torch_private import DisableTorchFunctionSubclass, made_as, storage_id, tree_leaves, tree_map_only


class _Elsewhere:
    """The first base class of a weight that another process holds: attributes, views and writes work as of any tensor
    of the device "meta", where a write has no effect. A function that would read values raises Error."""

    kind: type[Tensor]  # of the weight in the process that holds it
    key: str  # its canonical name

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        with DisableTorchFunctionSubclass():
            tensors = [x for x in tree_leaves([arguments, named or {}]) if isinstance(x, Tensor)]
            memory = {storage_id(x) for x in tensors if x.is_meta}
            try:
                found = function(*arguments, **(named or {}))
            except Exception:
                is_write = name.endswith("_") and not name.endswith("__") and tensors[0].is_meta
                if is_write or name in ("__get__", "__set__", "__setitem__"):
                    raise
                found = torch.empty(0)
            # Torch has no error for some reads (2.13: `linear`), and returns unwritten memory.
            made = [x for x in tree_leaves(found) if isinstance(x, Tensor) and name != "__get__"]
            if any(not x.is_meta or storage_id(x) not in memory for x in made):
                # They refer to the weight, as an error of torch does, and its memory must be free.
                del found, made
                raise Error(
                    f"{cls.key} has no value in this process: it is a weight of another process's ipus\n"
                    "  why: a replica spans several processes, and each holds the weights of its own ipus only\n"
                    "  fix: read it from model.state_dict(), which gathers all weights; or call copyWeightsToHost()"
                    " before, which fetches them until the next call. Call either in all instances"
                )
            return tree_map_only(Tensor, lambda x: x if isinstance(x, _Elsewhere) else cls._view(x), found)

    @classmethod
    def _view(cls, value: Tensor) -> Tensor:
        kind = _class_elsewhere(Tensor, cls.key)
        return made_as(kind, value, value.requires_grad) if value.is_meta else value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.clone(cast(Tensor, self)).__reduce_ex__(protocol)  # raises Error


def _class_elsewhere(kind: type[Tensor], key: str) -> type[Tensor]:
    return type(kind)(kind.__name__, (_Elsewhere, kind), {"kind": kind, "key": key})


def is_elsewhere(weight: Tensor) -> bool:
    """Return whether only other processes hold a weight, so that reads of it raise Error."""
    return isinstance(weight, _Elsewhere)


def swap_memory(key: str, weight: Tensor, memory: Tensor, elsewhere: bool = False) -> None:
    """Put the user's weight `key` into another memory, on "meta" if it is `elsewhere`: then reads raise Error. The
    object stays the same."""
    kind: Any = type(weight).kind if isinstance(weight, _Elsewhere) else type(weight)
    other = made_as(_class_elsewhere(kind, key) if elsewhere else kind, memory, weight.requires_grad)
    vars(other).update(vars(weight))
    try:
        torch.utils.swap_tensors(weight, other)  # assigning `data` refuses another kind of device
    except RuntimeError as error:
        what = "which is a weight of another process's ipus, can't be freed"
        raise Error(
            f"the memory of {key}, {what if elsewhere else 'which moves to another device, can not be replaced'}:"
            f" {error}\n"
            "  fix: drop what was computed from it by autograd (a loss), and weak references to it, before the call"
        ) from error
