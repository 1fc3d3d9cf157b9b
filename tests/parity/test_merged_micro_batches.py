"""Merged micro-batches: what a user sees stays; the bits are those of plain PyTorch with larger micro-batches."""

import functools
import logging

import parity_models
import pytest
import torch
from parity_models import Digits, Normed, Transformer
from parity_runs import LAYOUTS, ROWS, made, options, plain, trained
from torch import nn
from torch.nn import functional

import poptorch
from popengine.profile import load
from poptorch.testing import compare
from popvision.analysis import Figures

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
MERGED = 4  # of 8 micro-batches


@functools.cache
def merged(model):
    return trained(model, ADAM, updates=4, merged=MERGED)


def unmerged(model):
    return trained(model, ADAM, updates=4)


def one_thread(run):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("merged", [2, MERGED, 8])
def test_updates_have_the_bits_of_plain_pytorch_with_merged_micro_batches(merged):
    ours = one_thread(lambda: trained(Digits, ADAM, updates=4, merged=merged))
    theirs = one_thread(lambda: plain(Digits, ADAM, updates=4, merged=merged))
    assert ours.differs_from(theirs) == [
        "losses"
    ]  # of which plain PyTorch has one for all merged micro-batches
    means = ours.losses.view(-1, merged).mean(1)
    torch.testing.assert_close(means, theirs.losses)


@pytest.mark.parametrize("model", [Digits, Transformer])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_bits(model, layout):
    assert trained(model, ADAM, LAYOUTS[layout](), 4, merged=MERGED).differs_from(merged(model)) == []


def test_replicas_give_the_bits_of_plain_pytorch():
    model = made(Digits)
    chosen = options(replicas=2, merged=True)
    found = compare(model, chosen, model.data(2 * 8 * ROWS), ADAM(model.parameters()))
    assert found.equal and "computed as one" in found.title


@pytest.mark.parametrize("grouping", ["Consecutive", "Orthogonal"])
def test_input_groups_read_their_own_rows(grouping):
    model = made(Digits)
    chosen = options(replicas=4, merged=MERGED)
    chosen.inputReplicaGrouping(2, getattr(poptorch.CommGroupType, grouping))
    assert compare(model, chosen, model.data(2 * 8 * ROWS), ADAM(model.parameters())).equal


def test_compare_merges_as_many_as_a_call_does():
    model = made(Digits)
    chosen = options(merged=True)
    found = compare(model, chosen, model.data(8 * ROWS), ADAM(model.parameters()))
    overview = poptorch.describe(made(Digits), chosen, model.data(8 * ROWS))
    assert found.equal and overview.merged > 1
    assert f"{overview.merged} computed as one" in found.title


def test_random_numbers_are_those_of_each_micro_batch():
    model = functools.partial(Transformer, 0.1)
    ours, before = merged(model), unmerged(model)
    torch.testing.assert_close(ours.losses, before.losses, rtol=1e-4, atol=1e-5)


def test_random_numbers_without_an_operand_are_drawn_for_each_micro_batch():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            noise = torch.randn(2, 3)
            return noise, functional.mse_loss(self.layer(x), noise)

    x = torch.arange(48.0).view(16, 3)
    noises = [
        poptorch.trainingModel(model, options(merged=k), torch.optim.SGD(model.parameters(), lr=0.0))(x)[0]
        for k, model in ((0, Noisy()), (MERGED, Noisy()))
    ]
    assert torch.equal(*noises) and len(noises[0].unique()) == 48


