"""The state machine of a job: `observe(job, its objects, now) -> status, delete, create`, a pure function.

All pods of an instance start, fail and restart together, since a collective needs all of them. The state of
each instance is in `status.instances`, and the status is written before pods are created or deleted:

    Pending     pods are being created; a missing pod is created again
    Running     all pods existed, and one has begun to run; if a pod is missing now, the state becomes Lost
    Restarting  the pods of the last attempt are being deleted; then those of the next attempt are created
    Lost        as Restarting, but not counted as a restart: the cluster ended a pod, not the program
    Succeeded, Failed   final: later changes of the pods have no effect
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from . import pods
from .pods import ATTEMPT, ENDED, INSTANCE, WORKER, Object, int_label, is_terminating, phase
from .rules import Images, Job, job_warnings, parse

_WORDS = {"Restarting": "restarting", "Lost": "starting again after pods were lost", "Failed": "failed"}


@dataclass(frozen=True)
class Decision:
    """The actions for a job, in this order: write the status, then delete, then create."""

    status: Object  # a merge patch; empty: nothing has changed
    delete: Sequence[Object] = ()
    create: Sequence[Object] = ()


def utc_stamp(time: datetime) -> str:
    """Return a time in UTC as Kubernetes writes it, such as 2024-05-01T12:00:00Z."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def observe(
    value: Object,
    owned: Sequence[Object],
    now: datetime,
    refusal: str | None = None,
    device: str = "cpu",
    images: Images = (),
) -> Decision:
    """Return the next actions for a job with the objects `owned`; an empty `Decision`, if the job is being deleted.
    `refusal`: the API server's message, if it refused to create an object; `device`, `images`: as in `rules.parse`"""
    if is_terminating(value):
        return Decision({})
    old = value.get("status") or {}
    own_pods = [pod for pod in owned if pod["kind"] == "Pod"]
    services = [service for service in owned if service["kind"] == "Service"]
    job, faults = parse(value, device, images)
    if old.get("completionTime"):
        return _observe_ended_job(value, job, own_pods, services, now)
    invalid = "; ".join(fault.message for fault in faults) or _spec_change_error(value, own_pods)
    if job is None or invalid:  # the job's pods are neither created nor deleted
        conditions = _updated_conditions(old, {"Running": "", "Invalid": invalid}, now)
        status = {"launcherStatus": "Failed", "lastMessage": invalid, "conditions": conditions}
        return Decision(_status_patch(old, status, now))
    instances, create, gone = _next_instance_records(job, old.get("instances") or {}, own_pods)
    remaining = [pod for pod in own_pods if not is_terminating(pod) and pod not in gone]
    states = Counter(record["state"] for record in instances.values())
    restarts = sum(record["restarts"] for record in instances.values())
    word, message = _status_and_message(job, states, restarts, remaining)
    notes = "; ".join(text for _, text in job_warnings(job, value)) or "instances run"
    conditions = {
        "Running": notes if word == "Running" else "",
        "Succeeded": message if word == "Completed" else "",
        "Failed": message if word == "Failed" else "",
        "Invalid": "",
    }
    phases = Counter(map(phase, remaining))
    ended = {"succeeded": phases["Succeeded"], "failed": phases["Failed"]}
    status = {
        "launcherStatus": word,
        "currentReplicas": states["Running"] + states["Restarting"] + states["Lost"],
        "desiredReplicas": job.instances,
        "lastMessage": refusal if refusal and create else message,
        "restartCount": restarts,
        "workersStatus": {"active": len(remaining) - sum(ended.values()), **ended},
        "iPUPartitionCreated": bool(remaining) or old.get("iPUPartitionCreated", False),
        "instances": instances,
        "conditions": _updated_conditions(old, conditions, now),
    }
    if "startTime" not in old and any(phase(pod) != "Pending" for pod in own_pods):
        status["startTime"] = utc_stamp(now)
    if instances and all(state in ENDED for state in states):
        status["completionTime"] = utc_stamp(now)
        gone += [pod for pod in remaining if _should_delete(job, pod)] + services
    elif job.has_service and not services and job.instances:
        create.insert(0, pods.headless_service(job))
    create = [pods.with_owner(resource, value) for resource in create]
    return Decision(_status_patch(old, status, now), gone, create)


