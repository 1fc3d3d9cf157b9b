"""A Kubernetes API server on this machine for tests, and a stand-in for the nodes: standard library and PyYAML only.

    with Cluster(folder_of_binaries, scratch) as cluster, FakeKubelet(cluster) as node:
        ...                      # cluster.kubeconfig is a file; cluster.call("GET", "/api/v1/pods")

Real: etcd, kube-apiserver, kube-controller-manager if it was built (garbage collection, Jobs, namespaces).
Simulated by FakeKubelet: scheduler, node and containers. It binds every pod to its one node, runs the first container's
command as a process on this machine (image, resources, volumes and security settings are not looked at), writes the
pod's status as a kubelet would, and serves `kubectl logs`. A pod that is deleted has its process group killed.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Cluster:
    """etcd, kube-apiserver and, if built, kube-controller-manager: started by `with`, stopped by its end."""

    def __init__(self, binaries: Path, scratch: Path) -> None:
        self.binaries, self.scratch = Path(binaries), Path(scratch)
        self.kubeconfig = self.scratch / "kubeconfig"
        self.token = secrets.token_hex(16)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):  # etcd last
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        self.scratch.mkdir(parents=True, exist_ok=True)
        etcd, peer, port = free_port(), free_port(), free_port()
        self.server = f"https://127.0.0.1:{port}"
        key = self.scratch / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (self.scratch / "tokens.csv").write_text(f"{self.token},admin,admin,system:masters\n")
        self._run(
            "etcd", "--name=t", f"--data-dir={self.scratch}/etcd", "--unsafe-no-fsync",
            f"--listen-client-urls=http://127.0.0.1:{etcd}", f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=t=http://127.0.0.1:{peer}",
        )  # fmt: skip
        self._run(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{etcd}", f"--cert-dir={self.scratch}/certs",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={port}",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}", "--service-cluster-ip-range=10.0.0.0/24",
            f"--token-auth-file={self.scratch}/tokens.csv", "--authorization-mode=RBAC", "--allow-privileged=true",
            "--disable-admission-plugins=ServiceAccount", "--kubelet-preferred-address-types=InternalIP",
        )  # fmt: skip
        self._context = ssl.create_default_context()
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        self._wait_until_ready(60)
        self.kubeconfig.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {
                "server": self.server, "certificate-authority": str(self.scratch / "certs/apiserver.crt")}}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": "default"}}],
        }))  # fmt: skip
        if (self.binaries / "kube-controller-manager").exists():
            own = f"--kubeconfig={self.kubeconfig}"
            self._run(
                "kube-controller-manager", own, "--leader-elect=false", f"--service-account-private-key-file={key}",
                f"--authentication-{own[2:]}", f"--authorization-{own[2:]}", "--bind-address=127.0.0.1", "--port=0",
                f"--secure-port={free_port()}", f"--cert-dir={self.scratch}/kcm",
            )  # fmt: skip

    def _run(self, program: str, *arguments: str) -> None:
        log = (self.scratch / f"{program}.log").open("wb")
        self._processes.append(
            subprocess.Popen(
                [self.binaries / program, *arguments], stdout=log, stderr=log, start_new_session=True
            )
        )

    def _wait_until_ready(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                self.call("GET", "/readyz", raw=True)
                self.call("GET", "/api/v1/namespaces/default")
                return
            except (OSError, urllib.error.URLError) as error:
                dead = [process.args[0] for process in self._processes if process.poll() is not None]
                if dead or time.monotonic() > end:
                    raise RuntimeError(
                        f"no API server: {error}; ended: {dead}; logs in {self.scratch}"
                    ) from None
                time.sleep(0.2)

    def request(
        self, method: str, path: str, body: object = None, kind: str = "application/json", timeout: float = 30
    ):
        """An open response; `kind` is the patch's type where `method` is PATCH."""
        data = None if body is None else json.dumps(body).encode()
        headers = {
            "Authorization": f"Bearer {self.token}",
            "Content-Type": kind,
            "Accept": "application/json",
        }
        request = urllib.request.Request(self.server + path, data, headers, method=method)
        return urllib.request.urlopen(request, context=self._context, timeout=timeout)

    def call(
        self, method: str, path: str, body: object = None, kind: str = "application/json", raw: bool = False
    ):
        with self.request(method, path, body, kind) as response:
            text = response.read()
        return text if raw else json.loads(text)

    def merge(self, path: str, change: object):
        return self.call("PATCH", path, change, kind="application/merge-patch+json")

    def watch(self, path: str, seconds: int = 300) -> Iterator[tuple[str, dict]]:
        """(ADDED, MODIFIED or DELETED, the object) as they come, first all that are there."""
        mark = "&" if "?" in path else "?"
        with self.request(
            "GET", f"{path}{mark}watch=1&timeoutSeconds={seconds}", timeout=seconds + 5
        ) as lines:
            for line in lines:
                event = json.loads(line)
                yield event["type"], event["object"]


