"""The commands that need a cluster: submit, status, logs, delete."""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from .cli import load_job, read_jobs, warn_about_image, with_changes
from .client import Cluster, Refused, Unreachable
from .pods import ATTEMPT, ENDED, JOB, Object, exit_code, phase

_POLL = 0.5  # seconds
_PATIENCE = 60  # seconds; a wait survives a cluster that can't be reached for this time
_ENDED = ("Completed", "Failed")


def _command(run: Callable[[Cluster, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return a command that prints an error of the cluster in place of a traceback, with exit code 1."""

    @functools.wraps(run)
    def command(arguments: argparse.Namespace) -> int:
        try:
            return run(Cluster(), arguments)
        except (Refused, Unreachable) as error:
            print(f"ipujob: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # ends the command; the job goes on
            return 130

    return command


def submit(arguments: argparse.Namespace) -> int:
    documents = [
        with_changes(document, arguments.name) if arguments.name else document
        for document in read_jobs(arguments.file)
    ]
    jobs = [load_job(document) for document in documents]
    for document, job in zip(documents, jobs, strict=True):
        warn_about_image(document, job)
    return _command(_submit)(argparse.Namespace(values=[d.value for d in documents], **vars(arguments)))


def _submit(cluster: Cluster, arguments: argparse.Namespace) -> int:
    created = []
    for value in arguments.values:
        place = arguments.namespace or value["metadata"].get("namespace") or cluster.namespace
        made = cluster.create({**value, "metadata": {**value["metadata"], "namespace": place}})
        print(f"ipujob.graphcore.ai/{made['metadata']['name']} created", flush=True)
        created.append(made)
    if not (arguments.wait or arguments.follow):
        return 0
    return max([_wait(cluster, job, arguments.follow) for job in created], default=0)


def _wait(cluster: Cluster, job: Object, follow: bool) -> int:
    """Wait until the job ends, and return its exit code: 0 Completed, 1 Failed.

    Args: follow: print the log of worker 0 meanwhile
    """
    name, place = job["metadata"]["name"], job["metadata"]["namespace"]
    shown: dict[str, int] = {}  # by pod, the number of lines printed
    finished: set[str] = set()  # pods with a log that was printed to its end
    reached = time.monotonic()
    while True:
        try:
            now = _job(cluster, name, place)
            if now["metadata"]["uid"] != job["metadata"]["uid"]:
                raise Refused(404, f"{name} was deleted, and another one was created")
            for pod in _pods(cluster, now) if follow else ():
                uid, before = pod["metadata"]["uid"], phase(pod)
                if _number(pod) == 0 and before != "Pending" and uid not in finished:
                    # A stream may end before its pod does: the next stream skips the printed lines.
                    shown[uid] = _copy_log(cluster, pod, True, skip=shown.get(uid, 0))
                    finished |= {uid} if before in ENDED else set()
            reached = time.monotonic()
        except Unreachable:
            if time.monotonic() - reached > _PATIENCE:
                raise
            now = job
        status = now.get("status", {})
        if status.get("launcherStatus") in _ENDED:
            print(f"{name}: {status['launcherStatus']}: {status.get('lastMessage', '')}", file=sys.stderr)
            return int(status["launcherStatus"] == "Failed")
        time.sleep(_POLL)


@_command
def status(cluster: Cluster, arguments: argparse.Namespace) -> int:
    place = arguments.namespace or cluster.namespace
    last = None
    while True:
        if arguments.name:
            text = _details(cluster, _job(cluster, arguments.name, place))
        else:
            text = _job_table(cluster.list("IPUJob", place)) or f"No IPUJobs found in {place} namespace."
        if text != last:
            print(text if last is None else f"\n{text}", flush=True)
        last = text
        if not arguments.watch:
            return 0
        time.sleep(_POLL)


def _job_table(jobs: Sequence[Object]) -> str:
    """Return the columns of `kubectl get ipujobs`; empty, if there is no job."""
    rows: list[tuple[str, ...]] = [("NAME", "STATUS", "CURRENT", "DESIRED", "LASTMESSAGE", "AGE")]
    for job in sorted(jobs, key=lambda job: job["metadata"]["name"]):
        said = job.get("status", {})
        fields = ("launcherStatus", "currentReplicas", "desiredReplicas", "lastMessage")
        rows.append(
            (job["metadata"]["name"], *(str(said.get(key, "")) for key in fields), _age(job["metadata"]))
        )
    return _columns(rows) if jobs else ""


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text, padded to columns."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _age(metadata: Object) -> str:
    """Return an object's age as kubectl prints it: 59s, 10m, 3h, 5d."""
    then = datetime.fromisoformat(metadata["creationTimestamp"])
    seconds = max(int((datetime.now(UTC) - then).total_seconds()), 0)
    for unit, size, limit in (("s", 1, 120), ("m", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < limit:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86400}d"


def _details(cluster: Cluster, job: Object) -> str:
    """Describe one job: its instances, pods, conditions and last events."""
    said, name = job.get("status", {}), job["metadata"]["name"]
    parts = [_job_table([job])]
    if known := said.get("instances"):
        rows = [
            (number, each["state"], str(each["restarts"]))
            for number, each in sorted(known.items(), key=lambda item: int(item[0]))
        ]
        parts.append(_columns([("INSTANCE", "STATE", "RESTARTS"), *rows]))
    if pods := _pods(cluster, job):
        rows = []
        for pod in pods:
            code, metadata = exit_code(pod), pod["metadata"]
            ended = "" if code is None else str(code)
            attempt, node = metadata["labels"].get(ATTEMPT, ""), pod["spec"].get("nodeName", "")
            rows.append((metadata["name"], phase(pod), ended, attempt, node))
        parts.append(_columns([("POD", "PHASE", "EXIT CODE", "ATTEMPT", "NODE"), *rows]))
    notes = [
        f"{each['type']}: {each.get('message', '')}"
        for each in said.get("conditions", [])
        if each["status"] == "True"
    ]
    events = cluster.list("Event", job["metadata"]["namespace"], fields=f"involvedObject.name={name}")
    events.sort(key=lambda event: event.get("lastTimestamp") or "")
    notes += [f"{each.get('lastTimestamp')} {each['reason']}: {each['message']}" for each in events[-5:]]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


@_command
def logs(cluster: Cluster, arguments: argparse.Namespace) -> int:
    job = _job(cluster, arguments.name, arguments.namespace or cluster.namespace)
    pods = [pod for pod in _pods(cluster, job) if arguments.all or _number(pod) == arguments.worker]
    if not pods:
        said = job.get("status", {})
        which = arguments.name if arguments.all else f"{arguments.name}-worker-{arguments.worker}"
        raise Refused(
            404, f"{which} has no pod: the job is {said.get('launcherStatus')}: {said.get('lastMessage')}"
        )
    if len(pods) == 1 or not arguments.follow:
        for pod in pods:
            _copy_log(
                cluster, pod, arguments.follow, arguments.previous, _prefix(pod) if arguments.all else ""
            )
        return 0
    errors: list[Exception] = []

    def copy(pod: Object) -> None:
        try:
            _copy_log(cluster, pod, True, arguments.previous, _prefix(pod))
        except (Refused, Unreachable) as error:
            errors.append(error)

    threads = [threading.Thread(target=copy, args=(pod,), daemon=True) for pod in pods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return 0


def _copy_log(
    cluster: Cluster, pod: Object, follow: bool, previous: bool = False, prefix: str = "", skip: int = 0
) -> int:
    """Print a pod's log without its first `skip` lines, and return its number of lines."""
    lines = 0
    for line in cluster.logs(pod, follow, previous):
        lines += 1
        if lines > skip:
            sys.stdout.write(f"{prefix}{line}\n")
            sys.stdout.flush()
    return max(lines, skip)


def _prefix(pod: Object) -> str:
    return f"[{pod['metadata']['name']}] "


@_command
def delete(cluster: Cluster, arguments: argparse.Namespace) -> int:
    place = arguments.namespace or cluster.namespace
    code = 0
    for name in arguments.names:
        try:
            cluster.delete(_job(cluster, name, place), orphan=arguments.keep_pods)
            print(f'ipujob.graphcore.ai "{name}" deleted')
        except Refused as error:
            print(f"ipujob: {error}", file=sys.stderr)
            code = 1
    return code


def _job(cluster: Cluster, name: str, namespace: str) -> Object:
    """Return an IPUJob of the cluster. Raises: Refused, if there is none by this name."""
    jobs = cluster.list("IPUJob", namespace, fields=f"metadata.name={name}")
    if not jobs:
        raise Refused(404, f"there is no IPUJob {name} in namespace {namespace}")
    return jobs[0]


def _pods(cluster: Cluster, job: Object) -> list[Object]:
    """Return the pods of a job in the order of their numbers."""
    listed = cluster.list("Pod", job["metadata"]["namespace"], labels=f"{JOB}={job['metadata']['name']}")
    uid = job["metadata"]["uid"]
    owned = [
        pod for pod in listed if any(o["uid"] == uid for o in pod["metadata"].get("ownerReferences") or [])
    ]
    return sorted(owned, key=_number)


def _number(pod: Object) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])
