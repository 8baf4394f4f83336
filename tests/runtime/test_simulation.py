"""Simulated runs: repeatable to the last bit, right about time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from model_zoo import MLP
from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_raa
from raafl.core.algorithm import Training
from raafl.devices.profiles import Device
from raafl.runtime.run import simulate
from raafl.runtime.setup import make_model
from tests.helpers.small_runs import COMING_AND_GOING, experiment, finish, unequal

pytestmark = pytest.mark.timeout(120)


def test_a_run_repeats_bit_for_bit_and_another_seed_differs(tmp_path):
    first, again, other = (
        finish(experiment(tmp_path / name, fed_async(), seed=seed)) for name, seed in [("a", 5), ("b", 5), ("c", 6)]
    )
    assert first.digest == again.digest != other.digest
    for file in ("events.jsonl", "clients.csv"):
        assert again.text(file) == first.text(file)


def test_the_windows_above_do_lose_tasks_and_their_clients_come_back(tmp_path):
    run = finish(experiment(tmp_path / "r", fed_async(), devices=COMING_AND_GOING, max_updates=40))
    assert run.summary["updates_lost_by_reason"].keys() == {"unavailable"}
    back = {event["client"] for event in run.events("joined") if event["incarnation"] > 0}
    assert back == {1, 2, 3, 4}
    assert all(n > 0 for n in run.summary["participation"].values())


# ---- time ----


def test_time_follows_the_profiles(tmp_path):
    """One client, ten steps a task: the clock is the sum of what the profile and the cost model say."""
    device = Device(name="d", flops_per_s=1e7, down_bytes_per_s=1e5, up_bytes_per_s=5e4, latency_s=0.25)
    run = finish(
        experiment(tmp_path / "r", fed_avg(), clients=1, devices=[device], max_updates=3, train=Training(None, 10, 64))
    )
    params = 64 * 24 + 24 + 24 * 10 + 10
    # forward 2, gradient of the weights 2 for each weight and sample; of the inputs 2 in the second layer only
    flops = 10 * 64 * (4 * 64 * 24 + 6 * 24 * 10)
    task_s = 0.25 + 4 * params / 1e5 + flops / 1e7 + 0.25 + 4 * params / 5e4
    assert run.summary["time_s"] == pytest.approx(3 * task_s, rel=1e-9)
    assert [float(row["train_s"]) for row in run.rows()] == pytest.approx([task_s] * 3)
    assert run.summary["bytes_up"] == run.summary["bytes_down"] == 3 * 4 * params
    assert run.summary["utilisation"] == pytest.approx(1.0)


def test_a_faster_client_reports_more_often_in_the_ratio_of_the_speeds(tmp_path):
    devices = [Device(name="fast", flops_per_s=3e7), Device(name="slow", flops_per_s=1e7)]
    run = finish(experiment(tmp_path / "r", fed_async(), clients=2, devices=devices, max_updates=41))
    # equal data, no link: the fast one is done at 1, 2, 3, the slow one at 3 (and each multiple of it)
    assert run.summary["participation"] == {"1": 31, "2": 10}


def test_max_time_ends_the_run_then(tmp_path):
    run = finish(experiment(tmp_path / "r", fed_async(), max_updates=None, max_time=0.5))
    assert (run.summary["finished"], run.summary["time_s"]) == ("max_time", 0.5)
    assert all(float(row["arrived_s"]) <= 0.5 for row in run.rows() if row["outcome"] == "merged")


# ---- how runs begin and end ----


def test_the_first_cohort_is_drawn_from_everyone_there(tmp_path):
    firsts = set()
    for seed in range(12):
        run = finish(experiment(tmp_path / str(seed), fed_avg(cohort=1), seed=seed, max_updates=1))
        firsts.update(event["client"] for event in run.events("assigned"))
    assert firsts == {1, 2, 3, 4}


def test_the_bound_of_the_first_tasks_is_that_of_the_whole_fleet(tmp_path):
    """K decides before the first task, so it may not depend on who happened to join first."""
    slow_first = unequal((1e6, 8e7, 8e7))
    run = finish(experiment(tmp_path / "r", fed_raa(), clients=3, devices=slow_first, max_updates=3))
    # three clients, three fragments: the slowest gets the smallest in the offline assignment, which sets K
    assert [e["region"] for e in run.events("assigned") if e["client"] == 1 and e["task"] == 0] == [1]


@pytest.mark.parametrize("max_updates", [None, 100])
def test_a_target_that_the_initial_model_meets_ends_the_run_at_once(tmp_path, max_updates):
    run = finish(experiment(tmp_path / "r", fed_async(), target="accuracy=0.0001", max_updates=max_updates))
    assert (run.summary["finished"], run.summary["updates_merged"]) == ("target", 0)
    assert run.summary["time_to"] == {"accuracy=0.0001": 0.0}


def test_a_target_ends_the_run_when_it_is_met_and_says_when(tmp_path):
    run = finish(experiment(tmp_path / "r", fed_avg(), target=["accuracy=0.3", "loss=2.2"], max_updates=400))
    assert run.summary["finished"] == "target"
    rows = run.rows("metrics.csv")
    met = {
        "accuracy=0.3": next(float(row["time_s"]) for row in rows if float(row["accuracy"]) >= 0.3),
        "loss=2.2": next(float(row["time_s"]) for row in rows if float(row["loss"]) <= 2.2),
    }
    assert run.summary["time_to"] == pytest.approx(met, rel=1e-11)  # rows have twelve digits
    assert run.summary["time_s"] == max(run.summary["time_to"].values())


def test_a_target_out_of_reach_is_none(tmp_path):
    run = finish(experiment(tmp_path / "r", target="accuracy=1.5"))
    assert (run.summary["finished"], run.summary["time_to"]) == ("max_updates", {"accuracy=1.5": None})


def test_a_run_that_everyone_leaves_for_good_fails_by_name(tmp_path):
    devices = [Device(name="d", flops_per_s=1e7, availability=((0.0, 0.3),))]
    run = finish(experiment(tmp_path / "r", fed_async(), devices=devices))
    assert run.summary["finished"] == "failed: all clients have left, and none will come back"


def test_windows_too_short_for_any_task_end_the_run_instead_of_going_on_for_ever(tmp_path):
    devices = [Device(name="d", flops_per_s=1e5, availability=((0.0, 0.01),), period_s=0.02)]
    run = finish(experiment(tmp_path / "r", fed_async(), devices=devices))
    assert run.summary["finished"].startswith("failed: ")
    assert "unavailable" in run.summary["finished"]
    assert run.summary["updates_merged"] == 0


def test_fed_buff_folds_in_what_waits_at_the_end(tmp_path):
    run = finish(experiment(tmp_path / "r", fed_buff(buffer_size=5), max_updates=None, max_time=0.4))
    merged = [row for row in run.rows() if row["outcome"] == "merged"]
    assert run.summary["updates_merged"] == len(merged) == len(run.events("arrived"))
    assert len(merged) % 5 != 0
    assert run.summary["versions"] == len(merged) // 5 + 1


class Sick(MLP):
    """Gives a loss that is not a number for about a third of its batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if torch.rand(()) < 0.12 else loss


