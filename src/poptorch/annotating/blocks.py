"""Blocks: marks that name the parts of a model, and place them on ipus, in the model's code or from outside.

Blocks have an effect only while a model is captured.
"""

import builtins
import contextlib
import copy
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from popengine.compile.recording.current_capture import current
from popengine.compile.recording.user_code import user_line
from popengine.errors import Error, did_you_mean, without_internal_frames
from popengine.settings import Strategy

from ..checks import checked
from ..enums import AutoStage
from ..logs import logger
from .strategies import AutoBalance, ExecutionStrategy, PipelinedExecution

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
_RANGE = re.compile(r"\b(\d+)-(\d+)\b")
_Mark = tuple[nn.Module, str, int | None]  # a module, the id of the block that begins there, and its ipu
_auto_ids: Iterator[int] = itertools.count()  # restarted by Block.useAutoId


def _checked_ids(user_id: str | None, ipu_id: int | None) -> tuple[str | None, int | None]:
    if user_id is not None:
        fix = 'Block is a context manager: mark a layer by poptorch.BeginBlock(layer, "name", ipu_id=0)'
        fix = fix if isinstance(user_id, nn.Module) else "for an ipu write ipu_id={}"
        checked("the user_id of a block", user_id, str, Error, fix=fix)
    if ipu_id is not None:
        checked("the ipu_id of a block", ipu_id, int, Error, least=0, fix="ipu_id={}")
    return user_id, ipu_id


class _BlockClass(type):
    """The class of `Block`, for the error of a `with` without parentheses."""

    @without_internal_frames
    def __enter__(cls) -> None:
        raise TypeError(
            '`with poptorch.Block:` has no parentheses\n  fix: with poptorch.Block("name", ipu_id=0):'
        )

    def __exit__(cls, *_: object) -> None: ...


class Block(nn.Module, metaclass=_BlockClass):
    """A context manager: the operations inside belong to one block.

        with poptorch.Block("encoder", ipu_id=0):
            x = self.encoder(x)

    Args:
        user_id: the block's name in strategies; by default "0", "1", ... in order of entry
        ipu_id:  the block's ipu, unless the strategy names an ipu for the block
    """

    _unused_at: str | None = None  # the line of forward that made this block, until the block is entered

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        self._user_id, self._ipu_id = _checked_ids(user_id, ipu_id)
        self._unused_at = user_line() if current() is not None else None

    def __del__(self) -> None:
        if self._unused_at is not None:
            words = "%s: a Block without `with` has no effect\n  fix: `with poptorch.Block(...):`; or, in __init__,"
            logger.warning(f"{words} poptorch.BeginBlock(layer, ...)", self._unused_at)

    def __enter__(self) -> None:
        self._unused_at = None
        if current() is None and sys._getframe(1).f_code.co_name == "__init__":
            words = "%s: a Block in __init__ has no effect, because it marks what runs in it\n  fix: open it in forward"
            logger.warning(f"{words}; or mark a layer in __init__: poptorch.BeginBlock(layer)", user_line())
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
        """Open a block, which ends where the next block opens. In plain PyTorch, do nothing."""
        user_id, ipu_id = _checked_ids(user_id, ipu_id)
        if (capture := current()) is not None:
            capture.enter_block(user_id or str(next(_auto_ids)), ipu_id)

    @staticmethod
    def end() -> None:
        """End the open block, as leaving the `with` does. An operation before the next block raises Error."""
        if (capture := current()) is not None:
            capture.leave_block()


class BeginBlockHook:
    """A forward pre-hook that opens a block; `strategy`: the default for a model that was annotated or split."""

    def __init__(self, user_id: str | None, ipu_id: int | None, strategy: Any = None) -> None:
        self.user_id, self.ipu_id = _checked_ids(user_id, ipu_id)
        self.strategy = strategy

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if current() is not None:
            self.user_id = self.user_id or str(next(_auto_ids))
            Block.start(self.user_id, self.ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self.user_id}, ipu_id={self.ipu_id})"


torch.serialization.add_safe_globals([BeginBlockHook])  # for `torch.load` of a model with marks


class LegacyBeginBlockFn:
    """The result of `BeginBlock` of a function: a callable that opens a block and then calls the function."""

    def __init__(
        self, layer_to_call: Callable[..., Any], user_id: str | None = None, ipu_id: int | None = None
    ) -> None:
        self._layer_to_call = layer_to_call
        self._hook = BeginBlockHook(user_id, ipu_id)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._hook(None, args)  # type: ignore[arg-type]
        return self._layer_to_call(*args, **kwargs)


