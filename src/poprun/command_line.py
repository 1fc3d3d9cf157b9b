"""The command line of poprun, as one frozen value.

Real command lines have values that begin with dashes, options cut short, and `=` or a blank before a value. So the
words are first joined to `--name=value`, and only then handed to argparse.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

YES, NO = ("yes", "true", "on", "1", "y", "t"), ("no", "false", "off", "0", "n", "f")


@dataclass(frozen=True)
class Request:
    """The options and the program of a command line."""

    program: tuple[str, ...]
    replicas: int = 1
    instances: int = 1
    ipus_per_replica: int = 1
    hosts: tuple[str, ...] = ()
    max_restarts: int = 0
    hang_timeout: float = 600  # seconds; 0: none
    variables: tuple[tuple[str, str], ...] = ()  # of `-x` and `--executable-cache-path`
    tags_output: bool = False
    only_output: int | None = None  # the instance whose output is shown
    only_stdout: int | None = None
    numa_aware: bool = False
    prints_topology: bool = False
    verbosity: int = 0
    recorded: tuple[str, ...] = ()  # options that were given and have no effect here
    ignored_mpi: tuple[str, ...] = ()  # words for MPI that have no effect here


def parse(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> Request:
    """Return the request of a command line. A faulty one ends the program, as argparse does: exit code 2."""
    parser = _Parser()
    own, program = parser.split(words)
    given = parser.parse_args(own)
    if given.import_config:
        parser.take_over(given.import_config)
        given = parser.parse_args(own)
    if given.export_config:
        parser.export(given, given.export_config)
    if not program:
        parser.error("the program is missing: poprun [options] program [args...]")
    for name in ("num_replicas", "num_instances", "ipus_per_replica"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(given, name)}")
    if not given.hang_timeout >= 0:
        parser.error(f"--hang-timeout must not be negative, got {given.hang_timeout:g}")
    if given.num_replicas % given.num_instances:
        parser.error(
            f"--num-replicas {given.num_replicas} is not a multiple of --num-instances {given.num_instances}: "
            "every instance runs the same number of replicas"
        )
    for name in ("only_output_from_instance", "only_stdout_from_instance"):
        chosen = getattr(given, name)
        if chosen is not None and not 0 <= chosen < given.num_instances:
            parser.error(
                f"--{name.replace('_', '-')} {chosen}: the instances are 0 to {given.num_instances - 1}"
            )
    mpi = _mpi(parser, " ".join([*given.mpi_global_args, *given.mpi_local_args]))
    variables = _variables([*mpi.x, *given.x], environment)
    if given.executable_cache_path:
        variables["POPTORCH_CACHE_DIR"] = str(Path(given.executable_cache_path).absolute())
    return Request(
        program=tuple(program),
        replicas=given.num_replicas,
        instances=given.num_instances,
        ipus_per_replica=given.ipus_per_replica,
        hosts=tuple(host.strip() for host in (given.host or "").split(",") if host.strip()),
        max_restarts=given.max_restarts,
        hang_timeout=given.hang_timeout,
        variables=tuple(variables.items()),
        tags_output=given.tag_output or mpi.tag_output,
        only_output=given.only_output_from_instance,
        only_stdout=given.only_stdout_from_instance,
        numa_aware=given.numa_aware,
        prints_topology=given.print_topology,
        verbosity=given.verbosity,
        recorded=tuple(name for name in _RECORDED if getattr(given, name.replace("-", "_")) is not None),
        ignored_mpi=tuple(mpi.ignored),
    )


# Options about IPU partitions, MPI and the Poplar SDK, none of which exist here.
_RECORDED = (
    *("vipu-partition", "vipu-server-host", "vipu-server-port", "vipu-server-timeout", "vipu-allocation"),
    *("vipu-cluster", "vipu-partition-attempts", "reset-partition", "update-partition", "remove-partition"),
    *("num-ilds", "sync-type", "host-subnet", "synchronise-python-venv", "synchronise-poplar-sdk"),
    *("distribute-ssh-key", "offline-mode"),
)
_SWITCHES = {"reset-partition", "update-partition", "remove-partition", "offline-mode"}


class _Parser(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(
            prog="poprun",
            usage="poprun [options] program [args...]",
            description="Start a training in several processes that add up their gradients.",
            epilog="Several popruns make one training where each has POPRUN_NUM_NODES, POPRUN_NODE_RANK, MASTER_ADDR "
            "and MASTER_PORT in its environment: each starts its node's share of the instances.",
        )
        self._actions_by_name: dict[str, argparse.Action] = {}
        add = self._add
        add("--num-replicas", type=int, default=1, metavar="N", help="replicas in all instances")
        add("--num-instances", type=int, default=1, metavar="N", help="processes; must divide the replicas")
        add("--ipus-per-replica", type=int, default=1, metavar="N", help="ipus that a replica's model uses")
        add("-H", "--host", metavar="A,B,...", help="hosts that share the instances, reached by ssh")
        add(
            "--max-restarts",
            type=int,
            default=0,
            metavar="N",
            help="start all again that often after a failure",
        )
        add(
            "--hang-timeout",
            type=float,
            default=600,
            metavar="SECONDS",
            help="end an instance that others wait for and that does nothing for so long (600); 0: never",
        )
        add("-x", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for all instances")
        add(
            "--executable-cache-path",
            metavar="DIR",
            help="where the first instance leaves compiled models as files",
        )
        self._add_switch("--tag-output", False, "begin each line with its instance's number")
        add("--only-output-from-instance", type=int, metavar="N", help="silence the others")
        add("--only-stdout-from-instance", type=int, metavar="N", help="silence the others' standard output")
        self._add_switch("--numa-aware", False, "keep each instance on the cores of one NUMA node")
        self._add_switch("--print-topology", False, "print which instance runs which replicas, and where")
        add(
            "--mpi-global-args", action="append", default=[], metavar="TEXT", help="-x and --tag-output count"
        )
        add("--mpi-local-args", action="append", default=[], metavar="TEXT", help="-x and --tag-output count")
        self._add_switch("--allow-run-as-root", None, "accepted; anybody may run poprun")
        add(
            "--import-config",
            metavar="FILE",
            help="options from a file; those on the command line come first",
        )
        add("--export-config", metavar="FILE", help="write the options to a file")
        add("-v", "--verbose", dest="verbosity", action="count", default=0, help="say more; -vv: say all")
        add("--vv", dest="verbosity", action="store_const", const=2, help=argparse.SUPPRESS)
        add("--version", action="version", version=f"poprun of Pando {_version()}")
        for name in _RECORDED:
            spellings = ["--update-partitions"] if name == "update-partition" else []
            if name in _SWITCHES:
                self._add_switch(f"--{name}", None, "accepted, of no effect here", *spellings)
            else:
                add(f"--{name}", metavar="VALUE", help="accepted, of no effect here")

    def _add(self, *names: str, **how: Any) -> argparse.Action:
        action = self.add_argument(*names, **how)
        self._actions_by_name |= dict.fromkeys(names, action)
        return action

    def _add_switch(self, name: str, default: bool | None, text: str, *spellings: str) -> None:
        self._add(name, *spellings, type=_switch, default=default, metavar="yes|no", help=text)

    def split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return poprun's own words, each with its value, and the program with its arguments."""
        own: list[str] = []
        rest = list(words)
        while rest and rest[0].startswith("-"):
            word = rest.pop(0)
            if word == "--":
                break
            name, equals, value = word.partition("=")
            if re.fullmatch(r"-v+", word) or name in ("-h", "--help"):
                own.append(word)
                continue
            action = self._named(name)
            if action.nargs == 0:  # it takes no value
                own.append(word)
            elif action.type is _switch and not equals:
                given = bool(rest) and rest[0].lower() in (*YES, *NO)
                own.append(f"{action.option_strings[0]}={rest.pop(0) if given else 'yes'}")
            else:
                if not equals and not rest:
                    self.error(f"argument {name}: a value is missing")
                full = action.option_strings[-1]
                between = "=" if full.startswith("--") else ""
                own.append(f"{full}{between}{value if equals else rest.pop(0)}")
        return own, rest

    def _named(self, name: str) -> argparse.Action:
        """Return the option of this name, or the only one that begins so."""
        known = self._actions_by_name
        if name in known:
            return known[name]
        meant = [full for full in known if name.startswith("--") and full.startswith(name)]
        if len({id(known[full]) for full in meant}) == 1:
            return known[meant[0]]
        if meant:
            self.error(f"{name} is ambiguous: {', '.join(meant)}")
        self.error(f"unknown option {name}")

    def take_over(self, path: str) -> None:
        """Use the values of a file of `export` as defaults."""
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            self.error(f"--import-config {path}: {error}")
        known = {action.dest for action in self._actions_by_name.values()}
        if not isinstance(values, dict) or set(values) - known:
            self.error(
                f"--import-config {path}: no file of --export-config; unknown: {sorted(set(values) - known)}"
            )
        self.set_defaults(**values)

    def export(self, given: argparse.Namespace, path: str) -> None:
        values = {name: value for name, value in vars(given).items() if not name.endswith("port_config")}
        Path(path).write_text(json.dumps(values, indent=2) + "\n")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"poprun: error: {message}\n  fix: poprun --help lists all options\n")


def _switch(text: str) -> bool:
    if text.lower() in (*YES, *NO):
        return text.lower() in YES
    raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")


@dataclass
class _Mpi:
    x: list[str]
    ignored: list[str]
    tag_output: bool = False


def _mpi(parser: _Parser, text: str) -> _Mpi:
    """Return the options for mpirun that have an effect here."""
    found = _Mpi([], [])
    words = shlex.split(text)
    while words:
        word = words.pop(0)
        if word == "-x":
            if not words:
                parser.error("-x in --mpi-*-args: the name of a variable is missing")
            found.x.append(words.pop(0))
        elif word in ("--tag-output", "-tag-output"):
            found.tag_output = True
        elif word != "--allow-run-as-root":
            found.ignored.append(word)
    return found


def _variables(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of words `NAME=VALUE`, or `NAME`, which has its value in the environment."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals or name in environment:
            found[name] = value if equals else environment[name]
    return found


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pando-torch")
    except PackageNotFoundError:
        return "(not installed)"
