"""The program `ipujob`: its command line, and the commands that need no cluster: check, render, run, manifest."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import yaml

from popengine.environment import pando_version

from . import local, pods, skipped_programs
from .render import named, placed
from .render import render as make_objects
from .rules import crd, parse, warnings_of
from .spec import Document, Faults, Job, count, read

_LOCAL = """Run the file's workers as processes here. The file isn't changed: HOME is a new folder, apt, sudo, pip and
conda say that they were skipped, and `git clone URL` copies the folder given by --clone URL=FOLDER. These stand-ins
are found by PATH only, so this is NOT a sandbox: a script that writes /usr/bin/apt gets the real one."""

Command = Callable[[argparse.Namespace], int]  # returns the exit code


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Returns: 0; 1, if a job failed or the cluster refused a request; 2, if a file or the command line is wrong
    """
    arguments = _parser().parse_args(words)
    try:
        return arguments.run(arguments)
    except Faults as faults:
        print(faults, file=sys.stderr)
        return 2
    except BrokenPipeError:  # `ipujob render FILE | head`
        sys.stderr.close()
        return 0


def _lazily(module: str, name: str) -> Command:
    """Return a command that imports its module when it runs, so that other commands don't load a cluster's client."""

    def run(arguments: argparse.Namespace) -> int:
        from importlib import import_module

        return getattr(import_module(f".{module}", __package__), name)(arguments)

    return run


