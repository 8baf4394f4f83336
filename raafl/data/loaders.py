"""Read the data loaders of a user's data module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from raafl.errors import BadInput, briefly, said

if TYPE_CHECKING:
    from lightning import LightningDataModule


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what fails inside into a `BadInput` of the field ``data``; ``what`` is whose code reads it."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        reason = f"{said(error)}: is there a data set without samples, or are samples not as that line takes them?"
        if isinstance(error, OSError):
            path = f" '{error.filename}'" if error.filename else ""
            reason = f"{error.strerror or error}{path}: put the file there, or give the path that it has"
        wrong = BadInput(f"{what} cannot read its data: {reason}")
        wrong.field = "data"
        raise wrong from error


def single_loader(loader: Any, name: str) -> DataLoader[Any]:
    if isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise BadInput(f"{name}() returned {type(loader).__name__}: return one torch DataLoader")
    check_dataset(f"the data set of {name}()", loader.dataset)
    return loader


def check_dataset(what: str, dataset: Any) -> None:
    """Raise `BadInput` unless samples can be picked by number, and there are some; ``what`` names the data set."""
    kind = briefly(dataset) if isinstance(dataset, type) else type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise BadInput(f"{what} is a DataLoader: give its data set, and batch_size= and collate_fn= beside it")
    is_iterable = isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__")
    )
    if is_iterable:
        raise BadInput(
            f"{what} is {kind}, which is iterated over, but samples are dealt out to clients by number: load it whole "
            "(of Hugging Face without streaming), as a data set with __len__ and __getitem__"
        )
    if isinstance(dataset, type) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise BadInput(f"{what} is {kind}: give a data set with __len__ and __getitem__")
    if len(dataset) == 0:
        raise BadInput(f"{what} is {kind} without any samples: give one that has some, or look at how it is read")


def overrides(module: LightningDataModule, name: str) -> bool:
    """Whether the module has this hook of its own; Lightning's, in DataHooks, only raises."""
    hook = getattr(module, name, None)
    return hook is not None and not getattr(hook, "__qualname__", "").startswith("DataHooks.")