# By type of an argument that `BeginBlock` refuses: the reason, and what to write.
_NO_LAYERS: dict[Any, str] = {
    type: '{0.__name__} is a class\n  fix: poptorch.BeginBlock({0.__name__}(...), "name", ipu_id=0)',
    nn.Module | list | tuple: "a {0.__class__.__name__} begins no block, since it is never called\n"
    "  fix: mark the first layer inside: poptorch.BeginBlock(layers[0])",
    str: "a name is no layer; are the arguments swapped?\n  fix: poptorch.BeginBlock(layer, {0!r})",
    torch.Tensor: 'a tensor is no layer\n  fix: in __init__, self.a = poptorch.BeginBlock(self.a, "a")',
    object: "{0!r} is not an instance of torch.nn.Module or function",
}


def BeginBlock(layer_to_call: T, user_id: str | None = None, ipu_id: int | None = None) -> T:
    """Make a layer begin a block when it is called. The block ends where the next block begins.

    >>> model.layer2 = poptorch.BeginBlock(model.layer2, "second half", ipu_id=1)

    Args:
        layer_to_call: a module, or a function
        user_id, ipu_id: as for `Block`
    Returns: the same module, to which a hook was added; for a function, a wrapper that calls it
    Raises: Error, if the module begins a block already, has no forward, or the layer is neither a module nor a function
    """
    forward = getattr(getattr(layer_to_call, "forward", None), "__func__", None)
    if isinstance(layer_to_call, nn.Module) and forward is not nn.Module.forward:
        check_begins_no_block(layer_to_call)
        layer_to_call.register_forward_pre_hook(BeginBlockHook(user_id, ipu_id))
        return layer_to_call
    if callable(layer_to_call) and not isinstance(layer_to_call, type | nn.Module):
        return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)  # type: ignore[return-value]
    hint = next(hint for kind, hint in _NO_LAYERS.items() if isinstance(layer_to_call, kind))
    raise Error(f"poptorch.BeginBlock: {hint.format(layer_to_call)}")


def find_begin_hook(module: nn.Module) -> BeginBlockHook | None:
    hooks = module._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, BeginBlockHook)), None)


def marked_layers(model: nn.Module) -> dict[str, str | None]:
    """Return the name of the block that each marked layer begins, by the layer's name; None: it has never begun."""
    hooks = ((path or "the model", find_begin_hook(module)) for path, module in model.named_modules())
    return {path: hook.user_id for path, hook in hooks if hook is not None}


def check_begins_no_block(module: nn.Module) -> None:
    if (hook := find_begin_hook(module)) is not None:
        raise Error(
            f"this {type(module).__name__} has already been assigned to a block: {hook!r}\n"
            "  fix: call poptorch.removeBlocks(layer) first, or annotate another layer"
        )


@contextlib.contextmanager
def BlockFunction(user_id: str | None = None, ipu_id: int | None = None) -> Iterator[None]:
    """Return a decorator (and context manager) that puts all operations of a function into one block.

    >>> @poptorch.BlockFunction("decoder", ipu_id=1)
    ... def decode(self, x): ...

    Args: user_id, ipu_id: as for `Block`
    """
    with Block(user_id, ipu_id):
        yield


def removeBlocks(module: nn.Module) -> None:
    """Remove all blocks that `BeginBlock`, `annotate` and `split` have made in a model.

    Use it to place a model anew. Blocks that `forward` opens by `with poptorch.Block(...)` stay.

    >>> poptorch.removeBlocks(model)
    >>> poptorch.annotate(model, layers_per_ipu=[6, 6])

    Args: module: a model; its submodules are included. An executor that is compiled already does not change
    Raises: AssertionError, if the argument is not a module
    """
    for child in checked("removeBlocks", module, nn.Module).modules():
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


# ---- modules placed by their names --------------------------------------------------------------------------


