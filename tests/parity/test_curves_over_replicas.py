"""However many replicas share the micro-batches of an update: the same curve."""

import torch
from torch import nn

import poptorch

MICRO_BATCHES, ROWS, UPDATES, CALLS = 16, 4, 10, 3


def curve(replicas, optimizer):
    """The mean loss of each update, on the same rows."""
    opts = poptorch.Options().replicationFactor(replicas).deviceIterations(UPDATES)
    opts.outputMode(poptorch.OutputMode.All).showCompilationProgressBar(False)
    opts.Training.gradientAccumulation(MICRO_BATCHES // replicas)
    torch.manual_seed(0)
    model = Classifier()
    executor = poptorch.trainingModel(model, opts, optimizer(model.parameters()))
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(CALLS):
        images = torch.randn(UPDATES * MICRO_BATCHES * ROWS, 12, generator=data)
        labels = (images[:, :4] + images[:, 4:8] * images[:, 8:]).argmax(1)
        losses.append(executor(images, labels)[1].view(UPDATES, -1).mean(1))
    executor.destroy()
    return torch.cat(losses)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, images, labels):
        scores = self.layers(images)
        return scores, nn.functional.cross_entropy(scores, labels)


def test_1_to_16_replicas_draw_the_same_curve_where_an_update_has_the_same_micro_batches():
    for name, optimizer in {
        "SGD": lambda w: poptorch.optim.SGD(w, lr=0.2, momentum=0.9),
        "AdamW": lambda w: poptorch.optim.AdamW(w, lr=0.01),
    }.items():
        curves = {replicas: curve(replicas, optimizer) for replicas in (1, 2, 4, 8, 16)}
        distance = max(float((one - curves[1]).abs().max()) for one in curves.values())
        print(
            f"{name}: from {curves[1][0]:.3f} to {curves[1][-1]:.3f}; the largest distance is {distance:.1e}"
        )
        assert curves[1][-1] < 0.8 * curves[1][0]  # something was learned
        assert distance < 1e-5
