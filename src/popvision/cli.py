"""The program `popvision`, which opens, prints and compares reports, exports traces and makes plans."""

import argparse
import gzip
import os
import sys
import webbrowser
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from popengine.environment import pando_version
from popengine.profile import ProfileError, load

from . import chrome
from .machine import MachineError, load_machines
from .plan import Estimates, compile_profiles
from .report import find_profiles, summary, write_comparison, write_report

_USAGE = """\
popvision REPORT                        open the report in a browser
       popvision summary REPORT                print its headline
       popvision compare REPORT OTHER          set two runs side by side
       popvision export REPORT TRACE.json      write a trace for Perfetto or chrome://tracing (.json.gz: smaller)
       popvision plan PROGRAM.py [ARGUMENT...] --on MACHINE,MACHINE...
                                               time, memory and cost of its first model there; nothing is computed"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (None: that of this process) and return the exit code: 1, with a message, if a file
    or machine can't be read, or a page can't be written; else 0. Raises: SystemExit, for wrong arguments."""
    given = sys.argv[1:] if arguments is None else arguments
    names = ("open", "summary", "compare", "export", "plan")
    if given and given[0] not in names and not given[0].startswith("-"):
        given = ["open", *given]
    if given[:1] == ["plan"]:
        given = _move_plan_options_first(given)
    args = _make_parser().parse_args(given)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reading end is closed: `popvision summary report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ProfileError, MachineError, OSError) as error:
        print(f"popvision: {error}", file=sys.stderr)
        return 1
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("popvision", usage=_USAGE, description="Shows profiles of Pando's runs.")
    parser.add_argument("--version", action="version", version=f"popvision of Pando {pando_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="popvision")

    def add_command(
        name: str, run: Callable[[argparse.Namespace], None], text: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text)
        added.set_defaults(run=run)
        return added

    command = add_command("open", _open_report, "open in a browser")
    command.add_argument("--no-browser", action="store_true", help="only write the page")
    for each in (command, add_command("summary", _print_summary, "print the headline")):
        each.add_argument("report", type=Path, help="a folder with profiles, or one profile.pop")
    command = add_command("compare", _compare_reports, "set two runs side by side")
    command.add_argument("report", type=Path)
    command.add_argument("other", type=Path)
    command.add_argument("--output", type=Path, default=Path("comparison.html"), help="the page to write")
    command.add_argument("--open", action="store_true", help="open the page in a browser")
    command = add_command("export", _export_trace, "write a Chrome trace")
    command.add_argument("report", type=Path)
    command.add_argument("trace", type=Path)
    command = add_command("plan", _plan_program, "plan a program on machines that need not be there")
    command.add_argument(
        "--on", default="bow-pod16", help="machines, or paths of TOML files, with commas between"
    )
    command.add_argument("--json", action="store_true", help="print the plan as JSON, and write no page")
    command.add_argument("--replicas", type=_parse_integers, default=[], help="choices to compare: 4,16,64")
    command.add_argument(
        "--accumulation", type=_parse_integers, default=[], help="choices to compare: 256,512"
    )
    command.add_argument("--output", type=Path, default=Path("plan.html"), help="the page to write")
    command.add_argument("program", nargs=argparse.REMAINDER, help="a Python program, and its arguments")
    return parser


def _parse_integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _move_plan_options_first(given: list[str]) -> list[str]:
    """Return the words of a command line of `popvision plan`, in an order that argparse can read: `plan`'s
    options, the program, the program's arguments.

    Before the program's name all options are `plan`'s. After it only `--on`, `--json`, and `--replicas` and
    `--accumulation` with several numbers (`4,16`) are `plan`'s; all others are the program's.
    """
    own, behind, words = ["plan"], [], iter(given[1:])
    for word in words:
        name, _, value = word.partition("=")
        if name in ("--on", "--replicas", "--accumulation", "--output"):
            taken = [word] if value else [word, *islice(words, 1)]
            is_plans = not behind or name == "--on" or (name != "--output" and "," in taken[-1])
            (own if is_plans else behind).extend(taken)
        elif word == "--json" or (word.startswith("-") and not behind):
            own.append(word)
        else:
            behind.append(word)
    return own + behind


def _open_report(args: argparse.Namespace) -> None:
    found = find_profiles(args.report)
    for path in found:
        load(path)  # a profile that can't be read is an error here, not a page about one
    _print_and_open(write_report(found[0].parent.parent), not args.no_browser)


def _print_and_open(page: Path, in_browser: bool) -> None:
    """Print the path of a page; open it in a browser if `in_browser`."""
    print(page)
    if in_browser:
        webbrowser.open(page.resolve().as_uri())


def _print_summary(args: argparse.Namespace) -> None:
    print("\n".join(summary(load(path)) for path in find_profiles(args.report)), end="")


def _compare_reports(args: argparse.Namespace) -> None:
    print(write_comparison(args.report, args.other, args.output))
    _print_and_open(args.output, args.open)


def _export_trace(args: argparse.Namespace) -> None:
    text = chrome.chrome_trace([load(path) for path in find_profiles(args.report)]).encode()
    args.trace.write_bytes(gzip.compress(text) if args.trace.suffix == ".gz" else text)
    print(args.trace)


def _plan_program(args: argparse.Namespace) -> None:
    if not args.program:
        raise ProfileError("popvision plan needs a program\n  fix: popvision plan train.py")
    chosen = load_machines(args.on)
    profiles = compile_profiles(args.program, list(dict.fromkeys(machine.kind for machine in chosen)))
    found = Estimates(profiles, chosen, args.replicas, args.accumulation)
    if args.json:
        print(found.to_json())
        return
    print("\n".join([str(found), *found.advice()]))
    found.save(args.output)
    print(args.output)
