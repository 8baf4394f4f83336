"""Utilisation, participation, coverage, memory and averages over clients, each by hand."""

from __future__ import annotations

import csv
import math

import pytest
import torch
from torch import nn

import raafl
from model_zoo import CharLM
from raafl.algorithms import fed_async, fed_avg, fed_raa, hetero_fl
from raafl.config.targets import Target
from raafl.core.types import Assignment, Joined, Settled, Update
from raafl.data import Dirichlet, Iid, TextFolder
from raafl.data.federated import tokens_in
from raafl.errors import BadInput
from raafl.runfolder.outcome import summary_lines
from raafl.runfolder.record import RunRecord
from raafl.runfolder.schema import RUN_COLUMNS, is_metric
from raafl.runfolder.statistics import Coverage, RunStatistics
from raafl.runtime.run import simulate
from raafl.runtime.setup import build
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from tests.helpers.coordinators import EXAMPLE, Line, assigned, filled, line_state
from tests.helpers.small_runs import experiment, finish, two_speeds

pytestmark = pytest.mark.timeout(120)

KNOWN = {"accuracy": 0.0, "loss": 0.0}


def task(number, client=1, spec=FULL, region=0, at=0.0):
    return Assignment(number, client, 0, number, 0, spec, region, None, None, 0, at)


def ended(number, client, version, metrics=None, *, spec=FULL, region=0, num_samples=1, outcome="merged"):
    update = Update(number, client, 0, filled(line_state(), 0.0), num_samples, metrics=metrics or {})
    return Settled(task(number, client, spec, region), client, outcome, version, 0, update)


def measured(accuracy, num_samples, **more):
    return {"test/accuracy": accuracy, "test/num_samples": float(num_samples), **more}


# ---- averages over clients ----


def test_clients_count_by_the_size_of_their_data_with_what_they_last_measured():
    figures = RunStatistics()
    figures.settled(ended(1, 1, 1, measured(0.2, 2), num_samples=8), KNOWN)
    assert figures.clients() == {"client_accuracy": pytest.approx(0.2)}
    figures.settled(ended(2, 2, 1, measured(0.8, 6, **{"test/loss": 3.0}), num_samples=24), KNOWN)
    figures.settled(ended(3, 3, 2, num_samples=100), KNOWN)  # has too few samples to keep any
    figures.settled(ended(4, 1, 2, measured(0.5, 2), num_samples=8), KNOWN)
    figures.settled(ended(5, 2, 2, measured(0.0, 6), num_samples=24, outcome="refused:non-finite"), KNOWN)
    assert figures.clients() == {
        "client_accuracy": pytest.approx((10 * 0.5 + 30 * 0.8) / 40),
        "client_loss": pytest.approx(3.0),  # of the one that has it
    }


def test_a_task_is_written_with_what_its_client_measured():
    figures = RunStatistics(peak_bytes=lambda assignment: 100 * assignment.id)
    metrics = measured(0.25, 4, **{"memory/peak_bytes": 5e6, "loss": 1.0})
    assert figures.settled(ended(3, 1, 1, metrics), KNOWN) == {
        "peak_bytes": 300,
        "measured_bytes": 5_000_000,
        "test/accuracy": 0.25,
        "test/num_samples": 4,
    }
    assert figures.settled(ended(2, 1, 2), KNOWN) == {"peak_bytes": 200}
    assert figures.memory() == {"predicted_bytes": 300, "measured_bytes": 5_000_000}


@pytest.mark.parametrize("size", [0.0, -3.0, math.nan, math.inf, 1e300])
def test_an_unsound_size_counts_for_nothing(size):
    figures = RunStatistics()
    assert figures.settled(ended(1, 1, 1, measured(0.9, size)), KNOWN) == {}
    assert figures.clients() == {}


def test_a_client_cannot_make_up_columns_or_numbers():
    figures = RunStatistics()
    for number in (math.nan, 4e38):
        assert figures.settled(ended(1, 1, 1, measured(number, 4)), KNOWN) == {}
    metrics = measured(math.nan, 4, **{"test/mine": 1.0, "test/loss": math.inf, "memory/peak_bytes": math.nan})
    assert figures.settled(ended(1, 1, 1, metrics), KNOWN) == {}
    assert figures.clients() == {}


