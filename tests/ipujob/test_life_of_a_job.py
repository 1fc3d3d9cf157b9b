"""Section by section, the life of a job: restarts, lost pods, scaling, clean-up, and what its status says meanwhile."""

import random
from datetime import UTC, datetime, timedelta

import pytest
from jobs import job
from pretend import END, RUNS, Pretend, attempt

from ipujob.client import Refused
from ipujob.observe import observe
from ipujob.operator import Operator


class World:
    """A pretended cluster with an operator in it."""

    def __init__(self, value, script=lambda pod: 0, **options):
        self.cluster, self.said, self.time = Pretend(script), [], 0.0
        self.operator = Operator(self.cluster, log=self.said.append, clock=lambda: self.time, **options)
        self.name = value["metadata"]["name"]
        self.cluster.create(value)

    def step(self, times=1):
        for _ in range(times):
            self.operator.reconcile()
            self.cluster.tick()
            self.time += 1

    def run(self, limit=200):
        """To the end of the job."""
        for _ in range(limit):
            self.step()
            if "completionTime" in self.status:
                self.operator.reconcile()
                return self.status
        raise AssertionError(f"no end after {limit} steps: {self.status}")

    @property
    def status(self):
        return self.cluster.objects["IPUJob", self.name].get("status", {})

    def pods(self):
        return sorted(self.cluster.pods())

    def conditions(self):
        return {each["type"]: each["status"] for each in self.status["conditions"]}


def test_a_job_of_two_instances_completes():
    world = World(job(jobInstances=2, workers={"replicas": 2}))
    world.step()
    assert world.status["launcherStatus"] == "Pending" and world.status["lastMessage"].startswith("waiting: ")
    assert world.pods() == [f"train-worker-{k}" for k in range(4)]
    assert ("Service", "train") in world.cluster.objects
    world.operator.reconcile()
    assert (world.status["launcherStatus"], world.status["lastMessage"]) == (
        "Running",
        "2 of 2 instances running",
    )
    assert (world.status["currentReplicas"], world.status["desiredReplicas"]) == (2, 2)
    assert world.status["workersStatus"] == {"active": 4, "succeeded": 0, "failed": 0}
    status = world.run()
    assert (status["launcherStatus"], status["lastMessage"]) == ("Completed", "All instances done")
    assert (status["currentReplicas"], status["restartCount"], status["iPUPartitionCreated"]) == (0, 0, True)
    assert status["workersStatus"] == {"active": 0, "succeeded": 4, "failed": 0}
    assert status["instances"] == {str(i): {"state": "Succeeded", "restarts": 0} for i in range(2)}
    assert world.conditions() == {"Running": "False", "Succeeded": "True"}
    assert ("Service", "train") not in world.cluster.objects  # it goes in each case
    assert len(world.pods()) == 4  # cleanPodPolicy None


def test_a_failed_worker_ends_its_instance_and_stays_for_its_log():
    world = World(
        job(jobInstances=2, workers={"replicas": 2}),
        lambda pod: 7 if "worker-2" in pod["metadata"]["name"] else 0,
    )
    status = world.run()
    assert (status["launcherStatus"], status["lastMessage"]) == (
        "Failed", "1 of 2 instances failed: train-worker-2 exited with 7"
    )  # fmt: skip
    assert status["instances"]["0"]["state"] == "Succeeded" and status["instances"]["1"]["state"] == "Failed"
    world.step()
    assert world.pods() == ["train-worker-0", "train-worker-1", "train-worker-2"]
    assert world.conditions()["Failed"] == "True"


@pytest.mark.parametrize(
    ("policy", "codes", "restarts", "end"),
    [
        ({"type": "Never"}, [3], 0, "Failed"),
        ({"type": "OnFailure"}, [3, 3, 0], 2, "Completed"),
        ({"type": "OnFailure", "backOffLimit": 2}, [3, 3, 3, 3], 2, "Failed"),
        ({"type": "OnFailure"}, [3] * 9, 3, "Failed"),  # 3 is the limit of those who name none
        ({"type": "ExitCode", "exitCodes": "1,3-5"}, [4, 1, 0], 2, "Completed"),
        ({"type": "ExitCode", "exitCodes": "1,3-5"}, [4, 2], 1, "Failed"),
        ({"type": "Always", "backOffLimit": 2}, [0, 0, 0], 2, "Completed"),
        ({"type": "OnFailure", "backOffLimit": 0}, [1], 0, "Failed"),
    ],
)
def test_restart_policies(policy, codes, restarts, end):
    world = World(job(restartPolicy=policy), lambda pod: codes[attempt(pod)])
    status = world.run()
    assert (status["launcherStatus"], status["restartCount"]) == (end, restarts)
    assert [number for _, number in world.cluster.begun] == list(range(restarts + 1))


