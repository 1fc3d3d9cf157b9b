"""Beam search and point clouds, checked against slow and obvious versions."""

import itertools
import math

import pytest
import torch

import poptorch


def paths_by_enumeration(probs, blank):
    """All label sequences with their probability, best first."""
    found = {}
    for alignment in itertools.product(range(probs.shape[1]), repeat=probs.shape[0]):
        merged = [label for label, _ in itertools.groupby(alignment)]
        path = tuple(label for label in merged if label != blank)
        chance = math.exp(sum(probs[t, label].item() for t, label in enumerate(alignment)))
        found[path] = found.get(path, 0.0) + chance
    return sorted(found.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("blank", [0, 2])
def test_the_decoder_finds_the_most_probable_paths(blank):
    torch.manual_seed(0)
    probs = torch.randn(5, 2, 3).log_softmax(2)
    lengths = torch.tensor([5, 3])

    def forward(probs, lengths):
        return poptorch.ctc_beam_search_decoder(probs, lengths, blank, 100, 2)

    for scores, counts, paths in (forward(probs, lengths), poptorch.inferenceModel(forward)(probs, lengths)):
        assert scores.shape == counts.shape == (2, 2)
        assert paths.shape == (2, 2, 5)
        for sample in range(2):
            expected = paths_by_enumeration(probs[: lengths[sample], sample], blank)
            for rank in range(2):
                path = tuple(paths[sample, rank, : counts[sample, rank]].tolist())
                assert path == expected[rank][0]
                assert scores[sample, rank].exp().item() == pytest.approx(expected[rank][1], rel=1e-4)


def test_the_decoder_takes_tensors():
    with pytest.raises(poptorch.Error, match="takes tensors"):
        poptorch.ctc_beam_search_decoder([1.0], torch.tensor([1]))  # type: ignore[arg-type]


LINE = torch.tensor([[0.0], [1.0], [10.0], [4.0], [0.0], [5.0], [6.0]])


def test_farthest_points_are_sampled_from_each_cloud():
    model = poptorch.inferenceModel(lambda x: poptorch.fps(x, [0, 4, 7], 0.5))
    expected = [0, 2, 4, 6]
    assert poptorch.fps(LINE, [0, 4, 7], 0.5).tolist() == expected
    assert model(LINE).tolist() == expected


def test_a_random_start_is_a_point_of_the_cloud():
    model = poptorch.inferenceModel(lambda x: poptorch.fps(x, [0, 4, 7], 1.0, random_start=True))
    found = model(LINE).tolist()
    assert sorted(found[:4]) == [0, 1, 2, 3]
    assert sorted(found[4:]) == [4, 5, 6]


@pytest.mark.parametrize("ptr", [[0], "07", [0, 1.0], [0, 99]])
def test_fps_refuses_other_boundaries(ptr):
    with pytest.raises(poptorch.Error, match="ptr"):
        poptorch.fps(LINE, ptr)


def test_the_nearest_point_is_of_the_same_cloud():
    x, y = torch.tensor([[0.0], [9.0], [0.0]]), torch.tensor([[10.0], [1.0], [8.0], [20.0]])

    def forward(x, y):
        return poptorch.nearest(x, y), poptorch.nearest(x, y, [0, 0, 1], torch.tensor([0, 0, 1, 1]))

    for every, same in (forward(x, y), poptorch.inferenceModel(forward)(x, y)):
        assert every.tolist() == [1, 0, 1]
        assert same.tolist() == [1, 0, 2]
    with pytest.raises(poptorch.Error, match="both"):
        poptorch.nearest(x, y, [0, 0, 1])
    with pytest.raises(poptorch.Error, match="sorted"):
        poptorch.nearest(x, y, [1, 0, 0], [0, 0, 0, 0])


def test_the_decoder_has_defaults():
    torch.manual_seed(0)
    probs = torch.log_softmax(torch.randn(3, 2, 4), -1)
    given = probs, torch.tensor([3, 2])
    expected = poptorch.ctc_beam_search_decoder(*given, 0, 100, 1)
    found = poptorch.ctc_beam_search_decoder(*given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    def forward(
        lengths,
    ):  # lengths have a row for each of the batch, which is the probabilities' second dimension
        return poptorch.ctc_beam_search_decoder(probs, lengths)

    found = poptorch.inferenceModel(forward)(given[1])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
