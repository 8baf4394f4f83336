"""Runs in which the user's code fails: one line that says where, a traceback, a checkpoint to go on from, exit code 1."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import raafl
from model_zoo import MLP
from raafl.commands.cli import main
from raafl.config.experiment import Experiment
from raafl.core.algorithm import Training
from raafl.core.hooks import RunHooks
from raafl.errors import BadInput
from raafl.log import in_notebook
from raafl.runfolder import checkpoint_reader
from raafl.runfolder.books import check_books
from raafl.runfolder.journal import RunFolder
from raafl.runtime.run import Run, simulate
from tests.helpers.small_runs import Finished, digits, equal_replay, experiment, finish, small_mlp, unequal

TRAIN = Training(num_epochs=1, num_steps=None)


class OneBadLabel(MLP):
    """Meets a label that there is not, of the sample whose pixels ``bad`` holds."""

    bad = torch.full((1, 64), -1.0)  # there is none

    def training_step(self, batch, batch_idx):
        images, labels = batch
        wrong = (images.flatten(1) == self.bad).all(dim=1)
        labels = torch.where(wrong, torch.full_like(labels, 12), labels)
        return super().training_step((images, labels), batch_idx)


LINE = 1 + Path(__file__).read_text().splitlines().index(
    "        return super().training_step((images, labels), batch_idx)"
)


def model():
    return OneBadLabel(64, (24,), 10, lr=0.05, momentum=0.5)


@pytest.fixture
def bad_label(monkeypatch, tmp_path):
    """Spoil the label of one sample of client 3's."""
    made = experiment(tmp_path / "unused", train=TRAIN)
    from raafl.runtime.setup import load_data

    ((batch, _), *_) = load_data(made).client(3).in_order(64)
    monkeypatch.setattr(OneBadLabel, "bad", batch[0][-1:].flatten(1))


def bad(folder, **more) -> Experiment:
    return experiment(folder, model=model, train=TRAIN, max_updates=60, **more)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_bad_label_ends_a_simulation_with_a_line_a_traceback_and_a_checkpoint(tmp_path, bad_label, workers):
    run = finish(bad(tmp_path / "run", workers=workers))
    reason = run.summary["finished"]
    assert reason.startswith("failed: client 3, task 0, submodel full, batch ")
    assert "IndexError: Target 12 is out of bounds." in reason and "\n" not in reason
    assert "(model_zoo/classifier.py:" in reason  # the innermost that is no library's
    told = run.text(run.summary["traceback"])
    assert f'test_failed_runs.py", line {LINE}' in told and told.startswith(reason)
    assert checkpoint_reader.load(run.folder).raafl["finished"] is None
    assert run.summary["updates_merged"] < 60


def test_workers_fail_at_the_same_event(tmp_path, bad_label):
    one, three = (finish(bad(tmp_path / f"{n}", algorithm="fed_async", workers=n)) for n in (1, 3))
    assert one.summary["finished"] == three.summary["finished"] and one.digest == three.digest
    assert one.text("events.jsonl") == three.text("events.jsonl")


@pytest.mark.long("tests/runtime/test_run.py::test_a_run_that_ended_otherwise_goes_on_as_if_it_had_not")
def test_a_mended_run_goes_on_as_if_nothing_had_failed(tmp_path, bad_label, monkeypatch):
    failed = finish(bad(tmp_path / "run", algorithm="fed_async"))
    assert failed.summary["updates_merged"] > 0
    monkeypatch.setattr(OneBadLabel, "bad", torch.full((1, 64), -1.0))
    resumed = Finished(*simulate(bad(None, algorithm="fed_async", resume=str(failed.folder))))
    whole = finish(bad(tmp_path / "whole", algorithm="fed_async"))
    assert resumed.summary["finished"] == "max_updates" and resumed.digest == whole.digest
    assert resumed.rows() == whole.rows()


@pytest.mark.parametrize("kind", ["FailsAtOnce", "ExitsAtOnce"])
def test_the_command_line_says_it_in_one_line(tmp_path, capsys, kind):
    config = [f"--model={__name__}.{kind}", "--model.in_features=64", "--model.hidden=[8]"]
    code = main(["simulate", "--config", "quickstart", *config, "--json", "--output", str(tmp_path / "run")])
    out, err = capsys.readouterr()
    assert code == 1 and json.loads(out)["finished"].startswith("failed: client ")
    assert [line for line in err.splitlines() if line.startswith("raafl: client")] == [
        f"raafl: {json.loads(out)['finished'].removeprefix('failed: ')}; the traceback is in {tmp_path / 'run' / 'failure.txt'}"
    ]


