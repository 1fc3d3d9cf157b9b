"""What a step logs, counts and keeps has the values of each call; over an epoch they are those of the CPU."""

import logging

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import IPUStrategy
from lightning.pytorch.utilities import grad_norm
from lightning_models import Classifier, assert_fits_as_on_the_cpu, differing, loader, made, trainer, weights
from torch.nn import functional

import poptorch


class Logging(Classifier):
    """Logs in all the ways there are."""

    def __init__(self, **more):
        super().__init__(**more)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.mean = torchmetrics.MeanMetric()
        self.collection = torchmetrics.MetricCollection(
            {
                "acc": torchmetrics.Accuracy("multiclass", num_classes=3),
                "f1": torchmetrics.F1Score("multiclass", num_classes=3),
            }
        )
        self.losses, self.latest, self.kept = [], None, {}

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        loss = functional.cross_entropy(scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", scores.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("rows", (y >= 0).float().sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log_dict({"a": loss * 2, "b": loss + 1}, on_step=False, on_epoch=True)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.losses.append(loss)
        self.latest = scores
        self.kept["y"] = y
        return {"loss": loss, "scores": scores.detach()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        self.log("val_loss", functional.cross_entropy(scores, y))
        value = self.collection(scores, y)
        self.log_dict(value, on_step=False, on_epoch=True)


def fitted(accelerator="ipu", kind=Logging, make=(), **more):
    module = made(kind, **dict(make))
    run = trainer(accelerator, **{"max_epochs": 2, "num_sanity_val_steps": 0, **more})
    run.fit(module, loader(), loader())
    return module, run


@pytest.fixture(scope="module")
def both():
    more = {"accumulate_grad_batches": 2}
    return fitted("ipu", **more), fitted("cpu", **more)


def test_epoch_values_are_those_of_the_cpu(both):
    (module, run), (twin, expected) = both
    assert run.callback_metrics.keys() == expected.callback_metrics.keys()
    of_a_step = {"loss", "loss_step"}
    for name in expected.callback_metrics.keys() - of_a_step:
        found, wanted = run.callback_metrics[name], expected.callback_metrics[name]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, msg=name)
    assert differing(weights(module), weights(twin)) == []


def test_lists_have_an_item_for_each_micro_batch(both):
    (module, _), (twin, _) = both
    assert len(module.losses) == len(twin.losses) == 32
    torch.testing.assert_close(
        torch.stack(module.losses), torch.stack([loss.detach() for loss in twin.losses])
    )


def test_attributes_and_keys_have_the_last_micro_batchs_value(both):
    (module, _), (twin, _) = both
    assert torch.equal(module.kept["y"], twin.kept["y"].to(module.kept["y"].dtype))
    torch.testing.assert_close(module.latest, twin.latest.detach())


class Steps(Callback):
    """Keeps what is logged on each step, and shown in the progress bar."""

    def __init__(self):
        self.logged, self.shown = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.logged.append(trainer.logged_metrics["loss_step"].item())
        self.shown.append(trainer.progress_bar_metrics.get("loss_step"))


def test_a_steps_value_is_the_mean_over_the_call():
    of = {}
    for accelerator, accumulation in (("ipu", 2), ("cpu", 1)):
        steps = Steps()
        frozen = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
        fitted(
            accelerator, make=frozen, max_epochs=1, accumulate_grad_batches=accumulation, callbacks=[steps]
        )
        of[accelerator] = steps
    pairs = torch.tensor(of["cpu"].logged).reshape(-1, 2).mean(1)
    torch.testing.assert_close(torch.tensor(of["ipu"].logged), pairs)
    assert of["ipu"].shown == pytest.approx(of["ipu"].logged)


def test_replicas_and_iterations_log_the_same_epoch():
    frozen = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
    _, run = fitted(make=frozen, strategy=IPUStrategy(device_iterations=2), accelerator="auto", devices=2)
    _, expected = fitted("cpu", make=frozen)
    for name in ("loss_epoch", "accuracy", "rows", "largest", "val_loss", "acc", "f1"):
        torch.testing.assert_close(run.callback_metrics[name], expected.callback_metrics[name], msg=name)


def test_callbacks_that_monitor_a_logged_value_decide_as_on_the_cpu(tmp_path):
    best, stopped = {}, {}
    for accelerator in ("ipu", "cpu"):
        checkpoint = ModelCheckpoint(tmp_path / accelerator, monitor="val_loss", save_top_k=1)
        stop = EarlyStopping("val_loss", patience=1, min_delta=0.03)
        _, run = fitted(accelerator, max_epochs=8, callbacks=[checkpoint, stop], enable_checkpointing=True)
        best[accelerator], stopped[accelerator] = (
            checkpoint.best_model_path.rsplit("/")[-1],
            run.current_epoch,
        )
    assert best["ipu"] == best["cpu"]
    assert stopped["ipu"] == stopped["cpu"] < 8


class Plateau(Logging):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def test_rates_that_follow_a_logged_value_are_those_of_the_cpu():
    found = {accelerator: fitted(accelerator, Plateau, max_epochs=4) for accelerator in ("ipu", "cpu")}
    rates = {name: run.optimizers[0].param_groups[0]["lr"] for name, (_, run) in found.items()}
    assert rates["ipu"] == rates["cpu"] < 0.1
    assert differing(weights(found["ipu"][0]), weights(found["cpu"][0])) == []


def test_an_item_of_a_list_that_a_step_replaces_has_the_last_micro_batchs_value():
    def body(self, loss, scores, y):
        self.latest[0] = loss

    found = []
    for accelerator in ("ipu", "cpu"):
        module = step(body)
        module.latest = [None]
        trainer(accelerator).fit(module, loader())
        found.append(module.latest[0].detach())
    torch.testing.assert_close(*found)


def step(body, names=()):
    """A module whose training_step runs `body(self, loss, scores)`."""

    class Module(Classifier):
        def __init__(self):
            super().__init__()
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
            self.seen = None

        def training_step(self, batch, batch_idx):
            x, y = batch
            scores = self(x)
            loss = functional.cross_entropy(scores, y)
            result = body(self, loss, scores, y)
            return loss if result is None else result

    return made(Module)


def test_a_number_is_logged_unchanged_with_a_word(caplog):
    def body(self, loss, scores, y):
        self.log("rate", 0.5)

    run = trainer()
    with caplog.at_level(logging.WARNING, logger="poptorch::python"):
        run.fit(step(body), loader())
    assert run.callback_metrics["rate"] == 0.5
    assert caplog.text.count("the value was a number when the model was compiled") == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda self, loss, scores, y: self.log("scores", scores), "must have a single element"),
        (
            lambda self, loss, scores, y: loss + self.accuracy(scores, y),
            "is known on the host, after the step",
        ),
        (lambda self, loss, scores, y: self.accuracy.compute(), "is known on the host, after the step"),
        (lambda self, loss, scores, y: self.log("loss", loss.item()), "reads a value out of a tensor"),
        (lambda self, loss, scores, y: setattr(self, "seen", {loss}), "no values yet in self.seen"),
    ],
)
def test_what_a_step_cannot_do_is_refused_and_leaves_the_module_as_it_was(body, words):
    module = step(body)
    before, attributes = weights(module), set(vars(module))
    with pytest.raises(Exception, match=words):
        trainer().fit(module, loader())
    assert differing(weights(module), before) == []
    assert set(vars(module)) - {"_hparams"} == attributes  # that one is Lightning's
    assert module.accuracy(torch.tensor([[1.0, 0, 0]]), torch.tensor([0])) == 1
    module.training_step = lambda batch, batch_idx: Classifier.training_step(module, batch, batch_idx)
    trainer().fit(module, loader())
    assert differing(weights(module), before)


