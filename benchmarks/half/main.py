"""Half precision on a CPU: a language model, and a BERT whose weights are rounded stochastically, in float16 and in
float32, with and without float32 kernels."""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "bert"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import (  # pyright: ignore[reportMissingImports]
    Contender,
    environment,
    measure,
    table,
)

WORDS, WIDTH, LAYERS, LENGTH, ROWS = 20_256, 768, 3, 32, 4
BERT_ROWS, BERT_MICRO_BATCHES = 2, 16


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


def made(name: str, threads: int, half: bool):
    """A model, its optimizer, the batch of an update, and its micro-batches."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if name == "bert":
        from bert import Bert, data  # pyright: ignore[reportMissingImports]

        import poptorch

        model, batch = Bert(layers=LAYERS), data(BERT_ROWS * BERT_MICRO_BATCHES, torch.Generator())
        model = model.half() if half else model
        return model, poptorch.optim.LAMB(model.parameters(), lr=1e-3), batch, BERT_MICRO_BATCHES
    model = Language(LAYERS, WORDS)
    model = model.half() if half else model
    batch = torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS, LENGTH))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), batch, 1


def plain(rank: int, **what):
    model, step, batch, micro_batches = made(**what)
    parts = list(zip(*(value.chunk(micro_batches) for value in batch), strict=True))

    def unit() -> float:
        loss = torch.zeros(())
        step.zero_grad()
        for part in parts:
            (loss,) = model(*part)
            loss.backward()
        torch._foreach_div_([parameter.grad for parameter in model.parameters()], micro_batches)
        step.step()
        return loss.item()

    return unit


def ours(rank: int, kernels: str = "auto", **what):
    import poptorch

    model, step, batch, micro_batches = made(**what)
    options = poptorch.Options().showCompilationProgressBar(False)
    options.Training.gradientAccumulation(micro_batches)
    options.Precision.halfKernels(kernels).enableStochasticRounding(micro_batches > 1 and what["half"])
    trainer = poptorch.trainingModel(model, options, step)
    return lambda: trainer(*batch)[-1].flatten()[-1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", choices=("language", "bert"), default="language")
    given = parser.parse_args()
    print(environment(), flush=True)
    ways = {
        "plain PyTorch, float32": partial(plain, half=False),
        "plain PyTorch, float16": partial(plain, half=True),
        "Pando, float32": partial(ours, half=False),
        "Pando, float16, native": partial(ours, half=True, kernels="native"),
        "Pando, float16, auto": partial(ours, half=True),
    }
    what = {"name": given.model, "threads": given.threads}
    found = measure(
        [Contender(name, partial(way, **what)) for name, way in ways.items()],
        given.rounds,
        patience=given.patience,
    )
    words = ROWS * LENGTH if given.model == "language" else 128 * BERT_ROWS * BERT_MICRO_BATCHES
    print(table(found, "plain PyTorch, float32", words, "words"))


if __name__ == "__main__":
    main()
