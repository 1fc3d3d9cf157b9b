"""Runs jobs on this machine: a process in place of each pod. `observe` decides what happens next, as in a cluster."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

from popengine.environment import path_with_aliases

from . import pods
from .observe import observe
from .pods import ATTEMPT, INSTANCE, PORT, Object
from .rules import POD, Fault, Job

_POLL = 0.02  # seconds between two checks of processes
_FIELD = r"metadata\.(?:(name|namespace)|labels\['(.+)'\])"  # of a pod, in a fieldRef
_IGNORED_FIELDS = ("nodeSelector", "affinity", "tolerations", "securityContext", "hostIPC", "initContainers")


class LocalJob:
    """A job (made from the IPUJob `value`) that runs on this machine, with processes as workers. Their homes and
    logs are in `folder`; `folder/bin` comes first on their PATH; `overrides` replace their variables."""

    def __init__(self, value: Object, job: Job, folder: Path, overrides: Mapping[str, str]) -> None:
        metadata = {**value["metadata"], "name": job.name, "uid": "local"}
        self.status: Object = {}
        self.value = {**value, "metadata": metadata, "status": self.status}
        self.job, self.folder, self.overrides = job, folder, overrides
        path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": path_with_aliases(os.environ.get("PYTHONPATH", "")),
        }
        with ExitStack() as probes:  # a MASTER_PORT for each instance
            servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(job.instances)]
            self.ports = [str(probes.enter_context(server).getsockname()[1]) for server in servers]
        self.workers: dict[str, Worker] = {}
        self.signals: list[int] = []

    def run(self) -> int:
        """Run the job to its end, and return 0, or the exit code of the worker that failed first. Signals n end the
        workers, the first by SIGTERM, the second by SIGKILL; then the exit code is 128 + n of the first."""
        code, before = None, {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                # The handler doesn't raise: an exception could leave a new worker out of `workers`.
                before[number] = signal.signal(number, lambda got, _: self.signals.append(got))
            while not self.signals and code is None:
                code = self._run_round()
        finally:
            self._end_workers([*self.workers.values()])
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.signals:
            print(f"ipujob: {self.job.name}: interrupted, its workers were ended", file=sys.stderr)
            return 128 + self.signals[0]
        return code or 0

    def _run_round(self) -> int | None:
        """Update the status of workers and job, and end and start workers as the operator would, or sleep. Return
        None while the job runs; at its end, the exit code (`run`)."""
        now = time.monotonic()
        late = [worker for worker in self.workers.values() if now > worker.deadline and worker.is_running()]
        self._end_workers(late)
        for worker in self.workers.values():
            if not worker.is_running():
                worker.set_ended("DeadlineExceeded" if worker in late else "")
        owned = [worker.pod for worker in self.workers.values()]
        decision = observe(self.value, [*owned, pods.headless_service(self.job)], datetime.now(UTC))
        self.status |= decision.status
        if "completionTime" in self.status:
            if self.status["launcherStatus"] == "Completed":
                return 0
            print(f"ipujob: {self.job.name}: {self.status['lastMessage']}", file=sys.stderr)
            code = pods.exit_code(pods.failed_pods(self.job, owned)[0]) or 1
            if code in (2, 126, 127):  # of Python without the program's file, and of `env` and shells
                ways = "--command TEXT runs another program, --env NAME=VALUE sets a variable, --keep keeps the logs"
                print(f"  fix: if a file is missing here: {ways}", file=sys.stderr)
            return code
        gone = [self.workers.pop(pod["metadata"]["name"]) for pod in decision.delete]
        self._end_workers(gone)
        now = time.monotonic()
        for pod in decision.create:
            if not self.signals:
                self.workers[pod["metadata"]["name"]] = Worker(self, pod, now)
        if count := decision.status.get("restartCount"):
            print(f"ipujob: {self.job.name}: restart {count}", file=sys.stderr)
        if not (decision.delete or decision.create):
            time.sleep(_POLL)
        return None

    def _end_workers(self, workers: Sequence[Worker]) -> None:
        """Send SIGTERM to workers; kill their process groups when all have ended, after the longest grace period,
        or when this process receives a second signal."""
        for worker in workers:
            worker.signal(signal.SIGTERM)
        grace = max((worker.pod["spec"]["terminationGracePeriodSeconds"] for worker in workers), default=0)
        deadline = time.monotonic() + grace
        while any(map(Worker.is_running, workers)) and len(self.signals) < 2 and time.monotonic() < deadline:
            time.sleep(_POLL)
        for worker in workers:
            worker.kill()


class Worker:
    """A worker on this machine: a process group in place of a pod's container. The constructor starts it. `now`: the
    time from which its deadline is counted, equal for all workers that start together"""

    def __init__(self, run: LocalJob, pod: Object, now: float) -> None:
        self.pod, container = pod, pod["spec"]["containers"][0]
        name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
        home = run.folder / (name if labels[ATTEMPT] == "0" else f"{name}.{labels[ATTEMPT]}")
        home.mkdir()
        instance = int(labels[INSTANCE])
        here = {
            ("MASTER_ADDR", run.job.host(instance)): "127.0.0.1",
            ("MASTER_PORT", str(PORT)): run.ports[instance],
        }
        variables = _worker_variables(pod, here, run.overrides)
        words = [*container.get("command", ()), *container.get("args", ())]
        where = Path(container.get("workingDir", home))
        where = where if where.is_dir() else home
        missing = [word for word in words if os.path.isfile(word) and not (where / word).is_file()]
        if missing and labels[ATTEMPT] == "0" and not run.workers:
            print(
                f"ipujob: {missing[0]} is in this folder, and workers run in {where}\n"
                f"  fix: workingDir: {Path.cwd()}, beside `command`",
                file=sys.stderr,
            )
        self.deadline = now + pod["spec"].get("activeDeadlineSeconds", float("inf"))
        self.process = subprocess.Popen(
            # If `env` can't start the program, it prints the reason and exits with 126 or 127.
            ["/usr/bin/env", "--", *(_expand_variables(word, variables) for word in words)],
            cwd=where,
            env={**run.environment, "HOME": str(home), "HOSTNAME": name, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pod["status"] = {"phase": "Running"}
        prefix = f"[{name}] ".encode() if run.job.instances * run.job.workers > 1 else b""
        copying = (run.folder / f"{name}.log", prefix)
        self._reader = threading.Thread(target=self._copy_output, args=copying, daemon=True)
        self._reader.start()

    def is_running(self) -> bool:
        return self.process.poll() is None

    def set_ended(self, reason: str) -> None:
        """Set the status of the pod, of which the process has ended, as a cluster does (once)."""
        if pods.phase(self.pod) != "Running":
            return
        self.kill()  # as a container, in which all processes end with the first
        code = self.process.returncode
        ended = {"exitCode": 128 - code if code < 0 else code, "finishedAt": datetime.now(UTC).isoformat()}
        container = {"name": self.pod["spec"]["containers"][0]["name"], "state": {"terminated": ended}}
        phase = "Failed" if code or reason else "Succeeded"
        self.pod["status"] = {"phase": phase, "reason": reason, "containerStatuses": [container]}

    def kill(self) -> None:
        """Kill the worker's process group; wait for its process, and up to 2 s until its output is copied."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join(2)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _copy_output(self, file: Path, prefix: bytes) -> None:
        """Copy the worker's output to the log `file`, and to the terminal with `prefix` before each line."""
        pipe, terminal = self.process.stdout, sys.stdout.buffer
        assert isinstance(pipe, io.BufferedReader)
        with file.open("ab", buffering=0) as log:
            while said := pipe.readline() if prefix else pipe.read1():
                log.write(said)
                end = b"\n" if prefix and not said.endswith(b"\n") else b""
                with suppress(OSError):  # `ipujob run ... | head`: the worker must not block on a full pipe
                    terminal.write(prefix + said + end)
                    terminal.flush()


