"""What listens during a training, and what callers without the secret can do there: nothing."""

import os
import pickle
import sys
import time
from base64 import b64encode
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import listening
import pytest
from torch.distributed import TCPStore

from popdist.signed_store import SignedStore, StoreError

TWO = ("--num-replicas", 2, "--num-instances", 2)
MEETS = (
    "import os, time, popdist\n"
    "popdist.init()\n"
    "popdist.synchronize()\n"
    "os.write(1, f'met {popdist.getInstanceIndex()}\\n'.encode())\n"
    "time.sleep(1000)"
)


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def secrets(run):
    """The secrets that a run's instances have been given."""
    items = {
        i
        for pid in run.processes("popdist.init")
        for i in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    }
    return {item[15:].decode() for item in items if item.startswith(b"POPDIST_SECRET=")}


ELASTIC = ("--num-replicas=2", "--num-instances=1:2", "--checkpoint-dir")


def met(poprun, *words):
    """A poprun with two instances that have met, and the addresses at which its processes listen."""
    run = poprun(*words, sys.executable, "-c", MEETS)
    run.until("met 0"), run.until("met 1")
    return run, listening.addresses({*run.processes(), run.pid, run.agent()})


@pytest.fixture
def training(poprun, tmp_path):
    return met(poprun, *ELASTIC, tmp_path / "c")


def test_a_training_on_one_host_has_no_store_that_listens_and_no_secret(poprun):
    """Its instances connect by a file in poprun's private folder."""
    run, addresses = met(poprun, *TWO)
    assert listening.addresses([run.pid, run.agent()]) == [] and secrets(run) == set()
    assert len(addresses) >= 2  # gloo in each instance
    assert [str(address) for address, _ in addresses if not address.is_loopback] == []


def test_on_one_host_everything_listens_on_loopback_only(training):
    _, addresses = training
    assert len(addresses) >= 3  # the store, and gloo in each instance
    assert [str(address) for address, _ in addresses if not address.is_loopback] == []


def test_callers_without_the_secret_change_nothing_and_nothing_is_unpickled(training, tmp_path):
    run, _ = training
    places = [(str(address), port) for address, port in listening.addresses([run.agent()])]
    assert places
    for place in places:
        with suppress(RuntimeError):  # what serves there is no TCPStore
            store = TCPStore(*place, is_master=False, timeout=timedelta(seconds=1))
            store.set("torch.rendezvous.poprun", b64encode(pickle.dumps(Touches(tmp_path / "taken over"))))
            time.sleep(2)  # nodes look several times a second
    assert not (tmp_path / "taken over").exists()
    (right,) = secrets(run)
    assert len(right) >= 32
    # Torch's agent may look for a free port at the same time: nothing answers there.
    ours = [place for place in places if answers(*place, right)]
    assert ours
    for place in ours:
        for wrong in ("", "guessed"):
            with pytest.raises(StoreError, match="secret"):
                SignedStore(*place, wrong, 60)


def answers(host, port, secret):
    """Whether a store serves there, for those that know the secret."""
    try:
        return SignedStore(host, port, secret, 5, timeout=60).check(["id"])
    except (StoreError, OSError):
        return False


def test_the_secret_is_on_no_command_line(training):
    run, _ = training
    (secret,) = secrets(run)
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [line for line in lines if secret.encode() in line]