def annotate(
    model: M, marks: Mapping[str | type, int] | None = None, *, layers_per_ipu: Sequence[int] | None = None
) -> M:
    """*Pando*: place modules of a model on ipus, and return the same model.

    >>> poptorch.annotate(model, {"bert.encoder.layer.0-5": 0, "bert.encoder.layer.*": 1, "cls": 0})
    >>> poptorch.annotate(model, layers_per_ipu=[3, 7, 7, 7])

    Each key is a block, which begins at each module that the key names and ends where another block begins.
    The default strategy makes each block a stage; several stages may be on one ipu. In other strategies the
    keys are the ids of the blocks.

    Args:
        marks: the ipu of each module. A key is a name as in `named_modules`, in which `0-5` is each of the
            numbers and `*` any text without a dot; or a key is a class. A key with `*` and a class get the
            modules that are left by the keys before.
        layers_per_ipu: instead of marks: the number of repeated layers on ipu 0, on ipu 1, ...
    Raises:
        Error: neither or both arguments are given; a key, or a number of its range, places no module; a
            name or range names a module of an earlier key; a module begins a block already; the counts fit no stack
    """
    checked("annotate", model, nn.Module, Error)
    checked("annotate: marks", {} if marks is None else marks, dict, Error)
    if bool(marks) == bool(layers_per_ipu):
        raise Error("poptorch.annotate takes either marks or layers_per_ipu")
    module_marks = _marks_by_key(model, marks) if marks else _marks_by_count(model, layers_per_ipu or [])
    _register_hooks(module_marks, PipelinedExecution(AutoStage.AutoIncrement))
    return model


def split(model: M, ipus: int) -> M:
    """*Pando*: make each repeated layer of a model a block, and return the same model.

    The default strategy becomes `PipelinedExecution(AutoBalance(ipus)).orSharded()`. It measures the layers at the
    first call, and places them so that the slowest ipu is as fast as possible.

    >>> trainer = poptorch.trainingModel(poptorch.split(model, ipus=4), options, optimizer)

    Args:
        model: a module with repeated layers, such as a `ModuleList` of encoder layers
        ipus:  the number of ipus
    Raises: Error, if the model has fewer repeated layers than ipus, or a layer begins a block already
    """
    layers = _repeated_layers(checked("split", model, nn.Module, Error))
    if len(layers) < checked("split", ipus, int, Error, least=1, fix="poptorch.split(model, {})"):
        raise Error(
            f"poptorch.split can't place the model on {ipus} ipus: its repeated layers are {_describe_stacks(model)}\n"
            '  fix: place its parts by name: poptorch.annotate(model, {"name": 0, "other": 1})'
        )
    _register_hooks(layers, PipelinedExecution(AutoBalance(ipus)).orSharded())
    return model


def strategy_of_marks(model: nn.Module, strategy: ExecutionStrategy) -> ExecutionStrategy:
    """Return the strategy of `annotate` or `split`, with the schedule of `strategy`, if that is the default."""
    if not isinstance(strategy, PipelinedExecution) or strategy._auto != AutoStage.SameAsIpu:
        return strategy
    hooks = filter(None, map(find_begin_hook, model.modules()))
    chosen = next((hook.strategy for hook in hooks if hook.strategy is not None), strategy)
    chosen = copy.copy(chosen)
    chosen._schedule, chosen._or_sharded = strategy._schedule, chosen._or_sharded or strategy._or_sharded
    return chosen


@contextlib.contextmanager
def layers_as_blocks(model: nn.Module, strategy: Strategy) -> Iterator[None]:
    """Make each repeated layer a block, inside the `with`, if the strategy is `AutoBalance` and no layer has
    a `BeginBlockHook`. A layer that is called inside a `Block` of the model's code begins no block."""
    wanted = strategy.auto == "balance" and not any(map(find_begin_hook, model.modules()))
    layers = _repeated_layers(model) if wanted else []
    names = {None, *(name for _, name, _ in layers)}

    def begin_block(name: str, module: nn.Module, inputs: Any) -> None:
        capture = current()
        if capture is not None and capture.block >= 0 and capture.visits[capture.block].name in names:
            capture.enter_block(name, None)

    with contextlib.ExitStack() as hooks:
        for module, name, _ in layers:
            hooks.enter_context(module.register_forward_pre_hook(partial(begin_block, name)))
        yield


