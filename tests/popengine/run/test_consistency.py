"""What instances compare when they load a plan: each difference changes a section of its own."""

import pytest
from test_engine_runs import engine_for

from popengine.run.instances.consistency import fingerprint_of_plan


def fingerprint(seed=3, written=None, **how):
    engine = engine_for(accumulation=2, **how)
    weights = engine.train_state.find_weights()
    if written is not None:
        weights[written].add_(1)
    return fingerprint_of_plan(engine.state.plan, engine.state.settings, weights, seed)


@pytest.mark.parametrize(
    ("how", "sections"),
    [
        ({}, set()),
        ({"seed": 4}, {"seed"}),
        ({"written": "a.weight"}, {"first value"}),
        ({"dropout": 0.5}, {"operation", "plan"}),
        ({"iterations": 3}, {"options"}),
    ],
)
def test_a_difference_between_instances_is_in_its_sections(how, sections):
    one, other = fingerprint(), fingerprint(**how)
    assert {name for name in one if one[name] != other[name]} == sections
