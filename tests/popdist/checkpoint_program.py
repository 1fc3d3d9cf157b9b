"""A small training with all that a checkpoint has to keep; also a program, of which tests start several instances.

python checkpoint_program.py FOLDER CALLS [--loader MODE] [--every N] [--hold N] [--replicas N]
    leaves FOLDER/result-INSTANCE.pt
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

import popdist.poptorch
import poptorch
from poptorch.executor.executable_file import training_state

ROWS = 96


class Net(nn.Module):
    """Two stages with dropout and BatchNorm, whose running statistics differ from replica to replica."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, targets):
        with poptorch.Block("a"):
            x = self.dropout(self.norm(self.a(x)).relu())
        with poptorch.Block("b"):
            return nn.functional.mse_loss(self.b(x), targets)


def adamw(model):
    return poptorch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, loss_scaling=64.0)


def torchs_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Training:
    """Everything of one run, from a seed that may differ between a run and the one that goes on from it."""

    def __init__(self, opts, folder, seed=0, optimizer=adamw, mode=poptorch.DataLoaderMode.Sync, every=2):
        torch.manual_seed(seed)
        opts.deviceIterations(2).randomSeed(3).showCompilationProgressBar(False)
        opts.outputMode(poptorch.OutputMode.All).setExecutionStrategy(poptorch.PipelinedExecution("a", "b"))
        opts.Training.gradientAccumulation(3).setAutomaticLossScaling(True)
        opts._Popart.set("replicatedCollectivesSettings.mergeAllReduceCollectives", True)
        opts.TensorLocations.setOptimizerLocation(
            poptorch.TensorLocationSettings()
            .minElementsForReplicatedTensorSharding(4)
            .useReplicatedTensorSharding()
        )
        rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
        dataset = torch.utils.data.TensorDataset(rows, rows[:, :3].cos())
        self.model = Net()
        with torch.random.fork_rng():
            how = {"sharing_strategy": poptorch.SharingStrategy.Fork}
            how = {} if mode == poptorch.DataLoaderMode.Sync else {"async_options": how}
            self.loader = poptorch.DataLoader(opts, dataset, batch_size=2, shuffle=True, mode=mode, **how)
        self.optimizer = optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.trainer = poptorch.trainingModel(self.model, opts, self.optimizer)
        self.checkpoint = popdist.Checkpoint(folder, every=every)
        self.losses = []

    def restore(self):
        return self.checkpoint.restore(self.trainer, self.loader, schedule=self.schedule)

    def train(self, calls, on_call=lambda calls: None):
        """Up to so many calls, those before the checkpoint included."""
        while self.checkpoint.calls < calls:
            for batch in self.loader:
                self.losses.append(self.trainer(*batch) + torch.rand(()))  # the program's own random numbers
                self.schedule.step()
                self.trainer.setOptimizer(self.optimizer)
                self.checkpoint.step()
                on_call(self.checkpoint.calls)
                if self.checkpoint.calls == calls:
                    break
        self.checkpoint.wait()
        return self

    def result(self):
        state = training_state(self.trainer)
        self.loader.terminate()
        return {**state, "losses": self.losses}


def difference(one, other) -> str:
    """Where two results differ, to the last bit; empty: nowhere."""
    ones, others = (
        {keystr(path): leaf for path, leaf in tree_flatten_with_path(result)[0]} for result in (one, other)
    )

    def is_same(value, expected):
        are_tensors = isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor)
        return torch.equal(value, expected) if are_tensors else value == expected

    paths = ones.keys() | others.keys()
    return " ".join(path for path in paths if not is_same(ones.get(path), others.get(path)))


def main(words=None):
    """Train. Returns: the number of calls from which it went on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("calls", type=int)
    parser.add_argument("--loader", default="Sync")
    parser.add_argument("--every", type=int, default=2, help="calls from one checkpoint to the next")
    parser.add_argument("--replicas", type=int, help="in all processes; by default as the launcher says")
    parser.add_argument("--say", action="store_true", help="print each call")
    parser.add_argument(
        "--hold",
        type=int,
        help="wait for FOLDER/go after this call, with a complete checkpoint, to be killed",
    )
    flags = parser.parse_args(words and [str(word) for word in words])
    torch.set_num_threads(1)
    popdist.init()
    mode = poptorch.DataLoaderMode[flags.loader]
    options = popdist.poptorch.Options(total_replicas=flags.replicas)
    training = Training(options, flags.folder, mode=mode, every=flags.every)
    begun = training.restore()
    os.write(1, f"instance {popdist.getInstanceIndex()} begins at call {begun}\n".encode())

    def on_call(calls):
        if flags.say:
            print("call", calls, flush=True)
        if calls == flags.hold:
            training.checkpoint.wait()
            os.write(1, f"held in {os.getpid()}\n".encode())
            while not (flags.folder / "go").exists():
                time.sleep(0.01)

    training.train(flags.calls, on_call)
    if not training.trainer.isCompiled():  # restored after the last call: this instance has all of the state
        loader = training.loader
        training.trainer.compile(
            *next(iter(loader), None) or next(iter(loader))
        )  # an epoch may be at its end
    torch.save(training.result(), flags.folder / f"result-{popdist.getInstanceIndex()}.pt")
    popdist.synchronize()
    return begun


if __name__ == "__main__":
    main()
    os._exit(0)  # nothing is left to do, and gloo's threads may take a while
