"""Whose runs need no consent: this user's own, in the folder where they ran, to the letter."""

from __future__ import annotations

import json

import pytest

from raafl.config import own_runs
from raafl.config.own_runs import remember
from raafl.config.parse import load_run, parse
from raafl.config.trust import is_trusted, of_folder
from raafl.data import Digits as OwnDigits
from raafl.errors import BadInput

FOREIGN = "model: {class_path: tests.config.test_own_runs.Mine}\n"


class Digits(OwnDigits):
    """A user's class."""


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A user's state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "raafl" / "runs"


def run_folder(tmp_path, text=FOREIGN):
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "config.yaml").write_text(text)
    return tmp_path / "run"


def test_a_run_of_ones_own_is_trusted_in_its_working_folder_until_its_config_changes(tmp_path, state, monkeypatch):
    folder = run_folder(tmp_path)
    assert not is_trusted(folder, asked=False) and is_trusted(folder, asked=True)
    remember(FOREIGN, folder)
    assert is_trusted(folder, asked=False)
    monkeypatch.chdir(tmp_path)  # where the same name may be another class
    assert not is_trusted(folder, asked=False)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert is_trusted(folder, asked=False)
    run_folder(tmp_path, FOREIGN + "clients: 3\n")
    assert not is_trusted(folder, asked=False)


def test_a_config_of_raafls_own_names_leaves_no_note(tmp_path, state):
    remember("model: {class_path: model_zoo.MLP}\nclients: 3\n", tmp_path / "run")
    assert not state.exists()


def test_a_logger_of_ones_own_that_is_named_in_a_line_is_trusted_later(tmp_path, state):
    text = "model: {class_path: model_zoo.MLP}\nlogger: [csv, tests.config.test_own_runs.Mine]\n"
    folder = run_folder(tmp_path, text)
    with pytest.raises(BadInput, match=r"logger is 'tests\.config\.test_own_runs\.Mine', which is not one of csv"):
        of_folder(folder, trusted=is_trusted(folder, asked=False))
    remember(text, folder)
    assert "Mine" in of_folder(folder, trusted=is_trusted(folder, asked=False))


def test_notes_are_few_and_say_whose_they_are(tmp_path, state, monkeypatch):
    monkeypatch.setattr(own_runs, "_KEPT", 2)
    for number in range(4):
        own_runs.record_run(f"clients: {number}", tmp_path / f"run-{number}")
    notes = [json.loads(file.read_text())["run"] for file in state.glob("*.json")]
    assert len(notes) == 2 and str(tmp_path / "run-3") in notes
    assert state.stat().st_mode & 0o077 == 0


def test_without_a_place_for_notes_nothing_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    own_runs.record_run(FOREIGN, tmp_path)
    assert not own_runs.is_own(FOREIGN)


def test_a_foreign_folder_is_refused_and_ones_own_is_read(tmp_path, state):
    """The class has to exist only where it may be imported."""
    text = parse("simulate", ["--config", "configs/quickstart.yaml"]).config_yaml
    own = text.replace("raafl.data.Digits", "tests.config.test_own_runs.Digits")
    assert own != text
    folder = run_folder(tmp_path, own)
    with pytest.raises(BadInput, match="which is not raafl's own"):
        load_run(folder, trusted=False)
    remember(own, folder)
    assert load_run(folder, trusted=False).data().__class__ is Digits
