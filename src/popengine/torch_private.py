"""Torch's private names that Pando uses, and what differs between the versions of torch in Pando's range.

No other module imports or reads a private name of torch (`tests/test_torch_private.py`). Numbers in comments are
the versions of torch that introduced a name; "old" is before 2.0.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._C import (
    DisableTorchFunction,  # old: no mode's and no subclass's __torch_function__ is called
    DisableTorchFunctionSubclass,  # 2.0: no subclass's __torch_function__ is called
    _AutoDispatchBelowAutograd as BelowAutograd,  # old: autograd records nothing
    _current_autograd_node as current_autograd_node,  # 1.13: the node whose backward runs, or None
    _len_torch_dispatch_stack as number_of_dispatch_modes,  # 2.0
)
from torch._ops import OpOverload  # 1.11: the type of torch.ops.aten.add.Tensor
from torch._ops import _OpNamespace as OpNamespace  # 1.11: the type of torch.ops.aten
from torch._subclasses.fake_tensor import (  # 1.13: tensors without values
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import _get_sequence_nr as next_sequence_number  # 2.2: of autograd's next node
from torch.distributed import distributed_c10d
from torch.distributions import Distribution
from torch.nn.modules import module as modules
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # old: the base of BatchNorm1d, 2d and 3d
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks  # 2.0
from torch.overrides import _get_current_function_mode_stack  # 1.13
from torch.utils._python_dispatch import TorchDispatchMode  # 1.12: receives each operation below autograd
from torch.utils._python_dispatch import _disable_current_modes as disable_dispatch_modes  # 2.0
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode  # 2.0
from torch.utils._pytree import (  # 1.8: nested lists, tuples and dicts
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

# The errors that torch raises if an operation reads a fake tensor's values.
VALUE_READS = (DataDependentOutputException, DynamicOutputShapeException)
TENSOR_FUNCTIONS: Any = torch._C._VariableFunctions  # old: the kernels of torch.add and other functions # pyright: ignore
PACK_SEQUENCE = TENSOR_FUNCTIONS._pack_padded_sequence  # old: of torch.nn.utils.rnn.pack_padded_sequence
UNPACK_SEQUENCE = TENSOR_FUNCTIONS._pad_packed_sequence  # old
LAYER_FUNCTIONS: Any = torch._C._nn  # old: the kernels of torch.nn.functional # pyright: ignore

# 2.1: returns the number of references to the storage with an address
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count  # pyright: ignore

# 1.13: prints a traceback of each operation that fails on fake tensors
FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")

# 2.0: returns whether a mask is causal, by reading its values
detect_is_causal_mask = transformer._detect_is_causal_mask

T = TypeVar("T")
ALIGNMENT = 64  # bytes: torch's own allocations on the CPU begin at multiples


def storage_id(value: Tensor) -> int:
    """Return the address of a tensor's storage, which is unique also for a fake tensor without memory."""
    return value.untyped_storage()._cdata  # old


def leaves_of(cls: type[T], value: Any) -> list[T]:
    """Return the leaves of this type in nested lists, tuples and dicts, in their order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, cls)]


def spanned_elements(value: Tensor) -> int:
    """Return the number of elements of memory from a tensor's first element to its last one; 0 without elements."""
    last = sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True))
    return int(last) + 1 if value.numel() else 0


def is_aligned(value: Tensor) -> bool:
    """Return whether a tensor begins at a multiple of `ALIGNMENT` bytes, or is not on the CPU."""
    return not value.is_cpu or value.data_ptr() % ALIGNMENT == 0


