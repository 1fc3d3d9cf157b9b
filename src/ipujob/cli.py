"""The program `ipujob`: its commands and their options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .documents import Faults

_LOCAL = """Run the file's workers as processes here. The file isn't changed: HOME is a new folder, apt, sudo, pip and
conda say that they were skipped, and `git clone URL` copies the folder given by --clone URL=FOLDER. These stand-ins
are found by PATH only, so this is NOT a sandbox: a script that writes /usr/bin/apt gets the real one."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code: 0, 1 (a job failed, a cluster refused), 2 (something was written wrongly)."""
    arguments = _parser().parse_args(words)
    try:
        return arguments.run(arguments)
    except Faults as faults:
        print(faults, file=sys.stderr)
        return 2
    except BrokenPipeError:  # `ipujob render FILE | head`
        sys.stderr.close()
        return 0


def _lazily(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """Commands load what they need when they run: most have no use for a cluster's client."""

    def run(arguments: argparse.Namespace) -> int:
        from importlib import import_module

        return getattr(import_module(f".{module}", __package__), name)(arguments)

    return run


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _clone(text: str) -> tuple[str, str]:
    url, _, folder = text.rpartition("=")
    if not (url and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form URL=FOLDER")
    return url, folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ipujob", description="Runs an IPUJob file here, or in a Kubernetes cluster."
    )
    parser.add_argument("--version", action="version", version=f"ipujob of Pando {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, module: str, says: str, more: str | None = None) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=says, description=more or says, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        added.set_defaults(run=_lazily(module, name))
        return added

    check = command("check", "files", "say everything that is wrong with files; needs no cluster")
    check.add_argument("files", nargs="+", metavar="FILE", help="- is standard input")

    render = command("render", "files", "print plain objects for clusters without our operator")
    render.add_argument("file", metavar="FILE")
    render.add_argument("--as", dest="way", choices=("job", "pod", "jobset"), default="job")
    render.add_argument("--name", help="in place of the file's name or generateName")
    render.add_argument(
        "--image", type=pair, action="append", default=[], metavar="OLD=NEW", help="OLD may hold *"
    )
    render.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the file doesn't say")
    render.add_argument(
        "--drop", default="", metavar="resources,security", help="leave these of the template away"
    )

    run = command("run", "files", "run a file's workers here, as processes", _LOCAL)
    run.add_argument("file", metavar="FILE")
    run.add_argument("--local", action="store_true", help="as processes here; the one way so far")
    run.add_argument("--name", help="in place of the file's name or generateName")
    run.add_argument(
        "--command", metavar="TEXT", help="run this text by bash instead of the file's command and args"
    )
    run.add_argument("--clone", type=_clone, action="append", default=[], metavar="URL=FOLDER")
    run.add_argument("--env", type=pair, action="append", default=[], metavar="NAME=VALUE")
    run.add_argument("--real", default="", metavar="NAME,...", help="take stand-ins away: apt, pip, git, ...")
    run.add_argument("--keep", action="store_true", help="leave the folder with the workers' homes and logs")

    manifest = command(
        "manifest", "files", "print the CRD and the operator: ipujob manifest | kubectl apply -f -"
    )
    manifest.add_argument("--namespace", default="ipujob-system", help="of the operator")
    manifest.add_argument("--image", default="pando:latest", help="with Pando in it")
    manifest.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of jobs that don't say")
    _add_cluster_commands(command)
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pando-torch")
    except PackageNotFoundError:
        return "(not installed)"


def _add_cluster_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    def with_namespace(*arguments: str) -> argparse.ArgumentParser:
        added = command(arguments[0], "remote", *arguments[1:])
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

    operator = command("operator", "operator", "bring a cluster's IPUJobs to their ends, for ever")
    where = operator.add_mutually_exclusive_group()
    where.add_argument("--namespace", help="this one only; else the kubeconfig's")
    where.add_argument("--all-namespaces", action="store_true")
    operator.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of jobs that don't say")
    operator.add_argument("--images", metavar="FILE", help="lines OLD=NEW: images that stand for others")
    operator.add_argument("--alive", metavar="FILE", help="touch this file in every round")
