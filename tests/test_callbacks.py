"""Callbacks are told what happens in its order, add metrics, and end a run in either runtime; one that raises is named."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from lightning import LightningDataModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

import raafl
from raafl.api.callbacks import CallbackHooks
from raafl.errors import BadInput, RunFailed
from raafl.runtime.run import simulate
from raafl.submodel.nested_batch import moved as moved_to
from tests.helpers.small_runs import digits, experiment, small_mlp, unequal
from tests.test_federation_api import Steps


class Log(raafl.Callback):
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def on_start(self, run):
        self.told.append(("start", run.resumed))

    def on_client_joined(self, run, client):
        self.told.append(("joined", client))

    def on_client_lost(self, run, client, reason):
        self.told.append(("lost", client, reason))

    def on_update_merged(self, run, update):
        self.told.append(("merged", update.version, update.client, update.staleness))

    def on_version(self, run, version):
        assert run.version == version
        self.told.append(("version", version))

    def on_evaluate(self, run, metrics):
        self.told.append(("evaluate", run.version))

    def on_end(self, run, summary):
        self.told.append(("end", summary["finished"]))

    def state_dict(self):
        return {"num": len(self.told)}

    def load_state_dict(self, state):
        self.told.append(("loaded", state["num"]))

    def of(self, *kinds):
        return [told for told in self.told if told[0] in kinds]


def federation(folder, *callbacks, algorithm="fed_avg", **settings):
    settings = {"max_updates": 12, "num_steps": 3, "progress": "quiet", "output": folder, **settings}
    return raafl.Federation(algorithm, devices=unequal(), callbacks=callbacks, **settings)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_callbacks_are_told_what_happens_in_its_order(tmp_path):
    log = Log()
    result = federation(tmp_path / "run", log, eval_every=2).simulate(small_mlp, digits())
    assert log.told[:2] == [("start", False), ("evaluate", 0)]
    assert log.of("joined") == [("joined", client) for client in (1, 2, 3, 4)]
    # FedAvg: one update of each client to a version, none of them stale
    assert log.of("merged", "version") == [
        told
        for version in (1, 2, 3)
        for told in (*(("merged", version, client, 0) for client in (1, 2, 3, 4)), ("version", version))
    ]
    assert log.of("evaluate") == [("evaluate", 0), ("evaluate", 2), ("evaluate", 3)]
    assert log.told.index(("version", 2)) < log.told.index(("evaluate", 2))
    assert log.told[-1] == ("end", "max_updates")
    assert result.summary["updates_merged"] == 12


def test_who_goes_and_comes_back_is_told_of(tmp_path):
    log = Log()
    devices = [*unequal((8e7, 5e7)), *unequal((3e7,), availability=((0.0, 0.3), (0.6, 1e9)))]
    fed = raafl.Federation(
        "fed_async",
        devices=devices,
        callbacks=log,
        num_steps=3,
        max_time=2.0,
        progress="quiet",
        output=tmp_path / "run",
    )
    fed.simulate(small_mlp, digits())
    assert log.of("joined", "lost") == [
        *(("joined", client) for client in (1, 2, 3)),
        ("lost", 3, "unavailable"),
        ("joined", 3),
    ]


def test_metrics_of_callbacks_are_recorded_and_may_be_targets(tmp_path):
    class Half(raafl.Callback):
        def on_evaluate(self, run, metrics):
            metrics["half"] = metrics["accuracy"] / 2
            return {"constant": 1}

    def twice(run, metrics):
        return {"whole": 2 * metrics["half"]}  # of the callback before it

    fed = federation(tmp_path / "run", Half(), raafl.LambdaCallback(on_evaluate=twice), target="constant>=1")
    result = fed.simulate(small_mlp, digits())
    assert result.summary["finished"] == "target"
    assert all(row["whole"] == row["accuracy"] and row["constant"] == 1 for row in result.metrics)
    assert result.final["half"] == result.final["accuracy"] / 2


@pytest.mark.parametrize(("value", "reason"), [("many", "gives 'f1' as 'many': give a number"), (None, "as None")])
def test_a_metric_that_is_no_number_is_named(tmp_path, value, reason):
    fed = federation(tmp_path / "run", raafl.LambdaCallback(on_evaluate=lambda run, metrics: {"f1": value}))
    with pytest.raises(RunFailed, match=reason):
        fed.simulate(small_mlp, digits())
    assert not (tmp_path / "run").exists()  # it had not begun


def test_a_stop_is_in_the_journal_and_replays_to_the_same_model(tmp_path):
    folder = tmp_path / "run"

    def stop_at_two(run, version):
        if version == 2:
            run.stop("two are\nenough")
            assert run.should_stop

    result = federation(folder, raafl.LambdaCallback(on_version=stop_at_two)).simulate(small_mlp, digits())
    assert (result.summary["finished"], result.summary["versions"]) == ("stopped: two are enough", 2)
    stops = [row for row in rows_of(folder) if row["event"] == "stop"]
    assert [row["reason"] for row in stops] == ["stopped: two are enough"]
    found = federation(None).replay(folder, small_mlp, digits())
    assert (found["equal"], found["parted_at"], found["model_digest"]) == (True, None, result.summary["model_digest"])


@pytest.mark.parametrize("occasion", ["on_version", "on_update_merged", "on_client_joined", "on_end"])
def test_a_callback_that_raises_ends_the_run_whole_and_is_named(tmp_path, occasion):
    def broken(*what):
        raise KeyError("oh no")

    log, folder = Log(), tmp_path / "run"
    fed = federation(folder, raafl.LambdaCallback(**{occasion: broken}), log)
    with pytest.raises(
        RunFailed, match=rf"^callback LambdaCallback\.{occasion}: KeyError: 'oh no' \(run folder"
    ) as caught:
        fed.simulate(small_mlp, digits())
    assert isinstance(caught.value.__cause__, KeyError)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"] == f"failed: callback LambdaCallback.{occasion}: KeyError: 'oh no'"
    assert log.told[-1] == ("end", summary["finished"] if occasion != "on_end" else "max_updates")
    assert federation(None).replay(folder, small_mlp, digits())["equal"]
    assert "in broken" in (folder / summary["traceback"]).read_text()


def test_a_callback_that_exits_the_process_ends_the_run_as_failed(tmp_path):
    ends = raafl.LambdaCallback(on_version=lambda run, version: sys.exit(3))
    with pytest.raises(RunFailed, match=r"^callback LambdaCallback\.on_version: SystemExit: 3"):
        federation(tmp_path / "run", ends).simulate(small_mlp, digits())


def test_a_run_whose_callback_has_raised_goes_on(tmp_path):
    """Mended, it ends as if nothing had been raised; what other callbacks keep is kept."""

    def broken(run, version):
        raise KeyError("oh no")

    folder = tmp_path / "run"
    early = raafl.EarlyStopping(patience=9)
    with pytest.raises(RunFailed, match="oh no"):
        federation(folder, raafl.LambdaCallback(on_version=broken), early).simulate(small_mlp, digits())
    again = raafl.EarlyStopping(patience=9)
    result = federation(None, raafl.LambdaCallback(), again).simulate(small_mlp, digits(), resume=folder)
    whole = federation(tmp_path / "whole").simulate(small_mlp, digits())
    assert result.summary["model_digest"] == whole.summary["model_digest"]
    assert again.best == max(row["accuracy"] for row in whole.metrics)


@pytest.mark.parametrize("occasion", ["on_start", "on_evaluate", "on_version", "on_end"])
@pytest.mark.parametrize("on_interrupt", [None, "return"])
def test_a_ctrl_c_within_a_callback_ends_the_run_whole(tmp_path, occasion, on_interrupt):
    def broken(*what):
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    fed = federation(folder, raafl.LambdaCallback(**{occasion: broken}), on_interrupt=on_interrupt)
    if on_interrupt is None:
        with pytest.raises(KeyboardInterrupt, match="its results so far are in "):
            fed.simulate(small_mlp, digits())
    else:
        assert fed.simulate(small_mlp, digits()).folder == folder
    finished = json.loads((folder / "summary.json").read_text())["finished"]
    assert finished == ("max_updates" if occasion == "on_end" else "interrupted")


def test_early_stopping_counts_evaluations_without_a_better_value(tmp_path):
    """Of 1, 3, 2, 3, 3.4, 3.4 with patience 2 and at least 0.5 better, the fourth and its second in a row end the run."""
    values = iter([1, 3, 2, 3.4, 9])
    early = raafl.EarlyStopping("score", patience=2, min_delta=0.5)
    scores = raafl.LambdaCallback(on_evaluate=lambda run, metrics: {"score": next(values)})
    result = federation(tmp_path / "run", scores, early, max_updates=40, eval_every=1).simulate(small_mlp, digits())
    assert result.summary["finished"] == "stopped: no score better than 3 in 2 evaluations"
    assert [row["score"] for row in result.metrics] == [1, 3, 2, 3.4]


@pytest.mark.parametrize(("metric", "mode"), [("val_loss", "min"), ("mse", "min"), ("accuracy", "max"), ("gap", None)])
def test_early_stopping_knows_what_is_better(metric, mode):
    assert raafl.EarlyStopping(metric).mode == mode


def test_what_a_callback_cannot_be_is_said():
    with pytest.raises(BadInput, match="patience is 0"):
        raafl.EarlyStopping(patience=0)
    with pytest.raises(BadInput, match="no 'on_versoin': did you mean 'on_version'"):
        raafl.LambdaCallback(on_versoin=print)
    with pytest.raises(BadInput, match=r"give objects of raafl\.Callback"):
        raafl.Federation(callbacks=[print])


def test_early_stopping_names_a_metric_that_is_not_there(tmp_path):
    with pytest.raises(RunFailed, match="there is no metric 'acuracy': did you mean 'accuracy'"):
        federation(tmp_path / "run", raafl.EarlyStopping("acuracy")).simulate(small_mlp, digits())


def test_early_stopping_asks_which_values_of_an_unusual_metric_are_better():
    view = raafl.Callback  # the run is not read
    with pytest.raises(BadInput, match="the name 'gap' does not say which values are better: give max or min"):
        raafl.EarlyStopping("gap").on_evaluate(view, {"gap": 0.5})
    raafl.EarlyStopping("gap", mode="min").on_evaluate(view, {"gap": 0.5})


def test_printing_writes_a_line_for_each_evaluation_and_the_end(tmp_path, capsys):
    federation(tmp_path / "run", raafl.Printing(), eval_every=2).simulate(small_mlp, digits())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("version ")[1].split()[0] for line in lines[:3]] == ["0", "2", "3"]
    assert lines[3:] == [f"finished: max_updates, 12 updates, {tmp_path / 'run'}"]


def test_callbacks_go_on_where_a_resumed_run_does(tmp_path, monkeypatch):
    """A run that is interrupted after its third version, and resumed, tells callbacks of each version once."""
    from raafl.runtime.lifecycle.signals import Interrupt

    first, folder, asked = Log(), tmp_path / "run", []
    monkeypatch.setattr(Interrupt, "asked", property(lambda self: bool(asked)))
    at_two = raafl.LambdaCallback(on_version=lambda run, version: asked.append(version) if version == 2 else None)
    fed = federation(folder, first, at_two)
    with pytest.raises(KeyboardInterrupt):
        fed.simulate(small_mlp, digits())
    asked.clear()
    second = Log()
    result = federation(None, second).simulate(small_mlp, digits(), resume=folder)
    whole = federation(tmp_path / "whole").simulate(small_mlp, digits())
    assert result.summary["model_digest"] == whole.summary["model_digest"]
    assert second.told[:2] == [("loaded", second.told[0][1]), ("start", True)]
    assert second.of("version") == [("version", 3)]
    assert second.of("joined") == []


def test_a_watcher_without_callbacks_changes_nothing(tmp_path):
    plain, _ = simulate(experiment(tmp_path / "plain"))
    watched, folder = simulate(experiment(tmp_path / "watched"), observer=CallbackHooks([], lambda module: module))
    assert watched["model_digest"] == plain["model_digest"]
    assert rows_of(folder)[1:] == rows_of(tmp_path / "plain")[1:]


def test_what_a_callback_keeps_is_copied_when_a_checkpoint_is_due():
    kept, clock, callback = [1], {}, raafl.Callback()
    callback.state_dict = lambda: {"kept": kept}
    CallbackHooks([callback], lambda module: module).on_checkpoint(None, 1, clock)
    kept.append(2)  # while the checkpoint is written
    assert clock["callbacks"]["states"] == [{"kept": [1]}]


def test_modules_that_are_given_back_can_be_saved_whole(tmp_path):
    """Also where a validation step was added to the class that trains."""

    def save(run, metrics):
        torch.save(run.module(), tmp_path / "seen.pt")

    fed = federation(tmp_path / "run", raafl.LambdaCallback(on_evaluate=save), max_updates=4)
    result = fed.simulate(Steps(), digits())
    torch.save(result.module, tmp_path / "final.pt")
    for name in ("seen", "final"):
        assert type(torch.load(tmp_path / f"{name}.pt", weights_only=False)) is Steps


# ---- what is given, in shapes that people have it ----


def rows(num=40):
    x = torch.randn(num, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def two_layers(num_outputs=2):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, num_outputs))


def named(samples):
    x, y = default_collate(samples)
    return {"x": x, "y": y}


class Answers(nn.Module):
    """Takes its input by name, and may answer with a dict."""

    def __init__(self, *, as_dict):
        super().__init__()
        self.net, self.as_dict = two_layers(), as_dict

    def forward(self, x):
        return {"logits": self.net(x)} if self.as_dict else self.net(x)


def test_plain_modules_with_mappings_in_or_out_can_be_cut(tmp_path):
    digests = set()
    for collate in (None, named):
        for as_dict in (False, True):
            fed = federation(tmp_path / f"{collate is None} {as_dict}", algorithm="fed_raa", max_updates=6)
            result = fed.simulate(
                lambda as_dict=as_dict: Answers(as_dict=as_dict),
                (rows(), rows()),
                loss=F.cross_entropy,
                collate_fn=collate,
            )
            digests.add(result.summary["model_digest"])
    assert len(digests) == 1


def test_accuracy_is_that_of_classes_wherever_these_are(tmp_path):
    """One output has no classes to choose from; of a language model they are in the last place."""

    def one(output, target):
        return F.binary_cross_entropy_with_logits(output.squeeze(1), target.float())

    single = federation(tmp_path / "one", max_updates=4).simulate(lambda: two_layers(1), (rows(), rows()), loss=one)
    assert set(single.final) == {"loss"}
    tokens = torch.arange(120).reshape(20, 6) % 5
    texts, make = TensorDataset(tokens, tokens), lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    result = federation(tmp_path / "texts", max_updates=4).simulate(
        make, (texts, texts), loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())
    )
    found = result.module(tokens).argmax(dim=-1)
    assert result.final["accuracy"] == pytest.approx((found == tokens).float().mean().item())


def test_metric_objects_see_the_whole_test_set(tmp_path):
    f1 = pytest.importorskip("torchmetrics").F1Score(task="multiclass", num_classes=2, average="macro")
    data = rows()
    result = federation(tmp_path / "run", max_updates=4).simulate(
        two_layers, (data, data), loss=F.cross_entropy, metrics={"f1": f1}, batch_size=7
    )
    f1.reset()
    assert result.final["f1"] == pytest.approx(f1(result.module(data.tensors[0]), data.tensors[1]).item())


def test_a_loader_may_stand_in_a_list_and_groups_may_be_none(tmp_path):
    class Data(LightningDataModule):
        def train_dataloader(self):
            return [DataLoader(rows(), batch_size=8)]

        val_dataloader = train_dataloader

    fed = federation(tmp_path / "run", max_updates=4, privacy=None, partition=None)
    assert fed.simulate(two_layers, Data(), loss=F.cross_entropy).summary["updates_merged"] == 4


@pytest.mark.parametrize(("train", "test", "which"), [([], rows(), "train"), (rows(), [], "test")])
def test_data_sets_without_samples_are_named(train, test, which):
    with pytest.raises(BadInput, match=f"{which} is list without any samples: check how it is read"):
        federation(None).simulate(two_layers, (train, test), loss=F.cross_entropy)


def test_batches_of_any_kind_keep_it_on_their_way_to_a_device():
    from collections import UserDict, defaultdict, namedtuple

    pair, x = namedtuple("pair", "x y"), torch.ones(2)
    for batch in (UserDict(x=x), {"x": x, 3: x}, defaultdict(list, x=x), pair(x, x), [x, "text"], (x,)):
        moved = moved_to(batch, torch.device("meta"))
        assert type(moved) is type(batch)
        assert (moved[0] if isinstance(moved, (list, tuple)) else moved["x"]).device.type == "meta"
        assert (batch[0] if isinstance(batch, (list, tuple)) else batch["x"]).device.type == "cpu"
