"""Module and data module whose steps and loaders are those of a `transformers.Trainer`, on copies of its model."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from raafl.errors import BadInput, briefly
from raafl.lean_import import import_lightning
from raafl.local.missing_steps import given_class, with_methods
from raafl.local.trainer_attributes import (
    RESTORED,
    lent_attributes,
    restored_attributes,
    shared_of,
    state_of,
    unchanged,
)
from raafl.local.training_arguments import ACCUMULATED, stopping_of
from raafl.log import warn_once
from raafl.submodel.cut.layers import copy_structure
from raafl.submodel.saved_tensors import save_tensors

import_lightning()
from lightning import LightningDataModule, LightningModule  # noqa: E402
from torchmetrics import Metric  # noqa: E402

_log = logging.getLogger(__name__)
_NO_LABEL = -100
_LOCK = threading.RLock()


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
        # what steps of this copy set or change on the Trainer; as attributes of a module they start again in each task
        self.trainer_attributes = types.SimpleNamespace(**state_of(trainer))
        self._shared = shared_of(trainer)

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
        _checkpoint(made.model, trainer.args)
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
        num_tokens = (shifted != _NO_LABEL).sum()
        # a Trainer divides the sum of the losses by its own count, which has the first label, too, for some models (GPT-2)
        num_items = self.trainer_of()._get_num_items_in_batch([batch], loss.device)
        self.perplexity.update(loss.detach() * (num_tokens if num_items is None else num_items), num_tokens)
        self.log("perplexity", self.perplexity)

    def _predict(self, batch: Any, *, loss_only: bool) -> tuple[Any, Any, Any]:
        with self._bound(evaluates=True) as trainer:
            found: tuple[Any, Any, Any] = trainer.prediction_step(self.model, dict(batch), loss_only)
            self._log_metrics(trainer)
        return found

    def configure_optimizers(self) -> Any:
        """Return the optimizer and scheduler that the Trainer creates for this copy of its model and the length of a task."""
        num_steps = self.trainer.estimated_stepping_batches
        with self._bound() as trainer:
            trainer.create_optimizer_and_scheduler(num_training_steps=num_steps)
            optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        own = set(map(id, self.model.parameters()))
        others = sum(id(value) not in own for group in optimizer.param_groups for value in group["params"])
        if others:
            raise BadInput(
                f"{type(trainer).__name__}.create_optimizer gives an optimizer with {others} parameters that are not in "
                "self.model, so that they would carry over from client to client: add them to the model, as "
                "torch.nn.Parameter of one of its modules"
            )
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
        """Save the model as a Trainer does: by its library, of a PEFT model the adapter, of a plain module the tensors."""
        if callable(getattr(self.model, "save_pretrained", None)):
            self.model.save_pretrained(str(folder))
            return
        save_tensors(self.model.state_dict(), Path(folder), _log.warning)

    @contextmanager
    def _bound(self, *, evaluates: bool = False) -> Iterator[Any]:
        """Set this copy of the model as the Trainer's model during the ``with`` block.

        `evaluates`: whether the model computes in the mixed precision of the Trainer's arguments where no task has set one.
        """
        trainer = self.trainer_of()
        # the Trainer is shared by tasks and evaluations, which may run at the same time
        with _LOCK, restored_attributes(trainer, *RESTORED):
            trainer.state = copy.copy(trainer.state)
            trainer.log = lambda logs, *_, **__: self._log_numbers(logs)  # its own would call the trackers' callbacks
            trainer.model = trainer.model_wrapped = self.model
            # the Trainer must not move batches: they are on this copy's device, which may not be the Trainer's
            trainer._prepare_inputs = lambda inputs: inputs
            if getattr(trainer.args, "predict_with_generate", False):
                # its `evaluate`, which no evaluation of a run calls, would set them; None leaves both to the model
                trainer._gen_kwargs = {
                    "max_length": trainer.args.generation_max_length,
                    "num_beams": trainer.args.generation_num_beams,
                }
            reference = getattr(trainer, "ref_model", None)
            device = next(self.model.parameters()).device
            if isinstance(reference, nn.Module) and device.type != "meta":
                reference.to(device)
            dtype = _autocast_dtype(device.type, trainer.args if evaluates else None)
            with (
                _forward_in(dtype, self.model, device.type),
                unchanged(trainer, self._shared),
                lent_attributes(trainer, vars(self.trainer_attributes)),
            ):
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
        with self._bound() as trainer:  # which has what `prediction_step` has set
            metrics = trainer.compute_metrics(EvalPrediction(predictions=columns[0], label_ids=columns[1]))
        self._log_numbers(metrics)


class TokenPerplexity(Metric):
    """Exponential of the mean loss in nats of all labelled tokens of an evaluation."""

    nats: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("nats", "tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nats: Tensor, num_tokens: Tensor) -> None:
        """Add the sum of the losses of a batch's tokens, and their number, both of shape ()."""
        self.nats += nats.double()
        self.tokens += num_tokens

    def compute(self) -> Tensor:
        """Return the perplexity, a scalar of at least 1; 1 without tokens."""
        return torch.exp(self.nats / self.tokens.clamp(min=1))


