"""A store's draft leaves what is kept alone, and is kept as a whole."""

import torch

from popengine.run.state.store import Kept, Store


def filled(**state):
    kept = Kept(
        {"slot_w": torch.ones(3), "slot_b": torch.zeros(3)},
        {"w": state or {"velocity": torch.full((3,), 5.0)}},
    )
    store = Store({"slot_w": "w", "slot_b": "b"})
    store.sums = {"w": torch.zeros(3)}
    store.begin(kept)
    return store, kept


def step(store):
    """An update as rules make it: in place, once what it begins with is there."""
    store.renew(["w"])
    for name, value in store.old.get("w", {}).items():
        (store.state["slot_w"] if name == "weight" else store.states["w"][name]).copy_(value)
    store.state["slot_w"].add_(1)
    store.states["w"]["velocity"].zero_()
    store.state["slot_b"] = torch.ones(3)  # buffers are replaced


def test_updates_write_to_nothing_that_is_kept():
    store, kept = filled()
    for _ in range(3):
        step(store)
    assert [value.tolist() for value in kept.state.values()] == [[1, 1, 1], [0, 0, 0]]
    assert kept.states["w"]["velocity"].tolist() == [5, 5, 5]


def test_a_draft_that_is_kept_holds_what_the_call_did():
    store, kept = filled()
    for _ in range(2):
        step(store)
        kept = store.draft()
        store.begin(kept)
    assert kept.state["slot_w"].tolist() == [3, 3, 3]
    assert kept.states["w"]["velocity"].tolist() == [0, 0, 0]


def test_there_is_one_spare_set_of_what_updates_write_to():
    """What was kept before a call is the memory of the next call's weights: two sets take turns."""
    store, kept = filled()
    seen = []
    for _ in range(4):
        step(store)
        kept = store.draft()
        store.begin(kept)
        seen.append((kept.state["slot_w"].data_ptr(), kept.states["w"]["velocity"].data_ptr()))
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert len(list(store.spare())) == 2


def test_a_state_that_a_failed_call_began_is_not_kept():
    store, kept = filled()
    store.begin(kept := Kept(kept.state, {"w": {}}))
    store.renew(["w"])
    store.states["w"]["velocity"] = torch.ones(3)
    store.begin(kept)
    assert store.states == {"w": {}}


def test_a_call_that_will_not_be_undone_has_no_spare_set():
    store, _ = filled()
    step(store)
    store.begin(store.draft(), in_place=True)
    before = store.state["slot_w"]
    step(store)
    assert store.state["slot_w"] is before
    assert store.draft().spare == {}
