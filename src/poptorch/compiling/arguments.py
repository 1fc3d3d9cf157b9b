"""The arguments of a call: bound to the signature of forward, checked, and prepared for the engine."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from popengine.compile.recording.torch_errors import ROWS_DIFFER
from popengine.errors import BatchError, Error, did_you_mean
from popengine.settings import Counts
from poptorch.data.loader import loaded_batches
from poptorch.logs import logger
from poptorch.nested_values import Part, Spec, constants_of, iterate_parts, spec_of, tensors_of, with_tensors

_HINT = (
    "\n  why: a compiled model has fixed inputs\n"
    "  fix: options.allowNewShapes() lets calls have other sizes and leave out arguments; for other inputs call"
    " destroy() on the executor first, and its next call compiles the model for them"
)

_MOST_WORDS = 12  # arguments that a message describes


class InputKind(NamedTuple):
    """The structure of each argument of a call, and dtype and shape of each tensor."""

    # By argument, without the parts that have no tensors.
    specs: tuple[tuple[str, Spec], ...]
    tensors: tuple[tuple[torch.dtype, torch.Size], ...]

    @property
    def paths(self) -> list[str]:
        """Return the path of each tensor: `x`, `b[0]`, `x["k"]`."""
        return [path for _, spec in self.specs for path, part in spec if part.type is Tensor]


@dataclass(frozen=True)
class BoundCall:
    """The arguments of a call, bound to forward's signature, the number of positional ones, and the paths of inputs
    whose rows `rows_first` has moved."""

    bound: inspect.BoundArguments
    positional: int
    rearranged: frozenset[str] = frozenset()

    @cached_property
    def kind(self) -> InputKind:
        """Return the structure of the arguments, and dtype and shape of each tensor."""
        specs = []
        for name, spec in self.specs.items():
            kept = list[tuple[str, Part]]()
            for path, part in reversed(spec):  # what is in a container precedes it
                if part.type is Tensor or path[:2] == "**" or (kept and is_within(kept[-1][0], [path])):
                    kept.append((path, part))
            specs.append((name, tuple(reversed(kept))))
        # A nested tensor, which has no shape, is refused later.
        tensors = ((x.dtype, torch.Size() if x.is_nested else x.shape) for x in self.tensors)
        return InputKind(tuple(specs), tuple(tensors))

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Return the structure and constants of each argument, () if it is left out and its default has tensors; paths
        in **kwargs begin with the keyword."""
        specs = {}
        for name, parameter in self.bound.signature.parameters.items():
            value: Any = self.bound.arguments.get(name)
            if name not in self.bound.arguments:  # its default has tensors
                specs[name] = ()
            elif parameter.kind is parameter.VAR_KEYWORD:
                keys = sorted(value)
                parts = (part for key in keys for part in spec_of(value[key], key))
                specs[name] = ((f"**{name}", Part(dict, tuple(keys))), *parts)
            else:
                specs[name] = spec_of(value, name)
        return specs

    @cached_property
    def constant_parts(self) -> dict[str, Part]:
        """Return, by path, the parts of the arguments that have no tensors, and an empty one of each that is left out
        and has a default with tensors."""
        with_tensors = {path for _, spec in self.kind.specs for path, _ in spec}
        parts = chain.from_iterable(spec or ((name, Part(type(None))),) for name, spec in self.specs.items())
        return {path: part for path, part in parts if path not in with_tensors}

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Return, by path, the arguments, and parts of them, that have no tensors."""
        named = dict(self.bound.arguments)
        for name, parameter in self.bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(name)
        parts = (part for name, value in named.items() for part in iterate_parts(value, name))
        return {path: value for path, value, *_ in parts if not tensors_of(value)}

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Return the tensors in the arguments, in the order of `tensors_of`."""
        return [*chain.from_iterable(self._by_name.values())]

    @cached_property
    def _by_name(self) -> dict[str, list[Tensor]]:
        """Return the tensors in each argument, of now: forward may fill others, such as an empty default value."""
        given = self.bound.arguments
        return dict(zip(given, map(tensors_of, given.values()), strict=True))

    @property
    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by path."""
        return dict(zip(self.kind.paths, self.tensors, strict=True))

    def in_words(self, samples: Sequence[Tensor]) -> str:
        """Return, for messages, path, dtype and shape of the tensors, and types of other values."""
        words = [f"{p}: {s.dtype} {tuple(s.shape)}" for p, s in zip(self.named_tensors, samples, strict=True)]
        for name, value in self.bound.arguments.items():
            default = self.bound.signature.parameters[name].default
            parts = constants_of(value, name)
            parts = [(part, path) for part, path, _ in parts if part is not default or part is None]
            words += [f"{path}: {'None' if part is None else type(part).__name__}" for part, path in parts]
        rows = {path: len(s) for path, s in zip(self.named_tensors, samples, strict=True) if s.dim()}
        # Lightning's index of the batch has one row.
        if len({*rows.values()} - {1}) > 1 and not self.rearranged:
            words.append(f"with {ROWS_DIFFER}: {rows}")
        return ", ".join(words[:_MOST_WORDS]) + f", and {len(words) - _MOST_WORDS} more" * (
            len(words) > _MOST_WORDS
        )

    def with_tensors(self, tensors: Iterable[Tensor]) -> BoundCall:
        """Return a copy of the call with other tensors, in the order of `self.tensors`."""
        arguments, given = dict(self.bound.arguments), iter(tensors)
        for name in (name for name, values in self._by_name.items() if values):
            arguments[name] = with_tensors(arguments[name], given)
        return replace(self, bound=inspect.BoundArguments(self.bound.signature, arguments))

    def rows_first(self, dims: dict[str, int | None], micro_batches: int) -> BoundCall:
        """Return a copy in which the rows of all inputs are in dimension 0, one micro-batch after another, by
        `Options.batchDims`. Raises Error if a name is unknown, or a dimension can't be divided."""
        named, arguments, moved = dict(self.named_tensors), set(self.bound.signature.parameters), set[str]()
        for path, tensor in self.named_tensors.items():
            name = path if path in dims else re.split(r"[.\[]", path)[0]
            dim = dims.get(name, 0)
            arguments.add(name)
            if dim == 0:
                continue
            moved.add(path)
            if micro_batches == 1:
                continue
            if not tensor.dim():
                raise Error(
                    f"batchDims: input {path} has no dimensions\n  fix: pass it as {path}[None], of one row"
                )
            if dim is None:
                named[path] = tensor.expand(micro_batches, *tensor.shape).flatten(0, 1)
            elif not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] % micro_batches:
                raise Error(
                    f"batchDims: input {path} has shape {tuple(tensor.shape)}, and can't be split along dimension"
                    f" {dim} into {micro_batches} micro-batches\n"
                    f"  fix: a tensor with a multiple of {micro_batches} rows in this dimension"
                )
            else:
                parts = tensor.unflatten(dim, (micro_batches, -1))
                named[path] = parts.movedim(dim % tensor.dim(), 0).flatten(0, 1)
        if unknown := dims.keys() - arguments:
            near = did_you_mean(min(unknown), arguments | named.keys())
            raise Error(f"batchDims: no input is named {min(unknown)!r}{near}\n  inputs: {', '.join(named)}")
        return replace(self.with_tensors(named.values()), rearranged=frozenset(moved))


