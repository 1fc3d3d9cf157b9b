"""Where nodes, weights and buffers go, and what pieces read and write."""

import pytest
import torch
from engine_models import Net, enter, graph_of, stages

from popengine.compile.partition import cut_backwards, partition, visits_with_operations
from popengine.compile.placement import BlockError, place_blocks, sharded_if_too_few_micro_batches
from popengine.errors import PartitionError
from popengine.ir import Visit
from popengine.settings import Counts, Settings, StagePlan, Strategy
from small_models import module


def piece(partition, name):
    return next(piece for piece in partition.pieces if str(piece) == name)


def test_data_flows_through_the_forwards_and_back_through_the_backwards():
    parts = partition(graph_of(), stages(0, 1, 2, 3))
    assert [str(piece) for piece in parts.pieces] == ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0"]
    assert parts.ipus == (0, 1, 2, 3)
    assert parts.names == ("A", "B", "C", "D")


def test_inference_has_forwards_only():
    parts = partition(graph_of(Net().eval(), training=False), stages(0, 1, 2, 3))
    assert [str(piece) for piece in parts.pieces] == ["F0", "F1", "F2", "F3"]


def test_each_weight_lives_in_its_stage_and_a_shared_one_where_its_gradient_is_made():
    home = partition(graph_of(), stages(0, 1, 2, 3)).home
    assert home["parameter_a_weight"] == home["parameter_norm_bias"] == home["buffer_norm_running_mean"] == 0
    assert home["parameter_b_weight"] == 1
    assert home["parameter_c_weight"] == 2
    assert home["parameter_d_weight"] == 3


def test_every_value_is_made_once_before_it_is_read():
    graph = graph_of()
    for strategy in (
        stages(0, 1, 2, 3),
        stages(0, 1, 2, 0),
        stages(0, 0, 1, 1),
        stages(0, 1, 0, 1, order="sharded"),
    ):
        parts = partition(graph, strategy)
        for pieces in (parts.pieces, cut_backwards(parts).pieces):
            check_pieces(graph, pieces)


def check_pieces(graph, pieces):
    made, slots = set(), {slot.name for slot in graph.slots}
    for piece in pieces:
        assert set(piece.reads) <= made | slots
        assert not made & set(piece.writes)
        made |= set(piece.writes)
    assert {result.name for result in graph.results} <= made | slots


def test_a_backward_is_cut_into_what_the_stage_before_needs_and_gradients_of_weights():
    whole = partition(graph_of(), stages(0, 1, 2, 3))
    cut = cut_backwards(whole)
    assert " ".join(map(str, cut.pieces)) == "F0 F1 F2 F3 B3 B2 B1 W3 W2 W1 W0"
    for stage in range(4):
        of = [[piece for piece in parts.pieces if piece.stage == stage] for parts in (whole, cut)]
        lines = [sorted(line.name for piece in pieces for line in piece.lines) for pieces in of]
        assert lines[0] == lines[1]
    gradients = {result.name for result in whole.signature.results if result.kind == "gradient"}
    assert not [
        name for piece in cut.pieces if piece.phase == "B" for name in piece.writes if name in gradients
    ]
    # The weight of C is used in D again: D's part of its gradient is only added to C's, so no B waits for it.
    (shared,) = set(piece(cut, "W3").writes) & set(piece(cut, "W2").reads)
    assert shared in piece(whole, "B3").writes


def test_backward_never_reads_a_weight_view_from_another_stage():
    """Views of weights are made where they are needed: sending one would copy a weight for each micro-batch."""
    for piece_ in partition(graph_of(), stages(0, 1, 2, 3)).pieces:
        assert not [name for name in piece_.reads if name.startswith("t_")]


def test_each_line_of_a_piece_knows_the_users_line():
    found = piece(partition(graph_of(), stages(0, 1, 2, 3)), "F0")
    assert all("engine_models.py:" in line.where for line in found.lines)


def test_only_pieces_that_draw_take_a_key():
    parts = partition(graph_of(Net(0.5)), stages(0, 1, 2, 3))
    assert [str(piece) for piece in parts.pieces if piece.draws] == ["F1"]
    assert not any(piece.draws for piece in partition(graph_of(Net(0.0)), stages(0, 1, 2, 3)).pieces)


