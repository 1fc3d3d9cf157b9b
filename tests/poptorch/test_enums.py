"""The enums: programs save their integers, so the values are part of the contract."""

import enum

import pytest
import torch

import popart
import poptorch
from poptorch import enums

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
