"""Run a job on this machine: `observe` decides as in a cluster, and its pods are processes."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from popengine.environment import SECRET, path_with_aliases

from .observe import merged, observe
from .pods import ATTEMPT, INSTANCE, PORT, Object, exit_code, phase, when_ended
from .spec import Fault, Job

_POLL = 0.05  # seconds between two looks at a job
_POLL_END = 0.01  # seconds between two looks at processes that are being ended
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_FIELDS = r"metadata\.(name|namespace|labels\['.+'\])"
_TEMPLATE = ("spec", "workers", "template", "spec")
_IGNORED = ("nodeSelector", "affinity", "tolerations", "securityContext", "hostIPC", "initContainers")


def run(value: Object, job: Job, folder: Path, overrides: Mapping[str, str]) -> int:
    """Run a job to its end, and return the exit code of the first worker that failed, or 0.

    Ctrl-C and SIGTERM end the workers, and wait for them; a second signal kills them.
    """
    signals: list[int] = []  # handlers don't raise: a worker would be started and not be in `workers`
    before = {number: signal.signal(number, lambda got, _: signals.append(got)) for number in _INTERRUPTS}
    metadata = {**value["metadata"], "name": job.name, "uid": "local"}
    value = {**value, "metadata": metadata, "status": {}}
    workers: dict[str, Process] = {}
    try:
        code = _run(value, job, Starter(job, folder, overrides), workers, signals)
    finally:
        _end(list(workers.values()), signals)
        for number, handler in before.items():
            signal.signal(number, handler)
    if signals:
        print(f"ipujob: {job.name}: interrupted, its workers were ended", file=sys.stderr)
        return 128 + signals[0]
    return code


class Starter:
    """Starts the processes of pods."""

    def __init__(self, job: Job, folder: Path, overrides: Mapping[str, str]) -> None:
        path = os.pathsep.join(
            [str(folder / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        )
        self.job, self.folder, self.overrides = job, folder, overrides
        python_path = path_with_aliases(os.environ.get("PYTHONPATH", ""))
        self.environment = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": python_path,
            SECRET: secrets.token_hex(32),
        }
        self.ports = [str(port) for port in _free_ports(job.shape.instances)]

    def __call__(self, pod: Object) -> Process:
        attempt = {"PANDO_RESTARTS": pod["metadata"]["labels"][ATTEMPT]}
        several = self.job.shape.instances * self.job.shape.workers > 1
        made = _with_local_address(pod, self.job, self.ports, self.overrides)
        return Process(made, self.folder, self.environment | attempt, several)


def _run(value: Object, job: Job, start: Starter, workers: dict[str, Process], signals: Sequence[int]) -> int:
    services: list[Object] = []
    while not signals:
        for worker in workers.values():
            worker.update(signals)
        owned = [worker.pod for worker in workers.values()]
        decision = observe(value, owned + services, datetime.now(UTC))
        value["status"] = status = merged(value["status"], decision.status)
        if "completionTime" in status:
            return _code(job, status, owned)
        _end([workers[each["metadata"]["name"]] for each in decision.delete], signals)
        for each in decision.delete:
            del workers[each["metadata"]["name"]]
        services += [made for made in decision.create if made["kind"] == "Service"]
        for made in decision.create:
            if made["kind"] == "Pod" and not signals:
                workers[made["metadata"]["name"]] = start(made)
        if decision.status.get("restartCount"):
            print(f"ipujob: {job.name}: restart {status['restartCount']}", file=sys.stderr)
        if not (decision.delete or decision.create):
            time.sleep(_POLL)
    return 0


def _code(job: Job, status: Object, owned: Sequence[Object]) -> int:
    """Return the exit code of a job that has ended."""
    if status["launcherStatus"] == "Completed":
        return 0
    print(f"ipujob: {job.name}: {status['lastMessage']}", file=sys.stderr)
    failed = [pod for pod in owned if phase(pod) == "Failed"]
    return exit_code(min(failed, key=when_ended)) or 1


def _with_local_address(pod: Object, job: Job, ports: Sequence[str], overrides: Mapping[str, str]) -> Object:
    """Return a pod with an address on this machine, and with the variables of the command line."""
    instance = int(pod["metadata"]["labels"][INSTANCE])
    first = f"{job.name}-worker-{instance * job.shape.workers}.{job.name}"
    here = {("MASTER_ADDR", first): "127.0.0.1", ("MASTER_PORT", str(PORT)): ports[instance]}
    container = pod["spec"]["containers"][0]
    env = {name: {"name": name, "value": text} for name, text in overrides.items()}
    for variable in container["env"]:
        name, value = variable["name"], variable.get("value")
        local = {**variable, "value": here[name, value]} if (name, value) in here else variable
        env.setdefault(name, local)
    spec = {**pod["spec"], "containers": [{**container, "env": list(env.values())}]}
    metadata = {**pod["metadata"], "uid": pod["metadata"]["name"]}
    return {**pod, "metadata": metadata, "spec": spec}


def unsupported(job: Job, overrides: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault for each field of a job that can't be had on this machine.

    Args: overrides: variables of the command line
    """
    place, container = (*_TEMPLATE, "containers", 0), job.worker
    fix = "--env NAME=VALUE"
    if container.get("envFrom") and not overrides:
        yield Fault((*place, "envFrom"), "variables of a ConfigMap or Secret can't be had here", fix)
    for index, variable in enumerate(container.get("env") or []):
        name, source = variable["name"], variable.get("valueFrom") or {}
        field = (source.get("fieldRef") or {}).get("fieldPath", "")
        if source and name not in overrides and not re.fullmatch(_FIELDS, field):
            told = f"the value of {name} comes from {', '.join(source)} and can't be had here"
            yield Fault((*place, "env", index), told, fix.replace("NAME", name))
    for index, mount in enumerate(container.get("volumeMounts") or []):
        path = mount.get("mountPath", "")
        if path.rstrip("/") != "/dev/shm" and not Path(path).exists():
            told = f"volume {mount.get('name')} is mounted at {path}, which doesn't exist here"
            yield Fault((*place, "volumeMounts", index), told, f"mkdir -p {path}, or take the mount out")
    if not (container.get("command") or job.launch or job.ttl):
        yield Fault(place, "an image's own command can't be run here", "--command TEXT")


