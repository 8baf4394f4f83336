"""Traverse the tensors of a batch: nested lists, tuples, mappings, dataclasses, packed sequences, the user's objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

Change = Callable[[Tensor], Any]
_LIBRARIES = ("torch", "builtins", "numpy")


def mapped(
    batch: object,
    change: Change,
    packed: Callable[[PackedSequence], Any] | None = None,
    movable: Callable[[Any], Any] | None = None,
) -> object:
    """Apply a function to every tensor of a batch; return a batch of the same structure, and leave ``batch`` unchanged.

    `packed`: function that is called with each packed sequence as a whole; None = ``change`` is called with its
    tensors.
    `movable`: function that is called with each other object that has a method ``to``, such as a graph; None =
    ``change`` is called with its tensors.
    """

    def walk(item: object, is_inside: bool) -> object:
        if isinstance(item, Tensor):
            return change(item)
        if isinstance(item, PackedSequence):
            return _repacked(item, change) if packed is None else packed(item)
        if isinstance(item, Mapping):
            return _mapping(item, {key: walk(value, is_inside) for key, value in item.items()})
        if isinstance(item, list | tuple):
            return _sequence(item, [walk(one, is_inside) for one in item])
        if movable is not None and callable(getattr(item, "to", None)):
            return movable(item)
        # within an object only dataclasses are entered, since other objects may refer to each other in cycles
        return _object(item, {name: walk(value, True) for name, value in _attributes(item, is_inside)})

    return walk(batch, False)


def tensors_in(values: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings, such as the arguments of an operation, in order."""
    return list(_tensors(values))


def batch_tensors(batch: object) -> list[Tensor]:
    """Return all tensors that `mapped` finds in a batch, in order."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(batch, note)
    return found


def moved(batch: object, device: torch.device) -> object:
    """Move the tensors of a batch to ``device``; tensors without values stay on the meta device."""
    return mapped(
        batch,
        lambda x: x if x.is_meta else pinned(x, device).to(device, non_blocking=True),
        # as in Lightning, an object with ``to`` moves its own tensors, wherever it stores them
        movable=lambda item: item.to(device),
    )


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to pinned memory if it goes to a CUDA GPU, which takes it from there without the CPU waiting."""
    return x.pin_memory() if device.type == "cuda" and x.device.type == "cpu" and x.layout is torch.strided else x


def meta_batch(batch: object, batch_size: int | None = None) -> object:
    """Return the batch on the meta device, where tensors have no values.

    `batch_size`: number of samples of the result; None = as many as ``batch`` has.
    """
    samples = num_samples(batch)

    def resized(x: Tensor) -> Tensor:
        is_sampled = batch_size is not None and x.dim() > 0 and x.shape[0] == samples
        return torch.empty((batch_size, *x.shape[1:]) if is_sampled else x.shape, dtype=x.dtype, device="meta")

    def packed(x: PackedSequence) -> object:
        x = x if batch_size is None else _repeated_packed(x, batch_size)
        return mapped(x, lambda tensor: torch.empty_like(tensor, device="meta"))

    return mapped(batch, resized, packed)


def num_samples(batch: object) -> int:
    """Return the number of samples of a batch: dimension 0 of its first packed sequence or tensor."""
    found: list[int] = []

    def packed(x: PackedSequence) -> object:
        found.append(int(x.batch_sizes[0]))
        return x

    def tensor(x: Tensor) -> Tensor:
        found.extend(x.shape[:1])
        return x

    mapped(batch, tensor, packed)
    return found[0] if found else 0


def repeated(batch: object, batch_size: int) -> object:
    """Return a batch with ``batch_size`` samples: those of ``batch`` in order, repeated as often as needed."""
    num = num_samples(batch)
    rows = torch.arange(batch_size) * num // batch_size

    def one(x: Tensor) -> Tensor:
        return x[rows.to(x.device)] if x.dim() > 0 and x.shape[0] == num else x.clone()

    return mapped(batch, one, lambda packed: _repeated_packed(packed, batch_size))


def _tensors(batch: object) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _tensors(item)


def _repeated_packed(packed: PackedSequence, num: int) -> PackedSequence:
    sequences = unpack_sequence(packed)
    rows = [sequences[row * len(sequences) // num] for row in range(num)]
    return pack_sequence(rows, enforce_sorted=packed.sorted_indices is None)


def _repacked(packed: PackedSequence, change: Change) -> object:
    order = [None if x is None else change(x) for x in (packed.sorted_indices, packed.unsorted_indices)]
    return PackedSequence(change(packed.data), packed.batch_sizes, *order)


def _mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> object:
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return items
    found = copy.copy(batch)  # a copy, to keep the mapping's class, such as that of a tokenizer's result
    for key, value in items.items():
        found[key] = value
    return found


def _sequence(batch: list[Any] | tuple[Any, ...], items: list[Any]) -> object:
    if type(batch) in (list, tuple):
        return type(batch)(items)
    if isinstance(batch, list):
        found = copy.copy(batch)
        found[:] = items
        return found
    # bypass the subclass's `__new__`, which may take other arguments, as that of a named tuple
    made = tuple.__new__(type(batch), items)
    made.__dict__.update(getattr(batch, "__dict__", {})) if hasattr(made, "__dict__") else None
    return made


def _attributes(item: object, is_inside: bool) -> list[tuple[str, Any]]:
    """List the attributes of a user's object; within another object (``is_inside``) only those of a dataclass."""
    if callable(item) or type(item).__module__.partition(".")[0] in _LIBRARIES:
        return []
    if is_dataclass(item):
        return [(field.name, getattr(item, field.name)) for field in fields(item) if hasattr(item, field.name)]
    return [] if is_inside else list(getattr(item, "__dict__", {}).items())


def _object(batch: object, attributes: dict[str, Any]) -> object:
    """Copy an object with new attributes, or return it itself if none differs."""
    changed = {name: value for name, value in attributes.items() if value is not getattr(batch, name)}
    if not changed:
        return batch
    found = copy.copy(batch)
    for name, value in changed.items():
        object.__setattr__(found, name, value)  # also works for frozen dataclasses
    return found
