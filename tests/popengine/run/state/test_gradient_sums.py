"""The first gradient of a step becomes the sum without a copy, where nobody else can see it."""

import pytest
import torch

from popengine.ir import Accumulate, Compute, Free, Store
from popengine.run.state.gradient_sums import begin_sums, freed_at_once


def begun(frame, freed=frozenset({"g"})):
    sums = {"w": torch.zeros(2, 3)}
    begin_sums(sums, ["w"], frame, ["g"], freed)
    assert sums["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    return sums["w"] is frame["g"]


def gradient():
    return torch.arange(6.0).reshape(2, 3).clone()


def test_a_gradient_of_which_nothing_is_asked_becomes_the_sum():
    assert begun({"g": gradient()})


def test_a_gradient_that_somebody_asks_for_is_copied():
    assert not begun({"g": gradient()}, freed=frozenset())


@pytest.mark.parametrize(
    "others",
    [lambda g: {"same": g}, lambda g: {"view": g[0]}, lambda g: {"detached": g.detach()}],
    ids=["two names", "a view", "the same memory"],
)
def test_a_gradient_whose_memory_has_another_name_is_copied(others):
    frame = {"g": gradient()}
    frame |= others(frame["g"])
    assert not begun(frame)


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.arange(6, dtype=torch.float64).reshape(2, 3),
        lambda: torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]).t(),
        lambda: torch.arange(-2.0, 6.0)[2:].view(2, 3),
    ],
    ids=["dtype", "order in memory", "a part of larger memory"],
)
def test_a_gradient_of_another_form_is_copied(other):
    assert not begun({"g": other()})


def test_what_is_stored_or_computed_from_after_it_is_added_up_is_not_freed_at_once():
    program = [
        Accumulate(("a", "b", "c", "d"), ("A", "B", "C", "D"), 0),
        Store(("b",), (0,), 0),
        Free(("a", "b", "c"), 0),
        Compute(1, 0, (), ("d",)),
        Free(("d",), 0),
    ]
    assert freed_at_once(program) == {"a", "c"}
