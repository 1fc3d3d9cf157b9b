"""Processes that srun starts are instances of one replica each; without MASTER_ADDR the job says where they meet."""

import processes
import pytest
import training
from ports import free_port

import popdist
from popdist import rendezvous


def job():
    """A number of a job whose port is free."""
    while (port := free_port()) < 20_000:
        pass
    return port - 20_000


def step(tasks):
    """The variables of each task of `srun --ntasks TASKS`, as the manual of srun names them."""
    number = str(job())
    common = {
        "SLURM_JOB_ID": number,
        "SLURM_JOBID": number,
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "POPDIST_INIT_TIMEOUT": str(processes.LIMIT),
    }
    return [{**common, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(tasks)]


def trained():
    popdist.init()
    place = popdist.getInstanceIndex(), popdist.getNumInstances(), popdist.getNumTotalReplicas()
    executor, model, _ = training.executor()
    executor(*training.batch(0))
    return place, training.weights(model)


def test_tasks_of_srun_train_together_to_the_weights_of_poprun():
    of_srun = processes.finish(processes.start(trained, step(2)))
    of_poprun = processes.run(trained, 2)
    assert [ended.error for ended in (*of_srun, *of_poprun)] == [""] * 4
    assert [ended.value[0] for ended in of_srun] == [(0, 2, 2), (1, 2, 2)]
    assert [ended.value for ended in of_srun] == [ended.value for ended in of_poprun]


def test_a_task_that_does_not_come_is_named():
    first, _ = step(2)
    (ended,) = processes.finish(processes.start(trained, [{**first, "POPDIST_INIT_TIMEOUT": "1"}]))
    assert "after 1 s instance 1 of 2 had not come to localhost:" in ended.error


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
