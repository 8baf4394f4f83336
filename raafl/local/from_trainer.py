"""Take model, data and training step from a `transformers.Trainer`, or from a subclass such as those of TRL."""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from raafl.core.options import FabricOptions
from raafl.errors import USER_ERRORS, BadInput, briefly, format_error, installing
from raafl.lean_import import import_lightning
from raafl.local.missing_steps import given_class, with_methods
from raafl.local.training_arguments import ACCUMULATED, argument_of, check_arguments, fabric_of, stopping_of
from raafl.log import warn_once
from raafl.rng import undisturbed
from raafl.submodel.cut.layers import copy_structure

import_lightning()
from lightning import LightningDataModule, LightningModule  # noqa: E402
from torchmetrics import Metric  # noqa: E402

_log = logging.getLogger(__name__)
_OF_RANKS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables by which a Trainer would join torchrun's process group."""
_OWN_LOOP = (
    *("train", "_inner_training_loop", "_prepare_inputs", "training_step", "get_batch_samples", "_clip_grad_norm"),
    *("evaluate", "evaluation_loop"),
)
"""Methods around the loss that a federated task does not call."""
_LOSS_WRAPPERS = (
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.kto_trainer",
)
"""Modules whose trainers wrap `training_step` to offload activations, if their arguments say so, and `evaluate` to prepare data."""
_NO_LABEL = -100
_INSTEAD_OF = {
    "data": "leave it out",
    "loss": "leave it out; override compute_loss, or give the Trainer compute_loss_func",
    "optimizer": "leave it out; set TrainingArguments.optim and learning_rate, or give the Trainer optimizer_cls_and_kwargs",
    "metrics": "leave it out; give the Trainer compute_metrics",
    "batch_size": "leave it out; set TrainingArguments.per_device_train_batch_size, or train.batch_size of the federation",
    "collate_fn": "leave it out; give the Trainer data_collator",
}
"""Remedies where an argument of `Federation.simulate` is given beside a Trainer that decides the same."""
_SET = ("model", "model_wrapped", "state", "log", "_prepare_inputs", "optimizer", "lr_scheduler")
"""Attributes of the Trainer that are restored after a step."""
_LOCK = threading.RLock()


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
    module = (TrainerModule if made.compute_metrics is None else MeasuredTrainerModule)(made)
    return FromTrainer(module, TrainerData(made), is_function)


@cache
def _named(trainer: str, arguments: str) -> FromTrainer:
    """Return model and data of the Trainer that a config names, which is built once for both."""
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
        return from_trainer(partial(make, **json.loads(arguments)))
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
    found = _named(**_key(**tree["model"]["init_args"]))
    if stopping_of(found.module.trainer_of()):
        raise BadInput(
            "the Trainer has an EarlyStoppingCallback, which a run from a config does not call: take it off by "
            "trainer.remove_callback(EarlyStoppingCallback) and set target, or start the run in Python"
        )
    given = {"fabric": FabricOptions(**tree["fabric"]), **({"seed": tree["seed"]} if "seed" in set_options else {})}
    return _fields(found.module.trainer_of().args, given, set_options)


