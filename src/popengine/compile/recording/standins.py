"""Stand-ins: the fake tensors that a forward finds in place of its module's parameters and buffers.

They are set as the module's attributes. A weight that the forward reaches in another way, through a list, a
closure or an earlier view, is recognised by identity or memory, and replaced where it is used (`StandIns.stand_in_of`).
"""

import contextlib
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import CaptureError
from ...ir import Graph
from ...torch_private import DisableTorchFunction, FakeTensor, spanned_elements, storage_id
from .graph_recorder import empty_like
from .user_code import user_line


class _Member(NamedTuple):
    """A parameter or buffer of the module: its canonical name, the user's tensor, and its stand-in."""

    name: str
    real: Tensor
    fake: Tensor


class MadeBuffer(NamedTuple):
    """A buffer that forward has registered, or set in place of None: its name in the model, the module's dictionary of
    buffers, its key there, and its value at the end."""

    name: str
    shelf: dict[str, Any]
    key: str
    value: Tensor


class StandIns:
    """The fake tensors that replace a module's parameters and buffers during one capture."""

    def __init__(
        self,
        module: nn.Module,
        training: bool,
        reshaped: Mapping[str, Tensor] = MappingProxyType({}),
        constant: Container[str] = (),
    ) -> None:
        """`reshaped`: by name, fake tensors with the shapes and dtypes of some buffers' stand-ins; `constant`: names of
        buffers without a stand-in."""
        buffers = {name: real for name, real in module.named_buffers() if name not in constant}
        named = [*module.named_parameters(), *buffers.items()]
        _check_members(named, training)
        self._module = module
        self.parameters = {
            name: nn.Parameter(empty_like(real), requires_grad=real.requires_grad)
            for name, real in module.named_parameters()
        }
        self.buffers = {name: empty_like(reshaped.get(name, real)) for name, real in buffers.items()}
        fakes = {**self.parameters, **self.buffers}
        self.members = [_Member(name, real, fakes[name]) for name, real in named]
        for _, real, fake in self.members:
            vars(fake).update(vars(real))
        self._by_id = {id(member.real): member for member in self.members}
        self._by_memory: defaultdict[int, list[_Member]] = defaultdict(list)
        for member in self.members:
            self._by_memory[_storage_id(member.real)].append(member)
        self._views: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}  # (real, kept alive; its stand-in)
        # Each dictionary of parameters or buffers that has the stand-ins: its name, the dictionary, its content before.
        self._shelves: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self.made: list[MadeBuffer] = []
        self.hooks: list[tuple[Any, str]] = []  # hooks of parameters, each with its name for errors
        # Tensors that require a gradient and are no parameters, each with the user's line.
        self.orphans: list[tuple[Tensor, str]] = []
        if training:
            self._register_hooks()

    def _register_hooks(self) -> None:
        """Register the gradient hooks of the user's parameters on their stand-ins; refuse post-accumulate hooks."""
        for name, real, fake in self.members:
            if real._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
                raise CaptureError(
                    f"{name} has a hook of register_post_accumulate_grad_hook, which would never be called\n"
                    "  why: a compiled model has its gradients on the devices, and no `.grad`; its optimizer updates\n"
                    "  fix: change gradients with `register_hook`; look at one with options.anchorTensor"
                )
            for hook in (real._backward_hooks or {}).values():
                fake.register_hook(hook)
                self.hooks.append((hook, f"a hook of {name}"))

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return the stand-ins of parameters that require a gradient, by canonical name."""
        return {name: value for name, value in self.parameters.items() if value.requires_grad}

    def stand_in_of(self, value: Any) -> Any:
        """Return the stand-in of a parameter, a buffer, or a view of these; any other value unchanged."""
        if id(value) in self._by_id:
            return self._by_id[id(value)].fake
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        key = id(value), torch.is_grad_enabled()
        if key not in self._views:
            self._views[key] = value, self._view_of_member(value)
        return self._views[key][1]

    def stand_in_of_operand(self, value: Any) -> Any:
        """Return `stand_in_of(value)`. Add a real tensor of which autograd has recorded the use to `orphans`."""
        is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        if is_real and value.requires_grad and not any(orphan is value for orphan, _ in self.orphans):
            self.orphans.append((value, user_line()))
        return self.stand_in_of(value)

    def _view_of_member(self, value: Tensor) -> Tensor:
        """Return the view of a stand-in that is like this view of a parameter or buffer; any other tensor unchanged.
        Raise CaptureError if the tensor overlaps several members in memory, or one of which it is no view."""
        sharing = self._by_memory.get(_storage_id(value), [])
        touched = [member for member in sharing if _has_overlap(member.real, value)]
        if not touched:
            return value
        _, real, fake = touched[0]
        (begin, end), (first, last) = _byte_range(real), _byte_range(value)
        replays = value._base is real
        is_inside = begin <= first and last <= end
        if len(touched) > 1 or not is_inside or not (replays or value.dtype == real.dtype):
            raise CaptureError(
                f"a tensor of shape {tuple(value.shape)}, used at {user_line()}, shares its memory with"
                f" {', '.join(member.name for member in touched)}\n"
                "  why: while a model is compiled its weights are elsewhere; a tensor made earlier over the same"
                " memory can't follow them, unless it is a view of one of them\n"
                "  fix: make the tensor in forward, from the parameters: `torch.cat([p.flatten() for p in ...])`"
            )
        # A leaf in a member's memory is another parameter, of no module: it is added to the orphans.
        is_orphan = value.requires_grad and value.is_leaf
        with (
            DisableTorchFunction(),
            torch.set_grad_enabled(torch.is_grad_enabled() and value.requires_grad and not is_orphan),
        ):
            if replays:
                view = value._view_func_unsafe(fake)  # pyright: ignore
            else:
                offset = value.storage_offset() - real.storage_offset()
                view = fake.as_strided(value.size(), value.stride(), offset)
        if is_orphan:
            self.orphans.append((view.requires_grad_(), user_line()))
        return view

    # ---- in the module -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def put_in_module(self) -> Iterator[None]:
        """Put the stand-ins into the module while the body runs; then put the user's tensors back.

        Raises: CaptureError, if the body has removed, reassigned or made a parameter, buffer or layer with weights
        """
        shelves, layers = self._shelves, list[tuple[str, dict[str, Any], dict[str, Any]]]()
        for name, child in self._module.named_modules():
            prefix = f"{name}." if name else ""
            shelves.append((f"Parameter {prefix}", child._parameters, dict(child._parameters)))
            shelves.append((f"Buffer {prefix}", child._buffers, dict(child._buffers)))
            layers.append((f"Layer {prefix}", child._modules, dict(child._modules)))
        try:
            for _, shelf, before in shelves:
                shelf.update({name: self.stand_in_of(real) for name, real in before.items()})
            _refresh_flat_weights(self._module)
            yield
            for prefix, shelf, before in shelves:
                for name, real in before.items():
                    self._check_rebound(prefix + name, name, real, shelf)
                if prefix.startswith("Parameter"):  # a buffer may be a cache
                    _check_none_made(prefix, shelf.keys() - before.keys())
                    continue
                for name, value in shelf.items():
                    if before.get(name) is None and isinstance(value, Tensor):
                        self.made.append(
                            MadeBuffer(prefix.removeprefix("Buffer ") + name, shelf, name, value)
                        )
        finally:
            for _, shelf, before in shelves:
                shelf.clear()
                shelf.update(before)
            made = [_removed_layers(children, before) for _, children, before in layers]
            _refresh_flat_weights(self._module)
        for (prefix, _, _), names in zip(layers, made, strict=True):
            _check_none_made(prefix, names)

    def _check_rebound(self, title: str, name: str, real: Tensor | None, shelf: dict[str, Any]) -> None:
        """Raise CaptureError if forward has removed a parameter or buffer (`real`) in a submodule's `shelf`, or
        replaced it, except a buffer by a tensor (see `rebound_buffers`)."""
        if name not in shelf:
            raise CaptureError(
                f"{title} is removed from the model by its forward\n"
                "  fix: keep it; a compiled model's state has a fixed set of names"
            )
        is_tensor = title.startswith("Buffer") and isinstance(shelf[name], Tensor)
        if real is not None and shelf[name] is not self.stand_in_of(real) and not is_tensor:
            raise CaptureError(
                f"{title} is reassigned within the model\n"
                "  why: a compiled model keeps its state in place; a new tensor under the old name is lost\n"
                f"  fix: write into it with `self.{name}.copy_(src)`"
            )

    def rebound_buffers(self) -> dict[str, Tensor]:
        """Return, by canonical name, the tensors that forward has assigned to buffers. Raise CaptureError if a buffer
        has two names, of which forward has reassigned one."""
        assigned: dict[str, Tensor] = {}
        for title, shelf, before in self._shelves:
            for name, real in before.items() if title.startswith("Buffer") else ():
                value = shelf.get(name)
                if id(real) in self._by_id and isinstance(value, Tensor):
                    canonical = self._by_id[id(real)].name
                    if assigned.setdefault(canonical, value) is not value:
                        raise CaptureError(
                            f"{title}{name} is reassigned within the model, and was the same tensor as {canonical}\n"
                            f"  fix: write into both with `self.{name}.copy_(src)`"
                        )
        return {name: value for name, value in assigned.items() if value is not self.buffers.get(name)}

    # ---- afterwards --------------------------------------------------------------------------------------

    def check_orphans(self, loss: Tensor, scale: Tensor) -> None:
        """Raise CaptureError if a tensor that requires a gradient, and is no parameter, gets one."""
        orphans = self.orphans
        gradients: Sequence[Tensor | None] = ()
        if orphans:  # of those that the loss does not depend on, no backward runs
            leaves = [value for value, _ in orphans]
            gradients = torch.autograd.grad(loss, leaves, scale, retain_graph=True, allow_unused=True)
        for (value, where), gradient in zip(orphans, gradients, strict=True):
            if gradient is not None:
                raise CaptureError(
                    f"a tensor of shape {tuple(value.shape)} needs a gradient, but is no parameter of the model, and"
                    " no update would change it\n"
                    f"  forward uses it at {where}\n"
                    "  fix: make it a parameter, `self.name = nn.Parameter(...)`, and keep parameters and layers in"
                    " nn.ParameterList and nn.ModuleList, not in lists; compute in forward what depends on parameters;"
                    " or say `.detach()`, if it is meant as a constant"
                )


def _check_members(named: list[tuple[str, Tensor]], training: bool) -> None:
    """Raise CaptureError for parameters or buffers that are lazy, sparse, or not writable."""
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
            "  fix: register `value.to_dense()`; a constant factor of torch.sparse.mm need be no buffer",
        ),
        (
            lambda value: training and value.is_inference(),
            "were made inside torch.inference_mode()\n"
            "  why: torch lets nothing be written to such tensors outside of it, so training can't change them\n"
            "  fix: make the model, and move or cast it, outside of torch.inference_mode()",
        ),
    )
    for is_wrong, why_and_fix in problems:
        names = [name for name, value in named if is_wrong(value)]
        if names:
            raise CaptureError(f"{', '.join(names[:5])} of the model {why_and_fix}")


def _check_none_made(prefix: str, made: Iterable[str]) -> None:
    """Raise CaptureError if a forward has made weights. `prefix`: as in "Parameter layer."; `made`: their names."""
    if names := sorted(made):
        raise CaptureError(made_text(prefix + names[0]))


def made_text(name: str) -> str:
    """Return the text of the error for a weight, buffer or layer that forward makes, and that later calls need."""
    return (
        f"{name} is made by the forward\n"
        "  why: a compiled model has the weights and buffers that it has when it is compiled; this one would be lost\n"
        "  fix: make it in __init__, or run the model once in plain PyTorch, `model(*micro_batch)`, before wrapping it"
    )


def _removed_layers(children: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Remove the layers with parameters that are not among a module's children `before`; return their names."""
    new = {name: child for name, child in children.items() if name not in before and child is not None}
    names = [name for name, child in new.items() if next(child.parameters(), None) is not None]
    for name in names:
        del children[name]
    return names


