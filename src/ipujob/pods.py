"""The objects of a job in a cluster (worker pods, their Service), and functions that read a pod's status."""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from popengine.environment import NODE_RANK, NUM_NODES

from .rules import Job

PORT = 29500  # every pod has its own address, so all instances can use the same port
JOB, INSTANCE, WORKER, ATTEMPT = "graphcore.ai/ipujob", "pando/instance", "pando/worker", "pando/attempt"
SPEC = "pando/spec"  # annotation of a pod: hashes of the fields that the pod was made from
_MAX_CORES = 16  # the most cores requested for a worker, if the template requests none
_GRACE = 30  # seconds from SIGTERM to SIGKILL, if the template sets none
_SHM = "/dev/shm"
ENDED = ("Succeeded", "Failed")
_DISRUPTIONS = ("Evicted", "Preempting", "NodeLost", "Shutdown", "NodeShutdown", "Terminated", "NodeAffinity")
_REFUSALS_BY_NODE = ("UnexpectedAdmissionError", "OutOf")  # OutOfcpu, OutOfmemory, ...: the node is full

Object = dict[str, Any]


def worker_pod(job: Job, number: int, attempt: int = 0) -> Object:
    """Return the pod of worker number % workers of instance number // workers, after `attempt` restarts."""
    instance, worker = divmod(number, job.workers)
    name = f"{job.name}-worker-{number}"
    variables = {NODE_RANK: str(worker), "MASTER_ADDR": job.host(instance), "PANDO_RESTARTS": str(attempt)}
    pod = pod_template(job, instance, variables)
    pod["metadata"]["name"] = pod["spec"]["hostname"] = name
    pod["metadata"]["labels"] |= {WORKER: str(worker), ATTEMPT: str(attempt)}
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def pod_template(job: Job, instance: int, variables: Mapping[str, str | Object]) -> Object:
    """Return metadata and spec of the pods of an instance, without the pods' names and worker labels. The values
    of `variables` (POPRUN_NODE_RANK, MASTER_ADDR, PANDO_RESTARTS) are texts or `valueFrom` objects."""
    template = copy.deepcopy(job.template)
    metadata, spec = template.get("metadata", {}), template["spec"]
    kept = {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
    kept["labels"] = {**kept.get("labels", {}), JOB: job.name, INSTANCE: str(instance)}
    container, containers = spec["containers"][0], spec["containers"] + spec.get("initContainers", [])
    container |= {"image": job.image, **_command_fields(job)}
    if not container.get("args", True):
        del container["args"]
    container["env"] = _environment(job, instance, variables)
    if "security" in job.dropped:  # hostIPC and IPC_LOCK serve RDMA to IPUs, and clusters often refuse them
        spec.pop("hostIPC", None)
    for any_container in containers:
        if "resources" in job.dropped:
            any_container.pop("resources", None)
        capabilities = any_container.get("securityContext", {}).get("capabilities", {})
        if "security" in job.dropped and "add" in capabilities:
            capabilities["add"] = [name for name in capabilities["add"] if name != "IPC_LOCK"]
    container["resources"] = _resources(job, container.get("resources", {}))
    mounts = container.get("volumeMounts", [])
    # Memory at /dev/shm, unless the template mounts it: the default, 64 MB, is too small for data loaders.
    if not (spec.get("hostIPC") or any(mount.get("mountPath", "").rstrip("/") == _SHM for mount in mounts)):
        container["volumeMounts"] = [*mounts, {"name": "pando-shm", "mountPath": _SHM}]
        volume = {"name": "pando-shm", "emptyDir": {"medium": "Memory"}}
        spec["volumes"] = [*spec.get("volumes", []), volume]
    spec |= {"restartPolicy": "Never"} | ({"subdomain": job.name} if job.has_service else {})
    if job.ttl is not None:
        spec["activeDeadlineSeconds"] = job.ttl
    spec.setdefault("terminationGracePeriodSeconds", _GRACE)
    return {"metadata": kept, "spec": spec}


def _command_fields(job: Job) -> dict[str, list[str]]:
    """Return the fields `command` and `args` that replace the template's; {} if the template's stay."""
    if job.mode == "launched":
        return {"command": list(job.launcher_command), "args": []}
    if job.ttl is not None and not job.container.get("command"):
        return {"command": ["sleep", str(job.ttl)], "args": []}
    if job.mode == "joined":
        poprun = f"poprun --num-instances {job.workers} --num-replicas {job.workers * job.replicas}"
        poprun += f" --ipus-per-replica {job.ipus_per_replica}"
        return {"command": [*poprun.split(), *job.container["command"]]}
    return {}


def _environment(job: Job, instance: int, variables: Mapping[str, str | Object]) -> list[Object]:
    """Return the variables of an instance's workers; those of the file can refer to Pando's, or replace them."""
    partition = f"p-{job.name}-{job.namespace}-{instance}"
    added = {"IPUOF_VIPU_API_PARTITION_ID": partition, **variables}
    if job.mode == "single":  # the worker connects to no other
        del added[NODE_RANK], added["MASTER_ADDR"]
    else:
        added |= {NUM_NODES: str(job.workers), "MASTER_PORT": str(PORT)}
    if job.device == "cuda":
        added["POPTORCH_DEVICE"] = "cuda"
    listed: list[Object] = [
        {"name": name, "value" if isinstance(value, str) else "valueFrom": value}
        for name, value in added.items()
    ]
    listed += [*job.container.get("env", []), *job.launcher_env]
    last = {variable["name"]: index for index, variable in enumerate(listed)}
    return [listed[index] for index in sorted(last.values())]


def _resources(job: Job, given: Object) -> Object:
    """Return a worker's resources: `given`, with cores or GPUs for its ipus unless `given` names some."""
    ipus = job.ipus // job.workers
    section, name, amount = "requests", "cpu", min(ipus, _MAX_CORES)
    requested = {*given.get("limits", {}), *given.get("requests", {})}
    is_requested = name in requested
    if job.device == "cuda":
        section, name, amount = "limits", "nvidia.com/gpu", -(-ipus // job.ipus_per_gpu)
        is_requested = any(str(resource).startswith("nvidia.com/") for resource in requested)
    return given if is_requested else {**given, section: {**given.get(section, {}), name: str(amount)}}


def headless_service(job: Job) -> Object:
    """Return the headless Service that gives each worker a host name, also before the worker is ready."""
    label = {JOB: job.name}
    ports = [{"name": "rendezvous", "port": PORT}]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": label, "ports": ports}
    metadata = {"name": job.name, "labels": label}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def with_owner(new: Object, owner: Object) -> Object:
    """Return a copy of an object that belongs to the IPUJob `owner`, with the hashes of the owner's spec."""
    mine = owner["metadata"]
    kinds = {key: owner[key] for key in ("apiVersion", "kind")}
    names = {key: mine[key] for key in ("name", "uid")}
    added = {
        "namespace": mine.get("namespace", "default"),
        "annotations": {**new["metadata"].get("annotations", {}), SPEC: json.dumps(field_hashes(owner))},
        "ownerReferences": [{**kinds, **names, "controller": True, "blockOwnerDeletion": False}],
    }
    return {**new, "metadata": new["metadata"] | added}


def field_hashes(owner: Object) -> dict[str, str]:
    """Return by name the hashes of those fields of an IPUJob's spec that must not change after its start."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
        for key, value in sorted(owner["spec"].items())
        if key != "jobInstances"
    }


# ---- the status of a pod ------------------------------------------------------------------------------------------


def phase(pod: Object) -> str:
    """Return a pod's phase, which is Pending before the cluster has set one."""
    return pod.get("status", {}).get("phase") or "Pending"


def is_terminating(pod: Object) -> bool:
    """Return whether a pod was deleted and waits for its containers to stop."""
    return pod["metadata"].get("deletionTimestamp") is not None


def int_label(pod: Object, name: str) -> int:
    """Return the number in a pod's label; -1, if the label is missing or no number."""
    text = pod["metadata"].get("labels", {}).get(name, "")
    return int(text) if text.isdecimal() else -1


def exit_code(pod: Object) -> int | None:
    """Return the exit code of a pod's worker; None, if the worker has not ended."""
    return _terminated_state(pod).get("exitCode")


def describe_end(pod: Object) -> str:
    """Return how a pod ended, in words such as "exited with 1" or "failed: Evicted"."""
    code, status = exit_code(pod), pod.get("status", {})
    reason = status.get("reason") or _terminated_state(pod).get("reason")
    if code is None or status.get("reason"):
        return ", ".join(filter(None, (f"failed: {reason or 'no reason given'}", status.get("message"))))
    return f"exited with {code}" + (f" ({reason})" if reason not in (None, "Error", "Completed") else "")


def pending_reason(pods: Sequence[Object]) -> str:
    """Return the cluster's first reason why a pod doesn't run yet; if it gives none, a default text."""
    unscheduled = (_condition(pod, "PodScheduled") for pod in pods)
    reasons = [item["message"] for item in unscheduled if item["status"] != "True" and item.get("message")]
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses") or []:
            held = container.get("state", {}).get("waiting") or {}
            if held.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                reasons.append(": ".join(filter(None, (held["reason"], held.get("message")))))
    return reasons[0] if reasons else "its pods have not begun"


def failed_pods(job: Job, pods: Sequence[Object]) -> list[Object]:
    """Return the pods that have failed, the first failure first (at the same time: the lowest worker). The time limit
    of an interactive job is no failure."""
    failed = [pod for pod in pods if phase(pod) == "Failed"]
    if job.ttl is not None:
        failed = [pod for pod in failed if pod["status"].get("reason") != "DeadlineExceeded"]
    failed.sort(key=lambda pod: int_label(pod, WORKER))
    return sorted(failed, key=lambda pod: _terminated_state(pod).get("finishedAt") or "9999")


def was_disrupted(pod: Object) -> bool:
    """Return whether the cluster ended a pod (by eviction, for example), and not its program."""
    reason = pod["status"].get("reason") or ""
    by_reason = reason in _DISRUPTIONS or reason.startswith(_REFUSALS_BY_NODE)
    return by_reason or _condition(pod, "DisruptionTarget")["status"] == "True"


def _terminated_state(pod: Object) -> Object:
    """Return the `terminated` state of a pod's first container, which runs the program; {} before its end."""
    name = pod["spec"]["containers"][0]["name"]
    containers = pod.get("status", {}).get("containerStatuses") or []
    worker = next((container for container in containers if container.get("name") == name), {})
    return worker.get("state", {}).get("terminated") or {}


def _condition(pod: Object, kind: str) -> Object:
    """Return the condition of type `kind` of a pod; {"status": ""}, if the cluster has not set it."""
    conditions = pod.get("status", {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {"status": ""})
