"""The best checkpoint by a metric, beside those that a run is resumed from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from model_zoo import MLP
from raafl.errors import BadInput
from raafl.runfolder.checkpoint_reader import load
from raafl.runtime.lifecycle.best_checkpoint import BestCheckpoint
from raafl.runtime.lifecycle.checkpointer import SavedForm
from raafl.submodel import FlatTensors, Submodels
from tests.helpers.small_runs import experiment, finish


@pytest.fixture
def model():
    return MLP(4, (3,), 2)


def values_of(model, number):
    values = Submodels(model).state(model)
    for buffer in values.buffers.values():
        buffer.fill_(number)
    return values


def keeping(folder, model, metric, saved=None, warnings=None):
    parts = SimpleNamespace(experiment=SimpleNamespace(keep_best=metric))
    progress = SimpleNamespace(warn=(warnings if warnings is not None else []).append)
    run = SimpleNamespace(parts=parts, folder=folder, saved_form=SavedForm(model), progress=progress)
    observer = BestCheckpoint(run)
    observer.begin(run, saved)
    observer.opened()
    return observer


def resumed(version, *, restarts=True, undone=None):
    return SimpleNamespace(restarts=restarts, undone=undone, section={"coordinator": {"version": version}})


def kept(folder):
    saved = load(folder / "checkpoints" / "best.ckpt")
    return saved.version, next(iter(saved.state_dict.values())).flatten()[0].item()


@pytest.mark.parametrize(("metric", "best"), [("accuracy", (3, 3.0)), ("mse", (2, 2.0)), ("gap:min", (2, 2.0))])
def test_the_best_is_kept_and_of_equal_ones_the_first(tmp_path, model, metric, best):
    watcher = keeping(tmp_path, model, metric)
    for version, value in enumerate((0.5, float("nan"), 0.2, 0.7, 0.7, 0.3), start=0):
        watcher.on_values(version, {metric.split(":")[0]: value}, values_of(model, float(version)))
    assert kept(tmp_path) == best and watcher.best["version"] == best[0]


def test_a_resumed_run_goes_on_from_the_one_in_its_folder(tmp_path, model):
    keeping(tmp_path, model, "accuracy").on_values(5, {"accuracy": 0.8}, values_of(model, 5.0))
    again = keeping(tmp_path, model, "accuracy")
    again.on_values(6, {"accuracy": 0.7}, values_of(model, 6.0))
    assert kept(tmp_path) == (5, 5.0)
    by_another = keeping(tmp_path, model, "loss")
    by_another.on_values(7, {"loss": 9.0}, values_of(model, 7.0))
    assert kept(tmp_path) == (7, 7.0)


def test_a_best_version_that_a_restart_has_undone_stays_and_is_said_to_be_no_more(tmp_path, model):
    """On the wall clock version 5 of the resumed run is another model than version 5 before it."""
    first = {"version": 5, "metric": "accuracy", "value": 0.8}
    keeping(tmp_path, model, "accuracy").on_values(5, {"accuracy": 0.8}, values_of(model, 5.0))
    warnings = []
    assert keeping(tmp_path, model, "accuracy", resumed(4, restarts=False), warnings).best == first
    assert keeping(tmp_path, model, "accuracy", resumed(5), warnings).best == first and warnings == []
    again = keeping(tmp_path, model, "accuracy", resumed(4), warnings)
    assert again.best == first | {"rolled_back": True} and kept(tmp_path) == (5, 5.0)
    assert warnings == [
        "checkpoints/best.ckpt is of version 5, which was rolled back: it stays until the accuracy of a later one is as good"
    ]
    again.on_values(5, {"accuracy": 0.7}, values_of(model, 6.0))
    later = keeping(tmp_path, model, "accuracy", resumed(9), warnings)  # a second restart, from a later checkpoint
    assert later.best == again.best == first | {"rolled_back": True} and len(warnings) == 1
    later.on_values(10, {"accuracy": 0.9}, values_of(model, 10.0))
    assert later.best == {"version": 10, "metric": "accuracy", "value": 0.9} and kept(tmp_path) == (10, 10.0)


def test_the_best_version_of_an_end_that_a_simulation_goes_back_behind_is_current_once_it_is_measured_again(
    tmp_path, model
):
    """An end merges what waits, so that its last version may be another model than that of the longer run."""
    first = {"version": 5, "metric": "accuracy", "value": 0.8}
    keeping(tmp_path, model, "accuracy").on_values(5, {"accuracy": 0.8}, values_of(model, 5.0))
    warnings = []
    again = keeping(tmp_path, model, "accuracy", resumed(4, restarts=False, undone=tmp_path / "end"), warnings)
    assert again.best == first | {"rolled_back": True} and warnings == []
    again.on_values(5, {"accuracy": 0.7}, values_of(model, 6.0))
    assert again.best == first | {"rolled_back": True}
    again.on_values(6, {"accuracy": 0.8}, values_of(model, 7.0))
    assert again.best == first | {"version": 6} and kept(tmp_path) == (6, 7.0)


def test_a_run_keeps_the_model_of_its_best_version(tmp_path):
    run = finish(experiment(tmp_path / "run", "fed_async", eval_every=1, keep_best="loss"))
    losses = {int(row["version"]): float(row["loss"]) for row in run.rows("metrics.csv") if row["version"] != "0"}
    version = min(losses, key=losses.get)
    assert run.summary["best"] == {"version": version, "metric": "loss", "value": pytest.approx(losses[version])}
    best = load(run.folder / "checkpoints" / "best.ckpt")
    assert best.version == version
    if version == run.summary["versions"]:
        module = MLP.load_from_checkpoint(best.path, map_location="cpu")
        assert (
            isinstance(Submodels(module).state(module), FlatTensors)
            and run.digest == Submodels(module).state(module).model_digest()
        )
    assert all(torch.isfinite(tensor).all() for tensor in best.state_dict.values())


def test_a_metric_that_there_is_not_is_named_before_the_run(tmp_path):
    with pytest.raises(BadInput, match="keep_best is 'f1', but validation_step gives no 'f1': use one of "):
        finish(experiment(tmp_path / "run", keep_best="f1"))
    assert not (tmp_path / "run").exists()
