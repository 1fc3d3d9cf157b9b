"""allclose compares structure and values."""

import torch

from poptorch.testing import allclose

ONE, OTHER = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])


def test_structure_and_values_must_match():
    assert allclose(ONE, ONE + 1e-7)
    assert allclose((ONE, [OTHER]), (ONE, [OTHER]))
    assert not allclose(ONE, OTHER)
    assert not allclose((ONE, ONE), [ONE, ONE])
    assert not allclose((ONE,), (ONE, ONE))
    assert not allclose(ONE, torch.ones(3))
