"""Pieces: lists of operations, and the Python made from them."""

import pickle

import torch

from popengine.ir import Line, Piece, Value
from popengine.operations import Body
from popengine.run.backends.eager import build

X, Y = Value("x"), Value("y")


def piece(*lines, reads=("x", "y"), writes=("out",)):
    return Piece("F", 2, reads, writes, lines)


HALF = piece(
    Line("t", "aten.t.default", (Y,), (), "model.py:3"),
    Line("mm", "aten.mm.default", (X, Value("t")), (), "model.py:3"),
    Line("out", "aten.mul.Tensor", (Value("mm"), 0.5), (), "model.py:4"),
)


def test_a_piece_is_written_as_python_that_forgets_each_value_after_its_last_use():
    assert HALF.source == (
        "def piece(values):\n"
        "    x, y, = values\n"
        "    values.clear()\n"
        "    t = aten_t_default(y); y = None\n"
        "    mm = aten_mm_default(x, t); x = t = None\n"
        "    out = aten_mul_Tensor(mm, 0.5); mm = None\n"
        "    return (out, )\n"
    )


def test_a_draw_is_written_with_its_key_and_its_place_in_the_model():
    drawn = piece(Line("out", "aten.bernoulli.p", (X, 0.5), (("generator", None),), draw=7))
    assert drawn.draws
    assert "    x, y, key, = values\n    values.clear(); y = None\n" in drawn.source
    assert "    out = draw(aten_bernoulli_p, key, 7, x, 0.5, generator=None); x = None\n" in drawn.source


def test_arguments_are_written_as_what_they_are():
    line = Line(
        "out",
        "aten.cat.default",
        ([X, Y], (1, -float("inf")), "mean", None, True),
        (("dtype", torch.half), ("device", torch.device("cpu")), ("memory_format", torch.channels_last)),
    )
    assert piece(line).source.splitlines()[3] == (
        "    out = aten_cat_default([x, y, ], (1, -inf, ), 'mean', None, True, dtype=torch.float16,"
        " device=device(type='cpu'), memory_format=torch.channels_last); x = y = None"
    )
    assert list(line.operands()) == ["x", "y"]


def test_a_piece_computes_what_its_lines_say_and_lets_go_of_what_it_read():
    values = [torch.ones(2, 3), torch.ones(4, 3)]
    (out,) = build(HALF)(values)
    assert values == []
    assert torch.equal(out, torch.full((2, 4), 1.5))


def test_pieces_that_differ_in_the_type_of_a_number_are_not_equal():
    """As tuples their lines are: 1 == 1.0 == True. What was compiled for one would have run for the other."""
    of = [piece(Line("out", "aten.add.Tensor", (X, number))) for number in (1, 1.0, True)]
    assert len(set(of)) == 3
    assert of[0] == piece(Line("out", "aten.add.Tensor", (X, 1), where="elsewhere.py:1"))


def test_operations_whose_names_look_alike_keep_apart_in_the_source():
    alike = piece(Line("a", "mine.round_up.fast", (X,)), Line("out", "mine.round.up_fast", (Value("a"),)))
    assert list(alike.functions.values()) == ["mine_round_up_fast", "mine_round_up_fast_"]


def test_pieces_pickle_and_bodies_of_branches_travel_as_text():
    odd = Line("out", "aten.full.default", ([2], float("nan")), (("dtype", torch.int8),), draw=1)
    for found in (HALF, piece(odd)):
        assert pickle.loads(pickle.dumps(found)).source == found.source
        body = Body(found, (((2, 4), torch.float32),), False)
        assert Body.from_text(body.as_text()).piece == found
        assert Body.from_text(body.as_text()).outputs == body.outputs


def test_a_statement_can_be_put_after_each_line():
    ticks = []
    build(HALF, after="; tick()", tick=lambda: ticks.append(1))([torch.ones(2, 3), torch.ones(4, 3)])
    assert len(ticks) == 1 + len(HALF.lines)
