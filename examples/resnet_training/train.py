"""Train a residual network, in one process or in several that poprun starts.

python3 train.py --config resnet8
poprun --num-instances 2 --num-replicas 4 python3 train.py --config resnet20
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkpoints
import flags as command_line
import parts
from batches import Dealing, Waits
from common.logs import say
from images import as_they_are
from logbook import Logbook, averages
from schedules import learning_rate, loss_scaling
from tqdm import tqdm
from validate import Validation

import poptorch
from popdist import collectives


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Returns the rows of training.csv."""
    flags = command_line.parse(words)
    start = None
    if flags.checkpoint_input_dir is not None:
        start = checkpoints.newest(flags.checkpoint_input_dir)
    return Training(flags, start).run()


class Training:
    """One training.

    Args:
        start: the checkpoint to go on from
    """

    def __init__(self, flags: argparse.Namespace, start: Path | None = None) -> None:
        self.flags, self.layout = flags, parts.layout_of(flags)
        self.is_first = self.layout.instance == 0
        found = checkpoints.load(start) if start is not None else {"epoch": 0}
        self.epoch = found["epoch"]  # done
        if flags.checkpoint_output_dir is not None and start is None:
            checkpoints.refuse_folder_in_use(flags.checkpoint_output_dir)
        self.data = parts.dataset(flags, self.layout, "train")
        self.model = parts.model_of(flags, self.data)
        self.scaling = loss_scaling(flags, self.epoch)
        self.optimizer = parts.optimizer_of(flags, self.model, self.scaling)
        if start is not None:
            self.model.load_state_dict(found["model_state_dict"])
            self.optimizer.load_state_dict(found["optimizer_state_dict"])
        self.options = parts.training_options(flags, self.layout)
        self.loader = self._loader()
        self.logbook = Logbook(flags, self.layout)

    def run(self) -> list[dict[str, Any]]:
        flags, layout, ipus = self.flags, self.layout, parts.ipus_of(self.flags)
        say(f"Total replicas: {layout.replicas}")
        say(f"Global batch size: {layout.global_batch}")
        say(f"Number of IPUs required: {layout.replicas * ipus}")
        if self.is_first:
            parts.announce(self.model, self.data, layout, ipus)
        self.trainer = poptorch.trainingModel(self.model, self.options, self.optimizer)
        self.trainer.compile(*parts.blank(self.data, layout.call * layout.local // layout.replicas))
        if flags.compile_only:
            say("The model is compiled, and --compile-only asks for no more")
            return []
        self.validation = Validation(self.model, flags, layout) if flags.validation_mode != "none" else None
        while self.epoch < flags.epoch:
            say(f"Epoch {self.epoch + 1}/{flags.epoch}")
            self._train_epoch()
            if flags.profile:
                break
            self._end_epoch()
        self._finish()
        return self.logbook.rows

    # ---- an epoch ----------------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        flags, calls = self.flags, len(self.loader)
        means: list[list[float]] = []  # of each call, over this instance's replicas
        waits, began = Waits(self.loader), time.perf_counter()
        bar = tqdm(total=calls, disable=flags.disable_progress_bar or not self.is_first)
        every = max(1, calls // flags.logs_per_epoch)
        with bar:
            for call, (images, labels) in enumerate(waits):
                rate = self._set_rates(self.epoch + call / calls, 1 / calls)
                outputs = self.trainer(images, labels)
                micro_batches = self.layout.accumulation * self.layout.iterations
                means.append([float(value.double().mean()) / micro_batches for value in outputs])
                self._check(means[-1][0], call)
                text = f"Loss:{means[-1][0]:.4f} | Accuracy:{100 * means[-1][1]:.2f}%"
                bar.set_description(text, refresh=False)
                bar.update()
                if flags.disable_progress_bar:
                    say(f"Step {call + 1}/{calls} {text}")
                if (call + 1) % every == 0:
                    rates = {"learning_rate": rate, "loss_scaling": self.scaling}
                    speed = (call + 1) * self.layout.call / (time.perf_counter() - began)
                    done = self.epoch + (call + 1) / calls
                    self.logbook.add(done, self.epoch * calls + call + 1, means, rates, speed)
                if flags.profile:
                    say(f"--profile ends after one call: see {flags.profile_dir}")
                    return
        self.epoch += 1
        seconds = collectives.all_reduce(time.perf_counter() - began, "max")
        waited = collectives.all_reduce(waits.seconds / (time.perf_counter() - began), "max")
        loss, accuracy, *_ = averages(means)
        self.loss, self.accuracy = loss, accuracy
        say(f"Epoch {self.epoch}")
        say(f"loss: {loss:.4f},")
        say(f"accuracy: {100 * accuracy:.2f} %")
        say(f"throughput: {calls * self.layout.call / seconds:.1f} samples/sec")
        say(f"waiting for data: {100 * waited:.1f} % of the time")

    def _set_rates(self, done: float, call: float) -> float:
        rate, scaling = learning_rate(self.flags, done, call), loss_scaling(self.flags, int(done + 1e-9))
        if any(group["lr"] != rate for group in self.optimizer.param_groups) or scaling != self.scaling:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.loss_scaling = self.scaling = scaling
            self.trainer.setOptimizer(self.optimizer)
        return rate

    def _check(self, loss: float, call: int) -> None:
        if not math.isfinite(loss):
            raise SystemExit(
                f"the loss is {loss} at call {call + 1} of epoch {self.epoch + 1}, with loss scale {self.scaling:g}\n"
                "  fix: a smaller --loss-scaling, --auto-loss-scaling, or a lower --lr"
            )

    def _end_epoch(self) -> None:
        """Checkpoint and validation, where it is their turn."""
        flags, is_last = self.flags, self.epoch == self.flags.epoch
        self.trainer.averageRunningStatistics()  # each replica has seen its own rows
        if flags.validation_mode == "during" and (self.epoch % flags.validation_frequency == 0 or is_last):
            self._validate("Validation Accuracy")
        if flags.checkpoint_output_dir is not None and (
            self.epoch % flags.checkpoint_save_freq == 0 or is_last
        ):
            self._save()
        self.logbook.write()

    def _finish(self) -> None:
        flags = self.flags
        if flags.weight_avg_strategy != "none" and not flags.profile:
            found = checkpoints.all_in(flags.checkpoint_output_dir)
            found = found if flags.weight_avg_N < 0 else found[-flags.weight_avg_N :]
            self.model.load_state_dict(
                checkpoints.averaged(found, flags.weight_avg_strategy, flags.weight_avg_exp_decay)
            )
            self.trainer.copyWeightsToDevice()
            self._save("average")
        if flags.validation_mode != "none" and not flags.profile:
            self._validate("Accuracy on test set")
        self.trainer.destroy()
        self.loader.terminate()

    # ---- what is written ---------------------------------------------------------------------------------

    def _validate(self, name: str) -> None:
        assert self.validation is not None
        accuracy = self.validation.accuracy()
        say(f"{name}: {100 * accuracy:.2f}%")
        self.logbook.add_validation(self.epoch, accuracy)

    def _save(self, name: int | str | None = None) -> None:
        if self.is_first:
            path = checkpoints.path_of(self.flags, self.epoch if name is None else name)
            content = {
                "epoch": self.epoch,
                "model_state_dict": self.model.state_dict(),
                "optimizer_state_dict": self.optimizer.state_dict(),
                "loss": self.loss,
                "train_accuracy": 100 * self.accuracy,
                "args": vars(self.flags),
            }
            checkpoints.save(path, content)
            say(f"Checkpoint saved to: {path}")

    def _loader(self) -> poptorch.DataLoader:
        flags, layout = self.flags, self.layout
        sampler = Dealing(len(self.data), layout, flags.seed, self.epoch, flags.epoch_calls)
        mode = poptorch.DataLoaderMode.Async if flags.dataloader_worker else poptorch.DataLoaderMode.Sync
        if flags.dataloader_rebatch_size:
            mode = poptorch.DataLoaderMode.AsyncRebatched
        return poptorch.DataLoader(
            self.options,
            self.data,
            batch_size=layout.micro_batch,
            num_workers=flags.dataloader_worker,
            mode=mode,
            rebatched_worker_size=flags.dataloader_rebatch_size,
            auto_distributed_partitioning=False,  # the sampler has this instance's rows
            sampler=sampler,
            collate_fn=as_they_are,
        )


if __name__ == "__main__":
    main()
