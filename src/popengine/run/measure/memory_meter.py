"""Counts the memory that one ipu holds for its micro-batches: which tensors, how many bytes, from when until when.

Tensors that share memory count once; so does what is a view of the weights: never. Of the user's batch each
micro-batch counts its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from popengine.ir import Keep
from popengine.profile import Memory
from popengine.profile import Tensor as Row


@dataclass
class _Held:
    row: Row
    names: set[str] = field(default_factory=set)


class Meter:
    """Told after each instruction of a step; `rows` says what was held. Indices count the instructions."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._done: list[Row] = []
        self._held: dict[Any, _Held] = {}
        self._keys: dict[int, dict[str, Any]] = {}  # micro-batch -> name -> key in `_held`
        self._inputs = {value.untyped_storage()._cdata for value in worker.run.inputs}
        self._state = self._state_storages()

    def after(self, index: int, instruction: Any) -> None:
        """Note what the instruction has made and freed."""
        micro_batch = getattr(instruction, "micro_batch", None)
        if micro_batch is None:
            return
        if isinstance(instruction, Keep):
            self._state = self._state_storages()
        frame: Mapping[str, Tensor] = self._worker.frames.get(micro_batch, {})
        known = self._keys.setdefault(micro_batch, {})
        # First what has gone: its memory may have been given to what is new.
        for name in known.keys() - frame.keys():
            self._drop(name, known.pop(name), index)
        for name in frame.keys() - known.keys():
            known[name] = self._add(name, micro_batch, frame[name], index)

    @property
    def rows(self) -> list[Row]:
        """What has been held: born after an instruction, and gone after another (-1: still held)."""
        return sorted([*self._done, *(held.row for held in self._held.values())], key=lambda row: row.born)

    def _state_storages(self) -> set[int]:
        return {value.untyped_storage()._cdata for value in self._worker.store.state.values()}

    def _add(self, name: str, micro_batch: int, value: Tensor, index: int) -> Any:
        storage = value.untyped_storage()
        if storage._cdata in self._state:
            return None
        is_input = storage._cdata in self._inputs
        key = (micro_batch, value.data_ptr()) if is_input else storage._cdata
        held = self._held.get(key)
        if held is None:
            size, kind = (value.nbytes, "input") if is_input else (storage.nbytes(), "activation")
            row = Row(self._worker.ipu, name, kind, micro_batch, size, index, -1)
            held = self._held[key] = _Held(row)
        held.names.add(name)
        return key

    def _drop(self, name: str, key: Any, index: int) -> None:
        if key is None:
            return
        held = self._held[key]
        held.names.discard(name)
        if not held.names:
            self._done.append(held.row._replace(died=index))
            del self._held[key]


def memory(store: Any, replica: int, ipu: int, roles: Mapping[str, str]) -> Memory:
    """Bytes of what a store keeps from step to step; `roles` gives each slot's role."""

    def total(values: Any) -> int:
        return sum({v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values}.values())

    state = store.state.items()
    return Memory(
        replica,
        ipu,
        total(value for name, value in state if roles.get(name) == "parameter"),
        total(value for name, value in state if roles.get(name) != "parameter"),
        total(store.sums.values()),
        total(value for entries in store.states.values() for value in entries.values()),
        total(store.spare()),
    )