def _observe_ended_job(
    value: Object, job: Job | None, own_pods: Sequence[Object], services: Sequence[Object], now: datetime
) -> Decision:
    """Return the actions for an ended job: what is left is deleted; added instances make it Invalid."""
    old = value["status"]
    new, had = value["spec"].get("jobInstances", 0), old.get("desiredReplicas", 0)
    message = f"the job has ended with {had} instances: create a new one for {new}" if new > had else ""
    remaining = [pod for pod in own_pods if not is_terminating(pod)]
    delete = [pod for pod in remaining if phase(pod) not in ENDED or (job and _should_delete(job, pod))]
    delete += services
    if job and job.seconds_kept is not None:
        end = datetime.fromisoformat(old["completionTime"]) + timedelta(seconds=job.seconds_kept)
        delete += [value] if now >= end else []
    status = {"conditions": _updated_conditions(old, {"Invalid": message}, now)}
    return Decision(_status_patch(old, status, now), delete)


def _spec_change_error(value: Object, own_pods: Sequence[Object]) -> str:
    """Return an error message if a field of the spec has changed since the pods were created, else ""."""
    hashes = pods.field_hashes(value)
    for pod in own_pods:
        then = json.loads((pod["metadata"].get("annotations") or {}).get(pods.SPEC, "null")) or hashes
        if changed := {key for key, _ in then.items() ^ hashes.items()}:
            return f"spec.{min(changed)} changed after the job began: delete and create it"
    return ""


def _status_and_message(
    job: Job, states: Counter[str], restarts: int, remaining: Sequence[Object]
) -> tuple[str, str]:
    total = job.instances
    if not total:
        return "Pending", "no instances wanted"
    if states["Succeeded"] == total:
        return "Completed", "All instances done"
    if states["Succeeded"] + states["Failed"] == total:
        failed = pods.failed_pods(job, remaining)
        first = f": {failed[0]['metadata']['name']} {pods.describe_end(failed[0])}" if failed else ""
        return "Failed", f"{states['Failed']} of {total} instances failed{first}"
    if states["Pending"] == total and not restarts:
        return "Pending", f"waiting: {pods.pending_reason(remaining)}"
    parts = [f"{states['Running']} of {total} instances running"]
    parts += [f"{states[state]} {words}" for state, words in _WORDS.items() if states[state]]
    return "Running", ", ".join(parts)


def _updated_conditions(old: Object, messages: Mapping[str, str], now: datetime) -> list[Object]:
    """Return the conditions of the status `old`, updated by a message for each type: "" means "False"."""
    conditions = {condition["type"]: condition for condition in old.get("conditions") or []}
    for kind, message in messages.items():
        before, time = conditions.get(kind, {}), utc_stamp(now)
        # Some API servers treat an empty string as a missing field.
        new = {"status": str(bool(message)), "reason": kind, "message": message or "no longer"}
        if (before or message) and before != {**before, **new}:
            since = before["lastTransitionTime"] if before.get("status") == new["status"] else time
            conditions[kind] = {"type": kind, **new, "lastUpdateTime": time, "lastTransitionTime": since}
    return list(conditions.values())


def _status_patch(old: Object, new: Object, now: datetime) -> Object:
    """Return the merge patch that gives the status `old` the fields and instances of `new`; {} if it has them."""
    change = {key: item for key, item in new.items() if old.get(key) != item}
    if "instances" in change:
        change["instances"] = {**dict.fromkeys(old.get("instances", ())), **new["instances"]}  # None deletes
    return {**change, "lastReconcileTime": utc_stamp(now)} if change else {}


