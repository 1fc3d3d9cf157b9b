"""compare names the faults of loops on several ranks, and calls no right loop wrong (the loops are in `loops.py`)."""

import subprocess
import sys

import loops
import processes
import pytest
from ports import free_port


@pytest.fixture(scope="session", params=loops.LOOPS)
def results(request):
    """What `compare` returned for each loop, on each rank: as text, conclusion, rows, ...; and what it printed."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(request.param)}
    environments = [{**where, "RANK": str(rank)} for rank in range(request.param)]
    every = processes.finish(processes.start(loops.compare_all, environments))
    assert not any(ended.error for ended in every), every
    return [ended.value for ended in every]


@pytest.mark.kind("loops on several ranks")
def test_right_loops_are_called_right_and_the_faults_of_others_are_named(results):
    for name, (_, conclusion, _, is_equal, _) in results[0].items():
        rounded = f"all equal up to rounding{' of bfloat16' * (name in loops.IN_BFLOAT16)}"
        right = "all equal", rounded, f"{rounded.replace('all', 'all gradients are')}; the loss is "
        is_named = conclusion.startswith(right) if is_equal else loops.FAULTS.get(name, "") in conclusion
        assert is_equal is (name not in loops.FAULTS) and is_named, f"{name}: {conclusion}"
    for (text, *same, printed), *others in zip(*(of_rank.values() for of_rank in results), strict=True):
        assert printed == text + "\n" and all(other == (text, *same, "") for other in others)


@pytest.mark.parametrize("results", [2], indirect=True)
def test_the_table_shows_the_ranks_of_a_fault(results):
    rows = {name: row for name, *row in results[0]["pipeline stepped on one stage"][2]}
    assert rows["layers.0.0.weight"] == ["equal", "equal"]
    assert rows["last.weight"][0] == "equal" and rows["last.weight"][1].startswith("at [0, 0]: ")
    gradient, _ = {name: row for name, *row in results[0]["pipeline tied, not summed"][2]}["embed.weight"]
    assert gradient.startswith("rank 0: at [0, 0]: ") and "; rank 1: at [0, 0]: " in gradient


FAILING = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from poptorch import Error
from poptorch.testing import compare

dist.init_process_group("gloo", timeout=timedelta(seconds=240))
rank = dist.get_rank()

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

def fails(model, optimizer, batch):
    if rank == 1:
        raise ValueError("no rows")  # the line
    dist.all_reduce(torch.ones(1))

def ends(model, optimizer, batch):
    if rank == 1:
        sys.exit()
    dist.all_reduce(torch.ones(1))

def attempt(*arguments, **keywords):
    try:
        compare(*arguments, **keywords)
    except Error as error:
        with open(f"{sys.argv[1]}/{rank}", "a") as file:
            print(error.message.replace("\\n", " | "), file=file)

torch.manual_seed(0)
net, rows = Net(4, 4), torch.randn(8, 4)
attempt(net, None, rows, update={loop})  # first, as errors close the connections
if {loop} is ends:
    os._exit(0)
attempt(net, rows, None, update=fails)
attempt(net, None, rows, update=fails, micro_batches=2 + 2 * rank)
attempt(net, None, rows, torch.optim.SGD(net.parameters(), lr=1.0 + rank), update=fails)
attempt(torch.nn.Linear(4, 4), None, rows, update=fails)
os._exit(0)  # the connections are closed
"""


@pytest.fixture(scope="session")
def errors(tmp_path_factory):
    """The errors on each rank, line by line, of two launches."""
    found = {}
    for loop in ("fails", "ends"):
        folder = tmp_path_factory.mktemp(loop)
        (folder / "program.py").write_text(FAILING.replace("{loop}", loop))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*command, folder / "program.py", str(folder)], capture_output=True, timeout=900)
        found[loop] = [path.read_text().splitlines() for path in sorted(folder.glob("[01]"))]
    return found


def test_a_rank_that_raises_is_an_error_on_all_ranks_with_its_line(errors):
    first, second = (lines[0] for lines in errors["fails"])
    assert first == second and first.startswith("compare: rank 1: ValueError: no rows |   at ")
    assert "program.py:16 | rank 0: RuntimeError: " in first


def test_a_rank_that_leaves_is_an_error_on_the_others(errors):
    assert (
        errors["ends"][0][-1].startswith("compare: rank 1: SystemExit: ")
        and "program.py:21" in errors["ends"][0][-1]
    )


def test_other_arguments_or_types_are_an_error_on_all_ranks(errors):
    one, other = (lines[1:] for lines in errors["fails"])
    assert one == other and len(one) == 4
    assert "ranks 0 and 1: options takes a poptorch.Options; found a Tensor" in one[0]
    assert "rank 1 passes another argument than rank 0: the number of micro-batches" in one[1]
    assert "rank 1 passes another argument than rank 0: the optimizer" in one[2] and "'lr': 2.0" in one[2]
    assert one[3].startswith("compare: rank 0: forward returns no loss")