class Everything(nn.Module):
    """Returns rows, values of a micro-batch, and what does not depend on it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x, labels):
        scores = self.layer(x)
        loss = (
            functional.cross_entropy(scores, labels, ignore_index=3) + 0.1 * self.layer.weight.square().sum()
        )
        return scores, scores.softmax(0), scores.amax(0), self.layer.weight * 2, scores.argmax(1), loss


def data_of_everything(rows):
    torch.manual_seed(3)
    labels = torch.randint(0, 3, (rows,))
    labels[1::3] = 3
    return torch.randn(rows, 3), labels


def everything_returned(k, mode, *, ragged=0, reduction=None, anchors=True, period=1):
    torch.manual_seed(2)
    model = Everything()
    chosen = options(iterations=4, merged=k).outputMode(
        mode, period if mode == poptorch.OutputMode.EveryN else None
    )
    if ragged:
        chosen.allowNewShapes()
    if reduction:
        chosen.Training.setMeanAccumulationAndReplicationReductionStrategy(reduction)
    if anchors:
        chosen.anchorTensor("gradient", "Gradient___layer.weight", poptorch.OutputMode.All)
        chosen.anchorTensor("x", "x", poptorch.OutputMode.All)
    executor = poptorch.trainingModel(model, chosen, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = data_of_everything(4 * 8 * ROWS)
    found = [*executor(*batch)]
    if ragged:
        found += executor(*(part[:ragged] for part in batch))
    if anchors:
        found += [executor.getAnchoredTensor("gradient"), executor.getAnchoredTensor("x")]
    return [*found, *model.state_dict().values()]


@pytest.mark.parametrize("mode", ["All", "Final", "Sum", "EveryN"])
def test_outputs_and_anchors_are_as_without_merging(mode):
    mode = getattr(poptorch.OutputMode, mode)
    before, after = (everything_returned(k, mode, period=2) for k in (0, MERGED))
    assert len(before) == 10
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("ragged", [3 * 8 * ROWS, 8 * ROWS + 6 * ROWS, 5 * ROWS + 1, 1])
def test_incomplete_batches_are_as_without_merging(ragged):
    before, after = (
        everything_returned(k, poptorch.OutputMode.All, ragged=ragged, anchors=False) for k in (0, MERGED)
    )
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)  # a micro-batch without labels has no mean


def test_running_means_are_as_without_merging():
    running = poptorch.MeanReductionStrategy.Running
    before, after = (everything_returned(k, poptorch.OutputMode.All, reduction=running) for k in (0, MERGED))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_a_mask_of_each_row(masked):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 12)

        def forward(self, x, kept):
            q, k, v = self.layer(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4)
            mask = kept[:, None, None] if masked else torch.ones(5, 5).tril().bool()
            found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return found, functional.mse_loss(found, torch.zeros_like(found))

    torch.manual_seed(0)
    model = Attending()
    kept = torch.ones(16, 5, dtype=torch.bool)
    kept[::3, 3:] = False
    assert compare(model, options(merged=MERGED), (torch.randn(16, 5, 4), kept)).equal


@pytest.mark.parametrize("layout", ["preserve", "channels_last"])
def test_image_networks_in_each_memory_layout(layout):
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)),
                *(nn.Conv2d(8, 8, 3), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(32)),
                nn.Linear(32, 3),
            )

        def forward(self, x, y):
            found = self.layers(x)
            return found, functional.smooth_l1_loss(found, y)

    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 12, 12), torch.randn(16, 3)
    weights = []
    for k in (0, MERGED):
        torch.manual_seed(1)
        model = Images()
        chosen = options(merged=k).memoryFormat(layout)
        poptorch.trainingModel(model, chosen, torch.optim.SGD(model.parameters(), lr=1.0))(x, y)
        weights.append([value.detach() for value in model.parameters()])
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_half_precision_and_casts_are_merged():
    torch.manual_seed(0)
    x, y = torch.randn(16, 6).bfloat16(), torch.randint(0, 4, (16,))
    weights = []
    for k in (0, MERGED):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 4).bfloat16())
        model.forward = lambda x, y, model=model: functional.cross_entropy(model[0](x).float(), y)
        poptorch.trainingModel(model, options(merged=k), torch.optim.SGD(model.parameters(), lr=1.0))(x, y)
        weights.append(model[0].weight.detach())
    torch.testing.assert_close(*weights, rtol=2e-2, atol=1e-2)


def test_a_loss_over_the_rows_of_a_micro_batch_stays_one():
    """A contrastive loss compares the rows of a micro-batch with each other: of no other micro-batch."""

    class Contrastive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 4)

        def forward(self, x, y):
            scores = self.layer(x) @ self.layer(y).t()
            loss = functional.cross_entropy(scores, torch.arange(len(x)))
            return scores, loss

    torch.manual_seed(0)
    batch = torch.randn(16, 5), torch.randn(16, 5)
    found = []
    for k in (0, MERGED):
        torch.manual_seed(1)
        model = Contrastive()
        out = poptorch.trainingModel(model, options(merged=k), ADAM(model.parameters()))(*batch)
        found.append([*out, model.layer.weight.detach()])
    assert found[1][0].shape == (16, 2)
    torch.testing.assert_close(*found)


# ---- what can't be merged ----------------------------------------------------------------------------------------


def test_running_statistics_are_refused_by_name_and_line():
    model = made(Normed)
    executor = poptorch.trainingModel(model, options(merged=True), ADAM(model.parameters()))
    with pytest.raises(poptorch.Error, match=r"buffer a\.1\.") as caught:
        executor(*model.data(16))
    assert f"at {parity_models.__file__}:" in str(caught.value) and "GroupNorm" in str(caught.value)


def test_running_statistics_that_stay_are_merged():
    model = made(Normed).eval()
    model.train = lambda mode=True: model  # an executor calls it
    found = compare(model, options(merged=MERGED), model.data(16))
    assert found.conclusion == "all equal" or "rounding" in found.conclusion


def test_an_operation_of_the_user_is_refused_by_name_and_line():
    @torch.library.custom_op("merging::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(doubled(x)).square().mean()

    model = Own()
    executor = poptorch.trainingModel(model, options(merged=2), ADAM(model.parameters()))
    with pytest.raises(poptorch.Error, match=r"merging\.doubled\.default has no rule") as caught:
        executor(torch.randn(16, 3))
    assert f"at {__file__}:" in str(caught.value) and "mergeMicroBatches(False)" in str(caught.value)


def test_a_number_that_is_none_is_refused():
    for wrong in (-1, 2.0, "2"):
        with pytest.raises(ValueError, match="mergeMicroBatches takes"):
            poptorch.Options().Training.mergeMicroBatches(wrong)


# ---- how many -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accumulation", "replicas", "cores", "merged"),
    [
        (8, 1, 2, 4),
        (8, 2, 2, 8),
        (8, 1, 1, 8),
        (8, 1, 16, 1),
        (6, 1, 2, 3),
        (5, 1, 2, 1),
        (9, 1, 2, 1),
        (12, 1, 8, 2),
    ],
)
def test_cores_stay_busy(accumulation, replicas, cores, merged):
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        model = made(Digits)
        chosen = options(accumulation=accumulation, replicas=replicas, merged=True)
        assert poptorch.describe(model, chosen, model.data(accumulation * replicas)).merged == merged
    finally:
        torch.set_num_threads(threads)


def test_a_pipeline_stays_full():
    model = parity_models.annotated(made(Digits))
    chosen = options(LAYOUTS["two stages"](), accumulation=12, merged=True)
    assert poptorch.describe(model, chosen, model.data(12)).merged <= 4  # two stages need three micro-batches


@pytest.mark.parametrize(("accumulation", "is_said"), [(16, True), (1, False), (2, False)])
def test_the_log_says_what_could_be_merged(caplog, accumulation, is_said):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with caplog.at_level(logging.INFO, logger="poptorch::python"):
            model = made(Digits)
            poptorch.describe(model, options(accumulation=accumulation), model.data(accumulation))
    finally:
        torch.set_num_threads(threads)
    assert ("mergeMicroBatches(True) would compute 8 micro-batches" in caplog.text) == is_said
    assert "would compute 1 " not in caplog.text


# ---- beside training ------------------------------------------------------------------------------------------------


def test_compiled_pieces_draw_the_same_numbers():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 8)

        def forward(self, x):
            dropped = functional.dropout(torch.ones(2, 8), 0.5)
            return dropped, functional.mse_loss(self.layer(x) * dropped, torch.zeros(2, 8))

    x = torch.randn(16, 3)
    found = []
    for k, backend in ((0, "eager"), (MERGED, "inductor")):
        model = Dropping()
        chosen = options(merged=k).compiler(backend)
        found.append(poptorch.trainingModel(model, chosen, torch.optim.SGD(model.parameters(), lr=0.1))(x)[0])
    assert torch.equal(*found)


def test_a_profile_counts_the_rows_of_merged_micro_batches(tmp_path):
    model = parity_models.annotated(made(Digits))
    chosen = options(LAYOUTS["two stages"](), iterations=2, merged=2).enableProfiling(tmp_path)
    executor = poptorch.trainingModel(model, chosen, ADAM(model.parameters()))
    executor(*model.data(2 * 8 * ROWS))
    executor.destroy()
    found = load(tmp_path / "training" / "profile.pop")
    assert (found.counts["micro_batch_size"], found.counts["accumulation"]) == (2 * ROWS, 4)
    assert Figures(found).samples_per_call == 2 * 8 * ROWS


def test_a_saved_executable_is_merged(tmp_path):
    model, batch = made(Digits), made(Digits).data(8 * ROWS)
    executor = poptorch.trainingModel(model, options(merged=MERGED), ADAM(model.parameters()))
    executor.compile(*batch)
    executor.save(str(tmp_path / "model.poptorch"))
    again = poptorch.load(str(tmp_path / "model.poptorch"))
    assert torch.equal(executor(*batch)[1], again(*batch)[1])
    assert f"{MERGED} computed as one" in again.plan.title


def test_an_embedding_of_one_word_is_merged():
    class OneWord(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(7, 3)

        def forward(self, x):
            return functional.mse_loss(self.words(x[0, 0]), self.words(x[1]).sum(0))

    model = OneWord()
    x = torch.randint(0, 7, (16, 4))
    weights = []
    for k in (0, MERGED):
        torch.manual_seed(0)
        model = OneWord()
        poptorch.trainingModel(model, options(merged=k), torch.optim.SGD(model.parameters(), lr=1.0))(x)
        weights.append(model.words.weight.detach())
    torch.testing.assert_close(*weights)


def test_values_that_forward_writes_into_a_new_tensor_are_merged():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            found = torch.zeros(len(x), 2, 4)
            found[:, 0] = self.layer(x)
            found[:, 1] = self.layer.bias
            return found, functional.mse_loss(found, torch.ones_like(found))

    torch.manual_seed(0)
    model = Writing()
    assert compare(model, options(merged=MERGED), torch.randn(16, 4)).equal
