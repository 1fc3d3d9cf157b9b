"""What a job becomes in a cluster: its worker pods, and the Service by which they find each other."""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from popengine.environment import NODE_RANK, NUM_NODES

from .spec import DEVICE, IMAGE, IPUS_PER_GPU, RESOURCES, SECURITY, Job

PORT = 29500  # every pod has an address of its own, so instances don't clash
JOB, INSTANCE, WORKER, ATTEMPT = "graphcore.ai/ipujob", "pando/instance", "pando/worker", "pando/attempt"
SPEC = "pando/spec"  # annotation of a pod: from what it was made
_MAX_CORES = 16  # that are asked for where the file doesn't say
_GRACE = 30  # seconds

Object = dict[str, Any]
Images = Sequence[tuple[str, str]]  # (pattern, image): the first that matches stands for the template's image


def pod(job: Job, number: int, attempt: int = 0, device: str = "cpu", images: Images = ()) -> Object:
    """Worker `number % workers` of instance `number // workers`, on its `attempt`-th restart."""
    instance, worker = divmod(number, job.shape.workers)
    name = f"{job.name}-worker-{number}"
    first = f"{job.name}-worker-{instance * job.shape.workers}.{job.name}"
    told = variables(job, instance, str(worker), first) | {"PANDO_RESTARTS": str(attempt)}
    made = template(job, told, device, images)
    labels = {INSTANCE: str(instance), WORKER: str(worker), ATTEMPT: str(attempt)}
    made["metadata"]["labels"] |= labels
    metadata = {**made["metadata"], "name": name, "namespace": job.namespace}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": made["spec"] | {"hostname": name},
    }


def variables(job: Job, instance: int, rank: str | Object, address: str) -> dict[str, Any]:
    """What a worker is told of its place; more than one worker's poprun is one of several."""
    told = {"IPUOF_VIPU_API_PARTITION_ID": f"p-{job.name}-{job.namespace}-{instance}"}
    if job.mode == "single":
        return told
    workers = str(job.shape.workers)
    return told | {NUM_NODES: workers, NODE_RANK: rank, "MASTER_ADDR": address, "MASTER_PORT": str(PORT)}


def template(job: Job, told: Mapping[str, Any], device: str = "cpu", images: Images = ()) -> Object:
    """The pod template of every worker, but for its name and number.

    Args:
        told: environment variables of the worker: text, or where a pod reads it
        device: cpu or cuda, if the job itself doesn't say
    """
    made = copy.deepcopy(job.template)
    metadata, spec = made.get("metadata") or {}, made["spec"]
    kept = {key: value for key, value in metadata.items() if key in ("labels", "annotations")}
    kept["labels"] = {**(metadata.get("labels") or {}), JOB: job.name}
    container = spec["containers"][0]
    container["image"] = image(job, images)
    container |= command(job)
    if not container.get("args", True):
        del container["args"]
    device = job.annotations.get(DEVICE, device)
    if device == "cuda":
        told = {**told, "POPTORCH_DEVICE": "cuda"}
    container["env"] = _environment(job, told)
    if job.annotations.get(SECURITY) == "drop":
        _drop_security(spec)
    if job.annotations.get(RESOURCES) == "drop":
        for each in spec["containers"] + (spec.get("initContainers") or []):
            each.pop("resources", None)
    _ask_for_devices(job, container, device)
    _share_memory(spec, container)
    spec |= {"restartPolicy": "Never"} | ({"subdomain": job.name} if job.has_service else {})
    if job.ttl is not None:
        spec["activeDeadlineSeconds"] = job.ttl
    spec.setdefault("terminationGracePeriodSeconds", _GRACE)
    return {"metadata": kept, "spec": spec}


