"""The life of a job: what to create and delete now, and what to say of it. A pure function of what a cluster holds.

An instance, all its pods of one attempt, starts, fails and restarts as one, for a collective can't go on with a part.
What has to outlive the pods is in `status.instances`, and is written before anything is done about it:

    Pending     its pods are being made; those that are missing are made
    Running     all were there, and one has begun; a pod that is missing now is lost
    Restarting  its pods go, those of the next attempt come when they have gone
    Lost        the same, but it doesn't count: the cluster's fault, not the program's
    Succeeded, Failed   for ever, whatever becomes of its pods
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .pods import ATTEMPT, INSTANCE, WORKER, Object
from .spec import Job

ENDED = ("Succeeded", "Failed")
_CLUSTERS_FAULT = (
    "Evicted",
    "Preempting",
    "NodeLost",
    "Shutdown",
    "NodeShutdown",
    "Terminated",
    "NodeAffinity",
    "UnexpectedAdmissionError",
)


@dataclass(frozen=True)
class Instance:
    """What is known of an instance, and its pods of all attempts that are still there."""

    number: int
    state: str
    restarts: int
    pods: tuple[Object, ...]

    def then(self, state: str, restarts: int | None = None) -> Instance:
        return Instance(self.number, state, self.restarts if restarts is None else restarts, self.pods)


@dataclass(frozen=True)
class Actions:
    """What to do about a job, after its status was written."""

    instances: tuple[Instance, ...]
    create: tuple[tuple[int, int], ...] = ()  # number of the pod, attempt
    delete: tuple[Object, ...] = ()


def advance(job: Job, record: Mapping[str, Any], pods: Sequence[Object]) -> Actions:
    """The next state of each instance, and the pods to create and to delete.

    Args:
        record: `status.instances`
        pods: all pods that the job owns
    """
    instances, create, delete = [], [], []
    for number in range(job.shape.instances):
        known = record.get(str(number)) or {}
        mine = tuple(pod for pod in pods if _label(pod, INSTANCE) == number)
        before = Instance(number, known.get("state", "Pending"), known.get("restarts", 0), mine)
        after, missing, gone = _advance(job, before)
        instances.append(after)
        create += [(number * job.shape.workers + worker, after.restarts) for worker in missing]
        delete += gone
    delete += [pod for pod in pods if _label(pod, INSTANCE) >= job.shape.instances]
    return Actions(tuple(instances), tuple(create), tuple(pod for pod in delete if not leaving(pod)))


def _advance(job: Job, instance: Instance) -> tuple[Instance, list[int], list[Object]]:
    """The instance as it is next, the workers to create, the pods to delete."""
    if instance.state in ENDED:
        return instance, [], _strays(instance)
    current = [pod for pod in instance.pods if _label(pod, ATTEMPT) == instance.restarts]
    past = [pod for pod in instance.pods if _label(pod, ATTEMPT) != instance.restarts]
    if instance.state == "Lost":
        past, current = [*past, *current], []
    if past:
        return instance, [], past
    there = {_label(pod, WORKER) for pod in current}
    missing = [worker for worker in range(job.shape.workers) if worker not in there]
    if instance.state in ("Restarting", "Lost"):
        instance = instance.then("Pending")
    failed = [pod for pod in current if phase(pod) == "Failed" and not _ended_by_ttl(job, pod)]
    own = [pod for pod in failed if not (leaving(pod) or _is_clusters_fault(pod))]
    done = not missing and all(phase(pod) == "Succeeded" or _ended_by_ttl(job, pod) for pod in current)
    if own or done:
        return _end(job, instance, min(own, key=when_ended) if own else None)
    if len(own) < len(failed) or (instance.state == "Running" and (missing or any(map(leaving, current)))):
        return instance.then("Lost"), [], current
    if not missing and any(phase(pod) != "Pending" for pod in current):
        return instance.then("Running"), [], []
    return instance, missing, []


def _end(job: Job, instance: Instance, culprit: Object | None) -> tuple[Instance, list[int], list[Object]]:
    """All workers succeeded, or one failed by itself: another attempt, or the end."""
    code = exit_code(culprit) if culprit else 0
    if job.restarts.wanted(culprit is not None, code, instance.restarts):
        return instance.then("Restarting", instance.restarts + 1), [], list(instance.pods)
    ended = instance.then("Failed" if culprit else "Succeeded")
    return ended, [], _strays(ended)


def _strays(instance: Instance) -> list[Object]:
    """Of an instance that ended, the pods that are not its result: of a failed one the failed stay, for their logs."""
    kept = ENDED if instance.state == "Succeeded" else ("Failed",)
    return [pod for pod in instance.pods if phase(pod) not in kept]


def clean(job: Job, pods: Sequence[Object]) -> list[Object]:
    """The pods that go when the job is finished."""
    if job.clean == "None":
        return []
    keeps_log = job.clean == "Workers" and job.mode == "launched"
    return [pod for pod in pods if not leaving(pod) and not (keeps_log and _label(pod, WORKER) == 0)]


def phase(pod: Object) -> str:
    return pod.get("status", {}).get("phase") or "Pending"


def leaving(pod: Object) -> bool:
    """Whether it was deleted, and only waits for its end."""
    return pod["metadata"].get("deletionTimestamp") is not None


def exit_code(pod: Object) -> int | None:
    """Of the pod's worker; None: it has none."""
    ended = _worker(pod).get("state", {}).get("terminated") or {}
    return ended.get("exitCode")


