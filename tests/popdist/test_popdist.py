"""One process without a launcher, and a process as poprun would start it."""

import os
import subprocess
import sys
from itertools import chain

import pytest
import torch

import popdist
import poptorch
from popdist import rendezvous
from popengine import environment

LAUNCHED = environment.Launch(
    total_replicas=8, local_replicas=2, ipus_per_replica=4, replica_offset=6, instances=4, instance=3
)


@pytest.fixture
def launched(monkeypatch):
    for name, value in LAUNCHED.variables().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "1e9"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(value, monkeypatch):
    monkeypatch.setenv(environment.WAIT_LIMIT, value)
    with pytest.raises(ValueError, match=f"POPDIST_WAIT_LIMIT is '{value}', and must be a number of seconds"):
        environment.read_seconds(environment.WAIT_LIMIT, 600)


def test_without_a_launcher_there_is_one_instance_with_one_replica():
    assert not popdist.isPopdistEnvSet()
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (1, 1)
    assert (popdist.getNumInstances(), popdist.getInstanceIndex(), popdist.getLocalInstanceIndex()) == (
        1,
        0,
        0,
    )
    popdist.init()
    popdist.synchronize()
    assert popdist.execute_on_instances({0}, lambda x: x + 1, 1) == 2
    assert popdist.execute_on_instances({1}, lambda: 1) is None


def test_a_launched_process_knows_its_place(launched):
    assert popdist.isPopdistEnvSet()
    assert environment.read_launch() == LAUNCHED
    assert popdist.getNumTotalReplicas() == 8
    assert popdist.getInstanceIndex() == 3
    assert popdist.getReplicaIndexOffset() == 6
    assert popdist.checkNumIpusPerReplica(4) and not popdist.checkNumIpusPerReplica(2)


def test_options_take_replicas_and_place_from_the_launcher(launched):
    opts = popdist.poptorch.Options(ipus_per_replica=4)
    assert isinstance(opts, poptorch.Options)
    assert opts.replication_factor == 2
    assert (opts.Distributed.processId, opts.Distributed.numProcesses) == (3, 4)
    assert opts.clone().Distributed.numProcesses == 4


@pytest.mark.parametrize(
    "name, call",
    [
        ("replicationFactor", lambda opts: opts.replicationFactor(2)),
        ("useIpuId", lambda opts: opts.useIpuId(1)),
        ("Distributed.disable", lambda opts: opts.Distributed.disable()),
        ("Distributed.setEnvVarNames", lambda opts: opts.Distributed.setEnvVarNames("A", "B")),
        ("Distributed.configureProcessId", lambda opts: opts.Distributed.configureProcessId(0, 1)),
        ("Distributed.configureProcessId", lambda opts: opts.Distributed.configureProcessId(1)),
    ],
)
def test_what_the_launcher_decides_can_not_be_set(name, call):
    with pytest.raises(RuntimeError, match=rf"Cannot call `{name}` with popdist.poptorch.Options"):
        call(popdist.poptorch.Options())


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="POPDIST_NUM_LOCAL_REPLICAS is 'two'"):
        environment.read_launch({environment.TOTAL: "4", environment.LOCAL: "two"})


def test_asking_for_the_index_loads_no_torch():
    program = "import popdist, sys; popdist.getInstanceIndex(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
    ],
    ids=["torchrun", "mpirun", "srun"],
)
def test_processes_of_other_launchers_are_instances_of_one_replica(variables):
    assert environment.is_launched(variables)
    expected = environment.Launch(4, 1, 1, replica_offset=3, local_instance=1, instances=4, instance=3)
    assert environment.read_launch(variables) == expected
    assert not environment.is_launched(
        {name: "1" if number == "4" else "0" for name, number in variables.items()}
    )


# ---- replicas that span several instances -------------------------------------------------------------------


def spanned(instance):
    """An instance of four, of which two run one replica of four ipus."""
    return environment.Launch(
        total_replicas=2,
        ipus_per_replica=4,
        replica_offset=instance // 2,
        local_instance=instance,
        instances=4,
        instance=instance,
    )


def set_variables(monkeypatch, launch):
    for name, value in launch.variables().items():
        monkeypatch.setenv(name, value)


def rows_of(options):
    dataset = torch.utils.data.TensorDataset(torch.arange(16))
    loader = poptorch.DataLoader(options.randomSeed(1), dataset, batch_size=2, shuffle=True)
    return [batch[0].tolist() for batch in loader]


