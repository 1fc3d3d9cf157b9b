"""Recordings of the instances of a replica are one profile, on one clock, with a measured bubble."""

from dataclasses import replace

import pytest
from simulated import MS, simulated

from popengine.profile import ProfileError
from popvision.analysis import Figures
from popvision.cli import main
from popvision.joined import load
from popvision.report import summary, write_report
from popvision.sentences import instances_sentence, warning_sentences

IDEAL = simulated(2, 8, cost=lambda phase, stage: (2 + stage) * MS)
# Three steps of two devices, with a core for each.
WHOLE = replace(
    IDEAL,
    runs=tuple(
        run._replace(call=n, step=n, core=0, start=run.start + 100 * n * MS, end=run.end + 100 * n * MS)
        for n in range(3)
        for run in Figures(IDEAL).devices.runs
    ),
)


def part(index, host, monotonic, time):
    """What instance `index` records of `WHOLE`: the tasks of an ipu, on its core 0, since its own start."""
    runs = [run for run in WHOLE.runs if WHOLE.tasks[run.task].ipu == index]
    facts = WHOLE.facts | {"cores": 4, "threads": 1, "step_tasks": 16, "part": index}
    facts |= {"ipus_of_instances": [[0], [1]]}
    facts |= {"clock": {"host": host, "monotonic": monotonic * MS, "time": time * MS}}
    runs = [run._replace(start=run.start - 700 * MS * index, end=run.end - 700 * MS * index) for run in runs]
    kept = [row for row in WHOLE.memory if row.ipu == index]
    rows = [
        row if WHOLE.tasks[row.task].ipu == index else row._replace(calls=0, ns=0) for row in WHOLE.operations
    ]
    return replace(WHOLE, runs=tuple(runs), facts=facts, memory=tuple(kept), operations=tuple(rows))


def write(folder, *parts):
    for index, each in enumerate(parts):
        each.save(folder / "training" / (f"profile.{index}.pop" if index else "profile.pop"))
    return folder / "training" / "profile.pop"


# On one host times of day differ from the monotonic clock if somebody set them; hosts have clocks of their own.
ONE_HOST = part(0, "a", 5000, 100), part(1, "a", 5700, 0)
TWO_HOSTS = part(0, "a", 5000, 100), part(1, "b", 3, 800)


@pytest.mark.parametrize("parts", [ONE_HOST, TWO_HOSTS])
def test_joined_instances_have_the_figures_of_the_whole(tmp_path, parts):
    joined = load(write(tmp_path, *parts))
    assert sorted(run._replace(core=0) for run in joined.runs) == sorted(
        run._replace(core=0) for run in WHOLE.runs
    )
    assert (joined.operations, joined.memory) == (WHOLE.operations, WHOLE.memory)
    found = Figures(joined)
    assert found.step_apart == Figures(WHOLE).step_apart
    assert found.bubble_measured == pytest.approx(found.bubble_apart) and found.bubble_apart > 0.2
    assert Figures(WHOLE).bubble_measured is None
    assert joined.facts["cores"] == (4 if parts is ONE_HOST else 8)


def test_the_report_says_which_instance_has_which_ipu_and_by_which_clock(tmp_path, capsys):
    write(tmp_path, *TWO_HOSTS)
    assert main(["summary", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "A replica spans 2 instances: instance 0 has ipu 0, instance 1 has ipu 1." in text
    assert "joined by their hosts' times of day, which differ a little" in text
    assert f"  {'measured bubble':40}23.1%\n" in text
    assert instances_sentence(WHOLE) == "" and "measured" not in summary(WHOLE)


def test_the_page_has_the_cores_of_all_instances(chromium, tmp_path):
    chromium.faults.clear()
    write(tmp_path, *ONE_HOST)
    chromium.open(write_report(tmp_path), "headline?on=cores")
    assert chromium.value("popvision.miniature.lanes.map(lane => lane.name)") == ["core 0.0", "core 1.0"]
    text = chromium.value("document.getElementById('main').innerText")
    assert "Measured bubble: 23.1%" in text and "joined by the clock of their host" in text
    assert "core 1.0\n" in text
    assert chromium.faults == []


def test_a_missing_file_is_a_sentence_and_one_of_another_plan_an_error(tmp_path):
    path = write(tmp_path, ONE_HOST[0])
    found = Figures(load(path))
    assert found.bubble_measured is None
    assert warning_sentences(found)[0].startswith(
        "The tasks of instance 1 are missing: put its file profile.1.pop"
    )
    write(tmp_path, ONE_HOST[0], replace(ONE_HOST[1], tasks=ONE_HOST[1].tasks[1:]))
    with pytest.raises(ProfileError, match=r"1\.pop is of another plan .*\n  fix: put the files of one run"):
        load(path)