def test_nothing_but_blocks_is_known_of_an_empty_model():
    from popengine.compile.capture import capture

    graph = capture(module(lambda self, x: x), lambda inputs: inputs, [torch.zeros(2)], training=False)
    assert visits_with_operations(graph) == {0}
    assert len(partition(graph, Strategy()).pieces) == 1


def test_data_that_flows_back_is_refused():
    with pytest.raises(PartitionError, match="flows back from stage 1"):
        order = Strategy("1f1b", None, (StagePlan(("A", "C")), StagePlan(("B", "D"))))
        partition(graph_of(), order)


# ---- placement --------------------------------------------------------------------------------------------


def visits(*blocks):
    """What runs before any block, then these: a name, or a name and its ipu."""
    pairs = [block if isinstance(block, tuple) else (block, None) for block in blocks]
    return [Visit(None, None, "?"), *(Visit(name, ipu, "model.py:1") for name, ipu in pairs)]


AUTO_INCREMENT = Strategy("1f1b", "auto_increment")
SAME_AS_IPU = Strategy("1f1b", "same_as_ipu")


def test_auto_increment_numbers_new_blocks_after_the_implicit_part():
    found = place_blocks(visits("x", "y", "x", "z"), {0, 1, 2, 3, 4}, AUTO_INCREMENT)
    assert found.stage_of == (0, 1, 2, 1, 3)
    assert found.ipus == (0, 1, 2, 3)
    assert found.names == ("no block", "x", "y", "z")


def test_auto_increment_starts_with_the_first_block_where_nothing_runs_before():
    assert place_blocks(visits("x", "y"), {1, 2}, AUTO_INCREMENT).stage_of[1:] == (0, 1)


def test_same_as_ipu_puts_blocks_of_one_ipu_into_one_stage():
    found = place_blocks(visits(("x", 0), ("y", 1), ("z", 1)), {0, 1, 2, 3}, SAME_AS_IPU)
    assert (found.stage_of, found.ipus, found.names) == ((0, 0, 1, 1), (0, 1), ("no block, x", "y, z"))


def test_the_strategys_ipu_comes_before_the_blocks():
    strategy = Strategy("1f1b", None, (StagePlan(("x",), 3), StagePlan(("y",))))
    assert place_blocks(visits(("x", 0), ("y", 1)), {1, 2}, strategy).ipus == (3, 1)


def test_a_stage_on_two_ipus_is_refused():
    strategy = Strategy("1f1b", None, (StagePlan(("x", "y")),))
    with pytest.raises(BlockError, match="stage 0 can't be on ipu 0 and on ipu 1"):
        place_blocks(visits(("x", 0), ("y", 1)), {1, 2}, strategy)


def test_sharded_blocks_make_a_stage_at_every_change_of_ipu():
    strategy = Strategy("sharded", "same_as_ipu")
    found = place_blocks(visits(("x", 0), ("y", 1), ("z", 0), ("u", 0)), {1, 2, 3, 4}, strategy)
    assert (found.stage_of[1:], found.ipus) == ((0, 1, 2, 2), (0, 1, 0))


@pytest.mark.parametrize(
    ("ipus", "forward"),
    [((0,), 1), ((0, 1), 2), ((0, 0, 1), 2), ((1,), 2), ((0, 1, 0), 3), ((2, 1, 0, 3), 5)],
)
def test_the_least_work_counts_changes_of_ipu_from_ipu_0(ipus, forward):
    blocks = visits(*((f"block {i}", ipu) for i, ipu in enumerate(ipus)))
    used = set(range(1, len(blocks)))

    def refused(accumulation, iterations, training):
        counts = Counts(iterations=iterations, accumulation=accumulation)
        try:
            sharded_if_too_few_micro_batches(blocks, used, Settings(training, counts, AUTO_INCREMENT))
        except PartitionError as error:
            return error.message
        return None

    assert refused(2 * forward - 1, 1, training=True) is None
    assert refused(1, forward, training=False) is None
    if forward > 1:
        assert f"number of pipeline stages ({2 * forward - 1})" in refused(2 * forward - 2, 1, training=True)
        assert f"number of pipeline stages ({forward})" in refused(1, forward - 1, training=False)


def test_a_block_that_is_opened_outside_a_capture_is_in_no_graph():
    enter("outside")
    assert [visit.name for visit in graph_of().visits] == [None, "A", "B", "C", "D"]
