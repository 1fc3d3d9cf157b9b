"""A real API server: the CRD, the operator under its own rights, the commands, kubectl. Nodes are simulated."""

import urllib.error

import pytest
import yaml
from jobs import FILES, job, seed
from real_cluster import JOBS, PODS, binaries, world

from ipujob.cli import main

pytest.importorskip("lightkube", reason="lightkube is not installed")
SH = ["/bin/sh", "-c"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A cluster that knows no IPUJobs."""
    folder, reason = binaries()
    if folder is None:
        pytest.skip(reason)
    with world(folder, tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def real(bare):
    """The same cluster with the operator."""
    bare.install()
    bare.start_operator()
    return bare


@pytest.fixture
def ipujob(bare, monkeypatch, capsys):
    """Our commands as the cluster's administrator: exit code and text."""
    monkeypatch.setenv("KUBECONFIG", str(bare.cluster.kubeconfig))

    def ipujob(*words):
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return ipujob


@pytest.fixture
def file(tmp_path):
    def file(value):
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(value))
        return tmp_path / "job.yaml"

    return file


def shell(name, text, **spec):
    return job(name, container={"command": [*SH, text]}, **spec)


def test_without_the_crd_both_ways_out_are_named(bare, ipujob, file):
    code, said = ipujob("submit", file(job()))
    assert code == 1
    assert "the cluster knows no IPUJobs" in said and "ipujob manifest" in said and "ipujob render" in said


def test_the_tutorials_files_run_as_they_stand(real, ipujob):
    for name, last in (
        ("bert", "trained --dataset generated --config pretrain_base_128_pod4 --training-steps 1"),
        ("poprun", "poprun -vv --num-instances 1 --num-replicas 16 --ipus-per-replica 4 python3 run_pretraining.py "
         "--config pretrain_large_128_POD64 --dataset generated --training-steps 1"),
    ):  # fmt: skip
        drawn = real.create(seed(name))  # by generateName
        assert real.end(drawn)["lastMessage"] == "All instances done"
        code, said = ipujob("logs", drawn)
        assert code == 0 and said.splitlines()[-1] == last
        assert real.kubectl("logs", f"pod/{drawn}-worker-0") in (None, said)


def test_the_columns_of_kubectl(real, ipujob):
    real.create(shell("mnist-training", "true"))
    real.end("mnist-training")
    names, rows = real.columns()
    assert names == ["Name", "Status", "Current", "Desired", "LastMessage", "Age", "Ipus", "Restarts"]
    (row,) = [row for row in rows if row[0] == "mnist-training"]
    assert row[:5] == ["mnist-training", "Completed", 0, 1, "All instances done"] and row[6:] == ["4", 0]
    _, said = ipujob("status")
    assert said.splitlines()[0].split() == ["NAME", "STATUS", "CURRENT", "DESIRED", "LASTMESSAGE", "AGE"]
    if (said := real.kubectl("get", "ij", "mnist-training")) is not None:
        assert said.splitlines()[0].split() == ["NAME", "STATUS", "CURRENT", "DESIRED", "LASTMESSAGE", "AGE"]
        assert "ipujob.graphcore.ai/mnist-training" in real.kubectl("get", "all")


@pytest.mark.parametrize(
    "value",
    [
        job(jobInstances="one"),
        job(cleanPodPolicy="Some"),
        job(ipusPerJobInstance="four"),
        job(container={"image": None}),
        job(container={"env": {"A": "b"}}),
    ],
    ids=["type", "enum", "pattern", "required", "template"],
)
def test_the_server_refuses_what_the_schema_forbids(real, value):
    with pytest.raises(urllib.error.HTTPError) as refused:
        real.create(value)
    assert refused.value.code == 422


def test_a_template_may_have_empty_and_unknown_fields_and_numbers(real):
    container = {"command": ["true"], "env": None, "resources": {"limits": {"cpu": 2}}, "volumeMounts": None}
    template = {"volumes": None, "initContainers": None, "priority": None, "hostNetwork": False}
    real.create(job("empty", container=container, template=template))
    assert real.job("empty")["spec"]["workers"]["template"]["spec"]["hostNetwork"] is False
    assert real.end("empty")["launcherStatus"] == "Completed"


