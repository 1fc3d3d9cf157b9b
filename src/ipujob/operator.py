"""The operator: a loop that lists all IPUJobs of a cluster and applies `observe` to each.

A watch only wakes the loop, so a lost watch does no harm: each round lists all objects again. A status is
written on condition that the job has not changed since it was read (optimistic locking): of two operators,
only one acts.
"""

import argparse
import contextlib
import secrets
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from .client import Cluster, Refused, Unreachable
from .observe import observe, utc_stamp
from .pods import JOB, Object
from .rules import Images

_RECONCILE_SECONDS = 10.0  # between reconciliations, if nothing happens
_PAUSE = 0.2  # seconds between rounds, if much happens
_LONGEST_DELAY = 60.0  # seconds until a refused creation is tried again, at most
_HINTS = {  # by a part of the API server's message in small letters, the annotation that helps
    "exceeded quota": " (annotation pando/resources: drop, or smaller resources in the template)",
    "podsecurity": " (annotation pando/security: drop)",
}


class RefusedCreation(NamedTuple):
    """A creation that the API server refused: it is tried again after `delay` seconds, at the time `until`."""

    message: str
    delay: float
    until: float


@dataclass
class Operator:
    """The operator of a cluster's IPUJobs."""

    cluster: Cluster
    namespace: str | None = None  # of the IPUJobs; None: all namespaces
    device: str = "cpu"  # or cuda: of jobs without a device in their annotations
    images: str | None = None  # a file of image replacements, which is read again for each job
    log: Callable[[str], Any] = print  # is called with a line for each action
    clock: Callable[[], float] = time.monotonic  # returns seconds, for the delay after a refused creation
    beat: Callable[[], Any] = lambda: None  # is called in each round and before each job: liveness
    refusals: dict[str, RefusedCreation] = field(default_factory=dict)  # by the job's uid

    def reconcile(self) -> None:
        """List all objects, and run the next actions of each job; log an error of one job, and go on."""
        self.beat()
        jobs = self.cluster.list("IPUJob", self.namespace)
        owned: dict[str, list[Object]] = defaultdict(list)
        for kind in ("Pod", "Service"):
            for resource in self.cluster.list(kind, self.namespace, labels=JOB):
                for owner in resource["metadata"].get("ownerReferences") or []:
                    owned[owner["uid"]].append(resource)
        uids = {job["metadata"]["uid"] for job in jobs}
        self.refusals = {uid: refusal for uid, refusal in self.refusals.items() if uid in uids}
        for job in jobs:
            self.beat()
            try:
                self._run_actions(job, owned[job["metadata"]["uid"]])
            except Unreachable:
                raise
            except Refused as error:  # the next round lists all objects again
                if error.status not in (404, 409):
                    self._log(job, str(error))
            except Exception as error:  # the other jobs go on
                self._log(job, f"a fault of the operator: {type(error).__name__}: {error}")

    def _run_actions(self, job: Object, owned: Sequence[Object]) -> None:
        """Run the actions for a job. The first refused creation ends them, and is tried again after a growing delay."""
        uid, now = job["metadata"]["uid"], datetime.now(UTC)
        refusal = self.refusals.get(uid)
        said = refusal.message if refusal else None
        decision = observe(job, owned, now, said, self.device, read_image_replacements(self.images))
        create = () if refusal and self.clock() < refusal.until else decision.create
        if decision.status or create:
            # Written before each creation, even if nothing has changed: the write fails if the job has changed.
            self.cluster.patch_status(job, decision.status or {"lastReconcileTime": utc_stamp(now)})
            self._report_change(job, decision.status, utc_stamp(now))
        for resource in decision.delete:
            self._log(job, f"delete {resource['kind']} {resource['metadata']['name']}")
            # 404, 409 (gone, or a new object has its name): the next round sees it
            self.cluster.delete(resource)
        for resource in create:
            name = resource["metadata"]["name"]
            self._log(job, f"create {resource['kind']} {name}")
            try:
                self.cluster.create(resource)
            except Refused as error:
                hint = next((hint for mark, hint in _HINTS.items() if mark in str(error).lower()), "")
                message = f"creating {name} was refused: {error}{hint}"
                delay = min(refusal.delay * 2, _LONGEST_DELAY) if refusal else 1.0
                self.refusals[uid] = RefusedCreation(message, delay, self.clock() + delay)
                self._log(job, f"{message}; tried again in {delay:g} s")
                return
        if create or not decision.create:
            self.refusals.pop(uid, None)

    def _report_change(self, job: Object, patch: Object, when: str) -> None:
        """If a status patch has a job's restart or end, log it and create an Event."""
        reason, said = patch.get("launcherStatus"), patch.get("lastMessage")
        if patch.get("restartCount"):
            reason, said = "Restarting", f"restart {patch['restartCount']}"
        if reason not in ("Restarting", "Completed", "Failed"):
            return
        said, metadata = said or job["status"]["lastMessage"], job["metadata"]
        self._log(job, f"{reason}: {said}")
        name = f"{metadata['name']}.{secrets.token_hex(8)}"
        keys = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {"apiVersion": job["apiVersion"], "kind": "IPUJob", **keys},
            "type": "Normal" if reason == "Completed" else "Warning",
            "reason": reason,
            "message": said[:1000],
            "firstTimestamp": when,
            "lastTimestamp": when,
            "count": 1,
            "source": {"component": "ipujob-operator"},
        }
        try:
            self.cluster.create(event)
        except (Refused, Unreachable) as error:
            self._log(job, f"no event: {error}")

    def _log(self, job: Object, text: str) -> None:
        self.log(f"{job['metadata']['namespace']}/{job['metadata']['name']}: {text}")


def read_image_replacements(file: str | None) -> Images:
    """Return (OLD, NEW) for each line OLD=NEW of a file; empty, if `file` is None or can't be read."""
    try:
        lines = Path(file).read_text().splitlines() if file else []
    except OSError:
        return ()
    pairs = (line.strip().partition("=") for line in lines if not line.startswith("#"))
    return [(old.strip(), new.strip()) for old, sign, new in pairs if sign and new.strip()]


def run_operator(arguments: argparse.Namespace) -> int:
    """Call `Operator.reconcile` at each change, when a refused creation is to be retried, and every 10 s.
    SIGTERM or Ctrl-C ends the process."""
    cluster, wake = Cluster(), threading.Event()
    namespace = None if arguments.all_namespaces else arguments.namespace or cluster.namespace

    def log(text: str) -> None:
        print(f"{utc_stamp(datetime.now(UTC))} {text}", flush=True)

    def watch(kind: str, labels: str) -> None:
        while True:
            with contextlib.suppress(Exception):  # `reconcile` raises errors of the cluster, too
                for _ in cluster.watch(kind, namespace, labels):
                    wake.set()
            wake.set()
            time.sleep(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    log(f"operator of {'all namespaces' if namespace is None else namespace} at {cluster.server}")
    beat = Path(arguments.alive).touch if arguments.alive else lambda: None
    operator = Operator(cluster, namespace, arguments.device, arguments.images, log, beat=beat)
    for watched in (("IPUJob", ""), ("Pod", JOB)):
        threading.Thread(target=watch, args=watched, daemon=True).start()
    while True:
        wake.clear()  # a change during the round starts the next round
        try:
            operator.reconcile()
        except (Refused, Unreachable) as error:
            log(str(error))
        retries = [refusal.until - operator.clock() for refusal in operator.refusals.values()]
        time.sleep(_PAUSE)
        wake.wait(max(0.0, min([_RECONCILE_SECONDS, *retries])))
