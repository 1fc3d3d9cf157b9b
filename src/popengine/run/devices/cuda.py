"""GPUs through torch.cuda: an ipu is three streams of one. The one file that tells torch.cuda what to do.

One stream computes, one brings inputs, one takes results away, so that transfers and kernels run at the same
time. The host's side of a transfer is pinned memory: else the host would wait for it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import Error, UnrecoverableError
from .base import Device


def devices() -> Callable[[int], Device]:
    """Ipu i is on GPU i modulo their number.

    Raises:
        Error: there is no GPU
    """
    check()
    count = torch.cuda.device_count()
    return lambda ipu: Cuda(ipu % count)


def check() -> None:
    """Raises Error, unless there is a GPU that torch can use."""
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        why = (
            "torch sees no GPU and no driver" if built else f"torch {torch.__version__} is built without CUDA"
        )
        raise Error(
            f'the device is "cuda", but {why}\n'
            "  fix: run where there is an NVIDIA GPU, with a build of torch for CUDA (pytorch.org); or choose the"
            ' CPU: options.device("cpu"), POPTORCH_DEVICE=cpu'
        )


class Cuda(Device):
    """An ipu on a GPU."""

    is_remote = True
    is_serial = True
    has_graphs = True

    def __init__(self, index: int) -> None:
        self.place = torch.device("cuda", index)
        self._compute, self._up, self._down = (self._stream() for _ in range(3))

    # What a test puts something else in place of, where there is no GPU.

    def _stream(self) -> Any:
        return torch.cuda.Stream(self.place)

    def _on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def _keep(self, value: Tensor, stream: Any) -> None:
        """The memory of a value is not used again before what the stream has been told by then."""
        value.record_stream(stream)

    # ---- memory ------------------------------------------------------------------------------------------

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def on_host(self, value: Tensor) -> Tensor:
        value = value.cpu()  # whoever gives a GPU's tensors gets them copied
        return value if value.is_pinned() or not value.numel() else value.pin_memory()

    def upload(self, value: Tensor) -> Tensor:
        with self._on(self._up):
            there = torch.empty_like(value, device=self.place).copy_(value, non_blocking=True)
        self._compute.wait_stream(self._up)
        self._keep(there, self._compute)  # its memory is the copying stream's
        return there

    def download(self, target: Tensor, value: Tensor) -> None:
        value = value.to(target.dtype)  # here, as the copy could not be left to itself otherwise
        self._down.wait_stream(self._compute)
        self._keep(value, self._down)
        with self._on(self._down):
            target.copy_(value, non_blocking=True)

    def fetch(self, value: Tensor) -> Tensor:
        return value.cpu()

    # ---- order -------------------------------------------------------------------------------------------

    def running(self) -> Any:
        return self._on(self._compute)

    def record_event(self) -> Any:
        return self._compute.record_event()

    def wait(self, event: Any) -> None:
        self._compute.wait_event(event)

    def adopt(self, value: Tensor) -> Tensor:
        if value.device == self.place:
            self._keep(value, self._compute)
            return value
        if value.is_cpu:
            return value
        here = value.to(self.place, non_blocking=True)
        # torch copies between GPUs on the current stream of the source, which waits for ours and makes ours wait.
        self._keep(value, torch.cuda.current_stream(value.device))
        return here

    def await_downloads(self) -> None:
        self._compute.wait_stream(self._down)
        self._up.wait_stream(self._down)

    def settle(self) -> None:
        try:
            for stream in (self._up, self._compute, self._down):
                stream.synchronize()
        except RuntimeError as error:
            raise UnrecoverableError(
                f"GPU {self.place.index} failed while it ran this call: {error}\n"
                "  why: kernels run after they were started, so the line that is at fault is not known; an index"
                " out of range does this, such as a class label\n"
                "  fix: POPTORCH_DEVICE=cpu runs the same program on the CPU and names the line. The GPU can't be"
                " used again in this process"
            ) from error

    # ---- graphs ------------------------------------------------------------------------------------------

    def graph(self, generators: Sequence[torch.Generator]) -> CudaGraph:
        return CudaGraph(self._compute, generators)

    def fork(self, event: Any) -> None:
        for stream in (self._compute, self._up, self._down):
            stream.wait_event(event)

    def join(self) -> Any:
        self._compute.wait_stream(self._up)
        self._compute.wait_stream(self._down)
        return self.record_event()


class CudaGraph:
    """A CUDA graph of what is started on a stream, and on those that wait for it."""

    def __init__(self, stream: Any, generators: Sequence[torch.Generator]) -> None:
        self._stream, self._graph = stream, torch.cuda.CUDAGraph()
        self._generators = list(generators)  # the graph reads their seeds at each replay
        for generator in self._generators:
            self._graph.register_generator_state(generator)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        gc.collect()  # garbage that is freed meanwhile would be noted down as well
        torch.cuda.synchronize(self._stream.device)
        with torch.cuda.stream(self._stream):
            # Only this thread is held to what a capture allows: data loaders of the user's pin memory meanwhile.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                self._abandon()
                raise
            self._graph.capture_end()

    def _abandon(self) -> None:
        """End a capture that has failed. Where torch can't end it, its allocator still has to be told: else it
        would put off for ever what it does with memory that several streams have used."""
        with contextlib.suppress(RuntimeError):
            self._graph.capture_end()
            return
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._stream.device.index, self._graph.pool())

    def replay(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()
