"""The twin of `train_poptorch.py` in plain PyTorch: same network, same micro-batches, same weight updates."""

import argparse
import time
from pathlib import Path

import torch
from mnist import datasets
from model import Network
from torch.utils.data import DataLoader
from tqdm import tqdm


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=40, help="images in a micro-batch")
    parser.add_argument(
        "--gradient-accumulation", type=int, default=10, help="micro-batches in a weight update"
    )
    parser.add_argument("--test-batch-size", type=int, default=8, help="images in a batch of the test")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's IDX files, plain or .gz")
    return parser.parse_args()


def update_weights(model, optimizer, images, labels, batch_size):
    """One weight update: gradients are summed over the micro-batches, then divided by their number.

    Returns: the scores of all images, and the mean of the losses
    """
    micro_batches = list(zip(images.split(batch_size), labels.split(batch_size), strict=True))
    optimizer.zero_grad()
    scores, losses = [], []
    for micro_batch in micro_batches:
        output, loss = model(*micro_batch)
        loss.backward()
        scores.append(output.detach())
        losses.append(loss.detach())
    for parameter in model.parameters():
        parameter.grad /= len(micro_batches)
    optimizer.step()
    return torch.cat(scores), torch.stack(losses).mean()


def train(args, model, digits):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(
        digits,
        batch_size=args.batch_size * args.gradient_accumulation,
        shuffle=True,
        drop_last=True,
    )
    start, seen = time.perf_counter(), 0
    for epoch in range(1, args.epochs + 1):
        correct = total = 0
        bar = tqdm(loader, desc=f"Epoch {epoch}/{args.epochs}", unit="update")
        for images, labels in bar:
            scores, loss = update_weights(model, optimizer, images, labels, args.batch_size)
            correct += int((scores.argmax(1) == labels).sum())
            total += len(labels)
            bar.set_postfix_str(f"loss {loss:.4f}, accuracy {correct / total:.2%}")
        seen += total
    print(f"Training: {seen / (time.perf_counter() - start):.0f} images per second")


@torch.no_grad()
def test(args, model, digits):
    correct = 0
    for images, labels in DataLoader(digits, batch_size=args.test_batch_size):
        correct += int((model(images).argmax(1) == labels).sum())
    print(f"Accuracy on test set: {correct / len(digits):.2%}")


def main():
    args = arguments()
    torch.manual_seed(0)  # the first weights, and the order of the digits
    model = Network()
    train_digits, test_digits = datasets(args.data_dir)
    model.train()
    train(args, model, train_digits)
    model.eval()
    test(args, model, test_digits)


if __name__ == "__main__":
    main()
