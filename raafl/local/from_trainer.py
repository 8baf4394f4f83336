"""Take model, data and training step from a `transformers.Trainer`, or from a subclass such as those of TRL."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset

from raafl.core.options import FabricOptions
from raafl.errors import USER_ERRORS, BadInput, briefly, format_error, installing
from raafl.exact_key import exact_key
from raafl.lean_import import import_lightning
from raafl.local.trainer_module import MeasuredTrainerModule, TrainerData, TrainerModule, is_overridden
from raafl.local.training_arguments import argument_of, check_arguments, fabric_of, stopping_of
from raafl.rng import undisturbed

import_lightning()
from lightning import LightningDataModule, LightningModule  # noqa: E402

_log = logging.getLogger(__name__)
OLDEST: Final = (5, 19)
"""Oldest transformers whose Trainer is taken; the extra `hf` asks for it."""
_OF_RANKS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables by which a Trainer would join torchrun's process group."""
_OWN_LOOP = (
    *("train", "_inner_training_loop", "_prepare_inputs", "training_step", "get_batch_samples", "_clip_grad_norm"),
    *("evaluate", "evaluation_loop", "log", "_run_epoch", "_evaluate", "_maybe_log_save_evaluate", "_prepare_input"),
)
"""Methods around the loss that a federated task does not call."""
_LOSS_WRAPPERS = (
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.kto_trainer",
)
"""Modules whose trainers wrap `training_step` to offload activations, if their arguments say so, and `evaluate` to prepare data."""
_GENERATES = "transformers.trainer_seq2seq"
"""Module whose trainer sets length and beams of generated answers in `evaluate`; `TrainerModule` sets them for each step."""
_INSTEAD_OF = {
    "data": "leave it out",
    "loss": "leave it out; override compute_loss, or give the Trainer compute_loss_func",
    "optimizer": "leave it out; set TrainingArguments.optim and learning_rate, or give the Trainer optimizer_cls_and_kwargs",
    "metrics": "leave it out; give the Trainer compute_metrics",
    "batch_size": "leave it out; set TrainingArguments.per_device_train_batch_size, or train.batch_size of the federation",
    "collate_fn": "leave it out; give the Trainer data_collator",
}
"""Remedies where an argument of `Federation.simulate` is given beside a Trainer that decides the same."""


@dataclass(frozen=True)
class FromTrainer:
    """Model and data of a Trainer, as `raafl.from_trainer` returns them for `Federation.simulate` and `fit`.

    Attributes:
        module: LightningModule whose steps are the Trainer's.
        data: data sets of the Trainer, with its collator and batch size.
        is_function: whether a function that makes the Trainer was given, so that each process can build its own.
    """

    module: TrainerModule
    data: TrainerData
    is_function: bool

    def for_federation(
        self, fields: Mapping[str, Any], how: Mapping[str, Any], *, set_options: Collection[str], processes: bool
    ) -> tuple[TrainerModule, TrainerData, dict[str, Any]]:
        """Return module and data, and the fields of the run's config with what the Trainer's arguments say.

        `how`: arguments about module and data that a caller gave, by name; None = not given.
        `set_options`: names of the fields that the user has set, also to their defaults, such as fabric.precision.

        Raises:
            BadInput: a field and the Trainer's arguments differ; ``how`` has something that the Trainer decides; or the run
                has several ``processes``, each of which needs a Trainer of its own, but no function that makes one was given.
        """
        for name in (name for name, value in how.items() if value is not None):
            raise BadInput(f"{name} is given, but the Trainer in from_trainer has its own: {_INSTEAD_OF[name]}")
        if processes and not self.is_function:
            raise BadInput(
                "from_trainer was given a built Trainer, but `fit` has several processes, each with a Trainer of its own: give "
                "from_trainer the function that makes it"
            )
        return self.module, self.data, _fields(self.module.trainer_of().args, fields, set_options)


def _fields(args: Any, given: Mapping[str, Any], set_options: Collection[str]) -> dict[str, Any]:
    """Complete config fields by a Trainer's arguments; raises `BadInput` if both set a field to different values.

    `set_options`: names of the fields that the user has set, also to their defaults, such as fabric.precision.
    """
    options, default, said = given.get("fabric") or FabricOptions(), FabricOptions(), fabric_of(args)
    for name, value in said.items():
        own = getattr(options, name)
        if own != value and (own != getattr(default, name) or f"fabric.{name}" in set_options):
            raise BadInput(
                f"fabric.{name} is {own}, but the Trainer's arguments say {value}: set {argument_of(name)} of "
                f"{type(args).__name__} alone"
            )
    return {"seed": int(args.seed), **given, "fabric": replace(options, **said)}