class TrainerData(LightningDataModule):
    """Data module of a Trainer's data sets, read through its own loaders."""

    def __init__(self, trainer: Any) -> None:
        """Create a data module over the data sets and the collate function of a Trainer."""
        super().__init__()
        self.trainer_of = _holder(trainer)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer or processor of the Trainer, or else its collator's tokenizer; saved with the model, as a Trainer does."""
        trainer = self.trainer_of()
        if trainer.processing_class is not None:
            return trainer.processing_class
        return getattr(trainer.data_collator, "tokenizer", None)

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
        """Return the Trainer's evaluation loader; an empty list if it has neither an ``eval_dataset`` nor a method of its own."""
        trainer = self.trainer_of()
        has_none = trainer.eval_dataset is None and not is_overridden(trainer, "get_eval_dataloader")
        return [] if has_none else self._loader(trainer.get_eval_dataloader)

    def _loader(self, make: Callable[[], Any]) -> object:
        """Call a Trainer's method that makes a data loader, without accelerate, which would shard the data by process."""
        with restored_attributes(accelerator := self.trainer_of().accelerator, "prepare"):
            accelerator.prepare = lambda loader: loader
            loader = make()
        if isinstance(loader, DataLoader):
            loader.collate_fn = _Collate(_without_seed(loader.collate_fn))
        return loader

    def __repr__(self) -> str:
        trainer = self.trainer_of()
        sets = (trainer.train_dataset, trainer.eval_dataset)
        train, test = ("None" if one is None else f"{type(one).__name__} of {len(one)}" for one in sets)
        return f"TrainerData(train={train}, test={test}, batch_size={trainer.args.train_batch_size})"


def _without_seed(collate: Any) -> Any:
    """Return a collator that draws from the global generators, which tasks and evaluations seed, in place of one of its own.

    A collator of transformers with a `seed` makes its generator at the first batch, and goes on with it from client to client.
    """
    if getattr(collate, "seed", None) is None or not hasattr(collate, "create_rng"):
        return collate
    kind = type(collate).__name__
    warn_once(
        _log, f"{kind}.seed is {collate.seed}: its masks are drawn by the seed of the run instead, anew for each task"
    )
    shared = copy.copy(collate)
    shared.seed = shared.generator = None
    return shared


@dataclass(frozen=True)
class _Collate:
    """Collate function that converts the result of a Trainer's collate function to a plain dict."""

    collate: Callable[[list[Any]], Any]  # the Trainer's collate function

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        return dict(self.collate(rows))


def _autocast_dtype(kind: str, args: Any) -> torch.dtype | None:
    """Return the dtype of mixed precision: that of the task on this type of device, else that of the Trainer's ``args``, if any."""
    if kind == "meta":  # which autocast does not know: a step without values is followed there
        return None
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None if args is None else torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


@contextmanager
def _forward_in(dtype: torch.dtype | None, model: nn.Module, kind: str) -> Iterator[None]:
    """In the ``with`` block, compute the model's forward in mixed precision, and the loss around it in full precision.

    accelerate prepares a Trainer's model in this way: its outputs are float32. `dtype`: None = leave all as it is.
    """
    if dtype is None:
        yield
        return
    from accelerate.utils import convert_outputs_to_fp32

    given: Any = model.forward

    @functools.wraps(given)
    def forward(*args: object, **kwargs: object) -> object:
        with torch.autocast(kind, dtype):
            outputs = given(*args, **kwargs)
        # a later forward converts the weights anew, as a Trainer's does: their gradients add up in float32
        torch.clear_autocast_cache()
        return outputs

    with restored_attributes(model, "forward"), torch.autocast(kind, enabled=False):
        model.forward = convert_outputs_to_fp32(forward)
        yield


def _checkpoint(model: Any, args: Any) -> None:
    """Let a model's layers be computed again in the backward pass, if a Trainer's arguments ask for it.

    transformers before 5.23 has only the name gradient checkpointing, v6 only that of activation checkpointing.
    """
    old = not hasattr(args, "activation_checkpointing")
    if not (args.gradient_checkpointing if old else args.activation_checkpointing):
        return
    if old:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        return
    options = dict(args.activation_checkpointing_kwargs or {})
    further = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=options or None, **further)


def _align(model: Any, processor: Any) -> None:
    """Set a model's missing padding token from its tokenizer, as a Trainer does, since decoders need it to classify batches."""
    token, config = getattr(processor, "pad_token_id", None), getattr(model, "config", None)
    if token is not None and config is not None and getattr(config, "pad_token_id", token) is None:
        config.pad_token_id = token


def is_overridden(trainer: Any, name: str) -> bool:
    """Check whether a method of a Trainer is the user's own, defined neither by transformers nor by TRL."""
    return getattr(type(trainer), name).__module__.partition(".")[0] not in ("transformers", "trl")


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
