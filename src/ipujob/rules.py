"""The rules of an IPUJob: the CRD's schema, and the rules between fields. `parse` returns a job, or all faults."""

from __future__ import annotations

import copy
import difflib
import itertools
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from .spec import ANNOTATIONS, API, MAX_HOST, MAX_NAME, Fault, Job, Place, Restarts, Shape, count

_MPI_LAUNCHERS = ("mpirun", "mpiexec", "horovodrun")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def parse(value: Mapping[str, Any]) -> tuple[Job | None, list[Fault]]:
    """Return the job of an IPUJob object; or None, and everything that is wrong with the object."""
    if value.get("kind") != "IPUJob":
        return None, [Fault(("kind",), f"kind {value.get('kind')} isn't an IPUJob", "kind: IPUJob")]
    faults = [*_check_head(value), *check_schema(dict(value))]
    if faults:
        value = _without_faults(value, faults)
    metadata, spec = value["metadata"], value["spec"]
    annotations = metadata.get("annotations") or {}
    policy = spec.get("restartPolicy") or {"type": "Never"}
    launcher = spec.get("launcher") or {}
    workers = int(spec["workers"].get("replicas") or spec.get("workersPerJobInstance") or 1)
    replicas = int(spec.get("modelReplicasPerWorker") or 1)
    limit = 3 if policy.get("backOffLimit") is None else policy["backOffLimit"]
    job = Job(
        name=metadata.get("name") or metadata["generateName"],
        namespace=metadata.get("namespace") or "default",
        shape=Shape(spec["jobInstances"], workers, replicas, int(spec["ipusPerJobInstance"])),
        template=spec["workers"]["template"],
        mode="launched" if launcher else "joined" if workers > 1 else "single",
        launch=tuple(launcher.get("command", ())),
        launch_env=tuple(launcher.get("env") or ()),
        restarts=Restarts(policy["type"], int(limit), policy.get("exitCodes") or ""),
        clean=spec.get("cleanPodPolicy") or "None",
        ttl=(spec.get("interactive") or {}).get("ttl"),
        annotations=annotations,
    )
    faults += _check_job(job, spec, "name" if metadata.get("name") else "generateName")
    return (None, faults) if faults else (job, [])


def _without_faults(value: Mapping[str, Any], faults: list[Fault]) -> dict[str, Any]:
    """Return an object with defaults in place of wrong fields, so that the rules between fields can be checked too."""
    value = copy.deepcopy(dict(value))
    for fault in faults:
        names = list(itertools.takewhile(lambda key: isinstance(key, str), fault.place))
        parent: Any = value
        for key in names[:-1]:
            parent = parent.get(key) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop(names[-1], None)
    metadata, spec = value.setdefault("metadata", {"name": "job"}), value.setdefault("spec", {})
    if not (metadata.get("name") or metadata.get("generateName")):
        metadata["name"] = "job"
    spec.setdefault("jobInstances", 1)
    template = spec.setdefault("workers", {}).setdefault("template", {}).setdefault("spec", {})
    template.setdefault("containers", [{"command": ["true"]}])
    if "type" not in (spec.get("restartPolicy") or {}):
        spec.pop("restartPolicy", None)
    if "command" not in (spec.get("launcher") or {}):
        spec.pop("launcher", None)
    workers = int(spec["workers"].get("replicas") or spec.get("workersPerJobInstance") or 1)
    spec.setdefault("ipusPerJobInstance", workers * int(spec.get("modelReplicasPerWorker") or 1))
    return value


