"""Long runs against a real API server: `kill` (100 kills among two operators), `load` (200 jobs of 4 workers)."""

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from jobs import job
from real_cluster import JOBS, binaries, world

from ipujob.client import Cluster
from ipujob.operator import Operator

# What jobs do, and what they must end as: (STATUS, restarts of each instance). The second attempt of `once` succeeds.
KINDS = {
    "fail": ("exit 5", {"type": "Never"}, "Failed", 0),
    "limit": ("exit 1", {"type": "OnFailure", "backOffLimit": 2}, "Failed", 2),
    "once": ("exit $((3 * (1 - PANDO_RESTARTS)))", {"type": "ExitCode", "exitCodes": "3"}, "Completed", 1),
    "good": ("sleep 1", {"type": "OnFailure"}, "Completed", 0),
}


def kill(made, jobs=20, kills=100, seed=0):
    """Kill one of two operators at random moments while jobs run; everything that is not as it should be."""
    draw = random.Random(seed)
    began = made.scratch / f"began-{seed}"
    began.touch()
    names = {}
    for number in range(jobs):
        kind = list(KINDS)[number % len(KINDS)]
        text, policy, status, restarts = KINDS[kind]
        command = ["/bin/sh", "-c", f"echo $HOSTNAME $PANDO_RESTARTS >> {began}; {text}"]
        name, instances = f"{kind}-{seed}-{number}", 1 + number % 2
        value = job(name, container={"command": command}, restartPolicy=policy, jobInstances=instances)
        names[made.create(value)] = (status, restarts * instances)
    made.start_operator()
    for _ in range(kills):
        time.sleep(draw.uniform(0.0, 0.7))
        victim = draw.choice(made.operators)
        victim.kill()
        victim.wait()
        made.operators.remove(victim)
        made.start_operator()
    found = []
    for name, expected in names.items():
        status = made.end(name)
        if (status["launcherStatus"], status["restartCount"]) != expected:
            found.append(
                f"{name}: {status['launcherStatus']}, {status['restartCount']} restarts, not {expected}"
            )
    twice = [line for line, times in Counter(began.read_text().splitlines()).items() if times > 1]
    return found + [f"{line}: began twice" for line in twice]


def load(made, jobs=200, workers=4):
    """One operator and many jobs at once: its requests, and the time until all have ended."""

    os.environ["KUBECONFIG"] = str(made.account)
    cluster, requests = Cluster(), Counter()
    call = cluster._call

    def counted(method, *arguments, **named):
        requests[method] += 1
        return call(method, *arguments, **named)

    cluster._call = counted
    for number in range(jobs):
        command = ["/bin/true"]
        made.create(job(f"load-{number}", container={"command": command}, workers={"replicas": workers},
                        launcher={"command": command}))  # fmt: skip
    operator = Operator(cluster, "default", log=lambda text: None)
    rounds, began, busy = 0, time.monotonic(), 0.0
    while True:
        before = time.monotonic()
        operator.reconcile()
        busy += time.monotonic() - before
        rounds += 1
        known = made.cluster.call("GET", JOBS)["items"]
        if sum("completionTime" in each.get("status", {}) for each in known) == jobs:
            break
        time.sleep(0.2)
    total = time.monotonic() - began
    print(f"{jobs} jobs of {workers} workers: {total:.1f} s, {rounds} rounds of {busy / rounds:.2f} s")
    print(f"per job: {total / jobs:.3f} s, {sum(requests.values()) / jobs:.1f} requests ({dict(requests)})")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", choices=("kill", "load"))
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--kills", type=int, default=100)
    words = parser.parse_args()
    folder, reason = binaries()
    if folder is None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as scratch, world(folder, Path(scratch)) as made:
        made.install()
        if words.run == "load":
            load(made, words.jobs or 200)
            return
        made.start_operator()
        found = kill(made, words.jobs or 20, words.kills)
        print(
            "\n".join(found)
            or f"{words.kills} kills, {words.jobs or 20} jobs: every job ended as it should, no pod began twice"
        )
        raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