def _key(trainer: str, arguments: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the arguments of `_named` in a form that its cache can hash."""
    return {"trainer": trainer, "arguments": json.dumps(arguments or {}, sort_keys=True)}


class Model(LightningModule):
    """Model of the Trainer that a config names under ``trainer``; creating it returns a `TrainerModule`."""

    def __new__(cls, trainer: str, arguments: dict[str, Any] | None = None) -> Any:
        """Return a copy of the model of a Trainer, which is built at the first call."""
        return _named(**_key(trainer, arguments)).module.fresh()

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
        return _named(**_key(trainer, arguments)).data

    def __init__(self, trainer: str, arguments: dict[str, Any] | None = None) -> None:
        """Declare the arguments for the config's parser; never called."""


def _trainer_class() -> Any:
    try:
        from transformers import Trainer
    except ImportError as error:
        raise BadInput(f"from_trainer needs transformers ({error}): {installing('hf')}") from None
    return Trainer


def _build(make: Any) -> Any:
    """Call the user's function that makes a Trainer, with a fixed seed, and restore the global random state afterwards."""
    if not callable(make):
        raise BadInput(f"trainer is {briefly(make)}: give a transformers.Trainer, or a function that makes one")
    with undisturbed(()), _without_ranks():
        torch.manual_seed(0)
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


@contextmanager
def _restored(owner: Any, *names: str) -> Iterator[None]:
    """Let attributes of an object be set in the ``with`` block; afterwards it has those that were set on it before."""
    before = {name: vars(owner)[name] for name in names if name in vars(owner)}
    try:
        yield
    finally:
        for name in names:
            vars(owner).pop(name, None)
        vars(owner).update(before)


def check_trainer(trainer: Any) -> None:
    """Raise `BadInput` for a Trainer of which a federated task would leave something out."""
    kind, base = type(trainer).__name__, _trainer_class()
    for name in _OWN_LOOP:
        owner = next(cls for cls in type(trainer).__mro__ if name in vars(cls))
        if owner is base or (name in ("training_step", "evaluate") and owner.__module__ in _LOSS_WRAPPERS):
            continue
        if name == "_prepare_inputs":
            raise BadInput(
                f"trainer is a {kind}, which makes its batches from the model as it trains: only trainers of a fixed data set "
                "can be shared out, such as SFTTrainer, DPOTrainer and RewardTrainer"
            )
        where = "prediction_step or compute_metrics" if name.startswith("eval") else "compute_loss"
        raise BadInput(f"{kind}.{name} is not called in a federated task: put what it does into {where}")
    if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
        raise BadInput(
            f"the {kind} was made for {max(trainer.args.world_size, trainer.args.n_gpu)} processes or GPUs, but a client trains "
            "alone: give from_trainer the function that makes it, or CUDA_VISIBLE_DEVICES with one GPU"
        )
    if trainer.train_dataset is None:
        raise BadInput(f"the {kind} has no train_dataset: give it one, which is shared out among the clients")
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise BadInput(
            f"the {kind} was given optimizers=, which hold the whole model's parameters, but each task makes its own: give "
            "optimizer_cls_and_kwargs=, TrainingArguments.optim, or override create_optimizer"
        )
    if isinstance(trainer.eval_dataset, dict):
        raise BadInput(f"eval_dataset of the {kind} is a dict of {len(trainer.eval_dataset)}: give one data set")
    check_arguments(trainer)


class TrainerModule(LightningModule):
    """LightningModule whose steps are a Trainer's `compute_loss` and `prediction_step`, on this copy of its model.

    The Trainer is no part of the module: copies share it, and it sees the model of the copy that calls it.
    """

    # transformers and TRL set these attributes in every step, so no warning says that each task resets them
    restarts_unseen: ClassVar[frozenset[str]] = frozenset(
        ("_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks", "problem_type")
    )
    _MODES: ClassVar[Mapping[bool, str]] = {True: "train", False: "eval"}

    def __init__(self, trainer: Any) -> None:
        """Create a module with the Trainer's model; copies of the module share the Trainer."""
        super().__init__()
        self.model = trainer.model
        # a closure, since copies of the module would copy an attribute
        self.trainer_of = _holder(trainer)

    @property
    def loss_in_forward(self) -> bool:
        """Whether the model's forward computes the loss from the labels; the Trainer's class may do it in a way of its own."""
        trainer = self.trainer_of()
        owner = type(trainer).compute_loss.__module__
        is_given = owner in ("transformers.trainer", "trl.trainer.sft_trainer")
        return is_given and trainer.label_smoother is None and trainer.compute_loss_func is None

    def fresh(self) -> TrainerModule:
        """Return a copy in train mode, as a Trainer's steps are, with the values that the Trainer's model has."""
        made: Any = copy_structure(self, {})
        for path, part in self.named_modules():
            if isinstance(vars(part).get("forward"), types.MethodType):
                copied = made.get_submodule(path)
                function = copied.__dict__.pop("forward").__func__
                with_methods(copied, forward=_patched_forward(function, part))
        trainer = self.trainer_of()
        _align(made.model, trainer.processing_class)
        if trainer.args.activation_checkpointing:
            options = dict(trainer.args.activation_checkpointing_kwargs or {})
            further = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
            made.model.activation_checkpointing_enable(activation_checkpointing_kwargs=options or None, **further)
        return made.cpu().train()  # type: ignore[no-any-return]

    def early_stopping(self) -> list[dict[str, Any]]:
        """Return the arguments of the `raafl.EarlyStopping` that stands for each EarlyStoppingCallback of the Trainer."""
        return stopping_of(self.trainer_of())

    def trained_model(self) -> nn.Module:
        """Return the model, as its library has it: without what a Trainer has set on its parts."""
        for part in self.model.modules():
            part.__class__ = given_class(part)
        return self.model  # type: ignore[no-any-return]

    def on_step_batches(self, batches: Sequence[Any]) -> list[Any]:
        """Return the batches of one optimizer step with what a loss needs to know of all of them, as a Trainer counts it."""
        trainer = self.trainer_of()
        num_items = trainer._get_num_items_in_batch(list(batches), torch.device("cpu"))
        return [(batch, num_items, len(batches)) for batch in batches]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the Trainer's loss of a batch; one that counts all tokens of a step is scaled to the mean of its batches."""
        inputs, num_items, num_batches = batch if isinstance(batch, tuple) else self.on_step_batches([batch])[0]
        with self._bound() as trainer:
            trainer.current_gradient_accumulation_steps = num_batches
            first = batch_idx - batch_idx % trainer.args.gradient_accumulation_steps
            trainer.state.epoch = self.trainer.current_epoch + first / self.trainer.num_training_batches
            trainer.state.global_step = self.trainer.global_step
            trainer.state.num_train_epochs = self.trainer.max_epochs
            trainer.state.max_steps = self.trainer.estimated_stepping_batches
            if isinstance(num_items, Tensor):
                num_items = num_items.to(self.device)
            with trainer.compute_loss_context_manager():
                loss: Tensor = trainer.compute_loss(self.model, dict(inputs), num_items_in_batch=num_items)
            scaled = trainer.loss_is_scaled_for_ga
            if scaled is None:
                scaled = (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func
            self._log_metrics(trainer)
        # the Trainer has divided by the number of batches, as the task will do, so undo one of both
        return loss * num_batches if scaled and num_batches > 1 else loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the Trainer's loss of a batch, and log the metrics that it notes beside it."""
        loss, _, _ = self._predict(batch, loss_only=True)
        self._log_perplexity(loss, batch)
        return {} if loss is None else {"loss": loss}

    def _log_perplexity(self, loss: Any, batch: Any) -> None:
        """Log a language model's perplexity over all labelled tokens, if the loss is their mean cross-entropy and nothing else."""
        labels, config, args = batch.get("labels"), getattr(self.model, "config", None), self.trainer_of().args
        is_other = getattr(args, "loss_type", None) == "dft" or getattr(config, "output_router_logits", False)
        writes = callable(getattr(type(self.model), "generate", None)) and self.loss_in_forward and not is_other
        if not writes or loss is None or not isinstance(labels, Tensor) or labels.dim() != 2:
            return
        if "perplexity" not in self._modules:  # created here, since copies that only train need no metric
            self.perplexity = TokenPerplexity().to(loss.device)
        shifted = labels if getattr(config, "is_encoder_decoder", False) else labels[:, 1:]
        self.perplexity.update(loss.detach(), (shifted != _NO_LABEL).sum())
        self.log("perplexity", self.perplexity)

    def _predict(self, batch: Any, *, loss_only: bool) -> tuple[Any, Any, Any]:
        with self._bound() as trainer:
            found: tuple[Any, Any, Any] = trainer.prediction_step(self.model, dict(batch), loss_only)
            self._log_metrics(trainer)
        return found

    def configure_optimizers(self) -> Any:
        """Return the optimizer and scheduler that the Trainer creates for this copy of its model and the length of a task."""
        num_steps = self.trainer.estimated_stepping_batches
        with self._bound() as trainer:
            trainer.create_optimizer_and_scheduler(num_training_steps=num_steps)
            optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        if scheduler is None:
            return optimizer
        if num_steps == 1 and not any(group["lr"] for group in optimizer.param_groups):
            args = trainer.args
            warn_once(
                _log,
                f"{type(args).__name__}.warmup_steps is {args.warmup_steps}: a task of one step has the learning rate 0, so that "
                "it trains nothing: set warmup_steps=0, or give longer tasks by train.num_epochs or smaller batches",
            )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the model as its library does; of a PEFT model the adapter."""
        self.model.save_pretrained(str(folder))

    @contextmanager
    def _bound(self) -> Iterator[Any]:
        """Set this copy of the model as the Trainer's model during the ``with`` block."""
        trainer = self.trainer_of()
        # the Trainer is shared by tasks and evaluations, which may run at the same time
        with _LOCK, _restored(trainer, *_SET):
            trainer.state = copy.copy(trainer.state)
            trainer.log = lambda logs, *_, **__: self._log_numbers(logs)  # its own would call the trackers' callbacks
            trainer.model = trainer.model_wrapped = self.model
            # the Trainer must not move batches: they are on this copy's device, which may not be the Trainer's
            trainer._prepare_inputs = lambda inputs: inputs
            reference, device = getattr(trainer, "ref_model", None), next(self.model.parameters()).device
            if isinstance(reference, nn.Module) and device.type != "meta":
                reference.to(device)
            yield trainer

    def _log_numbers(self, values: Mapping[str, Any]) -> None:
        """Log each value that is one number; warn of others, which a table of metrics cannot hold."""
        for name, value in values.items():
            try:
                self.log(name.removeprefix("eval_"), float(value))
            except (TypeError, ValueError):
                warn_once(_log, f"metric {name} of the Trainer is {briefly(value)}, not a number: it is not recorded")

    def _log_metrics(self, trainer: Any) -> None:
        """Log the metrics that TRL's trainers keep beside the loss, such as rewards/accuracies."""
        noted = getattr(trainer, "_metrics", None)
        if not isinstance(noted, dict):
            return
        for name, values in (noted.get(self._MODES[self.model.training]) or {}).items():
            if values and name != ACCUMULATED:
                self.log(name, float(values[-1]))
        for mode in noted.values():
            mode.clear()


class TokenPerplexity(Metric):
    """Exponential of the mean loss in nats, where the loss of a batch counts as often as the batch has labelled tokens."""

    nats: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("nats", "tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, num_tokens: Tensor) -> None:
        """Add the mean loss of a batch, and its number of tokens, both of shape ()."""
        self.nats += loss.double() * num_tokens
        self.tokens += num_tokens

    def compute(self) -> Tensor:
        """Return the perplexity, a scalar of at least 1; 1 without tokens."""
        return torch.exp(self.nats / self.tokens.clamp(min=1))


class MeasuredTrainerModule(TrainerModule):
    """Module of a Trainer with `compute_metrics`, which gets the predictions of the whole evaluation."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._found: list[tuple[Any, Any]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the Trainer's loss of a batch, and keep its predictions."""
        loss, logits, labels = self._predict(batch, loss_only=False)
        self._log_perplexity(loss, batch)
        trainer = self.trainer_of()
        if trainer.preprocess_logits_for_metrics is not None and logits is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        self._found.append((logits, labels))
        return {} if loss is None else {"loss": loss}

    def on_validation_epoch_end(self) -> None:
        """Log what `compute_metrics` makes of all predictions."""
        from transformers import EvalPrediction
        from transformers import trainer_pt_utils as utils

        if not self._found:
            return
        pt: Any = utils
        columns: list[Any] = []
        for column in zip(*self._found, strict=True):
            joined = column[0]
            for more in column[1:]:
                joined = None if joined is None else pt.nested_concat(joined, more, padding_index=-100)
            columns.append(None if joined is None else pt.nested_numpify(joined))
        self._found.clear()
        metrics = self.trainer_of().compute_metrics(EvalPrediction(predictions=columns[0], label_ids=columns[1]))
        self._log_numbers(metrics)


def _align(model: Any, processor: Any) -> None:
    """Set a model's missing padding token from its tokenizer, as a Trainer does, since decoders need it to classify batches."""
    token, config = getattr(processor, "pad_token_id", None), getattr(model, "config", None)
    if token is not None and config is not None and getattr(config, "pad_token_id", token) is None:
        config.pad_token_id = token


def _holder(trainer: Any) -> Callable[[], Any]:
    return lambda: trainer


def _patched_forward(function: Any, owner: nn.Module) -> Callable[..., Any]:
    """Convert a forward method that was set on the object ``owner`` into one that works for copies of that module.

    TRL sets a fused head in this way. The method's closure holds the replaced forward, bound to ``owner``, so a copy
    would compute with the owner's weights. The result binds it to the module that is called.
    """

    @functools.wraps(function)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> Any:
        return _bound_to(self, function, owner)(self, *args, **kwargs)

    return forward


def _bound_to(part: nn.Module, function: Any, owner: nn.Module) -> Any:
    """Return ``function`` with the methods of ``owner`` in its closure bound to ``part`` instead."""
    cells = getattr(function, "__closure__", None) or ()
    methods = [isinstance(cell.cell_contents, types.MethodType) for cell in cells]
    if not any(methods):
        return function
    closure = []
    for cell, is_method in zip(cells, methods, strict=True):
        method = cell.cell_contents
        if is_method and method.__self__ is owner:
            cell = types.CellType(types.MethodType(_bound_to(part, method.__func__, owner), part))
        closure.append(cell)
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(closure)
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@dataclass(frozen=True)
class _Collate:
    """Collate function that converts the result of a Trainer's collate function to a plain dict."""

    collate: Callable[[list[Any]], Any]  # the Trainer's collate function

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        return dict(self.collate(rows))


class TrainerData(LightningDataModule):
    """Data module of a Trainer's data sets, read through its own loaders."""

    def __init__(self, trainer: Any) -> None:
        """Create a data module over the data sets and the collate function of a Trainer."""
        super().__init__()
        self.trainer_of = _holder(trainer)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer or processor of the Trainer, saved with the model."""
        return self.trainer_of().processing_class

    def train_dataloader(self) -> object:
        """Return the Trainer's training loader, whose data set knows the columns that the Trainer has removed."""
        trainer = self.trainer_of()
        loader = self._loader(trainer.get_train_dataloader)
        read: Any = getattr(loader, "dataset", None)
        whole = trainer.train_dataset
        if read is not whole and hasattr(read, "column_names") and len(read) == len(whole):
            read.with_all_columns = whole  # a partition such as `ByColumn` may need a column that the loss does not
        return loader

    def test_dataloader(self) -> object:
        """Return the Trainer's evaluation loader; an empty list if it has no ``eval_dataset``."""
        trainer = self.trainer_of()
        return [] if trainer.eval_dataset is None else self._loader(trainer.get_eval_dataloader)

    def _loader(self, make: Callable[[], Any]) -> object:
        """Call a Trainer's method that makes a data loader, without accelerate, which would shard the data by process."""
        with _restored(accelerator := self.trainer_of().accelerator, "prepare"):
            accelerator.prepare = lambda loader: loader
            loader = make()
        if isinstance(loader, DataLoader):
            loader.collate_fn = _Collate(loader.collate_fn)
        return loader

    def __repr__(self) -> str:
        trainer = self.trainer_of()
        sets = (trainer.train_dataset, trainer.eval_dataset)
        train, test = ("None" if one is None else f"{type(one).__name__} of {len(one)}" for one in sets)
        return f"TrainerData(train={train}, test={test}, batch_size={trainer.args.train_batch_size})"
