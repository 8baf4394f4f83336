"""Prepare the batches of several clients step by step, gathered together where clients share a data set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure

from raafl.data.federated import ClientData
from raafl.local.stacked.products import CACHE_LINE_BYTES
from raafl.local.stacked.stacks import Unstackable
from raafl.submodel.nested_batch import batch_tensors

_AHEAD_BYTES = 1 << 24  # bytes of batches that are gathered at a time

Rows = Iterator[Tensor]
"""The numbers of the samples in each of a client's batches."""


class Batch:
    """Batches of several clients that are trained together, for one step.

    Attributes:
        kinds: positions of the clients, grouped by the structure, shapes and dtypes of their batches.
        sizes: number of samples in each client's batch.
        num: number of clients in the batch.
    """

    def __init__(
        self, kinds: Sequence[Any], leaves: Sequence[Sequence[Any]], forms: dict[Any, TreeSpec], sizes: Sequence[int]
    ) -> None:
        """Store each client's kind of batch, its leaves and its size, and how to rebuild batches of each kind."""
        self._all, self._leaves, self._forms, self.num, self.sizes = kinds, leaves, forms, len(kinds), sizes
        self.kinds: defaultdict[Any, list[int]] = defaultdict(list)
        for client, kind in enumerate(kinds):
            self.kinds[kind].append(client)

    def stacked(self, clients: Sequence[int]) -> tuple[list[Any], TreeSpec]:
        """Return these clients' batches as a flat list of stacked tensors, with the structure that rebuilds a batch from it.

        The batches must have the same structure and shapes. Values that are not tensors are taken from the first
        client.
        """
        columns = zip(*(self._leaves[client] for client in clients), strict=True)
        stacks = [torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
        return stacks, self._forms[self._all[clients[0]]]


class Stack(Batch):
    """Batches of several clients for one step, all of one size, held as tensors that are already stacked."""

    def __init__(self, size: int, num: int, tensors: Sequence[Tensor], forms: dict[Any, TreeSpec]) -> None:
        """Store the batches of ``num`` clients, ``size`` samples each, one after another."""
        super().__init__([size] * num, [], forms, [size] * num)
        self._stacks: list[Any] = [_aligned(one).view(num, size, *one.shape[1:]) for one in tensors]

    def stacked(self, clients: Sequence[int]) -> tuple[list[Any], TreeSpec]:
        """Return these clients' batches as a flat list of stacked tensors, with the structure that rebuilds a batch from it."""
        form = self._forms[self._all[0]]
        if len(clients) == self.num:
            return self._stacks, form
        rows = torch.tensor(clients)
        return [stack.index_select(0, rows) for stack in self._stacks], form


def _aligned(one: Tensor) -> Tensor:
    """Return the tensor, copied if its memory is not aligned like that of a new tensor."""
    return one.clone() if one.data_ptr() % CACHE_LINE_BYTES else one


def batches(
    clients: Sequence[ClientData], rows: Sequence[Rows], counts: Sequence[int], batch_size: int | None
) -> Iterator[Batch]:
    """Yield the joint batch of all clients for each step.

    `batch_size`: local batch size; None = that of the data.
    """
    first = clients[0]
    if not first.gathers:
        yield from _one_by_one(clients, rows, counts)
        return
    sample = first.fetch(torch.zeros(1, dtype=torch.int64))
    form = tree_structure(sample)
    forms: dict[Any, TreeSpec] = defaultdict(lambda: form)
    num_bytes = sum(tensor.nbytes for tensor in sample) * (batch_size or first.batch_size or 1) * len(clients)
    ahead = max(_AHEAD_BYTES // max(num_bytes, 1), 1)
    one_source = first.source is not None and all(client.source is first.source for client in clients)
    if one_source:
        yield from _of_one_source(first.fetch, rows, counts, ahead, forms)
        return
    feeds = [_ahead(client.fetch, own, ahead) for client, own in zip(clients, rows, strict=True)]
    for going in _going(counts):
        found = [next(feed) for feed in feeds[:going]]
        sizes = [size for size, _ in found]
        yield Batch(sizes, [leaves for _, leaves in found], forms, sizes)


def _going(counts: Sequence[int]) -> Iterator[int]:
    """Yield for each step how many clients still train; ``counts`` are descending."""
    for index in range(counts[0]):
        yield sum(count > index for count in counts)


def _of_one_source(
    fetch: Callable[[Tensor], Sequence[Tensor]],
    rows: Sequence[Rows],
    counts: Sequence[int],
    ahead: int,
    forms: dict[Any, TreeSpec],
) -> Iterator[Batch]:
    """Yield batches of clients with one data source, gathering several steps of all clients at a time."""
    steps = _going(counts)
    while some := list(islice(steps, ahead)):
        wanted = [[next(own) for own in rows[:going]] for going in some]
        sizes = [[one.shape[0] for one in step] for step in wanted]
        gathered = fetch(torch.cat([one for step in wanted for one in step]))
        of_steps = zip(*(tensor.split_with_sizes([sum(step) for step in sizes]) for tensor in gathered), strict=True)
        for own, tensors in zip(sizes, of_steps, strict=True):
            if min(own) == max(own):
                yield Stack(own[0], len(own), tensors, forms)
            else:
                yield Batch(own, list(zip(*(one.split_with_sizes(own) for one in tensors), strict=True)), forms, own)


def _ahead(
    fetch: Callable[[Tensor], Sequence[Tensor]], rows: Rows, ahead: int
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield batches of one client, gathering several at a time."""
    while some := list(islice(rows, ahead)):
        sizes = [one.shape[0] for one in some]
        leaves = zip(*(tensor.split_with_sizes(sizes) for tensor in fetch(torch.cat(some))), strict=True)
        yield from zip(sizes, leaves, strict=True)


def _one_by_one(clients: Sequence[ClientData], rows: Sequence[Rows], counts: Sequence[int]) -> Iterator[Batch]:
    """Yield batches of any structure, fetching one at a time."""
    forms: dict[Any, TreeSpec] = {}
    for going in _going(counts):
        kinds, every, sizes = [], [], []
        for client, own in zip(clients[:going], rows, strict=False):
            numbers = next(own)
            leaves, form = tree_flatten(client.fetch(numbers))
            strange = [one for one in leaves if not isinstance(one, Tensor) and batch_tensors(one)]
            if strange:
                raise Unstackable(
                    f"a batch has tensors inside a {type(strange[0]).__name__}: return tuples, lists or dicts of tensors to "
                    "train clients as one batch"
                )
            alike = tuple((one.shape, one.dtype) if isinstance(one, Tensor) else repr(one) for one in leaves)
            kind = len(numbers), form, alike
            forms[kind] = form
            kinds.append(kind)
            every.append(leaves)
            sizes.append(len(numbers))
        yield Batch(kinds, every, forms, sizes)
