"""The commands that need a cluster: submit, status, logs, delete."""

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing.pool import ThreadPool
from typing import Any

from popengine.texts import table_text

from .client import Cluster, Refused, Unreachable
from .files import load_job, read_documents, with_overrides
from .pods import ATTEMPT, ENDED, JOB, Object, exit_code, phase

_POLL = 0.5  # seconds between two requests for the state of a job
_PATIENCE = 60  # seconds to wait while the cluster can't be reached


def submit_file(arguments: argparse.Namespace) -> int:
    """Create a file's jobs and print their names; with --wait or --follow return 1 if one fails, else 0."""
    documents = read_documents(arguments.file)
    if arguments.name:
        documents = [with_overrides(document, arguments.name) for document in documents]
    for document in documents:
        load_job(document)
    cluster, created = Cluster(), []
    for document in documents:
        metadata = document.value["metadata"]
        namespace = arguments.namespace or metadata.get("namespace") or cluster.namespace
        job = cluster.create({**document.value, "metadata": {**metadata, "namespace": namespace}})
        print(f"ipujob.graphcore.ai/{job['metadata']['name']} created", flush=True)
        created.append(job)
    if not (arguments.wait or arguments.follow):
        return 0
    return max(_wait_for_end(cluster, job, arguments.follow) for job in created)


def _wait_for_end(cluster: Cluster, job: Object, follow: bool) -> int:
    """Wait until a job ends, print its last message, and return 0 if it is Completed, 1 if it is Failed. With
    `follow` print the log of worker 0 until then."""
    name, namespace, uid = (job["metadata"][key] for key in ("name", "namespace", "uid"))
    shown: dict[str, int] = {}  # by pod, the number of lines printed
    finished: set[str] = set()  # pods with a log that was printed to its end
    reached = time.monotonic()
    while True:
        try:
            now = _find_job(cluster, name, namespace)
            if now["metadata"]["uid"] != uid:
                raise Refused(404, f"{name} was deleted, and another one was created")
            for pod in _list_pods(cluster, now) if follow else ():
                one, before = pod["metadata"]["uid"], phase(pod)
                if _pod_number(pod) == 0 and before != "Pending" and one not in finished:
                    # A stream may end before its pod does: the next stream skips the printed lines.
                    shown[one] = _copy_log(cluster, pod, True, skip=shown.get(one, 0))
                    finished |= {one} if before in ENDED else set()
            status, reached = now.get("status", {}), time.monotonic()
            if (word := status.get("launcherStatus")) in ("Completed", "Failed"):
                print(f"{name}: {word}: {status.get('lastMessage', '')}", file=sys.stderr)
                return int(word == "Failed")
        except Unreachable:
            if time.monotonic() - reached > _PATIENCE:
                raise
        time.sleep(_POLL)


def print_status(arguments: argparse.Namespace) -> int:
    """Print a table of all jobs, or the details of one; with --watch, again at each change. Return 0."""
    cluster, last = Cluster(), None
    namespace = arguments.namespace or cluster.namespace
    while True:
        if arguments.name:
            text = _job_details(cluster, _find_job(cluster, arguments.name, namespace))
        else:
            table = _job_table(cluster.list("IPUJob", namespace))
            text = table or f"No IPUJobs found in {namespace} namespace."
        if text != last:
            print(text if last is None else f"\n{text}", flush=True)
        last = text
        if not arguments.watch:
            return 0
        time.sleep(_POLL)


def _job_table(jobs: Sequence[Object]) -> str:
    """Return a table with the columns of `kubectl get ipujobs`; "", if there is no job."""
    rows = []
    for job in sorted(jobs, key=lambda job: job["metadata"]["name"]):
        keys = ("launcherStatus", "currentReplicas", "desiredReplicas", "lastMessage")
        fields = (job.get("status", {}).get(key, "") for key in keys)
        rows.append((job["metadata"]["name"], *fields, _age_text(job["metadata"]["creationTimestamp"])))
    return _text_table(["NAME", "STATUS", "CURRENT", "DESIRED", "LASTMESSAGE", "AGE"], rows)


def _text_table(names: Sequence[str], values: Sequence[Sequence[Any]]) -> str:
    """Return a table of the rows `values`, headed by `names`; "", if it has no rows."""
    return table_text([names, *([str(value) for value in row] for row in values)], "   ") if values else ""


def _age_text(created: str) -> str:
    """Return the time since an object was created, in one unit: 119s, 10m, 47h, 5d."""
    seconds = max(int((datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()), 0)
    for unit, size, most in (("s", 1, 120), ("m", 60, 120), ("h", 3600, 48)):
        if seconds < most * size:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86400}d"


