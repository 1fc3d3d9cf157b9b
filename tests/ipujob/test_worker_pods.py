"""What a job becomes: pods, a Service, environments, devices."""

import pytest
from jobs import job, seed

from ipujob import pods
from ipujob.rules import parse


def made(value, number=0, attempt=0, images=()):
    parsed, faults = parse(value, images=images)
    assert not faults, faults
    return pods.worker_pod(parsed, number, attempt)


def named_seed():
    value = seed("bert")
    value["metadata"] = {"name": "bert"}
    return value


def environment(pod):
    return {
        each["name"]: each.get("value", each.get("valueFrom")) for each in pod["spec"]["containers"][0]["env"]
    }


def test_a_tutorials_pod_keeps_its_template():
    value = named_seed()
    pod = made(value)
    template = value["spec"]["workers"]["template"]["spec"]
    own = {"IPUOF_VIPU_API_PARTITION_ID": "p-bert-default-0", "PANDO_RESTARTS": "0"}
    assert environment(pod) == own  # popdist's variables are not set: the command itself may call poprun
    assert pod["metadata"]["name"] == pod["spec"]["hostname"] == "bert-worker-0"
    assert pod["metadata"]["labels"] == {
        "graphcore.ai/ipujob": "bert", "pando/instance": "0", "pando/worker": "0", "pando/attempt": "0",
    }  # fmt: skip
    assert "subdomain" not in pod["spec"]
    expected = {**template, "hostname": "bert-worker-0", "terminationGracePeriodSeconds": 30}
    expected["containers"] = [{**template["containers"][0], "env": pod["spec"]["containers"][0]["env"]}]
    assert pod["spec"] == expected


def test_workers_of_a_joined_job_run_poprun_and_find_the_first():
    value = job(jobInstances=2, ipusPerJobInstance="8", modelReplicasPerWorker="2", workersPerJobInstance="2")
    pod = made(value, 3, attempt=1)
    command = "poprun --num-instances 2 --num-replicas 4 --ipus-per-replica 2 python3 train.py"
    assert pod["spec"]["containers"][0]["command"] == command.split()
    assert pod["spec"]["subdomain"] == "train"
    assert environment(pod) == {
        "IPUOF_VIPU_API_PARTITION_ID": "p-train-default-1",
        "POPRUN_NUM_NODES": "2",
        "POPRUN_NODE_RANK": "1",
        "MASTER_ADDR": "train-worker-2.train",
        "MASTER_PORT": "29500",
        "PANDO_RESTARTS": "1",
    }


def test_a_launchers_command_runs_in_every_worker_instead_of_the_templates():
    launcher = {
        "command": ["poprun", "--num-instances", "2", "python3", "train.py"],
        "env": [{"name": "A", "value": "2"}],
    }
    container = {
        "command": ["sleep"],
        "args": ["9"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
    }
    pod = made(job(workers={"replicas": 2}, launcher=launcher, container=container), 1)
    worker = pod["spec"]["containers"][0]
    assert worker["command"] == launcher["command"] and "args" not in worker
    assert [each["name"] for each in worker["env"]][-2:] == ["B", "A"] and environment(pod)["A"] == "2"
    assert environment(pod)["POPRUN_NODE_RANK"] == "1"


def test_the_templates_environment_overrides_ours_and_can_refer_to_it():
    env = [{"name": "MASTER_PORT", "value": "1"}, {"name": "WHERE", "value": "$(MASTER_ADDR)"}]
    pod = made(job(workers={"replicas": 2}, container={"env": env}))
    names = [each["name"] for each in pod["spec"]["containers"][0]["env"]]
    assert environment(pod)["MASTER_PORT"] == "1"
    assert names.index("MASTER_ADDR") < names.index("WHERE") and len(names) == len(set(names))


def test_an_interactive_job_sleeps_and_ends():
    pod = made(job(interactive={"ttl": 3600}, container={"command": None}))
    assert pod["spec"]["containers"][0]["command"] == ["sleep", "3600"]
    assert pod["spec"]["activeDeadlineSeconds"] == 3600
    pod = made(job(interactive={"ttl": 60}))
    assert pod["spec"]["containers"][0]["command"] == ["python3", "train.py"]


@pytest.mark.parametrize(
    ("annotations", "resources", "expected"),
    [
        ({}, None, {"requests": {"cpu": "4"}}),
        ({}, {"limits": {"cpu": 32}}, {"limits": {"cpu": 32}}),
        ({}, {"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1Gi"}, "requests": {"cpu": "4"}}),
        ({"pando/resources": "drop"}, {"limits": {"cpu": 32}}, {"requests": {"cpu": "4"}}),
        ({"pando/device": "cuda"}, None, {"limits": {"nvidia.com/gpu": "4"}}),
        ({"pando/device": "cuda", "pando/ipus-per-gpu": "3"}, None, {"limits": {"nvidia.com/gpu": "2"}}),
        (
            {"pando/device": "cuda"},
            {"limits": {"nvidia.com/mig-1g.5gb": 1}},
            {"limits": {"nvidia.com/mig-1g.5gb": 1}},
        ),
    ],
)
def test_cores_and_gpus_are_asked_for_where_the_template_does_not(annotations, resources, expected):
    container = {} if resources is None else {"resources": resources}
    pod = made(job(annotations=annotations, container=container))
    assert pod["spec"]["containers"][0]["resources"] == expected
    assert (environment(pod).get("POPTORCH_DEVICE") == "cuda") == (annotations.get("pando/device") == "cuda")


