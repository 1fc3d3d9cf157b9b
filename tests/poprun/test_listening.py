"""What listens during a run."""

import sys

import listening
from launching import elastic

TWO = ("--num-replicas", 2, "--num-instances", 2)
MEETS = (
    "import os, time, popdist\n"
    "popdist.init()\n"
    "popdist.synchronize()\n"
    "os.write(1, f'met {popdist.getInstanceIndex()}\\n'.encode())\n"
    "time.sleep(1000)"
)


def met(poprun, *words):
    """A poprun with two instances that have met, and the addresses at which its processes listen."""
    run = poprun(*words, sys.executable, "-c", MEETS)
    run.until("met 0"), run.until("met 1")
    return run, listening.addresses({*run.processes(), run.pid, run.agent()})


def test_a_run_on_one_host_has_no_store_that_listens(poprun):
    """Its instances connect by a file in poprun's private folder."""
    run, addresses = met(poprun, *TWO)
    assert listening.addresses([run.pid, run.agent()]) == []
    assert len(addresses) >= 2  # gloo in each instance
    assert [str(address) for address, _ in addresses if not address.is_loopback] == []


def test_on_one_host_everything_listens_on_loopback_only(poprun, tmp_path):
    _, addresses = met(poprun, *elastic(tmp_path / "c"))
    assert len(addresses) >= 3  # the store, and gloo in each instance
    assert [str(address) for address, _ in addresses if not address.is_loopback] == []
