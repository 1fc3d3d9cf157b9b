"""One training over two hosts that a real ssh reaches: two addresses of this machine, with a sshd for the test."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ports import free_port

PROGRAM = Path(__file__).parents[1] / "popdist" / "checkpoint_program.py"
HOSTS = "127.0.0.1,127.0.0.2"
LIMIT = 240  # seconds, on a machine that does much else
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SERVER = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
"""
CLIENT = """
Port {port}
IdentityFile {folder}/user
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


@pytest.fixture
def reached(tmp_path):
    """Variables with which `ssh` reaches both addresses without a question."""
    ssh, keygen = shutil.which("ssh"), shutil.which("ssh-keygen")
    if SSHD is None or ssh is None or keygen is None:
        pytest.skip("needs the programs sshd and ssh, of Debian's package openssh-server")
    folder, port = tmp_path / "ssh-files", free_port()
    folder.mkdir()
    for name in ("host", "user"):
        subprocess.run(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=LIMIT
        )
    (folder / "server").write_text(SERVER.format(port=port, folder=folder))
    (folder / "client").write_text(CLIENT.format(port=port, folder=folder))
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {ssh} -F {folder}/client "$@"\n')
    (folder / "ssh").chmod(0o755)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where a sshd of root's goes to have no rights
    server = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", folder / "server"], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + LIMIT
        while subprocess.run([folder / "ssh", "127.0.0.2", "true"], check=False, timeout=LIMIT).returncode:
            assert server.poll() is None and time.monotonic() < until, "sshd does not answer"
            time.sleep(0.1)
        yield {"PATH": f"{folder}:{os.environ['PATH']}", "MASTER_PORT": str(free_port())}
    finally:
        server.terminate()
        server.wait(LIMIT)


WORDS = ("-H", HOSTS, "--num-replicas=2", "--num-instances=2", "-x", "GLOO_SOCKET_IFNAME=lo", sys.executable)


def test_a_training_over_two_hosts_by_ssh_has_equal_weights(poprun, reached, tmp_path):
    run = poprun(*WORDS, PROGRAM, tmp_path, 3, **reached)
    assert run.wait(LIMIT) == 0, run.said()
    first, second = (torch.load(tmp_path / f"result-{instance}.pt") for instance in range(2))
    assert [n for n, w in first["weights"].items() if not torch.equal(w, second["weights"][n])] == []
    assert run.nothing_left()


def test_nothing_is_left_on_the_hosts_when_poprun_is_killed(poprun, reached, tmp_path):
    program = (
        "import os, sys, time\n"
        "open(sys.argv[1] + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "time.sleep(1000)"
    )
    run = poprun(*WORDS, "-c", program, f"{tmp_path}/pid-", **reached)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    until = time.monotonic() + LIMIT
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until, run.said()
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    os.kill(run.pid, 9)
    until = time.monotonic() + LIMIT
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "an instance outlives poprun"
        time.sleep(0.05)
