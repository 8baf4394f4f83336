"""What a run says of itself adds up: every task ends once, and all three files tell the same story."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from model_zoo import MLP
from raafl.algorithms import ALGORITHMS, fed_async, fed_avg, fed_buff, fed_compass, fed_opt, fed_prox, fed_raa
from raafl.config.targets import Target
from raafl.core.algorithm import Local, Training
from raafl.core.types import Arrived, Update
from raafl.devices.profiles import Device
from raafl.errors import BadInput
from raafl.runfolder.append_file import read_table
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.record import RunRecord
from tests.helpers.coordinators import filled, line_state
from tests.helpers.methods import each_method
from tests.helpers.small_runs import experiment, finish, two_speeds
from tests.runtime.test_simulation import COMING_AND_GOING

pytestmark = pytest.mark.timeout(120)


class Sick(MLP):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if torch.rand(()) < 0.1 else loss


OTHERS = {
    "leaving": (fed_raa(), {"devices": COMING_AND_GOING, "max_updates": 40}),
    "rounds with leaving": (fed_avg(), {"devices": COMING_AND_GOING, "max_updates": 20}),
    "sick": (fed_buff(buffer_size=3), {"model": lambda: Sick(64, (24,), 10, lr=0.05), "max_updates": 20}),
    "time up": (fed_buff(buffer_size=7), {"max_updates": None, "max_time": 0.7}),
    "time up in a round": (fed_prox(), {"max_updates": None, "max_time": 0.55}),
    "cohorts": (fed_opt(cohort=3, concurrency=2), {"clients": 9, "max_updates": 20}),
    "few at a time": (fed_async(concurrency=2), {"clients": 9, "max_updates": 20}),
}
RUNS = {**{name: (make(), {}) for name, make in ALGORITHMS.items()}, **OTHERS}
PLAIN = {
    name: algorithm for name, (algorithm, _) in RUNS.items() if type(algorithm.local) is Local and name not in OTHERS
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A function that runs a case of RUNS once; tests only read what it leaves."""
    return cache(lambda name: finish(experiment(tmp_path_factory.mktemp("run") / "r", RUNS[name][0], **RUNS[name][1])))


@pytest.mark.parametrize("name", [*each_method(parts=["trigger", "merge"]), *OTHERS])
def test_every_task_ends_once_and_the_files_agree(finished, name):
    run = finished(name)
    summary, rows, assigned = run.summary, run.rows(), {e["id"]: e for e in run.events("assigned")}
    arrived = Counter(e["assignment"] for e in run.events("arrived"))

    assert sorted(int(row["assignment"]) for row in rows) == sorted(assigned)
    assert set(arrived) <= set(assigned) and set(arrived.values()) <= {1}
    outcomes = Counter(row["outcome"].partition(":")[0] for row in rows)
    assert outcomes.keys() <= {"merged", "refused", "lost", "unused"}
    assert outcomes["merged"] == summary["updates_merged"] == sum(summary["participation"].values())
    assert outcomes["refused"] == sum(summary["updates_refused"].values())
    assert outcomes["refused"] == sum(1 for e in run.events("arrived") if e["refusal"])
    assert outcomes["lost"] == summary["updates_lost"] == sum(summary["updates_lost_by_reason"].values())
    assert outcomes["unused"] == summary["updates_unused"]
    for row in rows:
        told = assigned[int(row["assignment"])]
        for field in ("client", "task", "incarnation", "version", "region"):
            assert int(row[field]) == told[field]
        assert (int(row["assignment"]) in arrived) == (row["arrived_s"] != "")
        if row["outcome"] in ("merged",) or row["outcome"].startswith("refused"):
            assert int(row["assignment"]) in arrived

    merged = [row for row in rows if row["outcome"] == "merged"]
    staleness = [int(row["staleness"]) for row in merged]
    assert summary["staleness"] == {"mean": pytest.approx(sum(staleness) / len(staleness)), "max": max(staleness)}
    assert all(int(r["merged_version"]) - 1 - int(r["version"]) == int(r["staleness"]) for r in merged)
    assert summary["versions"] == max(int(row["merged_version"]) for row in merged)
    by_client = Counter(row["client"] for row in merged)
    assert summary["participation"] == {str(c): by_client[str(c)] for c in range(1, len(summary["participation"]) + 1)}
    assert len({(row["client"], row["task"]) for row in rows}) == len(rows)


