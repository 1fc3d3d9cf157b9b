"""Weights of a replica in several processes: the process that holds each weight, and in the other processes tensors
without memory (device "meta"). Reading such a tensor raises an error."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import Error
from ..torch_private import (
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    leaves_of,
    made_as,
    storage_id,
    swap_tensors,
    tree_map_only,
)

_DATA: Any = Tensor.data


class _WeightElsewhere:
    """The first base class of a weight that another process holds: attributes, views and writes work as of any tensor
    of the device "meta", where a write has no effect. A function that would read values raises Error."""

    holder_class: type[Tensor]  # of the weight in the process that holds it
    key: str  # its canonical name

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "share_memory_":
            return arguments[0]
        if function == _DATA.__set__:
            arguments = arguments[0], arguments[1].to("meta")
        with DisableTorchFunctionSubclass(), nullcontext() if name == "__get__" else _WholeDraws():
            tensors = leaves_of(Tensor, (arguments, named or {}))
            memory = {storage_id(x) for x in tensors if x.is_meta}
            try:
                result = function(*arguments, **(named or {}))
            except Exception:
                is_write = name.endswith("_") and not name.endswith("__") and tensors[0].is_meta
                if is_write or name in ("__get__", "__set__", "__setitem__"):
                    raise
                result = torch.empty(0)
            # Torch has no error for some reads (2.13: `linear`), and returns unwritten memory.
            made = [] if name == "__get__" else leaves_of(Tensor, result)
            if any(not x.is_meta or storage_id(x) not in memory for x in made):
                # They refer to the weight, as an error of torch does, and its memory must be free.
                del result, made
                raise Error(
                    f"{cls.key} has no value in this process: it is a weight of another process's ipus\n"
                    "  why: a replica spans several processes, and each holds the weights of its own ipus only\n"
                    "  fix: read it from model.state_dict(), which gathers all weights; or call copyWeightsToHost()"
                    " before, which fetches them until the next call. Call either in all instances"
                )
            return tree_map_only(Tensor, lambda x: x if is_elsewhere(x) else cls._view_elsewhere(x), result)

    @classmethod
    def _view_elsewhere(cls, value: Tensor) -> Tensor:
        view_class = _class_elsewhere(Tensor, cls.key)
        return made_as(view_class, value, value.requires_grad) if value.is_meta else value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.clone(cast(Tensor, self)).__reduce_ex__(protocol)  # raises Error


class _WholeDraws(TorchDispatchMode):
    """A dispatch mode that draws random numbers for a weight without memory as for one with memory, so that later
    random numbers are the same in all processes."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            inputs = args, kwargs or {}
            args, kwargs = tree_map_only(
                Tensor, lambda x: torch.empty_like(x, device="cpu") if x.is_meta else x, inputs
            )
            function(*args, **kwargs)
        return result


def _class_elsewhere(cls: type[Tensor], key: str) -> type[Tensor]:
    return type(cls)(cls.__name__, (_WeightElsewhere, cls), {"holder_class": cls, "key": key})


_MARK_ATTRIBUTE = "_pando_mark"  # an attribute of weights


class Mark:
    """What all processes of a replica know of a weight: the process that holds it, for all executors (None: each does),
    and its storage and version counter after the latest call, from which writes are counted."""

    def __init__(self, process: int | None, weight: Tensor) -> None:
        self.process, self.is_compared = process, False  # whether all processes have had the same value
        self.loaded = ""  # a hash of what was loaded into the weight since the latest call
        self.set_writes(weight, 0)

    def confirm(self, weight: Tensor) -> None:
        """Note that the weight is equal in all processes."""
        self.loaded, self.is_compared = "", True
        self.set_writes(weight, 0)

    def set_writes(self, weight: Tensor, count: int) -> None:
        """Set the number of writes since the latest call."""
        self._storage, self._offset = weight.untyped_storage(), weight.storage_offset()
        self._version = version_of(weight) - count

    def writes(self, weight: Tensor) -> int | None:
        """Return the number of writes to a weight since the latest call; None if its memory has been replaced."""
        memory = weight.untyped_storage()._cdata, weight.storage_offset()
        is_same = memory == (self._storage._cdata, self._offset)
        return version_of(weight) - self._version if is_same else None

    def __reduce__(self) -> Any:
        return type(None), ()  # copies and pickles of the weight have no mark


def mark_of(weight: Tensor) -> Mark | None:
    return getattr(weight, _MARK_ATTRIBUTE, None)


def set_mark(weight: Tensor, mark: Mark) -> None:
    setattr(weight, _MARK_ATTRIBUTE, mark)


def version_of(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def is_elsewhere(weight: Tensor) -> bool:
    """Return whether only other processes hold a weight, so that reads of it raise Error."""
    return isinstance(weight, _WeightElsewhere)


def swap_memory(key: str, weight: Tensor, memory: Tensor, elsewhere: bool = False) -> None:
    """Put the user's weight `key` into another memory; the tensor stays the same object. If it is `elsewhere`, the
    memory is on "meta", and reads raise Error."""
    mark = mark_of(weight)
    writes = mark and mark.writes(weight)
    cls: Any = type(weight).holder_class if isinstance(weight, _WeightElsewhere) else type(weight)
    moved = made_as(_class_elsewhere(cls, key) if elsewhere else cls, memory, weight.requires_grad)
    vars(moved).update(vars(weight))
    try:
        swap_tensors(weight, moved)  # assigning `data` refuses another kind of device
    except RuntimeError as error:
        what = "which is a weight of another process's ipus, can't be freed"
        raise Error(
            f"the memory of {key}, {what if elsewhere else 'which moves to another device, can not be replaced'}:"
            f" {error}\n"
            "  fix: drop what was computed from it by autograd (a loss) before the call"
        ) from error
    if mark is not None and writes is not None:
        mark.set_writes(weight, writes)
