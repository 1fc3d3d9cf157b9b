"""Blocks: marks that name the parts of a model. They have an effect only while a model is captured."""

import builtins
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from popengine.compile.recording.current_capture import current
from popengine.errors import Error

T = TypeVar("T")
_auto_ids: Iterator[int] = itertools.count()  # restarted by Block.useAutoId


def _checked_ipu(ipu_id: int | None) -> int | None:
    """Return `ipu_id`. Raises Error unless `ipu_id` is None or a number from 0."""
    if ipu_id is not None and (not isinstance(ipu_id, int) or ipu_id < 0):
        raise Error(
            f"a block's ipu_id is a number from 0; found ipu_id={ipu_id!r}\n  fix: ipu_id=0, or leave it out"
        )
    return ipu_id


class Block(nn.Module):
    """A context manager: the operations inside belong to one block.

        with poptorch.Block("encoder", ipu_id=0):
            x = self.encoder(x)

    Args:
        user_id: the block's name in strategies; by default "0", "1", ... in order of entry
        ipu_id:  the block's ipu, unless the strategy names an ipu for the block
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        self._user_id, self._ipu_id = user_id, _checked_ipu(ipu_id)

    def __enter__(self) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __exit__(self, *_: object) -> None:
        Block.end()

    @staticmethod
    def useAutoId() -> None:
        """Restart the automatic ids of blocks at 0."""
        global _auto_ids
        _auto_ids = itertools.count()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Open a block, which ends where the next block opens. Outside of a capture, do nothing."""
        ipu_id, capture = _checked_ipu(ipu_id), current()
        if capture is not None:
            capture.enter_block(user_id or str(next(_auto_ids)), ipu_id)

    @staticmethod
    def end() -> None:
        """End the open block, as leaving the `with` does. An operation before the next block raises Error."""
        capture = current()
        if capture is not None:
            capture.leave_block()


class BeginBlockHook:
    """A forward pre-hook that opens a block. A hook without an id gets an automatic id at its first capture.
    `strategy`: the default strategy for a model with hooks of `annotate` or `split`; None for other hooks."""

    def __init__(self, user_id: str | None, ipu_id: int | None, strategy: Any = None) -> None:
        self.user_id, self.ipu_id, self.strategy = user_id, _checked_ipu(ipu_id), strategy

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if current() is not None:
            self.user_id = self.user_id or str(next(_auto_ids))
            Block.start(self.user_id, self.ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self.user_id}, ipu_id={self.ipu_id})"


class LegacyBeginBlockFn:
    """A callable that opens a block and then calls the wrapped function."""

    def __init__(
        self, layer_to_call: Callable[..., Any], user_id: str | None = None, ipu_id: int | None = None
    ) -> None:
        self._layer_to_call = layer_to_call
        self._hook = BeginBlockHook(user_id, ipu_id)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._hook(None, args)  # type: ignore[arg-type]
        return self._layer_to_call(*args, **kwargs)


def BeginBlock(layer_to_call: T, user_id: str | None = None, ipu_id: int | None = None) -> T:
    """Make a layer open a block when it is called. The block ends where the next block opens.

    Returns: the same module, to which a hook was added; for a function, a wrapper that calls it
    Raises: Error if the module begins a block already, or the layer is neither a module nor a function
    """
    if isinstance(layer_to_call, nn.Module):
        check_unmarked(layer_to_call)
        layer_to_call.register_forward_pre_hook(BeginBlockHook(user_id, ipu_id))
        return layer_to_call
    if callable(layer_to_call):
        return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)  # type: ignore[return-value]
    raise Error(
        f"poptorch.BeginBlock: {layer_to_call!r} is not an instance of torch.nn.Module or function\n"
        "  fix: pass a layer of the model: poptorch.BeginBlock(self.layer)"
    )


def find_begin_hook(module: nn.Module) -> BeginBlockHook | None:
    """Return the module's `BeginBlockHook`; None if the module has no such hook."""
    hooks = module._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, BeginBlockHook)), None)


def check_unmarked(module: nn.Module) -> None:
    """Raise Error if the module has a hook that begins a block."""
    hook = find_begin_hook(module)
    if hook is not None:
        raise Error(
            f"this {type(module).__name__} has already been assigned to a block: {hook!r}\n"
            "  fix: call poptorch.removeBlocks(layer) first, or annotate another layer"
        )


@contextlib.contextmanager
def BlockFunction(user_id: str | None = None, ipu_id: int | None = None) -> Iterator[None]:
    """Return a decorator (and context manager) that puts all operations of a function into one block."""
    with Block(user_id, ipu_id):
        yield


def removeBlocks(module: nn.Module) -> None:
    """Remove the hooks of BeginBlock, annotate and split from a module and all its submodules."""
    assert isinstance(module, nn.Module), f"removeBlocks takes a torch.nn.Module; found {module!r}"
    for child in module.modules():
        hooks = child._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, BeginBlockHook)]:
            del hooks[key]


def module_repr(module: nn.Module) -> str:
    """Return `repr(module)`, with the prefix "BeginBlock(...): " at each module that begins a block."""
    hook = find_begin_hook(module)
    name = module._get_name() if hook is None else f"{hook!r}: {module._get_name()}"
    lines = [line for line in module.extra_repr().split("\n") if line]
    children = [f"({n}): {module_repr(child)}" for n, child in module.named_children()]
    if not children:
        return f"{name}({', '.join(lines)})"
    body = "\n".join(lines + children).replace("\n", "\n  ")
    return f"{name}(\n  {body}\n)"


def print(module: nn.Module) -> None:
    """Print a module; its submodules that begin a block have the prefix "BeginBlock(...): "."""
    builtins.print(module_repr(module))