def ignored_fields(job: Job) -> list[str]:
    """Return the template's fields that have no effect on this machine."""
    container, spec = job.worker, job.template["spec"]
    fields = ["image", *(name for name in ("resources", "securityContext") if name in container)]
    fields += [name for name in _IGNORED if name in spec and name not in fields]
    return fields + (["other containers"] if len(spec["containers"]) > 1 else [])


def _free_ports(count: int) -> list[int]:
    """Return different ports that no process listens on."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


# ---- processes ----------------------------------------------------------------------------------------------------


class Process:
    """A worker on this machine: the first container of a pod, as a process group. It starts when the object is made.

    `update` writes the worker's state into the pod's status.
    """

    def __init__(self, pod: Object, folder: Path, environment: Mapping[str, str], shows_name: bool) -> None:
        self.pod = pod
        container, self.name = pod["spec"]["containers"][0], pod["metadata"]["name"]
        attempt = environment["PANDO_RESTARTS"]
        home = folder / (self.name if attempt == "0" else f"{self.name}.{attempt}")
        home.mkdir()
        where = container.get("workingDir")
        own = _variables(pod)
        command = [_expand(word, own) for word in [*container.get("command", ()), *container.get("args", ())]]
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
            self._set_status("Failed", {"terminated": {"exitCode": 127, "finishedAt": _now()}})
            return
        self._set_status("Running", {"running": {"startedAt": _now()}})
        self._reader = threading.Thread(
            target=self._copy_output, args=(f"[{self.name}] " if shows_name else "",), daemon=True
        )
        self._reader.start()

    def update(self, signals: Sequence[int]) -> None:
        """Write the process's state into the pod's status; end a process that is past its deadline."""
        if self.process is None or phase(self.pod) != "Running":
            return
        limit = self.pod["spec"].get("activeDeadlineSeconds")
        too_long = limit is not None and time.monotonic() - self._started > limit and self.is_running()
        if too_long:
            _end([self], signals)
        code = self.process.poll()
        if code is None:
            return
        self.kill()  # a container ends with its first process, and so do the other processes in it
        ended = {"exitCode": 128 - code if code < 0 else code, "finishedAt": _now()}
        self._set_status("Failed" if code or too_long else "Succeeded", {"terminated": ended})
        if too_long:
            self.pod["status"]["reason"] = "DeadlineExceeded"

    def is_running(self) -> bool:
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

    def _set_status(self, phase: str, state: Object) -> None:
        name = self.pod["spec"]["containers"][0]["name"]
        self.pod["status"] = {"phase": phase, "containerStatuses": [{"name": name, "state": state}]}

    def _copy_output(self, prefix: str) -> None:
        """Copy the worker's output to its log and to the terminal; in whole lines, if there are several workers."""
        assert self.process and self.process.stdout
        pipe = self.process.stdout
        read = pipe.readline if prefix else lambda: os.read(pipe.fileno(), 65536)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may arrive in two parts
        terminal_is_open = True
        while said := read():
            self._log.write(said)
            self._log.flush()
            text = prefix + decoder.decode(said)
            try:
                if terminal_is_open:
                    sys.stdout.write(f"{text}\n" if prefix and not text.endswith("\n") else text)
                    sys.stdout.flush()
            except OSError:  # `ipujob run ... | head`: the worker must not block on a full pipe
                terminal_is_open = False
        self._log.close()


def _end(workers: Sequence[Process], signals: Sequence[int]) -> None:
    """End workers by SIGTERM, and kill them after their pods' grace period or a second Ctrl-C."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    deadline = time.monotonic() + max(
        (w.pod["spec"]["terminationGracePeriodSeconds"] for w in workers), default=0
    )
    while any(worker.is_running() for worker in workers) and time.monotonic() < deadline and len(signals) < 2:
        time.sleep(_POLL_END)
    for worker in workers:
        worker.kill()


def _variables(pod: Object) -> dict[str, str]:
    """Return the environment of a pod's worker: texts, with $(NAME) expanded, and fields of the pod."""
    environment: dict[str, str] = {}
    metadata = pod["metadata"]
    for variable in pod["spec"]["containers"][0].get("env") or []:
        path = ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath", "")
        if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            text = metadata["labels"].get(label[1], "")
        elif path:
            text = metadata[path.removeprefix("metadata.")]
        else:
            text = _expand(str(variable.get("value") or ""), environment)
        environment[variable["name"]] = text
    return environment


def _expand(text: str, known: Mapping[str, str]) -> str:
    """Expand $(NAME) as Kubernetes does: $$ stands for one $, and an unknown name stays as it is."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else known.get(m[1], m[0]), text)


def _now() -> str:
    """Return the time as pods' statuses hold it."""
    return datetime.now(UTC).isoformat()
