"""Each flag of a command reaches the function that runs the command."""

import pytest

from ipujob.cli import main

COMMANDS = {
    "check a.yaml -": ("cli.check_files", {"files": ["a.yaml", "-"]}),
    "render a.yaml --name x --device cuda --as pod --image a=b --drop security": (
        "cli.render_file",
        {
            "file": "a.yaml",
            "name": "x",
            "device": "cuda",
            "way": "pod",
            "image": [("a", "b")],
            "drop": "security",
        },
    ),
    "run a.yaml --name x --local --command true --clone u=f --env A=1 --env B=2 --real git --keep": (
        "cli.run_file",
        {"file": "a.yaml", "name": "x", "local": True, "command": "true", "clone": [("u", "f")]}
        | {"env": [("A", "1"), ("B", "2")], "real": "git", "keep": True},
    ),
    "manifest --namespace n --image i --device cuda": (
        "cli.print_operator",
        {"namespace": "n", "image": "i", "device": "cuda"},
    ),
    "submit a.yaml --name x -n n --follow --wait": (
        "remote.submit_file",
        {"file": "a.yaml", "name": "x", "namespace": "n", "follow": True, "wait": True},
    ),
    "status x --namespace n --watch": (
        "remote.print_status",
        {"name": "x", "namespace": "n", "watch": True},
    ),
    "logs x -n n --worker 2 --all --follow --previous": (
        "remote.print_logs",
        {"name": "x", "namespace": "n", "worker": 2, "all": True, "follow": True, "previous": True},
    ),
    "delete x y -n n --keep-pods": (
        "remote.delete_jobs",
        {"names": ["x", "y"], "namespace": "n", "keep_pods": True},
    ),
    "operator --device cuda --namespace n --images f --alive g": (
        "operator.run_operator",
        {"device": "cuda", "namespace": "n", "all_namespaces": False, "images": "f", "alive": "g"},
    ),
}


@pytest.mark.parametrize("words", COMMANDS)
def test_the_function_of_a_command_gets_all_its_flags(words, monkeypatch):
    (function, expected), received = COMMANDS[words], []
    monkeypatch.setattr(f"ipujob.{function}", lambda arguments: received.append(vars(arguments)) or 3)
    assert main(words.split()) == 3
    (arguments,) = received
    assert arguments.pop("run") and arguments == expected
