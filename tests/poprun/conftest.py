import launching
import pytest


@pytest.fixture
def poprun(tmp_path):
    """`poprun(WORDS, NAME=VALUE)` begins a run; whatever is left of it at the end of the test is killed."""
    runs = []

    def start(*words, **variables):
        runs.append(launching.Poprun(tmp_path, words, **variables))
        return runs[-1]

    yield start
    for run in runs:
        run.clean_up()
