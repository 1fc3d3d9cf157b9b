"""Counts the memory that one ipu holds for its micro-batches: which tensors, how many bytes, from when until when.

Tensors that share memory count once; so does what is a view of the weights: never. Of the user's batch each
micro-batch counts its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from popengine.ir import Compute, Free, Keep, Load, Receive, Task
from popengine.profile import Tensor as Row


@dataclass
class _Held:
    row: Row
    names: set[str] = field(default_factory=set)


class Meter:
    """What an ipu of replica 0 holds, as if it had memory of its own; `rows` says it. Indices count its instructions.

    Args:
        step_rows: the `RowFunctions` that are run
    """

    def __init__(self, step_rows: Any, ipu: int) -> None:
        self._rows, self._ipu = step_rows, ipu
        self._done: list[Row] = []
        self._held: dict[Any, _Held] = {}
        self._keys: dict[int, dict[str, Any]] = {}  # micro-batch -> name -> key in `_held`
        self._inputs = {value.untyped_storage()._cdata for value in step_rows.call.inputs}
        self._state = self._state_storages()

    def before(self, task: Task, micro_batch: int, first: int) -> None:
        """Note what a row is going to read of other ipus and of the user's inputs."""
        frame = self._rows.frames[0].get(micro_batch, {})
        for index, instruction in enumerate(task.instructions, first):
            if isinstance(instruction, Receive):
                self._born(instruction.names, frame, micro_batch, index)
            elif isinstance(instruction, Load):
                given = dict(zip(instruction.names, instruction.keys, strict=True))
                values = {name: self._rows.input(int(key), micro_batch, 0) for name, key in given.items()}
                self._born(instruction.names, values, micro_batch, index)

    def after(self, task: Task, micro_batch: int, first: int) -> None:
        """Note what a row has made and freed."""
        frame = self._rows.frames[0].get(micro_batch, {})
        for index, instruction in enumerate(task.instructions, first):
            if isinstance(instruction, Compute):
                self._gone(instruction.last, micro_batch, index)
                made = self._rows.plan.partition.pieces[instruction.piece].writes
                self._born(made, frame, micro_batch, index)
            elif isinstance(instruction, Keep):
                self._state = self._state_storages()
            elif isinstance(instruction, Free):
                self._gone(instruction.names, micro_batch, index)

    def _born(self, names: Iterable[str], values: Mapping[str, Tensor], micro_batch: int, index: int) -> None:
        known = self._keys.setdefault(micro_batch, {})
        for name in names:
            if name in values and name not in known:
                known[name] = self._add(name, micro_batch, values[name], index)

    def _gone(self, names: Iterable[str], micro_batch: int, index: int) -> None:
        known = self._keys.get(micro_batch, {})
        for name in names:
            if name in known:
                self._drop(name, known.pop(name), index)

    @property
    def rows(self) -> list[Row]:
        """What has been held: born after an instruction, and gone after another (-1: still held)."""
        return sorted([*self._done, *(held.row for held in self._held.values())], key=lambda row: row.born)

    def _state_storages(self) -> set[int]:
        state = self._rows.state
        values = (*state.values[0].values(), *state.new_buffers[0].values())
        return {value.untyped_storage()._cdata for value in values}

    def _add(self, name: str, micro_batch: int, value: Tensor, index: int) -> Any:
        storage = value.untyped_storage()
        if storage._cdata in self._state:
            return None
        is_input = storage._cdata in self._inputs
        key = (micro_batch, value.data_ptr()) if is_input else storage._cdata
        held = self._held.get(key)
        if held is None:
            size, kind = (value.nbytes, "input") if is_input else (storage.nbytes(), "activation")
            row = Row(self._ipu, name, kind, micro_batch, size, index, -1)
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
