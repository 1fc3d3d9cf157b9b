"""The profile's file: what is written is read back, and what can't be read is refused in words."""

import dataclasses
import json
import subprocess
import sys

import pytest

from popengine.order import After
from popengine.profile import (
    TABLES,
    Call,
    Operation,
    Profile,
    ProfileError,
    TaskRun,
    Tensor,
    load,
)
from popengine.table import Instruction, Task

PROFILE = Profile(
    "training",
    True,
    ("A", "B"),
    (0, 1),
    {"accumulation": 2},
    {"mode": "1f1b"},
    operations=(Operation(0, "mm_1", "mm", "A", "model.py:3", 2, 500, 64, 32, 16),),
    tasks=(
        Task(
            *("forward", 0, 0, "F"),
            piece=0,
            instructions=(
                Instruction("compute", ("x",), piece=0),
                Instruction("send", channel="F0", peer=1, bytes=64),
            ),
        ),
        Task(
            "forward",
            1,
            1,
            "F",
            after=(After(0), After(1, 1)),
            piece=1,
            instructions=(Instruction("compute"),),
        ),
    ),
    runs=(
        TaskRun(0, 0, 0, 0, 0, 1, 1000, 1010, 9),
        TaskRun(0, 0, 1, 0, 0, 1, 1011, 1016, 4),
        TaskRun(0, 0, 0, 1, 0, 0, 1002, 1031, 20),
    ),
    calls=(Call(0, 900, 1100, 1),),
    tensors=(Tensor(0, "x", "input", 64, 0, 1),),
)


def test_a_profile_is_read_as_it_was_written(tmp_path):
    PROFILE.save(tmp_path / "training" / "profile.pop")
    assert load(tmp_path / "training" / "profile.pop") == PROFILE
    assert [path.name for path in (tmp_path / "training").iterdir()] == ["profile.pop"]


def test_events_are_runs_joined_with_the_rows_of_the_table():
    events = [
        (e.ipu, e.kind, e.phase, e.stage, e.micro_batch, e.core, e.start, e.end) for e in PROFILE.events()
    ]
    assert events == [
        (0, "forward", "F", 0, 0, 1, 1000, 1010),
        (1, "forward", "F", 1, 0, 1, 1011, 1016),
        (0, "forward", "F", 0, 1, 0, 1002, 1031),
    ]
    assert [event.cost for event in PROFILE.events()] == [9, 4, 20]


def test_the_file_says_its_format_version_and_columns():
    data = json.loads(PROFILE.to_json())
    assert (data["format"], data["version"]) == ("pando-profile", 3)
    assert data["calls"] == {"columns": ["call", "start", "end", "steps"], "rows": [[0, 900, 1100, 1]]}


def test_columns_that_this_program_does_not_know_are_passed_over(tmp_path):
    data = json.loads(PROFILE.to_json())
    data["calls"] = {
        "columns": ["mood", "call", "start", "end", "steps"],
        "rows": [["good", 0, 900, 1100, 1]],
    }
    (tmp_path / "profile.pop").write_text(json.dumps(data))
    assert load(tmp_path / "profile.pop") == PROFILE


@pytest.mark.parametrize("name", [entry.name for entry in dataclasses.fields(Profile)][2:])
def test_an_older_profile_without_a_table_or_field_has_its_default(name, tmp_path):
    data = json.loads(PROFILE.to_json())
    del data[name]
    (tmp_path / "profile.pop").write_text(json.dumps(data))
    bare = dataclasses.replace(Profile("", True), name=PROFILE.name, training=PROFILE.training)
    assert load(tmp_path / "profile.pop") == dataclasses.replace(PROFILE, **{name: getattr(bare, name)})


def defaults_of(row_type):
    """The defaults of a table's columns; a row of the plan's table is a dataclass."""
    if row_type is not Task:
        return row_type._field_defaults
    return {
        field.name: field.default
        for field in dataclasses.fields(Task)
        if field.default is not dataclasses.MISSING
    }


def test_an_older_profile_without_a_column_has_its_default(tmp_path):
    for table, row_type in TABLES.items():
        for column, default in defaults_of(row_type).items():
            data = json.loads(PROFILE.to_json())
            at = data[table]["columns"].index(column)
            for row in [data[table]["columns"], *data[table]["rows"]]:
                del row[at]
            (tmp_path / "profile.pop").write_text(json.dumps(data))
            change = dataclasses.replace if row_type is Task else row_type._replace
            rows = tuple(change(row, **{column: default}) for row in getattr(PROFILE, table))
            assert load(tmp_path / "profile.pop") == dataclasses.replace(PROFILE, **{table: rows})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text[: len(text) // 2], "is damaged or cut short: line 1, column"),
        (lambda text: "import torch", "is not a profile\n  fix: name a profile.pop, or a folder of them"),
        (lambda text: "[" * 100_000, "is not a profile: its values are nested too deeply"),
        (lambda text: "[1]", "is not a profile: it does not say it is a 'pando-profile'"),
        (lambda text: text.replace('"version":3', '"version":4'), "and this program reads up to 3"),
        (lambda text: text.replace('"version":3', '"version":"3"'), "has version 3"),
        (lambda text: text.replace('"version":3', '"version":2'), "which recorded other things"),
        (lambda text: text.replace("[0,0,1,0,0,1,1011,1016,4]", "null"), "is damaged: TypeError"),
    ],
)
def test_what_is_no_profile_is_refused(change, message, tmp_path):
    path = tmp_path / "profile.pop"
    path.write_text(change(PROFILE.to_json()))
    with pytest.raises(ProfileError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)
    assert "fix:" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"gone\.pop can't be read: No such file"):
        load(tmp_path / "gone.pop")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "profile.pop").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="is not a profile: it isn't text"):
        load(tmp_path / "profile.pop")


def test_reading_profiles_loads_no_torch():
    code = "import sys, popvision.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
