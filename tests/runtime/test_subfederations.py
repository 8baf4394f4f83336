"""Simulated subfederations: equal to the flat federation where that is exact, deterministic, replayed level by level."""

from __future__ import annotations

import shutil
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from model_zoo import ViT
from raafl.algorithms import diloco, fed_avg, fed_buff, fed_prox, fed_raa, ra_fed, scaffold, timely_fl
from raafl.core.options import Subfederation, Subfederations
from raafl.core.subfederation import algorithm_below
from raafl.data import Dirichlet
from raafl.errors import BadInput
from raafl.lab.plan.dry import World, predict
from raafl.local.train import LocalTrainer
from raafl.parts.select.submodels import Fragments, Full
from raafl.parts.select.windows import LeadingBlocks, RollingWindows
from raafl.runfolder.books import check_books
from raafl.runfolder.checkpoint_reader import load
from raafl.runfolder.checkpoints import newest
from raafl.runfolder.events import read_run
from raafl.runtime.replay import Replay
from raafl.runtime.run import simulate
from raafl.runtime.server.host import host
from raafl.runtime.setup import build, make_executor
from raafl.submodel import Spec
from tests.core.test_subfederation import METHODS, PRIVATE, flat
from tests.helpers.crash import crash
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import Finished, experiment, finish, unequal

HALVES = Subfederations(size=3, latency_s=1.0)
ALIKE = unequal((2e12,) * 3 + (1e12,) * 3, down_bytes_per_s=inf, up_bytes_per_s=inf)
"""Devices so fast that a task lasts as long as its subfederation's link takes; the first is always a little earlier."""


def regions(tmp_path, algorithm, **fields):
    """Return a run of six clients in two subfederations of three, which merges three times."""
    settings = {"partition": Dirichlet(0.5), "clients": 6, "max_updates": 6, "subfederations": HALVES, "devices": ALIKE}
    return experiment(tmp_path / "run", algorithm, **{**settings, **fields})


@pytest.mark.parametrize("name", METHODS)
def test_subfederations_equal_the_flat_federation(tmp_path, name):
    above, _ = METHODS[name]
    made = regions(tmp_path, above(2))
    run = finish(made)
    wanted = flat(tmp_path, above).coordinator.state.values
    saved = load(run.folder).values
    assert max(float((saved[key] - value).abs().max()) for key, value in wanted.items()) < 1e-6


LINK = {"down_bytes_per_s": 2e5, "up_bytes_per_s": 1e5, "latency_s": 0.05}


@pytest.mark.parametrize("algorithm", [fed_raa(2, alpha=0.6), ra_fed()])
def test_methods_of_fragments_equal_the_flat_run_where_a_subfederation_is_a_client(tmp_path, algorithm):
    alone = finish(experiment(tmp_path / "flat", algorithm, devices=unequal(**LINK), max_updates=12))
    inside = unequal(down_bytes_per_s=inf, up_bytes_per_s=inf, latency_s=0.0)
    run = finish(
        regions(
            tmp_path,
            algorithm,
            clients=4,
            devices=inside,
            subfederations=Subfederations(size=1, **LINK),
            max_updates=12,
            partition=experiment("unused", algorithm).partition,
        )
    )
    assert run.summary["time_s"] == pytest.approx(alone.summary["time_s"])
    assert [row["spec"] for row in run.events("assigned")] == [row["spec"] for row in alone.events("assigned")]
    ours, theirs = load(run.folder).values, load(alone.folder).values
    assert max(float((ours[name] - value).abs().max()) for name, value in theirs.items()) < 1e-6


@pytest.mark.parametrize(
    ("select", "together"),
    [
        (LeadingBlocks([1.0, 0.5], [0.5, 1.0]), [(1, 1.0), (1, 2.0), (2, 2.0)]),
        (RollingWindows([1.0, 0.5], ratio=0.0, mask_rounds=0), [(2, 3.0)]),
    ],
    ids=["leading", "rolling"],
)
def test_clients_below_train_what_they_share_with_the_blocks_that_were_sent(tmp_path, select, together):
    """Numbers of blocks and of clients. Of the lowest of two blocks, clients 4 and 6 have half the width, and 5 all of it.

    The window that subfederation 2 is sent trains the upper block, and has the lower one frozen.
    """
    pytest.importorskip("transformers")
    made = regions(tmp_path, fed_avg(submodel=select), model=small_vit, max_updates=2)
    run = finish(made)
    assert run.summary["finished"] == "max_updates"
    found = {
        (len(dict(spec.blocks).get("model.vit.layers", range(2))), num)
        for row in run.events("arrived")
        for spec, num in ((Spec.from_json(one[0]), one[1]) for one in row["contributions"])
    }
    assert sorted(found) == together and replayed(made, run.folder)


def small_vit():
    return ViT("micro", image_size=8, patch_size=4, in_channels=1)


def test_the_clients_of_a_subfederation_train_the_fragment_that_was_sent_together(tmp_path):
    run = finish(regions(tmp_path, fed_raa(2)))
    sent = [row["spec"] for row in run.events("assigned")]
    assert {str(spec) for spec in sent} >= {str(row["contributions"][0][0]) for row in run.events("arrived")}
    assert [row["contributions"][0][1] for row in run.events("arrived")] == [3.0] * 6
    assert replayed(regions(tmp_path, fed_raa(2)), run.folder)


