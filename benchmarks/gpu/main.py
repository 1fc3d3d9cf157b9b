"""Training speed on one GPU: Pando, plain PyTorch, one CUDA graph of an update, and torch.compile.

    python benchmarks/gpu/main.py                # ends within five minutes; without a GPU it says so, and exits
    python benchmarks/gpu/main.py --tiny         # tiny models on the CPU, to try this program

Each way to train runs in a process of its own. An update is `micro_batches` micro-batches and a step of the optimizer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SECONDS = 280  # for all ways to train
WAYS = ("plain", "Pando", "CUDA graph", "compile", "compile, reduce-overhead")


@dataclass(frozen=True)
class Case:
    """A model and its updates. `half`: products run in bfloat16 (autocast)."""

    make: Callable[[bool], nn.Module]
    rows: int
    micro_batches: int
    updates: int  # timed together
    half: bool


class Loss(nn.Module):
    """A model that returns its loss; `kind` is the type of device that autocast names."""

    def __init__(self, model: nn.Module, data: Callable[[int], tuple[Tensor, Tensor]], half: bool) -> None:
        super().__init__()
        self.model, self.data, self.half, self.kind = model, data, half, "cpu"

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.half):
            scores = self.model(inputs)
            scores = scores if isinstance(scores, Tensor) else scores.logits
        return functional.cross_entropy(scores.flatten(0, -2).float(), labels.flatten())


class Residual(nn.Module):
    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Conv2d(before, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)),
        )
        is_same = stride == 1 and before == channels
        self.shortcut = (
            nn.Identity()
            if is_same
            else nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.inner(x) + self.shortcut(x))


def resnet(tiny: bool) -> nn.Module:
    """ResNet-18 as it is used for images of 32 x 32 (CIFAR)."""
    width, size = (4, 8) if tiny else (64, 32)
    widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
    blocks = [Residual(before, after, 1 + (before != after)) for before, after in pairwise(widths)]
    start = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)
    return Loss(
        nn.Sequential(*start, *blocks, *end),
        lambda rows: (torch.randn(rows, 3, size, size), torch.randint(0, 10, (rows,))),
        half=False,
    )


def words(count: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make(rows: int) -> tuple[Tensor, Tensor]:
        found = torch.randint(0, count, (rows, length + 1))
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    return make


def gpt2(tiny: bool) -> nn.Module:
    """GPT-2 124M of transformers, on rows of 1024 words, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64} if tiny else {}
    config = GPT2Config(**none, **sizes, use_cache=False)
    return Loss(GPT2LMHeadModel(config), words(config.vocab_size, 16 if tiny else 1024), half=True)


def bert(tiny: bool) -> nn.Module:
    """BERT-base of transformers, on rows of 128 words, without dropout."""
    from transformers import BertConfig, BertForMaskedLM

    none: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    small: dict[str, Any] = dict(zip(sizes, (16, 2, 2, 32, 64), strict=True)) if tiny else {}
    config = BertConfig(**none, **small)
    return Loss(BertForMaskedLM(config), words(config.vocab_size, 16 if tiny else 128), half=True)


CASES = {
    "ResNet-18, micro-batch 8": Case(resnet, rows=8, micro_batches=8, updates=10, half=False),
    "ResNet-18, micro-batch 128": Case(resnet, rows=128, micro_batches=4, updates=10, half=False),
    "GPT-2 124M": Case(gpt2, rows=8, micro_batches=4, updates=4, half=True),
    "BERT-base": Case(bert, rows=32, micro_batches=4, updates=6, half=True),
}


# ---- ways to train: each returns a function that runs some updates -------------------------------------------


def optimizer_of(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, **more)


def pando(case: Case, tiny: bool, device: str) -> Callable[[], Any]:
    import poptorch

    model = case.make(tiny)
    options = poptorch.Options().device(device).deviceIterations(case.updates)
    options.Training.gradientAccumulation(case.micro_batches)
    trainer = poptorch.trainingModel(model, options, optimizer_of(model))
    inputs = model.data(case.rows * case.micro_batches * case.updates)
    return lambda: trainer(*inputs)


def plain(case: Case, tiny: bool, device: str, **compiled: Any) -> Callable[[], Any]:
    model = case.make(tiny).to(device)
    model.kind = device
    optimizer = optimizer_of(model, fused=True)
    batches = [
        [value.to(device) for value in model.data(case.rows)]
        for _ in range(case.micro_batches * case.updates)
    ]
    call = torch.compile(model, **compiled) if compiled else model

    def run() -> None:
        for number, batch in enumerate(batches, 1):
            if compiled:
                torch.compiler.cudagraph_mark_step_begin()
            (call(*batch) / case.micro_batches).backward()
            if number % case.micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=not compiled)

    return run


