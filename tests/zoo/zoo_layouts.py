"""Trains a configuration of the zoo in a layout, and in plain PyTorch, and compares the bits."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from zoo_configurations import ZOO, Batch, Configuration

import poptorch

UPDATES, MICRO_BATCHES, ROWS = 3, 4, 2
LAYOUTS = ("plain", "pipelined", "sharded", "replicas")
REPLICAS = 2
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DROPOUT = "dropout 0.2"
# Small and quick: they stand for their families in every run of the tests.
DOZEN = (
    "bert",
    "gpt2",
    "opt",
    "bloom",
    "llama",
    "qwen3",
    "olmo2",
    "wav2vec2",
    "vit",
    "convnext",
    "timm resnet",
    "torch lstm",
)
TEN = ("bert", "gpt2", "llama", "mixtral", "t5", "whisper", "vit", "swin", "timm resnet", "torch transformer")


@dataclass
class Trained:
    """The loss of every micro-batch, and the weights and buffers after the last update."""

    losses: Tensor
    weights: dict[str, Tensor]

    def differences(self, other: "Trained") -> list[str]:
        """Return the names of what is not equal to the last bit."""
        found = [] if torch.equal(self.losses, other.losses) else ["loss"]
        assert self.weights.keys() == other.weights.keys()
        return found + [n for n, value in self.weights.items() if not torch.equal(value, other.weights[n])]


def made(kind: Configuration, dropout: float, dtype: torch.dtype) -> nn.Module:
    """Return the model of a configuration, the same each time."""
    torch.manual_seed(0)
    return kind.make(dropout).train().to(dtype)


def batches(kind: Configuration, dtype: torch.dtype) -> list[Batch]:
    """Return the rows of each update."""
    torch.manual_seed(1)
    return [
        {n: v.to(dtype) if _is_float(v) else v for n, v in kind.batch(MICRO_BATCHES * ROWS).items()}
        for _ in range(UPDATES)
    ]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def loss_of(output: Any) -> Tensor:
    """Return the loss that a model returned: all of its output, or the output's first value."""
    return output if isinstance(output, Tensor) else output["loss"]


def trained(name: str, layout: str, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Trained:
    """Train by an executor; each call is one update."""
    kind = ZOO[name]
    options = poptorch.Options().showCompilationProgressBar(False).randomSeed(7)
    options.outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(MICRO_BATCHES)
    options.Precision.halfKernels("native")
    model = made(kind, dropout, dtype)
    if layout in ("pipelined", "sharded"):
        poptorch.annotate(model, kind.marks)
    if layout == "sharded":
        options.setExecutionStrategy(poptorch.ShardedExecution(poptorch.AutoStage.AutoIncrement))
    if layout == "replicas":
        options.replicationFactor(REPLICAS)
        options.Training.gradientAccumulation(MICRO_BATCHES // REPLICAS)
    executor = poptorch.trainingModel(model, options, torch.optim.AdamW(model.parameters(), lr=1e-2))
    try:
        losses = [loss_of(executor(**batch)).reshape(-1) for batch in batches(kind, dtype)]
        assert len({ipu for _, ipu, *_ in executor.plan.stages}) == (
            2 if layout in ("pipelined", "sharded") else 1
        )
    finally:
        executor.destroy()
    return Trained(torch.cat(losses), weights_of(model))


@functools.cache
def plain(name: str, replicas: int = 1, dtype: torch.dtype = torch.float32) -> Trained:
    """Train in plain PyTorch: gradients of a replica's micro-batches are added, then those of the replicas.

    Each replica has buffers of its own, as replicas of an executor have. Gradients are summed and weights are updated
    in float32, and new weights are rounded to `dtype`, as executors do.
    """
    kind = ZOO[name]
    model = made(kind, 0.0, dtype)
    weights = {n: nn.Parameter(p.detach().float()) for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2)
    buffers = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(replicas)]
    losses = []
    for batch in batches(kind, dtype):
        found: list[Tensor] = [torch.empty(0)] * MICRO_BATCHES
        sums: list[dict[str, Tensor]] = [{} for _ in range(replicas)]
        for replica, total in enumerate(sums):
            _load(model, buffers[replica])
            for index in range(replica, MICRO_BATCHES, replicas):
                model.zero_grad()
                loss = loss_of(model(**_rows(batch, index)))
                loss.backward()
                found[index] = loss.detach()
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        gradient = parameter.grad.float()
                        total[name] = total[name] + gradient if name in total else gradient
            buffers[replica] = {n: b.clone() for n, b in model.named_buffers()}
        for name in sums[0]:
            total = sums[0][name] if replicas == 1 else sums[0][name] + sums[1][name]
            weights[name].grad = total / MICRO_BATCHES
        optimizer.step()
        losses += found
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                weights[name].copy_(parameter.copy_(weights[name]))
    _load(model, buffers[0])
    return Trained(torch.stack(losses), weights_of(model))


def _rows(batch: Batch, index: int) -> Batch:
    """Return one micro-batch, copied, so that it begins at an aligned address as in an executor."""
    here = slice(index * ROWS, (index + 1) * ROWS)
    return {n: v[here].clone() if isinstance(v, Tensor) else v for n, v in batch.items()}


def _load(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def answer(name: str, layout: str, dtype: torch.dtype = torch.float32) -> str:
    """Return "equal" for plain PyTorch's bits; else in one line what differs, or why the model is refused."""
    try:
        found = trained(name, layout, dtype=dtype)
    except poptorch.Error as error:
        return "refused: " + error.message.splitlines()[0]
    return _in_words(found, plain(name, REPLICAS if layout == "replicas" else 1, dtype))


def answer_with_dropout(name: str) -> str:
    """Return "equal", if a pipeline and shards draw the same random numbers as the unsplit model."""
    unsplit = trained(name, "plain", 0.2)
    assert unsplit.differences(plain(name)), "nothing was dropped"
    answers = [_in_words(trained(name, layout, 0.2), unsplit) for layout in ("pipelined", "sharded")]
    return "; ".join(dict.fromkeys(answers))


def answer_in_half(name: str, dtype: torch.dtype) -> str:
    """Return "equal" for plain PyTorch's bits in all layouts, with weights and activations of this type."""
    return "; ".join(dict.fromkeys(answer(name, layout, dtype) for layout in LAYOUTS))


def _in_words(found: Trained, expected: Trained) -> str:
    differing = found.differences(expected)
    return f"differs: {', '.join(differing[:3])}" if differing else "equal"
