"""What `install()`, which torch calls at the end of `import torch`, adds to that import."""

import json
import statistics
import subprocess
import sys

HEAD = ["import torch", "median (ms)", "fastest (ms)", "install() alone (ms)", "its slowest (ms)"]
WAYS = {
    "without Pando": False,  # torch looks for entry points, and ours is hidden from it
    "with Pando, no Lightning": True,
}
_PROGRAM = """
import importlib.metadata, json, sys, time
with_pando, spent = json.loads(sys.argv[1]), []
find = importlib.metadata.entry_points
class Timed:
    def __init__(self, entry): self.entry, self.name = entry, entry.name
    def load(self):
        start = time.process_time()
        install = self.entry.load()
        def timed():
            install()
            spent.append(time.process_time() - start)
        return timed
def entry_points(**wanted):
    found = find(**wanted)
    if wanted.get("group") != "torch.backends":
        return found
    return [Timed(e) if e.name == "pando" else e for e in found if with_pando or e.name != "pando"]
importlib.metadata.entry_points = entry_points
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
start = time.process_time()
import torch
print(json.dumps([time.process_time() - start, sum(spent)]))
assert bool(spent) == with_pando, "torch did not call install()"
"""


def imports(rounds: int) -> list[list[str]]:
    """Rows of `HEAD`, in processor time; each way once a round, each time in a new process."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for turn in range(rounds + 1):
        for name, with_pando in list(WAYS.items())[:: 1 if turn % 2 else -1]:
            command = [sys.executable, "-c", _PROGRAM, json.dumps(with_pando)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if turn:  # the first round warms up
                found[name].append(tuple(json.loads(done.stdout)))
    rows = []
    for name, times in found.items():
        whole, install = zip(*times, strict=True)
        figures = [statistics.median(whole), min(whole), statistics.median(install), max(install)]
        rows.append([name, *(f"{1e3 * seconds:.1f}" for seconds in figures)])
    return rows
