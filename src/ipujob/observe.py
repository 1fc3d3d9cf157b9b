"""The state machine of a job: `observe(job, its objects) -> status, delete, create`, a pure function.

All pods of an instance start, fail and restart together, since a collective needs all of them. The state of each
instance is kept in `status.instances`, and the status is written before pods are created or deleted:

    Pending     pods are being created; missing ones are created again
    Running     all pods were there, and one has begun; a pod that is missing now is lost
    Restarting  the pods of this attempt are deleted; those of the next attempt are created after that
    Lost        as Restarting, but not counted as a restart: the cluster ended a pod, not the program
    Succeeded, Failed   final, whatever happens to the pods
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
    Images,
    Object,
    describe_end,
    exit_code,
    int_label,
    is_terminating,
    phase,
    was_disrupted,
    when_ended,
    why_pending,
)
from .rules import parse, warnings_of
from .spec import TTL, Job

_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Decision:
    """The actions for a job, in this order: write the status, then delete, then create."""

    status: Object  # a merge patch; empty: nothing has changed
    delete: tuple[Object, ...] = ()
    create: tuple[Object, ...] = ()


def stamp(time: datetime) -> str:
    """Return a time as Kubernetes writes it."""
    return time.astimezone(UTC).strftime(_TIME)


def observe(
    value: Object,
    owned: Sequence[Object],
    now: datetime,
    trouble: str | None = None,
    device: str = "cpu",
    images: Images = (),
) -> Decision:
    """Return the next actions for a job.

    Args:
        value:   the IPUJob object, as the API server has it
        owned:   the pods and the Service of the job
        trouble: why the API server refused to create pods the last time
        device, images: as in `pods.template`
    """
    old = value.get("status") or {}
    own_pods = [each for each in owned if each["kind"] == "Pod"]
    services = [each for each in owned if each["kind"] == "Service"]
    if value["metadata"].get("deletionTimestamp"):
        return Decision({})
    job, faults = parse(value)
    if old.get("completionTime"):
        return _finished(value, job, own_pods, services, now)
    invalid = "; ".join(fault.message for fault in faults) or _changed(value, own_pods)
    if job is None or invalid:
        return Decision(_patch(old, _invalid(old, invalid, now), now))
    actions = advance(job, old.get("instances") or {}, own_pods)
    said = "; ".join(text for _, text in warnings_of(job, value, images))
    status = _status(job, old, actions, own_pods, now, trouble if actions.create else None, said)
    create = [pods.pod(job, number, attempt, device, images) for number, attempt in actions.create]
    delete = list(actions.delete)
    if status.get("completionTime"):
        delete += clean(job, own_pods) + services
    elif job.has_service and not services and job.shape.instances:
        create.insert(0, pods.service(job))
    unique = {(each["kind"], each["metadata"]["name"]): each for each in delete}
    return Decision(
        _patch(old, status, now), tuple(unique.values()), tuple(pods.owned(each, value) for each in create)
    )


def _finished(
    value: Object, job: Job | None, own_pods: Sequence[Object], services: Sequence[Object], now: datetime
) -> Decision:
    """Return the actions for a job that has ended: delete what is left, and the job itself after its time to live."""
    old = value["status"]
    asked, had = value["spec"].get("jobInstances", 0), old.get("desiredReplicas", 0)
    message = f"the job has ended with {had} instances: create a new one for {asked}" if asked > had else ""
    status = {**old, "conditions": _conditions(old, {"Invalid": message}, now)}
    delete = [pod for pod in own_pods if phase(pod) not in ENDED and not is_terminating(pod)] + list(services)
    delete += [pod for pod in (clean(job, own_pods) if job else []) if pod not in delete]
    ttl = (value["metadata"].get("annotations") or {}).get(TTL, "")
    if ttl.isdecimal():
        ended = datetime.strptime(old["completionTime"], _TIME).replace(tzinfo=UTC)
        delete += [value] if now >= ended + timedelta(seconds=int(ttl)) else []
    return Decision(_patch(old, status, now), tuple(delete))


def _changed(value: Object, own_pods: Sequence[Object]) -> str:
    """Return an error, if a field of the spec has changed since the pods were created; else an empty string."""
    now = pods.field_hashes(value)
    for pod in own_pods:
        then = json.loads((pod["metadata"].get("annotations") or {}).get(pods.SPEC, "null")) or now
        for key in sorted({*then, *now}):
            if then.get(key) != now.get(key):
                return f"spec.{key} changed after the job began: delete and create it"
    return ""


def _invalid(old: Object, message: str, now: datetime) -> Object:
    """Return the status of a job with a wrong spec: nothing is created or deleted, and running pods go on."""
    conditions = _conditions(old, {"Running": "", "Invalid": message}, now)
    return {**old, "launcherStatus": "Failed", "lastMessage": message, "conditions": conditions}


def _status(
    job: Job,
    old: Object,
    actions: Actions,
    own_pods: Sequence[Object],
    now: datetime,
    trouble: str | None,
    said: str,
) -> Object:
    states = [instance.state for instance in actions.instances]
    remaining = [pod for pod in own_pods if not is_terminating(pod) and pod not in actions.delete]
    phases = [phase(pod) for pod in remaining]
    running = sum(state in ("Running", "Restarting", "Lost") for state in states)
    ended = bool(states) and all(state in ENDED for state in states)
    restarts = sum(instance.restarts for instance in actions.instances)
    word, message = _summary(job, actions, remaining)
    status = {
        **old,
        "launcherStatus": word,
        "currentReplicas": running,
        "desiredReplicas": job.shape.instances,
        "lastMessage": trouble or message,
        "restartCount": restarts,
        "workersStatus": {
            "active": sum(each not in ENDED for each in phases),
            "succeeded": phases.count("Succeeded"),
            "failed": phases.count("Failed"),
        },
        "iPUPartitionCreated": bool(own_pods) or old.get("iPUPartitionCreated", False),
        "instances": {
            str(instance.number): {"state": instance.state, "restarts": instance.restarts}
            for instance in actions.instances
        },
        "conditions": _conditions(
            old,
            {
                "Running": (said or "instances run") if word == "Running" else "",
                "Succeeded": message if word == "Completed" else "",
                "Failed": message if word == "Failed" else "",
                "Invalid": "",
            },
            now,
        ),
    }
    if any(phase(pod) != "Pending" for pod in own_pods):
        status.setdefault("startTime", stamp(now))
    if ended:
        status["completionTime"] = stamp(now)
    return status


def _summary(job: Job, actions: Actions, remaining: Sequence[Object]) -> tuple[str, str]:
    """Return the job's status word, and one line about it."""
    total = job.shape.instances
    states = [instance.state for instance in actions.instances]
    if not total:
        return "Pending", "no instances wanted"
    failed = [instance for instance in actions.instances if instance.state == "Failed"]
    if all(state in ENDED for state in states):
        if not failed:
            return "Completed", "All instances done"
        culprits = [pod for instance in failed if (pod := first_failed(instance))]
        first = f": {culprits[0]['metadata']['name']} {describe_end(culprits[0])}" if culprits else ""
        return "Failed", f"{len(failed)} of {total} instances failed{first}"
    if all(state == "Pending" for state in states) and not any(each.restarts for each in actions.instances):
        return "Pending", f"waiting: {why_pending(remaining)}"
    parts = [f"{states.count('Running')} of {total} instances running"]
    parts += [f"{states.count(state)} {words}" for state, words in _WORDS.items() if state in states]
    return "Running", ", ".join(parts)


