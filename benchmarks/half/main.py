"""Half precision on a CPU: a language model in float16 and in float32, with and without float32 kernels."""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import (  # pyright: ignore[reportMissingImports]
    Contender,
    environment,
    measure,
    table,
)

WORDS, WIDTH, LAYERS, LENGTH, ROWS = 20_256, 768, 3, 32, 4


class Language(nn.Module):
    """A small transformer over words, returning its loss."""

    def __init__(self, layers: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, words)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, words: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.loss(self.head(self.layers(self.words(words))).flatten(0, 1), wanted.flatten()),)


def made(layers: int, words: int, threads: int, half: bool):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Language(layers, words)
    model = model.half() if half else model
    data = torch.randint(words, (ROWS, LENGTH)), torch.randint(words, (ROWS, LENGTH))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), data


def plain(rank: int, half: bool, **size):
    model, step, data = made(half=half, **size)

    def unit() -> float:
        step.zero_grad()
        (loss,) = model(*data)
        loss.backward()
        step.step()
        return loss.item()

    return unit


def ours(rank: int, half: bool, kernels: str = "auto", **size):
    import poptorch

    model, step, data = made(half=half, **size)
    options = poptorch.Options().showCompilationProgressBar(False)
    options.Precision.halfKernels(kernels)
    trainer = poptorch.trainingModel(model, options, step)
    return lambda: trainer(*data)[-1].flatten()[-1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--words", type=int, default=WORDS)
    given = parser.parse_args()
    print(environment(), flush=True)
    ways = {
        "plain PyTorch, float32": partial(plain, half=False),
        "plain PyTorch, float16": partial(plain, half=True),
        "Pando, float32": partial(ours, half=False),
        "Pando, float16, native": partial(ours, half=True, kernels="native"),
        "Pando, float16, auto": partial(ours, half=True),
    }
    size = {"layers": given.layers, "words": given.words, "threads": given.threads}
    found = measure(
        [Contender(name, partial(way, **size)) for name, way in ways.items()],
        given.rounds,
        patience=given.patience,
    )
    print(table(found, "plain PyTorch, float32", ROWS * LENGTH, "words"))


if __name__ == "__main__":
    main()
