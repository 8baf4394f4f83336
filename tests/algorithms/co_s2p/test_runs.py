"""Whole runs of Co-S2P: Algorithm 2's two ends, a run that is cut, scores that clients keep."""

from __future__ import annotations

import pytest
import torch

from raafl.algorithms import co_s2p, fed_avg
from raafl.core.algorithm import Training
from raafl.core.types import Arrived, Update
from raafl.data import Dirichlet, Iid
from raafl.parts.local.mask_training import SCORES
from raafl.runtime.setup import build
from raafl.submodel import FULL, FlatTensors, Spec
from tests.algorithms.test_co_s2p import blocks
from tests.helpers.coordinators import answer, assigned, coordinator_for, join, values_of
from tests.helpers.small_runs import experiment, finish


def eyes():
    from model_zoo import ViT

    class Small(ViT):
        def forward(self, x):
            return super().forward(x.view(-1, 1, 8, 8))

    return Small("micro", image_size=8, patch_size=4, in_channels=1, lr=3e-3)


@pytest.mark.long("test_algorithm_2_has_the_synchronous_and_the_asynchronous_run_at_its_ends")
@pytest.mark.slow("a transformer learns")
def test_a_transformer_learns(tmp_path):
    pytest.importorskip("transformers")
    algorithm = co_s2p(rates=[1.0, 0.25, 0.0625, 0.25], mask_rounds=1, mask_steps=2)
    one = finish(experiment(tmp_path / "run", algorithm, model=eyes, max_updates=14))
    merged = [row for row in one.rows() if row["outcome"] == "merged"]
    assert any("trains nothing" in row["spec"] and int(row["bytes_up"]) < 2000 for row in merged)
    assert one.summary["staleness"]["max"] >= 1


@pytest.mark.parametrize(
    ("arguments", "trigger"),
    [({"min_ratio": 1.0, "wait_s": 3.0}, "sync"), ({"min_ratio": 0.0, "wait_s": 0.0}, "async")],
)
def test_algorithm_2_has_the_synchronous_and_the_asynchronous_run_at_its_ends(tmp_path, arguments, trigger):
    more = {"partition": Dirichlet(alpha=1.0), "max_updates": 12}
    one = finish(experiment(tmp_path / "one", co_s2p(mask_rounds=1, mask_steps=2, **arguments), **more))
    other = finish(experiment(tmp_path / "other", co_s2p(mask_rounds=1, mask_steps=2, trigger=trigger), **more))
    assert one.digest == other.digest
    assert (one.summary["staleness"]["max"] == 0) == (trigger == "sync")


@pytest.mark.long("test_algorithm_2_has_the_synchronous_and_the_asynchronous_run_at_its_ends")
@pytest.mark.slow("a transformer learns, twice")
def test_so_it_has_with_windows_of_a_transformer_trained_masks_and_distillation(tmp_path):
    """The asynchronous end; of the other one the windows are as those of the test above."""
    pytest.importorskip("transformers")
    more = {"model": eyes, "max_updates": 12, "eval_every": 12, "train": Training(num_epochs=None, num_steps=2)}
    settings = {"rates": [1.0, 0.25, 0.0625, 0.25], "mask_rounds": 1, "mask_steps": 1}
    one = finish(experiment(tmp_path / "one", co_s2p(**settings, min_ratio=0.0, wait_s=0.0), **more))
    other = finish(experiment(tmp_path / "other", co_s2p(**settings, trigger="async"), **more))
    assert one.digest == other.digest and one.text("clients.csv") == other.text("clients.csv")
    assert one.summary["staleness"]["max"] > 0
    specs = [Spec.from_json(row["spec"]) for row in one.events("assigned")]
    assert any(spec.trained == () for spec in specs), "masks"
    assert any(spec.kept and blocks(spec) == [0] for spec in specs), "a window below the top, cut in width"
    assert any(spec == FULL for spec in specs), "all exits, which are distilled into"


def test_whole_models_merged_alike_in_rounds_are_fed_avg():
    first = coordinator_for(co_s2p(rates=1.0, merge="mean", trigger="sync"), min_clients=2)
    second = coordinator_for(fed_avg(by_samples=False), min_clients=2)
    for coordinator in (first, second):
        asked = assigned(join(coordinator, [1, 2]))
        for value in (1.0, 4.0, 2.5):
            answer(coordinator, asked[1], value)
            asked = assigned(answer(coordinator, asked[2], value + 1))
    # fed_avg is sent values, co_s2p differences: 1.5 + 4.5 + 3
    assert values_of(second.state).unique().tolist() == [3.0]
    assert values_of(first.state).unique().tolist() == [9.0]


def test_a_client_keeps_its_scores_through_a_checkpoint_and_hostile_ones_are_refused():
    coordinator = coordinator_for(co_s2p(rates=0.25, mask_rounds=1), min_clients=2)
    asked = assigned(join(coordinator, [1, 2]))
    task = asked[1]
    assert task.spec.trained == () and task.extra["masks"] == ["hidden"]
    scores = FlatTensors.empty(coordinator.payload.layout(task.spec, "trained"))
    assert scores.layout.shapes == {"scores/hidden": (4,)}
    for bad in (float("inf"), float("nan"), -1e5):
        scores["scores/hidden"].fill_(bad)
        actions = coordinator.handle(Arrived(Update(asked[1].id, 1, 0, scores, 1)), 1.0)
        assert any(getattr(action, "outcome", "") == "refused:wrong-scores" for action in actions)
        asked |= assigned(actions)
        if bad != bad:
            coordinator.admission.backoff.forgive()
    scores["scores/hidden"].copy_(torch.tensor([0.0, 2.0, 1.0, 0.0]))
    asked |= assigned(coordinator.handle(Arrived(Update(asked[1].id, 1, 0, scores, 1)), 2.0))
    assert coordinator.state.clients.find(SCORES, 1)["hidden"].tolist() == [0.0, 2.0, 1.0, 0.0]
    assert list(asked[1].spec.indices("hidden")) == [1, 2]


def test_a_model_without_blocks_is_cut_in_width_and_the_run_says_so(tmp_path):
    """Such runs are those of Algorithm 2 above."""
    made = build(experiment(tmp_path, co_s2p()), pace=False)
    said = made.coordinator.algorithm.notes(made.coordinator.fleet, 4)
    assert any("no stack of blocks: its depth stays whole" in line for line in said)
    assert any("there is no distillation" in line for line in said)


def test_after_a_task_of_masks_no_client_measures_a_model(tmp_path):
    algorithm = co_s2p(rates=[0.25], mask_rounds=1, mask_steps=2, trigger="sync")
    run = finish(experiment(tmp_path / "run", algorithm, partition=Iid(test_share=0.2), max_updates=8))
    masks = {row["id"] for row in run.journal() if row["event"] == "assigned" and row["spec"].get("trained") == []}
    measured = {int(row["assignment"]): bool(row["test/accuracy"]) for row in run.rows() if row["outcome"] == "merged"}
    assert len(masks) == 4 and len(measured) == 8
    assert measured == {number: number not in masks for number in measured}
