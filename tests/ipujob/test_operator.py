"""The operator under faults: killed at any moment, two at once, an API server that fails, and many jobs."""

import contextlib
import random

import pytest
from jobs import job
from pretend import RUNS, Pretend, attempt

from ipujob.cli import main
from ipujob.client import Refused, Unreachable
from ipujob.operator import Operator, read_image_replacements

SILENT = dict(log=lambda text: None)


class Killed(BaseException):
    """The operator is gone in the middle of what it did."""


def twenty_jobs(cluster):
    """Jobs of all kinds; what each must end as: (STATUS, restarts)."""
    expected = {}
    for number in range(20):
        policy = [
            {"type": "Never"},
            {"type": "OnFailure", "backOffLimit": 2},
            {"type": "ExitCode", "exitCodes": "3"},
        ]
        spec = dict(
            jobInstances=1 + number % 2,
            workers={"replicas": 1 + number % 2},
            restartPolicy=policy[number % 3],
        )
        name = f"job-{number}"
        cluster.create(job(name, **spec))
        instances = spec["jobInstances"]
        expected[name] = [("Failed", 0), ("Failed", 2 * instances), ("Completed", instances)][number % 3]
    return expected


def script(pod):
    """Jobs 1, 4, ... always fail; jobs 2, 5, ... once, with a code that means restart; jobs 0, 3, ... at once."""
    kind = int(pod["metadata"]["name"].split("-")[1]) % 3
    return [5, 1, 0 if attempt(pod) else 3][kind]


def ends(cluster):
    jobs = [each for (kind, _), each in cluster.objects.items() if kind == "IPUJob"]
    return {
        each["metadata"]["name"]: (each["status"]["launcherStatus"], each["status"]["restartCount"])
        for each in jobs
        if "completionTime" in each.get("status", {})
    }


def test_killed_at_a_hundred_moments_every_job_ends_as_it_should():
    draw = random.Random(1)
    cluster = Pretend(script)
    expected = twenty_jobs(cluster)
    kills = 0

    def perhaps(call, made):
        nonlocal kills
        if kills < 100 and draw.random() < 0.3:
            kills += 1
            raise Killed

    cluster.before = cluster.after = perhaps
    for _ in range(400):
        try:
            Operator(cluster, **SILENT).reconcile()
        except Killed:
            if draw.random() < 0.5:
                continue  # the next one begins before anything else happens
        cluster.tick()
    assert kills == 100
    assert ends(cluster) == expected
    assert_nothing_began_twice(cluster)


def assert_nothing_began_twice(cluster):
    assert len(cluster.begun) == len(set(cluster.begun))


class Stale:
    """A second operator's view: what it lists was read some steps ago."""

    def __init__(self, cluster, draw):
        self.cluster, self.draw, self.seen = cluster, draw, {}

    def list(self, kind, *arguments, **named):
        if kind not in self.seen or self.draw.random() < 0.3:
            self.seen[kind] = self.cluster.list(kind, *arguments, **named)
        return self.seen[kind]

    def __getattr__(self, name):
        return getattr(self.cluster, name)


@pytest.mark.parametrize("seed", range(5))
def test_two_operators_at_once_one_of_them_late_do_as_one(seed):
    draw = random.Random(seed)
    cluster = Pretend(script)
    expected = twenty_jobs(cluster)
    first, second = Operator(cluster, **SILENT), Operator(Stale(cluster, draw), **SILENT)
    for _ in range(100):
        for operator in draw.sample([first, second], 2):
            operator.reconcile()
        if draw.random() < 0.7:
            cluster.tick()
    assert ends(cluster) == expected
    assert_nothing_began_twice(cluster)


