"""The state machine of a job: `observe(job, its objects) -> status, delete, create`, a pure function.

All pods of an instance start, fail and restart together, since a collective needs all of them. The state of each
instance is kept in `status.instances`, and the status is written before pods are created or deleted:

    Pending     pods are being created; a missing pod is created again
    Running     all pods existed, and one has begun to run; if a pod is missing now, the state becomes Lost
    Restarting  the pods of the last attempt are being deleted; then those of the next attempt are created
    Lost        as Restarting, but not counted as a restart: the cluster ended a pod, not the program
    Succeeded, Failed   final: later changes of the pods have no effect
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from . import pods
from .pods import (
    ATTEMPT,
    ENDED,
    INSTANCE,
    WORKER,
    Object,
    describe_end,
    exit_code,
    first_failed,
    int_label,
    is_terminating,
    phase,
    was_disrupted,
    why_pending,
)
from .rules import parse, warnings_of
from .spec import Images, Job

_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Decision:
    """The actions for a job, in this order: write the status, then delete, then create."""

    status: Object  # a merge patch; empty: nothing has changed
    delete: tuple[Object, ...] = ()
    create: tuple[Object, ...] = ()


def stamp(time: datetime) -> str:
    """Return a time in UTC as Kubernetes writes it, such as 2024-05-01T12:00:00Z."""
    return time.astimezone(UTC).strftime(_TIME)


def observe(
    value: Object,
    owned: Sequence[Object],
    now: datetime,
    trouble: str | None = None,
    device: str = "cpu",
    images: Images = (),
) -> Decision:
    """Return the next actions for a job; none, if it is being deleted.

    Args:
        value:   the IPUJob object, as read from the API server
        owned:   the pods and the Service of the job
        trouble: the API server's message, if it refused the last creation of a pod
        device, images: as in `parse`
    """
    old = value.get("status") or {}
    own_pods = [each for each in owned if each["kind"] == "Pod"]
    services = [each for each in owned if each["kind"] == "Service"]
    if value["metadata"].get("deletionTimestamp"):
        return Decision({})
    job, faults = parse(value, device, images)
    if old.get("completionTime"):
        return _finished(value, job, own_pods, services, now)
    invalid = "; ".join(fault.message for fault in faults) or _changed(value, own_pods)
    if job is None or invalid:
        return Decision(_patch(old, _invalid(old, invalid, now), now))
    instances, missing, gone = advance(job, old.get("instances") or {}, own_pods)
    remaining = [pod for pod in own_pods if not is_terminating(pod) and pod not in gone]
    notes = "; ".join(text for _, text in warnings_of(job, value))
    status = {**old, **_status(job, old, instances, remaining, notes, now)}
    if trouble and missing:
        status["lastMessage"] = trouble
    if any(phase(pod) != "Pending" for pod in own_pods):
        status.setdefault("startTime", stamp(now))
    create = [pods.pod(job, number, attempt) for number, attempt in missing]
    if instances and all(instance.state in ENDED for instance in instances):
        status["completionTime"] = stamp(now)
        gone += [pod for pod in remaining if _is_cleaned(job, pod)] + services
    elif job.has_service and not services and job.shape.instances:
        create.insert(0, pods.service(job))
    return Decision(_patch(old, status, now), tuple(gone), tuple(pods.owned(each, value) for each in create))


def _finished(
    value: Object, job: Job | None, own_pods: Sequence[Object], services: Sequence[Object], now: datetime
) -> Decision:
    """Return the actions for an ended job: delete Service and pods (see cleanPodPolicy), later the job."""
    old = value["status"]
    new, had = value["spec"].get("jobInstances", 0), old.get("desiredReplicas", 0)
    message = f"the job has ended with {had} instances: create a new one for {new}" if new > had else ""
    status = {**old, "conditions": _conditions(old, {"Invalid": message}, now)}
    delete = [
        pod
        for pod in own_pods
        if not is_terminating(pod) and (phase(pod) not in ENDED or (job and _is_cleaned(job, pod)))
    ]
    delete += services
    if job and job.seconds_kept is not None:
        ended = datetime.strptime(old["completionTime"], _TIME).replace(tzinfo=UTC)
        delete += [value] if now >= ended + timedelta(seconds=job.seconds_kept) else []
    return Decision(_patch(old, status, now), tuple(delete))


def _changed(value: Object, own_pods: Sequence[Object]) -> str:
    """Return an error message if a field of the spec has changed since the pods were created, else ""."""
    now = pods.field_hashes(value)
    for pod in own_pods:
        then = json.loads((pod["metadata"].get("annotations") or {}).get(pods.SPEC, "null")) or now
        for key in sorted({*then, *now}):
            if then.get(key) != now.get(key):
                return f"spec.{key} changed after the job began: delete and create it"
    return ""


def _invalid(old: Object, message: str, now: datetime) -> Object:
    """Return the status of a job with an invalid spec. Its pods are neither created nor deleted."""
    conditions = _conditions(old, {"Running": "", "Invalid": message}, now)
    return {**old, "launcherStatus": "Failed", "lastMessage": message, "conditions": conditions}


def _status(
    job: Job,
    old: Object,
    instances: Sequence[Instance],
    remaining: Sequence[Object],
    notes: str,
    now: datetime,
) -> Object:
    """Return the fields of the status that follow from the instances' states and the remaining pods."""
    states = [instance.state for instance in instances]
    phases = [phase(pod) for pod in remaining]
    word, message = _summary(job, instances, remaining)
    conditions = {
        "Running": (notes or "instances run") if word == "Running" else "",
        "Succeeded": message if word == "Completed" else "",
        "Failed": message if word == "Failed" else "",
        "Invalid": "",
    }
    return {
        "launcherStatus": word,
        "currentReplicas": sum(state in ("Running", "Restarting", "Lost") for state in states),
        "desiredReplicas": job.shape.instances,
        "lastMessage": message,
        "restartCount": sum(instance.restarts for instance in instances),
        "workersStatus": {
            "active": sum(each not in ENDED for each in phases),
            "succeeded": phases.count("Succeeded"),
            "failed": phases.count("Failed"),
        },
        "iPUPartitionCreated": bool(remaining) or old.get("iPUPartitionCreated", False),
        "instances": {
            str(each.number): {"state": each.state, "restarts": each.restarts} for each in instances
        },
        "conditions": _conditions(old, conditions, now),
    }


