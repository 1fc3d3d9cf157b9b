"""Random forwards that write in place, through views and other names of a memory, have the bits of plain PyTorch."""

import copy
import random

import pytest
import torch

import poptorch
from small_models import module

ON_TENSORS = [
    lambda t, other: t.add_(other if other.shape == t.shape else 1),
    lambda t, other: t.copy_(other) if other.shape == t.shape else t.zero_(),
    lambda t, other: t.clamp_(-1, 1),
    lambda t, other: t.masked_fill_(t.detach() > 1, 0.1),
    lambda t, other: t.relu_(),
    lambda t, other: t.t(),
    lambda t, other: t[:2],
    lambda t, other: t.unbind(0)[0] if t.dim() else t,
    lambda t, other: t.detach(),
    lambda t, other: t.reshape(-1),
    lambda t, other: torch.nn.functional.dropout(t, 0.0, inplace=True),
]
ON_BUFFERS = [
    lambda s, t: s.seen.add_(1.5),
    lambda s, t: s.seen[0].add_(t.sum().detach()),
    lambda s, t: s.seen[1:3],
    lambda s, t: s.norm(t) if t.shape == (4, 4) else t,
]


def random_forward(seed):
    def forward(self, x):
        choose = random.Random(seed)
        tensors = [x @ self.weight, x * 1, x + self.weight[0]]
        for _ in range(choose.randint(2, 8)):
            t, other = choose.choice(tensors), choose.choice(tensors)
            if choose.random() < 0.7:
                tensors.append(choose.choice(ON_TENSORS)(t, other))
            else:
                tensors.append(choose.choice(ON_BUFFERS)(self, t))
        return sum(t.sum() * (number + 1) / 10 for number, t in enumerate(tensors))

    return forward


@pytest.mark.parametrize("group", range(4))
def test_a_random_forward_with_writes_is_that_of_plain_pytorch(group):
    tried = 0
    for seed in range(group * 12, group * 12 + 12):
        torch.manual_seed(seed)
        x, weight = torch.randn(4, 4), torch.nn.Parameter(torch.randn(4, 4))
        held = {"weight": weight, "seen": torch.ones(4, 4), "norm": torch.nn.BatchNorm1d(4)}
        model = module(random_forward(seed), **held)
        plain = copy.deepcopy(model)
        optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.01), []
        try:
            for _ in range(2):
                optimizer.zero_grad()
                expected.append(plain(x.clone()))
                expected[-1].backward()
                optimizer.step()
        except RuntimeError:  # autograd refuses some of these writes
            continue
        trainer = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
        assert [trainer(x.clone()) for _ in range(2)] == expected, seed
        for name, value in plain.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), (seed, name)
        tried += 1
    assert tried > 3
