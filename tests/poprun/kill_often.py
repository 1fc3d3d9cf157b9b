"""Kill instances, or poprun, at random moments, many times: every training ends in the bits of one that nobody killed.

    python tests/poprun/kill_often.py --rounds 200 [--seed 0] [--instances 2] [--parts 1] [--calls 40]

A training has dropout, BatchNorm, state that replicas share and a checkpoint every other call. In each round
something is done to it once or several times: SIGKILL, SIGTERM or SIGINT to an instance or to poprun, SIGSTOP
for some seconds to an instance. When poprun has ended with a failure it is started again. The program ends
with 1 at the first round that ends in other bits, hangs, or leaves a process behind.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

PROGRAM = Path(__file__).parents[1] / "popdist" / "checkpoint_program.py"
sys.path.insert(0, str(PROGRAM.parent))

from checkpoint_program import difference  # noqa: E402

MARK = "KILL_OFTEN"
ENDINGS = [signal.SIGKILL] * 4 + [signal.SIGTERM, signal.SIGINT, signal.SIGSTOP]


def start(flags, folder, mark):
    words = ["--num-replicas", flags.instances // flags.parts, "--num-instances", flags.instances]
    words += ["--ipus-per-replica", flags.parts, "--max-restarts", 50]
    command = [sys.executable, "-m", "poprun", *words, sys.executable, PROGRAM, folder, flags.calls]
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(
            list(map(str, command)),
            stdout=log,
            stderr=log,
            env={**os.environ, MARK: mark},
            start_new_session=True,
        )


def processes(mark, word=""):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            if f"{MARK}={mark}".encode() in environment and word in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def is_poprun(pid):
    try:
        return "-m\0poprun\0" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return True


def harm(chance, poprun, mark, stop):
    """Do something to somebody; what was done."""
    number = chance.choice(ENDINGS)
    # Poprun's own processes have the program's name in their command lines too.
    instances = [pid for pid in processes(mark, "checkpoint_program") if not is_poprun(pid)]
    of_poprun = number != signal.SIGSTOP and chance.random() < 0.3
    victims = [poprun.pid] if of_poprun else instances
    if not victims:
        return "nobody there"
    victim = chance.choice(victims)
    try:
        os.kill(victim, number)
        if number == signal.SIGSTOP:
            time.sleep(stop)
            os.kill(victim, signal.SIGCONT)
    except ProcessLookupError:
        return "gone already"
    return f"{number.name} to {'poprun' if of_poprun else 'an instance'}"


def played(flags, chance, folder, mark, usual):
    """One round; what was done in it."""
    done, until = [], time.monotonic() + flags.limit
    poprun = start(flags, folder, mark)
    moments = sorted(time.monotonic() + chance.uniform(0, usual) for _ in range(chance.randint(1, 3)))
    while True:
        if time.monotonic() > until:
            raise SystemExit(f"the round hangs: {done}; see {folder / 'log'}")
        if moments and time.monotonic() > moments[0]:
            moments.pop(0)
            done.append(harm(chance, poprun, mark, flags.stop))
        code = poprun.poll()
        if code == 0:
            return done
        if code is not None:
            wait = time.monotonic() + 240
            while processes(mark) and time.monotonic() < wait:
                time.sleep(0.05)
            if left := processes(mark):
                raise SystemExit(f"processes were left behind: {left}; {done}")
            poprun = start(flags, folder, mark)
        time.sleep(0.02)


def results(folder, instances):
    """What all instances have come to; the losses are of the calls since the last checkpoint only."""
    found = [torch.load(folder / f"result-{i}.pt") for i in range(instances)]
    return [{k: v for k, v in one.items() if k != "losses"} for one in found]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--parts", type=int, default=1, help="the instances of a replica: 1 or 2")
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--limit", type=float, default=600, help="seconds of a round")
    parser.add_argument("--stop", type=float, default=10, help="seconds between SIGSTOP and SIGCONT")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        whole.mkdir()
        begun = time.monotonic()
        if code := start(flags, whole, "whole").wait(flags.limit):
            raise SystemExit(f"the unbroken training ended with {code}:\n{(whole / 'log').read_text()}")
        usual = time.monotonic() - begun
        expected = results(whole, flags.instances)
        for number in range(flags.rounds):
            folder = Path(name) / str(number)
            folder.mkdir()
            chance = random.Random(f"{flags.seed} {number}")
            done = played(flags, chance, folder, str(number), usual)
            if where := difference(results(folder, flags.instances), expected):
                raise SystemExit(
                    f"round {number} ended in other bits: {where}\n{(folder / 'log').read_text()}"
                )
            print(f"round {number}: the same bits after {', '.join(done) or 'nothing'}", flush=True)
    print(f"{flags.rounds} rounds, all with the bits of the training that nobody killed")


if __name__ == "__main__":
    main()
