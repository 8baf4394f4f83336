"""A task calls what a Trainer calls, in its order and with its arguments: a Trainer on the same batches is the reference."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

from raafl.core.local import Local, Traits
from raafl.errors import BadInput
from raafl.module_hooks import BATCH_HOOKS, STEP_HOOKS, TASK_HOOKS
from tests.local.bench import NUM_SAMPLES, Bench, Net, assignment, batches, same

ALL = (*BATCH_HOOKS, *TASK_HOOKS)


def plain(value: Any) -> Any:
    """Describe an argument: the shape of a batch, the class of an optimizer, numbers as they are."""
    if isinstance(value, torch.Tensor):
        return round(float(value), 5) if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return "closure" if callable(value) else value if isinstance(value, int | float | None) else type(value).__name__


class Spy(Net):
    """Notes every hook with its arguments, where training stands, and the learning rate; then does what Lightning does."""

    frequency, interval, monitor = 1, "epoch", None

    def __init__(self):
        super().__init__()
        self.seen = []

    def see(self, name, *args, **kwargs):
        lr = self.optimizers().param_groups[0]["lr"] if name == "training_step" else None
        self.seen.append((name, plain(args), plain(kwargs), self.current_epoch, self.trainer.global_step, lr))

    def training_step(self, batch, batch_idx):
        self.see("training_step", batch, batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True, on_step=False, batch_size=len(batch[0]))
        return {"loss": loss, "more": torch.ones(2)}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.monitor is None:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        else:  # every epoch counts as a bad one
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)
        config = {
            "scheduler": scheduler,
            "interval": self.interval,
            "frequency": self.frequency,
            "monitor": self.monitor,
        }
        return {"optimizer": optimizer, "lr_scheduler": {k: v for k, v in config.items() if v is not None}}


def seeing(name):
    def hook(self, *args, **kwargs):
        self.see(name, *args, **kwargs)
        return getattr(lightning.LightningModule, name)(self, *args, **kwargs)

    return hook


class SpyAll(Spy):
    """Overrides every hook."""


for _name in ALL:
    setattr(SpyAll, _name, seeing(_name))


def by_trainer(bench: Bench, task: Any, **options: Any) -> Any:
    """Train a fresh copy of the bench's module with a Trainer on the task's batches, and return it."""
    module = type(bench.module)()
    module.load_state_dict(bench.module.state_dict())
    per_epoch = -(-NUM_SAMPLES // 5)
    todo = list(batches(task.seed, task.num_epochs or -(-task.num_steps // per_epoch)))
    epochs = [todo[start : start + per_epoch] for start in range(0, len(todo), per_epoch)]

    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(epochs[self.trainer.current_epoch], batch_size=None)

    length = {"max_epochs": task.num_epochs} if task.num_epochs else {"max_steps": task.num_steps}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            **length,
            **options,
        )
        trainer.fit(module, Data())
    return module


def trained(bench: Bench, task: Any) -> Any:
    """Train by raafl; return the tensors and the module that was trained."""
    _, tensors = bench.run(task)
    return tensors, bench.trainer.built(task.spec).module


@pytest.fixture(autouse=True)
def _quiet(caplog):
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (assignment(epochs=2), {}),
        (assignment(steps=7), {}),
        (assignment(epochs=2), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
    ],
    ids=["epochs", "steps", "accumulated"],
)
def test_hooks_come_in_lightnings_order_with_its_arguments(task, options):
    bench = Bench.of(SpyAll, **options)
    tensors, ours = trained(bench, task)
    theirs = by_trainer(bench, task, **options)
    assert same(tensors, theirs.state_dict())
    assert ours.seen == theirs.seen
    assert {name for name, *_ in ours.seen} == {*ALL, "training_step"}


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_before_zero_grad", "optimizer_step"])
def test_gradients_are_there_where_lightning_has_them(hook):
    class Sums(Net):
        def __init__(self):
            super().__init__()
            self.sums = []

    def summing(self, *args, **kwargs):
        self.sums.append([None if p.grad is None else float(p.grad.abs().sum()) for p in self.parameters()])
        return getattr(lightning.LightningModule, hook)(self, *args, **kwargs)

    setattr(Sums, hook, summing)
    bench, task = Bench.of(Sums), assignment(epochs=2)
    _, ours = trained(bench, task)
    theirs = by_trainer(bench, task)
    assert ours.sums == theirs.sums


@pytest.mark.parametrize(
    "settings",
    [
        {"interval": "step", "frequency": 2},
        {"interval": "step", "frequency": 4},
        {"interval": "epoch", "frequency": 2},
        {"interval": "epoch", "monitor": "train_loss"},
        {"interval": "epoch", "frequency": 2, "monitor": "train_loss"},
    ],
    ids=str,
)
def test_schedulers_step_when_a_trainer_steps_them(settings):
    bench, task = Bench.of(type("Spying", (Spy,), settings)), assignment(epochs=5)
    tensors, ours = trained(bench, task)
    theirs = by_trainer(bench, task)
    assert ours.seen == theirs.seen
    assert same(tensors, theirs.state_dict())
    assert len({lr for *_, lr in ours.seen}) > 1


class Skips(Spy):
    """Gives no loss for the second batch and, of the last two, the first."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx in (1, 3) else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulated"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_step_that_returns_none_skips_its_batch(interval, options):
    bench, task = Bench.of(type("Skipping", (Skips,), {"interval": interval}), **options), assignment(epochs=2)
    update, tensors = bench.run(task)
    theirs = by_trainer(bench, task, **options)
    assert bench.trainer.built(task.spec).module.seen == theirs.seen  # the scheduler goes on
    assert same(tensors, theirs.state_dict())
    assert update.num_steps == 6  # of 10 batches 4 are skipped; of the windows of two none is skipped whole
    assert update.num_samples == NUM_SAMPLES


