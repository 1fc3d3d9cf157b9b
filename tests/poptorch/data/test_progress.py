"""A loader goes on where another one was: the same rows, in all modes, also in the epochs that follow."""

import io

import pytest
import torch
from rows import FORK, Rows, Stream, numbers
from torch.utils.data import BatchSampler, RandomSampler

from popengine.errors import DataError
from poptorch.data import DataLoader
from poptorch.enums import DataLoaderMode
from poptorch.options import Options

EPOCHS, ROWS = 3, 26
ASYNC, REBATCHED = DataLoaderMode.Async, DataLoaderMode.AsyncRebatched


class Noisy(Rows):
    """Draws a random number for each row, from torch's global generator."""

    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        return row + 100 * torch.randint(9, ()), label


def plain(mode=DataLoaderMode.Sync, dataset=None, iterations=2, **how):
    options = {} if mode == DataLoaderMode.Sync else {"async_options": dict(FORK)}
    opts = Options().deviceIterations(iterations)
    dataset = Rows(ROWS) if dataset is None else dataset
    return DataLoader(opts, dataset, batch_size=3, mode=mode, **options, **how)


def one_of_two_processes(processes=2, **how):
    opts = Options().deviceIterations(2).randomSeed(3)
    opts.Distributed.configureProcessId(1, processes)
    return DataLoader(opts, Rows(50), batch_size=3, shuffle=True, **how)


def batches_of_a_sampler(mode=DataLoaderMode.Sync):
    sampler = BatchSampler(RandomSampler(range(ROWS), generator=generator()), 3, drop_last=True)
    options = {"async_options": dict(FORK)} if mode != DataLoaderMode.Sync else {}
    return DataLoader(Options().deviceIterations(2), Rows(ROWS), batch_sampler=sampler, mode=mode, **options)


def generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "in order": lambda: plain(),
    "shuffled": lambda: plain(shuffle=True),
    "shuffled by a generator": lambda: plain(shuffle=True, generator=generator()),
    "shuffled, with random rows": lambda: plain(shuffle=True, dataset=Noisy(ROWS)),
    "shuffled, with workers": lambda: plain(shuffle=True, num_workers=2),
    "shuffled by a generator, with workers": lambda: plain(
        shuffle=True, num_workers=2, generator=generator()
    ),
    "a stream": lambda: plain(dataset=Stream(ROWS)),
    "a share": one_of_two_processes,
    "a share, with workers": lambda: one_of_two_processes(num_workers=2),
    "a batch sampler": batches_of_a_sampler,
    "async": lambda: plain(ASYNC, shuffle=True),
    "async, with random rows": lambda: plain(ASYNC, shuffle=True, dataset=Noisy(ROWS)),
    "async, with a short tail": lambda: plain(ASYNC, shuffle=True, drop_last=False),
    "async, a stream": lambda: plain(ASYNC, dataset=Stream(ROWS)),
    "async, a batch sampler": lambda: batches_of_a_sampler(ASYNC),
    "rebatched": lambda: plain(REBATCHED, shuffle=True, generator=generator()),
    "rebatched, from other sizes": lambda: plain(REBATCHED, shuffle=True, rebatched_worker_size=4),
    "rebatched, with workers": lambda: plain(REBATCHED, shuffle=True, rebatched_worker_size=5, num_workers=2),
}