def test_two_workers_are_told_their_ranks_and_one_address(real, ipujob):
    real.create(job("two", workers={"replicas": 2}))
    real.end("two")
    assert ipujob("logs", "two", "--all", "--follow")[1].count("POPRUN_NUM_NODES=2") == 2
    code, said = ipujob("logs", "two", "--all")
    assert code == 0
    for rank in (0, 1):
        assert f"[two-worker-{rank}] POPRUN_NODE_RANK={rank}" in said
        assert f"[two-worker-{rank}] MASTER_ADDR=two-worker-0.two" in said
        assert (
            f"[two-worker-{rank}] poprun --num-instances 2 --num-replicas 2 --ipus-per-replica 2 python3 train.py"
            in said
        )


def test_scaling_while_it_runs(real):
    real.create(shell("servers", "sleep 1000", jobInstances=2))
    real.running("servers", "2 of 2 instances running")
    for wanted in (3, 1):
        scale = real.cluster.call("GET", f"{JOBS}/servers/scale")
        scale["spec"]["replicas"] = wanted
        real.cluster.call("PUT", f"{JOBS}/servers/scale", scale)
        real.running("servers", f"{wanted} of {wanted} instances running")
        real.wait(lambda: sorted(real.pods("servers")) == [f"servers-worker-{k}" for k in range(wanted)])  # noqa: B023
    real.cluster.call("DELETE", f"{JOBS}/servers")


def test_a_pod_that_is_deleted_by_hand_comes_again_uncounted(real):
    real.create(shell("lost", "sleep 1000"))
    real.running("lost", "1 of 1 instances running")
    before = real.pods("lost")["lost-worker-0"]["metadata"]["uid"]
    real.cluster.call("DELETE", f"{PODS}/lost-worker-0")
    real.wait(lambda: (pod := real.pods("lost").get("lost-worker-0")) and pod["metadata"]["uid"] != before)
    real.running("lost", "1 of 1 instances running")
    assert real.status("lost")["restartCount"] == 0
    real.cluster.call("DELETE", f"{JOBS}/lost")
    real.wait(lambda: not real.pods("lost"))  # by the real garbage collector


def test_submit_waits_for_the_end_and_says_how_it_was(real, ipujob, file):
    code, said = ipujob("submit", file(shell("good", "echo hello")), "--follow", "--name", "better")
    assert code == 0
    assert said.splitlines() == [
        "ipujob.graphcore.ai/better created", "hello", "better: Completed: All instances done",
    ]  # fmt: skip
    code, said = ipujob("submit", file(shell("bad", "exit 3")), "--wait")
    assert code == 1 and "bad: Failed: 1 of 1 instances failed: bad-worker-0 exited with 3" in said
    code, said = ipujob("submit", file(shell("bad", "exit 3")))
    assert code == 1 and 'ipujobs.graphcore.ai "bad" already exists' in said


def test_delete_takes_pods_along_or_leaves_them(real, ipujob):
    for name, words, left in (("gone", (), 0), ("kept", ("--keep-pods",), 1)):
        real.create(shell(name, "sleep 1000"))
        real.running(name, "1 of 1 instances running")
        code, said = ipujob("delete", name, *words)
        assert (code, said) == (0, f'ipujob.graphcore.ai "{name}" deleted\n')
        real.wait(lambda: len(real.pods(name)) == left)  # noqa: B023
    (pod,) = real.pods("kept").values()
    real.wait(lambda: not real.pods("kept")["kept-worker-0"]["metadata"].get("ownerReferences"))
    real.cluster.call("DELETE", f"{PODS}/{pod['metadata']['name']}")
    code, said = ipujob("delete", "nobody")
    assert code == 1 and said == "ipujob: there is no IPUJob nobody in namespace default\n"


def test_an_account_without_rights_is_told(real, monkeypatch, capsys):
    real.wait(lambda: real.cluster.call("GET", "/api/v1/namespaces/default/serviceaccounts/default"))
    monkeypatch.setenv("KUBECONFIG", str(real.login("default", "default")))
    assert main(["status"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("ipujob: not allowed: ") and "fix: ask for rights" in said


def test_a_rendered_job_is_run_by_the_clusters_own_controller(real, capsys):
    assert main(["render", str(FILES / "bert.yaml"), "--name", "plain"]) == 0
    (made,) = yaml.safe_load_all(capsys.readouterr().out)
    real.cluster.call("POST", "/apis/batch/v1/namespaces/default/jobs", made)
    path = "/apis/batch/v1/namespaces/default/jobs/plain-worker"
    assert real.wait(lambda: real.cluster.call("GET", path)["status"].get("succeeded")) == 1
