"""Where nodes, weights and buffers go, and what pieces read and write."""

import torch
from engine_models import Net, enter, graph_of, stages

from popengine.compile.partition import cut_backwards, partition, visits_with_operations
from popengine.settings import Strategy
from small_models import module


def piece(partition, name):
    return next(piece for piece in partition.pieces if str(piece) == name)


def test_data_flows_through_the_forwards_and_back_through_the_backwards():
    parts = partition(graph_of(), stages(0, 1, 2, 3))
    assert [str(piece) for piece in parts.pieces] == ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0"]
    assert parts.ipus == (0, 1, 2, 3)
    assert parts.names == ("A", "B", "C", "D")


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


def test_only_pieces_that_draw_take_a_key():
    parts = partition(graph_of(Net(0.5)), stages(0, 1, 2, 3))
    assert [str(piece) for piece in parts.pieces if piece.draws] == ["F1"]
    assert not any(piece.draws for piece in partition(graph_of(Net(0.0)), stages(0, 1, 2, 3)).pieces)


def test_nothing_but_blocks_is_known_of_an_empty_model():
    from popengine.compile.capture import capture

    graph = capture(module(lambda self, x: x), lambda inputs: inputs, [torch.zeros(2)], training=False)
    assert visits_with_operations(graph) == {0}
    assert len(partition(graph, Strategy()).pieces) == 1


def test_a_block_that_is_opened_outside_a_capture_is_in_no_graph():
    enter("outside")
    assert [visit.name for visit in graph_of().visits] == [None, "A", "B", "C", "D"]
