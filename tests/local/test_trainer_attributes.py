"""Attributes of a Trainer that a loss changes in place: apart for each task, or refused."""

from __future__ import annotations

import itertools
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

import raafl
from raafl.errors import BadInput
from raafl.local.trainer_attributes import shared_of, state_of, unchanged
from tests.helpers.small_trainers import plain

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[hf]'")


class Meter:
    def __init__(self) -> None:
        self.steps = 0


def appended(trainer: Any) -> float:
    trainer.seen["losses"].append(1)
    return len(trainer.seen["losses"])


def averaged(trainer: Any) -> float:
    return float(trainer.center.mul_(0.5).add_(1))


def metered(trainer: Any) -> float:
    trainer.meter.steps += 1
    return float(trainer.meter.steps)


def queued(trainer: Any) -> float:
    trainer.large[trainer.state.global_step % 4] = 1.0
    return 1.0


def measured(trainer: Any) -> float:
    trainer.mean.update(1 + trainer.mean.update_count)
    return float(trainer.mean.compute())


@torch.no_grad()
def taught(trainer: Any) -> float:
    return float(trainer.teacher.weight.add_(1).mean())


def changing(folder: Path, weigh: Any) -> Any:
    """A Trainer whose loss weighs each batch by what it has kept on the Trainer of those before."""
    from transformers import Trainer

    class Changing(Trainer):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.seen, self.center, self.meter = defaultdict(list), torch.zeros(()), Meter()
            self.teacher, self.mean = torch.nn.Linear(1, 1), MeanMetric()
            self.rows, self.names, self.counter = list(range(20_000)), ("a", "b"), itertools.count()
            self.large, self.owner, self.weigh = torch.empty(1 << 23), [self], weigh

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            loss = loss * weigh(self) if model.training else loss
            return (loss, outputs) if return_outputs else loss

    return plain(folder, base=Changing, warmup_steps=0)


@pytest.mark.parametrize("weigh", (appended, averaged, metered, measured))
def test_what_a_loss_changes_in_place_starts_again_in_each_task(weigh: Any, tmp_path: Path) -> None:
    alone, given = changing(tmp_path, weigh), changing(tmp_path, weigh)
    alone.train()
    one = raafl.Federation("fed_avg", clients=1, max_updates=1, output=tmp_path / "one", progress="quiet")
    found = dict(one.simulate(raafl.from_trainer(given)).module.named_parameters())
    assert all(torch.equal(value, found[name]) for name, value in alone.model.named_parameters())
    assert (given.seen, float(given.center), given.meter.steps) == ({}, 0, 0)
    # tasks of two clients that a replay makes in another order, on another Trainer
    two = raafl.Federation("fed_async", clients=2, max_updates=4, output=tmp_path / "two", progress="quiet")
    two.simulate(raafl.from_trainer(given))
    assert two.replay(tmp_path / "two", raafl.from_trainer(changing(tmp_path, weigh)))["equal"]


def test_a_module_beside_the_model_that_a_loss_changes_is_refused(tmp_path: Path) -> None:
    federation = raafl.Federation("fed_avg", clients=1, max_updates=1, output=tmp_path / "run", progress="quiet")
    with pytest.raises(
        BadInput, match=r"Changing\.teacher changes in a step, so it would carry over from client to client"
    ):
        federation.simulate(raafl.from_trainer(changing(tmp_path, taught)))


def test_a_tensor_too_large_to_be_copied_that_a_loss_changes_is_refused(tmp_path: Path) -> None:
    federation = raafl.Federation("fed_avg", clients=1, max_updates=1, output=tmp_path / "run", progress="quiet")
    says = r"Changing\.large changes in a step, so it would carry over from client to client: keep it below 16 MiB, or keep"
    with pytest.raises(BadInput, match=says):
        federation.simulate(raafl.from_trainer(changing(tmp_path, queued)))


def test_what_is_no_state_of_a_loss_is_shared(tmp_path: Path) -> None:
    """Neither data sets and tables, nor large tensors, nor what leads to the Trainer itself is copied for each task."""
    trainer = changing(tmp_path, appended)
    copies = state_of(trainer)
    assert copies.keys() == {"seen", "center", "meter", "mean", "label_names"}
    assert copies["meter"] is not trainer.meter and shared_of(trainer) == ("teacher", "large")


def test_the_bound_of_what_is_copied_holds_for_the_sum_of_an_attribute(tmp_path: Path) -> None:
    """Ten copies of it, of the modules that a process keeps built, take 160 MiB at most, and not ten times any list."""
    trainer = changing(tmp_path, appended)
    trainer.few, trainer.many = ([torch.zeros(1 << 20) for _ in range(num)] for num in (4, 5))
    assert "few" in (copies := state_of(trainer)) and "many" not in copies
    assert shared_of(trainer) == ("teacher", "large", "many")


def test_what_two_attributes_share_is_one_object_in_the_copies(tmp_path: Path) -> None:
    trainer = changing(tmp_path, appended)
    trainer.meters = {"train": trainer.meter}
    copies = state_of(trainer)
    assert copies["meters"]["train"] is copies["meter"] is not trainer.meter


def replaced(module: Any) -> None:
    module.running_mean = module.running_mean + 1


@pytest.mark.parametrize(
    ("step", "refused"),
    [
        (lambda module: module.to("meta"), False),  # stands for a move to the GPU
        (lambda module: module(torch.ones(2, 2)), True),
        (lambda module: module.eval()(torch.ones(2, 2)), False),
        (replaced, True),
    ],
    ids=["moved", "trained", "evaluated", "replaced"],
)
def test_a_module_beside_the_model_may_move_to_another_device(step: Any, refused: bool) -> None:
    trainer = SimpleNamespace(teacher=torch.nn.BatchNorm1d(2))
    expected = pytest.raises(BadInput, match="teacher changes in a step") if refused else nullcontext()
    with expected, unchanged(trainer, ("teacher",)):
        step(trainer.teacher)
