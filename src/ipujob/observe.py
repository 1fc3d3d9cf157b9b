"""From what a cluster holds of a job to what is to be done: `observe(job, its objects) -> status, delete, create`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from . import instances, pods
from .instances import ENDED, Actions, leaving, phase
from .pods import Images, Object
from .rules import notes, parse
from .spec import TTL, Job

_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Decision:
    """What to do, in this order: write the status, then delete, then create."""

    status: Object  # a merge patch; empty: nothing has changed
    delete: tuple[Object, ...] = ()
    create: tuple[Object, ...] = ()


def stamp(time: datetime) -> str:
    return time.astimezone(UTC).strftime(_TIME)


def observe(
    value: Object,
    owned: Sequence[Object],
    now: datetime,
    trouble: str | None = None,
    device: str = "cpu",
    images: Images = (),
) -> Decision:
    """Bring a job one step on.

    Args:
        value: the IPUJob, as the API server has it
        owned: the pods and the Service that belong to it
        trouble: why creating pods was refused the last time
        device, images: as in `pods.template`
    """
    old = value.get("status") or {}
    mine = [each for each in owned if each["kind"] == "Pod"]
    services = [each for each in owned if each["kind"] == "Service"]
    if value["metadata"].get("deletionTimestamp"):
        return Decision({})
    job, faults = parse(value)
    if old.get("completionTime"):
        return _finished(value, job, mine, services, now)
    invalid = "; ".join(fault.message for fault in faults) or _changed(value, mine)
    if job is None or invalid:
        return Decision(_patch(old, _invalid(old, invalid, now), now))
    actions = instances.advance(job, old.get("instances") or {}, mine)
    said = [text for _, text in notes(job, value)] + [pods.image_note(job, images)]
    status = _status(
        job, old, actions, mine, now, trouble if actions.create else None, "; ".join(filter(None, said))
    )
    create = [pods.pod(job, number, attempt, device, images) for number, attempt in actions.create]
    delete = list(actions.delete)
    if status.get("completionTime"):
        delete += instances.clean(job, mine) + services
    elif job.has_service and not services and job.shape.instances:
        create.insert(0, pods.service(job))
    unique = {(each["kind"], each["metadata"]["name"]): each for each in delete}
    return Decision(
        _patch(old, status, now), tuple(unique.values()), tuple(pods.owned(each, value) for each in create)
    )


def _finished(
    value: Object, job: Job | None, mine: Sequence[Object], services: Sequence[Object], now: datetime
) -> Decision:
    """Nothing is started again; what is left over goes."""
    old = value["status"]
    asked, had = value["spec"].get("jobInstances", 0), old.get("desiredReplicas", 0)
    message = f"the job has ended with {had} instances: create a new one for {asked}" if asked > had else ""
    status = {**old, "conditions": _conditions(old, {"Invalid": message}, now)}
    gone = [pod for pod in mine if phase(pod) not in ENDED and not leaving(pod)] + list(services)
    gone += [pod for pod in (instances.clean(job, mine) if job else []) if pod not in gone]
    ttl = (value["metadata"].get("annotations") or {}).get(TTL, "")
    if ttl.isdecimal():
        ended = datetime.strptime(old["completionTime"], _TIME).replace(tzinfo=UTC)
        gone += [value] if now >= ended + timedelta(seconds=int(ttl)) else []
    return Decision(_patch(old, status, now), tuple(gone))


def _changed(value: Object, mine: Sequence[Object]) -> str:
    """What of the spec isn't as it was when the pods were made."""
    now = pods.marks(value)
    for pod in mine:
        then = pods.marks_of(pod)
        fields = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)] if then else []
        if fields:
            return f"spec.{fields[0]} changed after the job began: delete and create it"
    return ""


def _invalid(old: Object, message: str, now: datetime) -> Object:
    """Nothing is created or deleted until the spec is right (again): pods that run go on."""
    conditions = _conditions(old, {"Running": "", "Invalid": message}, now)
    return {**old, "launcherStatus": "Failed", "lastMessage": message, "conditions": conditions}


