"""Flags, and named configs in a YAML file: built-in defaults < config < command line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

TRUE, FALSE = ("true", "t", "1", "yes", "y"), ("false", "f", "0", "no", "n")


def boolean(text: str) -> bool:
    if text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    raise argparse.ArgumentTypeError(f"{text!r} is not a valid boolean value (true or false)")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be between 0 and 1")
    return number


def add_switch(parser: Any, *names: str, default: bool, help: str) -> None:
    """A boolean flag: `--flag` alone is true, and `--flag false` is false."""
    parser.add_argument(
        *names, type=boolean, nargs="?", const=True, default=default, metavar="BOOL", help=help
    )


def near(name: str, known: Iterable[str]) -> str:
    """The known names that look like this one, for an error's message; all of them if none does."""
    known = sorted(known)
    return ", ".join(difflib.get_close_matches(name, known, n=4, cutoff=0.5) or known)


class Flags(argparse.Namespace):
    """The flags' values; `sources` says where each one came from."""

    sources: dict[str, str]

    def named(self, *names: str) -> str:
        """Flags with their values and where they came from, for errors: `--lr 1.0 (config 'big')`."""
        return ", ".join(
            f"--{name.replace('_', '-')} {_shown(getattr(self, name))} ({self.sources[name]})"
            for name in names
        )


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    configs: Path | None = None,
    default: str | None = None,
) -> Flags:
    """Parse a command line; where there are configs, first for `--config` alone, whose values are defaults then.

    Ends the program with a usage error where a config or one of its keys is unknown.
    """
    known = {action.dest: action for action in parser._actions}
    wanted = None if configs is None else _wanted(argv, default)
    name, values = (None, {}) if wanted is None else _config(parser, configs, wanted)
    for key, value in values.items():
        if key not in known:
            parser.error(
                f"{configs.name}: config {name!r} has an unknown key {key!r}; near it: {near(key, known)}"
            )
        known[key].default = _checked(parser, known[key], value, f"{configs.name}: config {name!r}: {key}")
    flags = parser.parse_args(argv, namespace=Flags())
    typed = _typed(parser, argv)
    flags.sources = {
        key: "command line" if key in typed else f"config {name!r}" if key in values else "default"
        for key in known
    }
    flags.config = name
    return flags


def _wanted(argv: Sequence[str] | None, default: str | None) -> str | None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--config", default=default)
    return first.parse_known_args(argv)[0].config


def _config(parser: argparse.ArgumentParser, path: Path, wanted: str) -> tuple[str, dict[str, Any]]:
    """A config by its name: as it is written, else without regard to case."""
    configs = {name: values for name, values in yaml.safe_load(path.read_text()).items() if name[0] != "."}
    by_case = {name.lower(): name for name in configs}
    name = wanted if wanted in configs else by_case.get(wanted.lower())
    if name is None:
        parser.error(f"{path.name} has no config {wanted!r}; near it: {near(wanted, configs)}")
    return name, configs[name]


def _checked(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> Any:
    """A value from YAML, converted and checked as the flag's own would be."""
    many = isinstance(value, list)
    try:
        found = [_converted(action, each) for each in (value if many else [value])]
    except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
        return _refuse(parser, where, error)
    if action.choices is not None and not set(found) <= set(action.choices):
        _refuse(parser, where, f"{value!r} is none of {', '.join(map(str, action.choices))}")
    return found if many or action.nargs == "+" else found[0]


def _converted(action: argparse.Action, value: Any) -> Any:
    if value is None or action.type is None or isinstance(value, dict):
        return value
    return action.type(str(value))  # type: ignore[operator]


def _refuse(parser: argparse.ArgumentParser, where: str, why: Any) -> NoReturn:
    parser.error(f"{where}: {why}")


def _typed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> set[str]:
    """The flags that were given on the command line."""
    before, more = {action: action.default for action in parser._actions}, parser._defaults
    for action in before:
        action.default = argparse.SUPPRESS
    parser._defaults = {}
    try:
        return set(vars(parser.parse_args(argv)))
    finally:
        parser._defaults = more
        for action, default in before.items():
            action.default = default
