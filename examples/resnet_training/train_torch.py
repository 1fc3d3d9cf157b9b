"""The same training in plain PyTorch: SGD, in float32, one micro-batch after another.

python3 train_torch.py --config resnet8
torchrun --nproc-per-node 2 train_torch.py --config resnet8        # by DistributedDataParallel: a micro-batch each
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import flags as command_line
import parts
import torch
from batches import Dealing
from common.sampling import Layout
from models import ResNet
from schedules import learning_rate
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(words: Sequence[str] | None = None) -> list[float]:
    """Returns the loss of each weight update (of this process' rows)."""
    flags = command_line.parse(words)
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    layout = Layout(
        flags.micro_batch_size,
        flags.gradient_accumulation,
        flags.device_iterations,
        flags.replicas,
        flags.replicas,
    )
    data = parts.dataset(flags, layout, "train")
    torch.manual_seed(flags.seed)
    small = max(data.shape[1:]) <= 64
    model: nn.Module = ResNet(flags.model, data.classes, data.shape[0], nn.BatchNorm2d, flags.width, small)
    if flags.memory_format == "channels_last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loss_of = nn.CrossEntropyLoss(label_smoothing=flags.label_smoothing)
    if processes > 1:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    weights = list(model.parameters())
    decayed, others = ([w for w in weights if (w.dim() >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": decayed, "weight_decay": flags.weight_decay}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=flags.lr, momentum=flags.momentum)

    micro_batches = layout.accumulation * layout.replicas  # of a weight update
    dealing = Dealing(len(data), layout, flags.seed, 0, flags.epoch_calls)
    losses = []
    for epoch in range(flags.epoch):
        started, order = time.perf_counter(), torch.tensor(list(dealing))
        calls = order.view(-1, layout.iterations, micro_batches, layout.micro_batch).tolist()
        for call, updates in enumerate(calls):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(flags, epoch + call / len(calls), 1 / len(calls))
            for update in updates:
                mine = update[rank::processes]
                optimizer.zero_grad()
                total = 0.0
                for number, keys in enumerate(mine, 1):
                    images, labels = data.__getitems__(keys)
                    waits = processes > 1 and number < len(mine)
                    with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                        loss = loss_of(model(images), labels)
                        (loss / len(mine)).backward()
                    total += loss.item() / len(mine)
                optimizer.step()
                losses.append(total)
        speed = order.numel() / (time.perf_counter() - started)
        if rank == 0:
            print(f"Epoch {epoch + 1}: loss: {losses[-1]:.4f}, throughput: {speed:.1f} samples/sec")
    if processes > 1:
        torch.distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
