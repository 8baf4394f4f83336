"""Read the data loaders of a user's data module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
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

if TYPE_CHECKING:
    from lightning import LightningDataModule


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Return a context that turns errors into a `BadInput` of the field ``data``; ``what`` names the thing that is being read."""
    try:
        yield
    except BadInput:
        raise
    except USER_ERRORS as error:
        reason = (
            f"{format_error(error)}: is there a data set without samples, or are samples not as that line takes them?"
        )
        if isinstance(error, OSError):
            path = f" '{error.filename}'" if error.filename else ""
            reason = f"{error.strerror or error}{path}: put the file there, or give its path"
        wrong = BadInput(f"{what} cannot read its data: {reason}")
        wrong.field = "data"
        raise wrong from error


class Loader(NamedTuple):
    """The settings of a data loader that raafl uses."""

    dataset: Any  # data set of the loader; with a subset sampler, only the samples that the sampler selects
    collate: Collate  # function that makes a batch from a list of samples
    batch_size: int | None  # number of samples in a batch; None = the loader has none
    drop_last: bool  # whether an epoch drops its last batch if it is smaller than the others
    # `(len(dataset),)` float64, weights of a `WeightedRandomSampler`; None = each sample once per epoch
    weights: torch.Tensor | None
    shuffles: bool  # whether the loader gives its samples in a random order


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
    if batch_size is None and loader.batch_sampler is not None:
        batches = loader.batch_sampler
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
    """Raise `BadInput` unless a sampler yields each sample once."""
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

    fetch: Fetch  # function that makes a batch from the indices of its samples
    num_samples: int  # number of samples in the data set
    batch_size: int | None  # number of samples in a batch, from the data set's loader; None = the loader has none
    # tensors with all samples, such as one of inputs and one of labels, which are sliced into batches; None =
    # batches are made by ``fetch``
    tensors: list[torch.Tensor] | None
    drop_last: bool = False  # whether the last batch is left out if it is smaller than the others and not the only one
    owned: Sequence[Any] = ()  # random generators of the data set, which each pass seeds anew

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


