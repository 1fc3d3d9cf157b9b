"""The same training in plain PyTorch: SGD, in float32, one micro-batch after another.

python3 train_torch.py --config resnet8
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import flags as command_line
import parts
import torch
from batches import Dealing
from models import ResNet
from schedules import learning_rate
from torch import nn


def main(words: Sequence[str] | None = None) -> list[float]:
    """Returns the loss of each weight update."""
    flags = command_line.parse(words)
    layout = parts.layout_of(flags)
    data = parts.dataset(flags, layout, "train")
    torch.manual_seed(flags.seed)
    small = max(data.shape[1:]) <= 64
    model = ResNet(flags.model, data.classes, data.shape[0], nn.BatchNorm2d, flags.width, small)
    weights = list(model.parameters())
    decayed, others = ([w for w in weights if (w.dim() >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": decayed, "weight_decay": flags.weight_decay}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=flags.lr, momentum=flags.momentum)
    loss_of = nn.CrossEntropyLoss(label_smoothing=flags.label_smoothing)

    micro_batches = layout.accumulation * layout.total_replicas  # of a weight update
    steps = layout.accumulation * layout.iterations
    dealing = Dealing(len(data), layout.micro, steps, layout.replicas, 0, 1, flags.seed, 0)
    losses = []
    for epoch in range(flags.epoch):
        started, order = time.perf_counter(), torch.tensor(list(dealing))
        calls = order.view(-1, layout.iterations, micro_batches, layout.micro).tolist()
        for call, updates in enumerate(calls):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(flags, epoch + call / len(calls), 1 / len(calls))
            for update in updates:
                optimizer.zero_grad()
                total = 0.0
                for keys in update:
                    images, labels = data.__getitems__(keys)
                    loss = loss_of(model(images), labels)
                    (loss / micro_batches).backward()
                    total += loss.item() / micro_batches
                optimizer.step()
                losses.append(total)
        speed = order.numel() / (time.perf_counter() - started)
        print(f"Epoch {epoch + 1}: loss: {losses[-1]:.4f}, throughput: {speed:.1f} samples/sec")
    return losses


if __name__ == "__main__":
    main()
