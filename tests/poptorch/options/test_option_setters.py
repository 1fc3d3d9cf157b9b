"""What each setter of Options accepts and stores."""

import pytest
import torch

import popart
from poptorch.annotating.strategies import PipelinedExecution, ShardedExecution
from poptorch.autocasting import Policy
from poptorch.enums import AutoStage, CommGroupType, ConnectionType, OutputMode, SyncPattern
from poptorch.options import Options


def test_the_defaults_are_those_of_the_contract():
    options = Options()
    assert options._values == {
        "anchored_tensors": {},
        "auto_round_num_ipus": False,
        "available_memory_proportion": {},
        "broadcast_buffers": True,
        "connection_type": 0,
        "device_iterations": 1,
        "input_cgt": CommGroupType.Consecutive,
        "input_group_size": 1,
        "log_dir": ".",
        "max_repeat_logs": 4,
        "output_mode": 4,
        "output_return_period": 1,
        "replication_factor": 1,
        "sync_pattern": 0,
    }
    assert repr(options._execution_strategy) == "PipelinedExecution(AutoStage.SameAsIpu)"
    assert options._show_progress_bar and not options._relax_optimizer_checks


def test_output_mode_is_stored_as_int_with_the_period_of_every_n_only(caplog):
    options = Options().outputMode(OutputMode.EveryN, output_return_period=2)
    assert (options.output_mode, options.output_return_period) == (1, 2)
    assert not options.defaultOutputMode() and Options().defaultOutputMode()
    with caplog.at_level("INFO", "poptorch::python"):
        options.outputMode(OutputMode.All, output_return_period=3)
    assert (options.output_mode, options.output_return_period) == (2, 1)
    assert "output_return_period=3 is ignored" in caplog.text


@pytest.mark.parametrize("period", [None, 0, -1])
def test_every_n_needs_a_positive_period(period):
    with pytest.raises(AssertionError, match=r"EveryN needs output_return_period"):
        Options().outputMode(OutputMode.EveryN, period)


def test_input_groups_must_fit_the_replicas():
    options = Options().replicationFactor(4)
    options.inputReplicaGrouping(2, CommGroupType.Orthogonal)
    assert (options.input_group_size, options.input_cgt) == (2, CommGroupType.Orthogonal)
    options.inputReplicaGrouping(4, CommGroupType.NoGrouping)
    assert (options.input_group_size, options.input_cgt) == (1, CommGroupType.Consecutive)
    with pytest.raises(ValueError, match="input_group_type cannot be All"):
        options.inputReplicaGrouping(1, CommGroupType.All)
    for size in (8, 3, 0):
        with pytest.raises(ValueError, match="input_group_size"):
            options.inputReplicaGrouping(size, CommGroupType.Consecutive)


def test_an_auto_stage_must_be_wrapped_in_a_strategy():
    strategy = ShardedExecution(AutoStage.AutoIncrement)
    assert Options().setExecutionStrategy(strategy)._execution_strategy is strategy
    for wrong in (AutoStage.AutoIncrement, PipelinedExecution, "pipelined"):
        with pytest.raises(
            AssertionError, match=r"fix: .*\(poptorch.PipelinedExecution\((poptorch.Auto.*)?\)\)"
        ):
            Options().setExecutionStrategy(wrong)


def test_memory_proportions_are_stored_by_the_number_of_the_ipu():
    options = Options().setAvailableMemoryProportion({"IPU0": 0.5, "IPU12": 0.25})
    assert options.available_memory_proportion == {0: 0.5, 12: 0.25}
    with pytest.raises(AssertionError, match='start with "IPU"'):
        options.setAvailableMemoryProportion({"GPU0": 0.5})


def test_anchors_add_up_also_on_frozen_options():
    options = Options()
    assert options.anchorTensor("loss", "the_loss") is None
    options._freeze()
    options.anchorTensor("w", "Gradient___w", OutputMode.EveryN, 2)
    assert options.anchored_tensors == {
        "loss": ["the_loss", True, OutputMode.Default, 1],
        "w": ["Gradient___w", False, OutputMode.EveryN, 2],
    }


def test_a_random_seed_is_an_int_and_seeds_pytorch_too():
    Options().randomSeed(42)
    first = torch.rand(1)
    torch.manual_seed(42)
    assert torch.equal(first, torch.rand(1))
    with pytest.raises(AssertionError, match="randomSeed takes an int"):
        Options().randomSeed("42")


