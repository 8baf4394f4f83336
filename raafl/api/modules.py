"""Convert the user's model (a LightningModule, an nn.Module with a loss, or a name) to a LightningModule."""

from __future__ import annotations

import inspect
import numbers
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from raafl.data import FPB, SST2, AGNews, HuggingFaceText
from raafl.data.labels import trained_labels
from raafl.data.loaders import check_dataset, fetcher
from raafl.data.readers import load_splits
from raafl.errors import BadInput, at_least, briefly
from raafl.lean_import import import_lightning, lightning_classes
from raafl.local.missing_steps import given_class, with_methods
from raafl.local.prepare import check_tensors, uncompiled
from raafl.submodel.cut.layers import copy_structure

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
        """Store the arguments, which are those of `ModuleSpec`."""
        super().__init__()
        self.net = net
        # in a tuple: `nn.Module` would register a loss that is a module as a submodule
        self._parts = (loss, optimizer, metrics)

    def forward(self, *inputs: object, **named: object) -> Any:
        """Return the module's output; if it is a structure with the entry ``logits``, return these."""
        output = self.net(*inputs, **named)
        # outputs of transformers models are mappings
        return output["logits"] if isinstance(output, Mapping) and "logits" in output else output

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
    """Compute a metric of a batch; a torchmetrics ``Metric`` is updated, and returned itself for later averaging."""
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
    # (batch, position, class), as language models have it
    return output.shape[:-1] == target.shape and output.shape[-1] > 1


@dataclass(frozen=True)
class ModuleSpec:
    """The user's model, and how to train it, as passed to `Federation`."""

    # a LightningModule, an nn.Module, a function or class that makes one of them, or the name of a transformers model
    # for text classification: on the hub, a folder, or ``package:NAME/FOLDER``
    given: Any
    loss: Loss | None = None  # function of (output, target); only for an nn.Module
    # function from a list of parameters to an optimizer, or anything else that `configure_optimizers` may return. None:
    # the LightningModule's own; SGD with learning rate 0.05 for an nn.Module; AdamW with 5e-5 for a transformers
    # model's name
    optimizer: MakeOptimizer | None = None
    # more functions of (output, target) by name, averaged over samples; only for an nn.Module
    metrics: Metrics | None = field(default=None)

    def __post_init__(self) -> None:
        """Unwrap a `torch.compile`d module; raise `BadInput` if the arguments describe no model that can be trained."""
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
        """Build a new LightningModule from the user's model."""
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
        """Copy the user's module, with each submodule in the mode, train or eval, that it has during training."""
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

    def early_stopping(self) -> list[dict[str, Any]]:
        """Return the arguments of the `EarlyStopping` callbacks that a module of a Trainer asks for; none of any other."""
        return self.given.early_stopping() if _is_of_trainer(self.given) else []

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
    """Check whether a module comes from `raafl.from_trainer`, without importing `raafl.local.from_trainer`."""
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


import_lightning()

_KNOWN: dict[str, Any] = {
    **{"sst2": SST2, "ag_news": AGNews, "fpb": FPB},
    **{known.hub: known for known in (SST2, AGNews, FPB)},
}
_TESTS = ("test", "validation", "dev", "eval")
_TEXTS = ("text", "sentence", "content", "review")