def trained(loader, stop: int | None = None):
    """What a program sees that trains EPOCHS epochs, and its loader's state after `stop` batches."""
    seen, state = [], None
    for _ in range(loader.state_dict()["epoch"], EPOCHS):
        if len(seen) == stop and state is None:
            state = loader.state_dict()
        for batch in loader:
            seen += numbers([batch])
            if len(seen) == stop:
                state = loader.state_dict()
    loader.terminate()
    return seen, state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize(
    "stop", ["at the last", "before", "after one", "before the last", "in the second epoch"]
)
def test_a_loader_goes_on_with_the_rows_that_another_one_would_give_next(make, stop):
    torch.manual_seed(1)
    full, _ = trained(make())
    assert len(full) == EPOCHS * (len(full) // EPOCHS)
    each = len(full) // EPOCHS
    stops = {"before": 0, "after one": 1, "before the last": each - 1, "at the last": each}
    batches = stops.get(stop, each + 2)
    torch.manual_seed(1)
    seen, state = trained(make(), batches)
    assert seen == full
    torch.manual_seed(99)  # another process has drawn other numbers
    loader = make()
    loader.load_state_dict(state)
    assert trained(loader)[0] == full[batches:]


def test_workers_do_not_change_a_share():
    """Torch begins the first epoch of its workers twice, and each time a permutation was drawn."""
    alone, helped = one_of_two_processes(), one_of_two_processes(num_workers=2)
    for _ in range(2):
        assert numbers(alone) == numbers(helped)


@pytest.mark.parametrize("name", ["shuffled", "a share", "async"])
def test_between_two_epochs_the_next_order_is_kept_too(name):
    torch.manual_seed(1)
    first = LOADERS[name]()
    for _ in first:
        pass
    state = first.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    expected = numbers(first)
    first.terminate()
    torch.manual_seed(99)
    second = LOADERS[name]()
    second.load_state_dict(state)
    assert second.state_dict()["epoch"] == 1
    assert numbers(second) == expected
    second.terminate()


def test_a_state_is_of_plain_values_that_a_file_keeps():
    loader = plain(shuffle=True)
    next(iter(loader))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = plain(shuffle=True)
    other.load_state_dict(state)
    assert other.state_dict()["position"] == 1


def test_a_break_counts_as_the_end_of_an_epoch():
    loader = plain()
    for _ in range(2):
        next(iter(loader))
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 1)


def test_random_numbers_of_the_program_go_on_where_they_were():
    torch.manual_seed(1)
    loader = plain(shuffle=True)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    expected = torch.rand(3)
    other = plain(shuffle=True)
    other.load_state_dict(state)
    next(iter(other))
    assert torch.equal(torch.rand(3), expected)


def test_what_is_no_state_is_refused():
    for loader in (plain(), plain(ASYNC)):
        with pytest.raises(DataError, match="this is not the state of a"):
            loader.load_state_dict({"epoch": 1})
        loader.terminate()


@pytest.mark.parametrize(
    "mode, dataset, how",
    [
        (ASYNC, Rows, {}),
        (ASYNC, Rows, {"num_workers": 2}),
        (ASYNC, Noisy, {}),
        (REBATCHED, Rows, {}),
        (REBATCHED, Noisy, {}),
        (REBATCHED, Noisy, {"rebatched_worker_size": 4}),
    ],
)
def test_after_a_break_an_asynchronous_loader_goes_on_with_the_rows_of_mode_sync(mode, dataset, how):
    seen = []
    for each in (DataLoaderMode.Sync, mode):
        torch.manual_seed(1)
        loader = plain(each, dataset=dataset(ROWS), shuffle=True, **how)
        first = numbers([next(iter(loader))])
        batches = iter(loader)
        if each != DataLoaderMode.Sync:
            assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
        seen.append((first, numbers(batches), numbers(loader)))
        loader.terminate()
    assert seen[0] == seen[1]


def test_a_state_from_between_a_break_and_a_batch_goes_on_with_the_next_epoch():
    torch.manual_seed(1)
    first, second = plain(ASYNC, shuffle=True), plain(ASYNC, shuffle=True)
    next(iter(first))
    batches = iter(first)
    second.load_state_dict(first.state_dict())
    assert numbers(batches) == numbers(second)
    first.terminate()
    second.terminate()


@pytest.mark.parametrize("mode", DataLoaderMode, ids=lambda mode: mode.name)
def test_shares_of_another_number_of_processes_are_refused_in_the_middle_of_an_epoch(mode):
    how = {} if mode == DataLoaderMode.Sync else {"mode": mode, "async_options": dict(FORK)}
    first, second = one_of_two_processes(), one_of_two_processes(3, **how)
    between = first.state_dict()
    next(iter(first))
    with pytest.raises(DataError, match=r"from 2 processes with a share each .* 3 processes"):
        second.load_state_dict(first.state_dict())
    second.load_state_dict(between)
    second.terminate()