def test_devices_connections_and_sync_patterns_are_recorded():
    options = Options().useIpuId(3).useIpuModel(True).syncPattern(SyncPattern.ReplicaAndLadder)
    options.connectionType(ConnectionType.OnDemand).autoRoundNumIPUs()
    assert (options.ipu_id, options.use_model, options.sync_pattern) == (3, True, 2)
    assert (options.connection_type, options.auto_round_num_ipus) == (1, True)
    assert options.useOfflineIpuTarget().connection_type == ConnectionType.Never
    assert options.ipu_version == 2
    for wrong in (
        lambda: options.useIpuId("3"),
        lambda: options.useOfflineIpuTarget("ipu2"),
        lambda: options.connectionType(1),
        lambda: options.syncPattern(0),
        lambda: options.outputMode(2),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_an_executable_cache_is_a_popart_setting(monkeypatch, tmp_path):
    options = Options().enableExecutableCaching(tmp_path)
    assert options._Popart.options == {"enableEngineCaching": True, "cachePath": str(tmp_path)}
    assert options.enableExecutableCaching(None)._Popart.options["enableEngineCaching"] is False
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "somewhere")
    assert Options()._Popart.options == {"enableEngineCaching": True, "cachePath": "somewhere"}


@pytest.mark.parametrize(
    ("enabled", "mode"), [(True, 2), (False, 0), (popart.SyntheticDataMode.Zeros, 1), (3, 3)]
)
def test_synthetic_data_takes_a_bool_or_a_mode(enabled, mode):
    assert Options().enableSyntheticData(enabled)._Popart.options == {"syntheticDataMode": mode}


def test_what_is_reported_is_recorded():
    options = Options().logDir("logs").modelName("resnet").maxRepeatLogs(2).logCycleCount(True)
    assert (options.log_dir, options.model_name, options.max_repeat_logs) == ("logs", "resnet", 2)
    assert options.maxRepeatLogs(None).max_repeat_logs == 2**64 - 1
    assert options._Popart.options["instrumentWithHardwareCycleCounter"] is True
    options.sourceLocationExcludes(["a"]).appendToLocationExcludes("b", "c")
    assert options._source_location_excludes == ["a", "b", "c"]
    options.disableModuleNamescope().showCompilationProgressBar(False).relaxOptimizerAttributesChecks()
    assert not options._module_namescope_enabled and not options._show_progress_bar
    assert options._relax_optimizer_checks
    assert options.updatableNamedBuffers(["mask"])._Popart.options["updatableNamedBuffers"] == ["mask"]
    assert options.enableStableNorm(True)._Popart.options["enableStableNorm"] is True
    assert options.broadcastBuffers(False).broadcast_buffers is False


def test_a_profile_goes_into_a_folder_of_the_model_or_its_kind(monkeypatch, caplog, tmp_path):
    assert Options()._profile_directory(training=True) is None
    options = Options().enableProfiling(tmp_path)
    assert options._profile_directory(training=True) == tmp_path / "training"
    assert options.modelName("resnet")._profile_directory(training=False) == tmp_path / "resnet"

    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "true", "autoReport.directory": "r"}')
    assert str(Options()._profile_directory(training=False)) == "r/inference"
    assert Options().enableProfiling(tmp_path)._profile_directory(training=True) == tmp_path / "training"
    assert "POPLAR_ENGINE_OPTIONS sets autoReport.all, autoReport.directory too" in caplog.text


def test_old_names_that_only_changed_still_work():
    options = Options().anchorMode(OutputMode.Sum)
    assert options.output_mode == OutputMode.Sum and not options.defaultAnchorMode()
    assert options.Popart is options._popart is options._Popart


def test_the_options_of_autocast_take_a_bool_and_a_policy():
    precision = Options().Precision.autocastEnabled(False).autocastPolicy(Policy())
    assert precision.autocast_enabled is False
    with pytest.raises(ValueError, match="autocastEnabled takes a bool; found 1"):
        precision.autocastEnabled(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"autocastPolicy takes a poptorch.autocasting.Policy; found 'fp16'"):
        precision.autocastPolicy("fp16")  # type: ignore[arg-type]


def test_half_kernels_are_auto_native_or_float32():
    precision = Options().Precision
    assert precision.half_kernels == "auto"
    assert precision.halfKernels("native").half_kernels == "native"
    with pytest.raises(
        ValueError, match="halfKernels takes one of 'auto', 'native', 'float32'; found 'half'"
    ):
        precision.halfKernels("half")  # type: ignore[arg-type]
