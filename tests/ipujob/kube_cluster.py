"""A Kubernetes API server on this machine for tests: standard library and PyYAML only.

    with Cluster(folder_of_binaries, scratch) as cluster, FakeKubelet(cluster) as node:
        ...                      # cluster.kubeconfig is a file; cluster.call("GET", "/api/v1/pods")

Real: etcd, kube-apiserver, kube-controller-manager if it was built (garbage collection, Jobs, namespaces). Nodes are
simulated (fake_kubelet.py).
"""

from __future__ import annotations

import json
import secrets
import socket
import ssl
import subprocess
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
        self._wait_until_ready(180)
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
