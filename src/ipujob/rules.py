"""From a document to a job: every rule that its parts must follow, alone and together, and all that break one."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from . import schema
from .documents import Fault, Place
from .spec import ANNOTATIONS, API, MAX_HOST, MAX_NAME, Job, Restarts, Shape, count

_NOT_OURS = ("mpirun", "mpiexec", "horovodrun")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def parse(value: Mapping[str, Any]) -> tuple[Job | None, list[Fault]]:
    """The job, or None and everything that is wrong with it."""
    if value.get("kind") != "IPUJob":
        return None, [Fault(("kind",), f"kind {value.get('kind')} isn't an IPUJob", "kind: IPUJob")]
    faults = [*_check_head(value), *schema.check(dict(value))]
    if faults:
        value = _mended(value, faults)
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


def _mended(value: Mapping[str, Any], faults: list[Fault]) -> dict[str, Any]:
    """Without all that is wrong by itself, so that the rules between fields can be looked at, too."""
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
    """What stands above the spec."""
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
    """The rules that hold between fields."""
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
    if job.launch and job.launch[0].rpartition("/")[2] in _NOT_OURS:
        message = "there is no MPI here: write poprun --num-instances N --num-replicas R ..."
        fix = f"poprun in place of {job.launch[0]}: every worker runs it, and it starts its worker's share"
        yield Fault(("spec", "launcher", "command", 0), message, fix)
    if job.mode == "joined" and not job.worker.get("command") and job.ttl is None:
        place: Place = ("spec", "workers", "template", "spec", "containers", 0)
        message = "several workers need a command in their template: an image's own can't be put under poprun"
        yield Fault(place, message, "write the container's command")


def _check_name(job: Job, named: str) -> Iterator[Fault]:
    place = ("metadata", named)
    drawn = "bcdfg" if named == "generateName" else ""  # as many as an API server adds
    name = job.name + drawn
    said = f'name "{job.name}"' + (" with five letters added" if drawn else "")
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


def notes(job: Job, value: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """What is right, but not what it was for IPUs: said once, nothing is changed."""
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
