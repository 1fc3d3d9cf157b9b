"""A worker on this machine: the first container of a pod, as a group of processes."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from . import instances
from .pods import Object

_POLL = 0.01  # seconds


class Process:
    """Runs from the moment it is made; its pod's status says how it goes."""

    def __init__(self, pod: Object, folder: Path, environment: Mapping[str, str], shows_name: bool) -> None:
        self.pod = pod
        container, self.name = pod["spec"]["containers"][0], pod["metadata"]["name"]
        attempt = environment["PANDO_RESTARTS"]
        home = folder / (self.name if attempt == "0" else f"{self.name}.{attempt}")
        home.mkdir()
        where = container.get("workingDir")
        own = variables(pod)
        command = [expand(word, own) for word in [*container.get("command", ()), *container.get("args", ())]]
        self._started = time.monotonic()
        self._log = (folder / f"{self.name}.log").open("ab")
        try:
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command,
                cwd=where if where and Path(where).is_dir() else home,
                env={**environment, "HOME": str(home), "HOSTNAME": self.name, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self.process = None
            print(f"ipujob: {self.name}: {command[0]}: {error.strerror}", file=sys.stderr)
            self._say("Failed", {"terminated": {"exitCode": 127, "finishedAt": now()}})
            return
        self._say("Running", {"running": {"startedAt": now()}})
        self._reader = threading.Thread(
            target=self._show, args=(f"[{self.name}] " if shows_name else "",), daemon=True
        )
        self._reader.start()

    def look(self, signals: Sequence[int]) -> None:
        """Bring the pod's status up to date."""
        if self.process is None or instances.phase(self.pod) != "Running":
            return
        limit = self.pod["spec"].get("activeDeadlineSeconds")
        too_long = limit is not None and time.monotonic() - self._started > limit and self.runs()
        if too_long:
            end([self], signals)
        code = self.process.poll()
        if code is None:
            return
        self.kill()  # what a container's first process leaves behind goes with it
        ended = {"exitCode": 128 - code if code < 0 else code, "finishedAt": now()}
        self._say("Failed" if code or too_long else "Succeeded", {"terminated": ended})
        if too_long:
            self.pod["status"]["reason"] = "DeadlineExceeded"

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self._reader.join(2)

    def signal(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _say(self, phase: str, state: Object) -> None:
        name = self.pod["spec"]["containers"][0]["name"]
        self.pod["status"] = {"phase": phase, "containerStatuses": [{"name": name, "state": state}]}

    def _show(self, prefix: str) -> None:
        """Copy what the worker says to its log and to the terminal; whole lines, if several speak."""
        assert self.process and self.process.stdout
        pipe = self.process.stdout
        read = pipe.readline if prefix else lambda: os.read(pipe.fileno(), 65536)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may come in two parts
        listens = True
        while said := read():
            self._log.write(said)
            self._log.flush()
            text = prefix + decoder.decode(said)
            try:
                if listens:
                    sys.stdout.write(f"{text}\n" if prefix and not text.endswith("\n") else text)
                    sys.stdout.flush()
            except OSError:  # `ipujob run ... | head`: the worker goes on, and must not wait for a reader
                listens = False
        self._log.close()


def end(workers: Sequence[Process], signals: Sequence[int]) -> None:
    """Give some workers the time their pods have to end by themselves, unless a second Ctrl-C comes."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    deadline = time.monotonic() + max(
        (w.pod["spec"]["terminationGracePeriodSeconds"] for w in workers), default=0
    )
    while any(worker.runs() for worker in workers) and time.monotonic() < deadline and len(signals) < 2:
        time.sleep(_POLL)
    for worker in workers:
        worker.kill()


def variables(pod: Object) -> dict[str, str]:
    """The environment of a pod's worker: values, with those before them put in, and fields of the pod."""
    found: dict[str, str] = {}
    metadata = pod["metadata"]
    for variable in pod["spec"]["containers"][0].get("env") or []:
        path = ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath", "")
        if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            text = metadata["labels"].get(label[1], "")
        elif path:
            text = metadata[path.removeprefix("metadata.")]
        else:
            text = expand(str(variable.get("value") or ""), found)
        found[variable["name"]] = text
    return found


def expand(text: str, known: Mapping[str, str]) -> str:
    """Kubernetes' $(NAME); $$ stands for one $, and a name that isn't known stays as it is."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else known.get(m[1], m[0]), text)


def now() -> str:
    return datetime.now(UTC).isoformat()
