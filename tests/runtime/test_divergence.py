"""Runs that diverge say so, in their progress and their summary; with strict they fail."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stdout
from dataclasses import replace

from model_zoo import MLP
from raafl.commands.run import simulate
from raafl.core.types import Settled
from raafl.runfolder import checkpoints as checkpoint
from raafl.runtime.divergence import Divergence
from raafl.watch.show import plain, sentence
from raafl.watch.state import RunState
from tests.federation import Finished, experiment, finish


class Lost(MLP):
    """Its measured loss is no number after the initial model."""

    seen = 0

    def validation_step(self, batch, batch_idx):
        found = super().validation_step(batch, batch_idx)
        type(self).seen += batch_idx == 0
        if self.seen > 1:
            self.log("loss", float("nan"))
        return found


def test_a_loss_that_is_no_number_any_more_is_a_warning_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(Lost, "seen", 0)
    shown = io.StringIO()
    made = experiment(tmp_path / "run", model=lambda: Lost(64, (8,), 10), progress="plain")
    with redirect_stdout(shown):
        run = Finished(*simulate(made))
    (warning,) = [text for text in run.summary["warnings"] if "diverges" in text]
    assert warning.startswith("training diverges: loss is nan at version 1: use a smaller learning rate")
    assert run.summary["finished"] == "max_updates"
    assert f"warning: {warning}" in shown.getvalue() and "  loss nan" in shown.getvalue()


def test_with_strict_it_fails_and_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(Lost, "seen", 0)
    run = finish(replace(experiment(tmp_path / "run", model=lambda: Lost(64, (8,), 10)), strict=True))
    assert run.summary["finished"].startswith("failed: training diverges: loss is nan at version 1")
    assert run.summary["versions"] == 1 and checkpoint.load(run.folder).raafl["finished"] is None


def test_what_diverges_is_said_once():
    said = []
    found = Divergence(said.append, strict=False)
    found.on_evaluate(0, 0.0, {"loss": 2.0, "f1": math.nan})
    found.on_evaluate(1, 1.0, {"loss": 1.0, "f1": math.nan})
    assert said == []
    found.on_evaluate(2, 2.0, {"loss": math.inf, "f1": math.nan})
    found.on_evaluate(3, 3.0, {"loss": math.inf, "f1": math.nan})
    assert len(said) == 1 and "loss is inf at version 2" in said[0]
    for client in (2, 3):
        found.on_settled(Settled(None, client, "refused:non-finite", 3, 0), 3.0)
        found.on_settled(Settled(None, client, "refused:late", 3, 0), 3.0)
    assert len(said) == 2 and "an update of client 2 is not finite" in said[1]
    assert found.stop_asked() is None


def test_a_view_shows_metrics_that_are_no_numbers():
    state = RunState()
    state.metrics({"version": 0, "time_s": 0.0, "loss": 1.0})
    state.metrics({"version": 1, "time_s": 1.0, "loss": "nan", "accuracy": math.inf, "utilisation": 1.0})
    snapshot = state.snapshot()
    assert "loss nan  accuracy inf" in sentence(snapshot)
    assert plain(snapshot)["metrics"] == {"loss": None, "accuracy": None}
