"""All that a call changes, as a program sees it: for tests of calls that are interrupted."""

import torch


def state(executor):
    found = dict(executor.model.state_dict())
    found |= executor._optimizer.state_dict()["ipu_state"] or {}
    found["random state"] = torch.tensor(executor.rng_state)
    return {name: value.clone() for name, value in found.items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