def end_of(pod: Object) -> str:
    """How a pod ended, in words."""
    code, status = exit_code(pod), pod.get("status", {})
    ended = _worker(pod).get("state", {}).get("terminated") or {}
    reason = status.get("reason") or ended.get("reason")
    if code is None or status.get("reason"):
        return f"failed: {reason or 'no reason given'}" + (
            f", {status['message']}" if status.get("message") else ""
        )
    return f"exited with {code}" + (f" ({reason})" if reason not in (None, "Error", "Completed") else "")


def first_failed(instance: Instance) -> Object | None:
    """The pod that failed an instance, if it is still there."""
    failed = [pod for pod in instance.pods if phase(pod) == "Failed" and not leaving(pod)]
    return min(failed, key=when_ended, default=None)


def waiting(pods: Sequence[Object]) -> str:
    """Why pods don't run yet, in the cluster's own words."""
    for pod in pods:
        for condition in pod.get("status", {}).get("conditions") or []:
            if (
                condition["type"] == "PodScheduled"
                and condition["status"] != "True"
                and condition.get("message")
            ):
                return condition["message"]
    for pod in pods:
        for container in _containers(pod):
            held = container.get("state", {}).get("waiting") or {}
            if held.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return ": ".join(filter(None, (held["reason"], held.get("message"))))
    return "its pods have not begun"


def started(pods: Sequence[Object]) -> str | None:
    """When the first container began to run."""
    times = [
        state["startedAt"]
        for pod in pods
        for container in _containers(pod)
        for state in (container.get("state") or {}).values()
        if state and state.get("startedAt")
    ]
    return min(times, default=None)


def _label(pod: Object, name: str) -> int:
    text = pod["metadata"].get("labels", {}).get(name, "")
    return int(text) if text.isdecimal() else -1


def _containers(pod: Object) -> Iterator[Object]:
    yield from pod.get("status", {}).get("containerStatuses") or []


def _worker(pod: Object) -> Object:
    """The status of the first container; others may run beside it."""
    name = pod["spec"]["containers"][0]["name"]
    return next((each for each in _containers(pod) if each.get("name") == name), {})


def when_ended(pod: Object) -> tuple[str, int]:
    ended = _worker(pod).get("state", {}).get("terminated") or {}
    return ended.get("finishedAt") or "9999", _label(pod, WORKER)


def _ended_by_ttl(job: Job, pod: Object) -> bool:
    return (
        job.ttl is not None and phase(pod) == "Failed" and pod["status"].get("reason") == "DeadlineExceeded"
    )


def _is_clusters_fault(pod: Object) -> bool:
    status = pod["status"]
    disrupted = any(
        condition["type"] == "DisruptionTarget" and condition["status"] == "True"
        for condition in status.get("conditions") or []
    )
    reason = status.get("reason") or ""
    # OutOf...: a node that had no room after all.
    return disrupted or reason in _CLUSTERS_FAULT or reason.startswith("OutOf")