def _layer_stacks(model: nn.Module) -> dict[str, list[_Mark]]:
    """Return, by name, the layers (with parameters) of each outermost ModuleList, and of each outermost
    Sequential whose layers are of one class."""
    stacks: dict[str, list[_Mark]] = {}
    for name, module in model.named_modules():
        is_nested = any(not outer or name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not is_nested:
            layers: list[_Mark] = [
                (child, f"{name}.{n}".lstrip("."), None)
                for n, child in module.named_children()
                if next(child.parameters(), None) is not None
            ]
            classes = 1 if isinstance(module, nn.ModuleList) else len({type(child) for child, *_ in layers})
            if classes < len(layers):
                stacks[name] = layers
    return stacks


def _repeated_layers(model: nn.Module) -> list[_Mark]:
    return list(itertools.chain.from_iterable(_layer_stacks(model).values()))


def _describe_stacks(model: nn.Module) -> str:
    stacks = _layer_stacks(model).items()
    return ", ".join(f"{n or 'the model itself'} ({len(layers)} layers)" for n, layers in stacks) or "none"


def _register_hooks(marks: list[_Mark], strategy: PipelinedExecution) -> None:
    """Register a `BeginBlockHook` on each module; none if a module begins a block already, an Error."""
    for module, *_ in marks:
        check_begins_no_block(module)
    hooks = [(module, BeginBlockHook(block, ipu, strategy)) for module, block, ipu in marks]
    for module, hook in hooks:
        module.register_forward_pre_hook(hook)


def _marks_by_count(model: nn.Module, counts: Sequence[int]) -> list[_Mark]:
    """Return marks that place counts[i] consecutive layers of the only stack that fits, else of all stacks, on
    ipu i, as one block."""
    fitting = [layers for layers in _layer_stacks(model).values() if len(layers) == sum(counts)]
    layers = fitting[0] if len(fitting) == 1 else _repeated_layers(model)
    if len(layers) != sum(counts):
        raise Error(
            f"layers_per_ipu={list(counts)} places {sum(counts)} layers; the model's repeated layers are"
            f" {_describe_stacks(model)}\n"
            "  fix: numbers whose sum is the layers of one of these, or of all; or place modules by name:"
            ' poptorch.annotate(model, {"name.0-5": 0, "name.*": 1})'
        )
    marks: list[_Mark] = []
    for ipu, count in enumerate(counts):
        layers_of_ipu = layers[len(marks) : len(marks) + count]
        block = " to ".join(dict.fromkeys(name for _, name, _ in (*layers_of_ipu[:1], *layers_of_ipu[-1:])))
        marks += [(module, block, ipu) for module, *_ in layers_of_ipu]
    return marks


def _marks_by_key(model: nn.Module, marks: Mapping[str | type, int]) -> list[_Mark]:
    """Return a mark for each module that keys name, from the first such key. Raises Error as `annotate`."""
    marked: dict[nn.Module, _Mark] = {}
    for key, ipu in marks.items():
        modules = _modules_of_key(key, model)
        left = [module for module in modules if module not in marked]
        takes_rest = not isinstance(key, str) or "*" in key
        if not left or (len(left) < len(modules) and not takes_rest):
            first = next(marked[module][1] for module in modules if module in marked)
            raise Error(
                f"poptorch.annotate: {first!r}, and after it {key!r}, place the same module\n"
                "  fix: keys that do not overlap; put keys with '*' and classes last, since they get what is left"
            )
        block = key if isinstance(key, str) else key.__name__
        marked.update({module: (module, block, ipu) for module in left})
    return list(marked.values())


def _modules_of_key(key: str | type, model: nn.Module) -> list[nn.Module]:
    """Return the modules that a key names. Raises Error if the key, or a number of its range, names none."""
    if not isinstance(key, str):
        modules = [module for module in model.modules() if isinstance(module, key)]
        if not modules:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise Error(f"poptorch.annotate: no module is a {key.__name__}; there are {', '.join(classes)}")
        return modules
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    span = _RANGE.search(key)
    numbers = range(int(span[1]), int(span[2]) + 1) if span else ()
    patterns = [f"{key[: span.start()]}{n}{key[span.end() :]}" for n in numbers] if span else [key]
    chosen: list[str] = []
    for pattern in patterns:
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]*"))
        matching = [name for name in names if expression.fullmatch(name)]
        if not matching:
            near = did_you_mean(pattern, [*names, *(re.sub(r"\d+", "*", name) for name in names)])
            raise Error(
                f"poptorch.annotate: no module is named {pattern!r}{f', of {key!r}' if span else ''}{near}\n"
                f"  the model's modules: {', '.join(names[:9])}{', ...' if names[9:] else ''}\n"
                "  fix: use one of model.named_modules(); in it, 0-5 stands for each number and * for any text without"
                " a dot"
            )
        chosen += matching
    return list(dict.fromkeys(map(model.get_submodule, chosen)))
