"""Programs: what each ipu does in a step, and that its values live no longer than needed."""

from collections import Counter

import pytest
from engine_models import Net, graph_of, stages

from popengine.compile import compile_graph
from popengine.ir import Accumulate, Compute, Free, Keep, Load, Receive, Send, Store, Update
from popengine.settings import Counts, Optimizer, Settings


def plan_of(*ipus, mode="pipelined", accumulation=8, iterations=1, training=True, dropout=0.0):
    graph = graph_of(Net(dropout).train(training), training)
    settings = Settings(
        training,
        Counts(iterations=iterations, accumulation=accumulation),
        stages(*ipus, mode=mode),
        optimizer=Optimizer("sgd", {}) if training else None,
    )
    return compile_graph(graph, settings)


LAYOUTS = [
    ((0, 1, 2, 3), "pipelined"),
    ((0, 1, 2, 0), "pipelined"),
    ((0, 0, 0, 0), "pipelined"),
    ((0, 1, 0, 1), "sharded"),
]


def test_each_piece_computes_each_micro_batch_once_on_its_ipu():
    plan = plan_of(0, 1, 2, 3)
    for ipu, program in plan.programs.items():
        computed = Counter(
            (plan.partition.pieces[i.piece].stage, str(plan.partition.pieces[i.piece]), i.micro_batch)
            for i in program
            if isinstance(i, Compute)
        )
        assert set(computed.values()) == {1}
        assert {plan.partition.ipus[stage] for stage, _, _ in computed} == {ipu}
        assert len(computed) == 2 * 8


@pytest.mark.parametrize(("ipus", "mode"), LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
def test_no_value_of_a_micro_batch_outlives_its_step(ipus, mode, training):
    """Runs the programs on names alone: reads find their value, and nothing is left at the end."""
    plan = plan_of(
        *ipus,
        mode=mode,
        training=training,
        iterations=1 if training else 8,
        accumulation=8 if training else 1,
    )
    for program in plan.programs.values():
        alive = set()
        for i in program:
            match i:
                case Load() | Receive(micro_batch=int()):
                    alive |= {(name, i.micro_batch) for name in i.names}
                case Compute():
                    piece = plan.partition.pieces[i.piece]
                    for name in set(piece.reads) - set(i.held):
                        assert (name, i.micro_batch) in alive
                    alive -= {(name, i.micro_batch) for name in i.last}
                    alive |= {(name, i.micro_batch) for name in piece.writes}
                case Free():
                    alive -= {(name, i.micro_batch) for name in i.names}
                case Accumulate() | Keep() | Store():
                    assert {(name, i.micro_batch) for name in i.names} <= alive
        assert not alive


@pytest.mark.parametrize(("ipus", "mode"), LAYOUTS)
def test_what_is_sent_is_received_in_the_same_order(ipus, mode):
    plan = plan_of(*ipus, mode=mode)
    sent, received = {}, {}
    for ipu, program in plan.programs.items():
        for i in program:
            if isinstance(i, Send):
                assert i.channel[1] != ipu
                sent.setdefault(i.channel, []).append((i.names, i.micro_batch))
            elif isinstance(i, Receive):
                assert i.channel[1] == ipu
                received.setdefault(i.channel, []).append((i.names, i.micro_batch))
    data = {channel for channel in sent if channel[0] != "done"}
    assert data == {channel for channel in received if channel[0] != "done"}
    assert all(sent[channel] == received[channel] for channel in data)


def test_a_shared_weight_goes_once_a_step_to_the_stage_that_borrows_it():
    plan = plan_of(0, 1, 2, 3)
    moves = [i for i in plan.programs[2] if isinstance(i, Send) and i.micro_batch is None]
    assert [(move.channel, move.names) for move in moves] == [(("weights of 2", 3), ("parameter_c_weight",))]


def test_each_ipu_ends_a_step_with_the_update_of_what_lives_there():
    plan = plan_of(0, 1, 2, 3)
    updates = {ipu: program[-1] for ipu, program in plan.programs.items()}
    assert {ipu: sorted(update.keys) for ipu, update in updates.items() if isinstance(update, Update)} == {
        0: ["a.bias", "a.weight", "norm.bias", "norm.weight"],
        1: ["b.bias", "b.weight"],
        2: ["c.bias", "c.weight"],
        3: ["d.bias", "d.weight"],
    }


def test_inference_neither_accumulates_nor_updates():
    plan = plan_of(0, 1, 2, 3, training=False, iterations=8, accumulation=1)
    kinds = {type(i) for program in plan.programs.values() for i in program}
    assert not kinds & {Accumulate, Update, Keep}


def test_running_statistics_are_kept_once_for_each_micro_batch_in_order():
    plan = plan_of(0, 1, 2, 3)
    kept = [i for program in plan.programs.values() for i in program if isinstance(i, Keep)]
    assert [i.micro_batch for i in kept] == list(range(8))
    assert set(kept[0].keys) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_the_same_graph_and_settings_give_the_same_plan():
    assert plan_of(0, 1, 2, 0).programs == plan_of(0, 1, 2, 0).programs
