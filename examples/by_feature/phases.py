"""Phases: one ipu runs the model part by part, each phase after the one before."""

import argparse

import torch
from torch import nn

import poptorch


def spirals(rows: int) -> torch.utils.data.Dataset:
    """Return points in a plane; the class of a point is its spiral arm, one of three."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(rows) % 3
    radius = torch.rand(rows, generator=generator)
    angle = 4 * radius + labels * 2 * torch.pi / 3 + 0.1 * torch.randn(rows, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return torch.utils.data.TensorDataset(points, labels)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 64)
        self.middle = nn.Linear(64, 64)
        self.upper = nn.Linear(64, 64)
        self.outer = nn.Linear(64, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, points, labels):
        values = self.inner(points).relu()
        values = self.middle(values).relu()
        values = self.upper(values).relu()
        scores = self.outer(values)
        return scores.argmax(1) == labels, self.loss(scores, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    flags = parser.parse_args()
    torch.manual_seed(0)
    options = poptorch.Options().deviceIterations(8).outputMode(poptorch.OutputMode.All)
    # New: two phases, which are named after the blocks that they run.
    strategy = poptorch.SerialPhasedExecution(poptorch.Stage("inner").ipu(0), poptorch.Stage("upper").ipu(0))
    options.setExecutionStrategy(strategy)
    # End
    model = Network()
    # New: block "inner" begins at the layer `inner`, block "upper" at `upper`.
    poptorch.annotate(model, {"inner": 0, "upper": 0})
    # End
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = poptorch.trainingModel(model, options, optimizer)
    loader = poptorch.DataLoader(options, spirals(768), batch_size=16, shuffle=True)
    for epoch in range(flags.epochs):
        results = []
        for batch in loader:
            results.append(trainer(*batch))
        right = torch.cat([right for right, _ in results]).float().mean()
        loss = torch.cat([loss for _, loss in results]).mean()
        print(f"epoch {epoch}: loss {loss:.3f}, right {right:.1%}")


if __name__ == "__main__":
    main()
