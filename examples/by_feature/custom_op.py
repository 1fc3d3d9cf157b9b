"""A custom operation: a function of torch, called by its registered name, and differentiated by autograd."""

import argparse

import torch
from torch import nn

import poptorch


# New: what the operation computes; it has to be registered before the model is compiled.
def widen(values, factor):
    return values * (1 + factor * values.tanh())


poptorch.registerCustomOp("Widen", "com.example", 1, widen)
# End


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
        # New: outputs have the shape and type of `example_outputs`.
        (values,) = poptorch.custom_op(
            [values],
            "Widen",
            "com.example",
            1,
            example_outputs=[values],
            attributes={"factor": 0.1},
        )
        # End
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
    model = Network()
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
