"""Read the data loaders of a user's data module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from raafl.errors import USER_ERRORS, BadInput, briefly, format_error
from raafl.module_hooks import BATCH_HOOKS
from raafl.rng import reseed, undisturbed
from raafl.rules import Rules

if TYPE_CHECKING:
    from lightning import LightningDataModule


@contextmanager
def reading(what: str, rules: Rules | None = None) -> Iterator[None]:
    """Return a context that turns errors of reading ``what`` into a `BadInput` of ``data`` and seeds random splits by ``rules``."""
    # drawn alike in each process: no client trains on the server's test samples
    try:
        with nullcontext() if rules is None or not rules.seeds_setup else undisturbed(seed=0):
            yield
    except BadInput:
        raise
    except USER_ERRORS as error:
        reason = (
            f"{format_error(error)}: is there a data set without samples, or are samples not as that line takes them?"
        )
        if isinstance(error, ModuleNotFoundError):
            reason = f"{format_error(error)}: install that package"
        elif isinstance(error, OSError):
            path = f" '{error.filename}'" if error.filename else ""
            reason = f"{error.strerror or error}{path}: put the file there, or give its path"
        wrong = BadInput(f"{what} cannot read its data: {reason}")
        wrong.field = "data"
        raise wrong from error


class Loader(NamedTuple):
    """The settings of a data loader that raafl uses."""

    dataset: Any  # data set; of a subset sampler only the samples that it selects
    collate: Collate  # function that makes a batch from a list of samples
    batch_size: int | None  # number of samples in a batch; None = the loader has none
    drop_last: bool  # whether a smaller last batch of an epoch is dropped
    # `(len(dataset),)` float64, weights of a `WeightedRandomSampler`; None = each sample once in an epoch
    weights: torch.Tensor | None
    shuffles: bool  # whether samples come in random order


def read_loader(loader: object, name: str) -> Loader:
    """Read the settings of a loader that a data module has returned.

    Raises:
        BadInput: the object is not a single torch DataLoader over a map-style data set, or has a sampler that raafl
            does not support.
    """
    if isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise BadInput(f"{name}() returned {type(loader).__name__}: return one torch DataLoader")
    dataset: Any = loader.dataset
    check_dataset(f"the data set of {name}()", dataset)
    sampler, batch_size, drop_last = loader.sampler, loader.batch_size, loader.drop_last
    if batch_size is None:
        batches = loader.batch_sampler
        if batches is None:
            raise BadInput(
                f"the batch_size of {name}() is None, so that each item of its data set is a batch, and samples cannot be "
                "divided among clients: give the data set single samples, and batch_size a number"
            )
        if type(batches) is not BatchSampler:
            raise BadInput(
                f"the batch_sampler of {name}() is {type(batches).__name__}, whose batches cannot be used where samples are "
                "divided among clients: give batch_size in its place"
            )
        sampler, batch_size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
    weights = None
    if type(sampler) is SubsetRandomSampler:
        dataset = _picked(dataset, sampler, name)
    elif type(sampler) is WeightedRandomSampler:
        weights = _weights(sampler, len(dataset), name)
    else:
        _check_sampler(sampler, len(dataset), name)
    shuffles = type(sampler) is not SequentialSampler
    return Loader(dataset, loader.collate_fn, batch_size, drop_last, weights, shuffles)


def _picked(dataset: Any, sampler: SubsetRandomSampler, name: str) -> Subset[Any]:
    rows = [int(row) for row in sampler.indices]
    if not rows or min(rows) < 0 or max(rows) >= len(dataset):
        numbers = f"{min(rows)} to {max(rows)}" if rows else "none"
        raise BadInput(
            f"the SubsetRandomSampler of {name}() has indices {numbers}: give indices from 0 to {len(dataset) - 1}"
        )
    return Subset(dataset, rows)


def _weights(sampler: WeightedRandomSampler, length: int, name: str) -> torch.Tensor:
    what = f"the WeightedRandomSampler of {name}()"
    if len(sampler.weights) != length:
        raise BadInput(f"{what} has {len(sampler.weights)} weights for {length} samples: give one for each")
    if not sampler.replacement or sampler.num_samples != length:
        raise BadInput(
            f"{what} has num_samples={sampler.num_samples} and replacement={sampler.replacement}, but each client draws with "
            f"replacement, and as many samples as it has: give num_samples={length} and replacement=True"
        )
    return sampler.weights


def _check_sampler(sampler: Any, length: int, name: str) -> None:
    """Raise `BadInput` unless a sampler yields each sample exactly once in an epoch."""
    kind = type(sampler).__name__
    if type(sampler) not in (SequentialSampler, RandomSampler):
        raise BadInput(
            f"the sampler of {name}() is {kind}, which cannot be used where samples are divided among clients: use "
            "a SubsetRandomSampler or a Subset to select samples, a WeightedRandomSampler for weights, or no "
            "sampler"
        )
    if len(sampler) != length or getattr(sampler, "replacement", False):
        raise BadInput(
            f"the {kind} of {name}() gives {len(sampler)} of {length} samples"
            f"{' with replacement' if getattr(sampler, 'replacement', False) else ''}, but an epoch has each sample of a client "
            "once: remove the sampler; for shorter tasks set train.num_steps"
        )


def check_dataset(what: str, dataset: object) -> None:
    """Raise `BadInput` unless the samples of a data set can be read by index and there is at least one."""
    kind = briefly(dataset) if isinstance(dataset, type) else type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise BadInput(
            f"{what} is a DataLoader: give its data set instead (a Subset if it has a sampler), with batch_size= "
            "and collate_fn="
        )
    is_iterable = isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__")
    )
    if is_iterable:
        raise BadInput(
            f"{what} is {kind}, which can only be iterated, but samples are divided among clients by index: use a "
            "data set with __len__ and __getitem__ (from Hugging Face: without streaming)"
        )
    if isinstance(dataset, type) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise BadInput(f"{what} is {kind}: give a data set with __len__ and __getitem__")
    if hasattr(dataset, "iloc"):
        raise BadInput(
            f"{what} is {kind}, whose columns, not rows, are read by index: give "
            "torch.utils.data.TensorDataset(torch.tensor(frame[COLUMNS].to_numpy()), torch.tensor(frame[LABEL].to_numpy()))"
        )
    if len(dataset) == 0:
        raise BadInput(f"{what} is {kind} without any samples: check how it is read")


def check_transfer(module: LightningDataModule) -> None:
    """Raise `BadInput` if a data module overrides Lightning's hooks for moving batches to a device, which raafl does not call."""
    found = [name for name in BATCH_HOOKS if overrides(module, name)]
    if found:
        raise BadInput(
            f"{type(module).__name__}.{found[0]} would not be called, since clients take their batches from the data set: "
            "define it in the LightningModule"
        )


