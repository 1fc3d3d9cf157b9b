"""Names that programs import: errors of the core, the original's insides, automatic casts."""

import copy
import enum

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import popart
import poptorch
from poptorch import enums


def test_the_core_has_the_same_errors():
    assert poptorch.poptorch_core.Error is poptorch.Error
    error = poptorch.createPoptorchError("it failed")
    assert isinstance(error, poptorch.Error)
    assert str(error) == "'poptorch_py_error': it failed"


@pytest.mark.parametrize(
    "name", ["accessAttributes", "getIpuTensorId", "poptorchAtExit", "importPoptorchMetadataFromFile"]
)
def test_the_insides_can_be_imported_and_refuse_to_be_called(name):
    function = getattr(poptorch, name)
    arguments = [] if name == "poptorchAtExit" else ["x"]
    with pytest.raises(poptorch.Error, match=f"poptorch.{name}"):
        function(*arguments)
    assert poptorch.attributes_lists == []


def test_autocast_runs_products_in_half_inside_a_compiled_model():
    layer = nn.Linear(4, 3)

    def forward(x):
        with poptorch.autocast():
            y = layer(x)
            with poptorch.autocast(enabled=False):
                z = layer(x)
        return y, z, poptorch.autocast()(layer)(x), layer(x)

    x = torch.randn(2, 4)
    found = poptorch.inferenceModel(forward)(x)
    half, single = torch.float16, torch.float32
    assert [value.dtype for value in found] == [half, single, half, single]
    assert {value.dtype for value in forward(x)} == {single}


def test_rules_of_ones_own_are_refused():
    with pytest.raises(poptorch.Error, match=r"rules of your own are not supported.*(?s:.)*fix:"):
        poptorch.autocasting.Policy(fp16=["linear"])


def test_autocast_may_be_an_attribute_that_is_entered_again_and_copied():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.cast = nn.Linear(2, 2), poptorch.autocast()

        def forward(self, x):
            with self.cast, self.cast:
                return self.layer(x)

    for model in (Model(), copy.deepcopy(Model())):
        for _ in range(2):
            assert poptorch.inferenceModel(model)(torch.randn(2, 2)).dtype == torch.float16


def test_autocast_does_nothing_where_the_options_say_so():
    options = poptorch.Options()
    options.Precision.autocastEnabled(False)
    model = poptorch.inferenceModel(poptorch.autocast()(torch.nn.Linear(2, 2)), options)
    assert model(torch.randn(1, 2)).dtype == torch.float32


# Ranges of the host's code in a trace of torch.profiler.


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


# The enums: programs save their integers, so the values are part of the contract.


VALUES = {
    "MeanReductionStrategy": {"Running": 0, "Post": 1, "PostAndLoss": 2},
    "DataLoaderMode": {"Sync": 0, "Async": 1, "AsyncRebatched": 2},
    "SharingStrategy": {"SharedMemory": 0, "FileSystem": 1, "Fork": 2, "ForkServer": 3},
    "OutputMode": {"Final": 0, "EveryN": 1, "All": 2, "Sum": 3, "Default": 4},
    "ConnectionType": {"Always": 0, "OnDemand": 1, "Never": 2},
    "HalfFloatCastingBehavior": {"FloatDowncastToHalf": 0, "HalfUpcastToFloat": 1, "Default": 2},
    "ReductionType": {"Sum": 0, "Mean": 1, "NoReduction": 2},
    "SyncPattern": {"Full": 0, "SinglePipeline": 1, "ReplicaAndLadder": 2},
    "Liveness": {
        "AlwaysLive": 0,
        "OffChipAfterFwd": 1,
        "OffChipAfterFwdNoOverlap": 2,
        "OffChipAfterEachPhase": 3,
    },
    "AutoStage": {"SameAsIpu": 0, "AutoIncrement": 1},
    "MultiConvPlanType": {"Parallel": 0, "Serial": 1},
    "CommGroupType": {"All": 0, "Consecutive": 1, "Orthogonal": 2, "NoGrouping": 3},
    "VariableRetrievalMode": {"OnePerGroup": 0, "AllReplicas": 2},
    "MatMulSerializationMode": {
        "InputChannels": "input_channels",
        "ReducingDim": "reducing_dim",
        "OutputChannels": "output_channels",
        "Disabled": "none",
    },
    "OverlapMode": {
        "NoOverlap": "no_overlap",
        "OverlapAccumulationLoop": "overlap_accumulation_loop",
        "OverlapDeviceIterationLoop": "overlap_device_iteration_loop",
    },
}


@pytest.mark.parametrize("name", VALUES)
def test_each_enum_has_the_members_and_values_of_the_contract(name):
    kind = getattr(enums, name)
    assert {member.name: member.value for member in kind} == VALUES[name]
    assert issubclass(kind, enum.IntEnum) == (0 in VALUES[name].values())


def test_the_module_lists_all_its_enums_and_one_old_name():
    assert set(enums.__all__) == {*VALUES, "AnchorMode"}
    assert enums.AnchorMode is enums.OutputMode


def test_popart_enums_are_integers():
    assert int(popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized) == 3
    assert int(popart.SyntheticDataMode.RandomNormal) == 2
    assert int(popart.SubgraphCopyingStrategy.JustInTime) == 1
    assert int(popart.RecomputationType.None_) == 0 and int(popart.RecomputationType.Pipeline) == 3
    assert int(popart.VirtualGraphMode.ExecutionPhases) == 3
    assert int(popart.PatternsLevel.All) == 3
    assert int(popart.BatchSerializationBatchSchedule.Isomorphic) == 1


def test_popart_says_that_it_holds_enums_only():
    with pytest.raises(AttributeError, match=r"'popart' has no attribute 'Builder'.*only the enums"):
        _ = popart.Builder


def test_a_name_in_place_of_a_member_is_an_error_that_has_the_member_or_is_taken():
    with pytest.raises(
        AssertionError, match=r"takes a poptorch.OutputMode; found 'all'\n  fix: poptorch.OutputMode.All$"
    ):
        poptorch.Options().outputMode("all")
    x = torch.ones(2)
    assert poptorch.set_overlap_for_input(x, "OverlapAccumulationLoop").equal(x)
