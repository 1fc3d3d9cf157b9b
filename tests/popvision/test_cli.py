"""The program `popvision`: what it prints and writes."""

import dataclasses
import os
import subprocess
import sys

import pytest
from simulated import MS, simulated

from popvision.analysis import Figures, compare_figures, comparison_text
from popvision.cli import main


@pytest.fixture
def report(tmp_path):
    folder = tmp_path / "report"
    simulated(3, 4).save(folder / "training" / "profile.pop")
    simulated(3, 4, training=False).save(folder / "inference" / "profile.pop")
    return folder


def test_summary_prints_the_headline_of_both_profiles(report, capsys):
    assert main(["summary", str(report)]) == 0
    text = capsys.readouterr().out
    assert text.index("training: 1f1b training, 3 stages") < text.index("inference: 1f1b inference")
    assert "  bubble of separate devices              33.3%\n" in text
    assert "With 3 equal stages and 4 micro-batches the bubble is 2 / 6 = 33.3%; 10 micro-batches" in text
    assert "  a step on separate devices              12 ms\n" in text
    assert "  a step on these cores                   24 ms\n" in text
    assert "3 calls, 3 steps on 1 of 64 cores; compilation: capture 500 ms, lower 250 ms" in text


def test_a_folder_its_page_or_one_profile_stands_for_the_report(report, capsys):
    for words in (["report", report], [report], [report / "training"], [report / "report.html"]):
        assert main([*map(str, words), "--no-browser"]) == 0
        assert capsys.readouterr().out.strip() == str(report / "report.html")
    assert '"label":"inference"' in (report / "report.html").read_text()
    assert main(["summary", str(report / "training" / "profile.pop")]) == 0
    assert "training: 1f1b training, 3 stages" in capsys.readouterr().out


def test_the_page_of_a_report_goes_where_output_says(report, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main([str(report), "--no-browser", "--output", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert '"label":"inference"' in page.read_text() and not (report / "report.html").exists()
    (report / "report.html").mkdir()  # stands for a folder that can't be written to
    assert main([str(report), "--no-browser"]) == 1
    assert "the page can't be written: " in (error := capsys.readouterr().err)
    assert error.endswith("fix: --output PAGE, in a folder of yours\n")


def test_report_alone_opens_the_folder_report(report, capsys, monkeypatch):
    monkeypatch.chdir(report)
    monkeypatch.chdir(report.parent)
    assert main(["report", "--no-browser"]) == 0
    assert capsys.readouterr().out.strip() == f"{report.name}/report.html" == "report/report.html"
    assert main(["summary"]) == 0
    assert capsys.readouterr().out.startswith("training: 1f1b training, 3 stages")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["sumary"], "'sumary' is not a command, a folder or a file; did you mean 'summary'?"),
        (["sumary", "report"], "did you mean 'summary'?"),
        (["nosuch/folder"], "'nosuch/folder' is not a command, a folder or a file\n  fix: the folder"),
        (["report", "--no-browsr", "x"], "unknown option --no-browsr; did you mean '--no-browser'?"),
        (["compare"], "the following arguments are required: REPORT, OTHER"),
        (["compare", "report4"], "required: OTHER\n  fix: popvision compare report4 OTHER\n"),
        ([], "required: COMMAND, one of report, summary, compare\n  fix: popvision --help"),
        (["--port", "3"], "unknown option --port\n  fix: popvision --help"),
    ],
)
def test_a_misspelt_word_is_an_error_that_names_the_word_meant(words, shown, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert shown in error and error.count("\n") == 2 and "\n  fix: " in error


def test_a_reader_that_has_seen_enough_ends_the_program_quietly(report):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "popvision", "summary", report]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_folder_of_several_reports_lists_them(report, capsys, monkeypatch):
    assert main(["summary", str(report.parent)]) == 1
    assert f"{report.parent} has 1 report:\n  {report}\n  fix: name one of them" in capsys.readouterr().err
    assert main(["summary", str(report / "nosuch")]) == 1
    assert f"there is no file or folder {report / 'nosuch'}" in capsys.readouterr().err
    monkeypatch.chdir(report.parent)
    assert main(["summary", str(report / "nosuch")]) == 1
    assert "popvision report FOLDER; profiled folders here: report\n" in capsys.readouterr().err
    assert main(["summary", str(report / "trainign")]) == 1
    assert "trainign; did you mean 'training'?" in capsys.readouterr().err


def test_compare_prints_both_runs_and_says_which_is_better(report, tmp_path, capsys):
    simulated(3, 4, cost=lambda phase, stage: 2 * MS).save(tmp_path / "slow" / "training" / "profile.pop")
    page = tmp_path / "both.html"
    assert main(["compare", str(report), str(tmp_path / "slow"), "--no-browser", "--output", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    step = next(line for line in lines if line.startswith("a step on these cores, per row"))
    assert " ".join(step.split()) == "a step on these cores, per row 3 ms ✓ 6 ms 2.00"
    assert '"better":"first"' in page.read_text()


def test_runs_of_different_kinds_are_not_compared(report, tmp_path, capsys):
    simulated(2, 2, training=False).save(tmp_path / "other" / "profile.pop")
    assert main(["compare", str(report / "training"), str(tmp_path / "other")]) == 1
    assert "no profile of the same kind" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "summary", "compare"])
def test_the_help_of_a_command_names_that_command_alone(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "-h"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: popvision {command} [-h]")


@pytest.mark.parametrize("command", [["summary"], []])
def test_a_damaged_profile_is_an_error_in_words(command, report, capsys):
    path = report / "training" / "profile.pop"
    path.write_text(path.read_text()[:500])
    assert main([*command, str(report)]) == 1
    assert "is damaged or cut short" in capsys.readouterr().err


def test_a_folder_without_profiles_is_an_error_that_says_how_to_make_one(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "no profile.pop in" in (error := capsys.readouterr().err)
    assert 'fix: options.enableProfiling("report")' in error


def test_what_differs_by_less_than_runs_do_is_no_difference(tmp_path):
    profile = simulated(2, 8, steps=12)
    slower = simulated(2, 8, steps=12, cost=lambda phase, stage: MS * 11 // 10)

    def jittering(profile):
        calls = [call._replace(end=call.end + call.call % 4 * 3 * MS) for call in profile.calls]
        ns = sum(call.end - call.start for call in calls)
        return dataclasses.replace(profile, calls=tuple(calls), facts={**profile.facts, "ns_in_calls": ns})

    def compared(first, second):
        rows = compare_figures(Figures(first), Figures(second))
        assert "measured bubble" not in {row.name for row in rows}  # neither run has it
        return next(row for row in rows if row.name == "a step on these cores, per row"), rows

    assert compared(profile, slower)[0].better == "first"
    unsure, rows = compared(jittering(profile), jittering(slower))
    assert unsure.better == "" and unsure.spread > 0.1
    assert f"± {unsure.spread:.0%}" in comparison_text(rows, ("a", "b"))
