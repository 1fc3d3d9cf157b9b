"""Training, Precision, Jit, TensorLocations, Distributed and _Popart."""

import operator

import pytest
import torch

import popart
import poptorch
from popengine.errors import Error
from poptorch.autocasting import Policy
from poptorch.enums import (
    CommGroupType,
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    SyncPattern,
)
from poptorch.logs import log_no_effect
from poptorch.options import (
    Distributed,
    Jit,
    Options,
    Popart,
    Precision,
    TensorLocations,
    TensorLocationSettings,
    Training,
)


def test_gradients_are_accumulated_once_and_averaged_by_default():
    training = Options().Training
    assert training.gradient_accumulation == 1
    assert training.accumulation_and_replication_reduction_type == ReductionType.Mean
    assert training.mean_accumulation_and_replication_reduction_strategy == MeanReductionStrategy.Post
    with pytest.raises(AssertionError, match=r"found 0\n  fix: options.Training.gradientAccumulation\(1\)"):
        training.gradientAccumulation(0)


def test_gradients_reduce_by_sum_or_mean_only():
    training = Options().Training
    training.accumulationAndReplicationReductionType(ReductionType.Sum)
    assert training.accumulation_and_replication_reduction_type == ReductionType.Sum
    training.accumulationReductionType(ReductionType.Mean)  # its name in 2.0
    assert training.accumulation_and_replication_reduction_type == ReductionType.Mean
    for wrong in (ReductionType.NoReduction, "Sum", 0):
        with pytest.raises(ValueError, match="accumulationAndReplicationReductionType takes"):
            training.accumulationAndReplicationReductionType(wrong)


def test_the_place_of_the_division_is_recorded_and_post_and_loss_is_deprecated(caplog):
    training = Options().Training
    training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
    assert training.mean_accumulation_and_replication_reduction_strategy == MeanReductionStrategy.Running
    assert not caplog.text
    training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.PostAndLoss)
    assert "PostAndLoss is deprecated" in caplog.text


def test_dithering_and_partials_share_the_convolution_options():
    options = Options()
    options.Precision.setPartialsType(torch.half)
    options.Training.setConvolutionDithering(True)
    assert options._Popart.options == {
        "partialsTypeMatMuls": "half",
        "convolutionOptions": {"partialsType": "half", "enableConvDithering": True},
    }
    options.Precision.setPartialsType(torch.float)
    assert options._Popart.options["convolutionOptions"]["partialsType"] == "float"
    with pytest.raises(ValueError, match=r"one of torch.float32, torch.float16"):
        options.Precision.setPartialsType(torch.bfloat16)


def test_switches_of_precision_and_training_are_popart_settings():
    options = Options()
    options.Precision.enableStochasticRounding(True).enableFloatingPointExceptions(True)
    options.Training.setAutomaticLossScaling(True)
    assert options._Popart.options == {
        "enableStochasticRounding": True,
        "enableFloatingPointChecks": True,
        "automaticLossScalingSettings.enabled": True,
    }
    with pytest.raises(AssertionError):
        options.Precision.enableFloatingPointExceptions(1)


def test_deprecated_options_warn(caplog):
    options = Options()
    options.Precision.halfFloatCasting(HalfFloatCastingBehavior.Default)
    options.Precision.runningVarianceAlwaysFloat(False)
    options.Jit.traceModel(False)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    with pytest.raises(ValueError, match="bool"):
        options.Precision.runningStatisticsAlwaysFloat("no")
    with pytest.raises(ValueError, match="TorchScript"):
        options.Jit.traceModel(True)


def test_tensor_locations_are_read_back_as_they_were_set():
    location = TensorLocationSettings().minElementsForOffChip(4).minElementsForReplicatedTensorSharding(8)
    location.useOnChipStorage(False).useReplicatedTensorSharding().useIOTilesToLoad().useIOTilesToStore(False)
    locations = Options().TensorLocations
    assert locations.setOptimizerLocation(location).numIOTiles(64) is locations
    assert locations.location_optimizer.toDict() == {
        "min_elements_for_off_chip": 4,
        "min_elements_for_replicated_tensor_sharding": 8,
        "on_chip_storage": False,
        "replicated_tensor_sharding": True,
        "io_tiles_to_load": True,
        "io_tiles_to_store": False,
    }
    assert locations.num_io_tiles == 64
    assert not locations.location_weight.exists("on_chip_storage")
    assert not location.useOnChipStorage(None).exists("on_chip_storage")


