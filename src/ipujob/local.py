"""Run a job on this machine: processes take the place of pods, and `observe` decides as in a cluster."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from popengine.environment import SECRET, path_with_aliases

from .observe import observe
from .pods import ATTEMPT, INSTANCE, PORT, Object, exit_code, first_failed, phase
from .spec import Fault, Job

_POLL = 0.05  # seconds between two checks of a job
_POLL_END = 0.01  # seconds between two checks of processes that are being ended
_FIELDS = r"metadata\.(name|namespace|labels\['.+'\])"
_TEMPLATE = ("spec", "workers", "template", "spec")
_IGNORED = ("nodeSelector", "affinity", "tolerations", "securityContext", "hostIPC", "initContainers")


def run(value: Object, job: Job, folder: Path, overrides: Mapping[str, str]) -> int:
    """Run a job to its end, and return 0, or the exit code of the worker that failed first.

    Ctrl-C or SIGTERM ends the workers by SIGTERM, and the exit code is 128 plus the signal's number. A second
    signal kills the workers.

    Args:
        folder:    of the workers' home folders and logs; `folder/bin` comes first on their PATH
        overrides: environment variables of the command line, which precede the job's
    """
    signals: list[int] = []  # handlers don't raise: an exception could leave a new worker out of `workers`
    interrupts = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _: signals.append(got)) for number in interrupts}
    metadata = {**value["metadata"], "name": job.name, "uid": "local"}
    value = {**value, "metadata": metadata, "status": {}}
    path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": path_with_aliases(os.environ.get("PYTHONPATH", "")),
        SECRET: secrets.token_hex(32),
    }
    ports = _free_ports(job.shape.instances)
    start = partial(
        Process, job=job, folder=folder, environment=environment, ports=ports, overrides=overrides
    )
    workers: dict[str, Process] = {}
    try:
        code = _run(value, job, start, workers, signals)
    finally:
        _end(list(workers.values()), signals)
        for number, handler in before.items():
            signal.signal(number, handler)
    if signals:
        print(f"ipujob: {job.name}: interrupted, its workers were ended", file=sys.stderr)
        return 128 + signals[0]
    return code


def _run(
    value: Object,
    job: Job,
    start: Callable[[Object], Process],
    workers: dict[str, Process],
    signals: Sequence[int],
) -> int:
    services: list[Object] = []
    while not signals:
        for worker in workers.values():
            worker.update(signals)
        owned = [worker.pod for worker in workers.values()]
        decision = observe(value, owned + services, datetime.now(UTC))
        value["status"] |= decision.status
        if "completionTime" in value["status"]:
            return _code(job, value["status"], owned)
        _end([workers[each["metadata"]["name"]] for each in decision.delete], signals)
        for each in decision.delete:
            del workers[each["metadata"]["name"]]
        for made in decision.create:
            if made["kind"] == "Service":
                services.append(made)
            elif not signals:
                workers[made["metadata"]["name"]] = start(made)
        if decision.status.get("restartCount"):
            print(f"ipujob: {job.name}: restart {decision.status['restartCount']}", file=sys.stderr)
        if not (decision.delete or decision.create):
            time.sleep(_POLL)
    return 0


def _code(job: Job, status: Object, owned: Sequence[Object]) -> int:
    """Return the exit code of a job that has ended; print the last message of one that failed."""
    if status["launcherStatus"] == "Completed":
        return 0
    print(f"ipujob: {job.name}: {status['lastMessage']}", file=sys.stderr)
    culprit = first_failed(owned)
    return (exit_code(culprit) if culprit else None) or 1


def unsupported(job: Job, overrides: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault for each field of a job that has no equivalent on this machine.

    Args: overrides: environment variables of the command line
    """
    place, container = (*_TEMPLATE, "containers", 0), job.worker
    if container.get("envFrom") and not overrides:
        message = "variables of a ConfigMap or Secret can't be had here"
        yield Fault((*place, "envFrom"), message, "--env NAME=VALUE")
    for index, variable in enumerate(container.get("env") or []):
        name, source = variable["name"], variable.get("valueFrom") or {}
        field = (source.get("fieldRef") or {}).get("fieldPath", "")
        if source and name not in overrides and not re.fullmatch(_FIELDS, field):
            message = f"the value of {name} comes from {', '.join(source)} and can't be had here"
            yield Fault((*place, "env", index), message, f"--env {name}=VALUE")
    for index, mount in enumerate(container.get("volumeMounts") or []):
        path = mount.get("mountPath", "")
        if path.rstrip("/") != "/dev/shm" and not Path(path).exists():
            message = f"volume {mount.get('name')} is mounted at {path}, which doesn't exist here"
            yield Fault((*place, "volumeMounts", index), message, f"mkdir -p {path}, or take the mount out")
    if not (container.get("command") or job.launch or job.ttl):
        yield Fault(place, "an image's own command can't be run here", "--command TEXT")


def ignored_fields(job: Job) -> list[str]:
    """Return the template's fields that have no effect on this machine."""
    container, spec = job.worker, job.template["spec"]
    fields = ["image", *(name for name in ("resources", "securityContext") if name in container)]
    fields += [name for name in _IGNORED if name in spec and name not in fields]
    return fields + (["other containers"] if len(spec["containers"]) > 1 else [])


