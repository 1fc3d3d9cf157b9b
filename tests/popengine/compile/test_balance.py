"""The best cut of the blocks is found exactly."""

import itertools
import random

import pytest

from popengine.compile.placement import balance_blocks, describe_balance
from popengine.errors import PartitionError


def costs_of(*milliseconds):
    return {f"b{i}": value / 1e3 for i, value in enumerate(milliseconds)}


def slowest(costs, cut):
    return max(sum(costs[name] for name in names) for names in cut)


def test_a_heavy_block_gets_an_ipu_of_its_own():
    assert balance_blocks(costs_of(1, 1, 5, 1, 1), 3) == (("b0", "b1"), ("b2",), ("b3", "b4"))


def test_of_equally_fast_cuts_the_others_are_balanced_too():
    assert balance_blocks(costs_of(4, 1, 1, 1, 1), 3) == (("b0",), ("b1", "b2"), ("b3", "b4"))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cut_is_faster(seed):
    draw = random.Random(seed)
    costs = costs_of(*[draw.random() for _ in range(draw.randint(2, 9))])
    count, ipus = len(costs), draw.randint(1, len(costs))
    names = list(costs)
    every = [
        [names[a:b] for a, b in itertools.pairwise((0, *inner, count))]
        for inner in itertools.combinations(range(1, count), ipus - 1)
    ]
    best = min(slowest(costs, cut) for cut in every)
    assert slowest(costs, balance_blocks(costs, ipus)) == pytest.approx(best, rel=1e-12)


def test_fewer_blocks_than_ipus_is_an_error():
    with pytest.raises(PartitionError, match="2 blocks can't be placed on 3 ipus"):
        balance_blocks(costs_of(1, 2), 3)


def test_blocks_without_a_cost_are_cut_too():
    assert balance_blocks(costs_of(0, 0, 0), 3) == (("b0",), ("b1",), ("b2",))


def test_the_description_has_the_load_of_each_ipu():
    text = "  ipu 0: 6.000 ms: b0, b1\n  ipu 1: 2.000 ms: b2"
    assert describe_balance(costs_of(3, 3, 2), (("b0", "b1"), ("b2",))) == text