class Datasets(LightningDataModule):
    """Data module made of a training set and a test set, which are map-style data sets."""

    def __init__(
        self, train: Any, test: Any, batch_size: int = 32, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> None:
        """Check and store the data sets.

        `test`: samples on which the global model is evaluated; None = none. `collate_fn`: makes a batch of a list of
        samples; None = torch's default.
        """
        super().__init__()
        for name, dataset in (("train", train), ("test", test)):
            if name == "train" or dataset is not None:
                check_dataset(name, dataset)
        check_types({"batch_size": batch_size}, {"batch_size": int})
        at_least("batch_size", batch_size, 1)
        self.train, self.test, self.batch_size = train, test, int(batch_size)
        self.collate_fn = collate_fn or default_collate

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training set."""
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=self.collate_fn)

    def test_dataloader(self) -> object:
        """Return the loader of the test set; an empty list if there is none."""
        return [] if self.test is None else DataLoader(self.test, self.batch_size, collate_fn=self.collate_fn)

    def __repr__(self) -> str:
        train, test = (
            "None" if one is None else f"{type(one).__name__} of {len(one)}" for one in (self.train, self.test)
        )
        return f"Datasets(train={train}, test={test}, batch_size={self.batch_size})"


class Loaders(LightningDataModule):
    """Data module made of the user's own data loaders, for training and test."""

    def __init__(self, train: DataLoader[Any], test: DataLoader[Any] | None) -> None:
        """Store the loaders; if ``test`` is None, the model is not evaluated."""
        super().__init__()
        self.train, self.test = train, test

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training set."""
        return self.train

    def test_dataloader(self) -> object:
        """Return the loader of the test set; an empty list if there is none."""
        return [] if self.test is None else self.test

    def __repr__(self) -> str:
        sets: list[Any] = [None if loader is None else loader.dataset for loader in (self.train, self.test)]
        train, test = ("None" if one is None else f"{type(one).__name__} of {len(one)}" for one in sets)
        return f"Loaders(train={train}, test={test}, batch_size={self.train.batch_size})"


def _without_data(module: object) -> str:
    """Return the error message for a module that was given without data, which may be a Trainer or make one."""
    kind = type(module)
    if any((cls.__module__, cls.__name__) == ("transformers.trainer", "Trainer") for cls in kind.__mro__):
        return f"module is a {kind.__name__}: give raafl.from_trainer(trainer) in place of module and data"
    missing = "data is missing: give a LightningDataModule, or a pair (train, test) of data sets"
    makes = "; of a function that makes a Trainer, give raafl.from_trainer(function)"
    return missing + makes if inspect.isroutine(module) else missing


def as_datamodule(data: Any, module: Any, **more: Any) -> LightningDataModule:
    """Convert the user's data to a LightningDataModule.

    `data`: a LightningDataModule; a pair (train, test) of map-style data sets or of DataLoaders, where test may be
    None; or text: the name of a data set on the Hugging Face hub, one of sst2, ag_news and fpb, or a folder that the
    library `datasets` can read.

    Raises:
        BadInput: ``data`` has another form.
    """
    given = {name: value for name, value in more.items() if value is not None}
    if data is None:
        raise BadInput(_without_data(module))
    if isinstance(data, (str, Path)):
        return load_named(str(data), module if isinstance(module, str) else None, **given)
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], DataLoader):
        _only(given, "DataLoaders", "set it there")
        if data[1] is not None and not isinstance(data[1], DataLoader):
            raise BadInput(
                f"'test' is {type(data[1]).__name__}, but 'train' is a DataLoader: give a DataLoader for 'test' too, or None"
            )
        return Loaders(*data)
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return Datasets(*data, **_only(given, "plain data sets", "leave it out", "batch_size", "collate_fn"))
    if isinstance(data, type):
        raise BadInput(f"data is {briefly(data)}: give an object, {data.__name__}(...)")
    if isinstance(data, LightningDataModule) or hasattr(data, "train_dataloader"):
        _only(given, f"{type(data).__name__}, which has loaders of its own", "set it there")
        return data  # type: ignore[no-any-return]
    raise BadInput(
        f"data is {briefly(data)}: give a LightningDataModule, a pair (train, test) of data sets or DataLoaders, "
        "(train, None) without test data, or the name of a Hugging Face data set"
    )


def _only(given: dict[str, Any], data: str, remedy: str, *names: str) -> dict[str, Any]:
    for name in given:
        if name not in names:
            raise BadInput(f"{name} is given, but has no effect with {data}: {remedy}")
    return given


def load_named(path: str, model_name: str | None, **given: object) -> LightningDataModule:
    """Load a data set from the Hugging Face hub or a folder, tokenised for a transformers model.

    Columns and splits must have usual names, such as text, label and test; if they have not, use
    `raafl.data.HuggingFaceText`.

    `model_name`: name of the transformers model whose tokenizer is used; None = the data set has no text.

    Raises:
        BadInput: there is no such data set, or its columns have other names.
    """
    options = _only(given, "a data set given by name", "leave it out", "batch_size", "max_length")
    tokenizer = model_name or "words"
    if path in _KNOWN:
        found: LightningDataModule = _KNOWN[path](tokenizer, **options)
        return found
    splits = load_splits(path, None)
    columns = splits["train"].column_names if "train" in splits else []
    text = next((name for name in _TEXTS if name in columns), None)
    if text is None or "label" not in columns:
        raise BadInput(
            f"the data set '{path}' has splits {', '.join(splits)}, columns {', '.join(columns)}, but no split "
            f"'train' with the columns 'label' and one of {', '.join(_TEXTS)}: name yours with raafl.data.HuggingFaceText, or "
            "raafl.data.HuggingFace for images"
        )
    test = next((name for name in _TESTS if name in splits and min(splits[name]["label"]) >= 0), None)
    if test is None:
        raise BadInput(
            f"the data set '{path}' has splits {', '.join(splits)}, none of them for tests: name one with "
            "raafl.data.HuggingFaceText"
        )
    return HuggingFaceText(path, tokenizer, text_column=text, test_split=test, **options)


def num_classes(data: LightningDataModule) -> int:
    """Count the classes among the training labels of a data module, after its `setup`."""
    loader = train_loader(data)
    fetch, _ = fetcher(loader.dataset, loader.collate_fn)
    return int(trained_labels(loader.dataset, fetch).max()) + 1


def train_loader(data: LightningDataModule) -> DataLoader[Any]:
    """Return the training loader of a data module, after its `setup`; a list with a single loader is accepted."""
    loader: Any = data.train_dataloader()
    return loader[0] if isinstance(loader, (list, tuple)) else loader  # type: ignore[no-any-return]


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any], section: str = "") -> None:
    """Raise one `BadInput` with a line for each value that is not of its declared type."""
    from raafl.config.messages import describe_type

    lines = []
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            words = " or ".join(dict.fromkeys(describe_type(hints[name])))
            lines.append(f"{section}{'.' if section else ''}{name} is {briefly(value)}: give {words}")
    if lines:
        raise BadInput("\n".join(lines))


def fits(value: object, hint: Any) -> bool:
    """Check whether a value is of a declared type.

    A whole number fits where a number is wanted, a list fits a tuple, and a mapping of fields a dataclass. Any text fits
    a `Literal` of texts: which one it is, the settings check themselves. A type that is unknown here fits all values.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner or (isinstance(value, str) and any(isinstance(one, str) for one in inner))
    if hint in (None, type(None)):
        return value is None
    if hint in (int, float):
        # numpy's numbers are registered as subclasses of these classes
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    if origin in (list, tuple, Sequence):
        return isinstance(value, (list, tuple)) and _all_fit(value, origin, inner)
    if origin in (dict, Mapping) or (isinstance(hint, type) and is_dataclass(hint)):
        return isinstance(value, Mapping) or (isinstance(hint, type) and isinstance(value, hint))
    return True


def _all_fit(items: Sequence[object], origin: object, inner: Sequence[Any]) -> bool:
    if origin is not tuple or inner[-1] is Ellipsis:
        return all(fits(item, inner[0]) for item in items)
    return len(items) == len(inner) and all(map(fits, items, inner))


_TRAINING = "_raafl_modes"
T = TypeVar("T", bound=nn.Module)


def in_eval_mode(module: T) -> T:
    """Put a trained module into eval mode for its user, and remember the modes in which it was trained.

    `with_modes_of_training` restores these if the user trains it again.
    """
    module.__dict__[_TRAINING] = [part.training for part in module.modules()]
    return module.eval()


def with_modes_of_training(module: T) -> T:
    """Undo `in_eval_mode` in a module that is still in eval mode as a whole; leave any other as its user left it."""
    before, parts = module.__dict__.pop(_TRAINING, []), list(module.modules())
    if len(before) == len(parts) and not any(part.training for part in parts):
        for part, training in zip(parts, before, strict=True):
            part.training = training
    return module
