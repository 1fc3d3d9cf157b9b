"""A cluster that is pretended: an API server in memory, and nodes whose containers do what a script says."""

import copy
import itertools
from datetime import UTC, datetime

from ipujob.client import Refused
from ipujob.observe import utc_stamp

RUNS = "runs"  # what a script answers for a container that goes on
END = ("Succeeded", "Failed")


def ended(pod, code, reason=None):
    """The status of a pod whose worker has ended."""
    worker = {
        "name": pod["spec"]["containers"][0]["name"],
        "state": {"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:00:00Z"}},
    }
    status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [worker]}
    return status | ({"reason": reason} if reason else {})


class Pretend:
    """The six calls of a cluster.

    Args:
        script: pod -> RUNS, an exit code, or the reason of an eviction; asked of every running pod at every tick
    """

    namespace, server = "default", "memory"

    def __init__(self, script=lambda pod: 0):
        self.script, self.objects, self.calls = script, {}, []
        self.before = self.after = lambda call, made: None  # faults: they may raise
        self.begun = []  # (name, attempt) of each container that began
        self._numbers = itertools.count(1)

    def _called(self, call, made):
        self.calls.append((call, made["kind"], made["metadata"].get("name")))
        self.before(call, made)

    def list(self, kind, namespace=None, labels="", fields=""):
        self._called("list", {"kind": kind, "metadata": {}})
        found = [copy.deepcopy(each) for (its, _), each in self.objects.items() if its == kind]
        name, _, value = labels.partition("=")
        if labels:
            mine = [each["metadata"].get("labels", {}) for each in found]
            found = [
                each
                for each, has in zip(found, mine, strict=True)
                if name in has and value in ("", has[name])
            ]
        self.after("list", {"kind": kind})
        return found

    def create(self, made):
        self._called("create", made)
        key = (made["kind"], made["metadata"]["name"])
        if key in self.objects:
            raise Refused(409, f"{key[1]} already exists")
        new = copy.deepcopy(made)
        new["metadata"] |= {"uid": f"u{next(self._numbers)}", "resourceVersion": str(next(self._numbers))}
        new["metadata"].setdefault("namespace", "default")
        new["metadata"]["creationTimestamp"] = utc_stamp(datetime.now(UTC))
        self.objects[key] = new
        self.after("create", made)
        return copy.deepcopy(new)

    def _known(self, known):
        mine = self.objects.get((known["kind"], known["metadata"]["name"]))
        if mine is None or mine["metadata"]["uid"] != known["metadata"]["uid"]:
            raise Refused(404, "not found")
        return mine

    def delete(self, known, orphan=False):
        self._called("delete", known)
        mine = self._known(known)
        if known["kind"] == "Pod":
            mine["metadata"].setdefault("deletionTimestamp", "now")
        else:
            del self.objects[known["kind"], known["metadata"]["name"]]
        self.after("delete", known)

    def patch_status(self, known, patch):
        self._called("patch", known)
        mine = self._known(known)
        if mine["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise Refused(409, "the object has been modified")
        # The real server of 2021 took an empty message for none, refused the status, and the job never ended.
        assert all(condition["message"] for condition in patch.get("conditions", ()))
        mine["status"] = mine.get("status", {}) | patch
        instances = mine["status"].get("instances", {})
        mine["status"]["instances"] = {name: each for name, each in instances.items() if each is not None}
        mine["metadata"]["resourceVersion"] = str(next(self._numbers))
        self.after("patch", known)

    def edit(self, name, **spec):
        """As `kubectl edit` of an IPUJob."""
        mine = self.objects["IPUJob", name]
        mine["spec"] |= spec
        mine["metadata"]["resourceVersion"] = str(next(self._numbers))

    def pods(self):
        return {name: each for (kind, name), each in self.objects.items() if kind == "Pod"}

    def tick(self):
        """Nodes do one step: deleted pods go, the others begin or end; what has no owner any more goes, too."""
        uids = {each["metadata"]["uid"] for each in self.objects.values()}
        for (kind, name), each in list(self.objects.items()):
            owners = [owner["uid"] for owner in each["metadata"].get("ownerReferences", ())]
            if "deletionTimestamp" in each["metadata"] or (owners and not uids & set(owners)):
                del self.objects[kind, name]
        for name, pod in self.pods().items():
            phase = pod.setdefault("status", {"phase": "Pending"})["phase"]
            if phase == "Pending":
                self.begun.append((name, int(pod["metadata"]["labels"]["pando/attempt"])))
                began = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
                pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "train", "state": began}]}
            elif phase == "Running" and (answer := self.script(pod)) != RUNS:
                evicted = isinstance(answer, str)
                pod["status"] = ended(pod, 137, answer) if evicted else ended(pod, answer)
        self._check()

    def _check(self):
        """What must hold at every moment: of an instance, pods of one attempt only, and all of its own number."""
        attempts = {}
        for pod in self.pods().values():
            labels = pod["metadata"]["labels"]
            if "deletionTimestamp" not in pod["metadata"]:
                key = (pod["metadata"]["ownerReferences"][0]["uid"], labels["pando/instance"])
                attempts.setdefault(key, set()).add(labels["pando/attempt"])
        assert all(len(found) == 1 for found in attempts.values()), attempts


def attempt(pod):
    return int(pod["metadata"]["labels"]["pando/attempt"])
