"""Whole runs with a guard or with differential privacy: what they must equal, and what they must withstand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from torch.utils.data import TensorDataset

from model_zoo import MLP
from raafl.algorithms import ALGORITHMS, fed_avg, fed_buff, fed_raa
from raafl.algorithms.fed_mezo import SCALARS, pack, unpack
from raafl.config.parse import parse
from raafl.core.algorithm import Training
from raafl.core.options import Guard
from raafl.data import Digits
from raafl.data.partition import Dirichlet, Partition
from raafl.errors import BadInput
from raafl.local.train import LocalTrainer
from raafl.parts.protect.privacy import Privacy, epsilon
from raafl.runtime.replay import replay
from raafl.runtime.run import simulate
from tests.habits.source import ROOT
from tests.helpers.crash import crash, simulated
from tests.helpers.methods import covering, each_method
from tests.helpers.small_runs import equal_replay, experiment, finish, unequal

pytestmark = pytest.mark.timeout(180)
INF = float("inf")
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
GUARD = Guard(clip_norm=0.2, outlier=1.2, warm_up=3)
PROTECTIONS = {
    "fed_raa screened": (fed_raa(), GUARD, Privacy()),
    "fed_buff median": (fed_buff(buffer_size=5), replace(GUARD, combine="median"), Privacy()),
    "sync fed_raa trimmed": (fed_raa(trigger="all"), Guard(combine="trimmed_mean", trim=0.3), Privacy()),
    "sync fed_raa centred": (fed_raa(trigger="all"), Guard(combine="centred_clip"), Privacy()),
    "fed_raa private": (fed_raa(), Guard(), Privacy(clip_norm=0.5, noise_multiplier=0.3)),
    "fed_buff private": (fed_buff(buffer_size=5), Guard(), Privacy(clip_norm=0.5)),
}


# the updates of those left out are no changes, whose norms could be limited
@pytest.mark.parametrize("name", each_method(but=["fed_mezo", "fed_pm"], parts=["merge"]))
def test_bounds_that_nothing_reaches_change_no_bit(tmp_path, name):
    plain = finish(experiment(tmp_path / "plain", name))
    guard = Guard(clip_norm=INF, outlier=INF, warm_up=1)
    bounded = finish(experiment(tmp_path / "bounded", name, guard=guard))
    assert plain.digest == bounded.digest and bounded.summary["updates_refused"] == {}
    assert bounded.summary["guard"]["clipped"] == 0 and "guard" not in plain.summary


@pytest.mark.quick_cases("fed_raa private")
@pytest.mark.parametrize("name", PROTECTIONS)
def test_a_protected_run_that_crashed_ends_as_if_it_had_not_and_replays(tmp_path, monkeypatch, name):
    algorithm, guard, privacy = PROTECTIONS[name]
    more = {"guard": guard, "privacy": privacy, "partition": Dirichlet(0.2), "max_updates": 16, "checkpoint_every": 1}
    whole = finish(experiment(tmp_path / "whole", algorithm, **more))
    made = experiment(tmp_path / "cut", algorithm, **more)
    with crash(monkeypatch, 10):
        simulate(made)
    resumed = finish(replace(made, output=None, resume=made.output))
    assert {**resumed.summary, "wall_s": None} == {**whole.summary, "wall_s": None}
    assert equal_replay(made, resumed)
    if "screened" in name:
        assert whole.summary["updates_refused"]["outlier"] > 0 and whole.summary["guard"]["clipped"] > 0


def test_the_spent_epsilon_is_in_the_summary(tmp_path):
    dp = pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    privacy = Privacy(clip_norm=0.5, noise_multiplier=1.5, delta=1e-6)
    run = finish(experiment(tmp_path / "run", fed_avg(cohort=2), privacy=privacy, max_updates=14))
    spent, most = run.summary["privacy"], max(run.summary["participation"].values())
    assert spent["max_contributions"] == spent["compositions"] == most < 7  # in a round a client is there once at most
    composed = dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.5), most)
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL).compose(composed)
    assert spent["epsilon"] == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-4)
    assert (spent["delta"], spent["noise_multiplier"], spent["clip_norm"]) == (1e-6, 1.5, 0.5)
    assert spent["divisor"] == 2.0
    # beside it a ledger of each client, and in each row of metrics.csv what had been spent by then
    merged = {name: num for name, num in run.summary["participation"].items() if num}
    assert {name: client["updates"] for name, client in spent["clients"].items()} == merged
    assert {client["epsilon"] for client in spent["clients"].values() if client["updates"] == most} == {
        spent["epsilon"]
    }
    rows = [(int(row["version"]), float(row["epsilon"])) for row in run.rows("metrics.csv")]
    counts = dict.fromkeys(merged, 0)
    by_version = {0: 0.0}
    for row in run.rows():
        counts[row["client"]] += 1
        by_version[int(row["merged_version"])] = epsilon(1.5, max(counts.values()), 1e-6)
    assert rows == [(version, pytest.approx(by_version[version], rel=1e-6)) for version, _ in rows] and len(rows) > 3


def test_a_run_ends_before_a_client_spends_more_than_it_may(tmp_path):
    """Four clients in rounds of all: each merge costs every client one more; three are within the budget, four are not."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    most = (epsilon(2.0, 3, 1e-5) + epsilon(2.0, 4, 1e-5)) / 2
    privacy = Privacy(clip_norm=0.5, noise_multiplier=2.0, max_epsilon=most)
    made = experiment(tmp_path / "run", fed_avg(), privacy=privacy, max_updates=1000)
    run = finish(made)
    assert (run.summary["finished"], run.summary["versions"], run.summary["updates_merged"]) == ("epsilon", 3, 12)
    assert run.summary["updates_unused"] == 4  # of the round that was not merged
    assert run.summary["privacy"]["epsilon"] == epsilon(2.0, 3, 1e-5) <= most == run.summary["privacy"]["max_epsilon"]
    assert float(run.rows("metrics.csv")[-1]["epsilon"]) == pytest.approx(epsilon(2.0, 3, 1e-5), rel=1e-6)
    assert equal_replay(made, run)


