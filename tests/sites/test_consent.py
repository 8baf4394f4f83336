"""A person at the site is asked at the terminal, or by a request in a folder; no answer is a no."""

from __future__ import annotations

import io
import json
import os
import threading
import time

import pytest

from raafl.sites import gate as consents
from raafl.sites.gate import Consents
from raafl.sites.policy import Consent


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(consents, "_LOOK_S", 0.005)


def reviewed(folder, answer, **more):
    """Ask, while a reviewer answers the first request that comes."""

    def review():
        while not (found := list(folder.glob("*.json"))):
            time.sleep(0.002)
        seen.append(json.loads(found[0].read_text()))
        if answer:
            found[0].with_suffix(f".{answer}").touch()

    seen = []
    thread = threading.Thread(target=review)
    thread.start()
    given = Consents(Consent("spool", folder=str(folder), wait_s=more.get("wait_s", 30.0))).given(
        "run", {"model": "MLP"}
    )
    thread.join()
    return given, seen[0]


@pytest.mark.parametrize(("answer", "consented"), [("yes", True), ("no", False)])
def test_a_reviewer_answers_by_a_file(tmp_path, answer, consented):
    folder = tmp_path / "new" / "spool"
    folder.parent.mkdir()
    Consents(Consent("spool", folder=str(folder)))
    assert reviewed(folder, answer) == (consented, {"asks": "consent to this run", "model": "MLP"})
    assert [file.name for file in folder.iterdir()] == ["answers.jsonl"]
    (row,) = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert (row["answer"], row["model"]) == (answer, "MLP")


def test_no_answer_in_time_is_a_no(tmp_path, caplog):
    caplog.set_level("INFO", "raafl.sites.gate")
    assert reviewed(tmp_path, None, wait_s=0.2)[0] is False
    (line,) = caplog.messages
    assert line.startswith(f"waiting up to 0.2 s for consent to this run: answer '{tmp_path}{os.sep}")
    assert line.endswith(".no beside it")
    assert json.loads((tmp_path / "answers.jsonl").read_text())["answer"] == "none"


def test_an_answer_that_is_no_longer_wanted_is_not_waited_for(tmp_path):
    asked = Consents(Consent("spool", every="task", folder=str(tmp_path), wait_s=60.0), lambda: True)
    assert asked.given("task", {}) is False


def test_a_folder_that_cannot_be_used_is_a_no_and_is_said_once_until_it_works_again(tmp_path, caplog):
    folder = tmp_path / "spool"
    asked = Consents(Consent("spool", every="task", folder=str(folder), wait_s=0.01))
    said = (
        f"policy.consent.folder is '{folder}', in which no file can be written (No such file or directory): make room, or "
        "create the folder again; until then nobody consents"
    )
    for times in (1, 2):
        folder.rmdir()
        assert not asked.given("task", {}) and not asked.given("task", {})
        warnings = [row for row in caplog.records if row.levelname == "WARNING"]
        assert [(row.message, row.private) for row in warnings] == [(said, True)] * times
        folder.mkdir()
        assert not asked.given("task", {})
        (folder / "answers.jsonl").unlink()


def test_a_consent_that_cannot_be_recorded_is_none(tmp_path):
    (tmp_path / "answers.jsonl").mkdir()
    assert reviewed(tmp_path, "yes")[0] is False
    assert [file.name for file in tmp_path.iterdir()] == ["answers.jsonl"]  # no request or answer is left


def test_what_needs_no_consent_is_not_asked(tmp_path):
    assert Consents(None).given("run", {})
    asked = Consents(Consent("spool", every="update", folder=str(tmp_path), wait_s=0.01))
    assert asked.given("run", {}) and asked.given("task", {}) and not asked.given("update", {})


@pytest.mark.parametrize(
    ("line", "consented"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("yesss\n", False)]
)
def test_at_the_terminal_only_yes_is_yes(monkeypatch, capsys, line, consented):
    theirs, ours = os.pipe()
    os.write(ours, line.encode())
    os.close(ours)
    with open(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        assert Consents(Consent("ask", wait_s=30.0)).given("run", {"model": "MLP"}) is consented
    assert capsys.readouterr().err == "  asks: consent to this run\n  model: MLP\nConsent? [y/N] "


def test_nobody_at_the_terminal_is_a_no(monkeypatch):
    theirs, ours = os.pipe()
    with open(theirs) as terminal, open(ours, "w"):
        monkeypatch.setattr("sys.stdin", terminal)
        assert Consents(Consent("ask", wait_s=0.05)).given("run", {}) is False
    monkeypatch.setattr("sys.stdin", io.StringIO())