class FakeKubelet:
    """One node that runs every pod's first container as a process here."""

    def __init__(
        self, cluster: Cluster, environment: dict[str, str] | None = None, name: str = "localhost"
    ) -> None:
        self.cluster, self.name = cluster, name
        self.environment = dict(os.environ) if environment is None else environment
        self.folder = cluster.scratch / "kubelet"
        self._running: dict[str, subprocess.Popen[bytes] | None] = {}  # by uid; None: being started
        self._closing = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> FakeKubelet:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._serve_logs()
        node = {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name},
            "status": {
                "capacity": {"cpu": "1000", "memory": "1000Gi", "pods": "1000"},
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
                "conditions": [{"type": "Ready", "status": "True", "reason": "Fake", "message": "simulated"}],
            },
        }  # fmt: skip
        self.cluster.call("POST", "/api/v1/nodes", node)
        self._thread(self._follow)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._logs.shutdown()
        for process in list(self._running.values()):
            if process is not None:
                self._kill(process)

    def _thread(self, work, *arguments) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self) -> None:
        while not self._closing:
            with contextlib.suppress(OSError, ValueError):
                for what, pod in self.cluster.watch("/api/v1/pods"):
                    if self._closing:
                        return
                    uid = pod["metadata"]["uid"]
                    if what == "DELETED" or pod["metadata"].get("deletionTimestamp"):
                        self._stop(pod)
                    elif uid not in self._running and pod["status"].get("phase") == "Pending":
                        self._running[uid] = None
                        self._thread(self._run, pod)

    def _stop(self, pod: dict) -> None:
        process = self._running.get(pod["metadata"]["uid"])
        if process is not None:
            self._kill(process)
        with contextlib.suppress(urllib.error.HTTPError):  # a node's word that the containers are gone
            grace = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0,
                     "preconditions": {"uid": pod["metadata"]["uid"]}}  # fmt: skip
            self.cluster.call("DELETE", path_of(pod), grace)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    def _run(self, pod: dict) -> None:
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        if not pod["spec"].get("nodeName"):
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
                       "target": {"apiVersion": "v1", "kind": "Node", "name": self.name}}  # fmt: skip
            with contextlib.suppress(urllib.error.HTTPError):
                self.cluster.call("POST", path_of(pod) + "/binding", binding)
        uid = pod["metadata"]["uid"]
        home = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        environment = {**self.environment, "HOME": str(home), "HOSTNAME": pod["spec"].get("hostname", name)}
        for variable in container.get("env", []):
            environment[variable["name"]] = expand(value_of(variable, pod), environment)
        command = [
            expand(part, environment) for part in container.get("command", []) + container.get("args", [])
        ]
        started = stamp()
        with (self.folder / f"{uid}.log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                log.write(f"{error}\n".encode())
                self._say(
                    pod,
                    "Failed",
                    started,
                    {
                        "terminated": {
                            "exitCode": 127,
                            "reason": "ContainerCannotRun",
                            "startedAt": started,
                            "finishedAt": stamp(),
                        }
                    },
                )
                return
            self._running[uid] = process
            self._say(pod, "Running", started, {"running": {"startedAt": started}})
            deadline = pod["spec"].get("activeDeadlineSeconds")
            try:
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                self._kill(process)
                self._say(
                    pod,
                    "Failed",
                    started,
                    {"terminated": {"exitCode": 143, "startedAt": started, "finishedAt": stamp()}},
                    reason="DeadlineExceeded",
                )
                return
        code = 128 - code if code < 0 else code
        reason = "Error" if code else "Completed"
        ended = {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": stamp()}
        self._say(pod, "Failed" if code else "Succeeded", started, {"terminated": ended})
        shutil.rmtree(home, ignore_errors=True)

    def _say(self, pod: dict, phase: str, started: str, state: dict, reason: str | None = None) -> None:
        container, ready = pod["spec"]["containers"][0], "running" in state
        status = {
            "phase": phase, "reason": reason, "startTime": started, "podIP": "127.0.0.1", "hostIP": "127.0.0.1",
            "conditions": [{"type": kind, "status": str(ready)} for kind in ("Ready", "ContainersReady")]
            + [{"type": "Initialized", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{"name": container["name"], "image": container["image"], "imageID": "simulated",
                                   "ready": ready, "started": ready, "restartCount": 0, "state": state}],
        }  # fmt: skip
        with contextlib.suppress(urllib.error.HTTPError):  # deleted meanwhile
            self.cluster.merge(path_of(pod) + "/status", {"status": status})

    def _serve_logs(self) -> None:
        """The one part of a kubelet's own API that `kubectl logs` needs, with a certificate made for it."""
        certificate, key = self.folder / "kubelet.crt", self.folder / "kubelet.key"
        made = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=kubelet",
        ]
        subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        kubelet = self

        class Logs(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                match = re.match(r"/containerLogs/([^/]+)/([^/]+)/", self.path)
                try:
                    pod = kubelet.cluster.call("GET", f"/api/v1/namespaces/{match[1]}/pods/{match[2]}")
                    text = (kubelet.folder / f"{pod['metadata']['uid']}.log").read_bytes()
                except (TypeError, OSError):
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self._logs = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Logs)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._logs.socket = context.wrap_socket(self._logs.socket, server_side=True)
        self.port = self._logs.server_address[1]
        self._thread(self._logs.serve_forever)


def path_of(pod: dict) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def expand(text: str, environment: dict[str, str]) -> str:
    """Kubernetes' $(NAME); $$ stands for one $, and a name nobody set stays as it is."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)", replace, text)


def value_of(variable: dict, pod: dict) -> str:
    path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    if path is None:
        return variable.get("value", "")
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return pod["metadata"].get(match[1], {}).get(match[2], "")
    return {"metadata.name": pod["metadata"]["name"], "metadata.namespace": pod["metadata"]["namespace"],
            "metadata.uid": pod["metadata"]["uid"], "status.podIP": "127.0.0.1"}.get(path, "")  # fmt: skip


if __name__ == "__main__":  # kube_cluster.py FOLDER_OF_BINARIES: stays up until Ctrl-C
    with Cluster(Path(sys.argv[1]), Path(tempfile.mkdtemp())) as up, FakeKubelet(up):
        print(f"export KUBECONFIG={up.kubeconfig}", flush=True)
        signal.pause()