def from_trainer(trainer: Any) -> FromTrainer:
    """Take model, data, loss, optimizer and scheduler from a Trainer, for a federation to train.

    Pass the result in place of module and data: ``federation.simulate(raafl.from_trainer(trainer))``. What the Trainer's
    arguments say of precision, accumulation, clipping and seed holds for the run; docs/trainer.md lists every argument.
    The Trainer and its model are not changed; ``result.module`` is a trained copy of the model.

    Args:
        trainer: a built `transformers.Trainer` or a subclass, such as TRL's SFTTrainer, DPOTrainer and RewardTrainer;
            or a function without arguments that makes one, which `Federation.fit` needs.

    Raises:
        BadInput: ``trainer`` is none of these; it has an argument, callback or method that would have no effect; or it
            generates its own data while it trains, as GRPO does.
    """
    is_function = not isinstance(trainer, _trainer_class())
    made = _build(trainer) if is_function else trainer
    check_trainer(made)
    is_measured = made.compute_metrics is not None and not made.args.prediction_loss_only
    module = (MeasuredTrainerModule if is_measured else TrainerModule)(made)
    return FromTrainer(module, TrainerData(made), is_function)


_MADE: Final[dict[Hashable, FromTrainer]] = {}
"""Models and data of the Trainers that configs have named in this process."""


def _named(trainer: str, arguments: dict[str, Any] | None = None) -> FromTrainer:
    """Return model and data of the Trainer that a config names, which is built once for both."""
    key = trainer, exact_key(arguments or {})
    if key not in _MADE:
        _MADE[key] = _make(trainer, deepcopy(arguments or {}))
    return _MADE[key]


