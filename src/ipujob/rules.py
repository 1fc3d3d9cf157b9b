"""The rules of an IPUJob: the CRD's schema, and the rules between fields. `parse` returns a job, or all faults."""

from __future__ import annotations

import copy
import difflib
import fnmatch
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import takewhile
from typing import Any

import yaml

from .spec import MAX_HOST, Fault, Images, Job, Place, Restarts, Shape, count

_API = "graphcore.ai/v1alpha1"
_MAX_NAME = 50  # characters; pods are called NAME-worker-K
_IMAGE, TTL = "pando/image", "pando/ttl-seconds-after-finished"
_KEEP = {"type": "string", "enum": ["keep", "drop"]}
_ANNOTATIONS = {
    "pando/device": {"type": "string", "enum": ["cpu", "cuda"]},
    "pando/ipus-per-gpu": {"type": "string", "pattern": "^[1-9][0-9]{0,3}$"},
    "pando/resources": _KEEP,
    "pando/security": _KEEP,
    _IMAGE: {"type": "string", "pattern": r"^\S+$"},
    TTL: {"type": "string", "pattern": "^[0-9]{1,9}$"},
}
_MPI_LAUNCHERS = ("mpirun", "mpiexec", "horovodrun")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_POD = ("spec", "workers", "template", "spec")
_NO_TEMPLATE = {"spec": {"containers": [{"image": "", "command": ["true"]}]}}


def parse(
    value: Mapping[str, Any], device: str = "cpu", images: Images | None = ()
) -> tuple[Job | None, list[Fault]]:
    """Return (job, []) for a valid IPUJob object, else (None, all its faults).

    Args:
        device: cpu or cuda, if no annotation names a device
        images: replacements of the template's image; None, if no image is used
    """
    if value.get("kind") != "IPUJob":
        return None, [Fault(("kind",), f"kind {value.get('kind')} isn't an IPUJob", "kind: IPUJob")]
    faults = list(_check_value(value, _schema(), ()))
    metadata = value.get("metadata")
    if isinstance(metadata, dict) and not (metadata.get("name") or metadata.get("generateName")):
        fix = "give it metadata.name, or metadata.generateName"
        faults.append(Fault(("metadata",), "the job has no name", fix))
    # Faulty parts are removed, so that the rules between fields can be checked, too.
    value = _without(value, [fault.place for fault in faults])
    metadata, spec = value.get("metadata") or {}, value.get("spec") or {}
    job = _job(metadata, spec, device, images)
    faults += _check_job(job, metadata, spec)
    return (None, faults) if faults else (job, [])


def _without(value: Mapping[str, Any], places: Sequence[Place]) -> Mapping[str, Any]:
    """Return an object without the parts at these paths; if a path enters a list, without the whole list."""
    value = copy.deepcopy(dict(value)) if places else value
    for place in filter(None, places):
        *above, last = takewhile(lambda key: isinstance(key, str), place)
        parent: Any = value
        for key in above:
            parent = parent.get(key, {})
        parent.pop(last, None)
    return value


def _job(metadata: Mapping[str, Any], spec: Mapping[str, Any], device: str, images: Images | None) -> Job:
    """Return a `Job` from metadata and spec without their invalid fields; missing fields get defaults."""
    of_workers, policy = spec.get("workers") or {}, spec.get("restartPolicy") or {}
    launcher, template = spec.get("launcher") or {}, of_workers.get("template") or {}
    workers = int(of_workers.get("replicas") or spec.get("workersPerJobInstance") or 1)
    replicas = int(spec.get("modelReplicasPerWorker") or 1)
    ipus = int(spec.get("ipusPerJobInstance", workers * replicas))
    limit = policy.get("backOffLimit")
    if not (template.get("spec") or {}).get("containers"):
        template = _NO_TEMPLATE
    written = template["spec"]["containers"][0]["image"]
    matching = (new for old, new in images or () if fnmatch.fnmatchcase(written, old))
    annotations = metadata.get("annotations") or {}
    return Job(
        name=metadata.get("name") or metadata.get("generateName") or "job",
        namespace=metadata.get("namespace") or "default",
        shape=Shape(spec.get("jobInstances", 1), workers, replicas, ipus),
        template=template,
        image="" if images is None else annotations.get(_IMAGE) or next(matching, written),
        device=annotations.get("pando/device") or device,
        ipus_per_gpu=int(annotations.get("pando/ipus-per-gpu") or 1),
        drops=tuple(word for word in ("resources", "security") if annotations.get(f"pando/{word}") == "drop"),
        mode="launched" if launcher else "joined" if workers > 1 else "single",
        launch=tuple(launcher.get("command") or ()),
        launch_env=tuple(launcher.get("env") or ()),
        restarts=Restarts(
            policy.get("type", "Never"), 3 if limit is None else limit, policy.get("exitCodes") or ""
        ),
        clean=spec.get("cleanPodPolicy") or "None",
        ttl=(spec.get("interactive") or {}).get("ttl"),
        seconds_kept=None if annotations.get(TTL) is None else int(annotations[TTL]),
    )


