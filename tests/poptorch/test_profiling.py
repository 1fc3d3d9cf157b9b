"""Ranges of the host's code in a trace of torch.profiler."""

import pytest
from torch.profiler import ProfilerActivity, profile

import poptorch


class Worker:
    def work(self, x):
        """Doubles."""
        return x * 2


class Player:
    def play(self):
        return "played"


def test_tracepoints_and_instrumented_methods_are_ranges():
    channel = poptorch.profiling.Channel("host")
    worker = Worker()
    channel.instrument(worker, "work")
    channel.instrument(Player, "play")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        assert worker.work(2) == 4
        assert Player().play() == "played"
        with channel.tracepoint("epoch"):
            pass
    names = {event.name for event in trace.events() or []}
    assert {"host.Worker.work", "host.Player.play", "host.epoch"} <= names
    assert worker.work.__doc__ == "Doubles."
    with pytest.raises(AttributeError):
        channel.instrument(worker, "rest")
