"""Read the classes of samples, and named columns, by which a partition shares them out and methods weigh or mask them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raafl.data.loaders import Fetch, is_tensors, unwrap
from raafl.errors import BadInput
from raafl.rng import undisturbed

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
    """Find the integer labels in a batch, shape (samples,); None if it has none."""
    label = _entry(batch)
    if not isinstance(label, torch.Tensor) or label.ndim != 1 or label.is_floating_point():
        return None
    return label


def _entry(found: object) -> object:
    """Return the entry of a sample or a batch that has the labels: by its name, or the last; None if there is none."""
    if isinstance(found, Mapping):
        return next((found[key] for key in _KEYS if key in found), None)
    return found[-1] if isinstance(found, (tuple, list)) and len(found) > 1 else None


class Columns(Mapping[str, Sequence[Any]]):
    """Named columns of a data set: those of a Hugging Face data set, or attributes with one value per sample.

    A data set of which columns were removed may have the one before as ``with_all_columns``; its columns are given, too.
    """

    def __init__(self, dataset: Any) -> None:
        base, self._rows = unwrap(dataset)
        self._base = getattr(base, "with_all_columns", base)

    def __getitem__(self, name: str) -> Sequence[Any]:
        """Return a column with one entry for each sample; raise KeyError if the data set has no such column."""
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
    label = _entry(sample)
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
