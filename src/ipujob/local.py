"""A job on this machine: its pods are processes, and `observe` decides about them as it does in a cluster."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from . import instances
from .documents import Fault
from .observe import merged, observe
from .pods import ATTEMPT, INSTANCE, PORT, Object
from .processes import Process, end
from .spec import Job

_POLL = 0.05  # seconds
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_FIELDS = r"metadata\.(name|namespace|labels\['.+'\])"
_TEMPLATE = ("spec", "workers", "template", "spec")
_NOT_LOOKED_AT = ("nodeSelector", "affinity", "tolerations", "securityContext", "hostIPC", "initContainers")


def run(value: Object, job: Job, folder: Path, given: Mapping[str, str]) -> int:
    """Run a job to its end; the exit code of the first worker that failed, else 0.

    Ctrl-C and SIGTERM end the workers first; a second one doesn't wait for them.
    """
    signals: list[int] = []  # handlers raise nothing, so that no worker is started and not known
    before = {number: signal.signal(number, lambda got, _: signals.append(got)) for number in _INTERRUPTS}
    metadata = {**value["metadata"], "name": job.name, "uid": "local"}
    value = {**value, "metadata": metadata, "status": {}}
    workers: dict[str, Process] = {}
    try:
        code = _run(value, job, Start(job, folder, given), workers, signals)
    finally:
        end(list(workers.values()), signals)
        for number, handler in before.items():
            signal.signal(number, handler)
    if signals:
        print(f"ipujob: {job.name}: interrupted, its workers were ended", file=sys.stderr)
        return 128 + signals[0]
    return code


class Start:
    """Makes processes of pods."""

    def __init__(self, job: Job, folder: Path, given: Mapping[str, str]) -> None:
        path = os.pathsep.join(
            [str(folder / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        )
        self.job, self.folder, self.given = job, folder, given
        self.environment = {**os.environ, "PATH": path}
        self.ports = [str(port) for port in free_ports(job.shape.instances)]

    def __call__(self, pod: Object) -> Process:
        told = {"PANDO_RESTARTS": pod["metadata"]["labels"][ATTEMPT]}
        several = self.job.shape.instances * self.job.shape.workers > 1
        made = settled(pod, self.job, self.ports, self.given)
        return Process(made, self.folder, self.environment | told, several)


def _run(value: Object, job: Job, start: Start, workers: dict[str, Process], signals: Sequence[int]) -> int:
    services: list[Object] = []
    while not signals:
        for worker in workers.values():
            worker.look(signals)
        owned = [worker.pod for worker in workers.values()]
        decision = observe(value, owned + services, datetime.now(UTC))
        value["status"] = status = merged(value["status"], decision.status)
        if "completionTime" in status:
            return _code(job, status, owned)
        end([workers[each["metadata"]["name"]] for each in decision.delete], signals)
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
    """The exit code of a job that has ended."""
    if status["launcherStatus"] == "Completed":
        return 0
    print(f"ipujob: {job.name}: {status['lastMessage']}", file=sys.stderr)
    failed = [pod for pod in owned if instances.phase(pod) == "Failed"]
    return instances.exit_code(min(failed, key=instances.when_ended)) or 1


def settled(pod: Object, job: Job, ports: Sequence[str], given: Mapping[str, str]) -> Object:
    """The pod with an address on this machine, and with the variables that the command line gives."""
    instance = int(pod["metadata"]["labels"][INSTANCE])
    first = f"{job.name}-worker-{instance * job.shape.workers}.{job.name}"
    here = {("MASTER_ADDR", first): "127.0.0.1", ("MASTER_PORT", str(PORT)): ports[instance]}
    container = pod["spec"]["containers"][0]
    env = {name: {"name": name, "value": text} for name, text in given.items()}
    for variable in container["env"]:
        name, value = variable["name"], variable.get("value")
        local = {**variable, "value": here[name, value]} if (name, value) in here else variable
        env.setdefault(name, local)
    spec = {**pod["spec"], "containers": [{**container, "env": list(env.values())}]}
    metadata = {**pod["metadata"], "uid": pod["metadata"]["name"]}
    return {**pod, "metadata": metadata, "spec": spec}


def refusals(job: Job, given: Mapping[str, str]) -> Iterator[Fault]:
    """What of a job can't be had here."""
    place, container = (*_TEMPLATE, "containers", 0), job.worker
    fix = "--env NAME=VALUE"
    if container.get("envFrom") and not given:
        yield Fault((*place, "envFrom"), "variables of a ConfigMap or Secret can't be had here", fix)
    for index, variable in enumerate(container.get("env") or []):
        name, source = variable["name"], variable.get("valueFrom") or {}
        field = (source.get("fieldRef") or {}).get("fieldPath", "")
        if source and name not in given and not re.fullmatch(_FIELDS, field):
            told = f"the value of {name} comes from {', '.join(source)} and can't be had here"
            yield Fault((*place, "env", index), told, fix.replace("NAME", name))
    for index, mount in enumerate(container.get("volumeMounts") or []):
        path = mount.get("mountPath", "")
        if path.rstrip("/") != "/dev/shm" and not Path(path).exists():
            told = f"volume {mount.get('name')} is mounted at {path}, which doesn't exist here"
            yield Fault((*place, "volumeMounts", index), told, f"mkdir -p {path}, or take the mount out")
    if not (container.get("command") or job.launch or job.ttl):
        yield Fault(place, "an image's own command can't be run here", "--command TEXT")


def not_looked_at(job: Job) -> list[str]:
    """What of the template has no meaning on this machine."""
    container, spec = job.worker, job.template["spec"]
    found = ["image", *(name for name in ("resources", "securityContext") if name in container)]
    found += [name for name in _NOT_LOOKED_AT if name in spec and name not in found]
    return found + (["other containers"] if len(spec["containers"]) > 1 else [])


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
