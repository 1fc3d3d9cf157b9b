"""A store puts everything back after a failed call."""

import torch

from popengine.run.store import Store


def filled():
    store = Store({"slot_w": "w", "slot_b": "b"})
    store.state = {"slot_w": torch.ones(3), "slot_b": torch.zeros(3)}
    store.sums = {"w": torch.zeros(3)}
    store.states = {"w": {"velocity": torch.full((3,), 5.0)}}
    return store


def test_weights_written_in_place_are_restored():
    store = filled()
    store.begin()
    store.back_up()
    store.state["slot_w"].add_(1)
    store.states["w"]["velocity"].zero_()
    store.restore()
    assert store.state["slot_w"].tolist() == [1, 1, 1]
    assert store.states["w"]["velocity"].tolist() == [5, 5, 5]


def test_the_backup_is_of_the_calls_beginning_and_not_of_a_later_update():
    store = filled()
    store.begin()
    for _ in range(3):
        store.back_up()
        store.state["slot_w"].mul_(10)
    store.restore()
    assert store.state["slot_w"].tolist() == [1, 1, 1]


def test_buffers_are_replaced_and_so_restored_without_a_copy():
    store = filled()
    before = store.state["slot_b"]
    store.begin()
    store.state["slot_b"] = torch.ones(3)
    store.restore()
    assert store.state["slot_b"] is before


def test_a_state_that_the_call_began_is_gone_again():
    store = filled()
    store.states["w"] = {}
    store.begin()
    store.back_up()
    store.states["w"]["velocity"] = torch.ones(3)
    store.restore()
    assert store.states["w"] == {}


def test_a_call_that_succeeds_keeps_what_it_did():
    store = filled()
    store.begin()
    store.back_up()
    store.state["slot_w"].add_(1)
    store.begin()
    store.back_up()
    store.state["slot_w"].add_(1)
    store.restore()
    assert store.state["slot_w"].tolist() == [2, 2, 2]
