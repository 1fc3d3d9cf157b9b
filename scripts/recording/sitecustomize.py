"""Record which functions of Pando each test runs, in all of its processes (scripts/mutants.py).

Python imports this module at its start, if its folder is on PYTHONPATH. PANDO_RECORD is the path of two files without
their suffixes: `.test` has the name of the test that runs, and `.txt` gets a line for each function that it calls.
"""

import contextlib
import os
import sys
import threading

RECORD = os.environ.get("PANDO_RECORD", "")
seen: set[int] = set()  # ids of code objects in the present test


def trace(frame, event, argument):
    code = frame.f_code
    if id(code) not in seen:
        seen.add(id(code))
        if (
            "/src/po" in code.co_filename
            or "/src/ipujob" in code.co_filename
            or "/src/light" in code.co_filename
        ):
            # OSError: a test of a full disk is running.
            with (
                contextlib.suppress(OSError),
                open(f"{RECORD}.test") as test,
                open(f"{RECORD}.txt", "a") as file,
            ):
                file.write(f"{code.co_filename}:{code.co_firstlineno}\t{test.read()}\n")


def begin(test: str) -> None:
    """Record for a test from now on."""
    with open(f"{RECORD}.test", "w") as file:
        file.write(test)
    seen.clear()
    sys.settrace(trace)


if RECORD:
    threading.settrace(trace)
    if os.path.exists(f"{RECORD}.test"):
        sys.settrace(trace)
