"""The program `ipujob`: its arguments, and the commands without a cluster: check, render, run, manifest."""

import argparse
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

from popengine.command_parser import CommandParser
from popengine.environment import pando_version
from popengine.errors import did_you_mean
from popengine.texts import counted

from . import local, operator, remote, render, skipped_programs
from .client import Refused, Unreachable
from .files import InputError, load_job, read_documents, with_overrides
from .rules import DROPPABLE, crd

_LOCAL = """Run the file's workers here, as processes. The file needs no change: HOME is a new folder; apt, sudo, pip
and conda print that they were skipped; `git clone URL` copies the folder that --clone URL=FOLDER names. PATH finds
these stand-ins, so this is NOT a sandbox: a script that calls /usr/bin/apt calls the real program."""

_SHARED: dict[str, dict[str, Any]] = {  # arguments of several commands
    "file": {"metavar": "FILE", "help": "a YAML file with one IPUJob; - is standard input"},
    "--name": {"help": "the job's name, instead of the one in the file"},
    "--device": {
        "choices": ("cpu", "cuda"),
        "default": "cpu",
        "help": "the device of jobs that name none (cpu)",
    },
    "-n --namespace": {"help": "the jobs' namespace; by default the file's, or the kubeconfig's"},
}

Command = Callable[[argparse.Namespace], int]  # returns the exit code


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0; 1, if a job failed, or the cluster refuses or can't be
    reached; 2, if a file or the command line is wrong; 130 after Ctrl-C; for `run` that of the worker that
    failed."""
    arguments = _make_parser().parse_args(words)
    try:
        return arguments.run(arguments)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except (Refused, Unreachable) as error:
        print(f"ipujob: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # ends this command only: a job in a cluster continues
        return 130
    except BrokenPipeError:  # `ipujob render FILE | head`
        sys.stderr.close()
        return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "ipujob", description="Check IPUJob files, and run them here or in a Kubernetes cluster."
    )
    parser.add_argument("--version", action="version", version=f"ipujob of Pando {pando_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    assignments = dict[str, Any](type=lambda text: text.partition("=")[::2], action="append", default=[])

    def command(name: str, run: Command, summary: str, *shared: str, about: str = "") -> Callable[..., Any]:
        added = commands.add_parser(
            name, help=summary, description=about or f"{summary[0].upper()}{summary[1:]}."
        )
        added.set_defaults(run=run)
        for option in shared:
            added.add_argument(*option.split(), **_SHARED[option])
        return added.add_argument

    add = command("check", check_files, "print all faults of files; needs no cluster")
    add("files", nargs="+", metavar="FILE", help="a YAML file; - is standard input")

    summary = "print plain Kubernetes objects, for clusters without the operator"
    add = command("render", render_file, summary, "file", "--name", "--device")
    add("--as", dest="way", choices=("job", "pod", "jobset"), default="job", help="the kind of object (job)")
    add("--image", **assignments, metavar="OLD=NEW", help="replace an image; OLD can have *")
    add("--drop", default="", metavar="resources,security", help="remove these parts of the template")

    add = command("run", run_file, "run a file's workers here, as processes", "file", "--name", about=_LOCAL)
    add("--local", action="store_true", help="on this machine (required)")
    add("--command", metavar="TEXT", help="run this bash command instead of the file's")
    add("--clone", **assignments, metavar="URL=FOLDER", help="copy FOLDER when the job clones URL")
    add("--env", **assignments, metavar="NAME=VALUE", help="set an environment variable")
    add("--real", default="", metavar="NAME,...", help="call the real programs: apt, pip, git, ...")
    add("--keep", action="store_true", help="keep the folder with the workers' homes and logs")

    summary = "print the CRD and the operator: ipujob manifest | kubectl create -f -"
    add = command("manifest", print_operator, summary, "--device")
    add("--namespace", default="ipujob-system", help="the operator's namespace")
    add("--image", default="pando:latest", help="a container image with Pando")

    summary = "create the jobs of a file in a cluster"
    add = command("submit", remote.submit_file, summary, "file", "--name", "-n --namespace")
    add("--follow", action="store_true", help="print the log of worker 0 until the job ends")
    add("--wait", action="store_true", help="wait until the job ends: exit code 0 Completed, 1 Failed")

    add = command("status", remote.print_status, "list the jobs, or describe one", "-n --namespace")
    add("name", nargs="?", metavar="NAME", help="a job; by default all")
    add("--watch", action="store_true", help="print again after each change")

    add = command("logs", remote.print_logs, "print the output of workers", "-n --namespace")
    add("name", metavar="NAME", help="the job")
    add("--worker", type=int, default=0, metavar="K", help="the worker's number (0)")
    add("--all", action="store_true", help="all workers, with a name before each line")
    add("--follow", action="store_true", help="print new lines until the job ends")
    add("--previous", action="store_true", help="the output before the container's last restart")

    add = command("delete", remote.delete_jobs, "delete jobs and their pods", "-n --namespace")
    add("names", nargs="+", metavar="NAME", help="a job")
    add("--keep-pods", action="store_true", help="keep the pods, without an owner")

    summary = "run the IPUJobs of a cluster, until it is stopped"
    add = command("operator", operator.run_operator, summary, "--device")
    where = commands.choices["operator"].add_mutually_exclusive_group()
    where.add_argument("--namespace", help="by default the kubeconfig's")
    where.add_argument("--all-namespaces", action="store_true", help="all namespaces of the cluster")
    add("--images", metavar="FILE", help="a file of lines OLD=NEW that replace images")
    add("--alive", metavar="FILE", help="touch this file in each round")
    return parser


# ---- commands that need no cluster --------------------------------------------------------------------------------


def check_files(arguments: argparse.Namespace) -> int:
    """Print a line for each valid job of the files; return 0. Raises: InputError, of all files together."""
    faults: list[str] = []

    def collect(function: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return function(argument)
        except InputError as error:
            faults.append(str(error))
            return None

    for file in arguments.files:
        documents = collect(read_documents, file) or ()
        for document in [document for document in documents if document.kind == "IPUJob"] or documents:
            if job := collect(load_job, document):
                print(
                    f"{file}: {job.name}: {counted(job.instances, 'instance')} of"
                    f" {counted(job.workers, 'worker')}, in each worker {counted(job.replicas, 'replica')} of"
                    f" {counted(job.ipus_per_replica, 'ipu')}, mode {job.mode}"
                )
    if faults:
        raise InputError("\n".join(faults))
    return 0


def _split_words(option: str, text: str, choices: Sequence[str]) -> set[str]:
    """Return the comma-separated words of an option. Raises: InputError, if one is not in `choices`"""
    words = set(filter(None, text.split(",")))
    for word in sorted(words.difference(choices)):
        meant = did_you_mean(word, choices)
        raise InputError(f"ipujob: {option} {word}: only {', '.join(choices)} are known{meant}")
    return words


def render_file(arguments: argparse.Namespace) -> int:
    """Print the objects of a file's jobs, and its documents of other kinds, as YAML; return 0."""
    drops = _split_words("--drop", arguments.drop, DROPPABLE)
    printed: list[Any] = []
    for document in read_documents(arguments.file):
        if document.kind != "IPUJob":
            printed.append(document.value)
            continue
        document = with_overrides(document, arguments.name)
        job = load_job(document, arguments.device, arguments.image)
        job = dataclasses.replace(job, dropped=(*job.dropped, *drops))
        if faults := list(render.unsupported_fields(job, arguments.way)):
            raise document.error(faults)
        objects, left_out = render.render(job, arguments.way)
        if namespace := document.value["metadata"].get("namespace"):
            for resource in objects:
                resource["metadata"]["namespace"] = namespace
        printed += objects
        for text in left_out:
            print(document.located_message("", f"warning: {text}"), file=sys.stderr)
    _print_yaml(printed)
    return 0