def _worker_variables(
    pod: Object, here: Mapping[tuple[str, str], str], overrides: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables of a worker, with $(NAME) and references to pod fields replaced. `here`:
    values that are different on this machine, by (name of the variable, its value in the pod)"""
    environment = dict(overrides)
    metadata = pod["metadata"]
    for variable in pod["spec"]["containers"][0]["env"]:
        name, text = variable["name"], str(variable.get("value") or "")
        if field := re.fullmatch(_FIELD, _field_path(variable)):
            text = metadata[field[1]] if field[1] else metadata["labels"].get(field[2], "")
        else:
            text = _expand_variables(here.get((name, text), text), environment)
        environment.setdefault(name, text)
    return environment


def _expand_variables(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with $(NAME) replaced as in Kubernetes: $$ becomes $, an unknown $(NAME) stays."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]), text)


def _field_path(variable: Object) -> str:
    """Return the field of the pod that a variable's value comes from; "", if it comes from none."""
    return ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath", "")


def unsupported_fields(job: Job, overrides: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault for each field of a job that can't be kept here."""
    path, container = f"{POD}.containers[0]", job.container
    if container.get("envFrom") and not overrides:
        message = "variables of a ConfigMap or Secret can't be had here"
        yield Fault(f"{path}.envFrom", message, "--env NAME=VALUE")
    for index, variable in enumerate(container.get("env", [])):
        name, source = variable["name"], variable.get("valueFrom")
        if source and name not in overrides and not re.fullmatch(_FIELD, _field_path(variable)):
            message = f"the value of {name} comes from {', '.join(source)} and can't be had here"
            yield Fault(f"{path}.env[{index}]", message, f"--env {name}=VALUE")
    for index, mount in enumerate(container.get("volumeMounts", [])):
        where = mount.get("mountPath", "")
        if where.rstrip("/") != "/dev/shm" and not Path(where).exists():
            message = f"volume {mount.get('name')} is mounted at {where}, which doesn't exist here"
            fix = f"mkdir -p {where}, or take the mount out"
            yield Fault(f"{path}.volumeMounts[{index}]", message, fix)
    if not (container.get("command") or job.launcher_command or job.ttl):
        yield Fault(path, "an image's own command can't be run here", "--command TEXT")


def ignored_fields(job: Job) -> list[str]:
    """Return the names of the template's fields that have no effect on this machine."""
    container, spec = job.container, job.template["spec"]
    fields = ["image", *(name for name in ("resources", "securityContext") if name in container)]
    fields += [name for name in _IGNORED_FIELDS if name in spec and name not in fields]
    return fields + (["other containers"] if len(spec["containers"]) > 1 else [])
