"""The objects of a job in a cluster: its worker pods and their Service; and functions that read a pod's status."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from popengine.environment import NODE_RANK, NUM_NODES

from .spec import Job

PORT = 29500  # every pod has its own address, so all instances can use the same port
JOB, INSTANCE, WORKER, ATTEMPT = "graphcore.ai/ipujob", "pando/instance", "pando/worker", "pando/attempt"
SPEC = "pando/spec"  # annotation of a pod: hashes of the fields that the pod was made from
_MAX_CORES = 16  # the most cores requested for a worker, if the template requests none
_GRACE = 30  # seconds
ENDED = ("Succeeded", "Failed")
_DISRUPTIONS = ("Evicted", "Preempting", "NodeLost", "Shutdown", "NodeShutdown", "Terminated", "NodeAffinity")
_DISRUPTIONS += ("UnexpectedAdmissionError",)

Object = dict[str, Any]


def pod(job: Job, number: int, attempt: int = 0) -> Object:
    """Return the pod of worker number % workers of instance number // workers, after `attempt` restarts."""
    instance, worker = divmod(number, job.shape.workers)
    name = f"{job.name}-worker-{number}"
    first = f"{job.name}-worker-{instance * job.shape.workers}.{job.name}"
    environment = variables(job, instance, str(worker), first) | {"PANDO_RESTARTS": str(attempt)}
    made = template(job, environment)
    made["metadata"]["labels"] |= {INSTANCE: str(instance), WORKER: str(worker), ATTEMPT: str(attempt)}
    metadata = {**made["metadata"], "name": name}
    spec = made["spec"] | {"hostname": name}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def variables(job: Job, instance: int, rank: str | Object, address: str) -> dict[str, Any]:
    """Return a worker's environment variables; they connect the workers, unless the job's mode is "single".

    Args:
        rank:    the worker's number, or a `valueFrom` that reads it from the pod
        address: the host name of the instance's first worker
    """
    partition = {"IPUOF_VIPU_API_PARTITION_ID": f"p-{job.name}-{job.namespace}-{instance}"}
    if job.mode == "single":
        return partition
    workers = str(job.shape.workers)
    return partition | {NUM_NODES: workers, NODE_RANK: rank, "MASTER_ADDR": address, "MASTER_PORT": str(PORT)}


def template(job: Job, environment: Mapping[str, Any]) -> Object:
    """Return the pod template of all workers, without a worker's name and number.

    Args: environment: the worker's variables; each value is a text or a `valueFrom` object
    """
    made = copy.deepcopy(job.template)
    metadata, spec = made.get("metadata") or {}, made["spec"]
    kept = {key: value for key, value in metadata.items() if key in ("labels", "annotations")}
    kept["labels"] = {**(metadata.get("labels") or {}), JOB: job.name}
    container = spec["containers"][0]
    container["image"] = job.image
    container |= command(job)
    if not container.get("args", True):
        del container["args"]
    if job.device == "cuda":
        environment = {**environment, "POPTORCH_DEVICE": "cuda"}
    container["env"] = _environment(job, environment)
    if "security" in job.drops:
        _drop_security(spec)
    if "resources" in job.drops:
        for each in spec["containers"] + (spec.get("initContainers") or []):
            each.pop("resources", None)
    _request_devices(job, container)
    _mount_shared_memory(spec, container)
    spec |= {"restartPolicy": "Never"} | ({"subdomain": job.name} if job.has_service else {})
    if job.ttl is not None:
        spec["activeDeadlineSeconds"] = job.ttl
    spec.setdefault("terminationGracePeriodSeconds", _GRACE)
    return {"metadata": kept, "spec": spec}


def service(job: Job) -> Object:
    """Return the headless Service that gives each worker a host name, also before the worker is ready."""
    metadata = {"name": job.name, "labels": {JOB: job.name}}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB: job.name},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def owned(made: Object, owner: Object) -> Object:
    """Return an object with its IPUJob's namespace, an owner reference to it, and the spec's hashes."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }
    annotations = {**(made["metadata"].get("annotations") or {}), SPEC: json.dumps(field_hashes(owner))}
    namespace = owner["metadata"].get("namespace", "default")
    added = {"namespace": namespace, "annotations": annotations, "ownerReferences": [reference]}
    return {**made, "metadata": {**made["metadata"], **added}}


def field_hashes(owner: Object) -> dict[str, str]:
    """Return, by name, a hash of each field of an IPUJob's spec that must not change while the job runs."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
        for key, value in sorted(owner["spec"].items())
        if key != "jobInstances"
    }


def command(job: Job) -> dict[str, list[str]]:
    """Return the fields `command` and `args` of a worker, where they differ from the template's."""
    own = job.worker
    if job.mode == "launched":
        return {"command": list(job.launch), "args": []}
    if job.ttl is not None and not own.get("command"):
        return {"command": ["sleep", str(job.ttl)], "args": []}
    if job.mode == "joined":
        shape = job.shape
        poprun = f"poprun --num-instances {shape.workers} --num-replicas {shape.workers * shape.replicas}"
        poprun += f" --ipus-per-replica {shape.ipus_per_replica}"
        return {"command": [*poprun.split(), *own["command"]]}
    return {}


