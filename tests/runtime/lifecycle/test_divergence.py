"""Runs that diverge say so, in their progress and their summary; with strict they fail."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stdout
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from model_zoo import MLP
from raafl.core.algorithm import Training
from raafl.core.types import Settled, Update
from raafl.data import Digits, Iid
from raafl.data.federated import FederatedData
from raafl.runfolder import checkpoint_reader
from raafl.runtime.lifecycle.divergence import Divergence, fault_in, first_not_finite
from raafl.runtime.run import simulate
from raafl.submodel import FlatTensors, Layout
from raafl.watch.progress import evaluation, plain
from raafl.watch.state import RunState
from tests.helpers.small_runs import Finished, experiment, finish

NUM_MEASURED = [0]


class Lost(MLP):
    """Its measured loss is no number after the initial model."""

    def validation_step(self, batch, batch_idx):
        found = super().validation_step(batch, batch_idx)
        NUM_MEASURED[0] += batch_idx == 0
        if NUM_MEASURED[0] > 1:
            self.log("loss", float("nan"))
        return found


def test_a_loss_that_is_no_number_any_more_is_a_warning_and_shown(tmp_path, monkeypatch):
    NUM_MEASURED[0] = 0
    shown = io.StringIO()
    made = experiment(tmp_path / "run", model=lambda: Lost(64, (8,), 10), progress="plain")
    with redirect_stdout(shown):
        run = Finished(*simulate(made))
    (warning,) = [text for text in run.summary["warnings"] if "diverges" in text]
    assert warning.startswith("training diverges: loss is nan at version 1: use a smaller learning rate")
    assert run.summary["finished"] == "max_updates"
    assert f"warning: {warning}" in shown.getvalue() and "  loss nan" in shown.getvalue()


def test_with_strict_it_fails_and_can_be_resumed(tmp_path, monkeypatch):
    NUM_MEASURED[0] = 0
    run = finish(replace(experiment(tmp_path / "run", model=lambda: Lost(64, (8,), 10)), strict=True))
    assert run.summary["finished"].startswith("failed: training diverges: loss is nan at version 1")
    assert run.summary["versions"] == 1 and checkpoint_reader.load(run.folder).raafl["finished"] is None


def watching(said, *, strict):
    roster = SimpleNamespace(find=lambda client: SimpleNamespace(own_data=True))
    parts = SimpleNamespace(
        experiment=SimpleNamespace(strict=strict), coordinator=SimpleNamespace(roster=roster), data=None
    )
    return Divergence(SimpleNamespace(progress=SimpleNamespace(warn=said.append), parts=parts))


def test_what_diverges_is_said_once():
    said = []
    found = watching(said, strict=False)
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


def test_logged_values_that_are_left_out_are_named_once_and_end_no_run():
    said = []
    found = watching(said, strict=True)
    for client, metrics in ((1, {"loss": math.nan, "f1": 0.5}), (2, {"f1": math.nan}), (1, {"f1": -math.inf})):
        update = Update(client, client, 0, FlatTensors.empty(Layout(())), 8, metrics=metrics)
        found.on_settled(Settled(None, client, "merged", 3, 0, update), 3.0)
    assert said == ["client 2: training_step logs values that are not recorded, 'f1' is nan: log finite numbers"]
    assert found.stop_asked() is None


def test_updates_that_are_far_too_large_are_divergence_only_of_several_clients():
    said = []
    found = watching(said, strict=True)
    for client, outcome in ((1, "refused:huge-norm"), (1, "refused:overflow"), (1, "merged"), (2, "refused:huge-norm")):
        found.on_settled(Settled(None, client, outcome, 3, 0), 3.0)
    assert said == [] and found.stop_asked() is None
    for client in (1, 3):
        found.on_settled(Settled(None, client, "refused:overflow", 4, 0), 4.0)
    assert len(said) == 1 and said[0].startswith(
        "training diverges: updates of clients 1 and 2 are many times as large"
    )
    assert found.stop_asked().startswith("failed: training diverges")


def test_a_view_shows_metrics_that_are_no_numbers():
    state = RunState()
    state.metrics({"version": 0, "time_s": 0.0, "loss": 1.0})
    state.metrics({"version": 1, "time_s": 1.0, "loss": "nan", "accuracy": math.inf, "utilisation": 1.0})
    snapshot = state.snapshot()
    assert "loss nan  accuracy inf" in evaluation(snapshot)
    assert plain(snapshot)["metrics"] == {"loss": None, "accuracy": None}


class Spoilt(Digits):
    """Row 7 of the training set, or of the test set, has a value that is no number."""

    def __init__(self, part):
        super().__init__(batch_size=64)
        self.part = part

    def setup(self, stage=None):
        super().setup(stage)
        getattr(self, self.part).tensors[0][7, 0, 3, 3] = math.nan


@pytest.mark.parametrize(
    ("part", "begins", "names"),
    [
        (
            "train",
            "an update of client ",
            "its data has NaN or an infinity, first in row 7 of the training set: correct it",
        ),
        (
            "test",
            "loss is nan",
            "at the start: row 7 of the test set has NaN or an infinity: correct it, or leave it out",
        ),
    ],
)
def test_nan_in_the_data_is_said_as_such(tmp_path, part, begins, names):
    length = {"num_epochs": 1, "num_steps": None}
    run = finish(experiment(tmp_path / "run", data=lambda: Spoilt(part), max_updates=4, train=Training(**length)))
    (warning,) = [text for text in run.summary["warnings"] if "NaN" in text]
    assert warning.startswith(begins) and names in warning
    assert not any("learning rate" in text for text in run.summary["warnings"])


def test_the_sample_is_named_where_tensors_show_it_else_the_batch():
    x = torch.zeros(6, 2)
    x[4, 1] = math.inf
    rows = [(batch, 3) for batch in x.split(3)]
    assert first_not_finite(rows) == 4 and first_not_finite(rows[:1]) is None
    assert first_not_finite([({"x": batch.t(), "name": "a"}, num) for batch, num in rows]) == 3
    images = torch.zeros(3, 2, 4, 5)
    images[2, 1] = math.nan
    assert first_not_finite([(images.permute(0, 2, 3, 1), 3)]) == 2


def test_data_that_cannot_be_read_again_ends_no_run():
    data = FederatedData(Spoilt("train"), Iid(), 2)
    assert fault_in(data, 1) == "row 7 of the training set" or fault_in(data, 2) == "row 7 of the training set"
    data.datamodule.train.tensors = ()  # as a file that is gone
    assert fault_in(data, 1) is None and fault_in(data, 3) is None