class FailsAtOnce(MLP):
    """Fails in the first training step after the trial before the run."""

    def training_step(self, batch, batch_idx):
        if len(batch[1]) > 2:
            self.fail()
        return super().training_step(batch, batch_idx)

    def fail(self):
        raise ValueError("what\nis this?")


class ExitsAtOnce(FailsAtOnce):
    """Would end the process with the exit code of a client that was replaced."""

    def fail(self):
        sys.exit(3)


@pytest.mark.parametrize("workers", [1, 2])
def test_python_raises_run_failed_with_the_users_traceback(tmp_path, bad_label, workers):
    settings = {"max_updates": 60, "num_epochs": 1, "progress": "quiet", "output": tmp_path / "run", "workers": workers}
    with pytest.raises(raafl.RunFailed, match=r"client 3, task 0, .* \(run folder: ") as raised:
        raafl.Federation("fed_avg", devices=unequal(), **settings).simulate(model, digits())
    cause = raised.value.__cause__  # the error itself, or from another process what it left as text
    assert type(cause) is IndexError or f"line {LINE}" in cause.__notes__[0]


@pytest.mark.parametrize(("how", "ends_script"), [(None, True), ("raise", True), ("return", False)])
def test_ctrl_c_ends_a_script_of_several_runs_unless_it_asks_for_the_result(tmp_path, how, ends_script):
    ctrl_c = raafl.LambdaCallback(on_version=lambda run, version: signal.raise_signal(signal.SIGINT))
    settings = {"max_updates": 8, "num_steps": 1, "progress": "quiet", "on_interrupt": how, "callbacks": ctrl_c}
    started = []
    try:
        for place in ("first", "second"):
            started.append(place)
            fed = raafl.Federation("fed_avg", devices=unequal(), output=tmp_path / place, **settings)
            assert fed.simulate(small_mlp, digits()).summary["finished"] == "interrupted"
        assert not ends_script
    except KeyboardInterrupt:
        assert ends_script
    assert started == (["first"] if ends_script else ["first", "second"])
    assert json.loads((tmp_path / "first" / "summary.json").read_text())["finished"] == "interrupted"