def test_updates_that_are_not_finite_are_never_merged(tmp_path):
    run = finish(experiment(tmp_path / "r", fed_async(), model=lambda: Sick(64, (24,), 10, lr=0.05)))
    assert set(run.summary["updates_refused"]) == {"non-finite"}
    assert run.summary["updates_merged"] == 12
    assert all(torch.isfinite(torch.tensor(value)) for value in run.summary["final"].values())
    for row in run.rows():
        if row["outcome"] == "unused":
            continue
        assert (row["outcome"] == "refused:non-finite") == (row["loss"] in ("nan", ""))


def test_a_model_that_always_fails_ends_the_run_as_failed(tmp_path):
    class Dead(MLP):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * float("inf")

    run = finish(experiment(tmp_path / "r", fed_avg(), model=lambda: Dead(64, (24,), 10)))
    why = "failed: the last 3 updates of every client were refused, those of client 4 as non-finite"
    assert run.summary["finished"] == why and run.summary["updates_refused"] == {"non-finite": 12}


def test_evaluating_more_or_less_often_changes_nothing_else(tmp_path):
    often, rarely = (finish(experiment(tmp_path / str(n), fed_async(), eval_every=n)) for n in (1, 7))
    assert often.digest == rarely.digest
    assert often.text("events.jsonl") == rarely.text("events.jsonl")
    assert [row["version"] for row in often.rows("metrics.csv")] == [str(v) for v in range(13)]
    assert [row["version"] for row in rarely.rows("metrics.csv")] == ["0", "7", "12"]


def test_dropout_and_augmentation_in_validation_change_no_training(tmp_path):
    class Drawing(MLP):
        def validation_step(self, batch, batch_idx):
            torch.rand(3)
            return super().validation_step(batch, batch_idx)

    quiet = finish(experiment(tmp_path / "a", fed_async()))
    loud = finish(experiment(tmp_path / "b", fed_async(), model=lambda: Drawing(64, (24,), 10, lr=0.05, momentum=0.5)))
    assert quiet.digest == loud.digest


def test_a_failed_run_leaves_no_thread(tmp_path):
    class Breaking(MLP):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 2 and torch.rand(()) < 0.2:  # the trial before the run has two samples
                raise ZeroDivisionError("in the user's code")
            return super().training_step(batch, batch_idx)

    before = set(threading.enumerate())
    broken = experiment(tmp_path / "r", fed_async(), model=lambda: Breaking(64, (24,), 10), checkpoint_every=1, seed=4)
    assert "in the user's code" in finish(broken).summary["finished"]
    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_the_step_that_is_tried_before_a_run_has_the_models_own_values(tmp_path):
    tried = []

    class Watched(MLP):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) == 2 and not batch[0].is_meta:  # no task, and no prediction of costs
                tried.append([parameter.detach().clone() for parameter in self.parameters()])
            return super().training_step(batch, batch_idx)

    one = experiment(tmp_path / "r", fed_async(), model=lambda: Watched(64, (24,), 10), max_updates=1, seed=4)
    expected = list(make_model(one).parameters())
    finish(one)
    assert tried and all(map(torch.equal, tried[-1], expected))


class Dropping(MLP):
    """Draws from torch's generator in each step."""

    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.3, self.training))


def test_runs_in_two_threads_draw_from_no_generator_of_each_other(tmp_path):
    def run(name):
        made = experiment(tmp_path / name, "fed_async", model=lambda: Dropping(64, (24,), 10), max_updates=20)
        return simulate(made)[0]["model_digest"]

    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(run, ["one", "two"])) == {run("alone")}
