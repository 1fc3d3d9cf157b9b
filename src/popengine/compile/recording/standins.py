"""Stand-ins: the fake tensors that a forward finds in place of its module's parameters and buffers.

They are set as the module's attributes. A weight that the forward reaches in another way, through a list, a
closure or an earlier view, is recognised by identity or memory, and replaced where it is used (`adoption`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError
from .graph_recorder import like, map_leaves, user_line


class _Member(NamedTuple):
    """A parameter or buffer of the module: its canonical name, the user's tensor, and its stand-in."""

    name: str
    real: Tensor
    fake: Tensor


class StandIns:
    """The fake tensors of one capture, by canonical name."""

    def __init__(self, module: nn.Module, training: bool, needs_values: bool = True) -> None:
        _check_members(module, training, needs_values)
        self._module = module
        self.parameters = {
            name: nn.Parameter(like(real), requires_grad=real.requires_grad)
            for name, real in module.named_parameters()
        }
        self.buffers = {name: like(real) for name, real in module.named_buffers()}
        fakes = {**self.parameters, **self.buffers}
        given = (*module.named_parameters(), *module.named_buffers())
        self._members = [_Member(name, real, fakes[name]) for name, real in given]
        self._by_id = {id(member.real): member for member in self._members}
        self._by_memory: dict[int, list[_Member]] = {}
        for member in self._members:
            memory = _memory(member.real)
            if memory is not None:
                self._by_memory.setdefault(memory, []).append(member)
        self._views: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}  # (real, kept alive; its stand-in)
        self.hooks: list[tuple[Any, str]] = []  # hooks of parameters, each with its name for errors
        # Tensors that require a gradient and are no parameters, each with the user's line.
        self.orphans: list[tuple[Tensor, str]] = []
        if training:
            self._take_hooks()

    def members(self) -> list[tuple[str, Tensor]]:
        """Return (canonical name, user's tensor) of all parameters and buffers."""
        return [(member.name, member.real) for member in self._members]

    def _take_hooks(self) -> None:
        """Register the gradient hooks of the user's parameters on their stand-ins.

        Raises:
            CaptureError: a parameter has a post-accumulate hook; a compiled model has no `.grad` for it
        """
        for name, real, fake in self._members:
            if real._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
                raise CaptureError(
                    f"{name} has a hook of register_post_accumulate_grad_hook, which would never be called\n"
                    "  why: a compiled model has its gradients on the devices, and no `.grad`; its optimizer updates\n"
                    "  fix: change gradients with `register_hook`; look at one with options.anchorTensor"
                )
            for hook in (real._backward_hooks or {}).values():
                fake.register_hook(hook)
                self.hooks.append((hook, f"a hook of {name}"))

    def trained(self) -> dict[str, Tensor]:
        """Return the stand-ins of parameters that require a gradient, by canonical name."""
        return {name: value for name, value in self.parameters.items() if value.requires_grad}

    def of(self, value: Any) -> Any:
        """Return the stand-in of a tensor of the module, or of a view of one; any other value unchanged."""
        member = self._by_id.get(id(value))
        if member is not None:
            return member.fake
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        key = id(value), torch.is_grad_enabled()
        if key not in self._views:
            self._views[key] = value, self._view(value)
        return self._views[key][1]

    def of_operand(self, value: Any) -> Any:
        """Return the stand-in of an operand below autograd, as `of` does.

        Also note tensors that require a gradient but are no parameters: autograd has already seen them.
        """
        real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        if real and value.requires_grad and not any(known is value for known, _ in self.orphans):
            self.orphans.append((value, user_line()))
        return self.of(value)

    def has_met(self, value: Tensor) -> bool:
        """Return whether `of` was called with this tensor; False for a parameter or buffer itself."""
        return any((id(value), enabled) in self._views for enabled in (True, False))

    def _view(self, value: Tensor) -> Tensor:
        """Return a stand-in's view for a view of a member; `value` itself if it shares no member's memory.

        Raises: CaptureError, if it shares memory with several members, or is not a view of one.
        """
        sharing = self._by_memory.get(_memory(value) or 0, [])
        touched = [member for member in sharing if _overlap(member.real, value)]
        if not touched:
            return value
        first, last = _extent(value)
        member = touched[0]
        begin, end = _extent(member.real)
        replays = value._base is member.real
        is_inside = begin <= first and last <= end
        if len(touched) > 1 or not is_inside or not (replays or value.dtype == member.real.dtype):
            raise CaptureError(
                f"a tensor of shape {tuple(value.shape)}, used at {user_line()}, shares its memory with"
                f" {', '.join(member.name for member in touched)}\n"
                "  why: while a model is compiled its weights are elsewhere; a tensor made earlier over the same"
                " memory can't follow them, unless it is a view of one of them\n"
                "  fix: make the tensor in forward, from the parameters: `torch.cat([p.flatten() for p in ...])`"
            )
        # A leaf in a member's memory is another parameter, of no module: it is added to the orphans.
        with (
            torch._C.DisableTorchFunction(),
            torch.set_grad_enabled(torch.is_grad_enabled() and value.requires_grad and not value.is_leaf),
        ):
            if replays:
                view = value._view_func_unsafe(member.fake)  # pyright: ignore
            else:
                offset = value.storage_offset() - member.real.storage_offset()
                view = member.fake.as_strided(value.size(), value.stride(), offset)
        if value.requires_grad and value.is_leaf:
            self.orphans.append((view.requires_grad_(), user_line()))
        return view

    # ---- in the module -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the stand-ins into the module while the body runs; then put the user's tensors back.

        Raises: CaptureError, if the body has removed or reassigned a parameter or buffer.
        """
        shelves = [
            (child, attribute, dict(getattr(child, attribute)))
            for child in self._module.modules()
            for attribute in ("_parameters", "_buffers")
        ]
        try:
            for child, attribute, before in shelves:
                shelf = getattr(child, attribute)
                shelf.update(
                    {name: self._by_id[id(real)].fake for name, real in before.items() if real is not None}
                )
            _refresh_flat_weights(self._module)
            yield
            self._check_rebound(shelves)
        finally:
            for child, attribute, before in shelves:
                shelf = getattr(child, attribute)
                shelf.clear()
                shelf.update(before)
            _refresh_flat_weights(self._module)

    def _check_rebound(self, shelves: list[Any]) -> None:
        prefix = {id(child): name + "." if name else "" for name, child in self._module.named_modules()}
        for child, attribute, before in shelves:
            kind = "Buffer" if attribute == "_buffers" else "Parameter"
            shelf = getattr(child, attribute)
            for name, real in before.items():
                full = prefix[id(child)] + name
                if name not in shelf:
                    raise CaptureError(
                        f"{kind} {full} is removed from the model by its forward\n"
                        "  fix: keep it; a compiled model's state has a fixed set of names"
                    )
                if real is None or shelf[name] is self._by_id[id(real)].fake:
                    continue
                if name == "num_batches_tracked" and shelf[name] is not None:
                    self._by_id[id(real)].fake.copy_(shelf[name])  # BatchNorm's counter is exempt
                    continue
                raise CaptureError(
                    f"{kind} {full} is reassigned within the model\n"
                    "  why: a compiled model keeps its state in place; a new tensor under the old name is lost\n"
                    f"  fix: write into it with `self.{name}.copy_(src)`"
                )

    # ---- afterwards --------------------------------------------------------------------------------------

    def check_shared(self, changed: set[str]) -> None:
        """Raise CaptureError if two members overlap in memory, and one of them is in `changed` (names)."""
        for sharing in self._by_memory.values():
            for one, other in combinations(sharing, 2):
                if {one.name, other.name} & changed and _overlap(one.real, other.real):
                    raise CaptureError(
                        f"{one.name} and {other.name} share their memory, but are two tensors; a compiled"
                        " model keeps each of them, and only one would change\n"
                        "  fix: use the same object twice, as in `self.decoder.weight = self.encoder.weight`,"
                        " or make the other one in forward"
                    )


def _check_members(module: nn.Module, training: bool, needs_values: bool) -> None:
    """Raise CaptureError if a parameter or buffer is lazy, sparse, without values, or can't be written."""
    problems = (
        (
            nn.parameter.is_lazy,
            "have no shape yet\n"
            "  why: a lazy layer gets its weights when it first sees data, and a compiled model needs them before\n"
            "  fix: run the model once in plain PyTorch, `model(*micro_batch)`, before it is wrapped",
        ),
        (
            lambda value: value.layout is not torch.strided,
            "are sparse\n"
            "  why: the state of a compiled model is dense tensors\n"
            "  fix: register `value.to_dense()`",
        ),
        (
            lambda value: needs_values and value.is_meta,
            "are on the meta device, and have no values\n"
            "  fix: `model.to_empty(device='cpu')`, then set or load the weights, before the first call",
        ),
        (
            lambda value: training and value.is_inference(),
            "were made inside torch.inference_mode()\n"
            "  why: torch lets nothing be written to such tensors outside of it, so training can't change them\n"
            "  fix: make the model, and move or cast it, outside of torch.inference_mode()",
        ),
    )
    for is_wrong, why_and_fix in problems:
        state = (*module.named_parameters(), *module.named_buffers())
        names = [name for name, value in state if is_wrong(value)]
        if names:
            raise CaptureError(f"{', '.join(names[:5])} of the model {why_and_fix}")


