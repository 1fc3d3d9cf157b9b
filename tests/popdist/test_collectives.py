"""What instances compute together outside the model, in real processes."""

import os
import subprocess
import sys
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
    me = popdist.getInstanceIndex()
    found = {
        "sum": collectives.all_reduce(torch.tensor([1.0, me])).tolist(),
        "mean": collectives.all_reduce(float(me), "mean"),
        "max": collectives.all_reduce(torch.tensor(me), "max").item(),
        "rows": collectives.all_gather(torch.full((me, 2), me)).tolist(),
        "scalar": collectives.all_reduce(torch.tensor(me)).item(),
    }
    torch.manual_seed(me)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    collectives.broadcast(model.state_dict(), root=2)
    torch.manual_seed(2)
    twin = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    found["broadcast"] = all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    try:
        collectives.all_reduce(torch.zeros(3 + (me == 1)))
    except popdist.poptorch.poptorch.Error as error:
        found["error"] = error.message
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


@pytest.fixture(scope="module")
def found():
    return [ended.value or ended.error for ended in processes.run(all_of_them, 3)]


def test_sums_and_extremes_are_those_of_all_instances(found):
    for one in found:
        assert one["sum"] == [3.0, 3.0]
        assert (one["mean"], one["max"], one["scalar"]) == (1.0, 2, 3)


def test_rows_are_gathered_in_the_order_of_instances_however_many_each_has(found):
    assert all(one["rows"] == [[1, 1], [2, 2], [2, 2]] for one in found)


def test_a_state_dict_is_broadcast_from_one_instance(found):
    assert all(one["broadcast"] for one in found)


def test_another_shape_in_one_instance_is_an_error_in_all(found):
    for one in found:
        assert "differ at popdist.collectives.all_reduce(sum)" in one["error"]
        assert "(3,) torch.float32 in instances 0, 2; (4,) torch.float32 in instance 1" in one["error"]


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


def test_horovods_names_are_popdists_collectives(found):
    for me, one in enumerate(found):
        assert one["horovod"] == [
            (me, 3, me),
            1.0,
            3.0,
            3.0,
            1.0,
            [2.0, 4.0],
            1.0,
            [0.0, 1.0, 2.0],
            {"epoch": 2},
        ]


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


@pytest.mark.parametrize("name", ["horovod", "libpvti"])
def test_a_program_without_poprun_finds_no_library_that_is_not_installed(tmp_path, name):
    """transformers and others look for Horovod, and use what they find."""
    program = f"import importlib.util, popdist, poptorch; print(importlib.util.find_spec('{name}'))"
    assert said(program, tmp_path) == "None\n"


def test_horovods_names_work_in_one_process(tmp_path):
    program = "import horovod.torch as hvd; hvd.init(); print(hvd.size(), hvd.__file__)"
    assert said(program, ALIASES).startswith(f"1 {ALIASES}")


def test_a_program_finds_libpvtis_names_which_record_ranges():
    program = """import libpvti as pvti, torch
channel = pvti.createTraceChannel("training")
with torch.profiler.profile() as profile, pvti.Tracepoint(channel, "epoch"):
    pass
print([event.key for event in profile.key_averages()])"""
    assert "'training.epoch'" in said(program, ALIASES)
