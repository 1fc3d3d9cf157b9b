"""The rules of an IPUJob: those of the CRD's schema, and those between fields. `parse` checks them all."""

import fnmatch
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

from popengine.errors import did_you_mean
from popengine.texts import counted

MAX_HOST = 63  # characters of a host name
_MAX_NAME = 50  # characters; pods are called NAME-worker-K
_IMAGE, TTL = "pando/image", "pando/ttl-seconds-after-finished"
DROPPABLE = ("resources", "security")
_ANNOTATIONS = {
    "pando/device": {"type": "string", "enum": ["cpu", "cuda"]},
    "pando/ipus-per-gpu": {"type": "string", "pattern": "^[1-9][0-9]{0,3}$"},
    **{f"pando/{word}": {"type": "string", "enum": ["keep", "drop"]} for word in DROPPABLE},
    _IMAGE: {"type": "string", "pattern": r"^\S+$"},
    TTL: {"type": "string", "pattern": "^[0-9]{1,9}$"},
}
_MPI_LAUNCHERS = ("mpirun", "mpiexec", "horovodrun")
POD = "spec.workers.template.spec"
_NO_TEMPLATE = {"spec": {"containers": [{"image": "", "command": ["true"]}]}}

Images = Sequence[tuple[str, str]]  # (pattern, image): the first match replaces the template's image


@dataclass(frozen=True)
class Job:
    """A valid IPUJob. Its pod number k is worker k % workers of instance k // workers."""

    name: str
    namespace: str
    instances: int
    workers: int  # per instance
    replicas: int  # per worker
    ipus: int  # per instance
    template: dict[str, Any] = field(repr=False)
    image: str = ""  # of the worker; empty, if it is not used
    device: str = "cpu"  # or cuda
    ipus_per_gpu: int = 1
    dropped: tuple[str, ...] = ()  # of DROPPABLE: fields of the template that pods don't get
    mode: str = "single"  # or joined (poprun runs the command), launched (the launcher's command runs)
    launcher_command: tuple[str, ...] = ()
    launcher_env: tuple[dict[str, Any], ...] = ()
    restart_policy: str = "Never"  # or OnFailure, Always, ExitCode: when an instance restarts
    restart_limit: int = 0  # the most restarts of an instance
    exit_codes: frozenset[int] = frozenset()  # with which an instance restarts, if the policy is ExitCode
    clean_policy: str = "None"  # or Workers, All: the pods that are deleted after the end
    ttl: int | None = None  # time limit of an interactive job in seconds
    seconds_kept: int | None = None  # from its end until the IPUJob is deleted; None: it stays

    @property
    def ipus_per_replica(self) -> int:
        return self.ipus // (self.workers * self.replicas)

    @property
    def container(self) -> dict[str, Any]:
        """Return the template's first container, in which the program runs."""
        return self.template["spec"]["containers"][0]

    @property
    def has_service(self) -> bool:
        return self.mode != "single"

    def host(self, instance: int) -> str:
        """Return the host name of an instance's first worker, to which its workers connect."""
        return f"{self.name}-worker-{instance * self.workers}.{self.name}"


class Fault(NamedTuple):
    """An error in a document."""

    path: str  # of the faulty value, as `child_path` makes it
    message: str
    fix: str = ""  # "": none is known


def child_path(path: str, key: str | int) -> str:
    """Return the path of an item of the value at `path`: "spec.workers", "spec.launcher.command[0]"."""
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".lstrip(".")


def parse(
    value: Mapping[str, Any], device: str = "cpu", images: Images | None = ()
) -> tuple[Job | None, list[Fault]]:
    """Return (job, []) for a valid IPUJob object, else (None, list of all faults). `device`: if no annotation
    names one; `images`: replacements of the template's image (None: no image is used)"""
    if value.get("kind") != "IPUJob":
        fix = "kind: IPUJob; ipujob render passes other kinds through"
        return None, [Fault("kind", f"kind {value.get('kind')} isn't an IPUJob", fix)]
    faults: list[Fault] = []
    # The rules between fields are checked on the valid fields, so that all faults are found at once.
    valid = _drop_invalid(value, _schema(), "", faults)
    given, metadata, spec = value.get("metadata"), valid.get("metadata", {}), valid.get("spec", {})
    if isinstance(given, dict) and not (given.get("name") or given.get("generateName")):
        fix = "give it metadata.name, or metadata.generateName"
        faults.append(Fault("metadata", "the job has no name", fix))
    job = _to_job(metadata, spec, device, images)
    faults += [*_check_job(job, metadata, spec), *_check_name(job, metadata)]
    return (None, faults) if faults else (job, [])