def test_in_a_notebook_ctrl_c_returns_what_there_is(monkeypatch):
    assert not in_notebook()
    for shell, notebook in ((SimpleNamespace(), False), (SimpleNamespace(kernel=object()), True), (None, False)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert in_notebook() is notebook
        assert raafl.Federation()._raises() is not notebook
    with pytest.raises(BadInput, match="on_interrupt is 'ignore': give 'raise' or 'return'"):
        raafl.Federation(on_interrupt="ignore")


NUM_VALIDATED = [0]


class FailsToValidate(MLP):
    """Fails in the third evaluation."""

    def validation_step(self, batch, batch_idx):
        NUM_VALIDATED[0] += batch_idx == 0
        if NUM_VALIDATED[0] >= 3:
            raise ZeroDivisionError("no share")
        return super().validation_step(batch, batch_idx)


def test_an_evaluation_that_fails_ends_a_simulation_as_a_task_does(tmp_path, monkeypatch):
    NUM_VALIDATED[0] = 0
    run = finish(experiment(tmp_path / "run", model=lambda: FailsToValidate(64, (8,), 10), eval_every=1))
    assert run.summary["finished"].startswith(
        "failed: evaluation of the global model at version 2: ZeroDivisionError: no share (tests/"
    )
    assert "in validation_step" in run.text("failure.txt")
    assert checkpoint_reader.load(run.folder).raafl["finished"] is None and run.summary["versions"] == 2


def test_a_resumed_run_repeats_the_evaluation_that_failed(tmp_path):
    made = {"model": lambda: FailsToValidate(64, (8,), 10), "algorithm": "fed_async", "eval_every": 1}
    NUM_VALIDATED[0] = 0
    failed = finish(experiment(tmp_path / "run", **made))
    NUM_VALIDATED[0] = 1  # the run tries a batch first
    again = Finished(*simulate(experiment(None, **made, resume=str(failed.folder))))
    assert again.summary["finished"] == failed.summary["finished"]
    NUM_VALIDATED[0] = -100
    resumed = Finished(*simulate(experiment(None, **made, resume=str(failed.folder))))
    whole = finish(experiment(tmp_path / "whole", **made))
    assert resumed.summary["finished"] == "max_updates" and resumed.digest == whole.digest
    measured, expected = ([{**row, "wall_s": None} for row in run.rows("metrics.csv")] for run in (resumed, whole))
    assert measured == expected and [row["version"] for row in measured] == [str(version) for version in range(13)]
    assert resumed.rows() == whole.rows()


def test_a_run_whose_last_evaluation_failed_makes_it_when_it_is_resumed_and_then_ends(tmp_path):
    made = {"model": lambda: FailsToValidate(64, (8,), 10), "algorithm": "fed_async", "eval_every": 100}
    NUM_VALIDATED[0] = 1  # the third evaluation is the one at the end
    failed = finish(experiment(tmp_path / "run", **made))
    assert failed.summary["finished"].startswith("failed: evaluation of the global model at version 12: ZeroDivision")
    assert checkpoint_reader.load(failed.folder).raafl["finished"] == "max_updates"
    NUM_VALIDATED[0] = 1
    again = Finished(*simulate(experiment(None, **made, resume=str(failed.folder))))
    assert again.summary["finished"] == failed.summary["finished"]
    NUM_VALIDATED[0] = -100
    # limits do not matter any more
    resumed = Finished(*simulate(experiment(None, **made, resume=str(failed.folder), max_time=1e-3)))
    whole = finish(experiment(tmp_path / "whole", **made))
    assert resumed.summary["finished"] == "max_updates" and resumed.digest == whole.digest
    assert resumed.summary["model"] == "checkpoints/version-000012.ckpt"
    measured, expected = ([{**row, "wall_s": None} for row in run.rows("metrics.csv")] for run in (resumed, whole))
    assert measured == expected and resumed.rows() == whole.rows()
    assert not check_books(resumed.folder).findings and equal_replay(experiment(None, **made), resumed)
    with pytest.raises(BadInput, match="whose run is finished"):
        simulate(experiment(None, **made, resume=str(resumed.folder)))


class Stops(RunHooks):
    """Observer that stops a run once its model has version 4."""

    version = 0

    def on_merged(self, version, now, seconds):
        self.version = version

    def stop_asked(self):
        return "stopped: enough" if self.version == 4 else None


class Killed(Exception):
    """Stands for the death of a process after the last checkpoint of its run, and before the summary."""


def killed(run, *_):
    run.saver.wait()
    raise Killed


def test_a_run_that_was_killed_before_its_end_was_sealed_is_resumed(tmp_path, monkeypatch):
    """It could not go on, and an audit of it told for ever that seals were removed."""
    made, seal = {"algorithm": "fed_async"}, RunFolder.seal

    def until_the_end(writer, *given, final=False):
        if final:
            raise Killed
        seal(writer, *given)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "seal", until_the_end)
        with pytest.raises(Killed):
            simulate(experiment(tmp_path / "run", **made))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"] == "max_updates" and check_books(tmp_path / "run").findings
    resumed = Finished(*simulate(experiment(None, **made, resume=str(tmp_path / "run"))))
    assert resumed.digest == summary["model_digest"] and not check_books(resumed.folder).findings
    with pytest.raises(BadInput, match="whose run is finished"):
        simulate(experiment(None, **made, resume=str(resumed.folder)))


def test_a_stopped_run_that_was_resumed_and_killed_at_its_end_is_resumed_once_more(tmp_path, monkeypatch):
    made = {"algorithm": "fed_async", "checkpoint_every": 1}
    stopped = Finished(*simulate(experiment(tmp_path / "run", **made), observer=Stops()))
    assert stopped.summary["finished"] == "stopped: enough"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", killed)
        with pytest.raises(Killed):
            simulate(experiment(None, **made, resume=str(stopped.folder)))
    assert checkpoint_reader.load(stopped.folder).raafl["finished"] == "max_updates"
    resumed = Finished(*simulate(experiment(None, **made, resume=str(stopped.folder))))
    assert resumed.summary["finished"] == "max_updates"
    assert resumed.digest == finish(experiment(tmp_path / "whole", **made)).digest
