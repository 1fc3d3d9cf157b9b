"""Each flag of a command reaches the function that runs the command."""

import pytest

from ipujob.cli import main

COMMANDS = {
    "check a.yaml -": "cli.check_files",
    "render a.yaml --name x --device cuda --as pod --image a=b --drop security": "cli.render_file",
    "run a.yaml --name x --local --command true --clone u=f --env A=1 --env B=2 --real git --keep": "cli.run_file",
    "manifest --namespace n --image i --device cuda": "cli.print_operator",
    "submit a.yaml --name x -n n --follow --wait": "remote.submit_file",
    "status x --namespace n --watch": "remote.print_status",
    "logs x -n n --worker 2 --all --follow --previous": "remote.print_logs",
    "delete x y -n n --keep-pods": "remote.delete_jobs",
    "operator --device cuda --namespace n --images f --alive g": "operator.run_operator",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_the_function_of_a_command_gets_all_its_flags(words, monkeypatch):
    received = []
    monkeypatch.setattr(f"ipujob.{COMMANDS[words]}", lambda arguments: received.append(vars(arguments)) or 3)
    assert main(words.split()) == 3
    (arguments,) = received
    text = repr([value for name, value in arguments.items() if name != "run"])
    assert all(part in text for word in words.split()[1:] if word[0] != "-" for part in word.split("="))
    without = {name for name, value in arguments.items() if value in (None, False, [])}
    assert without <= {"all_namespaces"}  # excludes --namespace


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("list", "ipujob status"),
        ("create a.yaml", "ipujob submit a.yaml"),
        ("help", "ipujob --help"),
        ("check -f a.yaml", "ipujob check a.yaml"),
    ],
)
def test_words_of_other_programs_lead_to_ours(words, fix, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    assert capsys.readouterr().err.endswith(f"\n  fix: {fix}\n")
