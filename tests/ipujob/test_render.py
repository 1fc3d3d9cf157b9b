"""Plain objects for clusters without the operator, each held against Kubernetes' own schemas."""

import pytest
import yaml
from jobs import FILES, job

from ipujob.cli import main

NEWEST = "1.37"


@pytest.fixture
def render(tmp_path, capsys):
    """The objects that a file is rendered as, and what was said about it; the exit code where it is refused."""

    def render(content, *words):
        path = tmp_path / "job.yaml"
        path.write_text(
            content if isinstance(content, str) else yaml.safe_dump_all([content], sort_keys=False)
        )
        code = main(["render", str(path), *words])
        said = capsys.readouterr()
        return (list(yaml.safe_load_all(said.out)) if code == 0 else code), said.err

    return render


def assert_valid(objects):
    """Strictly: no field that Kubernetes doesn't know."""
    checker = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for each in objects:
        if each["kind"] == "JobSet":
            inner = each["spec"]["replicatedJobs"][0]["template"]["spec"]
            each = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": inner}
        checker.validate(each, NEWEST, strict=True)


TWO_BY_TWO = dict(
    jobInstances=2, ipusPerJobInstance="8", modelReplicasPerWorker="2", workersPerJobInstance="2"
)
EXIT_CODE = {"type": "ExitCode", "exitCodes": "1,3-5,143", "backOffLimit": 2}


@pytest.mark.parametrize("way", ["job", "pod", "jobset"])
@pytest.mark.parametrize(
    "value",
    [
        (FILES / "bert.yaml").read_text(),
        (FILES / "poprun.yaml").read_text(),
        job(**TWO_BY_TWO),
        job(restartPolicy=EXIT_CODE),
        job(annotations={"pando/ttl-seconds-after-finished": "60", "pando/device": "cuda"}),
        job(interactive={"ttl": 60}),
        job(launcher={"command": ["poprun", "x"]}, workers={"replicas": 2}),
    ],
    ids=["bert", "poprun", "two-by-two", "exit-code", "cuda-ttl", "interactive", "launched"],
)
def test_what_is_rendered_is_valid(render, value, way):
    objects, _ = render(value, "--as", way)
    assert objects
    assert_valid(objects)


def test_bare_pods_have_the_names_of_the_tutorials(render):
    objects, _ = render((FILES / "bert.yaml").read_text(), "--as", "pod", "--name", "bert")
    assert [(each["kind"], each["metadata"]["name"]) for each in objects] == [("Pod", "bert-worker-0")]
    objects, _ = render(job(**TWO_BY_TWO), "--as", "pod")
    names = [each["metadata"]["name"] for each in objects]
    assert names == ["train", "train-worker-0", "train-worker-1", "train-worker-2", "train-worker-3"]


def test_a_name_that_a_cluster_would_complete_is_completed(render):
    objects, _ = render((FILES / "bert.yaml").read_text())
    name = objects[0]["metadata"]["labels"]["graphcore.ai/ipujob"]
    assert name.startswith("bert-training-multi-ipu-") and len(name) == len("bert-training-multi-ipu-") + 5
    assert objects[0]["metadata"]["name"] == f"{name}-worker"


def test_an_indexed_job_tells_each_worker_its_rank(render):
    objects, _ = render(job(**TWO_BY_TWO))
    second = objects[2]
    assert [each["metadata"]["name"] for each in objects] == ["train", "train-0-worker", "train-1-worker"]
    assert (second["spec"]["completions"], second["spec"]["completionMode"]) == (2, "Indexed")
    assert second["spec"]["backoffLimit"] == 0
    pod = second["spec"]["template"]["spec"]
    env = {each["name"]: each for each in pod["containers"][0]["env"]}
    path = env["POPRUN_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['batch.kubernetes.io/job-completion-index']"
    assert env["MASTER_ADDR"]["value"] == "train-1-worker-0.train" and pod["subdomain"] == "train"


def test_exit_codes_become_a_pod_failure_policy(render):
    objects, said = render(job(restartPolicy=EXIT_CODE))
    spec = objects[0]["spec"]
    assert spec["backoffLimit"] == 2
    ignored, ended = spec["podFailurePolicy"]["rules"]
    assert ignored == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    codes = {"containerName": "train", "operator": "NotIn", "values": [1, 3, 4, 5, 143]}
    assert ended == {"action": "FailJob", "onExitCodes": codes}
    assert "PANDO_RESTARTS is not set" in said


def test_several_workers_that_restart_need_a_job_set(render):
    value = job(workers={"replicas": 2}, restartPolicy={"type": "OnFailure", "backOffLimit": 2})
    code, said = render(value)
    assert code == 2 and "a Job can't restart 2 workers as one" in said and "--as jobset" in said
    (made,), _ = render(value, "--as", "jobset")
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 2}
    env = {
        each["name"]: each
        for each in made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][
            0
        ]["env"]
    }
    assert env["MASTER_ADDR"]["value"] == "train-worker-0-0.train"


def test_what_a_way_can_not_say_is_warned_of(render):
    objects, said = render(job(restartPolicy={"type": "Always"}))
    assert objects[0]["spec"]["backoffLimit"] == 3 and "what succeeded is not run again" in said
    _, said = render(job(restartPolicy={"type": "OnFailure"}, cleanPodPolicy="All"), "--as", "pod")
    assert "bare pods are not started again" in said and "cleanPodPolicy All needs the operator" in said


def test_other_kinds_pass_through_and_options_go_into_the_objects(render):
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"text": "a\nb\n"}}
    text = yaml.safe_dump_all([config, yaml.safe_load((FILES / "bert.yaml").read_text())])
    objects, said = render(
        text, "--image", "graphcore/*=pando:1", "--drop", "resources,security", "--device", "cuda"
    )
    assert objects[0] == config
    pod = objects[1]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "pando:1" and "hostIPC" not in pod
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert "namespace" not in objects[1]["metadata"] and said == ""


def test_the_manifest_is_valid_and_names_its_image(capsys):
    assert main(["manifest", "--namespace", "here", "--image", "me/pando:2", "--device", "cuda"]) == 0
    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [each["kind"] for each in objects] == [
        "CustomResourceDefinition", "Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "ConfigMap",
        "Deployment",
    ]  # fmt: skip
    assert objects[0]["metadata"]["labels"]["app.kubernetes.io/part-of"] == "pando"
    assert objects[5]["data"]["images"] == "graphcore/pytorch:*=me/pando:2\npando:latest=me/pando:2\n"
    deployment = objects[6]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    container = deployment["template"]["spec"]["containers"][0]
    assert container["image"] == "me/pando:2" and "cuda" in container["command"]
    assert objects[6]["metadata"]["namespace"] == "here"
    assert_valid(objects[1:])
