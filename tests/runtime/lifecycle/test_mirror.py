"""A run's copy in an object store: whole at the end, good to resume at any time, and of no harm where the store fails."""

from __future__ import annotations

import shutil
import signal
import threading
import uuid
from functools import partialmethod

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raafl.commands.stored_runs import with_local_resume
from raafl.core.hooks import RunHooks
from raafl.errors import BadInput
from raafl.object_store import ObjectStore
from raafl.runfolder.books import check_books
from raafl.runtime.lifecycle.mirror import Mirror, check_store
from raafl.runtime.run import simulate
from tests.helpers.small_runs import experiment, finish


class Flaky(MemoryFileSystem):
    """Fails as often as it is told to; after that it works."""

    protocol = "flaky"
    failures = 0

    def pipe_file(self, path, value, **more):
        if Flaky.failures:
            Flaky.failures -= 1
            raise OSError("the store is away")
        super().pipe_file(path, value, **more)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs are made below this folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["memory", "file"])
def url(request, here):
    return f"memory://{uuid.uuid4()}/run" if request.param == "memory" else f"file://{here}/store/run"


def test_a_store_that_cannot_be_written_is_found_before_any_training_and_leaves_no_run(here):
    (here / "file").touch()
    with pytest.raises(BadInput, match=r"output is 'file://.*/file/run', which cannot be used \(NotADirectoryError: "):
        simulate(experiment(output=f"file://{here}/file/run"))
    assert sorted(path.name for path in here.iterdir()) == ["file"]


def test_a_store_from_which_nothing_can_be_removed_is_bad_input(monkeypatch):
    """A copy of a run sheds its old checkpoints."""
    check_store(f"memory://{uuid.uuid4()}/run")
    monkeypatch.setattr(MemoryFileSystem, "rm", lambda *_, **__: (_ for _ in ()).throw(PermissionError("denied")))
    with pytest.raises(BadInput, match=r"which cannot be used \(PermissionError: denied\): check the URL, the cred"):
        check_store(f"memory://{uuid.uuid4()}/run")


class StopAfter(RunHooks):
    def __init__(self, updates):
        self.left = updates

    def on_settled(self, settled, now):
        self.left -= 1

    def stop_asked(self):
        return "interrupted" if self.left <= 0 else None


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_was_interrupted_goes_on_from_its_copy_to_the_same_model(url, here):
    whole, _ = simulate(experiment(here / "plain", "fed_async"))
    summary, folder = simulate(experiment(url, "fed_async", checkpoint_every=2), observer=StopAfter(6))
    assert folder.parent.name == "runs" and summary["finished"] == "interrupted"
    assert summary["mirror"] == {"url": url, "whole": True, "failed": 0, "error": None}
    ObjectStore(url).fetch(here / "copy")
    assert contents(here / "copy") == contents(folder)
    shutil.rmtree(folder)  # the machine is gone
    *_, resume, brought = with_local_resume(["--config", "c", "--output", url, "--resume", "auto"])
    assert resume == "--resume"
    run = finish(experiment(url, "fed_async", checkpoint_every=2, resume=brought))
    assert run.digest == whole["model_digest"]
    ObjectStore(url).fetch(here / "end")
    assert contents(here / "end") == contents(run.folder)  # no checkpoint of before is left
    assert check_books(here / "end").findings == []


def test_a_store_that_fails_for_a_while_is_tried_again_and_the_summary_says_so(tmp_path):
    (tmp_path / "events.jsonl").write_text("{}\n")
    store, said = ObjectStore(f"flaky://{uuid.uuid4()}"), []
    mirror = Mirror(tmp_path, store, said.append, first_wait_s=0.001)
    Flaky.failures = 3
    whole = mirror.finish()
    mirror.close()
    assert whole and store.names() == ["events.jsonl", "seals.jsonl"]
    assert mirror.report(whole) == {
        "url": store.url,
        "whole": True,
        "failed": 3,
        "error": "OSError: the store is away",
    }
    assert said == [
        f"{store.url} cannot be written (OSError: the store is away); the run goes on, and raafl tries again"
    ]


