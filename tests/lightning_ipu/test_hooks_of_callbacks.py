"""Hooks see the weights, counters and settings that they see on the CPU, or the program is refused with its line."""

import hashlib

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning_models import Classifier, differing, loader, made, trainer, weights
from torch import nn

# In these hooks a warning says that the update has run, and that there are no gradients.
AFTER_THE_UPDATE = {"on_before_backward", "on_after_backward", "on_before_optimizer_step"}
HOOKS = sorted(
    name
    for name in vars(pl.Callback)
    if name.startswith("on_") and "checkpoint" not in name and "exception" not in name
)


class Watching(pl.Callback):
    """Keeps what each hook sees: the weights, the step, the epoch and the accumulation."""

    def __init__(self):
        self.seen = []


def _watching(name):
    def hook(self, trainer, module, *args):
        text = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
        state = hashlib.sha256(text).hexdigest() if name not in AFTER_THE_UPDATE else ""
        self.seen.append(
            (name, trainer.global_step, trainer.current_epoch, trainer.accumulate_grad_batches, state)
        )

    return hook


for _name in HOOKS:
    setattr(Watching, _name, _watching(_name))


@pytest.fixture(scope="module")
def seen():
    """What hooks see, by accelerator."""
    found = {}
    for accelerator in ("ipu", "cpu"):
        watching = Watching()
        run = trainer(accelerator, callbacks=[watching], max_epochs=2, num_sanity_val_steps=1)
        run.fit(made(), loader(), loader())
        found[accelerator] = watching.seen
    return found


@pytest.mark.filterwarnings("ignore:.*runs after the update")
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_sees_what_it_sees_on_the_cpu(seen, hook):
    one, other = ([entry for entry in seen[name] if entry[0] == hook] for name in ("ipu", "cpu"))
    assert one == other


class ReadsAccumulation(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.trainer.accumulate_grad_batches

    def on_train_batch_start(self, batch, batch_idx):
        self.read = self.trainer.accumulate_grad_batches


def test_the_program_reads_the_accumulation_that_it_has_set():
    found = {}
    for accelerator in ("ipu", "cpu"):
        module = made(ReadsAccumulation)
        run = trainer(accelerator, accumulate_grad_batches=4)
        run.fit(module, loader())
        assert (module.read, run.accumulate_grad_batches, run.global_step) == (4, 4, 4)
        found[accelerator] = weights(module)
    assert differing(found["ipu"], found["cpu"]) == []


class SetsAccumulation(Classifier):
    def on_train_epoch_start(self):
        self.trainer.accumulate_grad_batches = 1 + self.current_epoch


class StepsApart(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        if self.steps(batch_idx):
            optimizer.step()

    def steps(self, batch_idx):
        return True


class SkipsSteps(StepsApart):
    def steps(self, batch_idx):
        return batch_idx % 2 == 0


class WritesBeforeZeroGrad(Classifier):
    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            self.last.bias.clamp_(-0.1, 0.1)


def test_a_step_apart_from_its_closure_trains_as_on_the_cpu():
    found = {}
    for accelerator in ("ipu", "cpu"):
        module = made(StepsApart)
        trainer(accelerator).fit(module, loader())
        found[accelerator] = weights(module)
    assert differing(found["ipu"], found["cpu"]) == []


class Normed(Classifier):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(self.first, nn.BatchNorm1d(6))


@pytest.mark.parametrize(
    ("kind", "callbacks", "words"),
    [
        (
            SkipsSteps,
            [],
            r"test_hooks_of_callbacks\.py:\d+: `optimizer_step` calls the closure and skips `optimizer\.step`",
        ),
        (SetsAccumulation, [], "does not support `accumulate_grad_batches` changing"),
        (WritesBeforeZeroGrad, [], "`on_before_zero_grad` writes into parameters"),
        (
            Normed,
            [StochasticWeightAveraging(0.1, 2)],
            "the statistics of BatchNorm in an epoch without backward",
        ),
    ],
)
def test_what_can_not_be_right_is_refused(kind, callbacks, words):
    with pytest.raises(Exception, match=words):
        trainer(callbacks=callbacks, max_epochs=3).fit(made(kind), loader())
    trainer().fit(made(), loader())  # nothing is left of it


def test_weights_that_are_averaged_over_epochs_are_those_of_the_cpu():
    found = {}
    for accelerator in ("ipu", "cpu"):
        module = made()
        trainer(accelerator, callbacks=[StochasticWeightAveraging(0.05, 2)], max_epochs=4).fit(
            module, loader()
        )
        found[accelerator] = weights(module)
    assert differing(found["ipu"], found["cpu"]) == []