def _environment(job: Job, added: Mapping[str, Any]) -> list[Object]:
    """Return a container's variables: `added`, then the file's, which can refer to these or override them."""
    listed: list[Object] = [
        {"name": name, "value" if isinstance(value, str) else "valueFrom": value}
        for name, value in added.items()
    ]
    listed += [*(job.worker.get("env") or []), *job.launch_env]
    last = {variable["name"]: index for index, variable in enumerate(listed)}
    return [listed[index] for index in sorted(last.values())]


def _drop_security(spec: Object) -> None:
    """Remove hostIPC and IPC_LOCK, which serve RDMA to IPUs, and which clusters often refuse."""
    spec.pop("hostIPC", None)
    for container in spec["containers"] + (spec.get("initContainers") or []):
        capabilities = (container.get("securityContext") or {}).get("capabilities") or {}
        if capabilities.get("add"):
            capabilities["add"] = [name for name in capabilities["add"] if name != "IPC_LOCK"]


def _request_devices(job: Job, container: Object) -> None:
    """Add requests for cores or GPUs, by the worker's number of ipus, if the template requests none."""
    given = container.get("resources") or {}
    resources = {kind: dict(given[kind] or {}) for kind in ("limits", "requests") if kind in given}
    named = {name for names in resources.values() for name in names}
    ipus = job.shape.ipus_per_worker
    if job.device == "cuda":
        if not any(name.startswith("nvidia.com/") for name in named):
            gpus = -(-ipus // job.ipus_per_gpu)
            resources.setdefault("limits", {})["nvidia.com/gpu"] = str(gpus)
    elif "cpu" not in named:
        resources.setdefault("requests", {})["cpu"] = str(min(ipus, _MAX_CORES))
    container["resources"] = {**given, **resources}


def _mount_shared_memory(spec: Object, container: Object) -> None:
    """Mount memory at /dev/shm, unless the template does: the default, 64 MB, is too small for loaders."""
    mounts = container.get("volumeMounts") or []
    if spec.get("hostIPC") or any(mount.get("mountPath", "").rstrip("/") == "/dev/shm" for mount in mounts):
        return
    container["volumeMounts"] = [*mounts, {"name": "pando-shm", "mountPath": "/dev/shm"}]
    spec["volumes"] = [*(spec.get("volumes") or []), {"name": "pando-shm", "emptyDir": {"medium": "Memory"}}]


# ---- the status of a pod ------------------------------------------------------------------------------------------


def phase(pod: Object) -> str:
    """Return a pod's phase, which is Pending before the cluster has set one."""
    return pod.get("status", {}).get("phase") or "Pending"


def is_terminating(pod: Object) -> bool:
    """Return whether a pod was deleted and waits for its containers to stop."""
    return pod["metadata"].get("deletionTimestamp") is not None


def exit_code(pod: Object) -> int | None:
    """Return the exit code of the pod's worker; None, if the worker has not ended."""
    return _ended(pod).get("exitCode")


def describe_end(pod: Object) -> str:
    """Return a text for messages about how a pod ended, such as "exited with 1"."""
    code, status = exit_code(pod), pod.get("status", {})
    reason = status.get("reason") or _ended(pod).get("reason")
    if code is None or status.get("reason"):
        return ", ".join(filter(None, (f"failed: {reason or 'no reason given'}", status.get("message"))))
    return f"exited with {code}" + (f" ({reason})" if reason not in (None, "Error", "Completed") else "")


def why_pending(pods: Sequence[Object]) -> str:
    """Return the cluster's first reason why pods don't run yet; a default text, if it gives none."""
    for pod in pods:
        for condition in pod.get("status", {}).get("conditions") or []:
            is_held = condition["type"] == "PodScheduled" and condition["status"] != "True"
            if is_held and condition.get("message"):
                return condition["message"]
    for pod in pods:
        for container in _containers(pod):
            held = container.get("state", {}).get("waiting") or {}
            if held.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return ": ".join(filter(None, (held["reason"], held.get("message"))))
    return "its pods have not begun"


def int_label(pod: Object, name: str) -> int:
    """Return the number in a pod's label; -1, if the label is missing or no number."""
    text = pod["metadata"].get("labels", {}).get(name, "")
    return int(text) if text.isdecimal() else -1


def _containers(pod: Object) -> list[Object]:
    return pod.get("status", {}).get("containerStatuses") or []


def _ended(pod: Object) -> Object:
    """Return the `terminated` state of the first container, which runs the program; empty before its end."""
    name = pod["spec"]["containers"][0]["name"]
    worker = next((each for each in _containers(pod) if each.get("name") == name), {})
    return worker.get("state", {}).get("terminated") or {}


def first_failed(pods: Sequence[Object]) -> Object | None:
    """Return the pod that failed first (at the same time: the lowest worker); None, if no pod has failed."""
    failed = [pod for pod in pods if phase(pod) == "Failed"]

    def when(pod: Object) -> tuple[str, int]:
        return _ended(pod).get("finishedAt") or "9999", int_label(pod, WORKER)

    return min(failed, key=when, default=None)


def was_disrupted(pod: Object) -> bool:
    """Return whether the cluster ended a pod (by eviction, for example), and not the program in it."""
    status = pod["status"]
    disrupted = any(
        condition["type"] == "DisruptionTarget" and condition["status"] == "True"
        for condition in status.get("conditions") or []
    )
    reason = status.get("reason") or ""
    # OutOfcpu, OutOfmemory, ...: the node was full when the pod arrived.
    return disrupted or reason in _DISRUPTIONS or reason.startswith("OutOf")