@pytest.mark.parametrize("seed", range(5))
def test_an_api_server_that_fails_for_a_while_loses_nothing(seed):
    draw = random.Random(seed)
    cluster = Pretend(script)
    expected = twenty_jobs(cluster)

    def fail(call, made):
        if time < 100 and draw.random() < 0.2:
            answers = [
                Refused(500, "etcd"),
                Refused(409, "conflict"),
                Refused(410, "gone"),
                Unreachable("no answer"),
            ]
            raise draw.choice(answers)

    cluster.before = cluster.after = fail  # after: it was done, and the answer got lost
    time = 0
    operator = Operator(cluster, clock=lambda: time, **SILENT)
    for time in range(400):  # noqa: B007  the clock reads it
        with contextlib.suppress(Refused, Unreachable):
            operator.reconcile()
        cluster.tick()
    assert ends(cluster) == expected
    assert_nothing_began_twice(cluster)


def test_a_job_that_can_not_be_read_does_not_hold_up_others():
    cluster, said = Pretend(), []
    broken = job("broken")
    broken["spec"]["workers"] = 3
    cluster.create(broken)
    cluster.create(job("whole"))
    operator = Operator(cluster, log=said.append)
    for _ in range(5):
        operator.reconcile()
        cluster.tick()
    assert ends(cluster) == {"whole": ("Completed", 0)}
    status = cluster.objects["IPUJob", "broken"]["status"]
    assert status["lastMessage"] == "spec.workers must be of type object, and is 3"


def test_nothing_is_written_where_nothing_has_changed():
    cluster = Pretend(lambda pod: RUNS)
    cluster.create(job(workers={"replicas": 2}))
    operator = Operator(cluster, **SILENT)
    for _ in range(4):
        operator.reconcile()
        cluster.tick()
    cluster.calls.clear()
    operator.reconcile()
    assert [call for call, *_ in cluster.calls] == ["list"] * 3


def test_two_hundred_jobs_of_four_workers_take_a_few_requests_each():
    cluster = Pretend()
    for number in range(200):
        cluster.create(job(f"job-{number}", ipusPerJobInstance="4", workers={"replicas": 4}))
    cluster.calls.clear()
    operator = Operator(cluster, **SILENT)
    for _ in range(6):
        operator.reconcile()
        cluster.tick()
    assert set(ends(cluster).values()) == {("Completed", 0)} and len(ends(cluster)) == 200
    writes = sum(call != "list" for call, *_ in cluster.calls)
    assert writes <= 200 * 10  # 4 pods, a Service and its end, three states, an event


def test_the_newest_five_events_of_a_job_are_shown(monkeypatch, capsys):
    cluster = Pretend(lambda pod: RUNS)
    cluster.create(job("train"))
    for number in (3, 6, 1, 7, 2, 5, 4):
        cluster.create(
            {
                "kind": "Event",
                "metadata": {"name": f"event-{number}", "namespace": "default"},
                "involvedObject": {"name": "train"},
                "lastTimestamp": f"2026-01-0{number}T00:00:00Z",
                "reason": "Restarted",
                "message": f"event {number}",
            }
        )
    monkeypatch.setattr("ipujob.remote.Cluster", lambda: cluster)
    assert main(["status", "train"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "Restarted" in line]
    assert [line.split()[-1] for line in lines] == ["3", "4", "5", "6", "7"]


def test_what_happened_is_told_as_events():
    cluster = Pretend(lambda pod: 3 - 3 * attempt(pod))
    cluster.create(job(restartPolicy={"type": "OnFailure"}))
    operator = Operator(cluster, **SILENT)
    for _ in range(8):
        operator.reconcile()
        cluster.tick()
    events = [each for (kind, _), each in cluster.objects.items() if kind == "Event"]
    assert [(each["reason"], each["message"]) for each in events] == [
        ("Restarting", "restart 1"),
        ("Completed", "All instances done"),
    ]


def test_images_come_from_a_file_that_may_change(tmp_path):
    file = tmp_path / "images"
    assert read_image_replacements(str(file)) == ()
    file.write_text("# ours\ngraphcore/* = pando:1\n\nnonsense\nb=c=d\n")
    assert read_image_replacements(str(file)) == [("graphcore/*", "pando:1"), ("b", "c=d")]
    assert read_image_replacements(None) == []
