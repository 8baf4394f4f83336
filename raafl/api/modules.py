"""Convert the user's model (a LightningModule, an nn.Module with a loss, or a name) to a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raafl.api.datasets import num_classes, train_loader
from raafl.errors import BadInput, briefly
from raafl.lean_import import import_lightning, lightning_classes
from raafl.local.preparation.model_checks import check_tensors
from raafl.local.preparation.modes import with_modes_of_training
from raafl.local.preparation.prepare import given_class, uncompiled, with_methods
from raafl.submodel.cut.copying import copy_structure

import_lightning()
from lightning import LightningDataModule, LightningModule  # noqa: E402

Loss = Callable[[Any, Any], Tensor]
Metrics = Mapping[str, Callable[[Any, Any], Any]]
MakeOptimizer = Callable[[list[nn.Parameter]], Any]
_LABELS = ("labels", "label", "target", "targets", "y")
LR = 0.05
"""Learning rate of SGD, which trains a plain module unless an optimizer is given."""


class Plain(LightningModule):
    """LightningModule that wraps an nn.Module; its parameters get names of the form ``net.NAME``.

    A batch is ``(input, ..., target)``, or a mapping with the module's inputs by name, and the target under the key
    labels, label, target, targets or y.
    """

    def __init__(self, net: nn.Module, loss: Loss, optimizer: MakeOptimizer | None, metrics: Metrics | None) -> None:
        """Wrap the module; the arguments are those of `ModuleSpec`."""
        super().__init__()
        self.net = net
        self._parts = (loss, optimizer, metrics)  # in a tuple, since a loss that is a module is no part of the model

    def forward(self, *inputs: object, **named: object) -> Any:
        """Return the module's output; if it is a structure with the entry ``logits``, return these."""
        output = self.net(*inputs, **named)
        return (
            output["logits"] if isinstance(output, Mapping) and "logits" in output else output
        )  # transformers' are, too

    def training_step(self, batch: object, batch_idx: int) -> Tensor:
        """Return the training loss of a batch."""
        output, target = self._both(batch)
        return self._loss(output, target)

    def validation_step(self, batch: object, batch_idx: int) -> dict[str, Any]:
        """Return the loss and metrics of a batch; accuracy is among them if outputs are logits and targets are classes."""
        output, target = self._both(batch)
        found: dict[str, Any] = {"loss": self._loss(output, target)}
        if _are_logits(output, target):
            classes = output.argmax(dim=1 if output.shape[2:] == target.shape[1:] else -1)
            found["accuracy"] = (classes == target).float().mean()
        return found | {name: _measured(metric, output, target) for name, metric in (self._parts[2] or {}).items()}

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the trainable parameters, SGD by default."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        make = self._parts[1]
        return torch.optim.SGD(trained, lr=LR) if make is None else make(trained)

    def _both(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, Mapping):
            name = _label(batch)
            if name is None:
                raise BadInput(
                    f"a batch has {', '.join(map(str, batch))}, but none of {', '.join(_LABELS)}: give the target "
                    "one of these names"
                )
            return self(**{key: value for key, value in batch.items() if key != name}), batch[name]
        *inputs, target = batch
        return self(*inputs), target

    def _loss(self, output: object, target: object) -> Tensor:
        loss = self._parts[0]
        if isinstance(loss, nn.Module) and isinstance(output, Tensor):
            loss = loss.to(output.device)
        return loss(output, target)


def _label(batch: Mapping[str, Any]) -> str | None:
    return next((name for name in _LABELS if name in batch), None)


def _measured(metric: Any, output: Any, target: Any) -> object:
    """Return a metric function's value for a batch, or a torchmetrics ``Metric`` updated with it."""
    if isinstance(metric, nn.Module) and isinstance(output, Tensor):
        metric = metric.to(output.device)
    if not (callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))):
        return metric(output, target)
    metric.update(output, target)
    return metric


def _are_logits(output: object, target: object) -> bool:
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return False
    if target.is_floating_point() or not output.is_floating_point() or output.ndim != target.ndim + 1:
        return False
    if output.shape[2:] == target.shape[1:]:
        return output.shape[1] > 1
    # (batch, place, class), as language models have it
    return output.shape[:-1] == target.shape and output.shape[-1] > 1


