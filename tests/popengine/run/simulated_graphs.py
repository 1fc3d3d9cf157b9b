"""A stand-in for CUDA graphs: operations are noted down with the tensors they work on, and run again on the same.

As on a GPU, a capture computes nothing (here: what it has written to is put back), nothing may be read by the
host meanwhile, and generators must be known beforehand and may not be seeded.
"""

import contextlib

import torch
from stand_ins import Remote
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


def memory_of(values):
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


class Recording(TorchDispatchMode):
    def __init__(self, generators):
        super().__init__()
        self.steps, self.before, self.made = [], [], set()
        self.generators = {generator._cdata for generator in generators}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator):
                assert leaf._cdata in self.generators, "a generator nobody registered"
        self._save(func, args, kwargs)
        out = func(*args, **kwargs)
        self.steps.append(
            (func, tree_map(lambda leaf: leaf, (args, kwargs)), out)
        )  # lists may be changed later
        self.made |= memory_of(out) - memory_of((args, kwargs))
        return out

    def _save(self, func, args, kwargs):
        """Copies of what an operation is about to write to, unless the capture made it."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(value):
                    if leaf.untyped_storage()._cdata not in self.made:
                        self.before.append((leaf, leaf.clone()))


class SimulatedGraph:
    captures = 0

    def __init__(self, generators):
        self._generators, self._steps = list(generators), []

    @contextlib.contextmanager
    def capturing(self):
        recording = Recording(self._generators)
        states = [generator.get_state() for generator in self._generators]
        try:
            with recording:
                yield
        finally:
            for value, copy in reversed(recording.before):
                value.copy_(copy)
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
        self._steps = recording.steps
        SimulatedGraph.captures += 1  # those that went well

    def replay(self):
        for func, (args, kwargs), out in self._steps:
            again = func(*args, **kwargs)
            pairs = zip(tree_leaves(out), tree_leaves(again), strict=True)
            for kept, value in pairs:
                if isinstance(kept, torch.Tensor) and kept is not value:
                    kept.copy_(value)


class Graphed(Remote):
    """A far device with graphs."""

    is_serial = has_graphs = True

    def graph(self, generators):
        return SimulatedGraph(generators)
