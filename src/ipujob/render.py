"""Render a job as plain objects for clusters without our operator: Indexed Jobs, bare pods or JobSets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    last = f"{_name(job, job.shape.instances - 1)}-{job.shape.workers - 1}"
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
    return f"{job.name}-worker" if job.shape.instances == 1 else f"{job.name}-{instance}-worker"


def _job(job: Job, instance: int) -> Object:
    """Return an Indexed Job. Its pods' host names are NAME-worker-0, ...; the pods' own names end in random letters."""
    name = _name(job, instance)
    environment = pods.variables(job, instance, {"fieldRef": {"fieldPath": _INDEX}}, f"{name}-0.{job.name}")
    if job.restarts.policy == "Never":
        environment["PANDO_RESTARTS"] = "0"
    metadata = {"name": name, "labels": {JOB: job.name, INSTANCE: str(instance)}}
    spec = _job_spec(job, instance, environment)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _job_spec(job: Job, instance: int, environment: dict[str, Any]) -> Object:
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
    if job.seconds_kept is not None:
        spec["ttlSecondsAfterFinished"] = job.seconds_kept
    return spec


def _job_set(job: Job, instance: int) -> Object:
    """Return a JobSet of one Indexed Job, which restarts several workers together, and has a Service of its own."""
    name = job.name if job.shape.instances == 1 else f"{job.name}-{instance}"
    environment = pods.variables(
        job, instance, {"fieldRef": {"fieldPath": _INDEX}}, f"{name}-worker-0-0.{name}"
    )
    environment["PANDO_RESTARTS"] = {"fieldRef": {"fieldPath": _RESTARTS}}
    inner = _job_spec(job, instance, environment)
    inner["template"]["spec"].pop("subdomain", None)
    inner |= {"backoffLimit": 0}
    spec: Object = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": inner}}],
    }
    if job.restarts.policy != "Never":
        spec["failurePolicy"] = {"maxRestarts": job.restarts.limit}
    if "ttlSecondsAfterFinished" in inner:
        spec["ttlSecondsAfterFinished"] = inner.pop("ttlSecondsAfterFinished")
    metadata = {"name": name, "labels": {JOB: job.name, INSTANCE: str(instance)}}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def placed(made: Object, value: Object) -> Object:
    """Return an object in the namespace of the file; in none, if the file names none, so that `kubectl -n` decides."""
    namespace = value["metadata"].get("namespace")
    return {**made, "metadata": made["metadata"] | ({"namespace": namespace} if namespace else {})}
