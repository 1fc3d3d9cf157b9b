"""Manual optimization with one optimizer; several optimizers never train silently wrong."""

import pytest
import torch
from lightning_models import Classifier, differing, loader, made, trainer, weights
from torch.nn import functional


class Manual(Classifier):
    def __init__(self, count=1, body=None):
        super().__init__(lambda p: torch.optim.Adam(p, lr=0.01))
        self.automatic_optimization = False
        self.count, self.body = count, body or self.once

    def once(self, loss):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        self.body(loss)

    def configure_optimizers(self):
        return [self.optimizer(self.parameters()) for _ in range(self.count)]


def test_one_backward_and_one_step_train_as_on_the_cpu():
    found, runs = {}, {}
    for accelerator in ("ipu", "cpu"):
        module, runs[accelerator] = made(Manual), trainer(accelerator, max_epochs=2)
        runs[accelerator].fit(module, loader())
        found[accelerator] = weights(module)
    assert differing(found["ipu"], found["cpu"]) == []
    assert runs["ipu"].global_step == runs["cpu"].global_step == 32


def test_several_optimizers_are_refused():
    with pytest.raises(Exception, match=r"IPUs currently only support one optimizer\."):
        trainer().fit(made(Manual, 2), loader())


def twice(self, loss):
    self.once(loss)
    self.once(loss)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (twice, "backward, step, backward, step"),
        (lambda self, loss: self.manual_backward(loss), "must be one `self.manual_backward"),
        (lambda self, loss: None, "found neither"),
        (lambda self, loss: (self.lr_schedulers(), self.once(loss)), "step schedulers in on_train_batch_end"),
        (lambda self, loss: self.clip_gradients(self.optimizers(), 1.0), "max_grad_norm"),
        (lambda self, loss: self.manual_backward(3.0), "got a float that this step did not compute"),
    ],
)
def test_anything_else_is_refused_before_it_trains(body, words):
    module = made(Manual)
    module.body = lambda loss: body(module, loss)
    before = weights(module)
    with pytest.raises(Exception, match=words):
        trainer().fit(module, loader())
    assert differing(weights(module), before) == []
