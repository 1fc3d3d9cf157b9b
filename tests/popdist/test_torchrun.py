"""torchrun starts instances, too: of one replica each."""

import subprocess
import sys
from pathlib import Path

import processes
import torch
import training

import popdist

PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, popdist, test_torchrun
torch.set_num_threads(1)
popdist.init()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    popdist.synchronize()
    os._exit(popdist.getInstanceIndex())  # the second one fails
torch.save(test_torchrun.trained(), os.path.join(sys.argv[2], str(popdist.getInstanceIndex())))
popdist.synchronize()
"""


def trained():
    executor, model, _ = training.executor()
    executor(*training.batch(0))
    return training.weights(model)


def met_and_trained():
    popdist.init()
    return trained()


def test_processes_of_torchrun_train_together_also_after_a_restart(tmp_path):
    program, here = tmp_path / "program.py", Path(__file__).parent
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", "--monitor-interval", "0.1", program, here, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=processes.LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = [ended.value for ended in processes.run(met_and_trained, 2)]
    assert [torch.load(tmp_path / name) for name in "01"] == expected
    assert expected[0] == expected[1] is not None