# what methods with tensors of their own send is counted in their own tests
@pytest.mark.parametrize("name", [*each_method(PLAIN, parts=["trigger"]), *OTHERS])
def test_bytes_are_counted_down_for_each_assignment_and_up_for_each_arrival(finished, name):
    algorithm, run = RUNS[name][0], finished(name)

    specs = {event["id"]: event["spec"] for event in run.events("assigned")}

    def size(row, up=False):
        """Float32 parameters of the MLP with the task's share of 24 hidden units; up go those of the layers that train."""
        spec = specs[int(row["assignment"])]
        kept = spec.get("kept", {}).get("layers.1", range(24))
        hidden = kept["range"][1] - kept["range"][0] if isinstance(kept, dict) else len(kept)
        if algorithm.name == "fed_raa":
            assert hidden == {1: 5, 2: 7, 3: 12}[int(row["region"])]  # fragments of 20, 30 and 50 %
        layers = {"layers.1": 64 * hidden + hidden, "layers.3": hidden * 10 + 10}
        return 4 * sum(layers[layer] for layer in (spec.get("trained", layers) if up else layers))

    rows = run.rows()
    assert run.summary["bytes_down"] == sum(map(size, rows))
    assert run.summary["bytes_up"] == sum(size(row, up=True) for row in rows if row["arrived_s"])
    assert all(int(row["bytes_up"]) == size(row, up=True) for row in rows if row["arrived_s"])


def test_utilisation_of_rounds_by_hand(tmp_path):
    run = two_speeds(tmp_path, fed_avg(), max_updates=6)
    # three rounds of 2 s; the fast client works half of each
    assert run.summary["time_s"] == pytest.approx(6.0)
    assert run.summary["utilisation"] == pytest.approx((3 * 1 + 3 * 2) / (2 * 6))
    assert [float(row["arrived_s"]) for row in run.rows()] == pytest.approx([1, 2, 3, 4, 5, 6])


def test_utilisation_counts_work_that_was_not_used(tmp_path):
    run = two_speeds(tmp_path, fed_async(), max_updates=None, max_time=4.5)
    assert run.summary["utilisation"] == pytest.approx(1.0)
    assert Counter(row["outcome"] for row in run.rows()) == {"merged": 6, "unused": 2}
    # at 2 s and at 4 s both report, the slow one first: its task began earlier
    assert sorted((row["client"], row["staleness"]) for row in run.rows() if row["outcome"] == "merged") == [
        ("1", "0"),
        ("1", "0"),
        ("1", "1"),
        ("1", "1"),
        ("2", "1"),
        ("2", "2"),
    ]


def test_utilisation_of_a_client_that_left(tmp_path):
    flops = 3 * 64 * (4 * 64 * 24 + 6 * 24 * 10)
    devices = [Device(name="a", flops_per_s=flops), Device(name="b", flops_per_s=flops / 2, availability=((0.0, 1.5),))]
    run = finish(
        experiment(tmp_path / "r", fed_avg(), clients=2, devices=devices, train=Training(None, 3), max_updates=3)
    )
    # the first round ends when the second client is lost, 1.5 s; then two rounds of 1 s alone
    assert run.summary["time_s"] == pytest.approx(3.5)
    assert run.summary["utilisation"] == pytest.approx((3 * 1 + 1.5) / (2 * 3.5))