def run_file(arguments: argparse.Namespace) -> int:
    """Run a file's jobs here, one after another, until a job fails; return that job's exit code, else 0."""
    if not arguments.local:
        fix = f"ipujob run --local {arguments.file}; or ipujob submit {arguments.file}, in a cluster"
        raise InputError(f"ipujob: run starts the workers on this machine, not in a cluster\n  fix: {fix}")
    for _, folder in arguments.clone:
        if not Path(folder).is_dir():
            raise InputError(f"ipujob: --clone: the folder {folder} doesn't exist")
    real = _split_words("--real", arguments.real, skipped_programs.ALL)
    variables, loaded = dict(arguments.env), []
    for document in read_documents(arguments.file):
        document = with_overrides(document, arguments.name, arguments.command)
        job = load_job(document, images=None)
        if faults := list(local.unsupported_fields(job, variables)):
            raise document.error(faults)
        loaded.append((document, job))
    for document, job in loaded:  # all of the file is checked before the first job runs
        if not job.instances:
            print(f"ipujob: {job.name}: no instances wanted", file=sys.stderr)
            continue
        ignored = ", ".join(local.ignored_fields(job))
        print(f"ipujob: {job.name}: not looked at here: {ignored}", file=sys.stderr)
        folder = Path(tempfile.mkdtemp(prefix="ipujob-"))
        try:
            skipped_programs.install_stand_ins(folder / "bin", dict(arguments.clone), real)
            code = local.LocalJob(document.value, job, folder, variables).run()
        finally:
            if arguments.keep:
                print(f"ipujob: {job.name}: homes and logs are in {folder}", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)
        if code:
            return code
    return 0


def print_operator(arguments: argparse.Namespace) -> int:
    """Print the objects that install the operator (with the CRD of IPUJobs) as YAML, and return 0."""
    text = resources.files("ipujob").joinpath("operator.yaml").read_text()
    words = {"NAMESPACE": arguments.namespace, "IMAGE": arguments.image, "DEVICE": arguments.device}
    _print_yaml([crd(), *yaml.safe_load_all(Template(text).safe_substitute(words))])
    return 0


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes a text of several lines as a block (`|`), and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        return super().represent_scalar(tag, value, "|" if "\n" in value else style)


def _print_yaml(objects: Sequence[Any]) -> None:
    print(yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=10**6), end="")