def test_all_workers_of_an_instance_restart_together_and_are_told_the_attempt():
    def script(pod):
        return RUNS if attempt(pod) == 0 and pod["metadata"]["name"] != "train-worker-1" else 1 - attempt(pod)

    world = World(job(jobInstances=2, workers={"replicas": 2}, restartPolicy={"type": "OnFailure"}), script)
    world.step(3)
    assert world.status["lastMessage"] == "1 of 2 instances running, 1 restarting"
    world.cluster.script = lambda pod: 0
    assert world.run()["instances"] == {
        "0": {"state": "Succeeded", "restarts": 1},
        "1": {"state": "Succeeded", "restarts": 0},
    }
    assert sorted(world.cluster.begun) == [
        ("train-worker-0", 0), ("train-worker-0", 1), ("train-worker-1", 0), ("train-worker-1", 1),
        ("train-worker-2", 0), ("train-worker-3", 0),
    ]  # fmt: skip


def test_a_restart_is_written_down_before_its_pods_go():
    world = World(job(restartPolicy={"type": "OnFailure"}), lambda pod: 1 - attempt(pod))
    world.run()
    calls = [call for call in world.cluster.calls if call[0] != "list" and call[1] != "Event"]
    first = calls.index(("delete", "Pod", "train-worker-0"))
    assert calls[first - 1] == ("patch", "IPUJob", "train")
    assert calls[first + 1 : first + 3] == [("patch", "IPUJob", "train"), ("create", "Pod", "train-worker-0")]


@pytest.mark.parametrize(
    "how", ["deleted", "Evicted", "Preempting", "NodeLost", "Shutdown", "OutOfcpu", "DisruptionTarget"]
)
def test_a_lost_pod_starts_its_instance_again_uncounted(how):
    world = World(job(workers={"replicas": 2}, restartPolicy={"type": "Never"}), lambda pod: RUNS)
    world.step(2)
    lost = world.cluster.pods()["train-worker-1"]
    if how == "deleted":
        del world.cluster.objects["Pod", "train-worker-1"]
    elif how == "DisruptionTarget":
        lost["status"] |= {"phase": "Failed", "conditions": [{"type": how, "status": "True"}]}
    else:
        lost["status"] |= {"phase": "Failed", "reason": how}
    world.step(6)
    world.cluster.script = lambda pod: 0
    status = world.run()
    assert (status["launcherStatus"], status["restartCount"]) == ("Completed", 0)
    assert sorted(world.cluster.begun) == [(f"train-worker-{k}", 0) for k in (0, 0, 1, 1)]


def test_a_pod_that_is_deleted_by_hand_and_fails_while_it_goes_is_lost():
    world = World(job(), lambda pod: RUNS)
    world.step(2)
    pod = world.cluster.pods()["train-worker-0"]
    pod["metadata"]["deletionTimestamp"] = "now"
    pod["status"] |= {"phase": "Failed"}
    world.step(3)
    assert world.status["restartCount"] == 0 and world.pods() == ["train-worker-0"]


def test_instances_that_ended_stay_so_whatever_becomes_of_their_pods():
    world = World(job(jobInstances=2), lambda pod: RUNS if "1" in pod["metadata"]["name"] else 0)
    world.step(4)
    assert world.status["instances"]["0"]["state"] == "Succeeded"
    del world.cluster.objects["Pod", "train-worker-0"]
    world.step(3)
    assert world.pods() == ["train-worker-1"]


def test_scaling_adds_the_next_numbers_and_takes_the_highest():
    world = World(job(jobInstances=2), lambda pod: RUNS)
    world.step(2)
    world.cluster.edit("train", jobInstances=3)
    world.step(2)
    assert world.pods() == ["train-worker-0", "train-worker-1", "train-worker-2"]
    world.cluster.edit("train", jobInstances=1)
    world.step(2)
    assert world.pods() == ["train-worker-0"]
    assert (world.status["desiredReplicas"], world.status["currentReplicas"]) == (1, 1)
    assert list(world.status["instances"]) == ["0"]
    world.cluster.edit("train", jobInstances=0)
    world.step(2)
    assert (world.status["launcherStatus"], world.status["lastMessage"]) == ("Pending", "no instances wanted")
    assert world.pods() == [] and "completionTime" not in world.status


def test_a_finished_job_is_never_started_again():
    world = World(job())
    world.run()
    world.cluster.edit("train", jobInstances=2)
    world.step(3)
    assert world.conditions()["Invalid"] == "True" and world.status["launcherStatus"] == "Completed"
    assert world.cluster.begun == [("train-worker-0", 0)]


@pytest.mark.parametrize(
    ("clean", "launcher", "left"),
    [
        ("None", None, [0, 1, 2, 3]),
        ("Workers", None, []),
        ("Workers", {"command": ["poprun"]}, [0, 2]),  # worker 0 of an instance has the launcher's log
        ("All", {"command": ["poprun"]}, []),
    ],
)
def test_clean_up(clean, launcher, left):
    spec = {"launcher": launcher} if launcher else {}
    world = World(job(jobInstances=2, workers={"replicas": 2}, cleanPodPolicy=clean, **spec))
    world.run()
    world.step(2)
    assert world.pods() == [f"train-worker-{k}" for k in left]
    assert world.status["workersStatus"]["succeeded"] == 4


def test_an_interactive_job_that_its_time_ended_is_completed():
    world = World(job(interactive={"ttl": 5}), lambda pod: "DeadlineExceeded")
    assert world.run()["launcherStatus"] == "Completed"


