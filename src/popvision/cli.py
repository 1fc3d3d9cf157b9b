"""The program `popvision`, which opens, prints and compares reports."""

import argparse
import os
import sys
import webbrowser
from pathlib import Path

from popengine.command_parser import CommandParser
from popengine.environment import pando_version
from popengine.errors import did_you_mean
from popengine.profile import ProfileError

from .joined import load
from .report import find_profiles, summary, write_comparison, write_report

_REPORT = "a report's folder (report), or one profile.pop file in it"


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (None: that of this process) and return the exit code: 0; 1, after a message, if a file
    can't be read or written. Raises: SystemExit, if an argument is wrong"""
    given = sys.argv[1:] if arguments is None else arguments
    parser = _make_parser()
    if given and given[0] not in _COMMANDS and (not given[0].startswith("-") or given[0][2:] in _COMMANDS):
        if not Path(given[0]).exists():
            near = did_you_mean(given[0], [*_COMMANDS, "--help", "--version", *map(str, Path().iterdir())])
            parser.error(
                f"{given[0]!r} is not a command, a folder or a file{near}\n"
                f"  fix: the folder of a report, or one of the commands {', '.join(_COMMANDS)}"
            )
        if len(given) > 1 and Path(given[1]).exists():
            parser.error(f"{given[1]} is a second report\n  fix: popvision compare {' '.join(given)}")
        given = ["report", *given]
    args = parser.parse_args(given)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reading end is closed: `popvision summary report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ProfileError as error:
        print(f"popvision: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        fix = "--output PAGE, in a folder of yours"
        print(f"popvision: the page can't be written: {error}\n  fix: {fix}", file=sys.stderr)
        return 1
    return 0


def _make_parser() -> argparse.ArgumentParser:
    about = (
        'Show and compare reports. A program writes a report with options.enableProfiling("report").'
        " `popvision REPORT` is short for `popvision report REPORT`."
    )
    parser = CommandParser("popvision", description=about)
    parser.add_argument("--version", action="version", version=f"popvision of Pando {pando_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="popvision")
    parsers = {}
    for name, (run, text) in _COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parsers[name].set_defaults(run=run)
        here = {"nargs": None if name == "compare" else "?", "default": Path("report")}
        parsers[name].add_argument("report", type=Path, metavar="REPORT", help=_REPORT, **here)
        about = argparse.SUPPRESS if name == "summary" else "open no browser"
        parsers[name].add_argument("--no-browser", action="store_true", help=about)
    parsers["compare"].add_argument("other", type=Path, metavar="OTHER", help="the other run's folder")
    for name, default in (("report", None), ("compare", Path("comparison.html"))):
        text = f"the page to write ({default or 'REPORT/report.html'})"
        parsers[name].add_argument("--output", type=Path, metavar="PAGE", default=default, help=text)
    return parser


def _write_and_open_report(args: argparse.Namespace) -> None:
    profiles = find_profiles(args.report)
    for path in profiles:
        load(path)  # a profile that can't be read is an error here, not a page about one
    _print_and_open(write_report(profiles[0].parent.parent, args.output), args)


def _print_and_open(page: Path, args: argparse.Namespace) -> None:
    print(page)
    if not args.no_browser:
        webbrowser.open(page.resolve().as_uri())


def _print_summary(args: argparse.Namespace) -> None:
    print("\n".join(summary(load(path)) for path in find_profiles(args.report)), end="")


def _compare_reports(args: argparse.Namespace) -> None:
    print(write_comparison(args.report, args.other, args.output))
    _print_and_open(args.output, args)


_COMMANDS = {
    "report": (_write_and_open_report, "open a report in a browser"),
    "summary": (_print_summary, "print a report's figures"),
    "compare": (_compare_reports, "compare two runs"),
}
