"""The command line of poprun, as a frozen value.

Programs' command lines have values that begin with dashes, abbreviated options, and `=` or a blank before a value.
So each option is joined with its value to `--name=value` before argparse reads it.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from popengine.command_parser import CommandParser
from popengine.environment import CHECKPOINTS, WAIT_LIMIT, pando_version

from . import Log

YES, NO = ("yes", "true", "on", "1", "y", "t"), ("no", "false", "off", "0", "n", "f")


@dataclass(frozen=True)
class CommandLine:
    """The options and the program of a command line. A field with the name of an option has its value."""

    program: tuple[str, ...]
    replicas: int = 1
    instances: int = 1  # in an elastic run, the largest number
    fewest_instances: int = 0  # in an elastic run, the smallest number; 0: not elastic
    instances_per_node: int = 0  # the most instances of this node, if elastic; 0: an equal share
    checkpoint_dir: str = ""
    ipus_per_replica: int = 1
    hosts: tuple[str, ...] = ()
    max_restarts: int = 0  # after failures; in an elastic run: without a new checkpoint
    variables: tuple[tuple[str, str], ...] = ()  # of `-x` and of options that set one
    tags_output: bool = False
    only_output_from_instance: int | None = None  # the instance whose output is shown
    only_stdout_from_instance: int | None = None  # the instance whose standard output is shown
    numa_aware: bool = False
    print_topology: bool = False
    verbosity: int = 0
    warnings: tuple[str, ...] = ()  # about words that have no effect here

    @property
    def log(self) -> Log:
        return Log(self.verbosity)

    @property
    def is_elastic(self) -> bool:
        return self.fewest_instances > 0


def parse(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> CommandLine:
    """Return a parsed command line; write the file of --export-config. After an error exit with code 2. An option
    `-x NAME` without a value takes the variable's value from `environment`."""
    parser = _Parser()
    given, program = parser.split_program(words)
    options = parser.parse_args(given)
    if options.import_config:
        parser.set_defaults_from_file(options.import_config)
        options = parser.parse_args(given)
    if options.export_config:
        values = {name: value for name, value in vars(options).items() if not name.endswith("port_config")}
        try:
            Path(options.export_config).write_text(json.dumps(values, indent=2) + "\n")
        except OSError as error:
            parser.error(f"--export-config: {error}\n  fix: --export-config poprun.json")
    if not program:
        parser.error("the program is missing\n  fix: poprun [options] program [args...]")
    parser.check_program(program)
    options.fewest_instances, options.instances = parser.check_number_options(options)
    mpi, ignored_mpi = parser.parse_mpi_options([*options.mpi_global_args, *options.mpi_local_args])
    pairs = [word.partition("=") for word in (*mpi.x, *options.x)]
    for name, _, _ in pairs:
        # The name becomes part of a shell script on other hosts.
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            parser.error(f"argument -x: {name!r} is not the name of an environment variable")
    assigned = [pair for pair in pairs if pair[1] or pair[0] in environment]
    variables = {name: value if equals else environment[name] for name, equals, value in assigned}
    if options.executable_cache_path:
        variables["POPTORCH_CACHE_DIR"] = str(Path(options.executable_cache_path).absolute())
    if options.wait_limit is not None:
        variables[WAIT_LIMIT] = f"{options.wait_limit:g}"
    if options.checkpoint_dir:
        options.checkpoint_dir = variables[CHECKPOINTS] = str(Path(options.checkpoint_dir).absolute())
        if Path(options.checkpoint_dir).is_file():
            parser.error(f"{options.checkpoint_dir} is a file\n  fix: --checkpoint-dir checkpoints")
    if options.max_restarts is None:
        options.max_restarts = 3 if options.fewest_instances else 0
    options.program, options.variables = tuple(program), tuple(variables.items())
    options.replicas, options.tags_output = options.num_replicas, options.tag_output or mpi.tag_output
    options.hosts = tuple(host.strip() for host in (options.host or "").split(",") if host.strip())
    recorded = ", ".join(f"--{x}" for x in _RECORDED if getattr(options, x.replace("-", "_")) is not None)
    without = {"IPUs": recorded, "MPI": " ".join(ignored_mpi)}
    unset = [name for name in options.x if "=" not in name and name not in environment]
    options.warnings = (
        *(f"no effect without {what}: {names}" for what, names in without.items() if names),
        *(f"-x {name} has no effect: {name} is not set here\n  fix: -x {name}=VALUE" for name in unset),
        *(f"{x} stands after the program, so the program gets it" for x in parser.misplaced(program, given)),
    )
    return CommandLine(**{field.name: getattr(options, field.name) for field in fields(CommandLine)})


