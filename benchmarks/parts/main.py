"""A replica in several processes: memory of the largest of them, and speed against torch.distributed.pipelining."""

import argparse
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "bert", "large"))
import parts
import ways  # pyright: ignore[reportMissingImports]
from comparison import calm, disagreement, free_port  # pyright: ignore[reportMissingImports]
from harness import Contender, environment, markdown, measure, table  # pyright: ignore[reportMissingImports]
from task import Task  # pyright: ignore[reportMissingImports]

HALVES = ((0, "words layer0 layer1 layer2"), (1, "layer3 head"))
RIVAL = "torch.distributed.pipelining, 2 processes"


def memory_table(layers: int) -> str:
    """The largest process's peak, for one process and for four, as a table. `layers`: see `parts.memory`"""
    rows, whole = [], None
    cases = ((1, False), (2, True), (4, False), (4, True)) if layers else ((1, False), (4, False))
    for processes, on_meta in cases:
        work = partial(parts.memory, port=free_port(), processes=processes, layers=layers, on_meta=on_meta)
        # The processes meet, so each worker runs one of the tasks.
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            peaks, states, losses = zip(*pool.map(work, range(processes)), strict=True)
        whole = whole or (max(peaks), max(states), losses[0])
        assert set(losses) == {whole[2]}, "the bits differ"
        made = "on meta" if on_meta else "whole"
        figures = (max(peaks), whole[0]), (max(states), whole[1])
        cells = [f"{cell:.2f}" for value, base in figures for cell in (value / 1e6, value / base)]
        rows.append([f"{processes}, made {made}", *cells])
    head = ["processes, model", "peak (MB)", "of one process", "optimizer state (MB)", "of one process"]
    return markdown(head, rows)


def times_table(task: Task) -> str:
    """What each of two processes does in the last of some calls, as a table."""
    import poptorch

    with tempfile.TemporaryDirectory() as folder:
        work = partial(parts.times, task=task, port=free_port(), placement=HALVES, folder=folder)
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(work, range(2)))
        runs = poptorch.Report(folder).trace()
    last = [run for run in runs if run["call"] == max(run["call"] for run in runs)]
    seconds = (max(run["end"] for run in last) - min(run["start"] for run in last)) / 1e9
    rows = []
    for ipu in (0, 1):
        spent = {"forward": 0.0, "backward": 0.0, "send": 0.0, "other": 0.0}
        for run in last:
            if run["ipu"] == ipu:
                spent[run["kind"] if run["kind"] in spent else "other"] += (run["end"] - run["start"]) / 1e9
        waits = seconds - sum(spent.values())
        rows.append([str(ipu), *(f"{each:.3f}" for each in (*spent.values(), waits, seconds))])
    bubble = 1 / (task.micro_batches + 1)
    head = ["process", "forward (s)", "backward (s)", "send (s)", "other (s)", "waits (s)", "call (s)"]
    return f"{markdown(head, rows)}\n\nThe bubble of two equal stages is {bubble:.0%} of a call."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--layers", type=int, default=16, help="of the stack, whose memory is measured; 0: none"
    )
    parser.add_argument("--gpt2", action="store_true", help="measure the memory of GPT-2 small, too")
    parser.add_argument("--rounds", type=int, default=9, help="of BERT; 0: none")
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[8, 32], help="of BERT's updates")
    parser.add_argument("--patience", type=int, default=1, help="times the rounds, at most, for calm ones")
    args = parser.parse_args()
    where = environment()
    if args.layers:
        size = args.layers * parts.WIDTH**2 * 4 / 1e6
        print(f"{args.layers} layers, {size:.0f} MB of weights, AdamW: the largest process, over its start\n")
        print(f"{memory_table(args.layers)}\n", flush=True)
    if args.gpt2:
        print("GPT-2 small, AdamW: the largest process, over its start\n")
        print(f"{memory_table(0)}\n", flush=True)
    if args.rounds:
        from bert import TASK  # pyright: ignore[reportMissingImports]

        for count in args.micro_batches:
            task = replace(TASK, micro_batches=count)
            pair = {"task": task, "port": free_port()}
            found = [
                Contender("Pando, 2 processes", partial(parts.ours, placement=HALVES, **pair), 2),
                Contender("Pando, 1 process, 2 cores", partial(ways.ours, task=task, placement=HALVES)),
                Contender(RIVAL, partial(ways.pipelining, task=task, port=free_port()), 2),
            ]
            measured = measure(found, args.rounds, partial(print, file=sys.stderr), args.patience, warm=3)
            print(f"{count} micro-batches\n\n{table(measured, RIVAL, task.unit_rows, 'rows')}\n")
            print(
                f"{calm(measured)}\nlosses differ by at most {disagreement(measured):.1e} after the first unit\n"
            )
            print(f"{times_table(task)}\n", flush=True)
    print(where)


if __name__ == "__main__":
    main()
