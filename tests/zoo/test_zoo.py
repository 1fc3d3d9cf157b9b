"""Models that others wrote train with plain PyTorch's bits, in every layout; or the guide says in one line why not."""

import importlib.util

import pytest
from zoo_configurations import ZOO
from zoo_layouts import HALVES, LAYOUTS, TEN, answer, answer_in_half, answer_with_dropout
from zoo_table import MORE, read


def needed(name):
    """Skip the test, if the library of the configuration is not installed."""
    if importlib.util.find_spec(ZOO[name].library) is None:
        pytest.skip(f"{ZOO[name].library} is not installed")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_the_zoo_trains_as_the_guide_says(name, layout):
    needed(name)
    assert answer(name, layout) == read()[name, layout]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", TEN)
def test_ten_models_train_in_half_precision(name, dtype):
    needed(name)
    assert answer_in_half(name, HALVES[dtype]) == read()[name, dtype] == "equal"


@pytest.mark.parametrize("name", TEN)
def test_ten_models_drop_the_same_elements_in_every_layout_of_stages(name):
    needed(name)
    assert answer_with_dropout(name) == "equal"


def test_the_guide_lists_the_whole_zoo_and_all_are_equal():
    found = read()
    assert set(found) == {(name, column) for name in ZOO for column in (*LAYOUTS, *MORE)}
    assert len(ZOO) == 40
    assert {name for name in ZOO if {found[name, layout] for layout in LAYOUTS} != {"equal"}} == set()
