"""Replaces itself by the program of one instance. Python runs this file without the package, in milliseconds.

    python -I -S instance.py AGENT PROGRAM [ARGS...]

Two settings of the process survive exec: the kernel kills it when its agent ends, and it runs on the cores of
POPRUN_CORES.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    """Execute the program in this process. Exit code 127: it can't be started; 1: the agent has ended."""
    agent, *program = sys.argv[1:]
    cores = os.environ.pop("POPRUN_CORES", "")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    if os.getppid() != int(agent):
        sys.exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(print_start_error(program, error.strerror))


def print_start_error(program, cause) -> int:
    """Print why a program can't be started, and the fix; return the exit code 127."""
    fix = "name a program on PATH, such as: poprun --num-replicas 2 --num-instances 2 python3 train.py"
    if " " in program[0]:
        fix = f"without quotes: poprun ... {program[0]}"
    elif program[0].endswith(".py"):
        fix = f"a file of Python is run by Python: poprun ... python3 {' '.join(program)}"
    print(f"poprun: {program[0]} can't be started: {cause}\n  fix: {fix}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    main()