def test_wrong_locations_are_refused():
    for wrong in (
        lambda: Options().TensorLocations.setWeightLocation("host"),
        lambda: TensorLocationSettings().useOnChipStorage(1),
        lambda: TensorLocationSettings().minElementsForOffChip("4"),
    ):
        with pytest.raises(AssertionError):
            wrong()
    for tiles in (30, 33, 194, "64"):
        with pytest.raises(AssertionError, match="numIOTiles must be an even number between 32 and 192"):
            Options().TensorLocations.numIOTiles(tiles)


def place(options: Options) -> tuple[int, int]:
    return options.Distributed.processId, options.Distributed.numProcesses


def test_the_process_is_that_of_mpis_variables_unless_configured(monkeypatch):
    assert place(Options()) == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    options = Options()
    assert place(options) == (2, 4)
    options.Distributed.configureProcessId(1, 3)
    assert place(options) == (1, 3)
    monkeypatch.setenv("PROCESSES", "8")
    monkeypatch.setenv("PROCESS", "7")
    options.Distributed.setEnvVarNames("PROCESSES", "PROCESS")
    assert place(options) == (7, 8)
    options.Distributed.disable()
    assert place(options) == (0, 1)


def test_a_process_that_can_not_be_is_refused(monkeypatch):
    with pytest.raises(AssertionError, match="process_id takes one of 0, 1, 2; found 3"):
        Options().Distributed.configureProcessId(3, 3)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE is 'two', and must be a number"):
        Options()