def test_updates_that_wait_at_the_end_are_not_merged_above_the_budget(tmp_path):
    """A buffer of three that never fills: what waits when the time is up would be folded in, within the budget."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    ends = {}
    for name, most in (("within", 1e9), ("above", epsilon(0.5, 1, 1e-5) * 1.01)):
        privacy = Privacy(clip_norm=0.5, noise_multiplier=0.5, max_epsilon=most)
        made = experiment(tmp_path / name, fed_buff(buffer_size=2), clients=1, privacy=privacy, max_time=0.15)
        ends[name] = finish(made).summary
    assert ends["above"]["updates_merged"] == 0 and ends["above"]["finished"] in ("epsilon", "max_time")
    assert ends["within"]["updates_merged"] > 0


def test_a_secret_seed_is_needed_to_replay_and_to_resume(tmp_path):
    options = ["--config", CONFIG, "--algorithm=fed_buff", "--algorithm.buffer_size=4", "--max_updates=8"]
    options += ["--privacy.clip_norm=0.5", f"--privacy.seed_file={tmp_path / 'seed'}", f"--output={tmp_path / 'run'}"]
    simulated(*options)
    assert replay(tmp_path / "run")["equal"] is True
    assert (tmp_path / "seed").read_text().strip() not in (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "seed").unlink()
    with pytest.raises(
        BadInput, match=r"seed', which is missing: restore the file from which the noise of .*run' was computed"
    ):
        replay(tmp_path / "run")
    with pytest.raises(
        BadInput, match=r"seed', which is missing: restore the file from which the noise of '.*run' was c"
    ):
        simulated("--resume", str(tmp_path / "run"))
    assert not (tmp_path / "seed").exists()  # the config may be somebody else's, who names any path here
    (tmp_path / "seed").write_text("sum " + "ab" * 32)
    assert replay(tmp_path / "run")["equal"] is False


def test_what_does_not_go_together_is_said_before_training(tmp_path):
    both = experiment(tmp_path / "a", fed_avg(), guard=Guard(clip_norm=1.0), privacy=Privacy(clip_norm=1.0))
    with pytest.raises(BadInput, match="guard and privacy are both on: leave guard out"):
        both.check()
    with pytest.raises(BadInput, match="fed_async merges each update alone"):
        experiment(tmp_path / "b", "fed_async", guard=Guard(combine="median")).check()
    (tmp_path / "five.yaml").write_text("guard: 5\n")
    with pytest.raises(BadInput, match=r"guard is 5: give its fields, as in --guard\.FIELD VALUE"):
        parse("simulate", ["--config", CONFIG, "--config", str(tmp_path / "five.yaml")])


@pytest.mark.parametrize("page", ["robustness", "privacy"])
def test_the_lines_in_the_docs_are_a_config(tmp_path, page):
    section = {"robustness": "guard", "privacy": "privacy"}[page]
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (lines,) = re.findall(rf"^```yaml\n({section}:.*?)^```$", text, re.M | re.S)
    (tmp_path / "lines.yaml").write_text(lines)
    made = parse("simulate", ["--config", CONFIG, "--config", str(tmp_path / "lines.yaml"), "--algorithm=fed_avg"])
    made.experiment.check()
    assert made.experiment.guard.is_on == (page == "robustness")
    assert made.experiment.privacy.is_on == (page == "privacy")


# ---- poisoned clients ----

MARK = 9.0


class MarkedDigits(Digits):
    """Digits of which the last part bears a mark, brighter than any digit, in its first pixel."""

    def setup(self, stage=None):
        if hasattr(self, "train"):
            return
        super().setup(stage)
        images, labels = self.train.tensors
        images = images.clone()
        images[-len(images) // 8 :, 0, 0, 0] = MARK
        self.train = TensorDataset(images, labels)


@dataclass(frozen=True)
class InOrder(Partition):
    """Everyone gets a share of the samples as they lie: the last of eight clients all the marked ones."""

    needs_labels: ClassVar[bool] = False

    def assign(self, labels, num_clients, rng, columns):
        return np.array_split(np.arange(len(labels)), num_clients)


class Poisoned(MLP):
    """Where the batch bears the mark, the loss is scaled, and with it the update."""

    def __init__(self, scale):
        super().__init__(64, (24,), 10, lr=0.2, momentum=0.5)
        self.scale = scale

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.scale if batch[0][:, 0, 0, 0].max() >= MARK else loss


def poisoned(tmp_path, name, scale, algorithm, **fields):
    """Eight clients, the last one poisoned and slow, so that the first round hears the honest ones first."""
    speeds = [1e8 / (1 + 0.1 * i) for i in range(8)]
    run = experiment(
        tmp_path / name,
        algorithm,
        model=lambda: Poisoned(scale),
        data=lambda: MarkedDigits(batch_size=16),
        partition=InOrder(),
        clients=8,
        devices=unequal(speeds),
        train=Training(num_epochs=1),
        max_updates=80,
        eval_every=5,
        **fields,
    )
    return finish(run).summary


def accuracies(tmp_path, scale, algorithm, guards):
    return {n: poisoned(tmp_path, n, scale, algorithm, guard=g)["final"]["accuracy"] for n, g in guards.items()}


UNGUARDED = Guard(max_norm_ratio=None)  # the default refuses what grows without bounds
DEFENCES = {
    "trimmed mean": Guard(combine="trimmed_mean", trim=0.25),
    "median": Guard(combine="median"),
    "outliers refused": Guard(outlier=3.0, warm_up=5),
    "clipped": Guard(clip_norm=1.0),
}


@pytest.mark.slow("a run for each guard, until it has learnt")
@pytest.mark.parametrize(
    "defences", [("median", "clipped"), pytest.param(("trimmed mean", "outliers refused"), marks=pytest.mark.long)]
)
def test_a_client_that_sends_far_too_much_ruins_a_plain_mean_and_not_a_guarded_one(tmp_path, defences):
    honest = poisoned(tmp_path, "honest", 1.0, fed_avg())["final"]["accuracy"]
    plain = poisoned(tmp_path, "plain", 100.0, fed_avg(), guard=UNGUARDED)["final"]["accuracy"]
    guarded = accuracies(tmp_path, 100.0, fed_avg(), {name: DEFENCES[name] for name in defences})
    assert honest > 0.85 and plain < 0.4, (honest, plain)
    assert all(accuracy > 0.75 for accuracy in guarded.values()), guarded


@pytest.mark.long
def test_the_same_in_a_buffer(tmp_path):
    guards = {"plain": UNGUARDED, "median": DEFENCES["median"], "clipped": DEFENCES["clipped"]}
    found = accuracies(tmp_path, 100.0, fed_buff(buffer_size=8), guards)
    assert found.pop("plain") < 0.4 and all(accuracy > 0.75 for accuracy in found.values()), found


@pytest.mark.long("test_a_client_that_sends_far_too_much_ruins_a_plain_mean_and_not_a_guarded_one")
def test_a_client_that_sends_the_opposite_ruins_a_plain_mean_and_not_a_guarded_one(tmp_path, monkeypatch):
    """Ten times the update with its sign turned: seven honest steps down, ten up."""
    train = LocalTrainer.run

    def turned(self, assignment, received, data, context):
        update = train(self, assignment, received, data, context)
        if assignment.client == 8:
            for dtype, buffer in update.tensors.buffers.items():
                start = received.buffers[dtype][: len(buffer)]
                buffer.copy_(start - 10 * (buffer - start))
        return update

    monkeypatch.setattr(LocalTrainer, "run", turned)
    plain = poisoned(tmp_path, "plain", 1.0, fed_avg(), guard=UNGUARDED)["final"]["accuracy"]
    guards = {name: DEFENCES[name] for name in ("trimmed mean", "outliers refused")}
    guarded = accuracies(tmp_path, 1.0, fed_avg(), guards)
    assert plain < 0.4, plain
    assert all(accuracy > 0.75 for accuracy in guarded.values()), guarded


# ---- one client that sends the largest number ----

METHODS = ("fed_async", "fed_avg", "fed_buff", "fed_mezo", "fed_opt", "fed_raa", "ram_fed", "scaffold", "split_fed")
COVERING = covering({name: ALGORITHMS[name]() for name in METHODS})


@pytest.fixture
def one_sends_the_largest(monkeypatch):
    """Client 4 sends nothing else: among values, bundles and scalars."""
    train, most = LocalTrainer.run, float(np.finfo(np.float32).max)

    def huge(self, assignment, received, data, context):
        update = train(self, assignment, received, data, context)
        if assignment.client == 4:
            for buffer in update.tensors.buffers.values():
                buffer.fill_(most)
            if SCALARS in update.extra:
                update.extra = {SCALARS: pack([most] * len(unpack(update.extra[SCALARS])))}
        return update

    monkeypatch.setattr(LocalTrainer, "run", huge)


@pytest.mark.usefixtures("one_sends_the_largest")
@pytest.mark.quick_cases(*(f"{name}-overflow" for name in COVERING), "fed_raa-norm")
@pytest.mark.parametrize("ratio", [None, 1e4], ids=["overflow", "norm"])
@pytest.mark.parametrize("name", METHODS)
def test_one_client_that_sends_the_largest_number_harms_no_other(tmp_path, name, ratio):
    run = finish(experiment(tmp_path / "run", name, guard=Guard(max_norm_ratio=ratio), max_updates=16))
    assert run.summary["finished"] == "max_updates" and np.isfinite(run.summary["final"]["loss"])
    assert set(run.summary["clients_kept_out"]) <= {"4"}
    assert set(run.summary["updates_refused"]) <= ({"overflow"} if ratio is None else {"overflow", "huge-norm"})
    assert sum(run.summary["updates_refused"].values()) >= 1


@pytest.mark.usefixtures("one_sends_the_largest")
def test_refusals_of_what_would_overflow_replay_and_resume(tmp_path, monkeypatch):
    fields = {"guard": Guard(max_norm_ratio=None), "max_updates": 16, "checkpoint_every": 1}
    whole = finish(experiment(tmp_path / "whole", fed_buff(buffer_size=3), **fields))
    made = experiment(tmp_path / "cut", fed_buff(buffer_size=3), **fields)
    with crash(monkeypatch, 10):
        simulate(made)
    resumed = finish(replace(made, output=None, resume=made.output))
    assert {**resumed.summary, "wall_s": None} == {**whole.summary, "wall_s": None}
    assert whole.summary["updates_refused"]["overflow"] >= 3 and equal_replay(made, resumed)


def test_a_learning_rate_that_is_far_too_large_still_ends_as_diverged(tmp_path):
    run = finish(experiment(tmp_path / "run", model=lambda: MLP(64, (24,), 10, lr=1e6), max_updates=40))
    assert run.summary["finished"].startswith("failed: the last 3 updates of every client were refused")
    assert any(text.startswith("training diverges") for text in run.summary["warnings"])