def _make(trainer: str, arguments: dict[str, Any]) -> FromTrainer:
    path, _, name = trainer.rpartition(".")
    try:
        make = getattr(import_module(path), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(
            f"trainer is {trainer}, which cannot be imported ({error}): give MODULE.FUNCTION, of a module in this folder or "
            "an installed one"
        ) from error
    if not callable(make):
        raise BadInput(f"trainer is {trainer}, {briefly(make)}: name a function that makes a transformers.Trainer")
    try:
        return from_trainer(partial(make, **arguments))
    except BadInput:
        raise
    except USER_ERRORS as error:
        raise BadInput(f"trainer is {trainer}, which fails: {format_error(error)}") from error


def said_by_trainer(tree: Mapping[str, Any], set_options: Collection[str]) -> dict[str, Any]:
    """Return the fields that a config's Trainer decides by its arguments: ``fabric``, and ``seed`` unless the config sets one.

    `set_options`: names of the fields that the config or an option sets, such as fabric.precision.

    Raises:
        BadInput: the Trainer cannot be made or used, or a field and its arguments differ.
    """
    found = _named(**tree["model"]["init_args"])
    if stopping_of(found.module.trainer_of()):
        raise BadInput(
            "the Trainer has an EarlyStoppingCallback, which a run from a config does not call: take it off by "
            "trainer.remove_callback(EarlyStoppingCallback) and set target, or start the run in Python"
        )
    given = {"fabric": FabricOptions(**tree["fabric"]), **({"seed": tree["seed"]} if "seed" in set_options else {})}
    return _fields(found.module.trainer_of().args, given, set_options)


class Model(LightningModule):
    """Model of the Trainer that a config names under ``trainer``; creating it returns a `TrainerModule`."""

    def __new__(cls, trainer: str, arguments: dict[str, Any] | None = None) -> Any:
        """Return a copy of the model of a Trainer, which is built at the first call."""
        return _named(trainer, arguments).module.fresh()

    def __init__(self, trainer: str, arguments: dict[str, Any] | None = None) -> None:
        """Declare the arguments for the config's parser; never called.

        Args:
            trainer: import path of a function that makes a `transformers.Trainer`.
            arguments: arguments of that function, by name.
        """


class Data(LightningDataModule):
    """Data sets of the Trainer that a config names under ``trainer``; creating it returns a `TrainerData`."""

    def __new__(cls, trainer: str, arguments: dict[str, Any] | None = None) -> Any:
        """Return the data of a Trainer; the arguments are those of `Model`."""
        return _named(trainer, arguments).data

    def __init__(self, trainer: str, arguments: dict[str, Any] | None = None) -> None:
        """Declare the arguments for the config's parser; never called."""


def _trainer_class() -> Any:
    try:
        from transformers import Trainer, __version__
    except ImportError as error:
        raise BadInput(f"from_trainer needs transformers ({error}): {installing('hf')}") from None
    # an older Trainer lacks attributes that a task reads, and fills in arguments that are then refused as the user's
    if tuple(map(int, __version__.split(".")[:2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise BadInput(f"transformers is {__version__}, but from_trainer needs {needed} or newer: {installing('hf')}")
    return Trainer


def _build(make: Any) -> Any:
    """Call the user's function that makes a Trainer, with a fixed seed, and restore the global random state afterwards."""
    if not callable(make):
        raise BadInput(f"trainer is {briefly(make)}: give a transformers.Trainer, or a function that makes one")
    with undisturbed(seed=0), _without_ranks():
        torch.manual_seed(0)  # also seeds GPUs
        made = make()
    if not isinstance(made, _trainer_class()):
        raise BadInput(f"trainer is a function that makes {type(made).__name__}: let it return a transformers.Trainer")
    return made


@contextmanager
def _without_ranks() -> Iterator[None]:
    """Hide torchrun's environment variables from accelerate in the ``with`` block, since each client trains alone."""
    hidden = {name: os.environ.pop(name) for name in _OF_RANKS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def check_trainer(trainer: Any) -> None:
    """Raise `BadInput` for a Trainer of which a federated task would leave something out."""
    kind, base = type(trainer).__name__, _trainer_class()
    for name in _OWN_LOOP:
        owner = next((cls for cls in type(trainer).__mro__ if name in vars(cls)), base)  # older versions lack some
        if owner is base or (name in ("training_step", "evaluate") and owner.__module__ in _LOSS_WRAPPERS):
            continue
        if name == "evaluate" and owner.__module__ == _GENERATES:
            continue
        # TRL's `log` adds the metrics that a `TrainerModule` logs itself
        if name == "log" and not is_overridden(trainer, name):
            continue
        if name == "_prepare_inputs":
            raise BadInput(
                f"trainer is a {kind}, which makes its batches from the model as it trains: only trainers of a fixed data set "
                "can be shared out, such as SFTTrainer, DPOTrainer and RewardTrainer"
            )
        where = "prediction_step or compute_metrics" if name.lstrip("_").startswith("eval") else "compute_loss"
        raise BadInput(f"{kind}.{name} is not called in a federated task: put what it does into {where}")
    if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
        raise BadInput(
            f"the {kind} was made for {max(trainer.args.world_size, trainer.args.n_gpu)} processes or GPUs, but a client trains "
            "alone: give from_trainer the function that makes it, or CUDA_VISIBLE_DEVICES with one GPU"
        )
    if trainer.train_dataset is None:
        raise BadInput(f"the {kind} has no train_dataset: give it one, which is shared out among the clients")
    for name in ("train_dataset", "eval_dataset"):
        _check_rows(f"{name} of the {kind}", getattr(trainer, name))
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise BadInput(
            f"the {kind} was given optimizers=, or was trained before: its optimizer holds the whole model's parameters, but each "
            "task makes its own: give optimizer_cls_and_kwargs=, TrainingArguments.optim, or override create_optimizer; of a "
            "trained model make a new Trainer"
        )
    check_arguments(trainer)
    if saving := [name for name in ("save_model", "_save") if is_overridden(trainer, name)]:
        _log.warning(
            "%s.%s is not called: the run's folder gets what save_pretrained of the model writes",
            kind,
            " and ".join(saving),
        )


def _check_rows(what: str, data: Any) -> None:
    """Raise `BadInput` unless ``data`` is None or one data set whose rows are read by number, so that they can be divided."""
    if isinstance(data, dict):
        raise BadInput(f"{what} is a dict of {len(data)}: give one data set")
    # torch's class inherits a `__getitem__` that only raises, and may have a length
    if isinstance(data, IterableDataset) or (data is not None and not hasattr(data, "__len__")):
        raise BadInput(
            f"{what} is a stream ({type(data).__name__}) without numbered rows: give a data set with a length, such as "
            "datasets.Dataset.from_list(list(stream))"
        )
