"""Batches are put together and cut along dimension 0, whatever they are nested in."""

from collections import namedtuple

import pytest
import torch

from popengine.errors import DataError
from poptorch.data.rows import concatenate_batches, group_batches, rebatch_rows

Pair = namedtuple("Pair", "x y")


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_nested_batches_are_concatenated():
    result = concatenate_batches(
        [{"a": [rows(1)], "p": Pair(rows(2), 5)}, {"a": [rows(3)], "p": Pair(rows(4), 5)}]
    )
    assert result["a"][0].tolist() == [1, 3]
    assert isinstance(result["p"], Pair) and result["p"].x.tolist() == [2, 4] and result["p"].y == 5


def test_constants_that_differ_are_refused():
    with pytest.raises(DataError, match="differ in more than their tensors"):
        concatenate_batches([[rows(1), "a"], [rows(2), "b"]])


@pytest.mark.parametrize("keep_tail, expected", [(False, [[0, 1], [2, 3]]), (True, [[0, 1], [2, 3], [4]])])
def test_groups_keep_their_tail_only_if_asked(keep_tail, expected):
    assert [g.tolist() for g in group_batches([rows(n) for n in range(5)], 2, keep_tail)] == expected


@pytest.mark.parametrize("sizes", [[1] * 7, [3, 4], [7], [2, 5], [5, 0, 2]])
@pytest.mark.parametrize("keep_tail, tail", [(False, []), (True, [[6]])])
def test_rebatching_keeps_every_row_and_its_order(sizes, keep_tail, tail):
    batches = torch.arange(7).split(sizes)
    assert [b.tolist() for b in rebatch_rows(batches, 3, keep_tail)] == [[0, 1, 2], [3, 4, 5], *tail]


def test_rows_can_only_be_cut_where_all_tensors_have_as_many():
    with pytest.raises(DataError, match=r"\[2\], \[3\]"):
        list(rebatch_rows([[torch.ones(2), torch.ones(3)]], 2, keep_tail=False))
