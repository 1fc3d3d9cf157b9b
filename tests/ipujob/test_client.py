"""The six calls as requests, and what users are told when a cluster says no or nothing."""

import json
import sys

import pytest
import yaml
from jobs import job

from ipujob.cli import main
from ipujob.client import Cluster, Refused, Unreachable

httpx2 = pytest.importorskip("httpx2", reason="lightkube is not installed")


@pytest.fixture
def kubeconfig(tmp_path, monkeypatch):
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump({
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9/prefix"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }))  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", str(path))


@pytest.fixture
def cluster(kubeconfig):
    """A cluster whose answers are given in advance: [(status, text)]; requests are noted."""

    def make(*answers):
        waiting = list(answers)

        def answer(request):
            made.requests.append(request)
            status, text = waiting.pop(0)
            return httpx2.Response(status, text=text if isinstance(text, str) else json.dumps(text))

        made = Cluster(httpx2.MockTransport(answer))
        made.requests = []
        return made

    return make


POD = {"kind": "Pod", "metadata": {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7"},
       "spec": {"containers": [{"name": "c"}]}}  # fmt: skip


def test_the_six_calls(cluster):
    made = cluster(
        (200, {"items": [{"metadata": {"name": "p"}}]}),
        (201, {}),
        (200, {}),
        (200, {}),
        (200, "a\nb\n"),
        (200, ""),
    )
    assert made.namespace == "team"
    assert made.list("Pod", "n", labels="a=b") == [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
    ]
    made.create(POD)
    made.delete(POD)
    made.patch_status({**POD, "kind": "IPUJob"}, {"lastMessage": "x"})
    assert list(made.logs(POD, follow=True)) == ["a", "b"]
    assert list(made.watch("IPUJob")) == []
    sent = [(request.method, request.url.path) for request in made.requests]
    jobs = "/prefix/apis/graphcore.ai/v1alpha1"
    assert sent == [
        ("GET", "/prefix/api/v1/namespaces/n/pods"),
        ("POST", "/prefix/api/v1/namespaces/n/pods"),
        ("DELETE", "/prefix/api/v1/namespaces/n/pods/p"),
        ("PATCH", f"{jobs}/namespaces/n/ipujobs/p/status"),
        ("GET", "/prefix/api/v1/namespaces/n/pods/p/log"),
        ("GET", f"{jobs}/ipujobs"),
    ]
    assert all(request.headers["Authorization"] == "Bearer secret" for request in made.requests)
    assert json.loads(made.requests[2].content)["preconditions"] == {"uid": "u"}
    patch = made.requests[3]
    assert patch.headers["Content-Type"] == "application/merge-patch+json"
    assert json.loads(patch.content) == {"metadata": {"resourceVersion": "7"}, "status": {"lastMessage": "x"}}


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ((404, "404 page not found"), 404, "the cluster knows no IPUJobs\n  fix: ipujob manifest"),
        (
            (403, {"message": "ipujobs is forbidden"}),
            403,
            "not allowed: ipujobs is forbidden\n  fix: ask for rights",
        ),
        ((401, {"message": "Unauthorized"}), 401, "not allowed: Unauthorized"),
        ((409, {"message": "already exists"}), 409, "already exists"),
        ((500, "<html>"), 500, "<html>"),
    ],
)
def test_a_refusal_is_one_sentence(cluster, answer, status, message):
    with pytest.raises(Refused) as refused:
        cluster(answer).list("IPUJob", "n")
    assert refused.value.status == status and str(refused.value).startswith(message)


def test_a_cluster_that_does_not_answer_is_named(kubeconfig, capsys):
    assert main(["status"]) == 1
    assert capsys.readouterr().err.startswith(
        "ipujob: the cluster at http://127.0.0.1:9/prefix doesn't answer: "
    )


def test_without_a_kubeconfig_the_way_without_a_cluster_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["logs", "x"]) == 1
    said = capsys.readouterr().err
    assert "no cluster is configured" in said and "ipujob run FILE --local" in said
    (tmp_path / "bad").write_text("contexts: 3")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "bad"))
    with pytest.raises(Unreachable, match="no cluster is configured"):
        Cluster()


def test_without_lightkube_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightkube", None)
    with pytest.raises(Unreachable, match=r'pip install "\.\[kubernetes\]" in the folder'):
        Cluster()


def test_a_bad_file_is_refused_before_a_cluster_is_asked(tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(jobInstances="one")))
    assert main(["submit", str(tmp_path / "job.yaml")]) == 2
    assert "spec.jobInstances must be of type integer" in capsys.readouterr().err
