"""Ways to train a task: ours, and what a user would pick instead.

Each `setup(rank, task, ...)` runs in a process of its own (see `harness.py`) and returns a unit of work:
`task.updates` weight updates. A unit returns the loss of its last micro-batch: all start alike, so all
should return the same.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from task import Task  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

if TYPE_CHECKING:
    import poptorch  # at run time by ours alone: the others measure programs without it

Unit = Callable[[], float]
Placement = Sequence[tuple[int, str]]  # of each stage: its ipu, and its blocks with spaces between


def ours(
    rank: int,
    task: Task,
    placement: Placement,
    replicas: int = 1,
    backend: str | None = None,
    threads: int | None = None,
    layout: str | None = None,
) -> Unit:
    """Pando: a pipeline of these stages; replicas share out the micro-batches of an update.

    Args: threads: how many cores work; by default all
          layout:  of images in memory (`Options.memoryFormat`)
    """
    import poptorch

    if threads is not None:
        torch.set_num_threads(threads)
    options = poptorch.Options().replicationFactor(replicas)
    if backend is not None:
        options.compiler(backend)
    if layout is not None:
        options.memoryFormat(layout)
    options.setExecutionStrategy(poptorch.PipelinedExecution(*stages(placement)))
    training_model, inputs = executor(task, options), task.inputs()

    def unit() -> float:
        return training_model(*inputs)[-1].flatten()[-1].item()  # OutputMode.Final: of the last micro-batch

    return unit


def stages(placement: Placement) -> list[poptorch.Stage]:
    import poptorch

    return [poptorch.Stage(*blocks.split()).ipu(ipu) for ipu, blocks in placement]


def executor(task: Task, options: poptorch.Options) -> poptorch.PoplarExecutor:
    """The task's model, its blocks marked, with the task's batch in the options."""
    import poptorch

    model = task.model()
    for name, part in task.blocks(model).items():
        poptorch.BeginBlock(part, name)
    options.deviceIterations(task.updates).broadcastBuffers(False).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(task.micro_batches // options.replication_factor)
    return poptorch.trainingModel(model, options, task.optimizer(model.parameters()))


def plain(rank: int, task: Task, threads: int, layout: str = "preserve") -> Unit:
    """Plain PyTorch: forward and backward of one micro-batch after another.

    Args: layout: of images in memory: "preserve", "channels_last", or "best": the faster of both, as measured here
    """
    torch.set_num_threads(threads)

    def made(layout: str) -> Unit:
        model = task.model()
        if layout == "channels_last":
            model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        optimizer = task.optimizer(model.parameters())
        return _loop(task, model, list(model.parameters()), optimizer.zero_grad, optimizer.step)

    if layout != "best":
        return made(layout)
    seconds = {}
    for name in ("preserve", "channels_last"):
        unit = made(name)
        unit()
        start = time.perf_counter()
        unit()
        seconds[name] = time.perf_counter() - start
    return made(min(seconds, key=seconds.__getitem__))


def large(rank: int, task: Task, threads: int, layout: str = "preserve") -> Unit:
    """Plain PyTorch with all of an update as one batch."""
    whole = replace(task, rows=task.update_rows, micro_batches=1)
    return plain(rank, whole, threads, layout=layout)


def compiled(rank: int, task: Task, threads: int) -> Unit:
    """The same loop with forward, backward and the weight update compiled by torch.compile."""
    torch.set_num_threads(threads)
    model = task.model()
    parameters = list(model.parameters())
    optimizer = task.optimizer(parameters)
    fast, step = torch.compile(model), torch.compile(lambda: optimizer.step())
    return _loop(task, fast, parameters, optimizer.zero_grad, step)


def _loop(
    task: Task,
    model: Callable[..., tuple[Tensor, ...]],
    parameters: list[nn.Parameter],
    zero: Callable[[], None],
    step: Callable[[], object],
) -> Unit:
    work = task.batches()

    def unit() -> float:
        loss = torch.zeros(())
        for batch in work:
            zero()
            for micro_batch in zip(*(part.split(task.rows) for part in batch), strict=True):
                loss = model(*micro_batch)[-1]
                loss.backward()
            _divide(parameters, task.micro_batches)
            step()
        return loss.item()

    return unit


def _divide(parameters: Sequence[nn.Parameter], by: int) -> None:
    torch._foreach_div_([p.grad for p in parameters if p.grad is not None], by)


def data_parallel(
    rank: int,
    task: Task,
    port: int,
    processes: int = 2,
    shares_state: bool = False,
    compiles: bool = False,
    after: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
) -> Unit:
    """DistributedDataParallel: gloo processes of one thread; each takes its share of an update's micro-batches, and
    they meet at the last of them.

    Args: shares_state: with ZeroRedundancyOptimizer
          compiles:     forward and backward are compiled by torch.compile
          after:        is shown the optimizer after each unit
    """
    from torch.nn.parallel import DistributedDataParallel

    meet(rank, port, processes)
    model = task.model()
    replica = DistributedDataParallel(cast("nn.Module", torch.compile(model)) if compiles else model)
    optimizer = task.optimizer(model.parameters())
    if shares_state:
        optimizer = _zero_redundancy(optimizer, model)
    count = task.micro_batches // processes
    work = shares(task, processes, rank)

    def unit() -> float:
        loss = torch.zeros(())
        for batch in work:
            optimizer.zero_grad()
            micro_batches = list(zip(*(part.split(task.rows) for part in batch), strict=True))
            for number, micro_batch in enumerate(micro_batches):
                with contextlib.nullcontext() if number == count - 1 else replica.no_sync():
                    loss = replica(*micro_batch)[-1]
                    loss.backward()
            _divide(list(model.parameters()), count)  # DDP has made the mean of the processes already
            optimizer.step()
        after(optimizer)
        return loss.item()

    return unit


def shares(task: Task, processes: int, rank: int) -> list[tuple[Tensor, ...]]:
    """The rows of each weight update that one of several processes takes."""
    return [tuple(part.chunk(processes)[rank] for part in batch) for batch in task.batches()]


def _zero_redundancy(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind, known = type(optimizer), inspect.signature(type(optimizer)).parameters
    rates = {name: value for name, value in optimizer.defaults.items() if name in known}
    return ZeroRedundancyOptimizer(model.parameters(), kind, **rates)


def pipelining(rank: int, task: Task, port: int) -> Unit:
    """torch.distributed.pipelining: two gloo processes of one thread, one-forward-one-backward."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    meet(rank, port, 2)
    halves = task.halves(task.model())
    part = halves[rank]
    # A tied weight is in both processes: they add up its gradients, as training frameworks do.
    others = {id(parameter) for parameter in halves[1 - rank].parameters()}
    tied = [parameter for parameter in part.parameters() if id(parameter) in others]
    stage = PipelineStage(part, stage_index=rank, num_stages=2, device=torch.device("cpu"))
    # The schedule divides the summed gradients by the number of micro-batches itself (scale_grads).
    schedule = Schedule1F1B(stage, n_microbatches=task.micro_batches, loss_fn=task.loss)
    optimizer = task.optimizer(part.parameters())
    work = task.batches()

    def unit() -> float:
        losses: list[Tensor] = []
        for batch in work:
            optimizer.zero_grad()
            losses.clear()
            if rank == 0:
                schedule.step(batch[0], return_outputs=False)
            else:
                schedule.step(target=batch[-1], losses=losses, return_outputs=False)
            for parameter in tied:
                dist.all_reduce(cast(Tensor, parameter.grad))
            optimizer.step()
        return losses[-1].item() if losses else 0.0

    return unit


def meet(rank: int, port: int, processes: int) -> None:
    """Join the gloo processes of a contender, each of one thread."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=processes)
