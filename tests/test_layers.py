"""Imports run downwards only: the doors see the face, the face the engine, the engine its values."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# Rooms by the prefix of their modules, and the rooms that each may import beside itself.
VALUES = {
    "popengine",
    "popengine.ir",
    "popengine.torch_private",
    "popengine.settings",
    "popengine.profile",
    "popengine.errors",
    "popengine.operations",
    "popengine.order",
    "popengine.piece",
    "popengine.schedules",
    "popengine.table",
    "popengine.texts",
}
# What each command may import: files that need the standard library only.
COMMANDS = {"popengine.environment", "popengine.errors", "popengine.texts", "popengine.command_parser"}
ENGINE = {"popengine.compile", "popengine.run"}
MAY_IMPORT = {
    **{room: VALUES for room in VALUES},
    "popengine.compile": VALUES,
    "popengine.run": VALUES | {"popengine.environment"},
    "popart": set(),
    "popengine.environment": set(),
    "popengine.import_hook": set(),
    "popengine.command_parser": {"popengine.errors"},
    "popdist": {"popengine.environment", "popengine.errors", "popdist.rendezvous", "popdist.collectives"},
    "popdist.store": set(),
    "popdist.rendezvous": VALUES | {"popengine.environment", "popdist.store", "popengine.run"},
    "popdist.collectives": VALUES | {"popengine.environment", "popengine.run"},
    "poptorch": VALUES | ENGINE | {"popengine.environment"},
    "popdist.checkpoint": VALUES
    | {"poptorch", "popdist", "popengine.environment", "popdist.checkpoint_files", "popdist.collectives"},
    "popdist.checkpoint_files": VALUES,
    "popdist.poptorch": {"poptorch", "popdist", "popengine.environment"},
    "poprun.aliases": {"popdist", "popdist.collectives", "poptorch"},
    "poprun": {*COMMANDS, "popdist", "popdist.store", "popdist.checkpoint_files"},
    "ipujob": {*COMMANDS, "popdist"},
    "popvision": {
        *COMMANDS,
        "popengine",
        "popengine.order",
        "popengine.profile",
        "popengine.table",
    },
    "lightning_ipu.autoload": {"popengine.import_hook"},
    "lightning_ipu": VALUES
    | ENGINE
    | {"poptorch", "popdist", "popengine.environment", "popdist.poptorch", "popdist.collectives"}
    | {"lightning_ipu.autoload"},
    "lightning_graphcore": {"lightning_ipu"},
}

# The imports upwards: who writes a page loads the viewer, and only then.
EXCEPTIONS = {
    "poptorch.reporter": {"popvision.report"},
}

# Folders that import each other. This list may only shrink.
MUTUAL: set[tuple[str, str]] = set()


def room_of(module: str) -> str | None:
    """The room with the longest prefix; None: not ours."""
    rooms = [room for room in MAY_IMPORT if module == room or module.startswith(room + ".")]
    return max(rooms, key=len, default=None)


def modules() -> dict[str, Path]:
    found = {}
    for path in SRC.rglob("*.py"):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports(module: str, path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*base, *filter(None, [node.module])])
            names = [f"{start}.{alias.name}" for alias in node.names]
            found |= {name if name in ALL else start for name in names}
    return found


ALL = modules()


def loaded_by(module: str) -> set[str]:
    """The modules that importing this one loads first: what it imports, and the packages around that."""
    names = imports(module, ALL[module]) & ALL.keys()
    packages = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    return {name for name in names | packages if name != module and not module.startswith(name + ".")}


def test_no_module_imports_itself_by_way_of_others():
    TopologicalSorter({name: loaded_by(name) for name in ALL}).prepare()


def folder_of(module: str) -> str:
    return module if ALL[module].name == "__init__.py" else module.rpartition(".")[0]


def test_no_two_folders_import_each_other():
    """A folder and one inside it may: a package's files are the way into its parts."""
    imported = {
        (folder_of(module), folder_of(name))
        for module, path in ALL.items()
        for name in imports(module, path) & ALL.keys()
    }
    mutual = {
        (one, other)
        for one, other in imported
        if one < other and (other, one) in imported and not other.startswith(one + ".")
    }
    assert mutual == MUTUAL


def test_a_file_has_a_name_of_its_own():
    names = Counter(path.name for path in ALL.values())
    assert {name for name, count in names.items() if count > 1} == {"__init__.py", "__main__.py", "cli.py"}


def test_files_that_documents_and_docstrings_name_are_there():
    root = SRC.parent
    folders = ("src", "tests", "examples", "benchmarks", "docs")
    files = {
        f"/{path.relative_to(root).as_posix()}" for top in folders for path in (root / top).rglob("*.py")
    }
    texts = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *SRC.rglob("*.py")]
    named = {(text.name, name) for text in texts for name in re.findall(r"`([\w/]+\.py)`", text.read_text())}
    own = {(text.name, name) for text in texts for name in re.findall(r'title="([^"]+)"', text.read_text())}
    assert len(named) > 100
    missing = {(text, name) for text, name in named if not any(file.endswith("/" + name) for file in files)}
    assert not missing - own


def test_a_module_imports_downwards_only():
    upward = {}
    for module, path in ALL.items():
        room = room_of(module)
        assert room is not None, f"{module} is in no room: add its package to MAY_IMPORT"
        allowed = {None, room, *MAY_IMPORT[room]}
        names = {name for name in imports(module, path) if room_of(name) not in allowed}
        upward[module] = names - EXCEPTIONS.get(module, set())
    assert {module: names for module, names in upward.items() if names} == {}


def test_run_and_compile_meet_only_in_the_values():
    def used(package):
        return {
            room_of(name)
            for module, path in ALL.items()
            if room_of(module) == package
            for name in imports(module, path)
        }

    assert "popengine.run" not in used("popengine.compile")
    assert "popengine.compile" not in used("popengine.run")


@pytest.mark.parametrize(
    "module",
    [
        "popengine",
        "popengine.profile",
        "popengine.environment",
        "popengine.import_hook",
        "lightning_ipu.autoload",
        "ipujob.cli",
    ],
)
def test_what_launchers_and_viewers_import_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_waits_in_the_middle_of_a_function():
    """Tasks wait in the ready queue: there are no generators where plans run."""
    waiting = {
        module
        for module, path in ALL.items()
        if module.startswith("popengine.run")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await)
    }
    assert not waiting