def test_popart_records_any_setting_and_integers_for_enums():
    settings = Options()._Popart
    settings.set("accumulateOuterFragmentSettings.schedule", popart.AccumulateOuterFragmentSchedule.Serial)
    settings.set("wibble", object)
    assert settings.options == {"accumulateOuterFragmentSettings.schedule": 1, "wibble": object}
    assert type(settings.options["accumulateOuterFragmentSettings.schedule"]) is int
    settings.setEngineOptions({"a": "b"}).setPatterns(
        {"TiedGather": True}, level=popart.PatternsLevel.Minimal
    )
    assert settings.options["engineOptions"] == {"a": "b"}
    assert (settings.patterns, settings.patterns_level) == ({"TiedGather": True}, 1)
    for wrong in (
        lambda: settings.setEngineOptions("a"),
        lambda: settings.setPatterns(["TiedGather"]),
        lambda: settings.setPatterns({"TiedGather": "off"}),
        lambda: settings.setPatterns({}, level="All"),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_popart_names_are_checked_at_compilation_only(caplog):
    settings = Options()._Popart
    settings.set("autoRecomputation", 3).set("replicatedCollectivesSettings.mergeAllReduceCollectives", True)
    settings.check_names()
    assert not caplog.text
    settings.set("wibble", True).check_names()
    assert "_Popart option wibble is not known here" in caplog.text
    with pytest.raises(
        Error, match=r"Unknown int option autoRecomputatoin; did you mean 'autoRecomputation'"
    ):
        settings.set("autoRecomputatoin", 1).check_names()
    with pytest.raises(Error, match="Unknown value type type for option autoRecomputation"):
        settings.set("autoRecomputation", object).check_names()


RECORDED = {  # the arguments of each setter without effect
    "options.appendToLocationExcludes": ("a",),
    "options.autoRoundNumIPUs": (),
    "options.disableModuleNamescope": (),
    "options.enableStableNorm": (True,),
    "options.logCycleCount": (True,),
    "options.logDir": ("logs",),
    "options.maxRepeatLogs": (2,),
    "options.setAvailableMemoryProportion": ({"IPU0": 0.2},),
    "options.sourceLocationExcludes": (["a"],),
    "options.syncPattern": (SyncPattern.Full,),
    "options.useIpuId": (0,),
    "options.useIpuModel": (True,),
    "options.Training.setConvolutionDithering": (True,),
    "options.Precision.autocastPolicy": (Policy(),),
    "options.Precision.halfFloatCasting": (HalfFloatCastingBehavior.Default,),
    "options.Precision.runningStatisticsAlwaysFloat": (True,),
    "options.Precision.setPartialsType": (torch.half,),
    "options.TensorLocations.numIOTiles": (32,),
    "options.TensorLocations.setAccumulatorLocation": (TensorLocationSettings(),),
    "options.TensorLocations.setActivationLocation": (TensorLocationSettings(),),
    "options.TensorLocations.setWeightLocation": (TensorLocationSettings(),),
    "options.enableExecutableCaching": ("folder",),
    "options._Popart.setPatterns": ({"TiedGather": True},),
    "poptorch.TensorLocationSettings().minElementsForOffChip": (4,),
    "poptorch.TensorLocationSettings().useIOTilesToLoad": (),
    "poptorch.TensorLocationSettings().useIOTilesToStore": (),
    "poptorch.TensorLocationSettings().useOnChipStorage": (False,),
}
PARTS = (Options, Training, Precision, Jit, Distributed, TensorLocations, TensorLocationSettings, Popart)


@pytest.fixture
def log_of_info(caplog):
    caplog.set_level("INFO", logger="poptorch::python")
    log_no_effect.cache_clear()  # another test may have used the options
    return caplog


def test_the_first_use_of_an_option_without_effect_is_one_line_of_the_log(log_of_info):
    paths = {
        f"{kind._path}.{name}"
        for kind in PARTS
        for name in dir(kind)
        if (getattr(kind, name).__doc__ or "").startswith("Has no effect")
    }
    assert paths == RECORDED.keys()
    for path, arguments in RECORDED.items():
        log_of_info.clear()
        for _ in range(2):
            setter = operator.attrgetter(path.rpartition(".")[2])
            part = eval(path.rpartition(".")[0], {"options": Options(), "poptorch": poptorch})
            setter(part)(*arguments)
        lines = [record.message for record in log_of_info.records if record.levelname == "INFO"]
        assert [line.partition(" has no effect: ")[0] for line in lines] == [path]


@pytest.mark.parametrize("path", [path for path, arguments in RECORDED.items() if arguments])
def test_an_option_without_effect_checks_its_argument(path):
    part = eval(path.rpartition(".")[0], {"options": Options(), "poptorch": poptorch})
    with pytest.raises((AssertionError, ValueError, TypeError), match=r"takes|type|must be|not object"):
        getattr(part, path.rpartition(".")[2])(object())


LEAST = {  # the least value of each option that is a number
    "deviceIterations": (1, lambda options, number: options.deviceIterations(number)),
    "replicationFactor": (1, lambda options, number: options.replicationFactor(number)),
    "gradientAccumulation": (1, lambda options, number: options.Training.gradientAccumulation(number)),
    "allowNewShapes": (1, lambda options, number: options.allowNewShapes(number)),
    "outputMode": (1, lambda options, number: options.outputMode(OutputMode.EveryN, number)),
    "anchorTensor": (1, lambda options, number: options.anchorTensor("a", "b", OutputMode.EveryN, number)),
    "inputReplicaGrouping": (
        1,
        lambda options, number: options.inputReplicaGrouping(number, CommGroupType.Consecutive),
    ),
    "useIpuId": (0, lambda options, number: options.useIpuId(number)),
    "numIOTiles": (32, lambda options, number: options.TensorLocations.numIOTiles(number)),
    "the number of a process": (0, lambda options, number: options.Distributed.configureProcessId(number, 2)),
    "the number of processes": (1, lambda options, number: options.Distributed.configureProcessId(0, number)),
    "enableSyntheticData": (0, lambda options, number: options.enableSyntheticData(number)),
}


@pytest.mark.parametrize("name", LEAST)
def test_an_option_takes_its_least_value_and_none_below(name):
    least, setter = LEAST[name]
    setter(Options(), least)
    with pytest.raises((AssertionError, ValueError)):
        setter(Options(), least - 1)
    with pytest.raises((AssertionError, ValueError, TypeError)):
        setter(Options(), float(least))


def test_the_variable_of_the_executable_cache_is_one_line_of_the_log_too(log_of_info, monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "somewhere")
    for _ in range(2):
        Options().enableExecutableCaching("elsewhere")
    assert [record.message for record in log_of_info.records] == [
        "options.enableExecutableCaching has no effect: a model compiles in seconds, at each start"
    ]


def test_a_popart_setting_without_effect_is_one_line_of_the_log_too(log_of_info):
    settings = Options()._Popart
    settings.set("enableOutlining", False).set("autoRecomputation", 3).set("enableOutlining", True)
    assert [record.message for record in log_of_info.records] == [
        "options._Popart.set('enableOutlining', ...) has no effect: Pando has no such setting"
    ]


def test_options_with_an_effect_log_nothing(log_of_info):
    options = Options().deviceIterations(2).enableSyntheticData(False)
    options.Training.setAutomaticLossScaling(False)
    options.Precision.enableStochasticRounding(False)
    assert not log_of_info.records
