"""Ranges of the host's code in a trace of torch.profiler."""

import pytest
from torch.profiler import ProfilerActivity, profile

import poptorch


class Worker:
    def work(self, x):
        """Doubles."""
        return x * 2


def test_tracepoints_and_instrumented_methods_are_ranges():
    channel = poptorch.profiling.Channel("host")
    worker = Worker()
    channel.instrument(worker, "work")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        assert worker.work(2) == 4
        with channel.tracepoint("epoch"):
            pass
    names = {event.name for event in trace.events() or []}
    assert {"host.Worker.work", "host.epoch"} <= names
    assert worker.work.__doc__ == "Doubles."
    with pytest.raises(AttributeError):
        channel.instrument(worker, "rest")
