"""Whatever a piece reads begins at a multiple of 64 bytes, so that bits don't depend on where rows lie in a batch."""

import pytest
import torch
from test_engine_runs import HYPER, batch, engine_for

from popengine.run.devices import with_aligned_micro_batches, with_aligned_start


def odd(value):
    """The same values, 4 bytes after a multiple of 64."""
    room = torch.empty(value.numel() + 1, dtype=value.dtype)
    return room[1:].view_as(value).copy_(value)


def test_a_batch_that_begins_well_is_not_copied():
    values = torch.zeros(6, 1, 4, 16)
    # The stride of a dimension of one element does not count.
    for given in (values, torch.zeros(3, 2, 8)[:, :1], torch.zeros(2, 1, 3)[:1]):
        assert with_aligned_micro_batches(given) is given
    assert with_aligned_start(values) is values


def test_channels_last_stays_what_it_is():
    values = torch.randn(6, 3, 5, 5).to(memory_format=torch.channels_last).reshape(3, 1, 2, 3, 5, 5)
    found = with_aligned_micro_batches(values)
    assert torch.equal(found, values)
    assert found[1, 0].is_contiguous(memory_format=torch.channels_last)
    assert found[1, 0].data_ptr() % 64 == 0


def watched(engine):
    """Look at all that the pieces of an engine read: the list gets the names of what begins elsewhere."""
    slots, wrong = {slot.name for slot in engine.plan.partition.signature.slots}, []

    def looking(piece, code):
        def look(values):
            for name, value in zip(piece.reads, values, strict=False):  # a key of random numbers is the last
                # Views of what other pieces have made lie where they lie in every layout.
                begin = value.data_ptr() if name in slots else value.untyped_storage().data_ptr()
                wrong.extend([name] if begin % 64 else [])
            return code(values)

        return look

    for codes in engine.workers[0].codes:
        codes[:] = map(looking, engine.plan.partition.pieces, codes)
    return wrong


def test_what_begins_elsewhere_is_seen():
    engine = engine_for((0, 0, 0, 0))
    wrong = watched(engine)
    (name,) = (slot.name for slot in engine.plan.partition.signature.slots if slot.key == "a.weight")
    engine.state.values[0][name] = odd(engine.state.values[0][name])
    engine.run(batch(16), HYPER)
    assert set(wrong) == {name}


@pytest.mark.parametrize("ipus", [(0, 0, 0, 0), (0, 1, 2, 3)])
def test_every_computation_reads_what_begins_well_whatever_the_user_gives(ipus):
    """Micro-batches of 2 x 4 numbers lie 32 bytes apart: half of them began in the middle."""
    engine, twin = (engine_for(ipus, replicas=2) for _ in range(2))
    wrong = [watched(engine), watched(twin)]
    x, y = batch(32)
    for _ in range(2):
        engine.run([odd(x), odd(y)], HYPER)
        twin.run([x, y], HYPER)
    assert wrong == [[], []]
    assert all(
        torch.equal(value, twin.state.train_state.find_weights()[name])
        for name, value in engine.state.train_state.find_weights().items()
    )
