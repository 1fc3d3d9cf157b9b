"""What instances compute together outside the model, in real processes."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import processes
import pytest
import torch

import popdist
import quick_python
from popdist import collectives

SRC = Path(popdist.__file__).parents[1]
ALIASES = SRC / "poprun/aliases"


def all_of_them():
    popdist.init()
    me, conjugated = popdist.getInstanceIndex(), torch.tensor([1 + 2j]).conj()
    found = {
        "sum": collectives.all_reduce(torch.tensor([1.0, me])).tolist(),
        "mean": collectives.all_reduce(float(me), "mean"),
        "max": collectives.all_reduce(torch.tensor(me), "max").item(),
        "rows": collectives.all_gather(torch.full((me, 2), me)).tolist(),
        "scalar": collectives.all_reduce(torch.tensor(me)).item(),
        "complex": [
            *collectives.all_gather(conjugated).tolist(),
            *collectives.all_reduce(conjugated).tolist(),
        ],
    }
    torch.manual_seed(me)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    model.register_buffer("strided", torch.full((3, 2), me).t())
    collectives.broadcast(model.state_dict(), root=2)
    torch.manual_seed(2)
    twin = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    twin.register_buffer("strided", torch.full((2, 3), 2))
    found["broadcast"] = all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    try:
        collectives.all_reduce(torch.zeros(3 + (me == 1)))
    except popdist.poptorch.poptorch.Error as error:
        found["error"] = error.message
    add = partial(collectives.all_reduce, me + 1)
    popdist.execute_on_instances({0, 1}, add)
    popdist.synchronize()
    before = len(os.listdir("/proc/self/fd"))
    found["of two"] = [popdist.execute_on_instances({0, 1}, add) for _ in range(10)]
    popdist.synchronize()
    found["files"] = len(os.listdir("/proc/self/fd")) - before
    norm = torch.nn.BatchNorm1d(1, momentum=0.5)
    executor = popdist.poptorch.poptorch.inferenceModel(norm, popdist.poptorch.Options())
    executor(torch.full((2, 1), float(me)))
    executor.averageRunningStatistics()
    found["statistics"] = norm.running_mean.item()
    sys.path.append(str(ALIASES))
    import horovod.torch as hvd

    hvd.init()
    value = torch.tensor([float(me)])
    found["horovod"] = [
        (hvd.rank(), hvd.size(), hvd.local_rank()),
        hvd.allreduce(value).item(),
        hvd.allreduce(value, op=hvd.Sum).item(),
        hvd.allreduce(value, average=False).item(),
        hvd.allreduce(value, average=True).item(),
        [each.item() for each in hvd.grouped_allreduce([value, 2 * value], op=hvd.Max)],
        hvd.broadcast(value, 1).item(),
        hvd.allgather(value).tolist(),
        hvd.broadcast_object({"epoch": me}, 2),
    ]
    return found


def test_each_collective_has_the_values_of_all_instances_and_errors_come_to_all():
    for me, ended in enumerate(processes.run(all_of_them, 3)):
        assert ended.error == ""
        one, error = ended.value, ended.value.pop("error")
        assert one.pop("files") <= 0  # functions on some instances leave no connections behind
        assert one == {
            "sum": [3.0, 3.0],
            "mean": 1.0,
            "max": 2,
            "rows": [[1, 1], [2, 2], [2, 2]],
            "scalar": 3,
            "complex": [1 - 2j] * 3 + [3 - 6j],
            "broadcast": True,
            "statistics": 0.5,
            "of two": [3.0 if me < 2 else None] * 10,
            "horovod": [(me, 3, me), 1.0, 3.0, 3.0, 1.0, [2.0, 4.0], 1.0, [0.0, 1.0, 2.0], {"epoch": 2}],
        }
        assert "differ at popdist.collectives.all_reduce(sum)" in error
        assert "(3,) torch.float32 in instances 0, 2; (4,) torch.float32 in instance 1" in error


def of_parts_of_replicas():
    popdist.init()
    me = popdist.getInstanceIndex()
    correct, rows = torch.tensor([float(me // 2)]), torch.tensor([me // 2] * (1 + me // 2))
    names = "sum", "mean", "max"
    return [
        *(collectives.all_reduce(correct, op).item() for op in names),
        collectives.all_gather(rows).tolist(),
    ]


def test_what_all_instances_of_a_replica_have_counts_once():
    for ended in processes.run(of_parts_of_replicas, 4, parts=2):
        assert ended.value == [1.0, 0.5, 1.0, [0, 1, 1]], ended.error


def test_alone_each_collective_gives_what_it_was_given():
    value = torch.tensor([1.0, 2.0])
    assert torch.equal(collectives.all_reduce(value), value)
    assert collectives.all_reduce(torch.tensor(3), "mean").item() == 3.0
    assert collectives.all_reduce(torch.tensor(3), "mean").is_floating_point()
    assert torch.equal(collectives.all_gather(value), value)
    assert collectives.broadcast({"a": value})["a"] is value
    with pytest.raises(ValueError, match="op is 'product'"):
        collectives.all_reduce(value, "product")


def said(program, folder):
    """What a program prints that poprun has not started, with a folder on its path."""
    done = subprocess.run(
        [*quick_python.words(), "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), str(folder)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_program_without_poprun_finds_no_library_that_is_not_installed(tmp_path):
    """transformers and others look for Horovod, and use what they find."""
    program = "from importlib.util import find_spec; import popdist, poptorch; print(*map(find_spec, {}))"
    assert said(program.format(["horovod", "libpvti"]), tmp_path) == "None None\n"


def test_horovods_and_libpvtis_names_work_in_one_process():
    program = """import horovod.torch as hvd, libpvti as pvti, torch
hvd.init()
channel = pvti.createTraceChannel("training")
with torch.profiler.profile() as profile, pvti.Tracepoint(channel, "epoch"):
    pass
print(hvd.size(), hvd.__file__, [event.key for event in profile.key_averages()])"""
    text = said(program, ALIASES)
    assert text.startswith(f"1 {ALIASES}") and "'training.epoch'" in text
