"""Render a job as plain objects for clusters without our operator: Indexed Jobs, bare pods or JobSets."""

from collections.abc import Iterator, Mapping

from popengine.environment import NODE_RANK

from . import pods
from .pods import INSTANCE, JOB, Object
from .rules import MAX_HOST, TTL, Fault, Job

_INDEX = "metadata.labels['batch.kubernetes.io/job-completion-index']"
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def render(job: Job, way: str = "job") -> tuple[list[Object], list[str]]:
    """Return the objects of a job, and warnings about fields that have no effect without the operator. `way`:
    "job" (Indexed Jobs), "pod" (bare pods) or "jobset". The job has no `unsupported_fields`"""
    if way == "pod":
        objects = [pods.worker_pod(job, number) for number in range(job.instances * job.workers)]
    else:
        make = _job_set if way == "jobset" else _indexed_job
        objects = [make(job, instance) for instance in range(job.instances)]
    if job.has_service and way != "jobset" and objects:
        objects.insert(0, pods.headless_service(job))
    return objects, list(_render_warnings(job, way))


def unsupported_fields(job: Job, way: str) -> Iterator[Fault]:
    """Yield a fault if a host name is too long, or an Indexed Job would have to restart several workers."""
    if way == "job" and job.workers > 1 and job.restart_policy != "Never":
        message = (
            f"a Job can't restart {job.workers} workers as one, and restartPolicy is {job.restart_policy}"
        )
        fix = "--as jobset, where its controller is installed; or ipujob submit, where our operator is; or Never"
        yield Fault("spec.restartPolicy", message, fix)
    last = f"{_instance_name(job, job.instances - 1)}-worker-{job.workers - 1}"
    if way != "pod" and len(last) > MAX_HOST:
        message = f"the host name {last} has more than {MAX_HOST} characters"
        yield Fault("metadata.name", message, "--name, with a shorter one")


def _render_warnings(job: Job, way: str) -> Iterator[str]:
    """Yield a warning for each field of a job that has no effect in the objects of kind `way`."""
    has_restarts = job.restart_policy != "Never"
    if job.clean_policy != "None":
        yield f"cleanPodPolicy {job.clean_policy} needs the operator: these pods stay, or go by {TTL}"
    if way == "pod" and has_restarts:
        yield f"restartPolicy {job.restart_policy} needs the operator: bare pods are not started again"
    elif job.restart_policy == "Always":
        yield "restartPolicy Always needs the operator: what succeeded is not run again"
    if way == "job" and has_restarts:
        yield "PANDO_RESTARTS is not set: a Job's pods can't read how often they were started"
    if way == "pod" and job.seconds_kept is not None:
        yield f"{TTL} needs the operator, or --as job: bare pods stay"


def _instance_name(job: Job, instance: int) -> str:
    """Return the name of an instance: the job's name, with the instance's number if there are several."""
    return job.name if job.instances == 1 else f"{job.name}-{instance}"


def _kubernetes_object(job: Job, instance: int, api: str, kind: str, name: str, spec: Object) -> Object:
    """Return an object for an instance, with a time to live in its spec."""
    metadata = {"name": name, "labels": {JOB: job.name, INSTANCE: str(instance)}}
    ttl = {} if job.seconds_kept is None else {"ttlSecondsAfterFinished": job.seconds_kept}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec | ttl}


def _indexed_job(job: Job, instance: int) -> Object:
    """Return the Indexed Job of an instance. Its pods have random names, but host names NAME-worker-0, ..."""
    name = f"{_instance_name(job, instance)}-worker"
    restarts = {"PANDO_RESTARTS": "0"} if job.restart_policy == "Never" else {}
    spec = _job_spec(job, instance, {"MASTER_ADDR": f"{name}-0.{job.name}", **restarts})
    if job.workers == 1 and job.restart_policy != "Never":
        spec["backoffLimit"] = job.restart_limit
    return _kubernetes_object(job, instance, "batch/v1", "Job", name, spec)


def _job_spec(job: Job, instance: int, variables: Mapping[str, str | Object]) -> Object:
    """Return the spec of an instance's Indexed Job (`variables`: as in `pods.pod_template`, but the rank)."""
    workers, rank = job.workers, {NODE_RANK: {"fieldRef": {"fieldPath": _INDEX}}}
    spec: Object = {
        "completionMode": "Indexed",
        "completions": workers,
        "parallelism": workers,
        "backoffLimit": 0,
        "template": pods.pod_template(job, instance, {**rank, **variables}),
    }
    if job.restart_policy == "ExitCode":
        codes = {"operator": "NotIn", "values": sorted(job.exit_codes)[-255:]}
        spec["podFailurePolicy"] = {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"containerName": job.container["name"], **codes}},
            ]
        }
    return spec


def _job_set(job: Job, instance: int) -> Object:
    """Return an instance's JobSet: one Indexed Job with a Service, of which all workers restart together."""
    name = _instance_name(job, instance)
    restarts = {"fieldRef": {"fieldPath": _RESTARTS}}
    inner = _job_spec(job, instance, {"MASTER_ADDR": f"{name}-worker-0-0.{name}", "PANDO_RESTARTS": restarts})
    inner["template"]["spec"].pop("subdomain", None)
    spec: Object = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": inner}}],
    }
    if job.restart_policy != "Never":
        spec["failurePolicy"] = {"maxRestarts": job.restart_limit}
    return _kubernetes_object(job, instance, "jobset.x-k8s.io/v1alpha2", "JobSet", name, spec)