def overrides(module: LightningDataModule, name: str) -> bool:
    """Check whether a data module overrides the hook ``name``, whose default in Lightning only raises an error."""
    hook = getattr(module, name, None)
    return hook is not None and not getattr(hook, "__qualname__", "").startswith("DataHooks.")


@dataclass(frozen=True, slots=True)
class InOrder:
    """Reader of a data set's batches in the order of the data set, without shuffling."""

    fetch: Fetch  # function that makes a batch from sample indices
    num_samples: int  # number of samples in the data set
    batch_size: int | None  # number of samples in a batch of the data set's loader; None = it has no batches
    # the data set as tensors, such as inputs and labels, which are sliced into batches; None = ``fetch`` makes batches
    tensors: list[torch.Tensor] | None
    drop_last: bool = False  # whether a smaller last batch is left out, unless it is the only one
    owned: Sequence[Any] = ()  # random generators of the data set, which are seeded anew for each pass

    def batches(self, batch_size: int, first: int) -> Iterator[tuple[Any, int]]:
        """Yield each batch with its number of samples."""
        reseed(self.owned)
        batches = torch.split(torch.arange(self.num_samples), batch_size)
        if self.drop_last:
            batches = batches[: max(self.num_samples // batch_size, 1)]
        batches = batches[first:]
        if self.tensors is not None:
            ends = first + len(batches)
            columns = (torch.split(tensor, batch_size)[first:ends] for tensor in self.tensors)
            yield from zip(map(list, zip(*columns, strict=True)), map(len, batches), strict=True)
            return
        for rows in batches:
            yield self.fetch(rows), len(rows)


Collate = Callable[[list[Any]], Any]
Fetch = Callable[[torch.Tensor], Any]


class GatherDataset(Dataset[tuple[torch.Tensor, ...]]):
    """Base class of data sets that gather many samples in one operation, instead of collating them one by one.

    Subclass it to make your own data fast in `ClientData`. `gather` must return, to the bit, the batch that the default
    collate function makes of the single samples.
    """

    labels: torch.Tensor
    """`(num_samples,)` int64, the class of each sample."""
    on_any_device = False
    """Whether `gather` of this very class only computes with the tensors in the object's attributes, draws nothing, and takes
    and gives tensors of the device on which these lie, with the same bits."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the samples with the given indices, `(n,)` int64, as new tensors whose first dimension is n."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[0] for tensor in self.gather(torch.tensor([range(len(self))[index]])))


def unwrap(dataset: object) -> tuple[Any, torch.Tensor | None]:
    """Remove nested `Subset`s: return the inner data set and the selected rows, int64; None = all rows in order."""
    rows: torch.Tensor | None = None
    while isinstance(dataset, Subset) and _plain(dataset, Subset):
        inner = torch.as_tensor(dataset.indices, dtype=torch.int64)
        if bool((inner < 0).any()):  # counted from the end, as Python counts
            inner = torch.where(inner < 0, inner + len(dataset.dataset), inner)  # type: ignore[arg-type]
        rows = inner if rows is None else inner[rows]
        dataset = dataset.dataset
    return dataset, rows


def is_tensors(dataset: object) -> bool:
    """Check whether ``dataset`` is a `TensorDataset` whose samples are its rows, not a subclass that transforms them."""
    return isinstance(dataset, TensorDataset) and _plain(dataset, TensorDataset)


def _plain(dataset: object, kind: type) -> bool:
    """Check that the data set's class inherits its sample access from ``kind`` unchanged."""
    names = ("__getitem__", "__getitems__")
    return all(getattr(type(dataset), name, None) is getattr(kind, name, None) for name in names)


def fetcher(dataset: object, collate: Collate) -> tuple[Fetch, bool]:
    """Return a function that makes a batch from the indices of its samples, and whether the function is fast.

    The batch equals that of a `DataLoader` with this collate function. The function is fast (gathers all samples in one
    operation) for a `TensorDataset` or `GatherDataset`, also under `Subset`s, with the default collate function.
    """
    if collate is not default_collate:
        return _one_by_one(dataset, collate), False
    base, rows = unwrap(dataset)
    if is_tensors(base):
        fetch = select_from(base.tensors)
    elif isinstance(base, GatherDataset):
        fetch = _gather_from(base)
    else:
        return _one_by_one(dataset, collate), False
    return fetch if rows is None else lambda wanted: fetch(rows.index_select(0, wanted)), True


def select_from(tensors: Sequence[torch.Tensor]) -> Fetch:
    """Return a function from row indices to a list with these rows of each tensor."""
    return lambda rows: [tensor.index_select(0, rows) for tensor in tensors]


def _gather_from(dataset: GatherDataset) -> Fetch:
    return lambda rows: list(dataset.gather(rows))


def _one_by_one(dataset: Any, collate: Collate) -> Fetch:
    if hasattr(dataset, "__getitems__"):
        return lambda rows: collate(dataset.__getitems__(rows.tolist()))
    return lambda rows: collate([dataset[row] for row in rows.tolist()])
