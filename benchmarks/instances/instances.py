"""What takes part: instances of ours, the processes of torch.distributed, and the sum of gradients alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import ways  # pyright: ignore[reportMissingImports]
from task import Task  # pyright: ignore[reportMissingImports]

SUMS = 5  # in a unit of work


def ours(rank: int, task: Task, port: int, processes: int, shares_state: bool = False) -> ways.Unit:
    """An instance with one replica, which trains with the others on its share of the micro-batches."""
    import poptorch

    options = _met(rank, port, processes)
    location = poptorch.TensorLocationSettings().useReplicatedTensorSharding(shares_state)
    options.TensorLocations.setOptimizerLocation(location)
    options.deviceIterations(task.updates).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(task.micro_batches // processes)
    model = task.model()
    trainer: Any = poptorch.trainingModel(model, options, task.optimizer(model.parameters()))
    inputs = [torch.cat(parts) for parts in zip(*ways.shares(task, processes, rank), strict=True)]
    told = Told("Pando, shared state" if shares_state else "Pando", rank)

    def unit() -> float:
        loss = trainer(*inputs)[-1].flatten()[-1].item()
        states = trainer._plans.state.optimizer_states().values()
        told(sum(value.nbytes for state in states for value in state.values()))
        return loss

    return unit


def rivals(rank: int, task: Task, port: int, processes: int, shares_state: bool = False) -> ways.Unit:
    """DistributedDataParallel, and with ZeroRedundancyOptimizer where the state is shared out."""
    told = Told("DDP + ZeroRedundancyOptimizer" if shares_state else "DDP", rank)
    return ways.data_parallel(rank, task, port, processes, shares_state, lambda found: told(state_of(found)))


def state_of(optimizer: Any) -> int:
    """Bytes of a torch optimizer's state in this process."""
    here = getattr(optimizer, "optim", optimizer)  # what ZeroRedundancyOptimizer updates by itself
    return sum(value.nbytes for state in here.state.values() for value in state.values() if value is not None)


@dataclass
class Told:
    """Prints once how much state a process has."""

    name: str
    rank: int
    is_done: bool = False

    def __call__(self, size: int) -> None:
        if not self.is_done:
            print(f"optimizer state of {self.name}, process {self.rank}: {size / 1e6:.1f} MB", flush=True)
        self.is_done = True


def our_sum(rank: int, elements: int, port: int, processes: int) -> ways.Unit:
    """Our sum of so many float32 gradients."""
    _met(rank, port, processes)
    from popengine.run.instances.all_reduce import AllReduce
    from popengine.run.instances.connections import Tag
    from popengine.run.instances.process_group import group_of_size

    group = group_of_size(processes)
    group.barrier("the sums")
    sums, value = AllReduce(group, Tag.SUMS), torch.ones(elements)

    def unit() -> float:
        value.fill_(1)
        for _ in range(SUMS):
            sums.all_reduce([value])
        return value[-1].item()

    return unit


def all_reduce(rank: int, elements: int, port: int, processes: int) -> ways.Unit:
    """The same by torch.distributed.all_reduce."""
    import torch.distributed as dist

    ways.meet(rank, port, processes)
    value = torch.ones(elements)

    def unit() -> float:
        value.fill_(1)
        for _ in range(SUMS):
            dist.all_reduce(value)
        return value[-1].item()

    return unit


def _met(rank: int, port: int, processes: int) -> Any:
    """The options of an instance that has met the others."""
    from popengine.environment import Launch

    torch.set_num_threads(1)
    launch = Launch(processes, 1, 1, rank, rank, processes, rank)
    os.environ.update(
        launch.variables(), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    import popdist.poptorch

    popdist.init()
    return popdist.poptorch.Options()