def test_more_ipus_than_sixteen_ask_for_sixteen_cores():
    assert made(job(ipusPerJobInstance="64"))["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "16"}
    }


def test_what_serves_rdma_to_ipus_can_be_dropped():
    value = named_seed()
    value["metadata"]["annotations"] = {"pando/security": "drop"}
    pod = made(value)
    assert "hostIPC" not in pod["spec"]
    assert pod["spec"]["containers"][0]["securityContext"] == {"capabilities": {"add": []}}
    context = {"capabilities": {"add": ["IPC_LOCK", "SYS_NICE"]}}
    pod = made(job(annotations={"pando/security": "drop"}, container={"securityContext": context}))
    assert pod["spec"]["containers"][0]["securityContext"] == {"capabilities": {"add": ["SYS_NICE"]}}


def test_shared_memory_is_added_where_the_template_has_none():
    pod = made(job())
    assert pod["spec"]["volumes"] == [{"name": "pando-shm", "emptyDir": {"medium": "Memory"}}]
    assert pod["spec"]["containers"][0]["volumeMounts"] == [{"name": "pando-shm", "mountPath": "/dev/shm"}]
    assert "volumes" not in made(job(template={"hostIPC": True}))["spec"]


def test_an_image_comes_from_the_job_then_from_the_first_pattern_then_from_the_template():
    images = [("graphcore/pytorch:2*", "old"), ("graphcore/*", "new"), ("*", "any")]
    template = {"image": "graphcore/pytorch:3.3.0"}

    def image(*images, **annotations):
        return made(job(container=template, annotations=annotations), images=images)["spec"]["containers"][0][
            "image"
        ]

    assert image(*images, **{"pando/image": "mine"}) == "mine"
    assert image(*images) == "new"
    assert image() == template["image"]


def test_a_pod_never_restarts_by_itself_and_belongs_to_its_job():
    value = job(template={"restartPolicy": "Always", "terminationGracePeriodSeconds": 5})
    value["metadata"]["uid"] = "u1"
    pod = pods.with_owner(made(value), value)
    assert (pod["spec"]["restartPolicy"], pod["spec"]["terminationGracePeriodSeconds"]) == ("Never", 5)
    assert pod["metadata"]["ownerReferences"] == [
        {"apiVersion": "graphcore.ai/v1alpha1", "kind": "IPUJob", "name": "train", "uid": "u1",
         "controller": True, "blockOwnerDeletion": False}
    ]  # fmt: skip


def test_the_service_finds_workers_before_they_are_ready():
    parsed, _ = parse(job(workers={"replicas": 2}))
    made = pods.headless_service(parsed)
    assert made["metadata"]["name"] == "train"
    assert made["spec"]["clusterIP"] == "None" and made["spec"]["publishNotReadyAddresses"] is True
    assert made["spec"]["selector"] == {"graphcore.ai/ipujob": "train"}
