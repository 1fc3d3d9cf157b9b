"""How options are read, written, frozen, copied and printed."""

import ast
import copy
import pickle
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

import poptorch
from poptorch.annotating.strategies import PipelinedExecution, ShardedExecution, Stage
from poptorch.enums import MeanReductionStrategy, OutputMode, ReductionType
from poptorch.options import Options, TensorLocationSettings


def rich_options() -> Options:
    options = Options().deviceIterations(3).replicationFactor(2).outputMode(OutputMode.EveryN, 3)
    options.setExecutionStrategy(PipelinedExecution(Stage("a"), Stage("b").ipu(1)))
    options.setAvailableMemoryProportion({"IPU1": 0.5, "IPU0": 0.25}).randomSeed(7)
    options.Training.gradientAccumulation(4).setConvolutionDithering(True)
    options.Precision.setPartialsType(torch.half)
    options.TensorLocations.setWeightLocation(TensorLocationSettings().useOnChipStorage(False))
    options.anchorTensor("loss", "the_loss")
    return options


def test_a_setter_returns_its_object_so_calls_chain():
    options = Options()
    assert options.deviceIterations(2).replicationFactor(3) is options
    assert options.Training.gradientAccumulation(4) is options.Training
    assert (options.device_iterations, options.replication_factor) == (2, 3)
    assert options("device_iterations") == 2


def test_a_value_that_was_never_made_is_an_attribute_error():
    options = Options()
    assert not options.exists("random_seed")
    with pytest.raises(AttributeError, match="Invalid attribute"):
        _ = options.random_seed
    options.randomSeed(3)
    assert options.exists("random_seed") and options.random_seed == 3


def test_assignment_checks_like_a_setter():
    options = Options()
    options.device_iterations = 5
    assert options.device_iterations == 5
    with pytest.raises(AssertionError, match=r"Expected int\n  fix: options.deviceIterations\(5\)"):
        options.device_iterations = "5"
    with pytest.raises(
        AssertionError, match=r"Invalid option devise_iterations, valid options are .*device_it"
    ):
        options.devise_iterations = 5
    with pytest.raises(AssertionError, match="must be 1 or more"):
        options.device_iterations = 0
    with pytest.raises(
        AssertionError, match=r"deviceIterations is a method\n  fix: options.deviceIterations\(5\)"
    ):
        options.deviceIterations = 5


def test_numpy_integers_fail_and_bools_pass_as_int():
    with pytest.raises(AssertionError, match="Unexpected type int64"):
        Options().deviceIterations(np.int64(4))
    assert Options().set(replication_factor=True).replication_factor is True


def test_only_declared_private_fields_can_be_assigned():
    options = Options()
    options._show_progress_bar = False
    for name in ("_wibble", "_Popart"):
        with pytest.raises(AttributeError, match="Invalid private attribute"):
            setattr(options, name, 1)


def test_an_enum_member_is_stored_as_the_integer_it_is():
    options = Options()
    options.output_mode = OutputMode.All
    assert repr(options) == repr(Options().outputMode(OutputMode.All))


def test_values_without_default_are_created_and_deleted():
    options = Options().createOrSet(mine=1)
    assert options.mine == 1 and options.exists("mine")
    assert not options.deleteIfExists("mine").exists("mine")


@pytest.mark.parametrize(
    "write",
    [
        lambda options: options.deviceIterations(2),
        lambda options: options.set(device_iterations=2),
        lambda options: setattr(options, "device_iterations", 2),
        lambda options: options.createOrSet(mine=2),
        lambda options: options.setExecutionStrategy(ShardedExecution()),
        lambda options: options.showCompilationProgressBar(False),
        lambda options: options.randomSeed(1),
        lambda options: options.from_json('{"deviceIterations": 2}'),
        lambda options: options.Training.gradientAccumulation(2),
        lambda options: options.Training.setAutomaticLossScaling(True),
        lambda options: options.Precision.setPartialsType(torch.half),
        lambda options: options.Distributed.disable(),
        lambda options: options.Jit.traceModel(False),
        lambda options: options.TensorLocations.numIOTiles(32),
        lambda options: options.TensorLocations.location_weight.useOnChipStorage(None),
        lambda options: options._Popart.set("x", 1),
        lambda options: options._Popart.setPatterns({}),
        lambda options: options.checkIsFrozen(),
    ],
)
def test_frozen_options_refuse_every_write_until_unfrozen(write):
    options = Options()
    options._freeze()
    options._freeze()
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        write(options)
    options._unfreeze()
    write(options)


@pytest.mark.parametrize(
    "copied",
    [Options.clone, copy.deepcopy, copy.copy, lambda options: pickle.loads(pickle.dumps(options))],
    ids=["clone", "deepcopy", "copy", "pickle"],
)
def test_a_copy_is_equal_deep_and_not_frozen(copied):
    options = rich_options()
    options._freeze()
    other = copied(options)
    assert repr(other) == repr(options)
    assert other.Training._popart is other._Popart

    other.deviceIterations(9)
    other.anchored_tensors["x"] = []
    other._Popart.set("x", 1)
    other._execution_strategy.stage("a").ipu(5)
    assert repr(options) == repr(rich_options())


