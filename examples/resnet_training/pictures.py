"""Two pictures of what replicas do to a training, drawn by matplotlib.

python3 pictures.py curves --updates 60          # the same curve with 1, 2, 4, 8 and 16 replicas
python3 pictures.py scaling --processes 1 2      # images a second, beside DistributedDataParallel
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import train

HERE = Path(__file__).parent
REPLICAS = (1, 2, 4, 8, 16)
COMMON = ["--disable-progress-bar", "--validation-mode", "none", "--device-iterations", "1"]


def curves(words: Sequence[str], updates: int, most: int = 16) -> tuple[dict[int, list[float]], float]:
    """The losses of each update by the number of replicas, and the largest distance between two curves.

    A weight update has `most` micro-batches: replicas × accumulation is constant, and so are its rows.
    """
    found = {}
    for replicas in (number for number in REPLICAS if number <= most):
        layout = ["--replicas", str(replicas), "--gradient-accumulation", str(most // replicas)]
        every = ["--logs-per-epoch", str(updates), "--epoch", "1", "--epoch-calls", str(updates)]
        rows = train.main([*words, *COMMON, *layout, *every])
        found[replicas] = [row["loss_batch"] for row in rows]
    distance = max(max(each) - min(each) for each in zip(*found.values(), strict=True))
    return found, distance


def draw_curves(words: Sequence[str], updates: int, path: Path) -> None:
    found, distance = curves(words, updates)
    figure = _figure()
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    numbers = range(1, updates + 1)
    for width, (replicas, losses) in zip((9, 7, 5, 3, 1), found.items(), strict=False):
        upper.plot(numbers, losses, linewidth=width, alpha=0.6, label=f"{replicas} × {16 // replicas}")
    distances = [max(each) - min(each) for each in zip(*found.values(), strict=True)]
    lower.semilogy(numbers, [max(each, 1e-9) for each in distances])  # 0 has no place on this axis
    upper.set(ylabel="loss", title=f"Replicas × accumulation: largest distance {distance:.1e}")
    lower.set(xlabel="weight update", ylabel="distance")
    upper.legend(title="replicas × accumulation")
    _write(figure, path)
    print(f"largest distance of {len(found)} curves over {updates} updates: {distance:.2e}; {path}")


def scaling(words: Sequence[str], processes: Sequence[int]) -> dict[str, dict[int, float]]:
    """Images a second by contender and replicas, each in its second epoch. Processes share the machine's cores."""
    found: dict[str, dict[int, float]] = {}
    for count in processes:
        ours = found[f"Pando, {_spoken(count)}"] = {}
        for replicas in (number for number in REPLICAS if number >= count):
            poprun = (
                []
                if count == 1
                else ["-m", "poprun", f"--num-instances={count}", f"--num-replicas={replicas}"]
            )
            program = [sys.executable, str(HERE / "train.py")] if poprun else [str(HERE / "train.py")]
            ours[replicas] = _speed([*poprun, *program, *words, *_layout(replicas)])
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        name = "plain PyTorch" if count == 1 else f"DDP, {_spoken(count)}"
        twin = [str(HERE / "train_torch.py"), *words, *_layout(count)]
        found[name] = {count: _speed([*(torchrun if count > 1 else []), *twin])}
    return found


def _layout(replicas: int) -> list[str]:
    """As many images, whatever the replicas are; an update has four micro-batches of each."""
    calls = max(2, 24 // replicas)
    return [*COMMON, "--replicas", str(replicas), "--epoch", "2", "--epoch-calls", str(calls)]


def draw_scaling(words: Sequence[str], processes: Sequence[int], path: Path) -> None:
    figure = _figure()
    axes = figure.add_subplot()
    for name, speeds in scaling(words, processes).items():
        axes.plot(list(speeds), list(speeds.values()), marker="o", label=name)
        print(f"{name:>24}: " + ", ".join(f"{replicas}: {speed:.0f}" for replicas, speed in speeds.items()))
    axes.set(xlabel="replicas", ylabel="images a second", title="Images a second at a constant micro-batch")
    axes.set_xscale("log", base=2)
    axes.set_xticks(REPLICAS, map(str, REPLICAS))
    axes.set_ylim(bottom=0)
    axes.legend()
    _write(figure, path)
    print(path)


def _speed(command: Sequence[str]) -> float:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    found = re.findall(r"throughput: *(.*?) samples/sec", done.stdout + done.stderr)
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return float(found[-1])


def _spoken(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("pictures need the package matplotlib: pip install matplotlib") from None
    return Figure(figsize=(7, 4.2), layout="constrained")


def _write(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", choices=("curves", "scaling"))
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, help="by default curves.png or scaling.png")
    flags, others = parser.parse_known_args(words)
    path = flags.output or Path(f"{flags.picture}.png")
    small = ["--config", "resnet8", "--micro-batch-size", "8", "--lr", "0.05"]
    if flags.picture == "curves":
        draw_curves([*small, *others], flags.updates, path)
    else:
        draw_scaling(["--config", "resnet20", *others], flags.processes, path)


if __name__ == "__main__":
    main()
