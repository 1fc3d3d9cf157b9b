"""Examples are programs of several files: a test imports them as Python does when it runs one of them."""

import contextlib
import gzip
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def imported(folder: str, name: str):
    """The module of a program. What it imports from its folder is forgotten afterwards: others have such names too."""
    path, known = list(sys.path), dict(sys.modules)
    for file in (EXAMPLES / folder).glob("*.py"):  # somebody else's `model` may be there
        sys.modules.pop(file.stem, None)
    sys.path[:0] = [str(EXAMPLES / folder), str(EXAMPLES)]
    try:
        yield importlib.import_module(name)
    finally:
        sys.path[:] = path
        for module in set(sys.modules) - set(known):
            if str(EXAMPLES) in str(getattr(sys.modules[module], "__file__", None)):
                del sys.modules[module]
        sys.modules.update(known)


def printed(folder: str, name: str, *flags: object) -> str:
    """What a program prints, with the flags of a command line. It runs in this process, which has loaded torch."""
    output, threads = io.StringIO(), torch.get_num_threads()
    words = [f"{name}.py", *map(str, flags)]
    try:
        with (
            imported(folder, name) as module,
            mock.patch.object(sys, "argv", words),
            mock.patch.dict(os.environ),
            contextlib.redirect_stdout(output),
        ):
            module.main()
    finally:
        torch.set_num_threads(threads)
    return output.getvalue()


def on_one_thread(function, *arguments):
    """Call a function; plain PyTorch is faster on one thread, as two wait for each other in so small operations."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(threads)


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a Python program or module in a process of its own, and return what it printed."""
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write a file of MNIST's format, compressed if its name ends in .gz."""
    data = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_fashion(folder: Path, train: int, test: int) -> Path:
    """Write so many images of Fashion-MNIST's size to train on and to test with; a class is a bright row."""
    for part, count in (("train", train), ("t10k", test)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.zeros((count, 28, 28), np.uint8)
        images[np.arange(count), 2 * labels + 4] = 255
        write_idx(folder / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels)
    return folder
