"""What another option would give is measured on this machine, for a profile, and said with the measured factor."""

import pytest
import torch
from torch import nn

import poptorch
from popengine.profile import load
from popengine.run.piece_costs import measure_speedup
from poptorch.compiling import tune
from popvision.advice import advice_sentences
from popvision.analysis import Figures

LAYOUT = 'options.memoryFormat("channels_last")'


class Network(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)).to(dtype)

    def forward(self, x):
        return poptorch.identity_loss(self.layers(x).square(), "mean")


def hinted(folder, options, dtype=torch.float32):
    model = Network(dtype)
    options.showCompilationProgressBar(False)
    trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = trainer(torch.ones(2, 3, 8, 8, dtype=dtype))
    trainer.detachFromDevice()
    profile = load(folder / "training" / "profile.pop")
    return loss, profile


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.fixture
def measured(monkeypatch):
    """The first graph takes 3 ms, what it is changed into 2 ms; how often each ran is kept."""
    seen = []

    class Sample:
        def __init__(self, partition, weights, samples):
            self.code, self.runs = str(partition.pieces), 0
            seen.append(self)

        def total_seconds(self, count):
            self.runs += count
            return count * (0.003 if self.code == seen[0].code else 0.002)

    monkeypatch.setattr(tune, "sample_of", Sample)
    return seen


def test_a_profile_says_what_another_layout_would_give(tmp_path, measured):
    _, profile = hinted(tmp_path, poptorch.Options().enableProfiling(tmp_path))
    assert profile.facts["hints"] == {LAYOUT: pytest.approx(1.5)}
    said = [text for text in advice_sentences(Figures(profile)) if text.startswith(LAYOUT)]
    assert len(said) == 1
    assert "at least 1.50 times as fast on this machine" in said[0]


def test_nothing_is_measured_without_a_profile(measured):
    model = Network()
    trainer = poptorch.trainingModel(model, poptorch.Options().showCompilationProgressBar(False))
    trainer(torch.ones(2, 3, 8, 8))
    assert measured == []


def test_a_layout_that_was_chosen_is_not_measured_against_another(tmp_path, measured):
    _, profile = hinted(tmp_path, poptorch.Options().enableProfiling(tmp_path).memoryFormat("preserve"))
    assert profile.facts["hints"] == {}
    assert len(measured) == 1


def test_a_slow_micro_batch_is_run_once_and_gets_no_hint(tmp_path, measured, monkeypatch):
    monkeypatch.setattr(tune, "_MOST_SECONDS", 0.001)
    _, profile = hinted(tmp_path, poptorch.Options().enableProfiling(tmp_path))
    assert profile.facts["hints"] == {}
    assert [sample.runs for sample in measured] == [1]


def test_a_factor_is_the_lower_quartile_of_alternating_rounds():
    first, second = iter([1.0, *range(1, 8)]), iter([1.0] * 8)  # the first run of each counts for nothing
    assert measure_speedup(lambda count: next(first), lambda count: next(second), 1.0) == 2.0


def test_measuring_on_this_machine_leaves_the_training_alone(tmp_path):
    torch.manual_seed(1)
    plain = poptorch.trainingModel(Network(), poptorch.Options().showCompilationProgressBar(False))(
        torch.ones(2, 3, 8, 8)
    )
    torch.manual_seed(1)
    loss, profile = hinted(tmp_path, poptorch.Options().enableProfiling(tmp_path))
    assert torch.equal(loss, plain)
    assert set(profile.facts["hints"]) == {LAYOUT} and profile.facts["hints"][LAYOUT] > 0


@pytest.mark.parametrize(
    ("features", "names"), [({}, {'options.Precision.halfKernels("auto")'}), ({"avx512_bf16": True}, set())]
)
def test_native_half_kernels_are_measured_where_auto_would_take_others(
    tmp_path, monkeypatch, features, names
):
    monkeypatch.setattr("popengine.compile.rewriting.partials.cpu_features", lambda: features)
    options = poptorch.Options().enableProfiling(tmp_path).memoryFormat("preserve")
    options.Precision.halfKernels("native")
    _, profile = hinted(tmp_path, options, torch.bfloat16)
    assert set(profile.facts["hints"]) == names


calls = []


@torch.library.custom_op("hints_test::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    calls.append(x.shape)
    return x.clone()


noted.register_fake(torch.empty_like)


def test_the_users_own_operations_are_not_called_for_a_hint(tmp_path):
    class Noting(Network):
        def forward(self, x):
            return super().forward(torch.ops.hints_test.noted(x))

    options = poptorch.Options().enableProfiling(tmp_path).showCompilationProgressBar(False)
    model = poptorch.inferenceModel(Noting(), options)
    model(torch.ones(2, 3, 8, 8))
    model.detachFromDevice()
    assert len(calls) == 1
    assert load(tmp_path / "inference" / "profile.pop").facts["hints"] == {}