def _check_head(value: Mapping[str, Any]) -> Iterator[Fault]:
    """Check the fields above the spec: apiVersion and metadata."""
    if value.get("apiVersion") != API:
        yield Fault(("apiVersion",), f"apiVersion {value.get('apiVersion')} is unknown", f"apiVersion: {API}")
    metadata = value.get("metadata")
    if not isinstance(metadata, dict) or not (metadata.get("name") or metadata.get("generateName")):
        yield Fault(("metadata",), "the job has no name", "give it metadata.name, or metadata.generateName")
        return
    for key in ("name", "generateName", "namespace"):
        if not isinstance(metadata.get(key, ""), str):
            yield Fault(("metadata", key), f"metadata.{key} must be of type string", "write it in quotes")
    for key in ("labels", "annotations"):
        words = metadata.get(key) or {}
        if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
            yield Fault(
                ("metadata", key), f"all values of metadata.{key} must be strings", "write them in quotes"
            )
        elif key == "annotations":
            yield from _check_annotations(words)


def _check_annotations(words: Mapping[str, str]) -> Iterator[Fault]:
    for key, word in words.items():
        place = ("metadata", "annotations", key)
        if not key.startswith("pando/"):
            continue
        if key not in ANNOTATIONS:
            yield Fault(place, f"annotation {key} is unknown", f"one of {', '.join(ANNOTATIONS)}")
        elif not re.fullmatch(ANNOTATIONS[key][0], word):
            yield Fault(place, f"annotation {key} must be {ANNOTATIONS[key][1]}, and is {word!r}")


def _check_job(job: Job, spec: Mapping[str, Any], named: str) -> Iterator[Fault]:
    """Check the rules between fields."""
    yield from _check_name(job, named)
    shape, of_workers = job.shape, spec["workers"].get("replicas")
    if of_workers and spec.get("workersPerJobInstance") and of_workers != int(spec["workersPerJobInstance"]):
        other = spec["workersPerJobInstance"]
        message = f"workers.replicas {of_workers} and workersPerJobInstance {other} differ"
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
        place: Place = ("spec", "workers", "template", "spec", "containers", 0)
        message = "several workers need a command in their template: an image's own can't be put under poprun"
        yield Fault(place, message, "write the container's command")


def _check_name(job: Job, named: str) -> Iterator[Fault]:
    place = ("metadata", named)
    suffix = "bcdfg" if named == "generateName" else ""  # an API server adds five letters
    name = job.name + suffix
    said = f'name "{job.name}"' + (" with five letters added" if suffix else "")
    last = f"{name}-worker-{max(job.shape.instances * job.shape.workers - 1, 0)}"
    if len(name) > MAX_NAME or len(last) > MAX_HOST:
        message = f"{said} has {len(name)} characters: pods are called NAME-worker-0, and a host name holds {MAX_HOST}"
        yield Fault(place, message, f"at most {MAX_NAME} characters")
    elif not _LABEL.fullmatch(name):
        yield Fault(
            place, f"{said} can't be a host's", "small letters, digits and dashes, no dash at the ends"
        )
    elif job.has_service and not name[0].isalpha():
        yield Fault(place, f"{said} must begin with a letter: a Service bears it", "begin with a letter")


