"""A stand-in for the nodes of a cluster: scheduler, node and containers. Standard library only.

It binds every pod to its one node, runs the first container's command as a process on this machine (image, resources,
volumes and security settings are not looked at), writes the pod's status as a kubelet would, and serves `kubectl logs`.
A pod that is deleted has its process group killed.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import shutil
import signal
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from kube_cluster import Cluster


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
                ended = {"exitCode": 127, "startedAt": started, "finishedAt": stamp()}
                self._say(pod, "Failed", started, {"terminated": ended})
                return
            self._running[uid] = process
            self._say(pod, "Running", started, {"running": {"startedAt": started}})
            deadline = pod["spec"].get("activeDeadlineSeconds")
            try:
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                self._kill(process)
                ended = {"exitCode": 143, "startedAt": started, "finishedAt": stamp()}
                self._say(pod, "Failed", started, {"terminated": ended}, reason="DeadlineExceeded")
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