# ---- instances ----------------------------------------------------------------------------------------------------


def _next_instance_records(
    job: Job, record: Mapping[str, Object], own_pods: Sequence[Object]
) -> tuple[dict[str, Object], list[Object], list[Object]]:
    """Return the next records of the instances (`status.instances`), the pods to create, and those to delete."""
    instances, create = {}, []
    delete = [pod for pod in own_pods if int_label(pod, INSTANCE) >= job.instances]
    for number in range(job.instances):
        record_now = {"state": "Pending", "restarts": 0, **(record.get(str(number)) or {})}
        of_instance = [pod for pod in own_pods if int_label(pod, INSTANCE) == number]
        instances[str(number)], missing, gone = _next_instance_record(job, record_now, of_instance)
        first_worker, attempt = number * job.workers, record_now["restarts"]
        create += [pods.worker_pod(job, first_worker + worker, attempt) for worker in missing]
        delete += gone
    return instances, create, [pod for pod in delete if not is_terminating(pod)]


def _next_instance_record(
    job: Job, record: Object, own_pods: Sequence[Object]
) -> tuple[Object, list[int], Sequence[Object]]:
    """Return an instance's next record, the workers to create, and its pods to delete."""
    state, restarts = record["state"], record["restarts"]
    if state in ENDED:
        return record, [], _pods_to_delete(state, own_pods)
    attempt = -1 if state == "Lost" else restarts  # -1: delete all pods of a lost attempt
    of_other_attempts = [pod for pod in own_pods if int_label(pod, ATTEMPT) != attempt]
    if of_other_attempts:
        return record, [], of_other_attempts
    there = {int_label(pod, WORKER) for pod in own_pods}
    missing = [worker for worker in range(job.workers) if worker not in there]
    failed = pods.failed_pods(job, own_pods)
    has_ended = all(phase(pod) in ENDED and pod not in failed for pod in own_pods)
    own_faults = [pod for pod in failed if not (is_terminating(pod) or pods.was_disrupted(pod))]
    if own_faults or (not missing and has_ended):
        culprit = next(iter(own_faults), None)
        if restarts < job.restart_limit and _should_restart(job, culprit):
            return {"state": "Restarting", "restarts": restarts + 1}, [], own_pods
        state = "Failed" if culprit else "Succeeded"
        return {"state": state, "restarts": restarts}, [], _pods_to_delete(state, own_pods)
    is_incomplete = missing or any(map(is_terminating, own_pods))
    if failed or (state == "Running" and is_incomplete):
        return {"state": "Lost", "restarts": restarts}, [], own_pods
    runs = state == "Running" or (not missing and any(phase(pod) != "Pending" for pod in own_pods))
    return {"state": "Running" if runs else "Pending", "restarts": restarts}, missing, []


def _should_restart(job: Job, culprit: Object | None) -> bool:
    """Return whether restartPolicy restarts an ended instance. `culprit`: its first failed pod, or None."""
    if job.restart_policy == "ExitCode":
        return culprit is not None and pods.exit_code(culprit) in job.exit_codes
    return job.restart_policy == "Always" or (job.restart_policy == "OnFailure" and culprit is not None)


def _pods_to_delete(state: str, own_pods: Sequence[Object]) -> list[Object]:
    """Return the pods to delete at an instance's end: those that run, and after a failure those that succeeded."""
    kept = ENDED if state == "Succeeded" else ("Failed",)
    return [pod for pod in own_pods if phase(pod) not in kept]


def _should_delete(job: Job, pod: Object) -> bool:
    """Return whether cleanPodPolicy deletes a pod of an ended job; Workers keeps the launcher's log."""
    keeps_log = job.clean_policy == "Workers" and job.mode == "launched"
    return job.clean_policy != "None" and not (keeps_log and int_label(pod, WORKER) == 0)