def replayed(made, folder):
    """Return whether the replay of a run gives the recorded model, without a difference on the way."""
    rows, summary = read_run(folder)
    parts = build(made, pace=False, **next(iter(rows))["start"])
    played = Replay(parts.coordinator, make_executor(parts, 1), folder)
    played.run(rows)
    assert played.first_difference is None
    return parts.coordinator.state.values.model_digest() == summary["model_digest"]


SLOW_LINK = Subfederations(size=3, merges=2, buffer_size=2, up_bytes_per_s=1e5, down_bytes_per_s=2e5, latency_s=0.05)


def unequal_regions(tmp_path, **fields):
    """Return a run of two subfederations of unequal clients, in which a task has two merges of two updates each."""
    fields = {"devices": unequal((8e7, 5e7, 3e7, 8e7, 5e7, 3e7)), "subfederations": SLOW_LINK, **fields}
    return regions(tmp_path, fed_buff(1), **fields)


def test_each_level_replays_and_workers_change_no_bit(tmp_path):
    made = unequal_regions(tmp_path)
    run = finish(made)
    assert replayed(made, run.folder)
    for number in (1, 2):
        below = replace(made, subfederations=replace(SLOW_LINK, number=number))
        assert replayed(below, run.folder / "subfederations" / str(number))
    again = finish(unequal_regions(tmp_path / "workers", workers=2))
    assert again.digest == run.digest
    assert [row["time_s"] for row in again.journal()] == [row["time_s"] for row in run.journal()]


@pytest.mark.parametrize("num_settled", [14, 23, 33])
def test_a_run_that_crashed_and_each_level_end_as_if_never_interrupted(tmp_path, monkeypatch, num_settled):
    made = unequal_regions(tmp_path / "whole", max_updates=8)
    whole = finish(made)
    cut = unequal_regions(tmp_path / "cut", max_updates=8, checkpoint_every=1)
    folder = tmp_path / "cut" / "run"
    with crash(monkeypatch, num_settled):  # of tasks of both levels
        finish(cut)
    resumed = finish(replace(cut, resume=str(folder)))
    assert resumed.digest == whole.digest and resumed.summary["time_s"] == whole.summary["time_s"]
    assert resumed.summary["subfederations"] == whole.summary["subfederations"]
    assert [row["arrived_s"] for row in resumed.rows()] == [row["arrived_s"] for row in whole.rows()]
    assert replayed(made, folder)
    for number in (1, 2):
        below = folder / "subfederations" / str(number)
        ours, theirs = (Finished({}, path / "subfederations" / str(number)) for path in (folder, whole.folder))
        assert ours.rows() == theirs.rows()
        assert replayed(replace(made, subfederations=replace(SLOW_LINK, number=number)), below)
        assert not check_books(below).findings


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [("clock", "now", float("nan"), "now is nan"), ("record", "num_rows", -1, "num_rows is -1")],
)
def test_the_altered_state_of_a_subfederation_is_refused(tmp_path, monkeypatch, part, name, value, says):
    cut = unequal_regions(tmp_path, max_updates=8, checkpoint_every=1)
    with crash(monkeypatch, 14):
        finish(cut)
    file = newest(tmp_path / "run")
    content = torch.load(file, weights_only=True)
    content["raafl"]["state"]["clock"]["subfederations"][1]["section"][part][name] = value
    torch.save(content, file)
    with pytest.raises(BadInput, match=rf"^resume: the last checkpoint .* was altered \(.*{says}"):
        finish(replace(cut, resume=str(tmp_path / "run")))


def test_a_run_is_resumed_from_before_a_task_in_which_a_subfederation_failed(tmp_path, monkeypatch):
    made = unequal_regions(tmp_path / "whole", max_updates=8)
    whole = finish(made)
    cut, trained, run = unequal_regions(tmp_path / "cut", max_updates=8, checkpoint_every=1), [], LocalTrainer.run

    def fail(*arguments):
        trained.append(1)
        if len(trained) == 20:
            raise ValueError("the disk is full")
        return run(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LocalTrainer, "run", fail)
        failed = finish(cut)
    assert failed.summary["finished"].startswith("failed: client ")
    resumed = finish(replace(cut, resume=str(failed.folder)))
    assert resumed.digest == whole.digest and resumed.summary["finished"] == "max_updates"


def test_what_was_received_may_be_removed_and_only_a_replay_misses_it(tmp_path):
    made = unequal_regions(tmp_path)
    run = finish(made)
    below = run.folder / "subfederations" / "1"
    shutil.rmtree(below / "received")
    assert not check_books(below).findings and replayed(made, run.folder)
    with pytest.raises(BadInput, match=r"received/\w+\.pt' is missing, which a replay needs"):
        replayed(replace(made, subfederations=replace(SLOW_LINK, number=1)), below)