def is_within(path: str, roots: Iterable[str]) -> bool:
    """Return whether a path is one of `roots`, or of a part of one."""
    return any(path == root or path.startswith((f"{root}[", f"{root}.")) for root in roots)


class MissingArgument(Error, TypeError):
    """The error of a missing argument; a TypeError, too, since some programs catch that."""


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> BoundCall:
    """Bind a call's arguments to forward's signature, as Python does, with defaults filled in, except tensors, which
    are constants of the model and not cut into micro-batches. Raises AssertionError or MissingArgument if they do not
    fit, and Error for tensors that are not dense, or have attributes of Python."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = set() if takes_any else kwargs.keys() - signature.parameters.keys()
        missing = re.search(r"missing a required .*'(\w+)'", str(error))
        if missing and not unknown:
            fix = f"pass {missing[1]}, as a combined batch of all micro-batches"
            if len(args) == 1 and isinstance(args[0], list | tuple | dict) and not kwargs:
                fix = f"model({'**' if isinstance(args[0], dict) else '*'}batch)"
            raise MissingArgument(
                f"Mandatory parameter {missing[1]} missing in the call of the model\n"
                f"  forward{signature} was given {len(args)} positional argument{'s' * (len(args) != 1)}"
                f"{f' and {sorted(kwargs)}' if kwargs else ''}\n"
                f"  fix: {fix}"
            ) from None
        names = (f"{name!r}{did_you_mean(name, signature.parameters)}" for name in sorted(unknown))
        what = f"unknown arguments {', '.join(names)}" if unknown else error
        raise AssertionError(
            f"the model can't be called like this: {what}\n"
            f"  fix: model({', '.join(map(str, signature.parameters))}), the parameters of forward{signature}"
        ) from None
    given = set(bound.arguments)
    bound.apply_defaults()
    for name in bound.arguments.keys() - given:
        if tensors_of(bound.arguments[name]):
            del bound.arguments[name]
    call = BoundCall(bound, len(args))
    for index, tensor in enumerate(call.tensors):
        if tensor.is_meta:
            fault, fix = "on the meta device, and has no values", "torch.empty_like({}, device='cpu'), filled"
        elif tensor.is_nested:
            fault, fix = "a nested tensor", "pad it: {}.to_padded_tensor(0)"
        elif tensor.layout is not torch.strided:
            fault, fix = f"sparse ({tensor.layout})", "pass {}.to_dense()"
        elif attributes := sorted(name for name in vars(tensor).keys() - {"backward"} if name[0] != "_"):
            names = ", ".join(attributes)
            fault = f"a tensor with attributes of Python ({names}), which forward would not find"
            fix = "pass them as arguments of forward, and delete them: vars({}).clear()"
        else:
            continue
        path, why = list(call.named_tensors)[index], "the device's inputs are dense tensors"
        raise Error(f"input {path} is {fault}\n  why: {why}\n  fix: {fix.format(path)}")
    return call


def check_batch(call: BoundCall, counts: Counts) -> None:
    """Raise AssertionError unless each tensor holds whole micro-batches, and Error for an empty tensor."""
    for path, tensor in call.named_tensors.items():
        if tensor.numel() == 0:
            raise Error(
                f"Zero-sized tensors are unsupported (Got shape {tuple(tensor.shape)} for {path})\n"
                f"  fix: leave such a batch out: if {path}.numel():"
            )
        rows = tensor.shape[0] if tensor.dim() else 1
        below = rows - rows % counts.product
        near = f"{below} or {below + counts.product}" if below else f"{counts.product}"
        if rows % counts.product:
            scalar = (
                f"; or options.batchDims({{{path!r}: None}}), if it is no batch" if not tensor.dim() else ""
            )
            raise AssertionError(
                f"Invalid batch dimension: {path} has shape {tuple(tensor.shape)}, and its first dimension must be a"
                f" multiple of {counts.product} = {factors_in_words(counts)}\n"
                f"  fix: {near} rows; poptorch.DataLoader(options, dataset, batch_size=<micro-batch>) loads such"
                f" batches{scalar}"
            )


def warn_about_inputs(call: BoundCall, counts: Counts, has_float64: bool) -> None:
    """Log warnings of inputs that are not used as they are, and of a DataLoader with other options."""
    batches = (loaded_batches.get(tensor) for tensor in call.tensors)
    loaded = {factors_in_words(batch.counts) for batch in batches if batch is not None}
    if differing := loaded - {factors_in_words(counts)}:
        logger.warning(
            "the DataLoader and the model have different options: batches are loaded for %s, and the model"
            " reads them as %s: so a micro-batch does not have batch_size rows\n"
            "  fix: give poptorch.DataLoader the options of the model that it loads for",
            differing.pop(),
            factors_in_words(counts),
        )
    for name, value in call.bound.arguments.items():
        kind = call.bound.signature.parameters[name].kind
        if kind is not inspect.Parameter.VAR_KEYWORD and isinstance(value, dict):
            logger.warning(
                "argument %s is a dictionary: its keys are fixed by the compilation, their order is irrelevant",
                name,
            )
            break
    named = call.named_tensors
    if paths := [path for path in named if narrow_float64(named[path], has_float64) is not named[path]]:
        logger.warning("inputs become float32, since the model has no float64 weights: %s", ", ".join(paths))
    for path, tensor in named.items():
        if tensor.requires_grad:
            logger.warning(
                "Input tensor has requires_grad=True set. This tensor will be detached because backward pass via"
                " inputs is not supported. It is the input %s",
                path,
            )
        if not tensor.is_contiguous():
            logger.warning("input %s is not contiguous: a contiguous copy is made at each call", path)


def narrow_float64(tensor: Tensor, has_float64: bool) -> Tensor:
    """Return a float64 tensor as float32, unless the model has float64 weights; other tensors unchanged."""
    return tensor.float() if tensor.dtype == torch.float64 and not has_float64 else tensor


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by canonical name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def has_float64_weights(model: torch.nn.Module) -> bool:
    """Return whether a model has weights or buffers of float64."""
    return any(value.dtype == torch.float64 for value in weights_of(model).values())


def tensors_for_engine(call: BoundCall, has_float64: bool) -> list[Tensor]:
    """Return a call's tensors as contiguous, plain tensors, converted by `narrow_float64`."""
    tensors = []
    for tensor in call.tensors:
        plain = tensor.detach().resolve_conj().resolve_neg()
        tensors.append(narrow_float64(plain, has_float64).contiguous())
    return tensors