class TensorImages(GatherDataset):
    """Labelled images that are stored as bytes and normalised when they are gathered.

    The bytes may be a memory-mapped file that all processes of a machine share; as float32, each process would need
    four times as much memory of its own.

    `images`: stored images, `(n, channels, height, width)` uint8.

    Raises:
        BadInput: shapes or types do not fit each other.
    """

    on_any_device = True

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != len(labels):
            raise BadInput(
                f"images are {tuple(images.shape)} {images.dtype} with {len(labels)} labels: "
                "give uint8 images (n, channels, height, width) and one label each"
            )
        if not len(mean) == len(std) == images.shape[1]:
            raise BadInput(f"mean is {mean} and std {std}: give one number for each of the {images.shape[1]} channels")
        self.images = images
        self.labels = labels.to(torch.int64)
        self._mean_c11 = (torch.tensor(mean, dtype=torch.float64) * 255).to(torch.float32).reshape(-1, 1, 1)
        self._std_c11 = (torch.tensor(std, dtype=torch.float64) * 255).to(torch.float32).reshape(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images at the given indices, normalised, `(n, channels, height, width)` float32, and labels `(n,)` int64."""
        pixels = self.images.index_select(0, indices).to(torch.float32)
        # Two exactly rounded operations, so that one image and many give the same bits.
        return pixels.sub_(self._mean_c11).div_(self._std_c11), self.labels.index_select(0, indices)


def unwrap(dataset: object) -> tuple[Any, torch.Tensor | None]:
    """Remove nested `Subset`s: return the inner data set and the selected rows, int64; None = all rows in order."""
    rows: torch.Tensor | None = None
    while isinstance(dataset, Subset) and _plain(dataset, Subset):
        inner = torch.as_tensor(dataset.indices, dtype=torch.int64)
        rows = inner if rows is None else inner[rows]
        dataset = dataset.dataset
    return dataset, rows


def is_tensors(dataset: object) -> bool:
    """Check whether ``dataset`` is a `TensorDataset` whose samples are its rows, not a subclass that transforms them."""
    return isinstance(dataset, TensorDataset) and _plain(dataset, TensorDataset)


def _plain(dataset: object, kind: type) -> bool:
    """Check whether the data set's class reads samples by the unchanged methods of ``kind``."""
    names = ("__getitem__", "__getitems__")
    return all(getattr(type(dataset), name, None) is getattr(kind, name, None) for name in names)


def plain_parts(dataset: object) -> tuple[Any, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return the data set under `Subset`s, the rows they select (None = all), and its tensors by name.

    The data set is None if its samples are not known to be plain rows of tensors.
    """
    base, rows = unwrap(dataset)
    if is_tensors(base):
        return base, rows, {str(number): tensor for number, tensor in enumerate(base.tensors)}
    owner = next((kind for kind in type(base).__mro__ if "gather" in vars(kind)), object)
    if not isinstance(base, GatherDataset) or not vars(owner).get("on_any_device"):
        return None, None, {}
    return base, rows, {name: value for name, value in vars(base).items() if isinstance(value, torch.Tensor)}


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
    return fetch if rows is None else _through(rows, fetch), True


def select_from(tensors: Sequence[torch.Tensor]) -> Fetch:
    """Return a function from row indices to a list with these rows of each tensor."""
    return lambda rows: [tensor.index_select(0, rows) for tensor in tensors]


def _gather_from(dataset: GatherDataset) -> Fetch:
    return lambda rows: list(dataset.gather(rows))


def _through(rows: torch.Tensor, fetch: Fetch) -> Fetch:
    return lambda wanted: fetch(rows.index_select(0, wanted))


def _one_by_one(dataset: Any, collate: Collate) -> Fetch:
    if hasattr(dataset, "__getitems__"):
        return lambda rows: collate(dataset.__getitems__(rows.tolist()))
    return lambda rows: collate([dataset[row] for row in rows.tolist()])


_KEYS = ("label", "labels", "target", "targets", "y")
_COMPARED = 64
"""Number of samples that are read in order to check a data set's stored labels."""
_READ_AT_ONCE = 256


def labels_of(dataset: Any) -> npt.NDArray[Any]:
    """Return the class of each sample as whole numbers, shape `(len(dataset),)`, in the order of the data set.

    Labels are taken from the last tensor of a `TensorDataset`, from an attribute `labels` or `targets`, or from the
    label column of a Hugging Face data set, also through `Subset`s. If there are none of these, all samples are read
    once; the label is the last element of a tuple, or the entry "label", "labels", "target", "targets" or "y" of a
    mapping.

    Raises:
        BadInput: the samples have no label of this kind.
    """
    base, rows = unwrap(dataset)
    labels = _stored_labels(base)
    if labels is not None:
        return labels if rows is None else labels[rows.numpy()]
    return np.array([_label_of(dataset[i], i) for i in range(len(dataset))])


def trained_labels(dataset: Any, fetch: Fetch) -> npt.NDArray[Any]:
    """Return the class of each sample as a training step gets it, shape `(len(dataset),)`, in the order of the data set.

    Stored labels (`labels_of`) count if evenly spaced samples have the same ones. They have others where a
    `target_transform`, a `__getitem__` of a subset, or a collate function changes them; then all samples are read once.
    Global random generators are restored afterwards.

    Raises:
        BadInput: the samples have no label of this kind.
    """
    length = len(dataset)
    num = min(length, _COMPARED)
    rows = torch.tensor([i * length // num for i in range(num)])
    with undisturbed():
        seen = _labels_of_batch(fetch(rows))
        if seen is None or len(seen) != num:
            return labels_of(dataset)
        base, _ = unwrap(dataset)
        if _stored_labels(base) is not None:
            stored = labels_of(dataset)
            if np.array_equal(stored[rows.numpy()], seen.cpu().numpy()):
                return stored
        batches = (_labels_of_batch(fetch(part)) for part in torch.split(torch.arange(length), _READ_AT_ONCE))
        found = [label for label in batches if label is not None]
        labels = torch.cat(found) if found else torch.empty(0)
    return labels.cpu().numpy() if len(labels) == length else labels_of(dataset)


def classes_in(batches: Iterable[Any]) -> frozenset[int] | None:
    """Return the classes that occur in some batches, taken from each batch's last element or its entry "label" or the like.

    The result is None if a batch has no whole-number label for each sample.
    """
    found: set[int] = set()
    for batch in batches:
        label = _labels_of_batch(batch)
        if label is None:
            return None
        found.update(torch.unique(label).tolist())
    return frozenset(found)


def _labels_of_batch(batch: object) -> torch.Tensor | None:
    """Return the integer labels of a batch, shape (samples,); None if it has no such tensor."""
    label: object = None
    if isinstance(batch, Mapping):
        label = next((batch[key] for key in _KEYS if key in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        label = batch[-1]
    if not isinstance(label, torch.Tensor) or label.ndim != 1 or label.is_floating_point():
        return None
    return label


class Columns(Mapping[str, Sequence[Any]]):
    """Named columns of a data set: those of a Hugging Face data set, or attributes with one value per sample."""

    def __init__(self, dataset: Any) -> None:
        self._base, self._rows = unwrap(dataset)

    def __getitem__(self, name: str) -> Sequence[Any]:
        """Return a column with one entry for each sample; raises KeyError if the data set lacks it."""
        has_columns = name in _column_names(self._base)
        column = self._base.with_format(None)[name][:] if has_columns else getattr(self._base, name, None)
        if (
            column is None
            or isinstance(column, str)
            or not hasattr(column, "__len__")
            or len(column) != len(self._base)
        ):
            raise KeyError(name)
        return column if self._rows is None else [column[row] for row in self._rows.tolist()]

    def __iter__(self) -> Iterator[str]:
        return iter(_column_names(self._base))

    def __len__(self) -> int:
        return len(_column_names(self._base))


def _column_names(dataset: object) -> list[str]:
    names = getattr(dataset, "column_names", None)
    return names if isinstance(names, list) and hasattr(dataset, "with_format") else []


def _stored_labels(dataset: Any) -> npt.NDArray[Any] | None:
    if is_tensors(dataset):
        found = dataset.tensors[-1]
    elif names := [name for name in _KEYS if name in _column_names(dataset)]:
        found = dataset.with_format("numpy")[names[0]][:]
    else:
        found = getattr(dataset, "labels", None)
        found = getattr(dataset, "targets", None) if found is None else found
    if found is None or not hasattr(found, "__len__") or len(found) != len(dataset):
        return None
    return found.cpu().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)


def _label_of(sample: object, index: int) -> object:
    label = None
    if isinstance(sample, Mapping):
        label = next((sample[key] for key in _KEYS if key in sample), None)
    elif isinstance(sample, (tuple, list)) and len(sample) > 1:
        label = sample[-1]
    if isinstance(label, (torch.Tensor, np.ndarray, np.generic)) and label.ndim == 0:
        label = label.item()
    if not isinstance(label, int):
        raise BadInput(
            f"sample {index} of the training data has no whole-number label ({type(sample).__name__}): give samples as "
            "(input, label) or with an entry 'label', or use a partition that needs no labels, such as Iid"
        )
    return label


def class_numbers(labels: torch.Tensor | npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return class labels as int64, shape (samples,).

    Raises:
        BadInput: there is not exactly one whole number for each sample.
    """
    array = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise BadInput(
            f"labels have shape {array.shape} and type {array.dtype}; a partition by class needs one whole number "
            "for each sample: use Iid, QuantitySkew or ByColumn for other targets"
        )
    return array.astype(np.int64)
