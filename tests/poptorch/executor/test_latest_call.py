"""Performance counters: how many entries there are, and what the latencies make of them."""

import weakref

import pytest
import torch
from executor_models import Trained, batch, options, trainer

import poptorch
from poptorch.executor.calls import LatestCall

KEYS = ("input", "input_complete", "output", "output_complete")


def entries(executor):
    counters = executor.getPerfCounters()
    assert tuple(counters) == KEYS
    return [[len(times) for times in counters[key]] for key in KEYS]


def test_a_model_that_is_not_compiled_has_empty_counters():
    executor = poptorch.inferenceModel(Trained())
    assert executor.getPerfCounters() == {key: [[]] for key in KEYS}
    assert executor.getLatency() == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("mode", "outputs"),
    [("All", 4 * 2 * 2), ("Final", 2), ("Sum", 2), ("EveryN", 4 // 2 * 2 * 2)],
)
def test_there_is_one_entry_a_micro_batch_and_one_a_kept_output(mode, outputs):
    opts = options(iterations=4, accumulation=2, replicas=2)
    opts.outputMode(poptorch.OutputMode[mode], 2 if mode == "EveryN" else None)
    executor, _ = trainer(opts=opts)
    executor(*batch(16))
    executor(*batch(16))  # the latest call only
    assert entries(executor) == [[16, 16], [16, 16], [outputs, outputs], [outputs, outputs]]
    for latency in (
        executor.getLatency(),
        executor.getComputeLatency(),
        executor.getHostIpuLatency(),
        executor.getIpuHostLatency(),
    ):
        low, high, mean = latency
        assert 0 <= low <= mean <= high


def test_the_round_trip_is_longer_than_its_parts():
    executor = poptorch.inferenceModel(Trained(), options(iterations=3))
    executor(batch(3)[0])
    parts = executor.getHostIpuLatency(), executor.getComputeLatency(), executor.getIpuHostLatency()
    assert executor.getLatency()[2] == pytest.approx(sum(mean for _, _, mean in parts), rel=1e-6)


def test_synthetic_data_is_not_measured():
    executor = poptorch.inferenceModel(Trained(), options(iterations=3).enableSyntheticData(True))
    assert executor(batch(3)[0]).shape == (3, 2)
    assert entries(executor) == [[0]] * 4
    assert executor.getLatency() == (0.0, 0.0, 0.0)


def test_several_starts_lead_to_one_end():
    started, ended = [[0.0, 1.0, 4.0, 5.0], [0.5, 0.0, 6.0, 4.5]], [[3.0, 8.0]]
    # Starts are the earliest over the tensors, then over each group of two: 0 and 4.
    assert LatestCall([[started, [], [], ended]]).latency("input", min, "output_complete") == (3.0, 4.0, 3.5)


def test_destroy_forgets_the_times():
    executor, _ = trainer()
    executor(*batch())
    executor.destroy()
    assert entries(executor) == [[0]] * 4


def test_synthetic_data_has_an_empty_list_for_each_tensor():
    executor = poptorch.inferenceModel(lambda x, y: (x, y, x + y), options().enableSyntheticData(True))
    executor(torch.ones(2), torch.ones(2))
    assert entries(executor) == [[0] * 2, [0] * 2, [0] * 3, [0] * 3]


def test_an_output_is_freed_when_the_program_drops_it():
    # The executor kept the outputs of its latest call until the next one.
    executor = poptorch.inferenceModel(Trained(), options())
    output = executor(batch()[0])
    output = weakref.ref(output[0] if isinstance(output, tuple) else output)
    assert output() is None
