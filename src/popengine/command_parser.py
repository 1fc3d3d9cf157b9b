"""The parser of all commands: each error names the word that was meant, and the help that lists all words."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .errors import did_you_mean

_MEANT = {"list": "status", "create": "submit", "apply": "submit"}  # commands, by those of other programs


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are "PROGRAM: error: CAUSE", then a fix, with exit code 2."""

    _given = ""  # the words that are parsed

    def __init__(self, *args: Any, allow_abbrev: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=allow_abbrev, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words of a command. Exit if one is unknown, so that a subcommand names its own options."""
        args = sys.argv[1:] if args is None else args
        self._given, first = shlex.join(args), "".join(args[:1]).partition("=")[0]
        is_group = any(action.nargs == argparse.PARSER for action in self._actions)
        if is_group and first.startswith("-") and first not in self._option_string_actions:
            self.exit_for_unknown_option(first)
        parsed, rest = super().parse_known_args(args, namespace or argparse.Namespace())
        if unknown := [word for word in rest if word.startswith("-")]:
            self.exit_for_unknown_option(unknown[0].partition("=")[0])
        if rest:
            self.error(f"too many arguments: {' '.join(rest)}")
        return parsed, rest

    def exit_for_unknown_option(self, name: str) -> NoReturn:
        near = self._replaced(name, did_you_mean(name, self._option_string_actions))
        if name == "-f" and any(action.metavar == "FILE" for action in self._actions):
            near = f"\n  fix: {self.prog} {self._given.replace('-f ', '', 1)}"
        self.error(f"unknown option {name}{near}")

    def _replaced(self, word: str, near: str) -> str:
        """Return `near`, from `did_you_mean`, and the fix: the given words with the word that was meant."""
        _, *meant = near.split("'")
        return f"{near}\n  fix: {self.prog} {self._given.replace(word, meant[0], 1)}" if meant else near

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type is int and not re.fullmatch(r"[+-]?\d+", arg_string):
            self.error(f"{action.option_strings[0]} takes a whole number, such as 4; found {arg_string!r}")
        if re.fullmatch("[A-Z]+=[A-Z]+", str(action.metavar)) and not re.match(".+=", arg_string):
            self.error(f"{action.option_strings[0]} takes {action.metavar}; found {arg_string!r}")
        return super()._get_value(action, arg_string)  # type: ignore[misc]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = [str(choice) for choice in action.choices]
            name = action.metavar if isinstance(action.metavar, str) else "/".join(action.option_strings)
            others = {word: meant for word, meant in _MEANT.items() if meant in words}
            near = did_you_mean(str(value), [*words, *others, "--help"], shown=others)
            near = self._replaced(str(value), near)
            raise argparse.ArgumentError(None, f"unknown {name} {value!r}; known: {', '.join(words)}{near}")

    def error(self, message: str) -> NoReturn:
        given, missing = self._given, message.partition("arguments are required: ")[2].replace(",", "")
        if missing == "COMMAND":
            message += f", one of {', '.join(self._actions[-1].choices or ())}"
        words = "--help" if missing in ("", "COMMAND") else f"{given} {missing}".strip()
        fix = "" if "\n  fix: " in message else f"\n  fix: {self.prog} {words}"
        self.exit(2, f"{self.prog}: error: {message}{fix}\n")