def _status(
    job: Job,
    old: Object,
    actions: Actions,
    mine: Sequence[Object],
    now: datetime,
    trouble: str | None,
    said: str,
) -> Object:
    states = [instance.state for instance in actions.instances]
    going = [pod for pod in mine if not leaving(pod) and pod not in actions.delete]
    phases = [phase(pod) for pod in going]
    running = sum(state in ("Running", "Restarting", "Lost") for state in states)
    ended = bool(states) and all(state in ENDED for state in states)
    restarts = sum(instance.restarts for instance in actions.instances)
    word, message = _summary(job, actions, going)
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
        "iPUPartitionCreated": bool(mine) or old.get("iPUPartitionCreated", False),
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
    began = old.get("startTime") or instances.started(mine)
    return (
        status | ({"startTime": began} if began else {}) | ({"completionTime": stamp(now)} if ended else {})
    )


def _summary(job: Job, actions: Actions, going: Sequence[Object]) -> tuple[str, str]:
    """STATUS, and one line about it."""
    total = job.shape.instances
    states = [instance.state for instance in actions.instances]
    if not total:
        return "Pending", "no instances wanted"
    failed = [instance for instance in actions.instances if instance.state == "Failed"]
    if all(state in ENDED for state in states):
        if not failed:
            return "Completed", "All instances done"
        culprits = [pod for instance in failed if (pod := instances.first_failed(instance))]
        first = f": {culprits[0]['metadata']['name']} {instances.end_of(culprits[0])}" if culprits else ""
        return "Failed", f"{len(failed)} of {total} instances failed{first}"
    if all(state == "Pending" for state in states) and not any(each.restarts for each in actions.instances):
        return "Pending", f"waiting: {instances.waiting(going)}"
    parts = [f"{states.count('Running')} of {total} instances running"]
    parts += [f"{states.count(state)} {words}" for state, words in _WORDS.items() if state in states]
    return "Running", ", ".join(parts)


_WORDS = {"Restarting": "restarting", "Lost": "starting again after pods were lost", "Failed": "failed"}


def _conditions(old: Object, true: dict[str, str], now: datetime) -> list[Object]:
    """The conditions with some of them set: those with a message hold, those with an empty one don't."""
    found = {condition["type"]: condition for condition in old.get("conditions") or []}
    for kind, message in true.items():
        before = found.get(kind)
        if before is None and not message:
            continue
        new = {
            "type": kind,
            "status": "True" if message else "False",
            "reason": _REASONS[kind],
            "message": message or "no longer",  # some API servers take an empty string for none
        }
        if before is None or any(before.get(key) != item for key, item in new.items()):
            since = stamp(now)
            if before is not None and before["status"] == new["status"]:
                since = before.get("lastTransitionTime", since)
            found[kind] = {**new, "lastUpdateTime": stamp(now), "lastTransitionTime": since}
    return list(found.values())


_REASONS = {
    "Running": "InstancesRun",
    "Succeeded": "AllDone",
    "Failed": "InstancesFailed",
    "Invalid": "SpecRefused",
}


def _patch(old: Object, new: Object, now: datetime) -> Object:
    change = _merge(old, new)
    return {**change, "lastReconcileTime": stamp(now)} if change else {}


def merged(old: Object, patch: Object) -> Object:
    """What a merge patch makes of an object."""
    new = {key: item for key, item in old.items() if patch.get(key, item) is not None}
    for key, item in patch.items():
        if item is not None:
            new[key] = merged(new.get(key) or {}, item) if isinstance(item, dict) else item
    return new


def _merge(old: Any, new: Any) -> Object:
    """The merge patch that turns one object into the other."""
    change: Object = {key: None for key in old if key not in new}
    for key, item in new.items():
        if isinstance(item, dict) and isinstance(old.get(key), dict):
            inner = _merge(old[key], item)
            change |= {key: inner} if inner else {}
        elif key not in old or old[key] != item:
            change[key] = item
    return change
