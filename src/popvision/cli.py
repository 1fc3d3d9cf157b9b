"""The program `popvision`, which opens, prints and compares reports."""

import argparse
import os
import sys
import webbrowser
from pathlib import Path
from typing import Any

from popengine.command_parser import CommandParser
from popengine.environment import pando_version
from popengine.errors import did_you_mean
from popengine.profile import ProfileError

from .joined import load
from .report import find_profiles, summary, write_comparison, write_report

_REPORT = "a report's folder, or one profile.pop file in it"


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (None: that of this process) and return the exit code: 0; 1, after a message, if a file
    can't be read or written. Raises: SystemExit, if an argument is wrong"""
    given = sys.argv[1:] if arguments is None else arguments
    parser = _make_parser()
    if given and given[0] not in _COMMANDS and not given[0].startswith("-"):
        if not Path(given[0]).exists():
            known = ", ".join(_COMMANDS)
            parser.error(
                f"{given[0]!r} is not a command, a folder or a file{did_you_mean(given[0], _COMMANDS)}\n"
                f"  fix: the folder of a report, or one of the commands {known}"
            )
        given = ["report", *given]
    args = parser.parse_args(given)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reading end is closed: `popvision summary report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ProfileError, OSError) as error:
        print(f"popvision: {error}", file=sys.stderr)
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
    page: dict[str, Any] = {"type": Path, "metavar": "PAGE"}
    parsers = {}
    for name, (run, text) in _COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parsers[name].set_defaults(run=run)
        here: dict[str, Any] = {"help": _REPORT}
        if name in ("report", "summary"):
            here = {"help": f"{_REPORT} (report)", "nargs": "?", "default": Path("report")}
        parsers[name].add_argument("report", type=Path, metavar="REPORT", **here)
    add = parsers["report"].add_argument
    add("--no-browser", action="store_true", help="only write the page")
    add("--output", **page, help="the page to write (REPORT/report.html)")
    add = parsers["compare"].add_argument
    add("other", type=Path, metavar="OTHER", help="the other run's folder")
    add("--output", **page, default=Path("comparison.html"), help="the page to write (comparison.html)")
    add("--open", action="store_true", help="open the page in a browser")
    return parser


def _write_and_open_report(args: argparse.Namespace) -> None:
    profiles = find_profiles(args.report)
    for path in profiles:
        load(path)  # a profile that can't be read is an error here, not a page about one
    try:
        page = write_report(profiles[0].parent.parent, args.output)
    except OSError as error:
        raise ProfileError(
            f"the page can't be written: {error}\n  fix: --output PAGE, in a folder of yours"
        ) from None
    _print_and_open(page, not args.no_browser)


def _print_and_open(page: Path, in_browser: bool) -> None:
    print(page)
    if in_browser:
        webbrowser.open(page.resolve().as_uri())


def _print_summary(args: argparse.Namespace) -> None:
    print("\n".join(summary(load(path)) for path in find_profiles(args.report)), end="")


def _compare_reports(args: argparse.Namespace) -> None:
    print(write_comparison(args.report, args.other, args.output))
    _print_and_open(args.output, args.open)


_COMMANDS = {
    "report": (_write_and_open_report, "open a report in a browser"),
    "summary": (_print_summary, "print a report's figures"),
    "compare": (_compare_reports, "compare two runs"),
}