def _summary(job: Job, instances: Sequence[Instance], remaining: Sequence[Object]) -> tuple[str, str]:
    """Return the job's `launcherStatus`, and the `lastMessage` that explains it in one line."""
    total = job.shape.instances
    states = [instance.state for instance in instances]
    if not total:
        return "Pending", "no instances wanted"
    if all(state == "Succeeded" for state in states):
        return "Completed", "All instances done"
    if all(state in ENDED for state in states):
        culprit = first_failed(remaining)
        first = f": {culprit['metadata']['name']} {describe_end(culprit)}" if culprit else ""
        return "Failed", f"{states.count('Failed')} of {total} instances failed{first}"
    if all(state == "Pending" for state in states) and not any(each.restarts for each in instances):
        return "Pending", f"waiting: {why_pending(remaining)}"
    parts = [f"{states.count('Running')} of {total} instances running"]
    parts += [f"{states.count(state)} {words}" for state, words in _WORDS.items() if state in states]
    return "Running", ", ".join(parts)


_WORDS = {"Restarting": "restarting", "Lost": "starting again after pods were lost", "Failed": "failed"}


def _conditions(old: Object, true: dict[str, str], now: datetime) -> list[Object]:
    """Return the job's conditions with new messages (by type); an empty message makes a condition "False"."""
    conditions = {condition["type"]: condition for condition in old.get("conditions") or []}
    for kind, message in true.items():
        before = conditions.get(kind, {})
        new = {
            "type": kind,
            "status": "True" if message else "False",
            "reason": _REASONS[kind],
            "message": message or "no longer",  # some API servers treat an empty string as a missing field
        }
        if (before or message) and {**before, **new} != before:
            is_same = before.get("status") == new["status"]
            since = before.get("lastTransitionTime") if is_same else None
            conditions[kind] = new | {
                "lastUpdateTime": stamp(now),
                "lastTransitionTime": since or stamp(now),
            }
    return list(conditions.values())


_REASONS = {
    "Running": "InstancesRun",
    "Succeeded": "AllDone",
    "Failed": "InstancesFailed",
    "Invalid": "SpecRefused",
}


