"""Commands that are given the URL of a run, and `--resume auto`."""

from __future__ import annotations

import json
import tempfile
import uuid

import pytest

from raafl.commands.cli import main
from raafl.commands.stored_runs import run_folder, with_local_resume
from raafl.errors import BadInput
from raafl.object_store import ObjectStore
from raafl.runfolder.journal import RunFolder


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4()}/run 1"


@pytest.fixture(autouse=True)
def copies(tmp_path_factory, monkeypatch):
    """Copies of runs lie among the tests' folders: a command deletes its own when its process ends, which is this one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("copies")))


def test_a_run_in_a_store_is_watched_reported_replayed_and_audited(run, url, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("--output", url)
    assert code == 0, err
    assert main(["watch", url, "--once", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["state"] == "finished" and seen["books"] == "books: unsigned"
    assert main(["replay", url, "--json"]) == 0 and json.loads(capsys.readouterr().out)["equal"] is True
    assert main(["audit", url, "--books_only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert main(["report", url, "--output", str(tmp_path / "page.html")]) == 0
    assert main(["watch", url]) == 2 and "a URL, which can only be read once: add --once" in capsys.readouterr().err
    code, _, err = run("--output", url)
    assert code == 2 and f"output is '{url}', which is not empty: name another path in the object store" in err


def test_resume_auto_starts_a_run_goes_on_with_it_or_sets_aside_what_has_no_checkpoint(tmp_path, url, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for output, make in ((str(tmp_path / "run"), _in_folder), (url, _in_store)):
        argv = ["--config", "c", "--resume", "auto", "--output", output]
        rest = ["--config", "c", "--output", output]
        assert with_local_resume(argv) == rest
        make(output, "events.jsonl")
        assert with_local_resume(argv) == rest
        assert with_local_resume(argv) == rest  # there is nothing any more
        make(output, "checkpoints/version-000003.ckpt")
        *first, option, folder = with_local_resume(argv)
        assert (first, option) == (rest, "--resume")
        assert folder == (output if output != url else folder) and (tmp_path / folder / "checkpoints").is_dir()
    assert len(list(tmp_path.glob("run-*"))) == 1
    (aside,) = {path.split("/")[2] for path in ObjectStore(url.rpartition("/")[0])._files.find("/") if "run 1-" in path}
    assert aside.startswith("run 1-")


def test_resume_auto_leaves_a_run_alone_that_has_begun_and_has_no_checkpoint_yet(tmp_path):
    output = tmp_path / "run"
    argv = ["--config", "c", "--resume", "auto", "--output", str(output)]
    with RunFolder(output, ""):
        with pytest.raises(BadInput, match=r"output is '.*run', where another process is writing its run"):
            with_local_resume(argv)
        assert list(tmp_path.iterdir()) == [output]
    assert "--resume" not in with_local_resume(argv) and not output.exists()


def _in_folder(output, name):
    from pathlib import Path

    (Path(output) / name).parent.mkdir(parents=True, exist_ok=True)
    (Path(output) / name).touch()


def _in_store(output, name):
    ObjectStore(output).write(b"", name)


def test_what_is_resumed_from_a_store_goes_back_there(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _in_store(url, "checkpoints/version-000003.ckpt")
    resume, folder, output, where = with_local_resume(["--resume", url])
    assert (resume, output, where) == ("--resume", "--output", url) and folder.startswith("runs/run_1-")
    assert with_local_resume([f"--resume={url}", "--output=other"])[0] == "--output=other"
    assert with_local_resume(["--resume", "runs/x"]) == ["--resume", "runs/x"]
    monkeypatch.setenv("RANK", "1")
    assert with_local_resume(["--resume", url, "--seed", "1"]) == ["--seed", "1"]


def test_where_there_is_no_run_it_is_said(url):
    for argv in (["--config", "c"], ["--output", "o"]):
        with pytest.raises(
            BadInput, match="resume is auto, which may have to start a new run: give --config and --output too"
        ):
            with_local_resume([*argv, "--resume", "auto"])
    with pytest.raises(BadInput, match="but there is no run with a checkpoint"):
        with_local_resume(["--resume", url])
    with pytest.raises(BadInput, match="but there is no run: give the URL of a run's folder"):
        run_folder(url)
