"""Render a job as plain objects for clusters without our operator: Indexed Jobs, bare pods or JobSets."""

from __future__ import annotations

from collections.abc import Iterator

from . import pods
from .pods import INSTANCE, JOB, Object
from .rules import TTL
from .spec import MAX_HOST, Job, exit_codes

_INDEX = "metadata.labels['batch.kubernetes.io/job-completion-index']"
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def render(job: Job, way: str = "job") -> tuple[list[Object], list[str]]:
    """Return the objects of a job, and warnings about fields that such objects can't hold.

    Raises:
        ValueError: such objects can't run the job; the message has a fix
    """
    if way == "pod":
        made = [pods.pod(job, number) for number in range(job.shape.instances * job.shape.workers)]
    else:
        _refuse(job, way)
        make = _job_set if way == "jobset" else _job
        made = [make(job, instance) for instance in range(job.shape.instances)]
    if job.has_service and way != "jobset" and made:
        made.insert(0, pods.service(job))
    return made, list(_warnings(job, way))


def _refuse(job: Job, way: str) -> None:
    policy = job.restarts.policy
    if way == "job" and job.shape.workers > 1 and policy != "Never":
        raise ValueError(
            f"a Job can't restart {job.shape.workers} workers as one, and restartPolicy is {policy}\n"
            "  fix: --as jobset, where its controller is installed; or ipujob submit, where our operator is; or Never"
        )
    last = f"{_name(job, job.shape.instances - 1)}-worker-{job.shape.workers - 1}"
    if len(last) > MAX_HOST:
        reason = f"the host name {last} has more than {MAX_HOST} characters"
        raise ValueError(f"{reason}\n  fix: --name, with a shorter one")


def _warnings(job: Job, way: str) -> Iterator[str]:
    """Yield what needs the operator, and is not in the objects."""
    policy = job.restarts.policy
    if job.clean != "None":
        yield f"cleanPodPolicy {job.clean} needs the operator: these pods stay, or go by {TTL}"
    if way != "pod" and policy == "Always":
        yield "restartPolicy Always needs the operator: what succeeded is not run again"
    if way == "pod" and policy != "Never":
        yield f"restartPolicy {policy} needs the operator: bare pods are not started again"
    if way == "job" and policy != "Never":
        yield "PANDO_RESTARTS is not set: a Job's pods can't read how often they were started"
    if way == "pod" and job.seconds_kept is not None:
        yield f"{TTL} needs the operator, or --as job: bare pods stay"


def _name(job: Job, instance: int) -> str:
    """Return the name of an instance, without "-worker"."""
    return job.name if job.shape.instances == 1 else f"{job.name}-{instance}"


def _object(job: Job, instance: int, kind: tuple[str, str], name: str, spec: Object) -> Object:
    """Return an object of a kind (apiVersion, kind) for an instance; it is deleted some time after its end."""
    metadata = {"name": name, "labels": {JOB: job.name, INSTANCE: str(instance)}}
    kept = {} if job.seconds_kept is None else {"ttlSecondsAfterFinished": job.seconds_kept}
    return {"apiVersion": kind[0], "kind": kind[1], "metadata": metadata, "spec": spec | kept}


def _job(job: Job, instance: int) -> Object:
    """Return an Indexed Job. Its pods' host names are NAME-worker-0, ...; the pods' own names end in random letters."""
    name = f"{_name(job, instance)}-worker"
    restarts = "0" if job.restarts.policy == "Never" else None
    spec = _job_spec(job, instance, f"{name}-0.{job.name}", restarts)
    return _object(job, instance, ("batch/v1", "Job"), name, spec)


def _job_spec(job: Job, instance: int, address: str, restarts: str | Object | None) -> Object:
    """Return the spec of an Indexed Job, where worker 0 has this address, and PANDO_RESTARTS this value if any."""
    environment = pods.variables(job, instance, {"fieldRef": {"fieldPath": _INDEX}}, address)
    if restarts is not None:
        environment["PANDO_RESTARTS"] = restarts
    template = pods.template(job, environment)
    template["metadata"]["labels"][INSTANCE] = str(instance)
    workers = job.shape.workers
    limit = job.restarts.limit if workers == 1 and job.restarts.policy != "Never" else 0
    spec: Object = {
        "completionMode": "Indexed",
        "completions": workers,
        "parallelism": workers,
        "backoffLimit": limit,
        "template": template,
    }
    if job.restarts.policy == "ExitCode":
        codes = {"operator": "NotIn", "values": sorted(exit_codes(job.restarts.codes))[-255:]}
        spec["podFailurePolicy"] = {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"containerName": job.worker["name"], **codes}},
            ]
        }
    return spec


def _job_set(job: Job, instance: int) -> Object:
    """Return a JobSet of one Indexed Job, which restarts several workers together, and has a Service of its own."""
    name = _name(job, instance)
    inner = _job_spec(job, instance, f"{name}-worker-0-0.{name}", {"fieldRef": {"fieldPath": _RESTARTS}})
    inner["backoffLimit"] = 0
    inner["template"]["spec"].pop("subdomain", None)
    spec: Object = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": inner}}],
    }
    if job.restarts.policy != "Never":
        spec["failurePolicy"] = {"maxRestarts": job.restarts.limit}
    return _object(job, instance, ("jobset.x-k8s.io/v1alpha2", "JobSet"), name, spec)


def placed(made: Object, value: Object) -> Object:
    """Return an object in the namespace of the file; in none, if the file names none, so that `kubectl -n` decides."""
    namespace = value["metadata"].get("namespace")
    return {**made, "metadata": made["metadata"] | ({"namespace": namespace} if namespace else {})}
