"""Where set_overlap_for_input and set_overlap_for_output may stand."""

import pytest
import torch

import poptorch

MODE = poptorch.OverlapMode.OverlapAccumulationLoop
X = torch.ones(2, 3)


def on_input(x):
    return poptorch.set_overlap_for_input(x, MODE)


def on_output(x):
    return poptorch.set_overlap_for_output(x, MODE)


def run(forward, *, tiles=True, strategy=None, mode=poptorch.OutputMode.All):
    options = poptorch.Options().outputMode(mode)
    options.setExecutionStrategy(strategy or poptorch.ShardedExecution())
    if tiles:
        options.TensorLocations.numIOTiles(32)
    return poptorch.inferenceModel(forward, options)(X)


def test_marks_at_the_ends_of_a_sharded_model_change_no_result():
    assert torch.equal(run(lambda x: on_output(on_input(x) + 1)), X + 1)


def test_the_mode_without_overlap_may_stand_anywhere():
    none = poptorch.OverlapMode.NoOverlap
    found = poptorch.inferenceModel(lambda x: poptorch.set_overlap_for_input(x + 1, none) + 1)(X)
    assert torch.equal(found, X + 2)


def test_overlap_needs_tiles():
    with pytest.raises(poptorch.Error, match=r"numIOTiles\(32\)"):
        run(lambda x: on_input(x) + 1, tiles=False)


def test_overlap_is_not_for_pipelines():
    with pytest.raises(poptorch.Error, match=r"Overlapped IO is not supported.*PipelinedExecution"):
        run(lambda x: on_input(x) + 1, strategy=poptorch.PipelinedExecution())


@pytest.mark.parametrize("forward", [lambda x: on_input(x + 1) + 1, lambda x: on_input(x) + x])
def test_overlap_of_an_input_is_its_only_use(forward):
    with pytest.raises(poptorch.Error, match=r"set_overlap_for_input is misplaced.*its only use"):
        try:
            run(forward)
        except poptorch.Error as error:
            raise poptorch.Error(error.message.replace("\n", " ")) from None


def twice(x):
    y = on_output(x + 1)
    return y, y


@pytest.mark.parametrize("forward", [lambda x: on_output(x + 1) + 1, twice])
def test_overlap_of_an_output_is_of_one_that_is_returned(forward):
    with pytest.raises(poptorch.Error, match="set_overlap_for_output is misplaced"):
        run(forward)


@pytest.mark.parametrize("forward", [lambda x: on_output(x + 1) + 1, twice, lambda x: on_input(x + 1)])
@pytest.mark.parametrize(
    "options",
    [{"tiles": False}, {"strategy": poptorch.PipelinedExecution()}, {"mode": poptorch.OutputMode.Final}],
)
def test_a_misplaced_mark_is_told_before_options_that_do_not_fit(forward, options):
    with pytest.raises(poptorch.Error, match="is misplaced"):
        run(forward, **options)


def test_an_output_with_overlap_may_also_be_used():
    def forward(x):
        y = on_output(x + 1)
        return y, y * 2

    first, second = run(forward)
    assert torch.equal(first, X + 1)
    assert torch.equal(second, (X + 1) * 2)


@pytest.mark.parametrize("mode", [poptorch.OutputMode.Final, poptorch.OutputMode.EveryN])
def test_overlap_of_an_output_needs_all_of_them(mode):
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    options.outputMode(mode, 1 if mode == poptorch.OutputMode.EveryN else None)
    options.TensorLocations.numIOTiles(32)
    with pytest.raises(poptorch.Error, match=r"OutputMode.All or OutputMode.Sum"):
        poptorch.inferenceModel(lambda x: on_output(x + 1), options)(X)
