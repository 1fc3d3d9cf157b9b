"""Runs trials for some seconds, or a number of trials; ends with 1, and a program, at the first failure."""

import argparse
import faulthandler
import logging
import sys
import time
import warnings

from .trials import trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--trials", type=int, help="run this number of trials, however long they take")
    parser.add_argument("--seed", type=int, default=0, help="another seed tries other models")
    parser.add_argument("--first", type=int, default=0, help="the trial to begin with")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("poptorch::python").setLevel(logging.ERROR)
    until, number = time.monotonic() + given.seconds, given.first

    def is_enough() -> bool:
        return time.monotonic() >= until if given.trials is None else number - given.first >= given.trials

    while number == given.first or not is_enough():
        faulthandler.dump_traceback_later(300, exit=True)  # a trial that hangs is a failure, too
        wrong = trial(f"{given.seed}.{number}")
        faulthandler.cancel_dump_traceback_later()
        if wrong is not None:
            print(f"seed {given.seed}, trial {number}:\n{wrong}")
            print(f"again: python -m tests.fuzz --seed {given.seed} --first {number} --seconds 1")
            return 1
        number += 1
    print(f"seed {given.seed}: {number - given.first} random models, no difference")
    return 0


sys.exit(main())