def test_a_store_that_fails_for_good_after_the_start_ends_no_run(here, monkeypatch):
    monkeypatch.setattr(Mirror, "finish", partialmethod(Mirror.finish, failing_s=0.05))
    url = f"flaky://{uuid.uuid4()}/run"
    summary, folder = simulate(experiment(url, "fed_avg"), observer=FailsFromNowOn())
    assert summary["finished"] == "max_updates" and (folder / "summary.json").is_file()
    assert summary["mirror"]["whole"] is False and summary["mirror"]["failed"] > 0
    assert summary["warnings"] == [
        f"{url} cannot be written (OSError: the store is away); the run goes on, and raafl tries again",
        f"{url} lacks files of {folder} (OSError: the store is away): copy the folder there by hand",
    ]


class FailsFromNowOn(RunHooks):
    def on_settled(self, settled, now):
        Flaky.failures = 10**9


def test_an_attempt_of_which_nothing_is_heard_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "events.jsonl").write_text("{}\n")
    released, said = threading.Event(), []
    monkeypatch.setattr(ObjectStore, "put", lambda *_: released.wait(30))
    mirror = Mirror(tmp_path, ObjectStore(f"memory://{uuid.uuid4()}"), said.append)
    assert not mirror.finish(silent_s=0.1)
    released.set()
    mirror.close()
    assert said and "it has not answered for 0.1 s" in said[0]


def test_ctrl_c_ends_the_wait_for_a_store_and_the_summary_is_written(here, monkeypatch):
    """What is waited for is said after some seconds; a second Ctrl-C would end the process without a summary."""
    released = threading.Event()
    monkeypatch.setattr("raafl.runtime.lifecycle.mirror._SAID_S", 0.1)
    monkeypatch.setattr(ObjectStore, "put", lambda *_: released.wait(30))
    noted = []

    def note(self, text):
        noted.append(text)
        if text.startswith("waiting until"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("raafl.log.Notices.note", note)
    url = f"memory://{uuid.uuid4()}/run"
    try:
        summary, folder = simulate(experiment(url, "fed_avg"))
    finally:
        released.set()
    assert noted[-1] == f"waiting until {url} has all files; Ctrl-C ends the wait"
    assert summary["finished"] == "max_updates" and (folder / "summary.json").is_file()
    assert summary["mirror"] == {"url": url, "whole": False, "failed": 0, "error": None}
    (warning,) = summary["warnings"]
    assert warning == f"{url} lacks files of {folder} (Ctrl-C ended the wait): copy the folder there by hand"


def test_a_copy_with_a_checkpoint_has_the_journal_that_leads_to_it(tmp_path):
    """The order of what is sent: it may be cut off after any file."""
    for name in (
        "checkpoints/version-000001.ckpt",
        "events.jsonl",
        "config.yaml",
        "seals.jsonl",
        "loggers/x/log",
        "loggers/runs.json",
        ".a.tmp",
        ".model.new-7.tmp/model.safetensors",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    sent = []

    class Noting(ObjectStore):
        def put(self, file, name, moved=lambda: None):
            sent.append(name)

        def write(self, data, name):
            sent.append(name)

    mirror = Mirror(tmp_path, Noting(f"memory://{uuid.uuid4()}"))
    assert mirror.finish()
    (tmp_path / "config.yaml").write_text("changed")
    assert mirror.finish()
    mirror.close()
    # by the ids in runs.json a run that is resumed from the copy goes on in the same run of W&B
    assert sent.index("loggers/runs.json") < sent.index("seals.jsonl")
    sent.remove("loggers/runs.json")
    first = ["events.jsonl", "config.yaml", "checkpoints/version-000001.ckpt", "seals.jsonl"]
    assert sent == [*first, "config.yaml", "seals.jsonl"]


def test_a_file_that_goes_while_it_is_copied_is_no_failure_of_the_store(tmp_path):
    """A checkpoint is deleted after a newer one was written, whether or not it is being copied."""
    for name in ("events.jsonl", "checkpoints/version-000001.ckpt", "model/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    class Slow(ObjectStore):
        def put(self, file, name, moved=lambda: None):
            if name != "events.jsonl":
                file.unlink()
            super().put(file, name, moved)

    said = []
    mirror = Mirror(tmp_path, Slow(f"memory://{uuid.uuid4()}"), said.append)
    assert mirror.finish()
    mirror.close()
    assert not said and mirror.num_failed == 0
