"""Which nodes of an elastic run are there: those whose records change, and those that this node can reach."""

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from popdist import store

from .rounds import Record

STANDSTILL = 25.0  # seconds after which a node whose record stood still is lost
_UNREACHED = 15.0  # seconds in which tests fail to reach a node, after which the round ends
_LONGEST_STEP = 5.0  # seconds by which the clock advances at most between two updates
_TEST_INTERVAL = 1.0  # seconds
_TEST_PATIENCE = 10.0  # seconds


class Presence:
    """The newest record of each node, and when it changed, on a clock that stands still while this process does."""

    def __init__(self) -> None:
        self.clock, self._updated = 0.0, time.monotonic()
        self.records: dict[str, Record] = {}  # by node
        self.changed: dict[str, float] = {}  # `clock` at the last change of a node's record

    def update(self, texts: Mapping[str, str]) -> None:
        """Take the records of all nodes, as texts by node. One that can't be parsed counts as unchanged."""
        for name, text in texts.items():
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # torn by its writer, or damaged
                record, before = json.loads(text), self.records.get(name, {})
                if (record["id"], record["count"]) != (before.get("id"), before.get("count")):
                    self.records[name], self.changed[name] = record, self.clock
        for name in self.records.keys() - texts.keys():
            del self.records[name], self.changed[name]
        now = time.monotonic()
        self.clock += min(now - self._updated, _LONGEST_STEP)
        self._updated = now

    def alive(self) -> dict[str, Record]:
        """Return the records, by node, that have changed lately."""
        return {n: r for n, r in self.records.items() if self.clock - self.changed[n] < STANDSTILL}


class Reach(threading.Thread):
    """Serves the store of this node, by which the instances of a round connect if this node is the first one, and
    tests each second which other nodes' stores answer."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        try:
            host = store.own_address(os.environ.get("MASTER_ADDR", "localhost"))
        except OSError:  # the name of a pod that has ended
            host = store.own_address()
        self._store = store.serve(host, 0, _TEST_PATIENCE)
        self.address = f"{host}:{self._store.port}"
        self.addresses: dict[str, str] = {}  # to test, by the random ids of the nodes
        self.errors: dict[str, str] = {}  # of the last test, by id; "" after success
        self._reached: dict[str, float] = {}  # by id: the clock of `lasting_errors` at the last success
        self.start()

    def run(self) -> None:
        while True:
            tests = {
                item: threading.Thread(target=self._test_connection, args=item, daemon=True)
                for item in self.addresses.items()
            }
            for test in tests.values():
                test.start()
            until = time.monotonic() + _TEST_PATIENCE
            for (id, address), test in tests.items():
                test.join(max(until - time.monotonic(), 0.0))
                if test.is_alive():
                    self.errors[id] = f" at {address}: its store has not answered for {_TEST_PATIENCE:.0f} s"
            time.sleep(_TEST_INTERVAL)

    def _test_connection(self, id: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            store.ping(host, int(port), _TEST_PATIENCE)
            self.errors[id] = ""
        except (OSError, RuntimeError) as error:
            self.errors[id] = f" at {address}: {str(error).splitlines()[0]}"

    def reached(self) -> list[str]:
        """Return the ids of the nodes that the last tests have reached."""
        return [id for id, error in self.errors.copy().items() if not error]

    def lasting_errors(self, clock: float) -> dict[str, str]:
        """Return the errors, by id, of nodes that could not be reached for a while; `clock`: of a `Presence`."""
        for id, error in self.errors.copy().items():
            if not error:
                self._reached[id] = clock
        return {
            id: error
            for id, error in self.errors.copy().items()
            if error and clock - self._reached.setdefault(id, clock) > _UNREACHED
        }