def test_a_task_lasts_as_long_as_below_and_the_slow_link(tmp_path):
    run = finish(unequal_regions(tmp_path, max_updates=1))
    (row,) = (row for row in run.rows() if row["outcome"] == "merged")
    num_bytes = int(row["bytes_down"])
    assert num_bytes == int(row["bytes_up"]) == 1810 * 4
    below = Finished({}, run.folder / "subfederations" / row["client"]).events()
    began = next(one["time_s"] for one in below if one["event"] == "received")
    assert began == pytest.approx(0.05 + num_bytes / 2e5)
    arrived = [one["time_s"] for one in below if one["event"] == "arrived"]
    # two merges of two updates each: the task ends with the fourth update
    assert float(row["arrived_s"]) == pytest.approx(arrived[3] + 0.05 + num_bytes / 1e5)
    (update,) = (one for one in run.events("arrived") if one["client"] == int(row["client"]))
    assert update["contributions"] == [[{}, 2.0, update["num_samples"], 6]] and update["journal"]


def test_a_plan_predicts_the_same_times_and_bytes(tmp_path):
    made = unequal_regions(tmp_path)
    run, predicted = finish(made), predict(World(made), made.algorithm)
    assert (predicted.problem, predicted.time_s, predicted.updates) == (None, run.summary["time_s"], 6)
    assert predicted.bytes_per_update == (run.summary["bytes_up"] + run.summary["bytes_down"]) / 6
    assert predict(World(made), fed_raa()).problem is None
    assert predict(World(made), scaffold()).problem.startswith("subfederations.size is 3, but")


def test_clients_below_come_and_go_at_the_run_s_own_time(tmp_path):
    devices = [replace(one, availability=((0.0, 2.0),), period_s=3.0) for one in ALIKE]
    options = replace(HALVES, latency_s=1.25)
    run = finish(regions(tmp_path, fed_avg(), devices=devices, subfederations=options, max_updates=4))
    below = Finished({}, run.folder / "subfederations" / "1").events()
    arrived = [one["time_s"] for one in below if one["event"] == "received"]
    assert arrived[0] == pytest.approx(1.25) and run.summary["versions"] == 2


test_wrong_subfederations_are_refused = refuses(
    lambda **fields: experiment("unused", fields.pop("algorithm", fed_avg()), clients=6, **fields).check(),
    (
        {"subfederations": Subfederations(size=7)},
        "subfederations.size is 7, more than there are clients: give at most 6",
    ),
    ({"subfederations": HALVES, "overlap": True}, "subfederations.size is 3, with which overlap does not work"),
    ({"subfederations": HALVES, "subfederation": Subfederation(merges=1)}, "are both given"),
    (
        {"subfederations": HALVES, "algorithm": fed_avg(cohort=3)},
        "cohort is 3, more than there are clients: give at most 2",
    ),
)
test_wrong_options_are_refused = refuses(
    Subfederations,
    ({"size": 0}, "subfederations.size is 0: give a number above 0"),
    ({"merges": 2}, "subfederations.merges is given without a size"),
    ({"size": 2, "merges": 1, "seconds": 1.0}, "both given"),
    ({"size": 2, "latency_s": -1.0}, "latency_s is -1.0: give seconds, 0 or more"),
)
test_methods_that_cannot_are_refused = refuses(
    lambda algorithm, **fields: build(regions(Path("unused"), algorithm, **fields), pace=False),
    ({"algorithm": "scaffold"}, "subfederations.size is 3, but"),
    ({"algorithm": fed_avg(), "privacy": PRIVATE}, "subfederations.size is 3, but privacy is on"),
    (
        {"algorithm": timely_fl()},
        "subfederations.size is 3, but timely_fl gives each client layers of its own to train",
    ),
)


def test_real_clients_are_no_simulated_subfederations():
    with pytest.raises(BadInput, match="is 3, but clients are real here"):
        host(regions(Path("unused"), fed_avg()), "", None)
    with pytest.raises(BadInput, match="nobody sends this run a task"):
        simulate(regions(Path("unused"), fed_avg(), subfederations=replace(HALVES, number=1)))


@pytest.mark.parametrize(
    ("above", "below"),
    [
        (fed_avg(cohort=2), fed_avg()),
        (fed_prox(0.1), fed_prox(0.1)),
        (fed_buff(2, 0.5), fed_buff(5)),
        (fed_buff(2, clients_at_work=3.0), fed_buff(5)),
        (diloco(weights="samples"), diloco(1.0, 0.0, weights="samples")),
        (diloco(steps="speed", submodel=Fragments((0.5, 0.5))), diloco(1.0, 0.0, steps="speed")),
        (fed_avg(lora="rolora"), replace(fed_avg(lora="rolora"), select=Full())),
    ],
)
def test_the_method_below_takes_all_clients_and_their_mean(above, below):
    assert algorithm_below(above, 5) == below


def test_a_buffer_below_may_be_smaller():
    assert algorithm_below(fed_buff(2), 5, 3) == fed_buff(3)


def test_the_last_subfederation_has_the_rest():
    assert [list(one) for one in Subfederations(size=3).members(7)] == [[1, 2, 3], [4, 5, 6], [7]]
