"""Every rule that an IPUJob must follow, as `ipujob check` says it: with file and line, all at once."""

import contextlib
import copy
import io
import random
import sys
from datetime import UTC, datetime

import pytest
import yaml
from jobs import FILES, job

from ipujob import local, pods
from ipujob.cli import main
from ipujob.observe import observe
from ipujob.render import render
from ipujob.rules import parse


def nested_aliases(template):
    """Forty lines, each of which refers twice to the line before."""
    lines = [f"a{n}: &a{n} " + template.format(f"a{n - 1}") for n in range(1, 41)]
    return "\n".join(["a0: &a0 {x: 1}", *lines])


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Check a text or an object: the exit code, and what was said."""
    monkeypatch.chdir(tmp_path)

    def check(content):
        (tmp_path / "job.yaml").write_text(
            content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        )
        code = main(["check", "job.yaml"])
        said = capsys.readouterr()
        return code, said.out + said.err

    return check


def test_the_tutorials_files_have_no_fault(capsys):
    assert main(["check", str(FILES / "bert.yaml"), str(FILES / "poprun.yaml")]) == 0
    said = capsys.readouterr()
    assert "1 instance of 1 worker, in each worker 16 replicas of 4 ipus, mode single" in said.out
    assert "bert.yaml:13: warning: image graphcore/pytorch:3.3.0 holds Graphcore's PopTorch" in said.err


def test_a_shape_shares_out_ipus_over_workers_and_replicas():
    value = job(ipusPerJobInstance=8, modelReplicasPerWorker="2", workersPerJobInstance="2")
    parsed, faults = parse(value)
    assert not faults and (parsed.instances, parsed.workers, parsed.replicas, parsed.ipus) == (1, 2, 2, 8)
    assert (parsed.ipus_per_replica, parsed.mode) == (2, "joined")


EXIT = {"type": "ExitCode", "exitCodes": "1,3-5,143"}
REFUSED = {
    "ipusPerJobInstance 6 can't be shared out over 2 workers with 2 replicas each": job(
        ipusPerJobInstance="6", modelReplicasPerWorker="2", workers={"replicas": 2}
    ),
    "workers.replicas 2 and workersPerJobInstance 4 differ": job(
        workersPerJobInstance="4", workers={"replicas": 2}
    ),
    "restartPolicy ExitCode needs exitCodes": job(restartPolicy={"type": "ExitCode"}),
    f'name "{"x" * 61}" has 61 characters: pods are called NAME-worker-0, and a host name holds 63': job(
        "x" * 61
    ),
    'name "4you" must begin with a letter: a Service bears it': job("4you", workers={"replicas": 2}),
    "name \"Train\" can't be a host's": job("Train"),
    "an interactive job isn't restarted": job(interactive={"ttl": 60}, restartPolicy={"type": "OnFailure"}),
    "there is no MPI here: write poprun --num-instances N --num-replicas R ...": job(
        launcher={"command": ["/usr/bin/mpirun", "x"]}
    ),
    "several workers need a command in their template": job(
        workers={"replicas": 2}, container={"command": []}
    ),
    "must be of type integer, and is 'one'\n  fix: a number without quotes, such as 1": job(
        jobInstances="one"
    ),
    "spec.jobInstances is 1001, and must be within 0 to 1000": job(jobInstances=1001),
    "spec.ipusPerJobInstance must be a whole number from 1 to 9999": job(ipusPerJobInstance="four"),
    "spec.cleanPodPolicy 'Some' is none of None, Workers, All": job(cleanPodPolicy="Some"),
    "spec.restartPolicy.type 'Sometimes' is none of Always, OnFailure, Never, ExitCode": job(
        restartPolicy={"type": "Sometimes"}
    ),
    "spec.restartPolicy.exitCodes '1;2' doesn't match": job(restartPolicy={**EXIT, "exitCodes": "1;2"}),
    "spec.interactive.ttl is missing": job(interactive={}),
    "spec.launcher.command must not be empty": job(launcher={"command": []}),
    "containers[0].image is missing": job(container={"image": None}),
    "containers[0].comand is not a field of an IPUJob; did you mean 'command'?": job(
        container={"comand": []}
    ),
    "containers[0].env must be of type array": job(container={"env": {"A": "b"}}),
    "annotations.pando/device 'ipu' is none of cpu, cuda": job(annotations={"pando/device": "ipu"}),
    "annotation pando/devise is unknown": job(annotations={"pando/devise": "cpu"}),
    "spec.modelReplicas is not a field of an IPUJob\n  fix: use modelReplicasPerWorker, ipusPerJobInstance": job(
        modelReplicas=2
    ),
    "spec.cleanPodPolici is not a field of an IPUJob; did you mean 'cleanPodPolicy'?": job(
        cleanPodPolici="All"
    ),
    "apiVersion 'graphcore.ai/v1' is none of graphcore.ai/v1alpha1": {
        **job(),
        "apiVersion": "graphcore.ai/v1",
    },
    "the job has no name": {**job(), "metadata": {}},
    "specs is not a field of an IPUJob; did you mean 'spec'?": {**job(), "specs": {}},
    "metadata.labels.a must be of type string, and is 3\n  fix: write it in quotes": {
        **job(),
        "metadata": {"name": "a", "labels": {"a": 3}},
    },
    "kind Deployment isn't an IPUJob": {"apiVersion": "apps/v1", "kind": "Deployment"},
    "this is a list, not an IPUJob": [1, 2],
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_rule_that_is_broken_is_said_with_its_line(check, message):
    code, said = check(REFUSED[message])
    assert code == 2
    assert message in said
    assert said.startswith("job.yaml:") and said.split(":")[1].isdecimal()


def test_all_faults_of_a_file_are_said_at_once_each_with_its_own_line(check):
    code, said = check("""\
