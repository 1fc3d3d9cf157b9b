"""A real API server with the operator in it, as its manifest installs it: what the tests and the load test share."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml
from fake_kubelet import FakeKubelet
from kube_cluster import Cluster

from ipujob import skipped_programs
from ipujob.cli import main

ROOT = Path(__file__).parents[2]
JOBS = "/apis/graphcore.ai/v1alpha1/namespaces/default/ipujobs"
PODS = "/api/v1/namespaces/default/pods"
LIMIT = 240  # seconds; a few on an idle machine
_COLLECTIONS = {
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/ipujob-system/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ConfigMap": "/api/v1/namespaces/ipujob-system/configmaps",
    "Deployment": "/apis/apps/v1/namespaces/ipujob-system/deployments",
}


def binaries():
    """(folder, "") or (None, why there is no API server)."""
    done = subprocess.run(
        [ROOT / "scripts/kube-apiserver-build", "--if-built"], capture_output=True, text=True
    )
    return (None, done.stderr.strip()) if done.returncode else (Path(done.stdout.strip()), "")


class World:
    """The cluster, its pretended node, and operators that run under the shipped ClusterRole."""

    def __init__(self, cluster: Cluster, scratch: Path) -> None:
        self.cluster, self.scratch = cluster, scratch
        self.operators: list[subprocess.Popen] = []
        self._number = 0

    def install(self):
        """What `ipujob manifest` prints, and a kubeconfig of the operator's own account."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            assert main(["manifest"]) == 0
        for each in yaml.safe_load_all(text.getvalue()):
            self.cluster.call("POST", _COLLECTIONS[each["kind"]], each)
        self.wait(lambda: self.cluster.call("GET", JOBS))
        self.account = self.login("ipujob-system", "ipujob-operator")

    def login(self, namespace, name):
        """A kubeconfig of a service account."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 7200},
        }
        token = self.cluster.call("POST", path, request)["status"]["token"]
        config = yaml.safe_load(self.cluster.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        file = self.scratch / f"kubeconfig-{name}"
        file.write_text(yaml.safe_dump(config))
        return file

    def start_operator(self):
        """As the Deployment does, but for the container."""
        log = (self.scratch / "operator.log").open("ab")
        words = (sys.executable, "-m", "ipujob", "operator", "--all-namespaces")
        environment = {**os.environ, "KUBECONFIG": str(self.account)}
        self.operators.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
        return self.operators[-1]

    def stop_operators(self):
        for operator in self.operators:
            operator.kill()
            operator.wait()
        self.operators.clear()

    def operator_log(self):
        return (self.scratch / "operator.log").read_text()

    def create(self, value):
        return self.cluster.call("POST", JOBS, value)["metadata"]["name"]

    def job(self, name):
        return self.cluster.call("GET", f"{JOBS}/{name}")

    def status(self, name):
        return self.job(name).get("status", {})

    def pods(self, name):
        """The pods of a job by name."""
        found = self.cluster.call("GET", f"{PODS}?labelSelector=graphcore.ai/ipujob%3D{name}")["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def wait(self, condition, limit=LIMIT):
        """What a condition answers, as soon as that is true."""
        deadline = time.monotonic() + limit
        answer = None
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.HTTPError):
                if answer := condition():
                    return answer
            time.sleep(0.1)
        log = self.operator_log() if (self.scratch / "operator.log").exists() else ""
        raise AssertionError(f"waited {limit} s for nothing; the operator said:\n{log[-3000:]}")

    def end(self, name):
        """The status of a job that has ended."""
        return self.wait(lambda: "completionTime" in (status := self.status(name)) and status)

    def running(self, name, message):
        return self.wait(lambda: self.status(name).get("lastMessage") == message)

    def kubectl(self, *words):
        """None, if there is no kubectl."""
        if shutil.which("kubectl") is None:
            return None
        done = subprocess.run(
            ["kubectl", f"--kubeconfig={self.cluster.kubeconfig}", *words], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def columns(self):
        """What the server itself prints for `kubectl get ipujobs -o wide`."""
        headers = {
            "Authorization": f"Bearer {self.cluster.token}",
            "Accept": "application/json;as=Table;v=v1;g=meta.k8s.io",
        }

        request = urllib.request.Request(self.cluster.server + JOBS, headers=headers)
        with urllib.request.urlopen(request, context=self.cluster._context) as answer:
            table = json.load(answer)
        return [column["name"] for column in table["columnDefinitions"]], [
            row["cells"] for row in table["rows"]
        ]


@contextlib.contextmanager
def world(folder: Path, scratch: Path):
    """Started, installed, and stopped again. Containers find stand-ins for git, apt and pip, and this Python."""
    clone = scratch / "examples"
    place = clone / "nlp/bert/pytorch"
    place.mkdir(parents=True)
    (place / "required_apt_packages.txt").write_text("libnuma1\n")
    (place / "run_pretraining.py").write_text("import sys\nprint('trained', *sys.argv[1:])\n")
    skipped_programs.install_stand_ins(
        scratch / "bin", {"https://github.com/graphcore/examples.git": str(clone)}
    )
    (scratch / "bin/poprun").write_text(
        '#!/bin/sh\necho "poprun $*"\nenv | grep -E "^(POPRUN|MASTER)_" | sort\n'
    )
    (scratch / "bin/poprun").chmod(0o755)
    path = f"{scratch / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with Cluster(folder, scratch) as cluster, FakeKubelet(cluster, {**os.environ, "PATH": path}):
        made = World(cluster, scratch)
        try:
            yield made
        finally:
            made.stop_operators()
