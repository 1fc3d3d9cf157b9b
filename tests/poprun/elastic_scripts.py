"""Random scripts of kills, stops and returns: each elastic run ends in the undisturbed state.

    python tests/poprun/elastic_scripts.py --scripts 100 [--seed 0]

A script starts a poprun with room for some instances. At some calls instance 0 waits, and one of these is done: SIGKILL
to an instance, to a poprun's guard or to its agent; SIGSTOP to one of several instances, which the others have to
notice; another poprun. The last line counts the scripts that
did not end, and those that ended in another state or read other rows.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import launching
import torch

PROGRAM = Path(__file__).with_name("elastic_program.py")
sys.path.insert(0, str(PROGRAM.parents[1] / "popdist"))

from checkpoint_program import difference  # noqa: E402

CALLS = 12  # two epochs
ROWS = 192
ACTIONS = (
    "kill an instance",
    "kill a guard",
    "kill an agent",
    "stop an instance",
    "another poprun",
    "another poprun",
)


def undisturbed(folder):
    """What one process with 8 replicas ends with."""
    subprocess.run([sys.executable, PROGRAM, folder, "2"], check=True, timeout=launching.LIMIT)
    return outcome(folder, 1)


def outcome(folder, instances):
    """The state after a training, and the rows of each call and replica."""
    results = [torch.load(folder / f"result-{i}.pt") for i in range(instances)]
    assert all(difference(one["weights"], results[0]["weights"]) == "" for one in results)
    buffers = [buffer for one in results for buffer in one["buffers"]]
    state = {name: results[0][name] for name in ("weights", "optimizer", "rates", "random")}
    return {**state, "buffers": buffers, "rows": rows_of(folder)}


def rows_of(folder):
    """The rows of each call, ordered by replica; calls that were made again have to read the same."""
    found = {}
    for path in sorted((folder / "rows").glob("*-*-*")):
        call, instance, instances = map(int, path.name.split("-"))
        rows = torch.load(path).view(2, 8 // instances, 2).transpose(0, 1)  # [replica, accumulation, row]
        for replica, values in enumerate(rows, start=instance * (8 // instances)):
            assert found.setdefault((call, replica), values.tolist()) == values.tolist()
    calls = [[found[call, replica] for replica in range(8)] for call in range(CALLS)]
    for epoch in (calls[: CALLS // 2], calls[CALLS // 2 :]):
        assert sorted(torch.tensor(epoch).flatten().tolist()) == list(range(ROWS))
    return calls


def command(folder, *options, holds=(), instances="1:8"):
    words = ("--num-replicas=8", f"--num-instances={instances}", "--checkpoint-dir", folder / "checkpoints")
    return (*words, *options, sys.executable, PROGRAM, folder, 2, *holds)


def instances_of(run):
    """The processes of a run's instances."""
    return [pid for pid in run.processes(PROGRAM.name) if pid not in (run.pid, run.agent())]


def act(action, chance, runs, start):
    """Do what the script says."""
    run = chance.choice(runs)
    if action == "another poprun":
        start()
    elif action == "kill a guard":
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    elif action == "kill an agent":
        os.kill(run.agent(), signal.SIGKILL)
        run.wait()
    else:
        while True:
            # There are none for a moment, or they end, if a node has come and all start again.
            with contextlib.suppress(IndexError, ProcessLookupError):
                instances = [pid for each in runs for pid in instances_of(each)]
                stops = action == "stop an instance" and len(instances) > 1  # else no peer would wait for it
                os.kill(chance.choice(instances), signal.SIGSTOP if stops else signal.SIGKILL)
                break
            time.sleep(0.02)


def play(poprun, folder, seed):
    """Play a script. Returns: what was done, and the number of instances at the end."""
    chance = random.Random(seed)
    calls = sorted(chance.sample(range(1, CALLS), chance.randint(1, 4)))
    mode = ("Sync", "Async", "AsyncRebatched")[seed % 3]
    done, runs = [mode], []

    def start():
        slots = chance.choice((1, 1, 2, 2, 3, 4, 8))
        options = (f"--instances-per-node={slots}", "--wait-limit=30", "--max-restarts=9")
        runs.append(poprun(*command(folder, *options, holds=[f"{call}-0" for call in calls]), MODE=mode))
        done.append(f"a poprun with {slots}")

    def said():
        return "".join(run.said() for run in runs)

    start()
    for call in calls:
        until = time.monotonic() + launching.LIMIT
        while f"holds {call}-0 " not in said():
            assert time.monotonic() < until, f"{done}: call {call} is not reached\n{said()}"
            time.sleep(0.02)
        alive = [run for run in runs if not run.has_ended()]
        action = chance.choice(ACTIONS)
        done.append(f"at call {call}: {action}")
        act(action, chance, alive, start)
        if all(run.has_ended() for run in runs):
            start()
        (folder / f"go-{call}-0").touch()
    for run in runs:
        run.wait()
    assert any(run.code == 0 for run in runs), f"{done}\n{said()}"
    ends = [line.split() for line in said().splitlines() if " ends in round " in line]
    return done, int(max(ends, key=lambda words: int(words[-1]))[3])  # of the last round


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scripts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first script")
    flags = parser.parse_args()
    ended: list[int] = []  # the seeds of scripts that ended
    same: list[int] = []  # of these, in the state of the undisturbed training
    with tempfile.TemporaryDirectory() as name:
        (one := Path(name) / "one").mkdir()
        expected = undisturbed(one)
        for seed in range(flags.seed, flags.seed + flags.scripts):
            (folder := Path(name) / str(seed)).mkdir()
            runs = []

            def poprun(*words, folder=folder, runs=runs, **variables):
                runs.append(launching.Poprun(folder, words, **variables))
                return runs[-1]

            try:
                done, instances = play(poprun, folder, seed)
                ended.append(seed)
                where = difference(outcome(folder, instances), expected)
                assert not where, f"{where} after {', '.join(done)}"
                same.append(seed)
                print(f"script {seed}: the same state after {', '.join(done)}", flush=True)
            except AssertionError as error:
                how = "another state" if seed in ended else "did not end"
                print(f"script {seed}: {how}: {error}", flush=True)
            finally:
                for run in runs:
                    run.clean_up()
    count = flags.scripts
    print(
        f"of {count} scripts {count - len(ended)} did not end, {len(ended) - len(same)} ended in another state"
    )
    return int(len(same) < count)


if __name__ == "__main__":
    sys.exit(main())