def test_a_window_whose_first_batch_is_skipped_does_not_add_to_the_gradients_of_the_last_step():
    class SkipsFirst(SpyAll):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    options = {"accumulate_grad_batches": 2}
    bench, task = Bench.of(SkipsFirst, **options), assignment(epochs=1)
    tensors, ours = trained(bench, task)
    theirs = by_trainer(bench, task, **options)
    assert ours.seen == theirs.seen
    assert same(tensors, theirs.state_dict())


def test_a_task_of_skipped_batches_alone_has_no_loss_and_no_step():
    bench = Bench.of(type("Never", (Net,), {"training_step": lambda self, batch, index: None}))
    update, tensors = bench.run(assignment(epochs=1))
    assert (update.num_steps, update.metrics) == (0, {})
    assert same(tensors, bench.values)


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: {"loss": loss}], ids=["alone", "in a dict"])
def test_a_loss_that_is_no_tensor_in_a_later_batch_is_named(wrap):
    class Later(Net):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return wrap(loss if index < 2 else loss.item())

    bench = Bench.of(Later)
    with pytest.raises(TypeError, match="training_step gives float: return the loss, a tensor with one number"):
        bench.run(assignment(epochs=1))


def test_on_train_batch_start_may_skip_the_rest_of_an_epoch():
    class Stops(Spy):
        interval = "step"

        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    bench, task = Bench.of(Stops), assignment(epochs=2)
    _, ours = trained(bench, task)
    assert ours.seen == by_trainer(bench, task).seen
    assert len(ours.seen) == 6


def test_an_optimizer_step_that_warms_up_is_lightnings():
    class Warm(Spy):
        interval, frequency = "epoch", 3

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)
            optimizer.step(closure=optimizer_closure)

    bench, task = Bench.of(Warm), assignment(epochs=2)
    tensors, ours = trained(bench, task)
    theirs = by_trainer(bench, task)
    assert same(tensors, theirs.state_dict())
    assert ours.seen == theirs.seen


def test_an_optimizer_step_that_skips_steps_is_lightnings():
    class Now(Spy):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 2:
                optimizer_closure()
            else:
                optimizer.step(closure=optimizer_closure)

    bench, task = Bench.of(Now), assignment(epochs=2)
    update, tensors = bench.run(task)
    assert same(tensors, by_trainer(bench, task).state_dict())
    assert update.num_steps == 6


def test_an_optimizer_step_that_does_not_call_its_closure_is_refused():
    class Never(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            pass

    with pytest.raises(BadInput, match=r"Never\.optimizer_step does not call its closure"):
        Bench.of(Never).run(assignment(epochs=1))


def test_the_trainer_has_a_tasks_numbers():
    class Numbers(Net):
        def configure_optimizers(self):
            steps = self.trainer.estimated_stepping_batches
            return torch.optim.SGD(self.parameters(), lr=1 / steps)

        def training_step(self, batch, batch_idx):
            trainer = self.trainer
            self.log("lr", self.optimizers().param_groups[0]["lr"])
            self.log("steps", float(trainer.estimated_stepping_batches), reduce_fx="max")
            self.log("batches", float(trainer.num_training_batches), reduce_fx="max")
            self.log("epochs", float(trainer.max_epochs), reduce_fx="max")
            assert (
                trainer.training
                and not trainer.sanity_checking
                and trainer.is_global_zero
                and self.lr_schedulers() is None
            )
            assert self.logger.experiment.add_image("dropped") is None
            return super().training_step(batch, batch_idx)

    bench = Bench.of(Numbers, accumulate_grad_batches=2)
    for task, steps, epochs in (
        (assignment(epochs=3), 9, 3),
        (assignment(steps=7), 4, 2),
        (assignment(epochs=1), 3, 1),
    ):
        update, _ = bench.run(task)
        metrics = {name: value for name, value in update.metrics.items() if name != "loss"}
        assert metrics == {"lr": pytest.approx(1 / steps), "steps": steps, "batches": 5, "epochs": epochs}
        assert update.num_steps == steps


def test_what_a_trainer_alone_has_is_refused_by_name():
    class Asks(Net):
        def training_step(self, batch, batch_idx):
            assert not hasattr(self.trainer, "fit_loop")
            return self.trainer.fit_loop

    with pytest.raises(AttributeError, match=r"self\.trainer\.fit_loop is not available in a federated task"):
        Bench.of(Asks).run(assignment(epochs=1))


def test_a_method_that_steps_by_itself_leaves_hooks_out():
    class Alone(Local):
        traits = Traits(leaves_out=frozenset(STEP_HOOKS))

    bench = Bench.of(SpyAll, local=Alone())
    _, ours = trained(bench, assignment(epochs=1))
    assert not {name for name, *_ in ours.seen} & {*STEP_HOOKS}
