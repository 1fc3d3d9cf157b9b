"""Options from a file, from JSON and from the environment."""

import pytest
import torch

from poptorch.annotating.strategies import PipelinedExecution, ShardedExecution, Stage
from poptorch.enums import OutputMode
from poptorch.options import ConfigFileError, Options, TensorLocationSettings


@pytest.fixture
def file_with(tmp_path):
    def write(text: str, name: str = "options.conf") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_a_file_sets_the_same_as_the_calls_in_it(file_with):
    path = file_with(
        """
        # a comment
        deviceIterations(1)
        setExecutionStrategy(poptorch.ShardedExecution())
          replicationFactor(num_replicas)  # an inline comment
        Training.gradientAccumulation(4)
        TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
        outputMode(poptorch.OutputMode.EveryN, output_return_period=2)
        Precision.setPartialsType(torch.half)
        setAvailableMemoryProportion({"IPU0": 0.5})
        _Popart.set("x", [1, -2.5, ("a", None)])
        broadcast_buffers = False
    """.replace("num_replicas", "2")
    )
    expected = Options().deviceIterations(1).replicationFactor(2).setExecutionStrategy(ShardedExecution())
    expected.Training.gradientAccumulation(4)
    expected.TensorLocations.setWeightLocation(TensorLocationSettings().useOnChipStorage(False))
    expected.outputMode(OutputMode.EveryN, 2).setAvailableMemoryProportion({"IPU0": 0.5})
    expected.Precision.setPartialsType(torch.half)
    expected._Popart.set("x", [1, -2.5, ("a", None)])
    expected.broadcastBuffers(False)
    options = Options()
    assert options.loadFromFile(path) is options
    assert repr(options) == repr(expected)


def test_strategies_can_be_spelled_with_their_stages(file_with):
    line = 'setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("a").ipu(1), ["b", "c"]))'
    options = Options().loadFromFile(file_with(line))
    assert repr(options._execution_strategy) == repr(PipelinedExecution(Stage("a").ipu(1), ["b", "c"]))


def test_a_second_file_adds_to_the_first(file_with):
    options = Options().loadFromFile(file_with("deviceIterations(2)\nreplicationFactor(2)"))
    options.loadFromFile(file_with("replicationFactor(4)", "more.conf"))
    assert (options.device_iterations, options.replication_factor) == (2, 4)


def test_a_line_that_is_no_python_is_named_by_its_count_and_text(file_with):
    path = file_with("# comment\ndeviceIterations(1)\n\nreplicationFactor(\n")
    with pytest.raises(ConfigFileError) as error:
        Options().loadFromFile(path)
    assert str(error.value).splitlines()[:2] == [
        "SyntaxError at line 2 of options.conf: '(' was never closed",
        "> options.replicationFactor(",
    ]
    assert "(line 4 of " in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        "deviceIterations((lambda: 4)())",
        "deviceIterations([4 for _ in (1,)][0])",
        "deviceIterations(4); replicationFactor(2)",
        "deviceIterations(*[4])",
        "deviceIterations(not 4)",
        "deviceIterations(2 + 2)",
        'deviceIterations(f"{4}")',
        "deviceIterations({1: 4}[1])",
        "device_iterations",
    ],
)
def test_a_line_that_is_more_than_a_setting_is_refused(file_with, line):
    with pytest.raises(ConfigFileError, match=r"SyntaxError at line 1 of options.conf"):
        Options().loadFromFile(file_with(line))


@pytest.mark.parametrize(
    "line",
    [
        "__class__()",
        "_freeze()",
        'clone().__init__.__globals__["os"].system("true")',
        "_show_progress_bar = 1",
    ],
)
def test_private_names_are_out_of_reach(file_with, line):
    with pytest.raises((AttributeError, ConfigFileError)):
        Options().loadFromFile(file_with(line))


def test_builtins_are_out_of_reach(file_with):
    with pytest.raises(NameError, match="name '__import__' is not defined"):
        Options().loadFromFile(file_with('deviceIterations(__import__("os"))'))
    with pytest.raises(NameError, match="name 'print' is not defined: options files know options, poptorch"):
        Options().loadFromFile(file_with("deviceIterations(print)"))


def test_a_bad_value_fails_as_the_call_does_and_says_where(file_with):
    with pytest.raises(AssertionError, match="Unexpected type") as error:
        Options().loadFromFile(file_with('\ndeviceIterations("4")'))
    assert "at line 2 of" in error.value.__notes__[0]
    with pytest.raises(AttributeError, match="Invalid attribute 'wibble'"):
        Options().loadFromFile(file_with("wibble(4)"))


JSON = """{
    "deviceIterations": 4,
    "outputMode": ["OutputMode.EveryN", 2],
    "modelName": "model.v2",
    "connectionType": "ConnectionType.Never",
    "setAvailableMemoryProportion": {"IPU0": 0.5},
    "disableModuleNamescope": [],
    "updatableNamedBuffers": [["a", "b"]],
    "Training.accumulationAndReplicationReductionType": "ReductionType.Sum",
    "_Popart.set": ["autoRecomputation", 3]
}"""


def test_json_maps_accessors_to_arguments():
    text = JSON.replace('["OutputMode.EveryN", 2]', '"OutputMode.All"')
    options = Options()
    assert options.from_json(text) is options
    assert (options.device_iterations, options.output_mode) == (4, OutputMode.All)
    assert (options.model_name, options.connection_type) == ("model.v2", 2)
    assert options.available_memory_proportion == {0: 0.5}
    assert not options._module_namescope_enabled
    assert options.Training.accumulation_and_replication_reduction_type == 0
    assert options._Popart.options == {"updatableNamedBuffers": ["a", "b"], "autoRecomputation": 3}


def test_enum_members_are_not_looked_for_inside_lists():
    with pytest.raises(
        AssertionError, match=r"outputMode takes a poptorch.OutputMode; found 'OutputMode.EveryN'"
    ):
        Options().from_json(JSON)


def test_faulty_json_is_refused():
    with pytest.raises(AttributeError, match="'device_iterations' is no setter"):
        Options().from_json('{"device_iterations": 4}')
    with pytest.raises(ValueError, match=r"OutputMode takes one of 'Final', 'EveryN'.*; found 'Most'"):
        Options().from_json('{"outputMode": "OutputMode.Most"}')
    with pytest.raises(ValueError, match="a JSON object of options takes a dictionary"):
        Options().from_json("[1]")
    with pytest.raises(AttributeError, match="private names"):
        Options().from_json('{"__init__.__globals__": 1}')


def test_default_options_come_from_the_environment_last(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "a")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"enableExecutableCaching": "b", "deviceIterations": 7}')
    options = Options()
    assert (options._Popart.options["cachePath"], options.device_iterations) == ("b", 7)
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", "{")
    with pytest.raises(ValueError) as error:
        Options()
    assert error.value.__notes__[1] == "in the environment variable POPTORCH_DEFAULT_OPTIONS: {"
