"""What holds for all tests."""

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("popdist")))  # `processes` and `ports` serve other folders, too

# A shell lets programs in its background ignore Ctrl-C, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads of an OpenMP team that has nothing to do sleep. They would spin, and keep a loaded machine's cores from
# other tests. OpenMP reads this when torch is loaded, here and in the programs that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Unbuffered, Python writes a line in several parts, and those of several instances mix.
os.environ.pop("PYTHONUNBUFFERED", None)