# ---- coverage and participation ----


def axis_of(submodels):
    (axis,) = submodels.axes
    return axis


def test_coverage_is_the_union_of_what_a_version_trains():
    """Line(4): two weights into each unit, one out of it, and a bias that all train: 13 parameters."""
    submodels = Submodels(Line(4), EXAMPLE)
    coverage, axis = Coverage(submodels), axis_of(submodels)
    first, last, odd = (Spec.select({axis: units}) for units in ([0, 1], [1, 2, 3], [0, 3]))
    assert coverage.share([first]) == pytest.approx((2 * 3 + 1) / 13)
    assert coverage.share([first, first]) == coverage.share([first])
    assert coverage.share([first, odd]) == pytest.approx((3 * 3 + 1) / 13)
    assert coverage.share([first, last]) == coverage.share([FULL, odd]) == 1.0


def test_what_is_frozen_or_no_parameter_is_not_to_be_covered():
    class Frozen(Line):
        def __init__(self):
            super().__init__(4)
            self.base, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(1)
            self.base.requires_grad_(False)

        def forward(self, x):
            return self.norm(super().forward(self.base(x)))

    submodels = Submodels(Frozen(), EXAMPLE)
    spec = Spec.select({"hidden": [2]})
    assert Coverage(submodels).share([spec]) == pytest.approx((3 + 1 + 2) / (13 + 2))  # with the norm's weight and bias


def test_a_frozen_base_that_is_held_takes_no_memory_to_count(monkeypatch):
    class Adapted(Line):
        def __init__(self):
            super().__init__(4)
            self.base = nn.Linear(2, 2).requires_grad_(False)

    module = Adapted()
    submodels = Submodels(module, EXAMPLE)
    submodels.attach_base(module)
    zeros, made = FlatTensors.zeros, []
    monkeypatch.setattr(
        FlatTensors, "zeros", lambda layout, *more: made.append(layout.num_bytes) or zeros(layout, *more)
    )
    one, two = (Spec.select({"hidden": units}) for units in ([0], [2, 3]))
    assert Coverage(submodels).share([one, two]) == pytest.approx((3 * 3 + 1) / 13)
    assert made == [4 * 13]


def test_mean_and_least_coverage_over_versions(monkeypatch):
    submodels = Submodels(Line(4), EXAMPLE)
    one, two = (Spec.select({axis_of(submodels): units}) for units in ([0], [2, 3]))
    figures = RunStatistics(Coverage(submodels))
    assert figures.coverage() == {"mean": None, "min": None}
    for number, (version, spec, region) in enumerate([(1, one, 1), (1, two, 2), (2, FULL, 0), (3, two, 2)]):
        figures.settled(ended(number, 1 + number % 2, version, spec=spec, region=region), KNOWN)
    assert figures.coverage() == {"mean": pytest.approx((10 / 13 + 1 + 7 / 13) / 3), "min": pytest.approx(7 / 13)}
    assert figures.coverage() == figures.coverage()  # looking counts nothing twice
    assert figures.regions == {0: 1, 1: 1, 2: 2}
    monkeypatch.setattr("raafl.runfolder.statistics.MAX_ELEMENTS", 12)
    assert Coverage(submodels).share([one, two]) is None


def test_participation_counts_versions_that_a_client_is_part_of():
    figures = RunStatistics()
    for number, (client, version) in enumerate([(1, 1), (2, 1), (1, 2), (1, 2), (2, 4)]):  # twice in version 2
        figures.settled(ended(number, client, version), KNOWN)
    assert figures.participation(4, 2) == {"mean": pytest.approx((2 / 4 + 2 / 4) / 2), "min": 0.5}
    assert figures.participation(4, 3) == {"mean": pytest.approx((2 / 4 + 2 / 4) / 3), "min": 0.0}
    assert RunStatistics().participation(0, 0) == {"mean": 0.0, "min": 0.0}