def _free_ports(count: int) -> list[str]:
    """Return `count` different TCP ports that are free on 127.0.0.1."""
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(each.getsockname()[1]) for each in sockets]


# ---- processes ----------------------------------------------------------------------------------------------------


class Process:
    """A worker on this machine: the first container of a pod, as a process group. The constructor starts it.

    `update` writes the worker's state into the pod's status.

    Args:
        folder:    for the worker's home folder and its log
        ports:     MASTER_PORT of each instance
        overrides: environment variables of the command line, which precede the pod's
    """

    def __init__(
        self,
        pod: Object,
        job: Job,
        folder: Path,
        environment: Mapping[str, str],
        ports: Sequence[str],
        overrides: Mapping[str, str],
    ) -> None:
        self.pod, name, labels = pod, pod["metadata"]["name"], pod["metadata"]["labels"]
        home = folder / (name if labels[ATTEMPT] == "0" else f"{name}.{labels[ATTEMPT]}")
        home.mkdir()
        instance = int(labels[INSTANCE])
        first = f"{job.name}-worker-{instance * job.shape.workers}.{job.name}"
        here = {("MASTER_ADDR", first): "127.0.0.1", ("MASTER_PORT", str(PORT)): ports[instance]}
        variables = _variables(pod, here, overrides)
        container = pod["spec"]["containers"][0]
        words = [*container.get("command", ()), *container.get("args", ())]
        where = container.get("workingDir")
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            # If `env` can't start the program, it prints the reason and exits with 126 or 127.
            ["/usr/bin/env", "--", *(_expand(word, variables) for word in words)],
            cwd=where if where and Path(where).is_dir() else home,
            env={**environment, "HOME": str(home), "HOSTNAME": name, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._set_status("Running", {"running": {}})
        several = job.shape.instances * job.shape.workers > 1
        copying = (folder / f"{name}.log", f"[{name}] ".encode() if several else b"")
        self._reader = threading.Thread(target=self._copy_output, args=copying, daemon=True)
        self._reader.start()

    def update(self, signals: Sequence[int]) -> None:
        """Write the process's state into the pod's status; end the process after `activeDeadlineSeconds`."""
        if phase(self.pod) != "Running":
            return
        limit = self.pod["spec"].get("activeDeadlineSeconds")
        too_long = limit is not None and time.monotonic() - self._started > limit and self.is_running()
        if too_long:
            _end([self], signals)
        code = self._process.poll()
        if code is None:
            return
        self.kill()  # a container ends with its first process, and so do the other processes in it
        ended = {"exitCode": 128 - code if code < 0 else code, "finishedAt": datetime.now(UTC).isoformat()}
        self._set_status("Failed" if code or too_long else "Succeeded", {"terminated": ended})
        if too_long:
            self.pod["status"]["reason"] = "DeadlineExceeded"

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join(2)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _set_status(self, phase: str, state: Object) -> None:
        name = self.pod["spec"]["containers"][0]["name"]
        self.pod["status"] = {"phase": phase, "containerStatuses": [{"name": name, "state": state}]}

    def _copy_output(self, file: Path, prefix: bytes) -> None:
        """Copy the worker's output to its log and to the terminal; with a prefix, line by line."""
        pipe, terminal = self._process.stdout, sys.stdout.buffer
        assert pipe is not None
        terminal_is_open = True
        with file.open("ab", buffering=0) as log:
            while said := pipe.readline() if prefix else pipe.read1():  # pyright: ignore
                log.write(said)
                end = b"\n" if prefix and not said.endswith(b"\n") else b""
                try:
                    if terminal_is_open:
                        terminal.write(prefix + said + end)
                        terminal.flush()
                except OSError:  # `ipujob run ... | head`: the worker must not block on a full pipe
                    terminal_is_open = False


def _end(workers: Sequence[Process], signals: Sequence[int]) -> None:
    """End workers by SIGTERM; kill them after their pods' longest grace period, or at a second signal."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    grace = [worker.pod["spec"]["terminationGracePeriodSeconds"] for worker in workers]
    deadline = time.monotonic() + max(grace, default=0)
    while any(worker.is_running() for worker in workers) and time.monotonic() < deadline and len(signals) < 2:
        time.sleep(_POLL_END)
    for worker in workers:
        worker.kill()


def _variables(
    pod: Object, here: Mapping[tuple[str, str], str], overrides: Mapping[str, str]
) -> dict[str, str]:
    """Return a worker's environment variables: values with $(NAME) expanded, or read from fields of the pod.

    Args:
        here:      by (name, value) of a variable, its value on this machine
        overrides: variables that precede the pod's
    """
    environment = dict(overrides)
    metadata = pod["metadata"]
    for variable in pod["spec"]["containers"][0]["env"]:
        name, text = variable["name"], str(variable.get("value") or "")
        path = ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath", "")
        if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            text = metadata["labels"].get(label[1], "")
        elif path:
            text = metadata[path.removeprefix("metadata.")]
        else:
            text = _expand(here.get((name, text), text), environment)
        environment.setdefault(name, text)
    return environment


def _expand(text: str, known: Mapping[str, str]) -> str:
    """Return a text with $(NAME) expanded as in Kubernetes: $$ becomes $, an unknown $(NAME) stays."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else known.get(m[1], m[0]), text)
