"""What an elastic run costs: the time from a loss to the next finished update, and the time of checkpoints."""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import torch
from harness import environment, markdown  # pyright: ignore[reportMissingImports]
from train import EVERY, training

import popdist
import poptorch

TRAIN = Path(__file__).with_name("train.py")


class Run:
    """A poprun in a process group of its own, whose lines are read as they come."""

    def __init__(self, folder: Path) -> None:
        words = ("-vv", "--num-replicas=8", "--num-instances=1:2", "--checkpoint-dir", str(folder))
        command = [sys.executable, "-m", "poprun", *words, sys.executable, str(TRAIN)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.lines: Iterator[str] = iter(self.process.stdout)

    def until(self, pattern: str) -> re.Match[str]:
        for line in self.lines:
            if found := re.search(pattern, line):
                return found
        raise SystemExit(f"poprun ended before {pattern!r}")

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate()


def seconds_to_next_update() -> tuple[float, int]:
    """Kill instance 1 after a checkpoint. Returns: seconds to the next finished call; calls made again."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name))
        victim = int(run.until(r"instance 1 is process (\d+)")[1])
        before = run.until(rf"call {EVERY + EVERY // 2} (\d+)")
        began = time.time()
        os.kill(victim, signal.SIGKILL)
        last = EVERY + EVERY // 2
        while True:
            found = run.until(r"call (\d+) (\d+) ([\d.]+)")
            if found[2] != before[1]:
                break
            last = int(found[1])
        run.end()
        return float(found[3]) - began, last - int(found[1]) + 1


def cost_of_checkpoints(rounds: int) -> tuple[list[float], float]:
    """Return the cost of a checkpoint every EVERY calls, measured twice.

    Returns: for alternating rounds, the time of EVERY calls with a checkpoint over that without; and the processor time
        of a checkpoint over that of EVERY calls
    """
    opts = poptorch.Options().replicationFactor(8)
    opts.Distributed.rowsByReplica(True)
    loader, trainer = training(opts)
    batches = [batch for batch, _ in zip(loader, range(EVERY), strict=False)]
    with tempfile.TemporaryDirectory() as name:
        checkpoint = popdist.Checkpoint.every(EVERY, name)
        checkpoint.restore(trainer, loader)

        def seconds(step: Callable[[], None]) -> float:
            began = time.perf_counter()
            for batch in batches:
                trainer(*batch)
                step()
            return time.perf_counter() - began

        seconds(checkpoint.step), checkpoint.wait()
        ratios = []
        for number in range(rounds):
            kinds = [checkpoint.step, lambda: None]
            spent = {kind: seconds(kind) for kind in (kinds if number % 2 else kinds[::-1])}
            ratios.append(spent[kinds[0]] / spent[kinds[1]])
        checkpoint.wait()
        began = time.process_time()
        seconds(lambda: None)
        calls, began = time.process_time() - began, time.process_time()
        checkpoint.save(), checkpoint.wait()
        return ratios, (time.process_time() - began) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    print(environment(), end="\n\n", flush=True)
    torch.set_num_threads(1)
    kills = [seconds_to_next_update() for _ in range(flags.rounds)]
    ratios, processor = cost_of_checkpoints(flags.rounds)
    rows = [
        [
            "SIGKILL to an instance: s to the next update",
            f"{statistics.median(k[0] for k in kills):.1f}",
            "2",
        ],
        ["calls made again, at most", str(max(k[1] for k in kills)), str(EVERY)],
        [f"a checkpoint every {EVERY} calls: time of training", f"{statistics.median(ratios):.3f}", "1.02"],
        ["processor time of a checkpoint over that of the calls", f"{processor:.4f}", "0.02"],
    ]
    print(markdown(["", "measured", "aim"], rows))
    print("ratios of the rounds:", *(f"{ratio:.3f}" for ratio in ratios))


if __name__ == "__main__":
    main()
