"""A job as plain objects, for clusters without our operator: Indexed Jobs, bare pods or JobSets."""

from __future__ import annotations

import secrets
from typing import Any

from . import pods
from .pods import INSTANCE, JOB, Images, Object
from .spec import MAX_HOST, TTL, Job, exit_codes

WAYS = ("job", "pod", "jobset")
_LETTERS = (
    "bcdfghjklmnpqrstvwxz2456789"  # as an API server draws them: no words, nothing that looks like another
)
_INDEX = "metadata.labels['batch.kubernetes.io/job-completion-index']"
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def named(value: Object, name: str | None = None) -> Object:
    """The IPUJob with a name: the one given, its own, or its `generateName` with five drawn letters."""
    metadata = {**value["metadata"]}
    start = metadata.pop("generateName", None)
    if not (name or metadata.get("name") or start):
        return value
    metadata["name"] = (
        name or metadata.get("name") or start + "".join(secrets.choice(_LETTERS) for _ in range(5))
    )
    return {**value, "metadata": metadata}


def render(
    job: Job, way: str = "job", device: str = "cpu", images: Images = ()
) -> tuple[list[Object], list[str]]:
    """The objects, and what of the job they can't hold.

    Raises:
        ValueError: it can't be said this way; the message has a fix
    """
    if way == "pod":
        made = [
            pods.pod(job, number, 0, device, images)
            for number in range(job.shape.instances * job.shape.workers)
        ]
    else:
        _refuse(job, way)
        make = _job_set if way == "jobset" else _job
        made = [make(job, instance, device, images) for instance in range(job.shape.instances)]
    if job.has_service and way != "jobset" and made:
        made.insert(0, pods.service(job))
    return made, _left_out(job, way)


def _refuse(job: Job, way: str) -> None:
    policy = job.restarts.policy
    if way == "job" and job.shape.workers > 1 and policy != "Never":
        raise ValueError(
            f"a Job can't restart {job.shape.workers} workers as one, and restartPolicy is {policy}\n"
            "  fix: --as jobset, where its controller is installed; or ipujob submit, where our operator is; or Never"
        )
    last = f"{_name(job, job.shape.instances - 1)}-{job.shape.workers - 1}"
    if len(last) > MAX_HOST:
        raise ValueError(
            f"the host name {last} has more than {MAX_HOST} characters\n  fix: --name, with a shorter one"
        )


def _left_out(job: Job, way: str) -> list[str]:
    found = []
    if job.clean != "None":
        found.append(f"cleanPodPolicy {job.clean} needs the operator: these pods stay, or go by {TTL}")
    if way != "pod" and job.restarts.policy == "Always":
        found.append("restartPolicy Always needs the operator: what succeeded is not run again")
    if way == "pod" and job.restarts.policy != "Never":
        found.append(
            f"restartPolicy {job.restarts.policy} needs the operator: bare pods are not started again"
        )
    if way == "job" and job.restarts.policy != "Never":
        found.append("PANDO_RESTARTS is not set: a Job's pods aren't told how often they were started")
    if way == "pod" and TTL in job.annotations:
        found.append(f"{TTL} needs the operator, or --as job: bare pods stay")
    return found


def _name(job: Job, instance: int) -> str:
    return f"{job.name}-worker" if job.shape.instances == 1 else f"{job.name}-{instance}-worker"


def _job(job: Job, instance: int, device: str, images: Images) -> Object:
    """An Indexed Job; its pods' host names are NAME-worker-0 and so on, their own names end in letters."""
    name = _name(job, instance)
    told = pods.variables(job, instance, {"fieldRef": {"fieldPath": _INDEX}}, f"{name}-0.{job.name}")
    if job.restarts.policy == "Never":
        told["PANDO_RESTARTS"] = "0"
    metadata = {"name": name, "labels": {JOB: job.name, INSTANCE: str(instance)}}
    spec = _job_spec(job, instance, told, device, images)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _job_spec(job: Job, instance: int, told: dict[str, Any], device: str, images: Images) -> Object:
    template = pods.template(job, told, device, images)
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
    if TTL in job.annotations:
        spec["ttlSecondsAfterFinished"] = int(job.annotations[TTL])
    return spec


def _job_set(job: Job, instance: int, device: str, images: Images) -> Object:
    """A JobSet of one Indexed Job: the plain way to restart several workers as one. It makes its own Service."""
    name = job.name if job.shape.instances == 1 else f"{job.name}-{instance}"
    told = pods.variables(job, instance, {"fieldRef": {"fieldPath": _INDEX}}, f"{name}-worker-0-0.{name}")
    told["PANDO_RESTARTS"] = {"fieldRef": {"fieldPath": _RESTARTS}}
    inner = _job_spec(job, instance, told, device, images)
    inner["template"]["spec"].pop("subdomain", None)
    inner |= {"backoffLimit": 0}
    ttl = inner.pop("ttlSecondsAfterFinished", None)
    spec: Object = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": inner}}],
    }
    if job.restarts.policy != "Never":
        spec["failurePolicy"] = {"maxRestarts": job.restarts.limit}
    if ttl is not None:
        spec["ttlSecondsAfterFinished"] = ttl
    metadata = {"name": name, "labels": {JOB: job.name, INSTANCE: str(instance)}}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def placed(made: Object, value: Object) -> Object:
    """In the namespace that the file names; in none, if it names none, so that `kubectl -n` decides."""
    metadata = {key: item for key, item in made["metadata"].items() if key != "namespace"}
    if namespace := value["metadata"].get("namespace"):
        metadata["namespace"] = namespace
    return {**made, "metadata": metadata}