def can_run(replicas: int, ipus: int, instances: int) -> bool:
    """Return whether each of the instances can run equally many replicas, or equally many ipus of one replica."""
    return replicas % instances == 0 or (instances % replicas == 0 and ipus % (instances // replicas) == 0)


# Options about IPU partitions, MPI and the Poplar SDK, none of which exist here.
_RECORDED = (
    *("vipu-partition", "vipu-server-host", "vipu-server-port", "vipu-server-timeout", "vipu-allocation"),
    *("vipu-cluster", "vipu-partition-attempts", "reset-partition", "update-partitions", "remove-partition"),
    *("num-ilds", "sync-type", "host-subnet", "synchronise-python-venv", "synchronise-poplar-sdk"),
    *("distribute-ssh-key", "offline-mode"),
)
# The least values of options; of other numbers 0.
_LEAST = {"num_replicas": 1, "num_instances": 1, "ipus_per_replica": 1, "wait_limit": 1}
_SWITCHES = {"allow-run-as-root", "reset-partition", "update-partitions", "remove-partition", "offline-mode"}
_AFTER_OPTIONS = (  # the paragraphs of --help that follow the options
    "Example: poprun --num-instances 2 --num-replicas 2 python3 train.py",
    "To train on several nodes without ssh, start poprun on each node, with POPRUN_NUM_NODES, POPRUN_NODE_RANK,"
    " MASTER_ADDR and MASTER_PORT set. Each poprun starts its share of the instances.",
    f"Accepted, without effect: {', '.join(f'--{name}' for name in ('allow-run-as-root', *_RECORDED))}",
)


class _Parser(CommandParser):
    """The parser of poprun's options. After an error its methods print the error and exit with code 2."""

    def __init__(self) -> None:
        super().__init__(
            prog="poprun",
            allow_abbrev=True,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34),
            usage="poprun [options] program [args...]",
            description="Run a program in several processes (instances) that exchange gradients.",
            epilog="\n\n".join(textwrap.fill(text, 79, break_on_hyphens=False) for text in _AFTER_OPTIONS),
        )
        number = {"type": int, "metavar": "N"}
        several = {"action": "append", "default": []}
        switch = {"type": _parse_yes_or_no, "metavar": "yes|no"}
        add = self.add_argument
        add("--num-replicas", **number, default=1, help="replicas in all instances together (1)")
        add("--num-instances", default="1", metavar="N", help="processes (1); 2:8 starts an elastic run")
        add(
            "--checkpoint-dir",
            default="",
            metavar="DIR",
            help="the folder of popdist.Checkpoint, on all hosts",
        )
        add("--instances-per-node", **number, default=0, help="elastic: the most that this node runs")
        add("--ipus-per-replica", **number, default=1, help="ipus that one replica of the model uses (1)")
        add("-H", "--host", metavar="A,B,...", help="hosts that share the instances; ssh starts them")
        add("--max-restarts", **number, help="restarts after failures (0; elastic: 3)")
        add("--wait-limit", **number, help="seconds that an instance waits for another (1800)")
        add("-x", **several, metavar="NAME[=VALUE]", help="set an environment variable in all instances")
        add("--executable-cache-path", metavar="DIR", help="sets POPTORCH_CACHE_DIR; has no effect")
        add("--tag-output", **switch, default=False, help="begin each line with its instance's number (no)")
        add("--only-output-from-instance", **number, help="show the output of this instance only")
        add("--only-stdout-from-instance", **number, help="show the standard output of this instance only")
        add("--numa-aware", **switch, default=False, help="bind instances to the cores of a NUMA node (no)")
        add("--print-topology", **switch, default=False, help="print which replicas each instance runs (no)")
        for name in ("--mpi-global-args", "--mpi-local-args"):
            add(name, **several, metavar="TEXT", help="only -x and --tag-output in it have an effect")
        add("--import-config", metavar="FILE", help="read options from a file; those of the command line win")
        add("--export-config", metavar="FILE", help="write the options to a file")
        add("-v", "--verbose", dest="verbosity", action="count", default=0, help="print more; -vv: all")
        add("--vv", dest="verbosity", action="store_const", const=2, help=argparse.SUPPRESS)
        add("--version", action="version", version=f"poprun of Pando {pando_version()}")
        for name in ("allow-run-as-root", *_RECORDED):
            conversion: dict[str, Any] = {"type": _parse_yes_or_no} if name in _SWITCHES else {}
            add(f"--{name}", **conversion, help=argparse.SUPPRESS)

    def split_program(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return poprun's own options, each joined with its value, and the program with its arguments."""
        arguments: list[str] = []
        self._given, rest = shlex.join(words), list(words)
        while rest and rest[0].startswith("-"):
            word = rest.pop(0)
            if word == "--":
                break
            name, equals, value = word.partition("=")
            action = self._find_option(name, [value, *rest]) if not re.fullmatch(r"-v+", word) else None
            if action and action.nargs == 0 and equals:
                self.error(f"{name} takes no value\n  fix: {name}; or -vv, which prints all")
            if action is None or action.nargs == 0:  # the option takes no value
                arguments.append(word)
            elif action.type is _parse_yes_or_no and not equals:
                has_value = bool(rest) and rest[0].lower() in (*YES, *NO)
                if rest and not has_value and rest[0].isalpha() and shutil.which(rest[0]) is None:
                    self.error(
                        f"{name} takes yes or no, or stands alone; found {rest[0]!r}\n  fix: {name} yes"
                    )
                arguments.append(f"{action.option_strings[0]}={rest.pop(0) if has_value else 'yes'}")
            else:
                if not equals and not rest:
                    self.error(f"argument {name}: a value is missing")
                full = action.option_strings[-1]
                between = "=" if full.startswith("--") else ""
                arguments.append(f"{full}{between}{value if equals else rest.pop(0)}")
        return arguments, rest

    def check_program(self, program: Sequence[str]) -> None:
        """Exit if the first word of the program is an option without its dashes, or sets a variable."""
        name, equals, _ = program[0].partition("=")
        if f"--{name}" in self._option_string_actions and shutil.which(name) is None:
            self.error(f"{program[0]!r} is no program\n  fix: poprun --{' '.join(program)}")
        if equals and name.isidentifier():
            self.error(f"{program[0]!r} is no program\n  fix: -x {program[0]} sets it in all instances")

    def misplaced(self, words: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
        """Return the names of poprun's options in `words`, without those in `given` and those of most programs."""
        given = [word.partition("=")[0] for word in (*given, "--help", "--version", "--verbose")]
        options = self._option_string_actions.keys() - given
        names = (word.partition("=")[0] for word in words if word.startswith("--"))
        return tuple(filter(options.__contains__, names))

    def _find_option(self, name: str, following: Sequence[str]) -> argparse.Action:
        """Return the option `name`, or the only option that begins with `name`; exit if there is none. `following`: the
        words after `name` on the command line."""
        actions = self._option_string_actions
        if name in actions:
            return actions[name]
        meant = [full for full in actions if name.startswith("--") and full.startswith(name)]
        if len({id(actions[full]) for full in meant}) == 1:
            return actions[meant[0]]
        if name in ("-n", "-np", "--np", "--nproc-per-node", "--nproc_per_node"):  # of mpirun and torchrun
            count = next(filter(str.isdigit, following), "N")
            self.error(f"unknown option {name}\n  fix: --num-instances {count} --num-replicas {count}")
        if name == "-m":  # of Python
            self.error(f"unknown option -m\n  fix: poprun {self._given.replace('-m', 'python3 -m', 1)}")
        if meant:
            self.error(f"{name} is ambiguous: {', '.join(meant)}")
        self.exit_for_unknown_option(name)

    def set_defaults_from_file(self, path: str) -> None:
        """Set the values in a file of `--export-config` as defaults; exit if the file is not of this kind."""
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            self.error(
                f"--import-config {path}: {error}\n  fix: name a file that --export-config has written"
            )
        unknown = set(values) - {action.dest for action in self._actions}
        if not isinstance(values, dict) or unknown:
            self.error(f"--import-config {path}: no file of --export-config; unknown: {sorted(unknown)}")
        self.set_defaults(**values)

    def check_number_options(self, options: argparse.Namespace) -> tuple[int, int]:
        """Check the options that are numbers; return the smallest (0: not elastic) and largest possible number of
        instances."""
        text, replicas = str(options.num_instances), options.num_replicas
        if not re.fullmatch(r"\d+(:\d+)?", text):
            self.error(f"argument --num-instances: invalid value: {text!r}\n  fix: a number, or 2:8")
        smallest, *largest = map(int, text.split(":"))
        for name, value in {**vars(options), "num_instances": smallest}.items():
            if isinstance(value, int) and value < (least := _LEAST.get(name, 0)):
                option = f"--{name.replace('_', '-')}"
                self.error(f"{option} must be at least {least}, got {value}\n  fix: {option} {least}")
        fewest, most = (smallest, *largest) if largest else (0, smallest)
        if fewest > most:
            self.error(
                f"--num-instances {text}: the smaller number is first\n  fix: --num-instances {most}:{fewest}"
            )
        if fewest and not options.checkpoint_dir:
            self.error(f"--num-instances {text} needs a folder\n  fix: add --checkpoint-dir DIR")
        ipus, counts = options.ipus_per_replica, range(fewest or most, most + 1)
        possible = [count for count in counts if can_run(replicas, ipus, count)]
        if not possible:
            meant = f"any number from {fewest} to {most}" if fewest else f"--num-instances {most}"
            fits = [str(count) for count in range(1, replicas * ipus + 1) if can_run(replicas, ipus, count)]
            fixes = [f"--num-instances {' or '.join(fits)}"] if len(fits) > 1 else []
            fixes += [f"--num-replicas {-(-replicas // most) * most}, which makes the effective batch larger"]
            if most > replicas and most % replicas == 0:
                several = most // replicas
                fixes += [f"--ipus-per-replica {several}, for replicas of {several} instances each"]
            self.error(
                f"--num-replicas {replicas}{' (the default)' * (replicas == 1)} is not a multiple of {meant}: every"
                f" instance runs the same number of replicas\n  fix: {'; or '.join(fixes)}"
            )
        for name in ("only_output_from_instance", "only_stdout_from_instance"):
            chosen = getattr(options, name)
            if chosen is not None and chosen >= most:
                option, last = f"--{name.replace('_', '-')}", most - 1
                self.error(f"{option} {chosen}: the instances are 0 to {last}\n  fix: {option} {last}")
        return possible[0] if fewest else 0, possible[-1]

    def parse_mpi_options(self, texts: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options of the texts of --mpi-*-args that have an effect here, and all other words."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.error = lambda message: self.error(f"in --mpi-*-args: {message}")
        parser.add_argument("-x", action="append", default=[], metavar="NAME[=VALUE]")
        parser.add_argument("--tag-output", "-tag-output", action="store_true")
        parser.add_argument("--allow-run-as-root", action="store_true")
        try:
            return parser.parse_known_args(shlex.split(" ".join(texts)))
        except ValueError as error:
            parser.error(f"{error}: {' '.join(texts)}")


def _parse_yes_or_no(text: str) -> bool:
    """Return whether a text means yes. Raises: ArgumentTypeError, if it means neither yes nor no."""
    if text.lower() in (*YES, *NO):
        return text.lower() in YES
    raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
