"""Execution strategies: what may be written, and the engine's value of it."""

import copy
import pickle

import pytest
import torch

import poptorch
from popengine.errors import Error
from popengine.order import ORDERS, Order
from popengine.settings import StagePlan, Strategy
from poptorch.annotating.strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from poptorch.enums import AutoStage, Liveness


def test_a_stage_holds_block_ids_and_perhaps_an_ipu():
    stage = Stage("a", "b")
    assert stage.blocks == ["a", "b"]
    assert stage.ipu(2) is stage
    assert repr(stage) == "Stage('a', 'b').ipu(2)"
    with pytest.raises(AssertionError, match=r"Block ids are strings.* found 1"):
        Stage("a", 1)
    with pytest.raises(AssertionError, match=r"Stage\.ipu takes an int from 0; found '2'"):
        stage.ipu("2")


def test_without_arguments_stages_are_the_same_as_ipus():
    assert PipelinedExecution().freeze() == Strategy("1f1b", "same_as_ipu", ())
    assert PipelinedExecution(AutoStage.AutoIncrement).freeze() == Strategy("1f1b", "auto_increment", ())
    assert ShardedExecution(AutoStage.SameAsIpu).freeze() == Strategy("sharded", "same_as_ipu", ())


def test_a_stage_is_a_block_a_list_of_blocks_or_a_stage():
    strategy = PipelinedExecution("a", ["b", "c"], ("d",), Stage("e", "f").ipu(0))
    assert strategy.freeze() == Strategy(
        order="1f1b",
        auto=None,
        stages=(
            StagePlan(("a",)),
            StagePlan(("b", "c")),
            StagePlan(("d",)),
            StagePlan(("e", "f"), ipu=0),
        ),
    )


@pytest.mark.parametrize("wrong", [3, [Stage("a")], ["a", 1], {"a": 1}, Phase("a")])
def test_anything_else_is_no_stage(wrong):
    with pytest.raises(AssertionError, match="Block ids are strings"):
        PipelinedExecution("z", wrong)


def test_an_auto_stage_stands_alone():
    with pytest.raises(AssertionError, match="an AutoStage stands alone"):
        ShardedExecution("a", AutoStage.SameAsIpu)


@pytest.mark.parametrize("strategy", [PipelinedExecution, ShardedExecution, SerialPhasedExecution])
def test_a_block_belongs_to_one_stage(strategy):
    with pytest.raises(AssertionError, match="'a' is associated with more than one stage"):
        strategy("a", ["b", "a"])


def test_the_stage_of_a_block_can_be_moved_to_an_ipu():
    strategy = PipelinedExecution("a", ["b", "c"])
    strategy.stage("c").ipu(2)
    assert strategy.freeze().stages == (StagePlan(("a",)), StagePlan(("b", "c"), ipu=2))
    with pytest.raises(AssertionError, match="Unknown block 'z'; this strategy has 'a', 'b', 'c'"):
        strategy.stage("z")
    with pytest.raises(AssertionError, match=r"Unknown block 'encodr'.*did you mean 'encoder'\?"):
        PipelinedExecution("encoder", "head").stage("encodr")
    with pytest.raises(AssertionError, match=r"Unknown block 'z'.*the stages are automatic"):
        PipelinedExecution().stage("z")


def test_a_phase_is_made_of_stages_or_of_the_blocks_of_one_stage():
    phase = Phase(Stage("a"), Stage("b", "c"))
    phase.ipus(0, 2)
    assert [stage.freeze() for stage in phase.stages] == [StagePlan(("a",), 0), StagePlan(("b", "c"), 2)]
    assert Phase("a", "b").stage(0).blocks == ["a", "b"]
    with pytest.raises(AssertionError, match="one ipu for each stage: 2 expected, 1 found"):
        phase.ipus(0)
    with pytest.raises(AssertionError, match="stages only, or of block ids only"):
        Phase("a", Stage("b"))


def test_phases_are_flattened_into_stages_in_order():
    strategy = SerialPhasedExecution("a", ["b", "c"], [Stage("d"), Stage("e")], Stage("f"), Phase("g", "h"))
    strategy.phase(2).ipus(0, 1)
    strategy.stage("g").ipu(3)
    assert strategy.freeze() == Strategy(
        order="sharded",
        auto=None,
        stages=(
            StagePlan(("a",)),
            StagePlan(("b", "c")),
            StagePlan(("d",), 0),
            StagePlan(("e",), 1),
            StagePlan(("f",)),
            StagePlan(("g", "h"), 3),
        ),
    )


