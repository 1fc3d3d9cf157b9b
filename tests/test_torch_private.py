"""Torch's private names stand in one module, where a difference between versions of torch is bridged."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
ROOM = SRC / "popengine" / "torch_private.py"
FILES = sorted(path for path in SRC.rglob("*.py") if path != ROOM)

# Private in name only: operations of the public `torch.ops`, and the documented foreach functions.
PUBLIC = re.compile(r"torch\.ops(\.|$)|torch\._foreach_\w+$")
# Private attributes of torch's objects, which all versions in the range have. This list may only shrink.
ATTRIBUTES = {
    "OpOverload": "_op _overloadname _schema",
    "Tensor": "_backward_hooks _base _post_accumulate_grad_hooks _version _view_func_unsafe",
    "UntypedStorage": "_cdata",
    "Module": "_buffers _check_input_dim _compiled_call_impl _flat_weights _flat_weights_names"
    " _forward_pre_hooks _get_name _modules _orig_mod _parameters",
    "Optimizer": "_init_group _opt_called _wrapped_by_lr_sched",
    "Node of autograd": "_sequence_nr",
    "DataLoader": "_iterator",
    "Lightning": "_AcceleratorConnector _after_closure _check_config_and_set_final_flags _data_connector"
    " _detect_anomaly _lightning_module _num_samples _on_before_zero_grad"
    " _precision_flag _trainer",
    "argparse": "_actions _option_string_actions",
    "Python": "_asdict _exit _fields _getframe _inheriting _replace",
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_private(name: str) -> bool:
    """Return whether a dotted name is torch's, and has a part that begins with an underscore."""
    parts = name.split(".")
    inside = any(re.match(r"_(?!_)", part) for part in parts) or name.startswith("torch.fx.experimental")
    return parts[0] == "torch" and inside and not PUBLIC.match(name)


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of torch that a module imports, reads by attribute, or has in a string."""
    torch_names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                short = alias.asname or alias.name.partition(".")[0]
                torch_names[short] = alias.name if alias.asname else short
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                torch_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            start, *rest = ast.unparse(node).split(".")
            yield ".".join([torch_names.get(start, start), *rest])
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            yield str(node.value)


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes that a module reads, of any object but torch and torch.ops.aten."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not ast.unparse(node.value).endswith(("aten", "torch")):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield str(getattr(node.args[1], "value", ""))


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


@pytest.mark.parametrize("code", ["from torch._ops import a", "import torch\ntorch._C.x()"])
@pytest.mark.parametrize("more", ["", "import torch as t\nt.utils._pytree", "from torch import fx\nfx._x"])
def test_each_way_to_a_private_name_is_found(code, more):
    found = set(filter(is_private, private_names(ast.parse(f"{code}\n{more}\ntorch.ops.aten._x"))))
    assert len(found) >= (2 if more else 1)
    assert not any("aten" in name for name in found)


def test_no_other_module_imports_or_reads_a_private_name_of_torch():
    found = {
        path.relative_to(SRC).as_posix(): {*filter(is_private, private_names(parsed(path)))} for path in FILES
    }
    assert {name: names for name, names in found.items() if names} == {}


def test_private_attributes_of_torchs_objects_are_known():
    trees = [*map(parsed, FILES)]
    own = {name for tree in trees for name in own_names(tree)}
    read = {name for tree in trees for name in private_attributes(tree) if re.match(r"_(?!_|foreach_)", name)}
    known = {name for names in ATTRIBUTES.values() for name in names.split()}
    assert sorted(read - own - known) == []


def test_the_room_holds_what_others_use_and_nothing_more():
    room = ast.parse(ROOM.read_text())
    offered = {
        alias.asname or alias.name
        for node in room.body
        if isinstance(node, ast.ImportFrom) and any(is_private(f"{node.module}.{a.name}") for a in node.names)
        for alias in node.names
    } | {name for name in own_names(ast.Module(room.body, [])) if not name.startswith("_")}
    inside = {node.id for node in ast.walk(room) if isinstance(node, ast.Name)}
    used = {
        alias.name
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("torch_private")
        for alias in node.names
    }
    assert used and offered - used - inside == set()