def warnings_of(job: Job, value: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """Yield the place and text of a warning for each valid field that has another meaning here, or none."""
    spec, ipus = value["spec"], job.shape.ipus
    if ipus & (ipus - 1) or ipus > 64:
        yield (
            ("spec", "ipusPerJobInstance"),
            f"{ipus} ipus are no power of two up to 64: IPUs would not run this",
        )
    policy = job.template["spec"].get("restartPolicy", "Never")
    if policy != "Never":
        yield (
            ("spec", "workers", "template", "spec", "restartPolicy"),
            f"the template's restartPolicy {policy} is not used: the job's own is {job.restarts.policy}",
        )
    if spec["workers"].get("strategy"):
        yield ("spec", "workers", "strategy"), "workers.strategy has no effect: pods of a job don't change"
    if job.restarts.codes and job.restarts.policy != "ExitCode":
        place = ("spec", "restartPolicy", "exitCodes")
        yield place, f"exitCodes have no effect with restartPolicy {job.restarts.policy}"


# ---- the schema ----------------------------------------------------------------------------------------------------

_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_INT32 = 2**31 - 1
# The template is passed on unchecked, but for the parts that pods.py writes into.
_OPEN = "x-kubernetes-preserve-unknown-fields"
_OBJECT = {"type": "object", _OPEN: True}
_WORDS = {"type": "object", "additionalProperties": {"type": "string"}}
_NAMED = {
    "type": "array",
    "items": {**_OBJECT, "required": ["name"], "properties": {"name": {"type": "string"}}},
}
_MOUNTS = {**_NAMED, "items": {**_NAMED["items"], "properties": {"mountPath": {"type": "string"}}}}
_CONTAINER = {
    **_OBJECT,
    "properties": {
        "env": _NAMED,
        "volumeMounts": _MOUNTS,
        "resources": {**_OBJECT, "properties": {"limits": _OBJECT, "requests": _OBJECT}},
        "securityContext": {
            **_OBJECT,
            "properties": {"capabilities": {**_OBJECT, "properties": {"add": {"type": "array"}}}},
        },
    },
}
_TEMPLATE = {
    **_OBJECT,
    "properties": {
        "metadata": {**_OBJECT, "properties": {"labels": _WORDS, "annotations": _WORDS}},
        "spec": {
            **_OBJECT,
            "properties": {
                "containers": {"type": "array", "items": _CONTAINER},
                "initContainers": {"type": "array", "items": _CONTAINER},
                "volumes": _NAMED,
                "restartPolicy": {"type": "string"},
                "terminationGracePeriodSeconds": {"type": "integer", "minimum": 0},
            },
        },
    },
}
_RENAMED = {"modelReplicas": "modelReplicasPerWorker", "ipusPerModelReplica": "ipusPerJobInstance"}


@cache
def crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of IPUJobs."""
    return yaml.safe_load(resources.files("ipujob").joinpath("crd.yaml").read_text())


def check_schema(value: dict[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each part of an IPUJob that an API server would refuse or drop."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    faults = list(_check_value(value.get("spec"), schema, ("spec",)))
    yield from faults
    place = ("spec", "workers", "template")
    if not any(place[: len(fault.place)] == fault.place[:3] for fault in faults):
        yield from _check_value(value["spec"]["workers"]["template"], _TEMPLATE, place)


def _check_value(value: Any, schema: dict[str, Any], place: Place) -> Iterator[Fault]:
    name = _path(place)
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield Fault(place, f"{name} must be a number, as a string or as it is, and is {_show(value)}")
        elif not re.search(schema["pattern"], str(value)):
            yield Fault(
                place,
                f"{name} must be a whole number that matches {schema['pattern']}, and is {_show(value)}",
            )
        return
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, bool))):
        what = "is missing" if value is None else f"must be of type {kind}, and is {_show(value)}"
        yield Fault(place, f"{name} {what}")
        return
    if "enum" in schema and value not in schema["enum"]:
        yield Fault(
            place,
            f"{name} {_show(value)} is none of {', '.join(schema['enum'])}",
            _near(str(value), schema["enum"]),
        )
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield Fault(place, f"{name} {_show(value)} doesn't match {schema['pattern']}")
    if kind == "integer" and not schema["minimum"] <= value <= schema.get("maximum", _INT32):
        limits = f"{schema['minimum']} to {schema.get('maximum', _INT32)}"
        yield Fault(place, f"{name} is {value}, and must be within {limits}")
    if (kind == "array" and not value and schema.get("minItems")) or (
        value == "" and schema.get("minLength")
    ):
        yield Fault(place, f"{name} must not be empty")
    if kind == "array":
        for index, item in enumerate(value):
            yield from _check_value(item, schema.get("items", {}), (*place, index))
    if kind == "object" and isinstance(value, dict):
        yield from _check_object(value, schema, place)


def _check_object(value: dict[str, Any], schema: dict[str, Any], place: Place) -> Iterator[Fault]:
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
    """Return a fix that names the most similar known word; empty, if none is similar."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"write {near[0]}" if near else ""


def _path(place: Place) -> str:
    """Return the name of a place in messages, such as "spec.workers.template.spec.containers[0]"."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