def test_an_instance_knows_its_part_of_a_replica_and_reads_the_rows_of_the_replica(monkeypatch):
    read = []
    for instance in range(4):
        set_variables(monkeypatch, spanned(instance))
        assert environment.read_launch() == spanned(instance)
        assert (popdist.getNumInstances(), popdist.getNumInstancesPerReplica()) == (4, 2)
        assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (2, 1)
        assert popdist.getReplicaIndexOffset() == instance // 2
        assert popdist.getDeviceId() == 2 * instance
        assert environment.read_launch().ipus == (range(0, 2), range(2, 4))[instance % 2]
        read.append(rows_of(popdist.poptorch.Options()))
    assert read[0] == read[1] and read[2] == read[3]
    assert sorted(row for batch in read[0] + read[2] for row in batch) == list(range(16))


@pytest.fixture
def under_torchrun(monkeypatch):
    """A function that sets the variables of one of `count` processes of torchrun."""

    def set_rank(rank, count):
        for name in (environment.TOTAL, environment.LOCAL, environment.OFFSET, environment.LOCAL_INSTANCE):
            monkeypatch.setenv(name, "")  # so that the end of the test removes what the options set
            monkeypatch.delenv(name)
        for name, value in zip(environment.TORCHRUN, (count, rank, rank), strict=True):
            monkeypatch.setenv(name, str(value))

    return set_rank


@pytest.mark.parametrize("count", [1, 2, 4])
def test_total_replicas_are_shared_by_the_processes_that_there_are(under_torchrun, count):
    rows = []
    for rank in range(count):
        under_torchrun(rank, count)
        options = popdist.poptorch.Options(total_replicas=4)
        assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (4, 4 // count)
        assert (popdist.getInstanceIndex(), popdist.getNumInstances()) == (rank, count)
        assert popdist.getReplicaIndexOffset() == rank * 4 // count
        assert options.replication_factor == popdist.poptorch.Options().replication_factor == 4 // count
        rows.append(rows_of(options))
    calls = [list(chain(*call)) for call in zip(*rows, strict=True)]  # the rows of each call, by replica
    under_torchrun(0, 1)
    assert calls == rows_of(popdist.poptorch.Options(total_replicas=4))


@pytest.mark.parametrize("numbers", [(0,), (3,), (6,), (1, 2, 4), (4, 3, 4), (2, 2, 3), (2, 0, 4)])
def test_replicas_that_the_processes_can_not_share_are_refused(under_torchrun, numbers):
    """The numbers: total_replicas, instances_per_replica and ipus_per_replica."""
    under_torchrun(0, 4)
    total, parts, ipus = (*numbers, None, None)[:3]
    with pytest.raises(RuntimeError, match=r"4 processes can't run(.|\n)*\n  fix: total_replicas"):
        popdist.poptorch.Options(ipus, parts, total)
    assert environment.TOTAL not in os.environ


def test_under_torchrun_options_say_how_many_instances_run_a_replica(under_torchrun):
    read = []
    for rank in range(4):
        under_torchrun(rank, 4)
        read.append(rows_of(popdist.poptorch.Options(ipus_per_replica=4, instances_per_replica=2)))
        assert (popdist.getNumInstances(), popdist.getNumInstancesPerReplica()) == (4, 2)
        assert (popdist.getNumTotalReplicas(), popdist.getReplicaIndexOffset()) == (2, rank // 2)
    assert read[0] == read[1] != read[2] == read[3]
    with pytest.raises(RuntimeError, match="\n  fix: "):  # one number for all models of a process
        popdist.poptorch.Options(ipus_per_replica=4, instances_per_replica=4)


@pytest.mark.parametrize("numbers", [(4, 4), (4, 1), (3,), (3, 2), (4, 2, 4)])
def test_numbers_that_poprun_contradicts_are_an_error(monkeypatch, numbers):
    """The numbers: ipus_per_replica, instances_per_replica and total_replicas."""
    set_variables(monkeypatch, spanned(0))
    assert popdist.poptorch.Options(4, 2, 2).replication_factor == 1
    with pytest.raises(RuntimeError, match="\n  fix: "):
        popdist.poptorch.Options(*numbers)


@pytest.mark.parametrize(
    "nodes, first",
    [("node7", "node7"), ("gpu-[03-06,09]", "gpu-03"), ("a1,b[2-3]", "a1"), ("rack2-n[11]", "rack2-n11")],
)
def test_the_first_node_of_a_step_is_where_its_tasks_meet(monkeypatch, nodes, first):
    for name, value in {"STEP_ID": "0", "STEP_NODELIST": nodes, "JOB_ID": "31234"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert rendezvous._store_address() == (first, 31234)


def test_the_script_of_a_job_is_one_process_whatever_its_steps_will_have(monkeypatch):
    for name, value in {"JOB_ID": "1", "NTASKS": "4", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert not popdist.isPopdistEnvSet() and popdist.getNumInstances() == 1
