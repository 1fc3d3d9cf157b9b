"""Command lines, spelled as programs that were written for poprun spell them, and the value that they make."""

import json
import shlex

import pytest

from poprun.command_line import CommandLine, parse

HERE = {"PATH": "/bin", "PYTHONPATH": "/py"}


def request(line: str) -> CommandLine:
    return parse(shlex.split(line), HERE)


def test_options_have_the_documented_defaults():
    assert request("python3 train.py --epochs 2") == CommandLine(
        program=("python3", "train.py", "--epochs", "2")
    )


VIPU = "--vipu-server-host=$HOST --vipu-partition=part --vipu-server-timeout=600 --vipu-allocation=all"
PARTITION = "--reset-partition=no --update-partition=yes --remove-partition=no"


# The options that programs use, in each of the ways in which they are found, with the replicas and instances meant.
@pytest.mark.parametrize(
    "line, replicas, instances",
    [
        ("--num-instances=2 --num-replicas=4 python3 train.py --config resnet50-pod4", 4, 2),
        ("--num-instances 1 --num-replicas 16 --ipus-per-replica 4 python3 run.py --training-steps 1", 16, 1),
        ("-vv --num-instances=1 --num-replicas=4 --ipus-per-replica 4 python3 run.py", 4, 1),
        ("--vv --num-instances=1 --num-replicas=1 python3 run.py", 1, 1),
        ("-v --num-replicas 16 --num-instances 8 python3 run.py", 16, 8),
        ("--verbose --num-replicas 16 --num-instances 8 python3 run.py", 16, 8),
        ("-vv --num-instance 2 --num-replicas 8 python3 train.py", 8, 2),
        ("--num-in 2 --num-r 8 python3 train.py", 8, 2),
        (f"-vv {VIPU} {PARTITION} --num-replicas 64 --num-instances 8 python3 t.py", 64, 8),
        (f"{VIPU.replace('=', ' ')} {PARTITION.replace('=', ' ')} --num-replicas 4 python3 t.py", 4, 1),
        ("--update-partitions=no --reset-partition=0 --remove-partition 1 python3 t.py", 1, 1),
        ("--vipu-server-port 8090 --vipu-cluster c --vipu-partition-attempts 3 python3 t.py", 1, 1),
        ("--num-ilds=1 --sync-type=ST_POD_NATIVE_DEFAULT --num-replicas=16 python3 t.py", 16, 1),
        ("--host=h1 --num-instances=2 --num-replicas=2 python t.py", 2, 2),
        ("--host h1,h2 --host-subnet 10.0.0.0/16 --num-instances=2 --num-replicas=2 python t.py", 2, 2),
        ("-H h1,h2 --num-instances=2 --num-replicas=2 python t.py", 2, 2),
        ("--mpi-global-args --tag-output --num-replicas 4 --num-instances 2 python3 t.py", 4, 2),
        ('--mpi-global-args="--tag-output --allow-run-as-root" --num-replicas=4 python3 t.py', 4, 1),
        ('--mpi-global-args="--mca oob_if eth0 --mca btl_tcp_if_include eth0" python3 t.py', 1, 1),
        ('--mpi-local-args=" -x OPAL_PREFIX -x LD_LIBRARY_PATH -x PATH" --num-replicas=4 python3 t.py', 4, 1),
        ('--mpi-local-args "-x PATH -x A=1" --num-replicas=4 --num-instances=4 python3 t.py', 4, 4),
        ("--allow-run-as-root 1 --num-replicas 4 --num-instances 4 python3 t.py", 4, 4),
        ("--allow-run-as-root --num-replicas 4 --num-instances 4 python3 t.py", 4, 4),
        ("--executable-cache-path=./cache --num-instances=2 --num-replicas=4 python3 t.py", 4, 2),
        ("--executable-cache-path $POPLAR_EXECUTABLE_CACHE_DIR --num-replicas=4 python3 t.py", 4, 1),
        ("--only-output-from-instance 0 --num-instances=2 --num-replicas=4 python3 t.py", 4, 2),
        ("--only-stdout-from-instance=1 --num-instances=2 --num-replicas=4 python3 t.py", 4, 2),
        ("--offline-mode yes --print-topology yes --numa-aware=yes --num-replicas=4 python3 t.py", 4, 1),
        ("--synchronise-python-venv no --synchronise-poplar-sdk=no python3 t.py", 1, 1),
        ("--distribute-ssh-key true python3 t.py", 1, 1),
        ("--num-replicas=4 -- python3 t.py", 4, 1),
        ("--num-replicas=4 ./run.sh -vv --num-replicas 8", 4, 1),
    ],
)
def test_command_lines_of_real_programs_are_understood(line, replicas, instances):
    found = request(line)
    assert (found.replicas, found.instances) == (replicas, instances)
    assert found.program[0] in ("python", "python3", "./run.sh")


