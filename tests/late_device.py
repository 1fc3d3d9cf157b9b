"""An accelerator in Python, for tests without a GPU: the devices `late:0`, `late:1`, ... Use it through `late_devices`.

A device has memory of its own and a queue. An operation returns at once. Its kernel, which is the CPU's, runs when
the host waits, or earlier, in a random order that the queues and their events allow. Memory holds NaN (integers: the
largest number) until a kernel writes it, and again when it is freed, so an operation that runs too early shows in the
result. As with CUDA, a device has streams, a copy from pinned memory reads it late, work can be captured and replayed,
and a kernel that fails makes the device unusable. A capture that fails leaves torch's own generator in it, until
another one has succeeded, and other generators for good. `waits` counts by cause how often the host waited.

Tensors are plain tensors of torch's device type PrivateUse1, so views, parameters and autograd are torch's own.
"""

import ctypes
import dataclasses
import functools
import random
import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from popengine.run import devices as run_devices
from popengine.run import random_draws

NAME, MOST = "late", 4  # devices
aten = torch.ops.aten
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_lock = threading.RLock()


def tree_map(function, tree):
    """Return nested arguments, with `function` of each leaf. (Torch's tree_map takes longer than the kernels.)"""
    if isinstance(tree, (list, tuple)):
        return type(tree)([tree_map(function, value) for value in tree])
    if type(tree) is dict:
        return {key: tree_map(function, value) for key, value in tree.items()}
    return function(tree)


def tree_leaves(tree):
    found = []
    tree_map(found.append, tree)
    return found


_kernels = ThreadPoolExecutor(1)  # kernels run in a thread of their own


# ---- queues --------------------------------------------------------------------------------------------------


class Event:
    """A point in the queue of device `home`: `done` once the work before it has run."""

    done, at = False, 0

    def __init__(self, home):
        self.home = home

    @property
    def is_over(self):
        return self.done or self.home.failure is not None

    def record(self):
        self.done = True

    def synchronize(self):
        self.home.wait("message")

    def elapsed_time(self, later):
        """Return the number of kernels between two events."""
        return later.at - self.at


class Stream:
    """A queue of a device. Work of different streams is not in order."""

    def __init__(self, home):
        self.home, self.work, self.graph = (
            home,
            deque(),
            None,
        )  # the graph that is captured, in place of `work`
        home.streams.append(self)

    def wait_event(self, event):
        with _lock:
            self.work.append((lambda: None, (event,)))

    def wait_stream(self, other):
        event = Event(other.home)
        other.work.append((event.record, ()))
        self.wait_event(event)

    def __enter__(self):
        self.before = current_stream(self.home.device)
        set_stream(self)

    def __exit__(self, *_):
        set_stream(self.before)


_current = threading.local()  # `streams` by device
in_capture = set()  # graphs in whose capture torch's own generator is
unusable = {}  # by address, the generators of captures that failed


def current_stream(device):
    return vars(_current).get(device.index) or devices[device.index].streams[0]


def set_stream(stream):
    vars(_current)[stream.home.index] = stream


class Device:
    """The streams of a device, and what the host did with it."""

    def __init__(self, index):
        self.index = index
        self.streams = []
        Stream(self)
        self.captures = self.fills = 0  # `fills`: of seeds and offsets before replays
        self.waits, self.kernels, self.replays, self.ran, self.failure = Counter(), 0, 0, 0, None

    @property
    def device(self):
        return torch.device(NAME, self.index)

    @property
    def stream(self):
        return current_stream(self.device)

    @property
    def graph(self):
        return self.stream.graph

    def put(self, function, *after):
        """Queue work on this thread's stream; `after`: events of other queues."""
        with _lock:
            self.check()
            self.kernels += 1
            if self.graph is None:
                self.stream.work.append((function, after))
            else:
                assert not after, "a graph is of one device"
                self.graph.put(function)

    def check(self):
        if self.failure is not None:
            raise RuntimeError(f"device-side assert triggered: {self.failure}")

    def wait(self, why):
        """Let the host wait for all work of this device."""
        with _lock:
            if self.graph is not None:
                self.graph.is_valid = False
                raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
            self.waits[why] += 1
        _kernels.submit(self._run_all).result()
        torch.set_num_threads(torch.get_num_threads())  # of MKL, which has one number for the process
        self.check()

    def _run_all(self):
        torch.set_num_threads(1)  # as in the engine's cores
        with _lock, torch.inference_mode(False), torch.no_grad():
            while any(stream.work for stream in self.streams) and self.failure is None:
                run_one(self)

    def run_head(self, stream):
        function, _ = stream.work.popleft()
        self.ran += 1
        try:
            function()
        except Exception as error:
            self.failure = error
            for stream in self.streams:
                stream.work.clear()