def test_what_is_saved_goes_on_the_same():
    submodels = Submodels(Line(4), EXAMPLE)
    spec = Spec.select({axis_of(submodels): [1]})

    def play(figures, numbers):
        for number in numbers:
            figures.assigned(task(number, at=float(number)))
            figures.assigned(task(100 + number, at=float(number)))
            client = 1 + number % 3
            figures.settled(
                ended(number, client, 1 + number // 2, measured(number / 10, 5), spec=spec, region=client), KNOWN
            )

    whole, first, second = (RunStatistics(Coverage(submodels), lambda task: task.id) for _ in range(3))
    play(whole, range(1, 12))
    play(first, range(1, 6))
    second.restore(first.save())
    play(second, range(6, 12))
    assert second.save() == whole.save()
    assert second.working_s(20.0, {}) == whole.working_s(20.0, {}) == sum(20 - n for n in range(1, 12))


# ---- whole runs ----


def numbers(run, column):
    return [float(row[column]) for row in run.rows("metrics.csv") if row[column]]


def test_figures_of_rounds_by_hand(tmp_path):
    run = two_speeds(tmp_path, fed_avg(), max_updates=6, eval_every=1)
    # three rounds of 2 s; the fast client works half of each
    assert numbers(run, "utilisation") == pytest.approx([0.0, 0.75, 0.75, 0.75])
    assert numbers(run, "round_s") == pytest.approx([2, 2, 2]) and run.summary["round_s"] == pytest.approx(2.0)
    assert numbers(run, "participation") == [0, 1, 1, 1]
    assert run.summary["participation_rate"] == {"mean": 1.0, "min": 1.0}
    assert numbers(run, "coverage") == [1, 1, 1] and run.summary["coverage"] == {
        "mean": 1,
        "min": 1,
        "regions": {"0": 6},
    }
    size = 4 * (64 * 24 + 24 + 24 * 10 + 10)
    assert numbers(run, "bytes_up") == numbers(run, "bytes_down") == [0, 2 * size, 4 * size, 6 * size]


def test_figures_of_arrivals_count_what_is_under_way(tmp_path):
    run = two_speeds(tmp_path, fed_async(), max_updates=None, max_time=4.5, eval_every=1)
    # arrivals at 1, 2 (the slow one first), 2, 3, 4 (likewise) and 4 s; both always work
    assert numbers(run, "time_s") == pytest.approx([0, 1, 2, 2, 3, 4, 4])
    assert numbers(run, "utilisation") == pytest.approx([0, 1, 1, 1, 1, 1, 1])
    # each version is one client's of two: 2 and 5 the slow one's, the others the fast one's
    assert numbers(run, "participation") == pytest.approx([0] + [1 / 2] * 6)
    assert run.summary["participation_rate"] == {"mean": pytest.approx(0.5), "min": pytest.approx(2 / 6)}
    assert numbers(run, "staleness")[-1] == pytest.approx(run.summary["staleness"]["mean"])


def test_the_peak_in_a_row_is_the_highest_of_the_tasks_that_have_ended(tmp_path):
    run = finish(experiment(tmp_path / "r", fed_raa(), eval_every=1))
    peaks = [int(row["peak_bytes"]) for row in run.rows() if row["outcome"] == "merged"]
    assert len(set(peaks)) == 3  # fragments of 20, 30 and 50 %
    assert [row["peak_bytes"] for row in run.rows("metrics.csv")] == ["", *(str(max(peaks[:n])) for n in range(1, 13))]
    assert run.summary["peak_memory"]["predicted_bytes"] == max(peaks)
    assert "measured_bytes" not in run.rows("metrics.csv")[0]  # nothing is measured in a simulation


def test_coverage_of_fragments_is_that_of_their_specs(tmp_path):
    run = finish(experiment(tmp_path / "r", fed_raa(), eval_every=1))
    share = {"1": 5, "2": 7, "3": 12}  # fragments of 20, 30 and 50 % of 24 units, as in test_record
    shares = [(share[row["region"]] * 75 + 10) / 1810 for row in run.rows() if row["outcome"] == "merged"]
    assert run.summary["coverage"]["mean"] == pytest.approx(sum(shares) / 12)
    assert run.summary["coverage"]["min"] == pytest.approx(min(shares))
    assert sum(run.summary["coverage"]["regions"].values()) == 12
    assert numbers(run, "coverage") == pytest.approx([sum(shares[:n]) / n for n in range(1, 13)])


def test_a_client_that_measures_itself_takes_a_third_of_a_step_for_each_sample(tmp_path):
    plain, tested = (
        finish(experiment(tmp_path / f"{share}", "fed_avg", partition=Iid(test_share=share), eval_every=1))
        for share in (0.0, 0.2)
    )
    flops = 4 * 64 * 24 + 6 * 24 * 10  # of a training step, for one sample
    for row, other in zip(tested.rows(), plain.rows(), strict=True):
        speed = (8e7, 5e7, 3e7, 2e7)[int(row["client"]) - 1]
        num = int(row["test/num_samples"])
        assert num in (71, 72) and int(row["num_samples"]) + num == int(other["num_samples"])
        assert float(row["train_s"]) - float(other["train_s"]) == pytest.approx(num * flops / 3 / speed, rel=1e-6)
        assert int(row["peak_bytes"]) > 4 * 1810


def test_an_emulated_device_takes_its_time_for_that_too(tmp_path):
    parts = build(experiment(tmp_path / "r", "fed_avg", partition=Iid(test_share=0.2)), pace=True)
    actions = [action for one in parts.clients for action in parts.coordinator.handle(Joined(one), 0.0)]
    flops = 4 * 64 * 24 + 6 * 24 * 10
    for number, task in assigned(actions).items():
        tested, speed = parts.data.test_sizes[number - 1], (8e7, 5e7, 3e7, 2e7)[number - 1]
        link_s = 0.02 + 4 * 1810 * (1 / 1e6 + 1 / 5e5)
        assert task.pace_s == pytest.approx(link_s + (3 * 64 + tested / 3) * flops / speed)


def test_averages_over_clients_are_those_of_the_table(tmp_path):
    run = finish(experiment(tmp_path / "r", "hetero_fl", partition=Dirichlet(0.5, test_share=0.2), eval_every=1))
    for row in run.rows("metrics.csv")[1:]:
        latest = {r["client"]: r for r in run.rows() if int(r["merged_version"]) <= int(row["version"])}
        sizes = {c: int(r["num_samples"]) + int(r["test/num_samples"]) for c, r in latest.items()}
        for name in ("accuracy", "macro_f1", "top5_accuracy", "loss"):
            mean = sum(sizes[c] * float(r[f"test/{name}"]) for c, r in latest.items()) / sum(sizes.values())
            assert float(row[f"client_{name}"]) == pytest.approx(mean)
    last = run.rows("metrics.csv")[-1]
    assert run.summary["final"]["client_macro_f1"] == float(last["client_macro_f1"])
    assert len({row["test/num_samples"] for row in run.rows()}) > 1


def test_a_target_may_be_an_average_over_clients(tmp_path):
    made = experiment(
        tmp_path / "r", partition=Iid(test_share=0.2), target="client_loss=2.1", max_updates=400, eval_every=1
    )
    run = finish(made)
    assert run.summary["finished"] == "target" and run.summary["final"]["client_loss"] <= 2.1
    assert run.summary["time_to"]["client_loss=2.1"] == pytest.approx(run.summary["time_s"])
    with pytest.raises(BadInput, match=r"gives no 'client_loss': use one of loss, accuracy, top5_accuracy, macro_f1$"):
        simulate(experiment(tmp_path / "s", target="client_loss=2.1"))


@pytest.mark.parametrize("workers", [1, 2])
def test_measuring_leaves_training_as_it_was(tmp_path, monkeypatch, workers):
    made = {"partition": Iid(test_share=0.2), "workers": workers, "devices": None, "max_updates": 8}
    tested = finish(experiment(tmp_path / "tested", hetero_fl(rates=[1.0, 0.5]), **made))
    monkeypatch.setattr("raafl.local.own_test.measure_part", lambda *_: {})
    plain = finish(experiment(tmp_path / "plain", hetero_fl(rates=[1.0, 0.5]), **made))
    assert tested.digest == plain.digest and "test/loss" in tested.rows()[0] and "test/loss" not in plain.rows()[0]


def test_a_metric_of_the_users_own_keeps_its_name():
    record = RunRecord(None, [Target("coverage", 0.5)])
    assert record.evaluated(1, 1.0, {"coverage": 0.7})
    assert record.metrics == {"coverage": 0.7} and "coverage" not in record.row and "utilisation" in record.row


def test_peaks_are_those_of_the_moment_too_and_any_column_beside_metrics_is_a_figure():
    record = RunRecord(None, figures=RunStatistics(peak_bytes=lambda assignment: 100 * assignment.id))
    record.evaluated(0, 0.0, dict(KNOWN))
    assert record.row["peak_bytes"] is None and "measured_bytes" not in record.row
    record.settled(ended(3, 1, 1, {"memory/peak_bytes": 5e6}), 1.0)
    record.due(1, 1.0)
    record.settled(ended(2, 1, 2, {"memory/peak_bytes": 4e6}), 2.0)
    record.due(2, 2.0)
    record.settled(ended(4, 1, 3, {"memory/peak_bytes": 6e6}), 3.0)
    for version, expected in ((1, (300, 5_000_000)), (2, (300, 5_000_000)), (3, (400, 6_000_000))):
        record.evaluated(version, float(version), dict(KNOWN))
        assert (record.row["peak_bytes"], record.row["measured_bytes"]) == expected
    assert set(record.row) == set(RUN_COLUMNS) - {"epsilon", "tokens_per_s"}  # of private runs, and of language models
    assert not any(map(is_metric, ("version", "time_s", "wall_s", "time_to/accuracy=0.5", *record.row)))
    assert is_metric("accuracy") and is_metric("client_accuracy")


def test_figures_are_those_of_the_moment_at_which_a_version_was_made():
    record = RunRecord(None)
    record.metrics = dict(KNOWN)
    record.due(1, 1.0)
    record.settled(ended(1, 1, 2, measured(0.5, 4)), 2.0)
    record.due(2, 2.0)
    record.settled(ended(2, 1, 3, measured(0.75, 4)), 3.0)
    record.evaluated(2, 2.0, {"accuracy": 0.1})  # the first version was overtaken
    assert record.client_metrics == {"client_accuracy": 0.5} and record.row["round_s"] == 1.0
    assert not record._due


def test_tokens_a_second_are_those_of_merged_updates_over_the_clock(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("to be or not to be, that is the question " * 8)
    data = TextFolder(str(tmp_path), length=8, batch_size=4)
    options = {"clients": 2, "max_updates": 6, "num_steps": 3, "eval_every": 2, "progress": "quiet"}
    fed = raafl.Federation(
        "fed_avg", devices=[{"name": "slow", "flops_per_s": 1e6}], output=tmp_path / "run", **options
    )
    result = fed.simulate(lambda: CharLM(vocab_size=261, embedding=4, hidden=4), data)
    assert result.summary["tokens"] == 6 * 3 * 4 * 8
    assert result.summary["tokens_per_s"] == pytest.approx(576 / result.summary["time_s"])
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["tokens_per_s"] for row in rows[:1]] == [""]
    assert float(rows[-1]["tokens_per_s"]) == pytest.approx(result.summary["tokens_per_s"])
    assert any(line.startswith("trained on 576 tokens, ") for line in summary_lines(result.summary, tmp_path))


def test_tokens_of_a_batch_leave_out_padding_and_other_models_have_none():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert tokens_in((tokens, tokens)) == 10
    assert tokens_in({"input_ids": tokens, "labels": tokens, "attention_mask": mask}) == 8
    targets = torch.tensor([[-100, 1, -100, -100, -100], [-100, 1, -100, 1, -100]])  # of a chat, padded, without a mask
    assert tokens_in({"input_ids": tokens, "labels": targets}) == tokens_in((tokens, targets)) == 2 + 4
    classes = torch.zeros(2, dtype=torch.int64)
    assert tokens_in((tokens, mask, classes)) is tokens_in((tokens.float(), classes)) is tokens_in(tokens) is None
    assert tokens_in({"input_ids": tokens, "labels": classes}) is None
