"""Convert the user's data (a data module, data sets, loaders or a name) to a LightningDataModule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, default_collate

from raafl.config.value_types import check_types
from raafl.data import FPB, SST2, AGNews, HuggingFaceText
from raafl.data.hub import load_splits
from raafl.data.labels import trained_labels
from raafl.data.loaders import check_dataset
from raafl.data.tensors import fetcher
from raafl.errors import BadInput, at_least, briefly
from raafl.lean_import import import_lightning

import_lightning()
from lightning import LightningDataModule  # noqa: E402

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
        """Store the data sets.

        `test`: samples to evaluate the global model on; None = none.
        `collate_fn`: makes a batch of a list of samples; None = torch's default.
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
        """Store the loaders; ``test`` None = nothing to evaluate on."""
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


def as_datamodule(data: Any, module: Any, **more: Any) -> LightningDataModule:
    """Convert the user's data to a LightningDataModule.

    `data`: a LightningDataModule; a pair (train, test) of map-style data sets or of DataLoaders, where test may be
    None; or text: the name of a data set on the Hugging Face hub, one of sst2, ag_news and fpb, or a folder that the
    library `datasets` can read.

    Raises:
        BadInput: ``data`` has another form.
    """
    given = {name: value for name, value in more.items() if value is not None}
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
