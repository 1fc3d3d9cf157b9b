"""The log: its levels, its lines and where they go."""

import logging
import os
import re
import subprocess

import pytest

import quick_python
from poptorch import logs


@pytest.fixture(autouse=True)
def log_as_configured_at_import():
    yield
    logs.configure("WARN", "stderr")


@pytest.mark.parametrize(
    ("level", "number"),
    [(0, 5), (1, 10), (2, 20), (3, 30), (4, 40), (6, 51), ("TRACE", 5), ("WARN", 30), ("OFF", 51)],
)
def test_a_level_is_an_integer_or_a_name(level, number):
    logs.setLogLevel(level)
    assert logging.getLogger("poptorch::python").level == number


@pytest.mark.parametrize("level", [5, 7, -1])
def test_other_integers_are_refused(level):
    with pytest.raises(ValueError, match=f"Invalid log level integer {level}"):
        logs.setLogLevel(level)


def test_an_unknown_name_is_refused_with_the_known_ones_in_order():
    with pytest.raises(ValueError, match=r"Unknown log level: wibble.*DEBUG, ERR, INFO, OFF, TRACE, WARN"):
        logs.setLogLevel("wibble")


def test_a_line_says_when_who_how_bad_and_what(capsys):
    logs.logger.warning("three %s", "blind mice")
    assert re.fullmatch(
        r"\[\d\d:\d\d:\d\d\.\d{3}\] \[poptorch::python\] \[warning\] three blind mice\n",
        capsys.readouterr().err,
    )


def test_lines_below_the_level_are_not_written(capsys):
    logs.logger.info("quiet")
    logs.setLogLevel("TRACE")
    logs.logger.log(logs.TRACE, "loud")
    logs.setLogLevel("OFF")
    logs.logger.critical("off")
    error = capsys.readouterr().err
    assert "quiet" not in error and "off" not in error
    assert error.endswith("[trace] loud\n")


def test_lines_of_the_engine_obey_the_same_level(capsys):
    engine = logging.getLogger("popengine")
    engine.warning("written")
    logs.setLogLevel("ERR")
    engine.warning("left out")
    written = capsys.readouterr().err
    assert "[popengine] [warning] written\n" in written
    assert "left out" not in written


def test_the_log_can_go_to_stdout_or_a_file(capsys, tmp_path):
    logs.configure("DEBUG", "stdout")
    logs.logger.debug("to stdout")
    assert capsys.readouterr().out.endswith("[debug] to stdout\n")
    logs.configure("ERR", str(tmp_path / "log"))
    logs.logger.error("to a file")
    assert (tmp_path / "log").read_text().endswith("[error] to a file\n")


def test_an_unknown_level_in_the_environment_does_not_break_the_import():
    environment = {**os.environ, "POPTORCH_LOG_LEVEL": "LOUD", "POPTORCH_LOG_DEST": "stdout"}
    command = [*quick_python.words(), "-c", "import poptorch.logs as logs; print(logs.logger.level)"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "Unknown log level: LOUD" in output and output.endswith("30\n")


@pytest.mark.parametrize("configured", ["", "import logging; logging.basicConfig(level=logging.INFO); "])
def test_a_line_appears_once_also_where_the_program_configures_logging(configured):
    code = f"{configured}import poptorch; poptorch.logger.warning('wibble')"
    done = subprocess.run([*quick_python.words(), "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout + done.stderr).count("wibble") == 1