def _check_job(job: Job, metadata: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each broken rule between fields, and for each unknown annotation of Pando."""
    for key in metadata.get("annotations") or {}:
        if str(key).startswith("pando/") and key not in _ANNOTATIONS:
            place = ("metadata", "annotations", key)
            yield Fault(place, f"annotation {key} is unknown", f"one of {', '.join(_ANNOTATIONS)}")
    yield from _check_name(job, "name" if metadata.get("name") else "generateName")
    shape, other = job.shape, spec.get("workersPerJobInstance")
    if other and shape.workers != int(other):
        message = f"workers.replicas {shape.workers} and workersPerJobInstance {other} differ"
        yield Fault(("spec", "workers", "replicas"), message, "keep one of them")
    elif shape.ipus % (shape.workers * shape.replicas):
        over = f"{count(shape.workers, 'worker')} with {count(shape.replicas, 'replica')} each"
        message = f"ipusPerJobInstance {shape.ipus} can't be shared out over {over}"
        fix = f"a multiple of {shape.workers * shape.replicas}"
        yield Fault(("spec", "ipusPerJobInstance"), message, fix)
    if job.restarts.policy == "ExitCode" and not job.restarts.codes:
        fix = "exitCodes: 1,3-5 names those that mean restart"
        yield Fault(("spec", "restartPolicy"), "restartPolicy ExitCode needs exitCodes", fix)
    if job.ttl is not None and job.restarts.policy != "Never":
        yield Fault(("spec", "interactive"), "an interactive job isn't restarted", "take restartPolicy out")
    if job.launch and job.launch[0].rpartition("/")[2] in _MPI_LAUNCHERS:
        message = "there is no MPI here: write poprun --num-instances N --num-replicas R ..."
        fix = f"poprun in place of {job.launch[0]}: every worker runs it, and it starts its worker's share"
        yield Fault(("spec", "launcher", "command", 0), message, fix)
    if job.mode == "joined" and not job.worker.get("command") and job.ttl is None:
        message = "several workers need a command in their template: an image's own can't be put under poprun"
        yield Fault((*_POD, "containers", 0), message, "write the container's command")


def _check_name(job: Job, named: str) -> Iterator[Fault]:
    place = ("metadata", named)
    suffix = "bcdfg" if named == "generateName" else ""  # an API server adds five letters
    name = job.name + suffix
    said = f'name "{job.name}"' + (" with five letters added" if suffix else "")
    last = f"{name}-worker-{max(job.shape.instances * job.shape.workers - 1, 0)}"
    if len(name) > _MAX_NAME or len(last) > MAX_HOST:
        message = f"{said} has {len(name)} characters: pods are called NAME-worker-0, and a host name holds {MAX_HOST}"
        yield Fault(place, message, f"at most {_MAX_NAME} characters")
    elif not _LABEL.fullmatch(name):
        fix = "small letters, digits and dashes, no dash at the ends"
        yield Fault(place, f"{said} can't be a host's", fix)
    elif job.has_service and not name[0].isalpha():
        yield Fault(place, f"{said} must begin with a letter: a Service bears it", "begin with a letter")


def warnings_of(job: Job, value: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """Yield the path and text of a warning for each field that has another meaning or no effect here."""
    spec, ipus = value["spec"], job.shape.ipus
    if ipus & (ipus - 1) or ipus > 64:
        message = f"{ipus} ipus are no power of two up to 64: IPUs would not run this"
        yield ("spec", "ipusPerJobInstance"), message
    policy = job.template["spec"].get("restartPolicy", "Never")
    if policy != "Never":
        message = f"the template's restartPolicy {policy} is not used: the job's own is {job.restarts.policy}"
        yield (*_POD, "restartPolicy"), message
    if spec["workers"].get("strategy"):
        yield ("spec", "workers", "strategy"), "workers.strategy has no effect: pods of a job don't change"
    if job.restarts.codes and job.restarts.policy != "ExitCode":
        message = f"exitCodes have no effect with restartPolicy {job.restarts.policy}"
        yield ("spec", "restartPolicy", "exitCodes"), message
    if job.image.startswith(("graphcore/", "docker.io/graphcore/")):
        fix = f"name one with Pando by {_IMAGE} or --image"
        message = f"image {job.image} holds Graphcore's PopTorch, which looks for IPUs: {fix}"
        yield (*_POD, "containers", 0, "image"), message


# ---- the schema ----------------------------------------------------------------------------------------------------

_TYPES = {"object": Mapping, "array": list, "string": str, "integer": int}
_INT32 = 2**31 - 1
_OPEN = "x-kubernetes-preserve-unknown-fields"
_RENAMED = {"modelReplicas": "modelReplicasPerWorker", "ipusPerModelReplica": "ipusPerJobInstance"}


@cache
def crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of IPUJobs."""
    return yaml.safe_load(resources.files("ipujob").joinpath("crd.yaml").read_text())


@cache
def _schema() -> dict[str, Any]:
    """Return the schema of a whole IPUJob: the CRD's `spec`, and the fields of every Kubernetes object."""
    text = {"type": "string"}
    words = {"type": "object", "additionalProperties": text}
    names = {"name": text, "generateName": text, "namespace": text}
    metadata = {**names, "labels": words, "annotations": {**words, "properties": _ANNOTATIONS}}
    properties = {
        "apiVersion": {**text, "enum": [_API]},
        "kind": text,
        "metadata": {"type": "object", _OPEN: True, "properties": metadata},
        "spec": crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"],
        "status": {"type": "object", _OPEN: True},
    }
    return {"type": "object", "required": ["apiVersion", "metadata", "spec"], "properties": properties}


def _check_value(value: Any, schema: dict[str, Any], place: Place) -> Iterator[Fault]:
    """Yield a fault for each part of a value that an API server would refuse or drop."""
    name, shown = _path(place), reprlib.repr(value)
    if schema.get("x-kubernetes-int-or-string"):
        if not re.search(schema["pattern"], str(value)):
            message = f"{name} must be a whole number that matches {schema['pattern']}, and is {shown}"
            yield Fault(place, message)
        return
    kind = schema["type"]
    least, most = schema.get("minimum", 0), schema.get("maximum", _INT32)
    if not isinstance(value, _TYPES[kind]) or isinstance(value, bool):
        fix = "write it in quotes" if kind == "string" and isinstance(value, (int, float)) else ""
        yield Fault(place, f"{name} must be of type {kind}, and is {shown}", fix)
    elif "enum" in schema and value not in schema["enum"]:
        message = f"{name} {shown} is none of {', '.join(schema['enum'])}"
        yield Fault(place, message, _near(value, schema["enum"]))
    elif "pattern" in schema and not re.search(schema["pattern"], value):
        yield Fault(place, f"{name} {shown} doesn't match {schema['pattern']}")
    elif kind == "integer" and not least <= value <= most:
        yield Fault(place, f"{name} is {value}, and must be within {least} to {most}")
    elif not value and (schema.get("minItems") or schema.get("minLength")):
        yield Fault(place, f"{name} must not be empty")
    elif kind == "array":
        for index, item in enumerate(value):
            yield from _check_value(item, schema["items"], (*place, index))
    elif kind == "object":
        yield from _check_object(value, schema, place)


def _check_object(value: Mapping[str, Any], schema: dict[str, Any], place: Place) -> Iterator[Fault]:
    known = schema.get("properties", {})
    for key in schema.get("required", ()):
        if value.get(key) is None:
            yield Fault(place, f"{_path((*place, key))} is missing")
    for key, item in value.items():
        if key in known:
            if item is not None:
                yield from _check_value(item, known[key], (*place, key))
        elif "additionalProperties" in schema:
            yield from _check_value(item, schema["additionalProperties"], (*place, str(key)))
        elif not schema.get(_OPEN):
            message = f"{_path((*place, str(key)))} is no field of an IPUJob"
            fix = f"use {', '.join(_RENAMED.values())}" if key in _RENAMED else _near(str(key), known)
            yield Fault((*place, str(key)), message, fix or "take it out: a cluster would leave it away")


def _near(word: str, known: Any) -> str:
    """Return a fix that names the most similar known word; "", if none is similar."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"write {near[0]}" if near else ""


def _path(place: Place) -> str:
    """Return the text of a path for messages, such as "spec.workers.template.spec.containers[0]"."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")