def check_written_inputs(call: BoundCall, written: Iterable[int]) -> None:
    """Raise Error if an input that forward writes into (by index in `call.tensors`) has the memory of another input."""
    for index in written:
        memory = [value.data_ptr() for value in call.tensors]
        if memory.count(memory[index]) > 1:
            paths = [path for path, value in call.named_tensors.items() if value.data_ptr() == memory[index]]
            raise Error(
                f"inputs {' and '.join(paths)} are one tensor, and forward writes into it\n"
                "  why: each input is a tensor of its own on the device, so the others would keep their value\n"
                f"  fix: pass {paths[-1]}.clone()"
            )


def write_back_inputs(call: BoundCall, values: dict[int, Tensor]) -> None:
    """Copy the new values of inputs that forward writes into, by index in `call.tensors`, to the caller."""
    check_written_inputs(call, values)
    with torch.no_grad():
        for index, value in values.items():
            call.tensors[index].copy_(value.reshape(call.tensors[index].shape))


def factors_in_words(counts: Counts) -> str:
    """Return the factors of a combined batch as text, each with its option's name."""
    return (
        f"deviceIterations {counts.iterations} x input groups of replicationFactor {counts.groups}"
        f" x Training.gradientAccumulation {counts.accumulation}"
    )


@dataclass(frozen=True)
class CompiledInputs:
    """The inputs that a plan was compiled for; `positional` as in `BoundCall`."""

    kind: InputKind
    specs: dict[str, Spec]
    positional: int
    counts: Counts
    has_float64: bool

    @property
    def micro_batch(self) -> InputKind:
        """Return the inputs' kind, cut to one micro-batch. Plans for which it is equal can share a graph."""
        n, tensors = self.counts.product, self.kind.tensors
        cut = ((dtype, torch.Size([size[0] // n, *size[1:]]) if size else size) for dtype, size in tensors)
        return self.kind._replace(tensors=tuple(cut))

    def check_call(self, call: BoundCall, unread: Collection[str], any_shape: bool = False) -> None:
        """Raise BatchError unless `call` has the compiled structure, constants, dtypes and shapes; with
        `any_shape` other shapes and constants, and arguments, items and keys that are left out or added, are
        accepted. An argument whose default has tensors may be left out or given in any case. Values at the paths
        `unread` do not matter."""
        for index, (name, compiled) in enumerate(self.specs.items()):
            actual = call.specs[name]
            if not compiled or not actual or (name in unread and name in call.constant_parts):
                continue  # another plan has the default
            kind = call.bound.signature.parameters[name].kind
            # An argument that one of the calls leaves out has its default there.
            may_be_left_out = index >= min(call.positional, self.positional) or kind is kind.VAR_POSITIONAL
            if actual != compiled and may_be_left_out and not any_shape:
                counts = (f"{count} arguments" for count in (self.positional, call.positional))
                _check_equal("Number of positional arguments mismatch", *counts)
            _check_spec(compiled, dict(actual), unread, any_shape)
        compiled_tensors = dict(zip(self.kind.paths, self.kind.tensors, strict=True))
        for path, tensor in call.named_tensors.items():
            dtype, shape = compiled_tensors.get(path, (tensor.dtype, tensor.shape))
            fix = f"\n  fix: {path}.to({dtype}), or destroy() the executor, whose next call then takes {tensor.dtype}"
            _check_equal(f"Data type mismatch for {path}", dtype, tensor.dtype, fix)
            if any_shape:
                continue
            fix, whole = "", self.counts.product
            if whole > 1 and tensor.dim() and shape == (len(tensor) * whole, *tensor.shape[1:]):
                fix = (  # the input is one micro-batch, as torch's DataLoader yields
                    f"\n  {shape[0]} = micro-batch {len(tensor)} x {factors_in_words(self.counts)}\n"
                    f"  fix: load combined batches: poptorch.DataLoader(options, dataset, batch_size={len(tensor)})"
                )
            _check_equal(f"Shape mismatch for {path}", shape, tensor.shape, fix)


def _check_spec(compiled: Spec, actual: dict[str, Part], unread: Collection[str], any_shape: bool) -> None:
    """Raise BatchError unless the compiled spec of an argument and that of a call are equal, or differ only
    as `unread` and `any_shape` allow."""
    for path, expected in compiled:
        part, name = actual.get(path), path.lstrip("*")
        # Its container has other keys, or is none; or its value does not matter.
        if part is None or (is_within(path, unread) and part.type is not Tensor):
            continue
        if any_shape and expected.type is not part.type and (expected.constant or part.constant):
            continue  # one call passes a tensor or container, the other leaves it out, or has a constant
        _check_equal(f"Type mismatch for {name}", expected.type, part.type)
        if any_shape:
            continue
        if issubclass(expected.type, tuple | list):
            _check_equal(f"Length mismatch for {name}", len(expected.keys), len(part.keys))
        if expected.keys != part.keys:
            missing = [str(key) for key in expected.keys if key not in part.keys]
            unexpected = [str(key) for key in part.keys if key not in expected.keys]
            words = [f"Missing arguments: {', '.join(missing)}."] if missing else []
            words += [f"Unexpected arguments: {', '.join(unexpected)}."] if unexpected else []
            raise BatchError(f"Keys mismatch for {name}: {' '.join(words)}{_HINT}")
        is_array = expected.type.__module__ == "numpy"
        fix = "\n  fix: pass what changes as a tensor: torch.from_numpy(array)" if is_array else ""
        _check_equal(f"Value mismatch for {name}", expected.constant, part.constant, fix)


def _check_equal(what: str, expected: Any, actual: Any, explained: str = "") -> None:
    if expected != actual:
        hint = _HINT if "\n  fix: " not in explained else ""
        raise BatchError(f"{what}: expected {expected} but got {actual}{explained}{hint}")