apiVersion: graphcore.ai/v1alpha1
kind: IPUJob
metadata:
  name: UPPER
spec:
  jobInstances: many
  ipusPerJobInstance: "6"
  ipusPerModelReplica: "2"
  workers:
    replicas: 4
    replicas: 4
    template:
      spec:
        containers:
        - name: a
          imag: b
  launcher:
    command: [mpirun, x]
""")
    assert code == 2
    found = [int(line.split(":")[1]) for line in said.splitlines() if line.startswith("job.yaml")]
    assert found == [4, 6, 7, 8, 11, 16, 18]  # the image is not missing as well
    assert "replicas stands twice here, first on line 10" in said


def test_what_is_no_power_of_two_is_only_warned_of(check):
    code, said = check(job(ipusPerJobInstance="6"))
    assert code == 0 and "warning: 6 ipus are no power of two up to 64" in said


def test_all_fields_that_kubernetes_has_may_stand_in_a_template(check):
    of_container = """ports envFrom resizePolicy restartPolicy volumeDevices livenessProbe readinessProbe startupProbe
        lifecycle workingDir terminationMessagePath terminationMessagePolicy imagePullPolicy stdin stdinOnce tty"""
    of_pod = """ephemeralContainers activeDeadlineSeconds dnsPolicy dnsConfig nodeSelector serviceAccountName nodeName
        serviceAccount automountServiceAccountToken hostNetwork hostPID hostIPC hostUsers subdomain
        shareProcessNamespace
        securityContext imagePullSecrets hostname affinity schedulerName tolerations hostAliases priorityClassName
        priority preemptionPolicy overhead readinessGates runtimeClassName enableServiceLinks os schedulingGates
        topologySpreadConstraints setHostnameAsFQDN resourceClaims resources"""
    value = job(container=dict.fromkeys(of_container.split(), "any"))
    value["spec"]["workers"]["template"]["spec"].update(dict.fromkeys(of_pod.split(), "any"))
    code, said = check(value)
    assert code == 0 and "not a field" not in said


def test_names_that_a_cluster_completes_leave_room_for_its_letters(check):
    value = job()
    value["metadata"] = {"generateName": "x" * 46}
    assert check(value)[0] == 2
    value["metadata"] = {"generateName": "x" * 45}
    assert check(value)[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "job.yaml:1: not YAML"),
        ("\n\n---\n", "job.yaml:1: the file is empty"),
        ("a: &x [*x]", "job.yaml:1: not YAML: maximum recursion depth exceeded"),
        (nested_aliases("[*{0}, *{0}]"), "not YAML: its aliases stand for more than 100,000 values"),
        (
            nested_aliases("{{<<: *{0}, <<: *{0}}}"),
            "not YAML: its aliases stand for more than 100,000 values",
        ),
        ("a: b\n\tc: d", "job.yaml:2: not YAML"),
    ],
)
def test_a_file_that_is_no_yaml_is_refused(check, text, message):
    code, said = check(text)
    assert code == 2 and message in said


def test_a_file_that_is_not_there_and_standard_input(monkeypatch, capsys):
    assert main(["check", "nowhere.yaml"]) == 2
    said = "can't be read: No such file or directory\n  fix: name a YAML file, or - for standard input\n"
    assert capsys.readouterr().err == f"nowhere.yaml: {said}"
    monkeypatch.setattr(sys, "stdin", io.StringIO("--- {kind: Pod}\n"))
    assert main(["check", "-"]) == 2
    assert capsys.readouterr().err.startswith("-:1: kind Pod isn't an IPUJob")


NUMBERS = [  # path in spec, the least and the greatest valid value
    ("jobInstances", 0, 1000),
    ("ipusPerJobInstance", 1, 9999),
    ("modelReplicasPerWorker", 1, 9999),
    ("workersPerJobInstance", 1, 999),
    ("interactive.ttl", 1, 2**31 - 1),
    ("restartPolicy.backOffLimit", 0, 2**31 - 1),
    ("workers.replicas", 1, 999),
    ("workers.template.spec.terminationGracePeriodSeconds", 0, 2**31 - 1),
]


@pytest.mark.parametrize(("path", "least", "most"), NUMBERS)
def test_each_number_of_a_job_has_bounds(path, least, most):
    def is_refused(number):
        value = job(restartPolicy={"type": "OnFailure"}, interactive={"ttl": 1})
        *outer, name = path.split(".")
        place = value["spec"]
        for key in outer:
            place = place[key]
        place[name] = number
        messages = [fault.message for fault in parse(value, "cpu", ())[1] if fault.path == f"spec.{path}"]
        return any("must be within" in text or "must be a whole number" in text for text in messages)

    assert [is_refused(number) for number in (least - 1, least, most, most + 1)] == [True, False, False, True]


def places(value, place=()):
    yield place
    for key, item in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(item, (*place, key))


FULL = job(
    annotations={"pando/device": "cuda", "pando/security": "drop", "pando/ttl-seconds-after-finished": "9"},
    restartPolicy={"type": "ExitCode", "exitCodes": "1,3-5", "backOffLimit": 1},
    launcher={"command": ["poprun"], "env": [{"name": "A", "value": "1"}]},
    cleanPodPolicy="Workers",
    modelReplicasPerWorker="1",
    workersPerJobInstance="2",
    workers={"replicas": 2},
    container={
        "env": [{"name": "B"}],
        "resources": {"limits": {"cpu": 2}},
        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    },
    template={"volumes": [{"name": "v"}], "restartPolicy": "Never", "hostIPC": True},
)
JUNK = [None, 0, -1, 2.5, True, "", "x", "1;", [], [None], {}, {"x": {}}, [[]], 10**30]


@pytest.mark.parametrize("seed", range(10))
def test_whatever_stands_in_a_file_it_is_refused_with_a_sentence_or_becomes_pods(seed):
    draw = random.Random(seed)
    everywhere = [place for place in places(FULL) if place]
    for _ in range(100):
        value = copy.deepcopy(FULL)
        for place in draw.sample(everywhere, draw.choice([1, 1, 2])):
            parent = value
            with contextlib.suppress(KeyError, IndexError, TypeError):  # what was above it is junk already
                for key in place[:-1]:
                    parent = parent[key]
                parent[place[-1]] = copy.deepcopy(draw.choice(JUNK))
        made, faults = parse(value)
        assert (made is None) == bool(faults), value
        assert all(fault.message and "\n" not in fault.message for fault in faults)
        if made:
            for number in range(min(made.instances, 2) * made.workers):
                pods.worker_pod(made, number)
            list(local.unsupported_fields(made, {})), local.ignored_fields(made)
            render(made, "pod")
        value["metadata"] = {"name": "a", "uid": "u", "namespace": "n"}
        observe(value, [], datetime.now(UTC))
