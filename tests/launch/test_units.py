"""The units of systemd: their commands are raafl's, their settings systemd's."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.habits.source import ROOT
from tests.launch.command_lines import check

UNITS = sorted((ROOT / "launch" / "systemd").glob("*.service"))
IDS = [path.stem for path in UNITS]


@pytest.mark.parametrize("path", UNITS, ids=IDS)
def test_a_unit_says_when_it_is_ready_and_takes_sigterm_for_a_good_end(path):
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(path.read_text())
    service = unit["Service"]
    program, command, *options = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/raafl") and command == path.stem.replace("raafl-server", "serve").replace(
        "raafl-client", "join"
    )
    check(command, options)
    assert (service["Type"], service["SuccessExitStatus"], service["Restart"]) == ("notify", "130", "on-failure")
    assert "2" in service["RestartPreventExitStatus"].split()


@pytest.mark.parametrize("path", UNITS, ids=IDS)
def test_systemd_finds_nothing(path, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace("/srv/raafl/.venv/bin/raafl", sys.executable))
    found = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (found.returncode, [line for line in found.stderr.splitlines() if path.name in line]) == (0, [])
