"""Give a module a `self.trainer` where there is no Trainer: what a task knows is there, all else is refused by name."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from raafl.module_hooks import configure


class NotInTask(AttributeError):
    """Raised if a module reads an attribute of its trainer that does not exist in federated training; `hasattr` returns False."""


OF_A_TASK = frozenset(
    (
        "current_epoch",
        "global_step",
        "max_epochs",
        "max_steps",
        "num_training_batches",
        "estimated_stepping_batches",
        "is_last_batch",
        "optimizers",
        "lr_scheduler_configs",
        "strategy",
        "callback_metrics",
        "logged_metrics",
        "progress_bar_metrics",
    )
)
"""Attributes whose values differ between tasks, or change within one."""


_FIXED: dict[str, Any] = {
    **{"is_global_zero": True, "global_rank": 0, "local_rank": 0, "node_rank": 0},
    **{"world_size": 1, "num_devices": 1, "num_nodes": 1, "device_ids": (0,)},
    **{"training": True, "validating": False, "testing": False, "predicting": False, "sanity_checking": False},
    **{"evaluating": False, "should_stop": False, "interrupted": False, "received_sigterm": False},
    **{"fast_dev_run": False, "barebones": False, "num_sanity_val_steps": 0, "log_every_n_steps": 50},
    **{"callbacks": (), "checkpoint_callback": None, "early_stopping_callback": None, "progress_bar_callback": None},
    **{"num_val_batches": (), "limit_train_batches": 1.0},
    **{"current_epoch": 0, "global_step": 0, "is_last_batch": False},
    # plausible numbers, with which a module can create its schedulers before a task sets the real ones
    **{"max_epochs": 1, "max_steps": -1, "num_training_batches": 10, "estimated_stepping_batches": 10},
    **{
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "gradient_clip_algorithm": None,
        "precision": "32-true",
    },
}


_STAGES = ("training", "validating", "testing")


class TrainerStandIn:
    """Replacement for the Lightning Trainer that a module sees as `self.trainer` in a federated task."""

    asked: set[str]  # attributes of the trainer that the module has read, by name

    def __init__(self, module: nn.Module) -> None:
        """Create the stand-in for a module's Trainer, with the values that its attributes have outside of tasks."""
        vars(self)["asked"] = set()
        vars(self)["_values"] = {**_FIXED, "lightning_module": module, "model": module}
        vars(self)["_optimizers"], vars(self)["_schedulers"] = [], []
        vars(self)["_metrics"] = dict

    def set(self, **values: object) -> None:
        """Set attributes of the replacement trainer that the module may read."""
        self._values.update(values)

    def stage(self, stage: str) -> None:
        """Set the trainer's flags ``training``, ``validating`` and ``testing`` for a stage of the run."""
        self.set(**{name: name == stage for name in _STAGES}, evaluating=stage != "training")

    def begin(self, optimizer: object, schedules: list[Any]) -> None:
        """Expose the optimizer and schedulers of `configure_optimizers` as ``optimizers`` and ``lr_scheduler_configs``."""
        vars(self)["_optimizers"], vars(self)["_schedulers"] = [optimizer], schedules
        self._values.pop("strategy", None)

    def measure(self, metrics: Callable[[], dict[str, Any]]) -> None:
        """Set the function that returns the metrics logged so far; `callback_metrics` and similar attributes call it."""
        vars(self)["_metrics"] = metrics

    @property
    def asked_of_task(self) -> list[str]:
        """Names of the trainer's attributes that the module has read and whose values differ between tasks, sorted."""
        return sorted(self.asked & OF_A_TASK)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for special methods
            raise AttributeError(name)
        self.asked.add(name)
        if name in self._values:
            return self._values[name]
        if name in ("optimizers", "lr_scheduler_configs", "strategy") and not self._optimizers:
            optimizer, schedules = configure(self._values["model"])
            self.begin(optimizer, schedules)
        if name in ("optimizers", "lr_scheduler_configs"):
            return list(self._optimizers if name == "optimizers" else self._schedulers)
        if name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            return self._metrics()
        if name in _MADE:
            return self._values.setdefault(name, _MADE[name](self))
        self._refuse(name, "available")

    def __setattr__(self, name: str, value: object) -> None:
        self._refuse(name, "to be set")

    def _refuse(self, name: str, what: str) -> NoReturn:
        raise NotInTask(
            f"self.trainer.{name} is not {what} in a federated task, which has no Trainer, only a stand-in with current_epoch, "
            "global_step, max_epochs, estimated_stepping_batches, optimizers, logger and others: see docs/lightning.md"
        )

    def __deepcopy__(self, memo: object) -> TrainerStandIn:
        return self  # a copied module gets its own stand-in, from `attach`


def _strategy(trainer: TrainerStandIn) -> object:
    """Create a Lightning strategy for one device, from which the module's `self.optimizers()` takes its optimizers."""
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import SingleDeviceStrategy

    device = next((p.device for p in trainer._values["model"].parameters()), "cpu")
    strategy = SingleDeviceStrategy(device)
    strategy._lightning_optimizers = [LightningOptimizer(one) for one in trainer._optimizers]
    return strategy


def _logger(trainer: TrainerStandIn) -> object:
    from lightning.pytorch.loggers.logger import DummyLogger

    return DummyLogger()


def _profiler(trainer: TrainerStandIn) -> object:
    from lightning.pytorch.profilers import PassThroughProfiler

    return PassThroughProfiler()


def _precision_plugin(trainer: TrainerStandIn) -> object:
    from lightning.pytorch.plugins.precision import Precision

    return Precision()


_MADE: dict[str, Callable[[TrainerStandIn], Any]] = {
    "strategy": _strategy,
    "logger": _logger,
    "loggers": lambda trainer: [trainer.logger],
    "profiler": _profiler,
    "precision_plugin": _precision_plugin,
    "state": lambda trainer: types.SimpleNamespace(fn="fit", status="running"),
}


def stage(module: object, stage: str) -> None:
    """Set the stage (training, validating or testing) of the trainer that `attach` gave ``module``, if it has one."""
    trainer = vars(module).get("_trainer")
    if isinstance(trainer, TrainerStandIn):
        trainer.stage(stage)


def attach(module: nn.Module) -> TrainerStandIn:
    """Give a module, and all LightningModules inside it, a replacement for the Lightning Trainer; return the replacement."""
    trainer = TrainerStandIn(module)
    for part in module.modules():
        if "_trainer" in vars(part):
            part.__dict__["_trainer"] = trainer
    return trainer