def test_the_repr_is_complete_and_does_not_depend_on_the_order_of_calls():
    assert repr(rich_options()) == repr(rich_options())
    assert repr(Options()).startswith("Options(anchored_tensors={}, auto_round_num_ipus=False, ")
    one = Options().randomSeed(1).modelName("m").setAvailableMemoryProportion({"IPU0": 0.1, "IPU1": 0.2})
    other = Options().setAvailableMemoryProportion({"IPU1": 0.2, "IPU0": 0.1}).modelName("m").randomSeed(1)
    assert repr(one) == repr(other)
    assert repr(Options().setExecutionStrategy(ShardedExecution())) != repr(Options())
    parts = [
        part + "(" for part in ("Distributed", "Jit", "Popart", "Precision", "TensorLocations", "Training")
    ]
    text = repr(rich_options())
    assert [text.index(f", {part}") for part in parts] == sorted(text.index(f", {part}") for part in parts)


def test_to_dict_merges_all_parts_once_a_mode_is_picked():
    with pytest.raises(AssertionError, match="output mode must be picked"):
        Options().toDict()
    options = Options().outputMode(OutputMode.All)
    options.Training.accumulationAndReplicationReductionType(ReductionType.Sum)
    options._Popart.set("autoRecomputation", 3)
    options.TensorLocations.setWeightLocation(TensorLocationSettings().useOnChipStorage(False))
    values = options.toDict()
    assert values["replication_factor"] == 1
    assert values["gradient_accumulation"] == 1
    assert values["accumulation_and_replication_reduction_type"] == 0
    assert values["num_distributed_processes"] == 1
    assert values["execution_mode"] == 0
    assert values["autoRecomputation"] == 3
    assert values["location_weight"] == {"on_chip_storage": False}
    assert "trace_model" not in values


def test_parts_that_share_a_name_can_not_be_merged():
    options = Options().outputMode(OutputMode.All)
    options._Popart.set("device_iterations", 3)
    with pytest.raises(AssertionError, match="Can't merge dictionaries: both contain device_iterations"):
        options.toDict()
    assert Options().Training.update({"x": 1})["x"] == 1
    with pytest.raises(AssertionError, match="Can't merge dictionaries"):
        Options().Training.update({"gradient_accumulation": 1})


def test_sub_options_are_read_only_and_always_the_same_object():
    options = Options()
    for name in ("TensorLocations", "Distributed", "Jit", "Precision", "Training", "_Popart"):
        assert getattr(options, name) is getattr(options, name)
    with pytest.raises(AssertionError, match="Invalid option Training"):
        options.Training = options.Training


@pytest.mark.parametrize(
    ("use", "kind", "meant"),
    [
        (lambda options: options.deviceIteration(4), AttributeError, "deviceIterations"),
        (lambda options: options.set(device_iteration=4), AssertionError, "device_iterations"),
        (lambda options: setattr(options, "replication_facto", 4), AssertionError, "replication_factor"),
        (lambda options: options("output_mod"), AssertionError, "output_mode"),
        (lambda options: options.Training.gradientAcumulation(4), AttributeError, "gradientAccumulation"),
        (
            lambda options: options.gradientAccumulation(4),
            AttributeError,
            "options.Training.gradientAccumulation",
        ),
        (lambda options: options.Training.deviceIterations(4), AttributeError, "options.deviceIterations"),
        (lambda options: options.numIOTiles(32), AttributeError, "options.TensorLocations.numIOTiles"),
        (
            lambda options: options.from_json('{"Training.setAutoLossScaling": true}'),
            AttributeError,
            "setAutomatic",
        ),
    ],
)
def test_the_error_for_a_misspelt_name_suggests_the_right_one(use, kind, meant):
    with pytest.raises(kind, match=f"did you mean '{meant}") as caught:
        use(Options())
    text = "".join(traceback.format_exception_only(caught.value))
    assert text.lower().count("did you mean") == 1  # Python adds none


def test_the_strategy_of_a_mean_is_read_by_its_camel_case_name_too():
    options = Options()
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
    assert options.Training.meanAccumulationAndReplicationReductionStrategy == MeanReductionStrategy.Running


def test_docstrings_name_what_has_no_effect():
    text = " ".join(Options.syncPattern.__doc__.split())
    assert text.startswith("Has no effect; kept for compatibility: threads wait only")
    assert "no effect" not in Options().Precision.enableStochasticRounding.__doc__  # which is carried out


def test_no_check_with_a_message_for_users_is_an_assert_statement():
    kept = [
        f"{path}:{node.lineno}"
        for path in Path(poptorch.__file__).parents[1].rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) and node.msg is not None
    ]
    assert kept == [], "raise AssertionError(message), because python -O removes assert statements"