def test_an_interactive_job_names_the_worker_that_failed_and_none_that_its_time_ended():
    world = World(
        job(interactive={"ttl": 5}, workers={"replicas": 2}),
        lambda pod: 3 if pod["metadata"]["name"].endswith("1") else "DeadlineExceeded",
    )
    assert world.run()["lastMessage"] == "1 of 1 instances failed: train-worker-1 exited with 3"


def test_a_finished_job_goes_after_its_time():
    world = World(job(annotations={"pando/ttl-seconds-after-finished": "60"}))
    world.run()
    value = world.cluster.objects["IPUJob", "train"]
    now = datetime.now(UTC)
    assert observe(value, [], now).delete == []
    assert observe(value, [], now + timedelta(seconds=61)).delete == [value]


def test_what_breaks_a_rule_is_told_and_makes_no_pod():
    world = World(job(ipusPerJobInstance="6", workers={"replicas": 4}))
    world.step(2)
    message = "ipusPerJobInstance 6 can't be shared out over 4 workers with 1 replica each"
    assert (world.status["launcherStatus"], world.status["lastMessage"]) == ("Failed", message)
    assert world.conditions() == {"Invalid": "True"} and world.pods() == []
    world.cluster.edit("train", ipusPerJobInstance="8")
    assert world.run()["launcherStatus"] == "Completed"
    assert world.conditions()["Invalid"] == "False"


def test_a_spec_that_changes_under_its_pods_is_told():
    world = World(job(), lambda pod: RUNS)
    world.step(2)
    before = world.cluster.objects["IPUJob", "train"]["spec"]["ipusPerJobInstance"]
    world.cluster.edit("train", ipusPerJobInstance="8")
    world.step()
    assert world.status["lastMessage"] == (
        "spec.ipusPerJobInstance changed after the job began: delete and create it"
    )
    assert world.conditions()["Invalid"] == "True" and world.pods() == ["train-worker-0"]
    world.cluster.edit("train", ipusPerJobInstance=before)
    world.step()
    assert world.status["launcherStatus"] == "Running"


def test_why_pods_wait_is_told():
    world = World(job())
    world.operator.reconcile()
    message = "0/4 nodes are available: insufficient cpu"
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
    world.cluster.pods()["train-worker-0"]["status"] = {"phase": "Pending", "conditions": conditions}
    world.operator.reconcile()
    assert world.status["lastMessage"] == f"waiting: {message}"


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        ('pods "x" is forbidden: exceeded quota: cpu', "pando/resources: drop"),
        (
            'pods "x" is forbidden: violates PodSecurity "baseline:latest": host namespaces',
            "pando/security: drop",
        ),
        ("Pod is invalid: spec.containers[0].ports: bad", ""),
    ],
)
def test_a_pod_that_is_refused_is_told_and_tried_again_more_and_more_rarely(refusal, hint):
    world = World(job())
    tries = []

    def refuse(call, made):
        if call == "create" and made["kind"] == "Pod":
            tries.append(world.time)
            raise Refused(403, refusal)

    world.cluster.before = refuse
    world.step(40)
    assert world.status["lastMessage"].startswith(f"creating train-worker-0 was refused: {refusal}")
    assert hint in world.status["lastMessage"]
    assert tries == [0, 1, 3, 7, 15, 31]
    world.cluster.before = lambda call, made: None
    world.time += 60
    assert world.run()["launcherStatus"] == "Completed"


def test_notes_stand_in_the_condition_of_a_running_job():
    world = World(job(template={"restartPolicy": "Always"}), lambda pod: RUNS)
    world.step(2)
    (running,) = world.status["conditions"]
    assert running["message"] == "the template's restartPolicy Always is not used: the job's own is Never"


def test_a_job_that_is_being_deleted_is_left_alone():
    world = World(job())
    world.cluster.objects["IPUJob", "train"]["metadata"]["deletionTimestamp"] = "now"
    world.operator.reconcile()
    assert world.pods() == [] and world.status == {}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_pods_do_a_job_ends_and_restarts_stay_within_the_limit(seed):
    draw = random.Random(seed)
    policy = {"type": draw.choice(["Never", "OnFailure", "Always"]), "backOffLimit": draw.randrange(4)}
    value = job(jobInstances=draw.randrange(1, 4), ipusPerJobInstance="6", restartPolicy=policy)
    value["spec"]["workers"]["replicas"] = draw.randrange(1, 4)
    value["spec"]["cleanPodPolicy"] = draw.choice(["None", "Workers", "All"])
    world = World(value, lambda pod: draw.choice([RUNS, RUNS, 0, 0, 1, "Evicted"]))
    for _ in range(60):
        world.step()
        if draw.random() < 0.2 and world.pods():
            del world.cluster.objects["Pod", draw.choice(world.pods())]
    world.cluster.script = lambda pod: draw.choice([0, 0, 0, 1])
    status = world.run()
    assert status["launcherStatus"] in ("Completed", "Failed")
    limit = 0 if policy["type"] == "Never" else policy["backOffLimit"]
    assert all(each["state"] in END and each["restarts"] <= limit for each in status["instances"].values())