def bits_of(value: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements, uint8 [bytes], on its device; without a copy if they lie in order."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # of one element
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def hash_of_bits(value: Tensor) -> str:
    """Return a hash of the bytes of a tensor's elements."""
    return hashlib.sha256(bits_of(value.detach().cpu()).numpy().data).hexdigest()


def made_as(cls: type[Tensor], value: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor of a class, such as `nn.Parameter`, with the memory of `value`."""
    return torch.Tensor._make_subclass(cls, value, requires_grad)  # old


def swap_tensors(one: Tensor, other: Tensor) -> None:
    """Swap tensors as `torch.utils.swap_tensors`, which refuses tensors with weak references, as an LSTM has to its
    weights. The references stay right, since the objects stay."""
    utilities: Any = torch.utils
    try:
        utilities.weakref = SimpleNamespace(getweakrefs=lambda _: [])  # 2.3
        torch.utils.swap_tensors(one, other)
    finally:
        utilities.weakref = weakref


def reset_parameters(layer: torch.nn.Module) -> None:
    """Call a layer's `reset_parameters()`, if it has one."""
    of_attention = getattr(layer, "_reset_parameters", None)  # 1.1: MultiheadAttention
    reset = getattr(layer, "reset_parameters", of_attention)
    if reset is not None:
        reset()


def can_assign_data(value: Tensor, memory: Tensor) -> bool:
    """Return whether `value.data = memory` is allowed: both are on the CPU, or on a kind of GPU."""
    return torch._has_compatible_shallow_copy_type(value, memory)  # old


@functools.cache
def cpu_features() -> Mapping[str, Any]:
    """Return the processor's features by name, such as "avx512_bf16"."""
    if hasattr(torch.cpu, "get_capabilities"):  # 2.11
        return torch.cpu.get_capabilities()
    info = Path("/proc/cpuinfo")
    return dict.fromkeys(info.read_text().split() if info.exists() else (), True)


def current_fake_mode() -> Any:
    """Return the FakeTensorMode that is on, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # 2.1


@contextlib.contextmanager
def modes_restored() -> Iterator[None]:
    """Run the body, then turn off the torch modes that the body has turned on and not off.

    While they are turned off, a list refers to them: torch 2.10 crashes if only its own stack does.
    """
    functions, modes = torch._C._len_torch_function_stack(), _get_current_dispatch_mode_stack()
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        for mode in _get_current_dispatch_mode_stack():
            if not any(mode is before for before in modes):
                _pop_mode(getattr(mode, "_mode_key", None))  # torch keeps its own modes by key


def state_around() -> tuple[Any, ...]:
    """Return the state of torch on which functions and modules depend: dtypes, flags, hooks of all modules, and class
    and attributes of each mode that is on."""
    shelves = [vars(modules).get(name) for name in _GLOBAL_HOOKS]  # old
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    return (
        torch.get_default_dtype(),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.are_deterministic_algorithms_enabled(),
        *(hook for shelf in shelves if shelf for hook in shelf.values()),
        *((type(mode), *vars(mode).values()) for mode in modes),
    )


_GLOBAL_HOOKS = [name for name in vars(modules) if name.startswith("_global_") and name.endswith("_hooks")]


@contextlib.contextmanager
def value_checks_off(is_causal_mask: Callable[..., bool]) -> Iterator[None]:
    """Run the body with `is_causal_mask` in place of torch's, and torch.distributions checking no arguments."""
    validates = Distribution._validate_args  # old
    Distribution.set_default_validate_args(False)
    transformer._detect_is_causal_mask = is_causal_mask
    try:
        yield
    finally:
        Distribution.set_default_validate_args(validates)
        transformer._detect_is_causal_mask = detect_is_causal_mask


# 2.0: the hooks of `step()`: attributes that `torch.optim.Optimizer.__init__` sets, and hooks of all optimizers
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
STEP_HOOKS_OF_ALL = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


def step_without_hooks(cls: type[Optimizer]) -> Callable[..., Any]:
    """Return a torch class's `step` without the wrapper that calls hooks, for subclasses with a wrapper too."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # 2.0


def default_store() -> Any:
    """Return the store of torch.distributed's default process group."""
    return distributed_c10d._get_default_store()  # old


def process_groups() -> list[Any]:
    """Return all process groups of torch.distributed that this process belongs to."""
    return list(distributed_c10d._world.pg_map)  # 2.0


# ---- torch.compile and inductor, which are slow to import ----------------------------------------------------


def optimized_module_type() -> Any:
    """Return the type of the modules that torch.compile returns; () if torch.compile was never called."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # 2.0
    return () if dynamo is None else dynamo.OptimizedModule


def has_cpp_compiler() -> bool:
    """Return whether inductor finds a C++ compiler that it can run."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # 2.5
    from torch._inductor.exc import InvalidCxxCompiler  # 2.0

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):  # such as a file g++ that isn't executable
        return False
    return True


def decompositions() -> Mapping[Any, Any]:
    """Return the table of operations that inductor decomposes while a function is traced."""
    from torch._inductor import compile_fx  # 2.0; the table's functions use modules that it imports
    from torch._inductor.decomposition import select_decomp_table  # 2.0

    return select_decomp_table()


def trace(
    function: Callable[..., Any], make_inputs: Callable[[], list[Tensor]], table: Mapping[Any, Any]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return the fx graph of a function, and the fake inputs, made under the fake mode, with which it was traced."""
    from torch.fx.experimental.proxy_tensor import make_fx  # 1.12
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # 2.0

    # Inductor's cache needs a ShapeEnv, though no shape is dynamic.
    with FakeTensorMode(shape_env=ShapeEnv()) as fake:
        inputs = make_inputs()
    with fake, torch.no_grad():
        return make_fx(function, decomposition_table=table)(*inputs), inputs


def compile_graph(graph: fx.GraphModule, fakes: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    """Return a function of a list of inputs that runs inductor's kernels for a graph. `options`: inductor's."""
    from torch._guards import TracingContext, tracing  # 2.0
    from torch._inductor import config  # 2.0
    from torch._inductor.compile_fx import compile_fx_inner  # 2.0
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # 2.5

    mode: Any = fakes[0].fake_mode if fakes else None  # pyright: ignore[reportAttributeAccessIssue]
    # Inductor's cache on disk does not know ATEN_CPU_CAPABILITY: code for wider vectors would compute wrong values.
    width = {"cpp.simdlen": pick_vec_isa().bit_width()}
    with tracing(TracingContext(mode)), config.patch({**options, **width}):
        return compile_fx_inner(graph, fakes, is_inference=True)