def test_utilisation_does_not_count_the_wait_for_a_groups_merge_while_another_is_measured(tmp_path):
    """FedCompass merges one group while the updates of another wait; what is measured then are the tasks' own seconds."""
    run = finish(experiment(tmp_path / "r", fed_compass(2, 6), clients=5, max_updates=30, eval_every=1))
    begun = {event["id"]: event["time_s"] for event in run.events("assigned")}
    ended = {event["assignment"]: event["time_s"] for event in run.events("arrived")}
    merged_at = {int(row["assignment"]): int(row["merged_version"]) for row in run.rows() if row["outcome"] == "merged"}
    some_wait = False
    for row in run.rows("metrics.csv")[1:]:
        now = float(row["time_s"])
        busy = sum(min(ended.get(task, now), now) - at for task, at in begun.items() if at <= now)
        assert float(row["utilisation"]) == pytest.approx(busy / (5 * now))
        some_wait |= any(at < now and merged_at.get(task, 0) > int(row["version"]) for task, at in ended.items())
    assert some_wait


# ---- the record by itself ----


@pytest.mark.parametrize("text", ["accuracy", "accuracy=", "=0.9", "accuracy=high", "accuracy=nan", "accuracy=inf", ""])
def test_a_target_of_another_form_is_refused(text):
    with pytest.raises(BadInput, match="give METRIC=VALUE"):
        Target.parse(text)


@pytest.mark.parametrize(
    ("text", "value", "met"),
    [
        ("accuracy=0.9", 0.9, True),
        ("accuracy=0.9", 0.89, False),
        ("val_loss=0.5", 0.5, True),
        ("val_loss=0.5", 0.51, False),
        ("perplexity=20", 19.0, True),
        ("error=0.1", 0.2, False),
    ],
)
def test_what_is_better_when_lower_is_reached_from_above(text, value, met):
    target = Target.parse(text)
    assert target.met({target.metric: value}) is met
    assert not target.met({"other": value})
    assert not target.met({target.metric: float("nan")})


def test_time_to_is_the_first_time_and_reached_needs_all():
    record = RunRecord(None, [Target("accuracy", 0.5), Target("loss", 1.0)])
    assert not record.evaluated(1, 1.0, {"accuracy": 0.6, "loss": 2.0})
    assert not record.evaluated(2, 2.0, {"accuracy": 0.4, "loss": 1.5})
    assert record.evaluated(3, 3.0, {"accuracy": 0.4, "loss": 0.9})
    assert record.evaluated(4, 4.0, {"accuracy": 0.9, "loss": 5.0})
    assert record.time_to == {"accuracy=0.5": 1.0, "loss=1": 3.0}


def test_the_time_to_a_target_is_in_its_column_from_then_on(tmp_path):
    with RunFolder(tmp_path / "r", "") as folder:
        record = RunRecord(folder, [Target("accuracy", 0.5), Target("loss", 1.0), Target("error", 0.1)])
        for version, accuracy, loss in ((0, 0.1, 3.0), (1, 0.6, 2.0), (2, 0.4, 1.0), (3, 0.9, 0.5)):
            record.evaluated(version, 1.5 * version, {"accuracy": accuracy, "loss": loss})
    header, *rows = read_table(folder.path / "metrics.csv")
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    assert {name: cells for name, cells in columns.items() if name.startswith("time_to")} == {
        "time_to/accuracy=0.5": ("", "1.5", "1.5", "1.5"),
        "time_to/loss=1": ("", "", "3.0", "3.0"),
        "time_to/error=0.1": ("", "", "", ""),
    }


def test_a_run_without_targets_has_no_column_of_times(tmp_path):
    with RunFolder(tmp_path / "r", "") as folder:
        RunRecord(folder).evaluated(0, 0.0, {"accuracy": 0.1})
    header, *_ = read_table(folder.path / "metrics.csv")
    assert "accuracy" in header and not any(name.startswith("time_to") for name in header)


def test_without_targets_nothing_is_ever_reached():
    assert not RunRecord(None).evaluated(1, 1.0, {"accuracy": 1.0})


def test_without_a_folder_nothing_is_fingerprinted():
    state = line_state()
    update = Update(1, 1, 0, filled(state, 1.0), 1)
    RunRecord(None).event(Arrived(update), 0.0)
    assert update.fingerprint == ""
