"""Operations that public programs load from libraries for IPUs, registered by `import known_operations`."""

import argparse

import torch
from torch import nn

import poptorch

# New: the operations, by the names that programs use.
DOMAINS = ("ai.graphcore", "com.acme", "custom.ops", "poptorch.custom_ops")


def copied(values, **layout):
    """CopyTensor and RemapCE return the same values; on IPUs RemapCE changes their layout in memory."""
    return values.clone()


def moving_average(average, value, factor_tensor=None, factor=None):
    """ExpMovAvg takes its factor as a tensor or as an attribute."""
    factor = factor_tensor if factor is None else factor
    return (factor * average + (1 - factor) * value).to(average.dtype)


def proxy(value, proxy):
    """AutogradProxy returns `value`, and its gradient becomes the gradient of `proxy`."""
    return value.clone()


def gradient_of_proxy(gradients, inputs):
    return [None, gradients[0]]


def distance(p):
    """Return L1Distance or L2Distance: of each row of `first`, [m, k], from each row of `second`, [n, k]."""

    def forward(first, second, root_path=""):
        return torch.linalg.vector_norm(first.unsqueeze(1) - second.unsqueeze(0), ord=p, dim=-1)

    return forward


def ctc(log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", **attributes):
    """Ctc returns the loss, as a tensor of one element or of one for each sequence."""
    name = {0: "sum", 1: "mean", 2: "none"}.get(reduction, reduction)
    lengths = input_lengths.long(), target_lengths.long()
    zero_infinity = bool(attributes.get("zeroInfinity", False))
    loss = nn.functional.ctc_loss(log_probs, targets.long(), *lengths, blank, name, zero_infinity)
    return loss.reshape(-1)


def rounded(values, exponent_bits, mantissa_bits):
    """Return the values rounded to the nearest of a smaller float format, and clamped to its range."""
    bias = 2 ** (exponent_bits - 1)
    largest = 2.0 ** (bias - 1) * (2 - 2.0**-mantissa_bits)
    clamped = values.float().clamp(-largest, largest)
    exponent = torch.frexp(clamped).exponent.sub(1).clamp(min=1 - bias) - mantissa_bits  # of the last bit
    return torch.ldexp(torch.ldexp(clamped, -exponent).round(), exponent).to(values.dtype)


def quantise(values, exponent_bits, mantissa_bits, rounding="stochastic", fwd=True, bwd="ste"):
    """SimulatedQuant rounds the values, if `fwd`, to the nearest: a registered function gets no random numbers that
    are the same in every layout."""
    if rounding != "nearest":
        raise ValueError(f'SimulatedQuant: rounding="nearest" is registered here, and not {rounding!r}')
    return rounded(values, exponent_bits, mantissa_bits) if fwd else values.clone()


def gradient_of_quantise(gradients, inputs, exponent_bits, mantissa_bits, bwd="ste", **others):
    """The gradient passes as it is ("ste"), rounded ("quantise") or not at all ("stop")."""
    (gradient,) = gradients
    if bwd in ("quantise", 1):
        gradient = rounded(gradient, exponent_bits, mantissa_bits)
    return [None if bwd == "stop" else gradient]


KNOWN = {
    **dict.fromkeys(("CopyTensor", "RemapCE"), (copied,)),
    "ExpMovAvg": (moving_average,),
    "AutogradProxy": (proxy, gradient_of_proxy),
    "L1Distance": (distance(1),),
    "L2Distance": (distance(2),),
    "SimulatedQuant": (quantise, gradient_of_quantise),
    **dict.fromkeys(("Ctc", "CtcLoss", "CTCLoss"), (ctc,)),
}
for name, functions in KNOWN.items():
    for domain in DOMAINS:
        poptorch.registerCustomOp(name, domain, 1, *functions)
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
        # New: a name that a program for IPUs uses.
        (values,) = poptorch.custom_op([values], "CopyTensor", "ai.graphcore", 1, example_outputs=[values])
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
