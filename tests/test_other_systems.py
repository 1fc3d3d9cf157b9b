"""Systems other than Linux: Pando imports and trains without what only Linux has; poprun names what is missing."""

import subprocess
import sys

import pytest

HIDE = """
import os, sys, sysconfig, torch
sysconfig.get_config_vars()  # read from a file that is named after the real system
for name in ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "waitid", "eventfd", "memfd_create"):
    if hasattr(os, name):
        delattr(os, name)
sys.modules["fcntl"] = None  # an import raises ImportError
sys.platform = "darwin"
"""
WINDOWS = """
import ctypes, signal
for name in [name for name in dir(os) if name.startswith("RTLD_")] + [
    "fork", "forkpty", "register_at_fork", "getuid", "geteuid", "killpg", "setsid", "getpgid", "mkfifo",
    "sched_yield", "sysconf", "uname", "wait", "waitpid", "set_blocking", "getloadavg",
]:
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGCHLD", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGSTOP", "SIGCONT", "SIGPIPE",
             "pthread_sigmask", "sigwait", "pthread_kill", "set_wakeup_fd", "setitimer"):
    delattr(signal, name)
for name in ("resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
real = ctypes.CDLL.__init__
def of_a_name(self, name, *args, **kwargs):
    if name is None:
        raise TypeError("expected str, bytes or os.PathLike object, not NoneType")  # as on Windows
    real(self, name, *args, **kwargs)
ctypes.CDLL.__init__ = of_a_name
sys.platform = "win32"
"""
IMPORT = """
import pkgutil
from importlib import import_module
for package in ("popart", "popdist", "popengine", "poprun", "poptorch", "popvision"):
    for module in pkgutil.walk_packages(import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
"""
TRAIN = """
import poptorch
class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(torch.nn.Linear(4, 4), "first", ipu_id=0)
        self.last = poptorch.BeginBlock(torch.nn.Linear(4, 1), "last", ipu_id=1)
    def forward(self, x):
        return poptorch.identity_loss(self.last(self.first(x)), "mean")
options = poptorch.Options().deviceIterations(2)
options.Training.gradientAccumulation(4)
model = Both()
trainer = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
batch = torch.ones(8, 4)
losses = [trainer(batch).item() for _ in range(3)]
assert losses[2] < losses[1] < losses[0], losses
loader = poptorch.DataLoader(options, torch.utils.data.TensorDataset(batch))
assert trainer(*next(iter(loader))).item() < losses[2]
print("trained")
"""
LAUNCH = """
from poprun import cli
sys.exit(cli.main(["--num-instances", "2", "--num-replicas", "2", "true"]))
"""


def run(*parts):
    command = [sys.executable, "-c", "".join((HIDE, *parts))]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("system", [IMPORT, WINDOWS], ids=["macos", "windows"])
def test_a_pipeline_trains_and_poprun_says_what_the_system_lacks(system):
    """Without what only Linux has every module is imported, too."""
    done = run(system, TRAIN, LAUNCH)
    assert (done.returncode, done.stdout) == (2, "trained\n"), done.stderr
    assert "poprun: error: this system lacks pidfd_open and prctl" in done.stderr
    assert "fix: use Linux 5.3 or newer" in done.stderr