def graph(case: Case, tiny: bool, device: str) -> Callable[[], Any]:
    """An update, its micro-batches and its optimizer, as one CUDA graph; new rows are copied into its inputs."""
    if device == "cpu":
        raise RuntimeError("a CPU has no CUDA graphs")
    model = case.make(tiny).to(device)
    model.kind = device
    optimizer = optimizer_of(model, fused=True, capturable=True)
    batch = [value.to(device) for value in model.data(case.rows * case.micro_batches)]

    def update() -> None:
        for rows in zip(*(value.chunk(case.micro_batches) for value in batch), strict=True):
            (model(*rows) / case.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            update()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        update()
    fresh = [value.cpu().pin_memory() for value in batch]

    def run() -> None:
        for _ in range(case.updates):
            for target, value in zip(batch, fresh, strict=True):
                target.copy_(value, non_blocking=True)
            captured.replay()

    return run


MAKERS = {
    "plain": plain,
    "Pando": pando,
    "CUDA graph": graph,
    "compile": lambda *args: plain(*args, mode="default"),
    "compile, reduce-overhead": lambda *args: plain(*args, mode="reduce-overhead"),
}


# ---- one way, in a process of its own ------------------------------------------------------------------------


def measure(name: str, way: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """Return seconds for an update (the median of some runs), the peak of memory, and the share of the card's speed."""
    case, device = CASES[name], "cpu" if tiny else "cuda"
    case = replace(case, rows=2, micro_batches=2, updates=1) if tiny else case
    wait = (lambda: None) if tiny else torch.cuda.synchronize
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    started = time.perf_counter()
    run = MAKERS[way](case, tiny, device)
    for _ in range(1 if tiny else 2):
        run()
    wait()
    if not tiny:
        torch.cuda.reset_peak_memory_stats()
    times, (least, most) = [], (1, 1) if tiny else (3, 9)
    while len(times) < least or (len(times) < most and time.perf_counter() - started < seconds / 2):
        began = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - began) / case.updates)
    peak = 0 if tiny else torch.cuda.max_memory_allocated()
    found = {"seconds": sorted(times)[len(times) // 2], "peak": peak}
    if way == "plain":
        found |= {"flops": flops_of(case, tiny, device), "speed": speed_of_products(case.half, device, tiny)}
    return found


def flops_of(case: Case, tiny: bool, device: str) -> int:
    """Return the floating point operations of the products of an update."""
    from torch.utils.flop_counter import FlopCounterMode

    model = case.make(tiny).to(device)
    model.kind = device
    with FlopCounterMode(display=False) as counter:
        model(*(value.to(device) for value in model.data(case.rows))).backward()
    return counter.get_total_flops() * case.micro_batches


def speed_of_products(half: bool, device: str, tiny: bool) -> float:
    """Return the floating point operations a second of a large product, which stands for the card's limit."""
    size, count = (64, 2) if tiny else (8192, 20)
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16 if half else torch.float32)
    wait = (lambda: None) if tiny else torch.cuda.synchronize
    one @ one
    wait()
    began = time.perf_counter()
    for _ in range(count):
        one @ one
    wait()
    return 2 * size**3 * count / (time.perf_counter() - began)


# ---- all ways ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "WAY", "SECONDS"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        name, way, seconds = chosen.one
        print(json.dumps(measure(name, way, chosen.tiny, float(seconds))))
        return
    if not chosen.tiny and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no GPU: nothing is measured. --tiny tries this program on the CPU."
        )
        return
    where = "the CPU, tiny models" if chosen.tiny else torch.cuda.get_device_name()
    print(f"torch {torch.__version__} on {where}\n")
    print("| model | way | ms per update | to plain | peak, GB | share of the limit |")
    print("|---|---|---:|---:|---:|---:|", flush=True)
    end, plain_of = time.monotonic() + SECONDS, dict[str, dict[str, Any]]()
    for way in WAYS:
        for name in CASES:
            left = end - time.monotonic()
            try:
                found = run_one(name, way, chosen.tiny, min(60.0, left))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                late = (
                    f"more than {error.timeout:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else ""
                )
                print(f"| {name} | {way} | {late or str(error).splitlines()[-1][:120]} | | | |", flush=True)
                continue
            base = plain_of.setdefault(name, found) if way == "plain" else plain_of.get(name, {})
            seconds = found["seconds"]
            ratio = f"{base['seconds'] / seconds:.2f}" if base else ""
            share = f"{base['flops'] / seconds / base['speed']:.0%}" if base else ""
            print(
                f"| {name} | {way} | {seconds * 1e3:.2f} | {ratio} | {found['peak'] / 1e9:.2f} | {share} |",
                flush=True,
            )


def run_one(name: str, way: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """Run one way in a process of its own, and return its figures. Raises RuntimeError if it fails."""
    if seconds < 5:
        raise RuntimeError("no time left")
    command = [sys.executable, str(Path(__file__)), "--one", name, way, str(seconds), *["--tiny"] * tiny]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