def _job_details(cluster: Cluster, job: Object) -> str:
    """Return tables of a job, its instances and its pods, then its true conditions and last five events."""
    said, metadata = job.get("status", {}), job["metadata"]
    instances = [
        (number, instance["state"], instance["restarts"])
        for number, instance in sorted(said.get("instances", {}).items(), key=lambda item: int(item[0]))
    ]
    pods = []
    for pod in _list_pods(cluster, job):
        code, attempt = exit_code(pod), pod["metadata"]["labels"].get(ATTEMPT, "")
        ended, node = "" if code is None else code, pod["spec"].get("nodeName", "")
        pods.append((pod["metadata"]["name"], phase(pod), ended, attempt, node))
    true = [condition for condition in said.get("conditions", []) if condition["status"] == "True"]
    notes = [f"{condition['type']}: {condition.get('message', '')}" for condition in true]
    events = cluster.list("Event", metadata["namespace"], fields=f"involvedObject.name={metadata['name']}")
    events.sort(key=lambda event: event.get("lastTimestamp") or "")
    notes += [f"{event.get('lastTimestamp')} {event['reason']}: {event['message']}" for event in events[-5:]]
    parts = [
        _job_table([job]),
        _text_table(["INSTANCE", "STATE", "RESTARTS"], instances),
        _text_table(["POD", "PHASE", "EXIT CODE", "ATTEMPT", "NODE"], pods),
        "\n".join(notes),
    ]
    return "\n\n".join(filter(None, parts))


def print_logs(arguments: argparse.Namespace) -> int:
    """Print the log of one worker, or of all, and return 0. Raises: Refused, if the worker has no pod."""
    cluster = Cluster()
    job = _find_job(cluster, arguments.name, arguments.namespace or cluster.namespace)
    pods = [pod for pod in _list_pods(cluster, job) if arguments.all or _pod_number(pod) == arguments.worker]
    if not pods:
        said = job.get("status", {})
        which = arguments.name if arguments.all else f"{arguments.name}-worker-{arguments.worker}"
        reason = f"the job is {said.get('launcherStatus')}: {said.get('lastMessage')}"
        raise Refused(404, f"{which} has no pod: {reason}")

    def copy(pod: Object) -> None:
        prefix = f"[{pod['metadata']['name']}] " if arguments.all else ""
        _copy_log(cluster, pod, arguments.follow, arguments.previous, prefix)

    with ThreadPool(len(pods) if arguments.follow else 1) as threads:  # 1: one log after the other
        threads.map(copy, pods, chunksize=1)
    return 0


def _copy_log(
    cluster: Cluster, pod: Object, follow: bool, previous: bool = False, prefix: str = "", skip: int = 0
) -> int:
    """Print the lines of a pod's log after the first `skip`; return how many lines are printed or skipped."""
    lines = 0
    for lines, line in enumerate(cluster.logs(pod, follow, previous), 1):
        if lines > skip:
            print(f"{prefix}{line}\n", end="", flush=True)  # one write: other threads print, too
    return max(lines, skip)


def delete_jobs(arguments: argparse.Namespace) -> int:
    """Delete jobs, and print the name or the error of each; return 1 if a deletion was refused, else 0."""
    cluster, code = Cluster(), 0
    namespace = arguments.namespace or cluster.namespace
    for name in arguments.names:
        try:
            cluster.delete(_find_job(cluster, name, namespace), orphan=arguments.keep_pods)
            print(f'ipujob.graphcore.ai "{name}" deleted')
        except Refused as error:
            print(f"ipujob: {error}", file=sys.stderr)
            code = 1
    return code


def _find_job(cluster: Cluster, name: str, namespace: str) -> Object:
    """Return an IPUJob of the cluster. Raises: Refused (404), if no IPUJob has this name."""
    jobs = cluster.list("IPUJob", namespace, fields=f"metadata.name={name}")
    if not jobs:
        raise Refused(404, f"there is no IPUJob {name} in namespace {namespace}")
    return jobs[0]


def _list_pods(cluster: Cluster, job: Object) -> list[Object]:
    """Return the pods that a job owns, sorted by their numbers."""
    metadata = job["metadata"]
    listed = cluster.list("Pod", metadata["namespace"], labels=f"{JOB}={metadata['name']}")
    owners = [[owner["uid"] for owner in pod["metadata"].get("ownerReferences") or []] for pod in listed]
    owned = [pod for pod, uids in zip(listed, owners, strict=True) if metadata["uid"] in uids]
    return sorted(owned, key=_pod_number)


def _pod_number(pod: Object) -> int:
    """Return the number K of a pod with the name NAME-worker-K."""
    return int(pod["metadata"]["name"].rpartition("-")[2])