def _to_job(metadata: Mapping[str, Any], spec: Mapping[str, Any], device: str, images: Images | None) -> Job:
    """Return the job of an IPUJob's `metadata` and `spec`, in which invalid fields may be missing."""
    of_workers, policy = spec.get("workers", {}), spec.get("restartPolicy", {})
    launcher, template = spec.get("launcher", {}), of_workers.get("template", {})
    workers = int(of_workers.get("replicas") or spec.get("workersPerJobInstance", 1))
    replicas = int(spec.get("modelReplicasPerWorker", 1))
    ipus = int(spec.get("ipusPerJobInstance", workers * replicas))
    if "containers" not in template.get("spec", {}):
        template = _NO_TEMPLATE
    written = template["spec"]["containers"][0]["image"]
    matching = (new for old, new in images or () if fnmatch.fnmatchcase(written, old))
    annotations = metadata.get("annotations", {})
    return Job(
        name=metadata.get("name") or metadata.get("generateName") or "job",
        namespace=metadata.get("namespace") or "default",
        instances=spec.get("jobInstances", 1),
        workers=workers,
        replicas=replicas,
        ipus=ipus,
        template=template,
        image="" if images is None else annotations.get(_IMAGE) or next(matching, written),
        device=annotations.get("pando/device", device),
        ipus_per_gpu=int(annotations.get("pando/ipus-per-gpu", 1)),
        dropped=tuple(word for word in DROPPABLE if annotations.get(f"pando/{word}") == "drop"),
        mode="launched" if launcher else "joined" if workers > 1 else "single",
        launcher_command=tuple(launcher.get("command", ())),
        launcher_env=tuple(launcher.get("env", ())),
        restart_policy=policy.get("type", "Never"),
        restart_limit=policy.get("backOffLimit", 3),
        exit_codes=frozenset(_exit_codes(policy.get("exitCodes", ""))),
        clean_policy=spec.get("cleanPodPolicy", "None"),
        ttl=spec.get("interactive", {}).get("ttl"),
        seconds_kept=int(annotations[TTL]) if TTL in annotations else None,
    )


def _exit_codes(text: str) -> Iterator[int]:
    """Yield the exit codes in a text such as "1,3-5"; codes above 255 are left out."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), min(int(last or first), 255) + 1)


def _check_job(job: Job, metadata: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each broken rule between fields, and for each unknown annotation of Pando."""
    for key in metadata.get("annotations", {}):
        if str(key).startswith("pando/") and key not in _ANNOTATIONS:
            message = f"annotation {key} is unknown{did_you_mean(str(key), _ANNOTATIONS)}"
            yield Fault(f"metadata.annotations.{key}", message, f"one of {', '.join(_ANNOTATIONS)}")
    per_instance, shares = spec.get("workersPerJobInstance"), job.workers * job.replicas
    if per_instance and job.workers != int(per_instance):
        message = f"workers.replicas {job.workers} and workersPerJobInstance {per_instance} differ"
        yield Fault("spec.workers.replicas", message, "keep one of them")
    elif job.ipus % shares:
        over = f"{counted(job.workers, 'worker')} with {counted(job.replicas, 'replica')} each"
        message = f"ipusPerJobInstance {job.ipus} can't be shared out over {over}"
        yield Fault("spec.ipusPerJobInstance", message, f"a multiple of {shares}")
    if job.restart_policy == "ExitCode" and not spec["restartPolicy"].get("exitCodes"):
        fix = "exitCodes: 1,3-5 names those that mean restart"
        yield Fault("spec.restartPolicy", "restartPolicy ExitCode needs exitCodes", fix)
    if job.ttl is not None and job.restart_policy != "Never":
        yield Fault("spec.interactive", "an interactive job isn't restarted", "take restartPolicy out")
    if job.launcher_command and job.launcher_command[0].rpartition("/")[2] in _MPI_LAUNCHERS:
        message = "there is no MPI here: write poprun --num-instances N --num-replicas R ..."
        fix = f"poprun in place of {job.launcher_command[0]}: every worker runs it, and it starts its worker's share"
        yield Fault("spec.launcher.command[0]", message, fix)
    if job.mode == "joined" and not job.container.get("command") and job.ttl is None:
        message = "several workers need a command in their template: an image's own can't be put under poprun"
        yield Fault(f"{POD}.containers[0]", message, "write the container's command")