def service(job: Job) -> Object:
    """The headless Service that gives every worker a host name, before it is ready, too."""
    metadata = {"name": job.name, "namespace": job.namespace, "labels": {JOB: job.name}}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB: job.name},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def owned(made: Object, owner: Object) -> Object:
    """As one that goes when its IPUJob goes, and knows from which fields it was made."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }
    annotations = {**(made["metadata"].get("annotations") or {}), SPEC: json.dumps(marks(owner))}
    return {
        **made,
        "metadata": {**made["metadata"], "annotations": annotations, "ownerReferences": [reference]},
    }


def marks(owner: Object) -> dict[str, str]:
    """A short mark of each field of the spec that may not change while the job lives."""
    fields = {key: value for key, value in owner["spec"].items() if key != "jobInstances"}
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
        for key, value in sorted(fields.items())
    }


def marks_of(pod: Object) -> dict[str, str]:
    """The marks of the spec that a pod was made from; empty, if somebody took them away."""
    try:
        found = json.loads((pod["metadata"].get("annotations") or {}).get(SPEC, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def image(job: Job, images: Images = ()) -> str:
    """The worker's image: the job's annotation, the first pattern that matches, or as the template says."""
    written = job.worker["image"]
    matching = (new for old, new in images if fnmatch.fnmatchcase(written, old))
    return job.annotations.get(IMAGE) or next(matching, written)


def image_note(job: Job, images: Images = ()) -> str | None:
    """A warning, where the worker would get Graphcore's own PopTorch."""
    chosen = image(job, images)
    if not chosen.startswith(("graphcore/", "docker.io/graphcore/")):
        return None
    return f"image {chosen} holds Graphcore's PopTorch, which looks for IPUs: name one with Pando by {IMAGE} or --image"


def command(job: Job) -> dict[str, list[str]]:
    """What a worker runs: `command` and `args`, where they are not the template's own."""
    own = job.worker
    if job.mode == "launched":
        return {"command": list(job.launch), "args": []}
    if job.ttl is not None and not own.get("command"):
        return {"command": ["sleep", str(job.ttl)], "args": []}
    if job.mode == "joined":
        shape = job.shape
        poprun = [
            "poprun",
            "--num-instances",
            str(shape.workers),
            "--num-replicas",
            str(shape.workers * shape.replicas),
        ]
        return {"command": [*poprun, "--ipus-per-replica", str(shape.ipus_per_replica), *own["command"]]}
    return {}


def _environment(job: Job, ours: Mapping[str, Any]) -> list[Object]:
    """Ours first, so that the file's own can refer to them and override them; of one name the last is kept."""
    listed = [
        {"name": name, **({"value": value} if isinstance(value, str) else {"valueFrom": value})}
        for name, value in ours.items()
    ]
    listed += [*(job.worker.get("env") or []), *job.launch_env]
    names = [variable["name"] for variable in listed]
    return [variable for index, variable in enumerate(listed) if variable["name"] not in names[index + 1 :]]


def _drop_security(spec: Object) -> None:
    """hostIPC and IPC_LOCK serve RDMA to IPUs; clusters often refuse both."""
    spec.pop("hostIPC", None)
    for container in spec["containers"] + (spec.get("initContainers") or []):
        context = container.get("securityContext") or {}
        capabilities = context.get("capabilities") or {}
        if "IPC_LOCK" in (capabilities.get("add") or []):
            capabilities["add"] = [name for name in capabilities["add"] if name != "IPC_LOCK"]
            if not capabilities["add"]:
                del capabilities["add"]
            if not capabilities:
                del context["capabilities"]
            if not context:
                del container["securityContext"]


def _ask_for_devices(job: Job, container: Object, device: str) -> None:
    resources = {
        kind: dict(names or {})
        for kind, names in (container.get("resources") or {}).items()
        if kind != "claims"
    }
    named = {name for names in resources.values() for name in names}
    ipus = job.shape.ipus_per_worker
    if device == "cuda":
        if not any(name.startswith("nvidia.com/") for name in named):
            gpus = -(-ipus // int(job.annotations.get(IPUS_PER_GPU, "1")))
            resources.setdefault("limits", {})["nvidia.com/gpu"] = str(gpus)
    elif "cpu" not in named:
        resources.setdefault("requests", {})["cpu"] = str(min(ipus, _MAX_CORES))
    container["resources"] = {**(container.get("resources") or {}), **resources}


def _share_memory(spec: Object, container: Object) -> None:
    """The 64 MB of a container's own /dev/shm break the workers of data loaders."""
    mounts = container.get("volumeMounts") or []
    if spec.get("hostIPC") or any(mount.get("mountPath", "").rstrip("/") == "/dev/shm" for mount in mounts):
        return
    container["volumeMounts"] = [*mounts, {"name": "pando-shm", "mountPath": "/dev/shm"}]
    spec["volumes"] = [*(spec.get("volumes") or []), {"name": "pando-shm", "emptyDir": {"medium": "Memory"}}]
