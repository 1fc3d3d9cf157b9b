"""What an import costs: each process that loads data pays for it again."""

import importlib
import subprocess
import sys

import pytest

import poptorch

HEAVY = ("sympy", "torch._inductor", "torch._dynamo")
COMPILER = ("popengine.run", "popengine.compile", "poptorch.executor.executor", "poptorch.ops")


LOADER = """
import sys, torch, poptorch

class WhatIsLoaded(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        names = {names!r}
        return torch.tensor([any(m == n or m.startswith(n + ".") for m in sys.modules) for n in names])

if __name__ == "__main__":
    loader = poptorch.DataLoader(poptorch.Options(), WhatIsLoaded(), mode=poptorch.DataLoaderMode.Async)
    print(next(iter(loader))[0].tolist())
    loader.terminate()
"""


USES = """
import sys, torch, poptorch
print(torch.ops.poptorch.nop(torch.ones(2)).tolist())
print([name for name in {names!r} if name in sys.modules])
[getattr(poptorch, name) for name in dir(poptorch)]
print([name for name in {names!r} if name in sys.modules])
"""


def test_raw_operations_are_there_at_once_and_names_load_neither_sympy_nor_a_compiler_of_torch():
    code = USES.format(names=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[1.0, 1.0]\n[]\n[]\n"


def test_compare_is_imported_without_executors():
    # It also checks loops of other libraries.
    code = "import sys, poptorch.testing; print(*(m for m in sys.modules if m.startswith(('pop', 'torch._inductor'))))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    modules = done.stdout.split()
    assert "poptorch.testing.causes" in modules and len(modules) < 20
    assert not [name for name in modules if name.startswith((*HEAVY, *COMPILER, "poptorch.o"))]


def test_a_process_that_loads_data_imports_nothing_that_compiles_or_runs_models(tmp_path):
    # It took seconds to start, since it imported all that a training program needs. (In a process of its own: other
    # tests let the server of processes import more.)
    (tmp_path / "load.py").write_text(LOADER.replace("{names!r}", repr(HEAVY + COMPILER)))
    command = [sys.executable, str(tmp_path / "load.py")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{[False] * len(HEAVY + COMPILER)}\n"


def test_dir_shows_the_public_names_and_no_insides():
    shown = dir(poptorch)
    assert {"Options", "trainingModel", "optim", "profiling", "__version__"} <= set(shown)
    assert not {"wrapping", "popengine", "torch", "Path", "saving"} & set(shown)
    assert all(hasattr(poptorch, name) for name in shown)


def test_a_misspelt_name_is_an_attribute_error_that_knows_the_module():
    with pytest.raises(AttributeError, match="module 'poptorch' has no attribute 'Option'") as caught:
        _ = poptorch.Option
    assert (caught.value.name, caught.value.obj) == ("Option", poptorch)  # what Python makes suggestions from


PUBLIC = [
    *("popart", "popdist", "popdist.poptorch", "poptorch", "poptorch.autocasting", "poptorch.data"),
    *("poptorch.enums", "poptorch.ops", "poptorch.optim", "poptorch.options", "poptorch.poptorch_core"),
    *("poptorch.profiling", "poptorch.testing"),
]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_says_what_is_public(name):
    module = importlib.import_module(name)
    assert module.__all__ and all(hasattr(module, name) for name in module.__all__)