def test_variables_come_from_here_or_from_the_command_line():
    line = "--mpi-local-args='-x PATH -x A=1=2 -x ABSENT' -x B=3 -x ABSENT --executable-cache-path /c python3"
    cache = ("POPTORCH_CACHE_DIR", "/c")
    assert request(line).variables == (("PATH", "/bin"), ("A", "1=2"), ("B", "3"), cache)
    assert "-x ABSENT has no effect" in request(line).warnings[0]


def test_what_has_no_effect_here_is_kept_to_be_said():
    found = request(
        "--vipu-partition p --remove-partition=no --mpi-global-args '--mca a b --tag-output' python3 --host x"
        " --max-restarts=2 --num-replica 1 --tag-output --help"
    )
    assert found.tags_output
    ipus, mpi, *others = found.warnings
    assert ipus == "no effect without IPUs: --vipu-partition, --remove-partition"
    assert mpi == "no effect without MPI: --mca a b"
    assert [text.split()[0] for text in others] == ["--host", "--max-restarts", "--tag-output"]


def test_options_are_written_to_a_file_and_taken_from_one(tmp_path):
    file = tmp_path / "options.json"
    request(f"--num-replicas 8 --num-instances 4 -x A=1 --tag-output --export-config {file} python3 a.py")
    assert json.loads(file.read_text())["num_replicas"] == 8
    found = request(f"--import-config {file} --num-instances 2 python3 b.py")
    assert (found.replicas, found.instances, found.tags_output) == (8, 2, True)
    assert (found.program, found.variables) == (("python3", "b.py"), (("A", "1"),))


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("", "the program is missing\n  fix: poprun [options] program [args...]"),
        ("--num-replcas 2 python3", "unknown option --num-replcas; did you mean '--num-replicas'?"),
        ("num-replicas 4 a", "'num-replicas' is no program\n  fix: poprun --num-replicas 4 a"),
        ("-x A=1 B=2 a", "'B=2' is no program\n  fix: -x B=2 sets it in all instances"),
        ("--export-config /nosuch/x a", "No such file or directory: '/nosuch/x'\n  fix: --export-config"),
        ("--num-replicas", "argument --num-replicas: a value is missing"),
        ("--num-replicas=four python3", "--num-replicas takes a whole number, such as 4; found 'four'"),
        ("--wait-limit=0 python3", "--wait-limit must be at least 1, got 0"),
        ("--max-restarts -1 python3", "--max-restarts must be at least 0, got -1"),
        ("--num-instances=0 a", "--num-instances must be at least 1, got 0\n  fix: --num-instances 1\n"),
        (
            "--num-replicas=2 -m module",
            "unknown option -m\n  fix: poprun --num-replicas=2 python3 -m module\n",
        ),
        ("--verbose=2 a", "--verbose takes no value\n  fix: --verbose; or -vv"),
        (
            "--num-replicas=4 --num-instances=3 python3",
            "--num-replicas 4 is not a multiple of --num-instances 3: every instance runs the same number of replicas\n"
            "  fix: --num-instances 1 or 2 or 4; or --num-replicas 6, which makes the effective batch larger\n",
        ),
        ("--num-instances=4:2 a", "4:2: the smaller number is first\n  fix: --num-instances 2:4"),
        ("-np 2 python3", "unknown option -np\n  fix: --num-instances 2 --num-replicas 2"),
        ("--num-instances=2:8 a", "--num-instances 2:8 needs a folder\n  fix: add --checkpoint-dir DIR"),
        ("--num-replicas=8 --num-instances=5:7 --checkpoint-dir=c a", "a multiple of any number from 5 to 7"),
        (
            "--num-instances=4 --num-replicas=2 --ipus-per-replica=3 python3",
            "fix: --num-instances 1 or 2 or 6; or --num-replicas 4, which makes the effective batch larger;"
            " or --ipus-per-replica 2, for replicas of 2 instances each",
        ),
        ("--num-instances=two a", "argument --num-instances: invalid value: 'two'\n  fix: a number, or 2:8"),
        ("--no-such-option python3", "unknown option --no-such-option"),
        ("--num-i 3 python3", "--num-i is ambiguous: --num-instances, --num-ilds"),
        ("--offline-mode=perhaps python3", "'perhaps' is neither yes nor no"),
        ("--numa-aware maybe a", "--numa-aware takes yes or no, or stands alone; found 'maybe'\n  fix: "),
        (
            "--num-instances 2 python3",
            "--num-replicas 1 (the default) is not a multiple of --num-instances 2: every instance runs the same number"
            " of replicas\n  fix: --num-replicas 2, which makes",
        ),
        ("--only-output-from-instance 1 a", "are 0 to 0\n  fix: --only-output-from-instance 0\n"),
        ("--mpi-local-args=-x python3", "in --mpi-*-args: argument -x: expected one argument"),
        ("--import-config /no/such/file python3", "'/no/such/file'\n  fix: name a file that --export-config"),
        # On other hosts the name of a variable becomes part of a shell script, which ran `touch f`.
        ("-x 'A;touch f;B=1' t", "'A;touch f;B' is not the name of an environment variable"),
        ("--mpi-local-args \"-x 'A b'\" t", "'A b' is not the name of an environment variable"),
        ("-x =1 t", " is not the name of an environment variable"),
        ("-x 2=1 t", "'2' is not the name of an environment variable"),
        ('--mpi-local-args "-x \'A=1" t', "in --mpi-*-args: No closing quotation: -x 'A=1"),
    ],
)
def test_a_faulty_command_line_ends_with_code_2_and_the_reason(line, complaint, capsys):
    with pytest.raises(SystemExit) as ending:
        request(line)
    assert ending.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("poprun: error: ") and complaint in said