@dataclass(frozen=True)
class ModuleSpec:
    """The user's model, and how to train it, as passed to `Federation`."""

    # a LightningModule; an nn.Module; a function or class that returns one of them; or the name of a transformers
    # model for text classification: on the hub, a folder, or ``package:NAME/FOLDER``
    given: Any
    loss: Loss | None = None  # function of (output, target); only for an nn.Module
    # function that gets a list of parameters and returns an optimizer or anything else that
    # `configure_optimizers` may return. None = the LightningModule's own, SGD with learning rate 0.05 for an
    # nn.Module, AdamW with 5e-5 for the name of a transformers model
    optimizer: MakeOptimizer | None = None
    # further functions of (output, target) by name, averaged over samples; only for an nn.Module
    metrics: Metrics | None = field(default=None)

    def __post_init__(self) -> None:
        """Unwrap a `torch.compile`d module; raise `BadInput` for what cannot be a model."""
        object.__setattr__(self, "given", uncompiled(self.given))
        is_name = isinstance(self.given, str)
        if not is_name and not callable(self.given):
            raise BadInput(
                f"module is {briefly(self.given)}: give a LightningModule, an nn.Module with loss=, a function that makes one, "
                "or the name of a transformers model"
            )
        if isinstance(self.given, nn.Module) and not _is_lightning(self.given) and self.loss is None:
            raise BadInput(
                f"module is a plain {type(self.given).__name__}, and loss is missing: give loss=, a function of (output, "
                "target) such as torch.nn.functional.cross_entropy"
            )
        _check_function("loss", self.loss, "of (output, target), such as torch.nn.functional.cross_entropy")
        _check_function("optimizer", self.optimizer, "that makes one of a list of parameters, such as torch.optim.Adam")
        if isinstance(self.loss, type) and issubclass(self.loss, nn.Module):
            raise BadInput(f"loss is {briefly(self.loss)}: give an object, {self.loss.__name__}()")
        if self.is_module:
            check_tensors(self.given)
        is_whole = _is_lightning(self.given) or is_name
        if is_whole and (self.loss is not None or self.metrics is not None):
            raise BadInput(
                "loss and metrics are only for a plain nn.Module, but this module has its own training_step: leave "
                "them out"
            )

    @property
    def is_module(self) -> bool:
        """Whether the user gave a module itself, not a function or name, so that training starts from its weights."""
        return isinstance(self.given, nn.Module)

    def make(self, data: LightningDataModule) -> LightningModule:
        """Build a new LightningModule from what the user gave."""
        if isinstance(self.given, str):
            from model_zoo import HFSequenceClassifier

            made: Any = HFSequenceClassifier(self.given, num_classes(data))
        else:
            made = self._copied() if self.is_module else self.given()
        if not isinstance(made, nn.Module):
            raise BadInput(f"module is a function that makes {type(made).__name__}: let it return a module")
        made = uncompiled(made)
        if not _is_lightning(made):
            check_tensors(made)
            if self.loss is None:
                raise BadInput(
                    f"module makes a plain {type(made).__name__}, and loss is missing: give loss=, a function of (output, target)"
                )
            return self._plain(made, data)
        if self.optimizer is not None:
            with_methods(made, configure_optimizers=_with(self.optimizer))
        return made  # type: ignore[no-any-return]

    def _copied(self) -> nn.Module:
        """Return a copy of the user's module, in the modes in which it trains."""
        if _is_of_trainer(self.given):
            return self.given.fresh()  # type: ignore[no-any-return]
        return with_modes_of_training(copy_structure(self.given, {}))

    def _plain(self, net: nn.Module, data: LightningDataModule) -> Plain:
        if getattr(type(net).forward, "__name__", "") == "_forward_unimplemented":
            raise BadInput(f"module is {type(net).__name__}, which has no forward: define forward(self, x)")
        loader = train_loader(data)
        batch = loader.collate_fn([loader.dataset[0]])
        if not (isinstance(batch, Mapping) or (isinstance(batch, Sequence) and len(batch) > 1)):
            raise BadInput(
                f"a batch is {type(batch).__name__}: give (input, ..., target), or a mapping; or use a "
                "LightningModule, which can read any batch"
            )
        return Plain(net, self.loss, self.optimizer, self.metrics)  # type: ignore[arg-type]

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's own module from a LightningModule that `make` returned."""
        if _is_of_trainer(module):
            return module.model  # type: ignore[return-value]
        return module.net if isinstance(module, Plain) else module

    def trained_copy(self, module: nn.Module) -> nn.Module:
        """Return a trained copy of the user's module, with its original class, so that it can be saved."""
        if _is_of_trainer(module):
            return module.trained_model()  # type: ignore[no-any-return, operator]
        module = self.unwrap(module)
        module.__class__ = given_class(module)
        return module

    def settings(self) -> dict[str, Any]:
        """Describe loss, optimizer and metrics as texts, for config.yaml."""
        named = {"loss": self.loss, "optimizer": self.optimizer}
        found = {name: qualified_name(value) for name, value in named.items() if value is not None}
        if self.metrics:
            found["metrics"] = ", ".join(self.metrics)
        return found


def _is_lightning(module: object) -> bool:
    return isinstance(module, lightning_classes("LightningModule"))


def _is_of_trainer(module: object) -> bool:
    """Check whether a module is a `raafl.local.from_trainer.TrainerModule`, which runs without a Trainer need not load."""
    return callable(getattr(type(module), "trained_model", None))


def _check_function(name: str, value: object, which: str) -> None:
    if value is not None and not callable(value):
        raise BadInput(f"{name} is {briefly(value)}: give a function {which}")


def qualified_name(thing: object) -> str:
    """Return the import path of a function or class, such as torch.nn.Linear; for any other object, that of its class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    name = f"{named.__module__}.{named.__qualname__}"
    return name.removeprefix("builtins.")


def _with(optimizer: MakeOptimizer) -> Callable[[Any], Any]:
    def configure_optimizers(self: Any) -> Any:
        parameters: Iterable[nn.Parameter] = self.parameters()
        return optimizer([parameter for parameter in parameters if parameter.requires_grad])

    return configure_optimizers