def _refresh_flat_weights(module: nn.Module) -> None:
    """Update the list from which each recurrent layer reads its weights."""
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child._flat_weights = [getattr(child, name, None) for name in child._flat_weights_names]


def _memory(value: Tensor) -> int | None:
    """Return the identity of a tensor's storage, equal for tensors that share it; None if none or unknown."""
    with torch._C.DisableTorchFunction():
        if value.layout is not torch.strided or value.is_meta or not value.numel():
            return None
        try:
            return value.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # a tensor subclass without memory of its own
            return None


def _extent(value: Tensor) -> tuple[int, int]:
    """Return the byte range [begin, end) of its storage that a tensor may touch."""
    with torch._C.DisableTorchFunction():
        last = sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True))
        first, size = value.storage_offset(), value.element_size()
    return int(first * size), int((first + last + 1) * size)


def _overlap(one: Tensor, other: Tensor) -> bool:
    (begin, end), (first, last) = _extent(one), _extent(other)
    return first < end and begin < last


@contextlib.contextmanager
def adoption(stand_ins: StandIns) -> Iterator[None]:
    """Replace the module's tensors by their stand-ins while the body runs.

    They are replaced in the arguments of torch's functions, and of `apply` of autograd Functions.
    """
    own, thread = Function.__dict__["apply"], threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            args = tuple(map(stand_ins.of, args))
        return own.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with _Adoption(stand_ins):
            yield
    finally:
        Function.apply = own


class _Adoption(TorchFunctionMode):
    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_leaves(self._stand_ins.of, (args, kwargs or {}))
        if func == Tensor.data.__set__:  # pyright: ignore[reportAttributeAccessIssue]
            return _write(*args)
        return func(*args, **kwargs)


def _write(target: Tensor, value: Tensor) -> None:
    """Carry out `target.data = value` as a copy. Raises: CaptureError, if shape or dtype differ."""
    if target.shape != value.shape or target.dtype != value.dtype:
        raise CaptureError(
            f"`.data` of a {target.dtype} tensor of shape {tuple(target.shape)} is set to a {value.dtype} tensor of"
            f" shape {tuple(value.shape)}, at {user_line()}\n"
            "  fix: keep shape and type: a compiled model's tensors have fixed ones"
        )
    target.detach().copy_(value)
