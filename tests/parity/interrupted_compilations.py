"""Ctrl-C at many places of a first call: `python interrupted_compilations.py 500` does it so often, evenly spread.

A program of its own, as an exception at a wrong place inside torch ends the process. After each interrupt nothing
of the capture may be left: no mode, no fake tensor in the model, and another model trains with the same bits.
"""

import copy
import signal
import sys

import torch
from parity_models import OnTwoIpus

import poptorch


class Interrupt:
    """Sends this process a SIGINT at the profiler's event of a number; without one it counts the events."""

    def __init__(self, at=None):
        self.events, self._at, self.where = 0, at, None

    def __call__(self, frame, event, argument):
        if self.events == self._at:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({event})"
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)
        self.events += 1


def trainer(model):
    options = poptorch.Options().randomSeed(5).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(3)
    return poptorch.trainingModel(model, options, poptorch.optim.Adam(model.parameters(), lr=0.1))


def interrupted(model, batch, interrupt):
    """Whether a first call, or its end, was interrupted."""
    executor = trainer(model)
    sys.setprofile(interrupt)
    try:
        executor(batch)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        executor.destroy()
    return False


def main(count):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    torch.manual_seed(0)
    plain, batch = OnTwoIpus(dropout=0.1), torch.randn(6, 3)
    expected = trainer(copy.deepcopy(plain))(batch)
    counted = Interrupt()
    interrupted(copy.deepcopy(plain), batch, counted)
    found = 0
    for number in range(count):
        model, interrupt = copy.deepcopy(plain), Interrupt(number * counted.events // count)
        found += interrupted(model, batch, interrupt)
        assert torch._C._len_torch_function_stack() == 0, interrupt.where
        assert torch.is_grad_enabled() and not torch.compiler.is_compiling(), interrupt.where
        poptorch.removeBlocks(model)
        assert model(batch).item() >= 0, interrupt.where  # its weights have values
        assert torch.equal(trainer(copy.deepcopy(plain))(batch), expected), interrupt.where
    # The rest came where Python raises nothing: in a destructor, or a generator's end.
    assert found > 0.9 * count, found
    print(f"{count} interrupts")


if __name__ == "__main__":
    main(int(sys.argv[1]))