def _refresh_flat_weights(module: nn.Module) -> None:
    """Rebuild each recurrent layer's list of its weights (`_flat_weights`) from its attributes."""
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child._flat_weights = [getattr(child, name, None) for name in child._flat_weights_names]


def _storage_id(value: Tensor) -> int:
    """Return the address of a tensor's storage; for a tensor without memory, a negative number of its own."""
    with DisableTorchFunction(), contextlib.suppress(NotImplementedError, RuntimeError):
        # A tensor subclass may have no memory of its own.
        if value.layout is torch.strided and not value.is_meta and value.numel():
            return storage_id(value)
    return -id(value)


def _byte_range(value: Tensor) -> tuple[int, int]:
    """Return the range of bytes [begin, end) of its storage that a tensor spans."""
    with DisableTorchFunction():
        first, size = int(value.storage_offset()), value.element_size()
        return first * size, (first + spanned_elements(value)) * size


def _has_overlap(one: Tensor, other: Tensor) -> bool:
    (begin, end), (first, last) = _byte_range(one), _byte_range(other)
    return first < end and begin < last


def reshaped_buffer_text(graph: Graph, reshaped: Mapping[str, Tensor]) -> str:
    """Return the text of the error for a buffer that forward replaces by a tensor of another shape, and reads."""
    name, value = next(iter(reshaped.items()))
    slot = next(slot for slot in graph.slots if (slot.role, slot.key) == ("buffer", name))
    return (
        f"Buffer {name} is reassigned within the model, and becomes {value.dtype} {tuple(value.shape)};"
        f" it was {slot.dtype} {slot.shape}\n"
        "  why: the next call would read it; a compiled model keeps its state in place, in one shape and type\n"
        "  fix: give the buffer its later shape before: register it so, or run the model once in plain PyTorch,"
        f" `model(*micro_batch)`; or reset it at the begin of forward: `self.{name} = torch.zeros(...)`"
    )