def test_the_limit_of_waits_is_a_variable_of_the_instances():
    assert request("--wait-limit 90 python3").variables == (("POPDIST_WAIT_LIMIT", "90"),)


def test_a_range_of_instances_is_an_elastic_run():
    line = "--num-replicas 8 --num-instances 2:8 --checkpoint-dir /c python3"
    found = request(line)
    assert (found.fewest_instances, found.instances, found.is_elastic) == (2, 8, True)
    assert found.max_restarts == 3
    assert found.variables == (("POPDIST_CHECKPOINT_DIR", "/c"),)


def test_a_nested_file_of_options_is_refused(tmp_path, capsys):
    (tmp_path / "options").write_text("[" * 100_000)
    with pytest.raises(SystemExit) as leaving:
        parse([f"--import-config={tmp_path / 'options'}", "t"], HERE)
    assert leaving.value.code == 2
    assert "--import-config" in capsys.readouterr().err


def test_a_replica_uses_several_instances_if_its_ipus_can_be_divided():
    request = parse(("--num-instances=4", "--num-replicas=2", "--ipus-per-replica=6", "python3"))
    assert (request.instances, request.replicas, request.ipus_per_replica) == (4, 2, 6)


def test_an_elastic_run_has_the_numbers_of_instances_that_can_run_all_replicas():
    """A node with room for 3 instances used to wait because "3 are the fewest"."""
    words = ("--num-replicas=2", "--num-instances=3:9", "--checkpoint-dir=c", "--ipus-per-replica=4", "t")
    assert (parse(words).fewest_instances, parse(words).instances) == (4, 8)