devices = [Device(index) for index in range(MOST)]
order = random.Random(0)


def run_one(wanted):
    """Run the first work of a random queue that can go on; `wanted` is waited for, so it is taken more often."""
    ready = [s for d in devices for s in d.streams if s.work and all(e.is_over for e in s.work[0][1])]
    assert ready, "queues wait for each other"
    own = [stream for stream in ready if stream.home is wanted]
    stream = order.choice(own if own and order.random() < 0.5 else ready)
    stream.home.run_head(stream)


def reset(seed=0):
    """Forget all work; later random orders follow from `seed`."""
    order.seed(seed)
    for device in devices:
        device.__init__(device.index)
    vars(_current).clear()
    in_capture.clear()
    unusable.clear()
    for streams in (run_devices._capture_stream, run_devices._copy_streams):
        streams.cache_clear()


class Graph:
    """Captured work, with the methods of torch.cuda.CUDAGraph that Pando uses."""

    def __init__(self, device):
        self.device, self.work = devices[device.index], []
        self.generators, self.seeds = {}, {}  # by address of the generator; seeds that are on the device
        self.is_valid = True

    def put(self, function):
        self.work.append(function)

    def register_generator_state(self, generator):
        self.generators[generator._cdata] = generator

    def pool(self):
        return "pool"

    def capture_begin(self, pool="pool"):
        assert pool == "pool"
        in_capture.add(self)
        self.stream = self.device.stream
        assert self.stream is not self.device.streams[0], "the default stream can't be captured"
        self.stream.graph = self
        self.device.captures += 1

    def capture_end(self):
        self.stream.graph = None
        if not self.is_valid:
            unusable.update(self.generators)
            raise RuntimeError("operation failed due to a previous error during capture")
        in_capture.clear()
        assert self.work, "the graph is empty"

    def replay(self):
        self.device.replays += 1
        for key, generator in self.generators.items():
            self.device.put(functools.partial(self.seeds.__setitem__, key, generator.initial_seed()))
            self.device.put(lambda: None)  # CUDA fills an offset, too
            self.device.fills += 2
        for function in self.work:
            self.device.put(function)

    def seed_of(self, generator):
        """Return a function that returns the seed on the device of a generator that is registered."""
        if generator._cdata not in self.generators:
            raise RuntimeError("a capture needs register_generator_state for each generator")
        return lambda: self.seeds[generator._cdata]


def timing_event(device):
    """Return an event whose time is the number of kernels that the device has run."""
    if device.type != NAME:
        return None
    home = devices[device.index]
    event = Event(home)
    home.put(lambda: setattr(event, "at", home.ran))
    return event


# ---- memory --------------------------------------------------------------------------------------------------


class _Struct(ctypes.Structure):  # DLManagedTensor
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Memory:
    """The memory of a storage, as bytes of the CPU."""

    def __init__(self, raw, home):
        self.raw, self.stream, self.graph, self.others = raw, home.stream, home.graph, set()

    def __del__(self):
        """Let the device fill the memory after the work so far of its stream, and of those that were recorded, as its
        next owner would."""
        raw, events = self.raw, []
        if self.stream.home.failure is not None:
            return
        if self.graph is not None and self.graph is self.stream.graph:
            self.graph.work.append(lambda: poison(raw))
            return
        for stream in self.others:
            event = Event(stream.home)
            stream.work.append((event.record, ()))
            events.append(event)
        self.stream.work.append((lambda: poison(raw), tuple(events)))


