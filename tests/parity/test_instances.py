"""Instances: processes that train together compute what one process with all their replicas computes."""

import parity_instance
import processes
import pytest
import torch

import poptorch


@pytest.mark.parametrize("replicas", [1, 2], ids=["one replica each", "two replicas each"])
def test_two_instances_train_to_the_bits_of_one_with_all_replicas(replicas):
    ended = processes.run(parity_instance.in_one, 2, replicas=replicas)
    assert [one.error for one in ended] == ["", ""]
    losses, weights = parity_instance.trained(poptorch.Options().replicationFactor(2 * replicas), 1, 0)
    for one in ended:
        assert one.value[1] == {name: value.tolist() for name, value in weights.items()}
    for call, expected in enumerate(losses):
        parts = [torch.tensor(one.value[0][call]).reshape(-1, replicas) for one in ended]
        assert torch.equal(torch.stack(parts, dim=1).flatten(), expected)


def test_an_instance_that_others_have_left_says_so():
    left, early = processes.run(parity_instance.until_the_second_leaves, 2)
    assert early.value is None and left.error == ""
    assert "another instance has left the run" in left.value and "same number of calls" in left.value
