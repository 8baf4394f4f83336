"""Gather many samples at once from tensor data sets, and find one under the wrappers of a data loader."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from raafl.errors import BadInput

Collate = Callable[[list[Any]], Any]
Fetch = Callable[[torch.Tensor], Any]


class GatherDataset(Dataset[tuple[torch.Tensor, ...]]):
    """Base class of data sets that gather many samples in one operation, instead of collating them one by one.

    Subclass it to make your own data fast in `ClientData`. `gather` must return, to the bit, the batch that the default
    collate function makes of the single samples.
    """

    labels: torch.Tensor
    """`(num_samples,)` int64, the class of each sample."""

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
    """Check whether a subclass of `kind` inherits its `__getitem__` unchanged."""
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