def _pair(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _clone(text: str) -> tuple[str, str]:
    """Parse URL=FOLDER; the URL may hold "="."""
    url, _, folder = text.rpartition("=")
    if not (url and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form URL=FOLDER")
    return url, folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ipujob", description="Runs an IPUJob file here, or in a Kubernetes cluster."
    )
    parser.add_argument("--version", action="version", version=f"ipujob of Pando {pando_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Command, says: str, more: str | None = None) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=says, description=more or says, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        added.set_defaults(run=run)
        return added

    _add_file_commands(command)
    _add_cluster_commands(command)
    return parser


def _add_file_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    added = command("check", check, "say everything that is wrong with files; needs no cluster")
    added.add_argument("files", nargs="+", metavar="FILE", help="- is standard input")

    added = command("render", render, "print plain objects for clusters without our operator")
    added.add_argument("file", metavar="FILE")
    added.add_argument("--as", dest="way", choices=("job", "pod", "jobset"), default="job")
    added.add_argument("--name", help="in place of the file's name or generateName")
    added.add_argument(
        "--image", type=_pair, action="append", default=[], metavar="OLD=NEW", help="OLD may hold *"
    )
    added.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the file doesn't say")
    added.add_argument(
        "--drop", default="", metavar="resources,security", help="leave these of the template away"
    )

    added = command("run", run, "run a file's workers here, as processes", _LOCAL)
    added.add_argument("file", metavar="FILE")
    added.add_argument("--local", action="store_true", help="as processes here; the one way so far")
    added.add_argument("--name", help="in place of the file's name or generateName")
    added.add_argument(
        "--command", metavar="TEXT", help="run this text by bash instead of the file's command and args"
    )
    added.add_argument("--clone", type=_clone, action="append", default=[], metavar="URL=FOLDER")
    added.add_argument("--env", type=_pair, action="append", default=[], metavar="NAME=VALUE")
    added.add_argument(
        "--real", default="", metavar="NAME,...", help="take stand-ins away: apt, pip, git, ..."
    )
    added.add_argument(
        "--keep", action="store_true", help="leave the folder with the workers' homes and logs"
    )

    added = command(
        "manifest", manifest, "print the CRD and the operator: ipujob manifest | kubectl apply -f -"
    )
    added.add_argument("--namespace", default="ipujob-system", help="of the operator")
    added.add_argument("--image", default="pando:latest", help="with Pando in it")
    added.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of jobs that don't say")


def _add_cluster_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    def with_namespace(name: str, says: str) -> argparse.ArgumentParser:
        added = command(name, _lazily("remote", name), says)
        added.add_argument("-n", "--namespace", help="else the file's, else the kubeconfig's")
        return added

    submit = with_namespace("submit", "create the jobs of a file in a cluster")
    submit.add_argument("file", metavar="FILE")
    submit.add_argument("--name", help="in place of the file's name or generateName")
    submit.add_argument("--follow", action="store_true", help="print the log of worker 0 until the job ends")
    submit.add_argument(
        "--wait", action="store_true", help="until the job ends: exit code 0 Completed, 1 Failed"
    )

    status = with_namespace("status", "print the jobs, or all about one")
    status.add_argument("name", nargs="?", metavar="NAME")
    status.add_argument("--watch", action="store_true", help="print again whenever it changes")

    logs = with_namespace("logs", "print what workers said")
    logs.add_argument("name", metavar="NAME")
    logs.add_argument("--worker", type=int, default=0, metavar="K")
    logs.add_argument("--all", action="store_true", help="all workers, with their names before each line")
    logs.add_argument("--follow", action="store_true")
    logs.add_argument(
        "--previous", action="store_true", help="of the container before its restart in the same pod"
    )

    delete = with_namespace("delete", "delete jobs and their pods")
    delete.add_argument("names", nargs="+", metavar="NAME")
    delete.add_argument("--keep-pods", action="store_true", help="leave the pods, without an owner")

    operator = command(
        "operator", _lazily("operator", "operator"), "bring a cluster's IPUJobs to their ends, for ever"
    )
    where = operator.add_mutually_exclusive_group()
    where.add_argument("--namespace", help="this one only; else the kubeconfig's")
    where.add_argument("--all-namespaces", action="store_true")
    operator.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of jobs that don't say")
    operator.add_argument("--images", metavar="FILE", help="lines OLD=NEW: images that stand for others")
    operator.add_argument("--alive", metavar="FILE", help="touch this file in every round")


# ---- commands that need no cluster --------------------------------------------------------------------------------

_OTHER_KINDS = "kubectl create -f; ipujob render passes other kinds through"


def load_job(document: Document) -> Job:
    """Return the job of a document, after printing warnings about unusual fields to standard error.

    Raises:
        Faults: everything that is wrong with the document
    """
    if not isinstance(document.value, dict):
        raise Faults([document.locate((), f"this is a {document.kind()}, not an IPUJob", "kind: IPUJob")])
    job, faults = parse(document.value)
    faults = [*document.faults, *faults]
    if faults or job is None:
        lines = {document.locate(fault.place, fault.message, fault.fix): None for fault in faults}
        raise Faults(list(lines))
    for place, text in warnings_of(job, document.value):
        print(document.locate(place, f"warning: {text}"), file=sys.stderr)
    return job


def warn_about_image(document: Document, job: Job, images: pods.Images = ()) -> None:
    """Print a warning, if the pods' image is one of Graphcore's, which holds PopTorch itself."""
    if text := pods.image_warning(job, images):
        place = ("spec", "workers", "template", "spec", "containers", 0, "image")
        print(document.locate(place, f"warning: {text}"), file=sys.stderr)


def check(arguments: argparse.Namespace) -> int:
    faults: list[str] = []
    for file in arguments.files:
        try:
            documents = read(file)
        except Faults as error:
            faults.append(str(error))
            continue
        jobs = [document for document in documents if document.is_job()]
        for document in jobs or documents:
            try:
                job = load_job(document)
                warn_about_image(document, job)
                print(f"{file}: {job.name}: {_describe(job)}")
            except Faults as error:
                faults.append(str(error))
    if faults:
        raise Faults(faults)
    return 0


def _describe(job: Job) -> str:
    """Describe a job's instances, workers, replicas and ipus in one line."""
    shape = job.shape
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
    for document in read(arguments.file):
        if not document.is_job():
            made.append(document.value)
            continue
        document = with_changes(document, arguments.name, drop=drop)
        job = load_job(document)
        warn_about_image(document, job, arguments.image)
        try:
            objects, left_out = make_objects(job, arguments.way, arguments.device, arguments.image)
        except ValueError as error:
            raise Faults([document.locate(("spec", "restartPolicy"), str(error))]) from None
        made += [placed(each, document.value) for each in objects]
        for text in left_out:
            print(document.locate((), f"warning: {text}"), file=sys.stderr)
    print(_dump(made), end="")
    return 0


def read_jobs(file: str) -> list[Document]:
    """Return the documents of a file that may hold IPUJobs only.

    Raises:
        Faults: one of the documents is another object
    """
    documents = read(file)
    others = [document for document in documents if not document.is_job()]
    if others:
        said = "this is a {}, and only IPUJobs can be run"
        raise Faults([each.locate(("kind",), said.format(each.kind()), _OTHER_KINDS) for each in others])
    return documents


def with_changes(
    document: Document, name: str | None = None, command: str | None = None, drop: Sequence[str] = ()
) -> Document:
    """Return a document with changes from the command line; a malformed document is returned as it is.

    Args:
        name:    the job's name, in place of the file's
        command: a script for bash, in place of the worker's and the launcher's command
        drop:    "resources", "security": fields of the template that pods don't get
    """
    value = copy.deepcopy(document.value)
    try:
        value = named(value, name)
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
    for document in read_jobs(arguments.file):
        document = with_changes(document, arguments.name, arguments.command)
        job = load_job(document)
        if faults := list(local.unsupported(job, dict(arguments.env))):
            raise Faults([document.locate(fault.place, fault.message, fault.fix) for fault in faults])
        if not job.shape.instances:
            print(f"ipujob: {job.name}: no instances wanted", file=sys.stderr)
            continue
        print(
            f"ipujob: {job.name}: not looked at here: {', '.join(local.ignored_fields(job))}", file=sys.stderr
        )
        if code := _run(document.value, job, arguments):
            return code
    return 0


def _run(value: dict[str, Any], job: Job, arguments: argparse.Namespace) -> int:
    """Run one job in a temporary folder."""
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
    print(_dump([crd(), *yaml.safe_load_all(Template(text).safe_substitute(words))]), end="")
    return 0


class _Dumper(yaml.SafeDumper):
    """A dumper that writes several lines as a block, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _dump(objects: Sequence[Any]) -> str:
    """Return the text of a YAML file with these objects."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=10**6)
