"""What holds for all tests."""

import os
import signal

# A shell lets programs in its background ignore Ctrl-C, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Unbuffered, Python writes a line in several parts, and those of several instances mix.
os.environ.pop("PYTHONUNBUFFERED", None)