def _check_name(job: Job, metadata: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault if the job's name can't be in the names of its pods and Service."""
    path, name, said = "metadata.name", job.name, f'name "{job.name}"'
    if not metadata.get("name"):  # an API server adds five letters to generateName
        path, name, said = "metadata.generateName", name + "bcdfg", f"{said} with five letters added"
    last = f"{name}-worker-{max(job.instances * job.workers - 1, 0)}"
    if len(name) > _MAX_NAME or len(last) > MAX_HOST:
        message = f"{said} has {len(name)} characters: pods are called NAME-worker-0, and a host name holds {MAX_HOST}"
        yield Fault(path, message, f"at most {_MAX_NAME} characters")
    elif not re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        fix = "small letters, digits and dashes, no dash at the ends"
        yield Fault(path, f"{said} can't be a host's", fix)
    elif job.has_service and not name[0].isalpha():
        yield Fault(path, f"{said} must begin with a letter: a Service bears it", "begin with a letter")


def job_warnings(job: Job, value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, warning) for each field of an IPUJob that has no effect here, or should be changed."""
    spec, ipus, restarts = value["spec"], job.ipus, job.restart_policy
    policy = job.template["spec"].get("restartPolicy", "Never")
    if ipus & (ipus - 1) or ipus > 64:
        yield "spec.ipusPerJobInstance", f"{ipus} ipus are no power of two up to 64: IPUs would not run this"
    if policy != "Never":
        message = f"the template's restartPolicy {policy} is not used: the job's own is {restarts}"
        yield f"{POD}.restartPolicy", message
    if spec["workers"].get("strategy"):
        yield "spec.workers.strategy", "workers.strategy has no effect: pods of a job don't change"
    if job.exit_codes and restarts != "ExitCode":
        yield "spec.restartPolicy.exitCodes", f"exitCodes have no effect with restartPolicy {restarts}"
    if job.image.startswith(("graphcore/", "docker.io/graphcore/")):
        fix = f"name one with Pando by {_IMAGE} or --image"
        message = f"image {job.image} holds Graphcore's PopTorch, which looks for IPUs: {fix}"
        yield f"{POD}.containers[0].image", message


# ---- the schema ----------------------------------------------------------------------------------------------------

_TYPES = {  # Python's types, and what to write
    "object": (Mapping, "lines of `name: value` below it"),
    "array": (list, "lines that begin with - below it"),
    "string": (str, "write it in quotes"),
    "integer": (int, "a number without quotes, such as 1"),
}
_OPEN = "x-kubernetes-preserve-unknown-fields"
_RENAMED = ("modelReplicas", "ipusPerModelReplica")  # fields of older files


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
        "apiVersion": {**text, "enum": ["graphcore.ai/v1alpha1"]},
        "kind": text,
        "metadata": {"type": "object", _OPEN: True, "properties": metadata},
        "spec": crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"],
        "status": {"type": "object", _OPEN: True},
    }
    return {"type": "object", "required": ["apiVersion", "metadata", "spec"], "properties": properties}


def _drop_invalid(value: Any, schema: dict[str, Any], path: str, faults: list[Fault]) -> Any:
    """Return a copy of a value without its null and invalid fields; None, if the value itself is invalid. Append
    the `faults`: fields that an API server would refuse or drop."""
    before, kind = len(faults), schema.get("type")
    if message := _schema_violation(value, schema):
        fix = _TYPES[schema["type"]][1] if message.startswith("must be of type") else ""
        faults.append(Fault(path, f"{path} {message}", fix))
        return None
    if kind == "array":
        inner = schema["items"]
        items = [_drop_invalid(item, inner, child_path(path, k), faults) for k, item in enumerate(value)]
        return items if len(faults) == before else None
    if kind != "object":
        return value
    properties, additional = schema.get("properties", {}), schema.get("additionalProperties")
    valid, misspelt = {}, ""
    for key, item in value.items():
        inner, allowed = child_path(path, str(key)), properties.get(key, additional)
        if allowed is None and schema.get(_OPEN) and not did_you_mean(str(key), properties, least=0.8):
            valid[key] = item
        elif allowed is None:
            meant = did_you_mean(str(key), properties)
            fix = f"{'rename' if meant else 'remove'} it: a cluster would ignore it"
            if key in _RENAMED:
                fix, meant = "use modelReplicasPerWorker, ipusPerJobInstance", ""
            misspelt += meant
            faults.append(Fault(inner, f"{inner} is not a field of an IPUJob{meant}", fix))
        elif item is not None and (part := _drop_invalid(item, allowed, inner, faults)) is not None:
            valid[key] = part
    missing = [key for key in schema.get("required", ()) if value.get(key) is None]
    unnamed = (key for key in missing if repr(key) not in misspelt)
    faults += [Fault(path, f"{child_path(path, key)} is missing", "add it") for key in unnamed]
    return None if missing and path else valid


def _schema_violation(value: Any, schema: dict[str, Any]) -> str:
    """Return how a value itself, without items and fields, breaks a schema; "" if it is valid."""
    kind, pattern, shown = schema.get("type", ""), schema.get("pattern", ""), reprlib.repr(value)
    least, most = schema.get("minimum", 0), schema.get("maximum", 2**31 - 1)
    if schema.get("x-kubernetes-int-or-string"):
        most = 999 if "{0,2}" in pattern else 9999
        is_valid = re.search(pattern, str(value))
        return "" if is_valid else f"must be a whole number from 1 to {most}, and is {shown}"
    if not isinstance(value, _TYPES[kind][0]) or isinstance(value, bool):
        return f"must be of type {kind}, and is {shown}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{shown} is none of {', '.join(schema['enum'])}{did_you_mean(value, schema['enum'])}"
    if kind == "string" and not re.search(pattern, value):
        return f"{shown} doesn't match {pattern}"
    if kind == "integer" and not least <= value <= most:
        return f"is {value}, and must be within {least} to {most}"
    needs_content = schema.get("minItems") or schema.get("minLength")
    return "must not be empty" if needs_content and not value else ""