def test_a_counter_that_a_step_reads_has_its_present_value(caplog):
    class Rising(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (self.current_epoch + 1)

    with caplog.at_level(logging.WARNING, logger="poptorch::python"):
        assert_fits_as_on_the_cpu(Rising, max_epochs=3)
    assert "epoch" not in caplog.text


class Norms(Classifier):
    norms = ()

    def on_before_optimizer_step(self, optimizer):
        self.norms = (*self.norms, grad_norm(self, norm_type=2))


def test_a_hook_that_looks_at_gradients_is_told_where_they_are(recwarn):
    options = poptorch.Options()
    options.anchorTensor("gradient", "Gradient___first.weight")
    found = {}
    for accelerator, strategy in (("cpu", "auto"), ("auto", IPUStrategy(training_opts=options))):
        module = made(Norms)

        def keep(*_, strategy=strategy, gradients=(gradients := [])):
            if strategy != "auto":
                gradients.append(strategy.poptorch_models["train"].getAnchoredTensor("gradient").norm(2))

        module.on_train_batch_end = keep
        trainer(accelerator, strategy=strategy).fit(module, loader())
        found[accelerator] = gradients or [norms["grad_2.0_norm/first.weight"] for norms in module.norms]
    assert found["auto"] == found["cpu"]
    said = [str(warning.message) for warning in recwarn if "parameter.grad is None" in str(warning.message)]
    assert len(said) == 1 and said[0].startswith("`Norms.on_before_optimizer_step` runs")