def poison(raw):
    """Fill memory with bytes that are NaN as floating point numbers; as integers they are huge."""
    raw.view(torch.uint8).fill_(0x7F)
    if raw.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raw.fill_(float("nan"))


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = (
    ctypes.py_object,
    (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
)


def allocate(size, stride, dtype, home):
    """Return a tensor of a device, with these strides, in new memory."""
    with torch.inference_mode(False):
        elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 1
        raw = torch.empty(elements, dtype=dtype)
    poison(raw)
    # `free` is the deleter of the description, and takes its address.
    address = _libc.malloc(ctypes.sizeof(_Struct) + 8)
    shape = address + ctypes.sizeof(_Struct)
    ctypes.c_int64.from_address(shape).value = raw.nbytes
    deleter = ctypes.cast(_libc.free, ctypes.c_void_p)
    struct = _Struct(raw.data_ptr(), 12, home.index, 1, 1, 8, 1, shape, None, 0, None, deleter)
    ctypes.memmove(address, ctypes.addressof(struct), ctypes.sizeof(_Struct))
    made = torch.utils.dlpack.from_dlpack(_new_capsule(address, b"dltensor", None))
    made.untyped_storage().memory = Memory(raw, home)  # torch keeps this object as long as the storage
    made = aten.view.dtype.redispatch(_CPU_KEYS, made, dtype)
    return aten.as_strided.default.redispatch(_CPU_KEYS, made, size, stride, 0)


def is_late(value):
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def home_of(value):
    return devices[value.device.index]


def raw_of(value):
    """Return a device's tensor as a tensor of the CPU, in the same memory; others unchanged."""
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    if not is_late(value):  # the value of a 0-d tensor of the CPU is an argument of the kernel
        return value.clone() if isinstance(value, torch.Tensor) else value
    raw = value.untyped_storage().memory.raw.view(torch.uint8).view(value.dtype)
    return raw.as_strided(value.size(), value.stride(), value.storage_offset())


_pinned = {}  # tensors in pinned memory, by address of the storage


def pin(value):
    """Return a copy of a CPU tensor in pinned memory, which a copy that doesn't block reads late."""
    copy = value.clone()
    _pinned[copy.untyped_storage().data_ptr()] = copy
    return copy


def download(value):
    """Return a copy in the host's memory, which is written late."""
    with torch.no_grad():
        return torch.full_like(value, 0, device="cpu").copy_(value, non_blocking=True)


def event_of(device):
    """Return an event that a device records after the work so far."""
    event = Event(devices[device.index])
    event.home.put(event.record)
    return event


def wait_for(event, device):
    devices[device.index].put(lambda: None, event)


def record_stream(value, stream):
    value.untyped_storage().memory.others.add(stream)


# ---- operations ----------------------------------------------------------------------------------------------

_READS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
other_strides = False  # whether kernels return their results with other strides than the CPU's


def run(func, *args, **kwargs):
    """Run an operation on tensors of a device: the kernel of all operations."""
    with torch.inference_mode(False), torch.no_grad():
        return _run(func, args, kwargs)


def _run(func, args, kwargs):
    if func is aten._copy_from.default:  # `copy_`, `to`
        return _copy(args[1], args[0], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    late = [value for value in tensors if is_late(value)]
    asked = kwargs.get("device")
    places = {home_of(value) for value in late} or {devices[asked.index or 0]}
    (home,) = places if len(places) == 1 else (None,)
    if home is None or any(not is_late(value) and value.dim() for value in tensors):
        where = sorted({str(value.device) for value in tensors})
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {where} in {func}")
    home.check()
    if func is aten.as_strided.default:
        return func.redispatch(_CPU_KEYS, *args, **kwargs)
    if func in (aten.empty.memory_format, aten.empty_strided.default):
        like = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
        return allocate(like.size(), like.stride(), like.dtype, home)
    if func.is_view:
        like = func(*tree_map(raw_of, args), **tree_map(raw_of, kwargs))
        return tree_map(functools.partial(_view_of, late[0]), like)
    returns = func._schema.returns
    if set(func.tags) & _READS or not all(isinstance(one.type, _TENSORS) for one in returns):
        home.wait(f"read by {func}")
        results = func(*tree_map(raw_of, args), **tree_map(raw_of, kwargs))
        return tree_map(functools.partial(_uploaded, home), results)
    is_in_place = all(one.alias_info is not None for one in returns)
    return (_start_in_place if is_in_place else _start)(home, func, args, kwargs)


_TENSORS = (torch.TensorType, torch.ListType)


def _view_of(base, like):
    if like.dtype != base.dtype:  # as one of all memory, which has the other type
        count = base.untyped_storage().nbytes() // base.element_size()
        base = aten.as_strided.default.redispatch(_CPU_KEYS, base, (count,), (1,), 0)
        base = aten.view.dtype.redispatch(_CPU_KEYS, base, like.dtype)
    layout = like.size(), like.stride(), like.storage_offset()
    return aten.as_strided.default.redispatch(_CPU_KEYS, base, *layout)


def _uploaded(home, value):
    """Return a copy on a device of a value that the host has read."""
    if not isinstance(value, torch.Tensor):
        return value
    made = allocate(value.size(), value.stride(), value.dtype, home)
    raw_of(made).copy_(value)
    return made


def _copy(target, source, non_blocking):
    """Copy between devices, or between a device and the host."""
    to, of = (raw_of(value) if is_late(value) else value for value in (target, source))
    if is_late(target) and is_late(source):
        home, other = home_of(target), home_of(source)
        if home is other:
            home.put(lambda: to.copy_(of))
            return target
        # As torch does with CUDA: the copy runs in the source's queue, and both queues wait for each other.
        free, copied = Event(home), Event(other)
        home.put(free.record)
        other.put(lambda: (to.copy_(of), copied.record()), free)
        home.put(lambda: None, copied)
    elif is_late(target):
        home = home_of(target)
        if non_blocking and source.untyped_storage().data_ptr() not in _pinned:
            if home.graph is not None:
                raise RuntimeError(
                    "operation not permitted when stream is capturing: a copy of pageable memory"
                )
            of = of.clone()  # the driver has read it when the function returns
        home.put(lambda: to.copy_(of))
        if not non_blocking:
            home.wait("upload")
    else:
        home_of(source).put(lambda: _write(to, of))
        if not non_blocking:
            home_of(source).wait("download")
    return target


def _write(target, source):
    with torch.inference_mode(target.is_inference()):
        target.copy_(source)


def _start(home, func, args, kwargs):
    """Queue a kernel, and return its results: new tensors, in which nothing is written yet."""
    raw_args, raw_kwargs = tree_map(raw_of, (args, kwargs))
    arguments = _arguments_of(home, raw_args, raw_kwargs)
    layouts = _layouts_of(func, raw_args, raw_kwargs)
    if layouts is None:  # they depend on the values
        home.wait(f"shapes of {func}")
        return tree_map(functools.partial(_uploaded, home), func(*raw_args, **raw_kwargs))
    made = tree_map(lambda one: allocate(*one.key, home) if isinstance(one, _Layout) else one, layouts)
    targets = [raw_of(value) for value in tree_leaves(made)]

    def kernel():
        late_args, late_kwargs = arguments()
        for target, value in zip(targets, tree_leaves(func(*late_args, **late_kwargs)), strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(value)

    home.put(kernel)
    return made


def _start_in_place(home, func, args, kwargs):
    """Queue a kernel that writes its arguments, and return those that it returns."""
    schema = func._schema.arguments
    named = {one.name: args[i] if i < len(args) else kwargs.get(one.name) for i, one in enumerate(schema)}
    written = [named[one.name] for one in schema if one.is_write]
    if len(written) == 1 and isinstance(written[0], torch.Tensor) and not written[0].numel():
        # Torch lets the kernel of `out=` choose the size.
        layout = _layouts_of(func, *tree_map(raw_of, (args, kwargs)))
        new = allocate(*layout.key, home)
        storage = new.untyped_storage()
        aten.set_.source_Storage_storage_offset.redispatch(
            _CPU_KEYS, written[0], storage, 0, new.size(), new.stride()
        )
    arguments = _arguments_of(home, *tree_map(raw_of, (args, kwargs)))

    def kernel():
        late_args, late_kwargs = arguments()
        func(*late_args, **late_kwargs)

    home.put(kernel)
    return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)


def _arguments_of(home, args, kwargs):
    """Return a function that returns the arguments when the kernel runs: generators as they are now."""
    if not any(isinstance(value, torch.Generator) for value in tree_leaves((args, kwargs))):
        return lambda: (args, kwargs)
    later = tree_map(lambda value: _generator_later(home, value), (args, kwargs))
    return lambda: tree_map(lambda value: value.make() if isinstance(value, _Later) else value, later)


@dataclasses.dataclass
class _Later:
    make: Any


def _generator_later(home, value):
    """For a generator, return what makes one with the CPU's numbers, where each micro-batch has a generator."""
    if not isinstance(value, torch.Generator):
        return value
    if value._cdata in unusable:
        raise RuntimeError("offset increment outside graph capture encountered unexpectedly")
    seed = value.initial_seed()
    seed_of = (lambda: seed) if home.graph is None else home.graph.seed_of(value)
    uses = int(value.get_state()[16:24].view(torch.int64))  # the number of values that it has drawn
    torch.rand(1, generator=value)
    return _Later(lambda: torch.Generator().manual_seed(_seed_of_use(seed_of(), uses)))


_hashed = {}  # by hash, the integers


def _hash_integers(*numbers):
    _hashed[made := random_draws.hash_integers(*numbers)] = numbers
    return made


def _seed_of_use(seed, uses):
    """Return the seed that the draw has on the CPU, `uses` micro-batches after that of a seed."""
    key, number = _hashed[seed]
    *step, micro_batch, replica = _hashed[key]
    return random_draws.hash_integers(random_draws.hash_integers(*step, micro_batch + uses, replica), number)


@dataclasses.dataclass(frozen=True)
class _Layout:
    key: tuple  # size, stride, dtype


_LAYOUT_IS_ASKED_FOR = {"new_empty_strided", "empty_like", "clone", "_to_copy"}
_layouts = {}  # by operation and description of the arguments


def _layouts_of(func, args, kwargs):
    """Return the `_Layout` of each result, from a run on zeros; None if that fails."""
    key = str((func, other_strides, tree_map(_description, (args, kwargs))))
    if key not in _layouts:
        zero_args, zero_kwargs = tree_map(_zeros_like, (args, kwargs))
        try:
            is_free = other_strides and func.overloadpacket.__name__ not in _LAYOUT_IS_ASKED_FOR
            results = func(*zero_args, **zero_kwargs)
            _layouts[key] = tree_map(functools.partial(_layout, is_free), results)
        except Exception:
            _layouts[key] = None
    return _layouts[key]


def _layout(is_free, value):
    if not isinstance(value, torch.Tensor):
        return value
    stride = value.stride()
    if is_free and value.dim() > 1 and value.is_floating_point():
        stride = torch.empty(value.size()[::-1], device="meta").permute(*range(value.dim())[::-1]).stride()
    return _Layout((value.size(), stride, value.dtype))


def _description(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.size()), value.stride(), value.dtype
    return "generator" if isinstance(value, torch.Generator) else repr(value)


def _zeros_like(value):
    if not isinstance(value, torch.Tensor):
        return torch.Generator() if isinstance(value, torch.Generator) else value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).zero_()


def _convolve_backward(gradient, x, weight, *more):
    *_, transposed, _, groups, _ = more
    bias = weight.shape[1] * groups if transposed else weight.shape[0]
    return run(aten.convolution_backward.default, gradient, x, weight, [bias], *more)


# ---- torch's side --------------------------------------------------------------------------------------------


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    used = False  # whether torch.accelerator finds the devices

    def is_available(self):
        return self.used

    def is_built(self):
        return True

    def has_primary_context(self, index):
        return self.used


class _Module:
    """torch.late"""

    def is_initialized(self):
        return True

    def is_available(self):
        return _hooks.used

    def current_device(self):
        return 0

    def device_count(self):
        return MOST if _hooks.used else 0

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass


_hooks = _Hooks()
_setup_privateuseone_for_python_backend(NAME, _Module(), _hooks)
_library = torch.library.Library("_", "IMPL")
_library.fallback(run, "PrivateUse1")
# Torch composes other kernels for a device type that is not its own: layer norm rounds differently then.
_kernels_library = torch.library.Library("aten", "IMPL")
_COMPOSED = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
for _name in torch._C._dispatch_get_all_op_names():
    if _has_kernel(_name, "CPU") and any(_has_kernel(_name, key) for key in _COMPOSED):
        _namespace, _, _operation = _name.partition("::")
        if _namespace == "aten":
            _packet, _, _overload = _operation.partition(".")
            _func = getattr(getattr(aten, _packet), _overload or "default")
            _kernels_library.impl(_name, functools.partial(run, _func), "PrivateUse1")


def _dropout_kernel(value, chance, generator):
    """Run the kernel that CPUs lack, with the bits of `native_dropout` there."""
    kept = torch.empty_like(value).bernoulli_(chance, generator=generator)
    return value * kept / chance, kept.to(torch.uint8)


def _flatten_weights(weights, *_):
    """Put weights into one block, matrices first."""
    block = allocate((sum(map(torch.numel, weights)),), (1,), weights[0].dtype, home_of(weights[0]))
    place = 0
    for weight in sorted(weights, key=torch.Tensor.dim, reverse=True):
        layout = block.untyped_storage(), place, weight.size(), weight.stride()
        aten.set_.source_Storage_storage_offset.redispatch(_CPU_KEYS, weight, *layout)
        place += weight.numel()
    return block


_kernels_library.impl("_fused_dropout", _dropout_kernel, "CPU")
_kernels_library.impl("_cudnn_rnn_flatten_weight", _flatten_weights, "PrivateUse1")
for _name, _function in (
    ("convolution_overrideable", functools.partial(run, aten.convolution.default)),
    ("convolution_backward_overrideable", _convolve_backward),
):
    _kernels_library.impl(_name, _function, "PrivateUse1")


@contextmanager
def late_devices(monkeypatch, seed=0, count=1):
    """Let Pando find `late:0`, ..., where it looks for GPUs ("cuda")."""
    reset(seed)

    def synchronize(device):
        devices[device.index].wait("synchronize")

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    monkeypatch.setattr(run_devices, "check_available", lambda kind, processes=1: None)
    monkeypatch.setattr(run_devices, "as_current_device", lambda device: nullcontext())
    monkeypatch.setattr(
        run_devices, "device_of", lambda kind: run_devices.CPU if kind == "cpu" else devices[0].device
    )
    monkeypatch.setattr(
        run_devices, "in_pinned_memory", lambda value, device: value if device.type == "cpu" else pin(value)
    )
    monkeypatch.setattr(run_devices, "download", download)
    monkeypatch.setattr(run_devices, "device_named", lambda name: torch.device(name.replace("cuda", NAME)))
    monkeypatch.setattr(run_devices, "accelerator_count", lambda: count)
    monkeypatch.setattr(run_devices, "event_of", event_of)
    monkeypatch.setattr(run_devices, "new_stream", lambda device: Stream(devices[device.index]))
    monkeypatch.setattr(run_devices, "current_stream", current_stream)
    monkeypatch.setattr(run_devices, "set_stream", set_stream)
    monkeypatch.setattr(run_devices, "record_stream", record_stream)
    monkeypatch.setattr(run_devices, "wait_for", wait_for)
    monkeypatch.setattr("popengine.run.recorder.timing_event", timing_event)
    monkeypatch.setattr(run_devices, "new_graph", Graph)
    for name in ("row_functions", "random_draws"):
        monkeypatch.setattr(f"popengine.run.{name}.new_generator", lambda device: torch.Generator())
    monkeypatch.setattr("popengine.run.row_functions.hash_integers", _hash_integers)
    monkeypatch.setattr(aten, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", is_late)
    _hooks.used = True
    try:
        yield devices
    finally:
        _hooks.used = False
        reset()
        _pinned.clear()
        _hashed.clear()