def _patch(old: Object, new: Object, now: datetime) -> Object:
    """Return the merge patch that changes the status `old` to `new`; empty, if they are equal."""
    change = {key: item for key, item in new.items() if old.get(key) != item}
    if "instances" in change:
        change["instances"] = {**dict.fromkeys(old.get("instances", ())), **new["instances"]}  # None removes
    return {**change, "lastReconcileTime": stamp(now)} if change else {}


# ---- instances ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instance:
    """The state of an instance, and its remaining pods of all attempts."""

    number: int
    state: str
    restarts: int
    pods: tuple[Object, ...]


def advance(
    job: Job, record: Mapping[str, Any], pods: Sequence[Object]
) -> tuple[list[Instance], list[tuple[int, int]], list[Object]]:
    """Return the next state of each instance, (number, attempt) of pods to create, and the pods to delete.

    Args:
        record: `status.instances`, by the instance's number as a text
        pods:   all pods of the job
    """
    instances, create = [], []
    delete = [pod for pod in pods if int_label(pod, INSTANCE) >= job.shape.instances]
    for number in range(job.shape.instances):
        known = record.get(str(number)) or {}
        own_pods = tuple(pod for pod in pods if int_label(pod, INSTANCE) == number)
        before = Instance(number, known.get("state", "Pending"), known.get("restarts", 0), own_pods)
        after, missing, gone = _advance(job, before)
        instances.append(after)
        create += [(number * job.shape.workers + worker, after.restarts) for worker in missing]
        delete += gone
    return instances, create, [pod for pod in delete if not is_terminating(pod)]


def _advance(job: Job, instance: Instance) -> tuple[Instance, list[int], list[Object]]:
    """Return the next state of an instance, the numbers of the workers to create, and the pods to delete."""
    if instance.state in ENDED:
        return instance, [], _leftovers(instance)
    attempt = -1 if instance.state == "Lost" else instance.restarts  # -1: delete all pods of a lost attempt
    current = [pod for pod in instance.pods if int_label(pod, ATTEMPT) == attempt]
    if len(current) < len(instance.pods):
        return instance, [], [pod for pod in instance.pods if pod not in current]
    there = {int_label(pod, WORKER) for pod in current}
    missing = [worker for worker in range(job.shape.workers) if worker not in there]
    if instance.state in ("Restarting", "Lost"):
        instance = replace(instance, state="Pending")
    failed = [pod for pod in current if phase(pod) == "Failed" and not _ended_by_ttl(job, pod)]
    own = [pod for pod in failed if not (is_terminating(pod) or was_disrupted(pod))]
    done = not missing and all(phase(pod) == "Succeeded" or _ended_by_ttl(job, pod) for pod in current)
    if own or done:
        return _end(job, instance, first_failed(own))
    is_incomplete = missing or any(map(is_terminating, current))
    if len(own) < len(failed) or (instance.state == "Running" and is_incomplete):
        return replace(instance, state="Lost"), [], current
    if not missing and any(phase(pod) != "Pending" for pod in current):
        return replace(instance, state="Running"), [], []
    return instance, missing, []


def _end(job: Job, instance: Instance, culprit: Object | None) -> tuple[Instance, list[int], list[Object]]:
    """Return what `_advance` returns, for an instance to restart or to end.

    Args: culprit: the worker's pod that failed first; None: all workers succeeded
    """
    code = exit_code(culprit) if culprit else 0
    if job.restarts.wanted(culprit is not None, code, instance.restarts):
        again = replace(instance, state="Restarting", restarts=instance.restarts + 1)
        return again, [], list(instance.pods)
    ended = replace(instance, state="Failed" if culprit else "Succeeded")
    return ended, [], _leftovers(ended)


def _leftovers(instance: Instance) -> list[Object]:
    """Return the pods to delete at an instance's end. Ended pods stay; after a failure only failed ones."""
    kept = ENDED if instance.state == "Succeeded" else ("Failed",)
    return [pod for pod in instance.pods if phase(pod) not in kept]


def _is_cleaned(job: Job, pod: Object) -> bool:
    """Return whether the job's cleanPodPolicy deletes a pod after the job has ended."""
    keeps_log = job.clean == "Workers" and job.mode == "launched"
    return job.clean != "None" and not (keeps_log and int_label(pod, WORKER) == 0)


def _ended_by_ttl(job: Job, pod: Object) -> bool:
    is_late = phase(pod) == "Failed" and pod["status"].get("reason") == "DeadlineExceeded"
    return job.ttl is not None and is_late
