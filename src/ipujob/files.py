"""The commands that read files and need no cluster: check, render, run, manifest."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import yaml

from . import local, pods, rules, skipped_programs, spec
from . import render as rendering
from .documents import Document, Faults
from .documents import read as read_documents
from .schema import crd
from .spec import Job

_OTHERS = "kubectl create -f; ipujob render passes other kinds through"


def load(document: Document) -> Job:
    """The job of a document; what is unusual in it is said on standard error.

    Raises:
        Faults: everything that is wrong with it
    """
    if not isinstance(document.value, dict):
        raise Faults([document.say((), f"this is a {document.kind()}, not an IPUJob", "kind: IPUJob")])
    job, faults = rules.parse(document.value)
    faults = [*document.faults, *faults]
    if faults or job is None:
        lines = {document.say(fault.place, fault.message, fault.fix): None for fault in faults}
        raise Faults(list(lines))
    for place, text in rules.notes(job, document.value):
        print(document.say(place, f"warning: {text}"), file=sys.stderr)
    return job


def warn_of_image(document: Document, job: Job, images: pods.Images = ()) -> None:
    """Say it, if the pods would get Graphcore's own PopTorch."""
    if text := pods.image_note(job, images):
        place = ("spec", "workers", "template", "spec", "containers", 0, "image")
        print(document.say(place, f"warning: {text}"), file=sys.stderr)


def check(arguments: argparse.Namespace) -> int:
    faults: list[str] = []
    for file in arguments.files:
        try:
            documents = read_documents(file)
        except Faults as error:
            faults.append(str(error))
            continue
        jobs = [document for document in documents if document.is_job()]
        for document in jobs or documents:
            try:
                job = load(document)
                warn_of_image(document, job)
                print(f"{file}: {job.name}: {describe(job)}")
            except Faults as error:
                faults.append(str(error))
    if faults:
        raise Faults(faults)
    return 0


def describe(job: Job) -> str:
    """The shape of a job in one line."""
    shape = job.shape
    count = spec.count
    return (
        f"{count(shape.instances, 'instance')} of {count(shape.workers, 'worker')}, in each worker "
        f"{count(shape.replicas, 'replica')} of {count(shape.ipus_per_replica, 'ipu')}, mode {job.mode}"
    )


def render(arguments: argparse.Namespace) -> int:
    drop = [word for word in arguments.drop.split(",") if word]
    if unknown := set(drop) - {"resources", "security"}:
        raise Faults(
            [f"ipujob: --drop {','.join(sorted(unknown))}: only resources and security can be dropped"]
        )
    made: list[Any] = []
    for document in read_documents(arguments.file):
        if not document.is_job():
            made.append(document.value)
            continue
        document = changed(document, arguments.name, drop=drop)
        job = load(document)
        warn_of_image(document, job, arguments.image)
        try:
            objects, left_out = rendering.render(job, arguments.way, arguments.device, arguments.image)
        except ValueError as error:
            raise Faults([document.say(("spec", "restartPolicy"), str(error))]) from None
        made += [rendering.placed(each, document.value) for each in objects]
        for text in left_out:
            print(document.say((), f"warning: {text}"), file=sys.stderr)
    print(dump(made), end="")
    return 0


def jobs_of(file: str) -> list[Document]:
    """The documents of a file that holds IPUJobs only."""
    documents = read_documents(file)
    others = [document for document in documents if not document.is_job()]
    if others:
        said = "this is a {}, and only IPUJobs can be run"
        raise Faults([each.say(("kind",), said.format(each.kind()), _OTHERS) for each in others])
    return documents


def changed(
    document: Document, name: str | None = None, command: str | None = None, drop: Sequence[str] = ()
) -> Document:
    """The document with a name and with what the command line puts into it; as it is, where that can't be done."""
    value = copy.deepcopy(document.value)
    try:
        value = rendering.named(value, name)
        annotations = value["metadata"].get("annotations") or {}
        value["metadata"]["annotations"] = annotations | {f"pando/{word}": "drop" for word in drop}
        if command is not None:
            own = value["spec"]["workers"]["template"]["spec"]["containers"][0]
            own |= {"command": ["/bin/bash", "-c", command], "args": []}
            if "launcher" in value["spec"]:
                value["spec"]["launcher"]["command"] = own["command"]
    except (KeyError, TypeError, IndexError, AttributeError):
        return document
    return dataclasses.replace(document, value=value)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.local:
        raise Faults(
            ["ipujob: run is for this machine\n  fix: --local; or ipujob submit, which runs it in a cluster"]
        )
    for _, folder in arguments.clone:
        if not Path(folder).is_dir():
            raise Faults([f"ipujob: --clone: the folder {folder} doesn't exist"])
    if unknown := set(filter(None, arguments.real.split(","))) - set(skipped_programs.ALL):
        raise Faults(
            [
                f"ipujob: --real: {', '.join(sorted(unknown))} has no stand-in: {', '.join(skipped_programs.ALL)}"
            ]
        )
    for document in jobs_of(arguments.file):
        document = changed(document, arguments.name, arguments.command)
        job = load(document)
        if faults := list(local.refusals(job, dict(arguments.env))):
            raise Faults([document.say(fault.place, fault.message, fault.fix) for fault in faults])
        if not job.shape.instances:
            print(f"ipujob: {job.name}: no instances wanted", file=sys.stderr)
            continue
        print(
            f"ipujob: {job.name}: not looked at here: {', '.join(local.not_looked_at(job))}", file=sys.stderr
        )
        if code := _run(document.value, job, arguments):
            return code
    return 0


def _run(value: dict[str, Any], job: Job, arguments: argparse.Namespace) -> int:
    """One job, in a folder that goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="ipujob-"))
    try:
        skipped_programs.install(folder / "bin", dict(arguments.clone), arguments.real.split(","))
        return local.run(value, job, folder, dict(arguments.env))
    finally:
        if arguments.keep:
            print(f"ipujob: {job.name}: homes and logs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def manifest(arguments: argparse.Namespace) -> int:
    text = resources.files("ipujob").joinpath("operator.yaml").read_text()
    words = {"NAMESPACE": arguments.namespace, "IMAGE": arguments.image, "DEVICE": arguments.device}
    print(dump([crd(), *yaml.safe_load_all(Template(text).safe_substitute(words))]), end="")
    return 0


class _Dumper(yaml.SafeDumper):
    """Scripts keep their lines, and nothing is an alias of something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def dump(objects: Sequence[Any]) -> str:
    """Objects as one YAML file."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=10**6)
