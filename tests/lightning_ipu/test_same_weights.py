"""The weights after a fit are those of Lightning on the CPU, bit for bit."""

from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EMAWeightAveraging
from lightning_models import Classifier, assert_fits_as_on_the_cpu, differing, loader, made, trainer, weights
from torch.nn import functional

import poptorch

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def fitted(accelerator, *, make=made, data=loader, ckpt_path=None, optimizer=OPTIMIZERS["adam"], **more):
    scheduler = more.pop("scheduler", None)
    module = make(optimizer=optimizer, scheduler=scheduler)
    run = trainer(accelerator, max_epochs=more.pop("max_epochs", 2), **more)
    run.fit(module, data(), data(), ckpt_path=ckpt_path)
    return module, run


def same(**more):
    module, run = fitted("ipu", **more)
    twin, expected = fitted("cpu", **more)
    assert differing(weights(module), weights(twin)) == []
    assert run.global_step == expected.global_step
    return module


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_of_each_optimizer_plain_and_accumulated(name, accumulation):
    start = weights(made())
    module = same(optimizer=OPTIMIZERS[name], accumulate_grad_batches=accumulation)
    assert len(differing(weights(module), start)) == len(start)


def test_a_validation_between_epochs_changes_no_mode(caplog):
    fitted("ipu", max_epochs=3)
    assert [m for m in caplog.messages if "mode" in m] == []


def test_with_a_scheduler_that_moves_each_step():
    same(scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_with_clipped_gradients(algorithm):
    clipping = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    clipped = same(optimizer=OPTIMIZERS["sgd"], accumulate_grad_batches=2, **clipping)
    free, _ = fitted("ipu", optimizer=OPTIMIZERS["sgd"], accumulate_grad_batches=2)
    assert differing(weights(clipped), weights(free))  # else nothing is tested


def test_with_averaged_weights_that_a_callback_keeps():
    averaging = {"callbacks": lambda: [EMAWeightAveraging(decay=0.5)]}
    assert_fits_as_on_the_cpu(optimizer=OPTIMIZERS["adam"], max_epochs=2, **averaging)


@pytest.fixture(scope="module")
def unbroken():
    module, _ = fitted("cpu", max_epochs=4)
    return weights(module)


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Checkpoints of half of the training, by accelerator."""
    found = {name: tmp_path_factory.mktemp("halves") / f"{name}.ckpt" for name in ("ipu", "cpu")}
    for name, path in found.items():
        fitted(name, max_epochs=2)[1].save_checkpoint(path)
    return found


@pytest.mark.parametrize(("first", "second"), [("ipu", "ipu"), ("ipu", "cpu"), ("cpu", "ipu")])
def test_resumed_from_a_checkpoint_of_either(unbroken, halves, first, second):
    resumed, run = fitted(second, max_epochs=4, ckpt_path=halves[first])
    assert run.current_epoch == 4
    assert differing(weights(resumed), unbroken) == []


def test_a_torch_optimizers_checkpoint_goes_on_in_a_poptorch_optimizer(unbroken, halves):
    ours = {"optimizer": lambda p: poptorch.optim.Adam(p, lr=0.01), "max_epochs": 4}
    resumed, _ = fitted("ipu", ckpt_path=halves["cpu"], **ours)
    assert differing(weights(resumed), unbroken) == []

    ours["optimizer"] = lambda p: poptorch.optim.SGD(p, lr=0.01, momentum=0.9)
    with pytest.raises(RuntimeError, match="SGD keeps momentum_buffer"):
        fitted("ipu", ckpt_path=halves["cpu"], **ours)


@pytest.mark.parametrize("validated", [False, True])
def test_with_a_shuffled_loader_after_seed_everything(monkeypatch, validated):
    found = {}
    for accelerator in ("ipu", "cpu"):
        monkeypatch.setenv("PL_GLOBAL_SEED", "")
        seed_everything(7, verbose=False)
        module, rows = Classifier(optimizer=OPTIMIZERS["sgd"]), []
        module.on_train_batch_start = lambda batch, index, rows=rows: rows.append(batch[0].clone())
        data = [loader(shuffle=True), loader()] if validated else [loader(shuffle=True)]
        trainer(accelerator, max_epochs=2).fit(module, *data)
        found[accelerator] = {**weights(module), "rows": torch.cat(rows)}
    assert differing(found["ipu"], found["cpu"]) == []


class Freezing(Callback):
    """Sets `requires_grad` of the first layer at the beginning of some epochs, and again within them."""

    def __init__(self, trained):
        self.trained = trained

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.first.requires_grad_(self.trained[trainer.current_epoch])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 9:
            pl_module.last.bias.requires_grad_(not pl_module.last.bias.requires_grad)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("trained", [(True, False, True), (False, True, False)])
def test_parameters_that_are_frozen_or_trained_again_during_the_fit(name, trained):
    freezing = [Freezing(trained)]
    assert_fits_as_on_the_cpu(optimizer=OPTIMIZERS[name], max_epochs=3, callbacks=freezing)


class WithBackbone(Classifier):
    def __init__(self, **more):
        super().__init__(**more)
        self.backbone = self.first

    def configure_optimizers(self):
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_backbone_that_joins_the_optimizer_during_the_fit(name):
    def joining():
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=0.05)]

    assert_fits_as_on_the_cpu(WithBackbone, optimizer=OPTIMIZERS[name], max_epochs=4, callbacks=joining)


class Dropping(Classifier):
    def forward(self, x):
        return self.last(functional.dropout(torch.tanh(self.first(x)), 0.5, self.training))


@pytest.mark.parametrize(
    "optimizer",
    [OPTIMIZERS["adam"], lambda p: poptorch.optim.AdamW(p, lr=0.01)],
)
def test_a_resumed_fit_with_dropout_is_the_unbroken_one(tmp_path, optimizer):
    dropping = {"make": partial(made, Dropping), "optimizer": optimizer, "accumulate_grad_batches": 2}
    unbroken, _ = fitted("ipu", max_epochs=4, **dropping)
    half, run = fitted("ipu", max_epochs=2, **dropping)
    run.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fitted("ipu", max_epochs=4, ckpt_path=tmp_path / "half.ckpt", **dropping)
    assert differing(weights(resumed), weights(unbroken)) == []
    assert differing(weights(half), weights(unbroken))  # else nothing is tested


class Halving(Callback):
    """Halves a weight after the fifth batch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 4:
            with torch.no_grad():
                pl_module.first.weight.mul_(0.5)


def test_a_callback_may_write_into_weights_while_training():
    assert_fits_as_on_the_cpu(callbacks=[Halving()])


def test_two_fits_with_one_module_go_on():
    assert_fits_as_on_the_cpu(fits=2)
