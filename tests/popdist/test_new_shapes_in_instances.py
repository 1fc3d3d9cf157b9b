"""`Options.allowNewShapes` in several processes: they train as one on any shapes, if all see the same ones."""

import processes
import pytest
import torch

import popdist
import poptorch

ROWS = 43  # two processes read 22 each, the last one the first row once more


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x, target):
        return torch.nn.functional.cross_entropy(self.layer(x.mean(1)), target)


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 5, 4, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def trained(sharded):
    popdist.init()
    torch.manual_seed(0)
    opts = popdist.poptorch.Options().showCompilationProgressBar(False).allowNewShapes()
    opts.Training.gradientAccumulation(3)
    if sharded:
        location = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
        opts.TensorLocations.setOptimizerLocation(location)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = poptorch.trainingModel(model, opts, optimizer)
    loader = poptorch.DataLoader(opts, torch.utils.data.TensorDataset(*data()), batch_size=4, drop_last=False)
    for x, target in loader:
        for length in (5, 3):
            trainer(x[:, :length].contiguous(), target)
    step = optimizer.state_dict()["state"][0]["step"]
    return {name: value.tolist() for name, value in model.state_dict().items()}, float(step)


@pytest.mark.parametrize("sharded", [False, True])
def test_no_row_is_lost_and_all_shapes_train_as_in_plain_pytorch(sharded):
    ended = processes.run(trained, 2, sharded)
    assert [one.error for one in ended] == ["", ""]
    torch.manual_seed(0)
    model = Model()
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, target = data()
    order = torch.arange(44) % ROWS
    # Micro-batches go to the replicas in turns; the remaining ones are divided in two halves.
    dealt, rest = order[:40].view(5, 2, 4), order[40:].view(2, 2)
    shares = [torch.cat([dealt[:, process].flatten(), rest[process]]) for process in (0, 1)]
    for start in (0, 12):
        rows = [mine[start : start + 12] for mine in shares]
        for length in (5, 3):
            plain.zero_grad()
            parts = [part for mine in rows for part in mine.split(4)]
            count = sum(map(len, parts))
            for part in parts:
                (model(x[part][:, :length], target[part]) * len(part) / count).backward()
            plain.step()
    for weights, steps in (one.value for one in ended):
        assert steps == 4
        for name, value in model.state_dict().items():
            assert torch.allclose(value, torch.tensor(weights[name]), atol=1e-6), name