@pytest.mark.parametrize("strategy", [SerialPhasedExecution, ParallelPhasedExecution])
def test_phases_are_written_out(strategy):
    for arguments in ((), (AutoStage.AutoIncrement,)):
        with pytest.raises(AssertionError, match="no AutoStage for PhasedExecution"):
            strategy(*arguments)
    for index in (-1, 2):
        with pytest.raises(AssertionError, match=f"Execution.phase takes one of 0, .*; found {index}"):
            strategy("a", "b").phase(index)


def test_parallel_phases_alternate_between_even_and_odd_ipus():
    strategy = ParallelPhasedExecution([Stage("a"), Stage("b")], [Stage("c"), Stage("d")])
    strategy.phase(0).ipus(0, 2)
    strategy.phase(1).ipus(1, 3)
    assert [stage.ipu for stage in strategy.freeze().stages] == [0, 2, 1, 3]
    strategy.phase(1).ipus(1, 4)
    with pytest.raises(Error, match=r"phase 1 of ParallelPhasedExecution is on ipu 4 \(blocks d\)"):
        strategy.freeze()


def test_backend_options_say_how_a_strategy_executes():
    assert PipelinedExecution("a").backendOptions() == {"execution_mode": 0}
    assert ShardedExecution("a").backendOptions() == {"execution_mode": 1}
    serial = SerialPhasedExecution("a").setTensorsLiveness(Liveness.OffChipAfterEachPhase)
    assert serial.useSeparateBackwardPhase().backendOptions() == {
        "execution_mode": 2,
        "separate_backward_phase": True,
        "tensors_liveness": 3,
        "serial_phases_execution": True,
    }
    assert ParallelPhasedExecution("a").sendTensorsOffChipAfterFwd().backendOptions() == {
        "execution_mode": 2,
        "separate_backward_phase": False,
        "tensors_liveness": 1,
        "serial_phases_execution": False,
    }
    with pytest.raises(AssertionError, match=r"takes a poptorch.Liveness"):
        SerialPhasedExecution("a").setTensorsLiveness(1)


def test_strategies_print_without_addresses_and_survive_copying():
    strategy = SerialPhasedExecution([Stage("a"), Stage("b").ipu(1)], "c")
    assert repr(strategy) == (
        "SerialPhasedExecution(Phase(Stage('a'), Stage('b').ipu(1)), Phase(Stage('c')), "
        "separate_backward_phase=False, liveness=AlwaysLive)"
    )
    assert repr(PipelinedExecution("a", ["b"])) == "PipelinedExecution(Stage('a'), Stage('b'))"
    for copied in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert repr(copied) == repr(strategy)
        copied.stage("c").ipu(4)
    assert strategy.stage("c").freeze().ipu is None


def test_a_pipeline_may_be_allowed_to_run_sharded():
    strategy = PipelinedExecution().orSharded()
    assert strategy.freeze() == Strategy("1f1b", "same_as_ipu", or_sharded=True)
    assert repr(strategy) == "PipelinedExecution(AutoStage.SameAsIpu).orSharded()"


# ---- schedules -----------------------------------------------------------------------------------------------


def test_a_pipeline_has_a_schedule_by_name_or_of_the_users_own():
    assert PipelinedExecution("a", schedule="gpipe").freeze().order == "gpipe"
    mine = Order("latest first", lambda step, action, micro_batch: (-micro_batch,))
    try:
        strategy = PipelinedExecution("a", schedule=mine)
        assert strategy.freeze().order == "latest first"
        assert repr(strategy) == "PipelinedExecution(Stage('a'), schedule='latest first')"
    finally:
        del ORDERS["latest first"]
    with pytest.raises(Error, match=r"there is no order '1f2b': known are 1f1b, .* did you mean '1f1b'"):
        PipelinedExecution(schedule="1f2b")


def test_sharded_execution_is_no_pipeline():
    assert not issubclass(ShardedExecution, PipelinedExecution)
    options = poptorch.Options()
    options.Training.gradientAccumulation(4)
    for strategy, advises in ((PipelinedExecution(), True), (ShardedExecution(), False)):
        options.setExecutionStrategy(strategy)
        with pytest.raises(Error, match="must be 1") as error:
            poptorch.inferenceModel(torch.nn.Linear(1, 1), options)
        assert ("fill the pipeline" in str(error.value)) is advises