_WORDS = {"Restarting": "restarting", "Lost": "starting again after pods were lost", "Failed": "failed"}


def _conditions(old: Object, true: dict[str, str], now: datetime) -> list[Object]:
    """Return the conditions with new messages; a condition is true if its message isn't empty."""
    conditions = {condition["type"]: condition for condition in old.get("conditions") or []}
    for kind, message in true.items():
        before = conditions.get(kind, {})
        new = {
            "type": kind,
            "status": "True" if message else "False",
            "reason": _REASONS[kind],
            "message": message or "no longer",  # some API servers take an empty string for none
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
    """Return the merge patch from one status to another; empty, if nothing has changed."""
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


@dataclass(frozen=True)
class Actions:
    """The next states of a job's instances, and the pods to create and to delete."""

    instances: tuple[Instance, ...]
    create: tuple[tuple[int, int], ...] = ()  # number of the pod, attempt
    delete: tuple[Object, ...] = ()


def advance(job: Job, record: Mapping[str, Any], pods: Sequence[Object]) -> Actions:
    """Return the next state of each instance, and the pods to create and to delete.

    Args:
        record: `status.instances`
        pods:   all pods of the job
    """
    instances, create, delete = [], [], []
    for number in range(job.shape.instances):
        known = record.get(str(number)) or {}
        own_pods = tuple(pod for pod in pods if int_label(pod, INSTANCE) == number)
        before = Instance(number, known.get("state", "Pending"), known.get("restarts", 0), own_pods)
        after, missing, gone = _advance(job, before)
        instances.append(after)
        create += [(number * job.shape.workers + worker, after.restarts) for worker in missing]
        delete += gone
    delete += [pod for pod in pods if int_label(pod, INSTANCE) >= job.shape.instances]
    return Actions(tuple(instances), tuple(create), tuple(pod for pod in delete if not is_terminating(pod)))


def _advance(job: Job, instance: Instance) -> tuple[Instance, list[int], list[Object]]:
    """Return the next state of an instance, the workers to create, and the pods to delete."""
    if instance.state in ENDED:
        return instance, [], _leftovers(instance)
    current = [pod for pod in instance.pods if int_label(pod, ATTEMPT) == instance.restarts]
    past = [pod for pod in instance.pods if int_label(pod, ATTEMPT) != instance.restarts]
    if instance.state == "Lost":
        past, current = [*past, *current], []
    if past:
        return instance, [], past
    there = {int_label(pod, WORKER) for pod in current}
    missing = [worker for worker in range(job.shape.workers) if worker not in there]
    if instance.state in ("Restarting", "Lost"):
        instance = replace(instance, state="Pending")
    failed = [pod for pod in current if phase(pod) == "Failed" and not _ended_by_ttl(job, pod)]
    own = [pod for pod in failed if not (is_terminating(pod) or was_disrupted(pod))]
    done = not missing and all(phase(pod) == "Succeeded" or _ended_by_ttl(job, pod) for pod in current)
    if own or done:
        return _end(job, instance, min(own, key=when_ended) if own else None)
    is_incomplete = missing or any(map(is_terminating, current))
    if len(own) < len(failed) or (instance.state == "Running" and is_incomplete):
        return replace(instance, state="Lost"), [], current
    if not missing and any(phase(pod) != "Pending" for pod in current):
        return replace(instance, state="Running"), [], []
    return instance, missing, []


def _end(job: Job, instance: Instance, culprit: Object | None) -> tuple[Instance, list[int], list[Object]]:
    """Restart or end an instance: all its workers succeeded, or one, the `culprit`, failed."""
    code = exit_code(culprit) if culprit else 0
    if job.restarts.wanted(culprit is not None, code, instance.restarts):
        again = replace(instance, state="Restarting", restarts=instance.restarts + 1)
        return again, [], list(instance.pods)
    ended = replace(instance, state="Failed" if culprit else "Succeeded")
    return ended, [], _leftovers(ended)


def _leftovers(instance: Instance) -> list[Object]:
    """Return the pods to delete after an instance has ended; failed pods of a failed instance stay, for their logs."""
    kept = ENDED if instance.state == "Succeeded" else ("Failed",)
    return [pod for pod in instance.pods if phase(pod) not in kept]


def first_failed(instance: Instance) -> Object | None:
    """Return the pod that failed first in an instance; None, if it was deleted."""
    failed = [pod for pod in instance.pods if phase(pod) == "Failed" and not is_terminating(pod)]
    return min(failed, key=when_ended, default=None)


def clean(job: Job, pods: Sequence[Object]) -> list[Object]:
    """Return the pods to delete after the job has ended, by its cleanPodPolicy."""
    if job.clean == "None":
        return []
    keeps_log = job.clean == "Workers" and job.mode == "launched"
    gone = [pod for pod in pods if not (keeps_log and int_label(pod, WORKER) == 0)]
    return [pod for pod in gone if not is_terminating(pod)]


def _ended_by_ttl(job: Job, pod: Object) -> bool:
    is_late = phase(pod) == "Failed" and pod["status"].get("reason") == "DeadlineExceeded"
    return job.ttl is not None and is_late
