"""Share any LightningDataModule's training set out among clients, and make each client's batches.

`FederatedData` asks the data module for its training set once and partitions it; `ClientData` is one client's part. The
order of a client's batches depends on the generator it is given and on nothing else, so that a task can be repeated anywhere.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, count, islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from raafl.data.epochs import batches_of_epoch
from raafl.data.loaders import (
    Collate,
    Fetch,
    InOrder,
    Loader,
    check_transfer,
    fetcher,
    overrides,
    read_loader,
    reading,
    select_from,
)
from raafl.errors import BadInput, at_least
from raafl.rng import owned_generators, reseed, undisturbed
from raafl.rules import Rules

if TYPE_CHECKING:
    from lightning import LightningDataModule

    from raafl.data.partition import Partition


Sized = tuple[Any, int]
"""A batch and the number of samples in it, which its tensors need not show."""

_TOKENS_OF = 64
"""Number of training samples of which the tokens are counted."""
_MOST_MEASURED = 2000
"""Number of training samples on which the global model is measured if there are neither test nor validation samples."""
_MOST_KEPT = 10_000
"""Largest number of clients whose data stay in memory; the data of others are loaded again when they work."""
_MOST_COPIED_BYTES = 1e9
"""Largest size of samples that are copied into memory of their own."""


class ClientData:
    """The training samples of one client, and its test samples if it has any.

    Tensors and `GatherDataset`s are gathered fast if the loader uses the default collate function: one `index_select`
    per tensor makes a batch. All other data is read sample by sample, through the data set with its transforms and the
    loader's collate function, in this process.

    `weights`: `(num_samples,)`, weights for drawing the samples of an epoch with replacement; None = each sample
    once.
    `test`: samples on which the client only evaluates its submodel; None = it has none.
    `gathers`: whether samples are gathered fast, so that a batch is a list of tensors.
    `owned`: random generators that the data set owns, which each pass over the samples seeds anew.
    `source`: data set from which `fetch` gathers rows; None = samples are not gathered fast.

    Raises:
        BadInput: `indices` is empty.
    """

    def __init__(
        self,
        dataset: Any,
        indices: torch.Tensor,
        batch_size: int | None = None,
        collate: Collate = default_collate,
        copied: bool = False,
        drop_last: bool = False,
        weights: torch.Tensor | None = None,
        shuffles: bool = True,
        owned: Sequence[Any] = (),
    ) -> None:
        """Store the indices of the client's samples; if ``copied`` and the samples are small, copy them as tensors, too."""
        self.owned = owned
        self.test: ClientData | None = None
        if len(indices) == 0:
            raise BadInput("a client has no samples: use fewer clients, or a partition that gives each at least one")
        self.num_samples = len(indices)
        self.batch_size, self.drop_last, self._weights, self._shuffles = batch_size, drop_last, weights, shuffles
        self._fetch, self.gathers = fetcher(dataset, collate)
        self.source = dataset if self.gathers else None
        self._indices: torch.Tensor | None = indices
        self._classes: frozenset[int] | None = None
        self._looked = False
        if self.gathers and copied and _num_bytes(self._fetch, len(indices)) <= _MOST_COPIED_BYTES:
            self.source = TensorDataset(*self._fetch(indices))
            self._fetch, self._indices = select_from(self.source.tensors), None

    def num_batches(self, batch_size: int | None = None) -> int:
        """Return the number of batches in one epoch of this client."""
        return batches_of_epoch(self.num_samples, self._size(batch_size), self.drop_last)

    def sizes(self, batch_size: int | None = None) -> list[int]:
        """Return the number of samples in each batch of one epoch of this client."""
        size = self._size(batch_size)
        starts = range(0, self.num_samples, size)[: self.num_batches(batch_size)]
        return [min(size, self.num_samples - start) for start in starts]

    def classes(self) -> frozenset[int] | None:
        """Return the classes that occur in this client's samples, read at the first call; None if labels are not whole numbers."""
        if not self._looked:
            from raafl.data.labels import classes_in

            rows = torch.arange(self.num_samples) if self._indices is None else self._indices
            batches = (self._fetch(part) for part in torch.split(rows, 256))
            self._classes, self._looked = classes_in(batches), True
        return self._classes

    def batches(
        self,
        generator: torch.Generator,
        batch_size: int | None = None,
        num_epochs: int | None = None,
        num_steps: int | None = None,
    ) -> Iterator[Sized]:
        """Yield each batch with its number of samples, for some epochs or steps; each epoch has a new random order.

        The last batch of an epoch may be smaller than the others. If `batch_size` exceeds the number of samples, an
        epoch has a single batch. At the start of each epoch, one `torch.randperm` (with weights, one `torch.multinomial`) is drawn
        from the generator; nothing is drawn where the loader does not shuffle. Global generators are not used, but to
        seed those that the data set owns.

        `batch_size`: number of samples in a batch; None = that of the data module.

        Raises:
            BadInput: a number is below 1, or not exactly one of `num_epochs` and `num_steps` is given.
        """
        return self._fetched(self.rows(generator, batch_size, num_epochs, num_steps))

    def rows(
        self,
        generator: torch.Generator,
        batch_size: int | None = None,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        send: Callable[[torch.Tensor], torch.Tensor] = lambda order: order,
    ) -> Iterator[torch.Tensor]:
        """Yield the indices of each batch's samples, in place of the batches; raise the same errors as `batches`.

        `batch_size`: number of samples in a batch; None = that of the data module.
        `num_epochs`: number of passes over the samples; None = use ``num_steps``.
        `num_steps`: number of batches; None = use ``num_epochs``.
        `send`: function that copies the order of an epoch to where batches are made.
        """
        if (num_epochs is None) == (num_steps is None):
            raise BadInput(f"num_epochs is {num_epochs} and num_steps is {num_steps}: give exactly one of them")
        for name, number in (("num_epochs", num_epochs), ("num_steps", num_steps)):
            at_least(name, number, 1, optional=True)
        epochs = count() if num_epochs is None else range(num_epochs)
        rows = self._epochs(generator, self._size(batch_size), epochs, send)
        return rows if num_steps is None else islice(rows, num_steps)

    def fetch(self, rows: torch.Tensor) -> Any:
        """Return the samples with the given indices, which the method `rows` yields, as one batch."""
        return self._fetch(rows)

    def in_order(self, batch_size: int | None = None) -> Iterator[Sized]:
        """Yield all samples once, in the order of the data set, in batches of nearly equal size.

        Each batch comes with its number of samples.
        """
        rows = torch.arange(self.num_samples) if self._indices is None else self._indices
        num_batches = math.ceil(self.num_samples / self._size(batch_size))
        return self._fetched(torch.tensor_split(rows, num_batches))

    def _fetched(self, batches: Iterable[torch.Tensor]) -> Iterator[Sized]:
        reseed(self.owned)
        for rows in batches:
            yield self._fetch(rows), rows.shape[0]

    def _epochs(
        self,
        generator: torch.Generator,
        batch_size: int,
        epochs: Iterable[int],
        send: Callable[[torch.Tensor], torch.Tensor],
    ) -> Iterator[torch.Tensor]:
        for _ in epochs:
            yield from torch.split(send(self.epoch(generator)), batch_size)[: self.num_batches(batch_size)]

    def epoch(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the order of one epoch; return the indices of all samples in it, of which `rows` makes batches."""
        order = self._order(generator)
        return order if self._indices is None else self._indices.index_select(0, order)

    def _order(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the order in which one epoch reads the samples; with sampler weights, draw the samples with replacement."""
        if self._weights is None and not self._shuffles:
            return torch.arange(self.num_samples)
        if self._weights is None:
            return torch.randperm(self.num_samples, generator=generator)
        return torch.multinomial(self._weights, self.num_samples, replacement=True, generator=generator)

    def _size(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise BadInput("batch_size is missing, and the training loader has none: give a number")
        at_least("batch_size", size, 1)
        return size


class _Parts:
    """Row indices of all clients, one client after the other in one tensor; a tensor for each would cost 500 bytes more."""

    def __init__(self, rows: torch.Tensor, sizes: list[int]) -> None:
        self.sizes, self._rows, self._ends = sizes, rows, list(accumulate(sizes))

    @classmethod
    def of_all(cls, parts: Sequence[torch.Tensor]) -> Self:
        return cls(torch.cat(list(parts)), [len(part) for part in parts])

    def of(self, client: int) -> torch.Tensor:
        """Return the rows of the training set that belong to a client, 1 to N."""
        end = self._ends[client - 1]
        return self._rows[end - self.sizes[client - 1] : end]


class FederatedData:
    """The training set of a data module, divided among clients 1 to N, and its test set.

    `prepare_data` and `setup("fit")` of the data module are called. Data set, batch size and collate function come from
    its `train_dataloader()`. The loader's `drop_last`, its order if it does not shuffle, and the weights of a
    `WeightedRandomSampler` apply to each client's epochs; a `SubsetRandomSampler` selects the samples. The loader's
    workers are not used.

    `notes`: lines to show at the start, such as on which data the global model is evaluated.
    `measured`: name of the loader whose data measure the global model during the run; "" before `test_batches`.

    Raises:
        BadInput: the training loader is of a kind that is not supported, or the partition is impossible.
    """

    def __init__(
        self,
        datamodule: LightningDataModule,
        partition: Partition,
        num_clients: int,
        seed: int = 0,
        rules: Rules | None = None,
    ) -> None:
        """Set up the data module, and partition its training set among the clients."""
        self.num_clients = num_clients
        self.datamodule, self._rules = datamodule, rules or Rules()
        self.notes: list[str] = []
        with reading(type(datamodule).__name__, self._rules):
            check_transfer(datamodule)
            datamodule.prepare_data()
            datamodule.setup("fit")
            loader = read_loader(datamodule.train_dataloader(), "train_dataloader")
        self._dataset, self._collate, self.batch_size, self.drop_last, self._weights, self._shuffles = loader
        if not (self._shuffles or self._rules.keeps_order):
            self._shuffles = True
        elif not self._shuffles:
            self.notes.append(
                f"{type(datamodule).__name__}.train_dataloader() does not shuffle, so each client trains on its samples in "
                "the order of the data set"
            )
        self._fetch, self._gathers = fetcher(self._dataset, self._collate)
        self._owned = self._owned_by(self._dataset, self._collate)
        self.measured = ""
        self._validation = partition.validation_rows(len(self._dataset), seed)
        # a partition may draw from torch's or Python's generators in place of `rng`
        with undisturbed(seed=seed if self._rules.seeds_setup else None):
            rows, sizes = self._split(partition, num_clients, seed)
        self._parts, self._test_parts = _Parts(rows, sizes), _Parts(rows[:0], [0] * num_clients)
        if partition.test_share:
            parts = enumerate(torch.split(rows, sizes), start=1)
            sides = zip(*(partition.held_out(part, client, seed) for client, part in parts), strict=True)
            self._parts, self._test_parts = map(_Parts.of_all, sides)
        self._check_weights()
        self._clients: OrderedDict[int, ClientData] = OrderedDict()
        self._test: InOrder | None = None
        self._final: InOrder | None = None

    def _split(self, partition: Partition, num_clients: int, seed: int) -> tuple[torch.Tensor, list[int]]:
        """Partition the training rows, without validation rows, among the clients.

        Returns the row indices of all clients, one client after the other, and each client's number of rows.
        """
        from raafl.data.labels import Columns

        rows = np.setdiff1d(np.arange(len(self._dataset)), self._validation.numpy())
        labels = self.labels()[rows] if partition.needs_labels else np.zeros(len(rows), np.int64)
        # a Subset hides columns of the data set, from which labels are read fast, so only wrap if rows are left out
        dataset = Subset(self._dataset, rows.tolist()) if len(self._validation) else self._dataset
        parts, sizes = partition.rows_of_all(labels, num_clients, seed, Columns(dataset))
        return torch.from_numpy(rows[parts]), sizes

    @property
    def sizes(self) -> list[int]:
        """Number of training samples of each client; client i is at position i - 1."""
        return self._parts.sizes

    @property
    def test_sizes(self) -> list[int]:
        """Number of test samples of each client; client i is at position i - 1."""
        return self._test_parts.sizes

    def indices(self, client: int) -> torch.Tensor:
        """Return the rows of the training set on which a client trains, ascending; clients are numbered 1 to N."""
        if not 1 <= client <= self.num_clients:
            raise BadInput(f"client is {client}: clients are numbered 1 to {self.num_clients}")
        return self._parts.of(client)

    def labels(self) -> npt.NDArray[Any]:
        """Return the class of each sample of the training set, in its order."""
        from raafl.data.labels import labels_of, trained_labels

        # the labels used in training are the stored ones, unless a transform in the data set may change them
        if self._gathers or not self._rules.trained_labels:
            return labels_of(self._dataset)
        with reading(type(self.datamodule).__name__):
            return trained_labels(self._dataset, self._fetch)

    def _check_weights(self) -> None:
        """Raise `BadInput` if the weights of the loader's sampler are 0 for all samples of some client."""
        weights = self._weights
        if weights is None:
            return
        for client in range(1, self.num_clients + 1):
            if not weights[self._parts.of(client)].sum() > 0:
                raise BadInput(
                    f"the WeightedRandomSampler of train_dataloader() has weight 0 for all samples of client {client}: give "
                    "weights above 0, or another partition"
                )

    def client(self, client: int) -> ClientData:
        """Return the data of one client; the data of recently used clients are cached."""
        if client not in self._clients:
            self._clients[client] = self.make_client(client)
            if len(self._clients) > _MOST_KEPT:
                self._clients.popitem(last=False)
        self._clients.move_to_end(client)
        return self._clients[client]

    def make_client(self, client: int, *, copied: bool = False) -> ClientData:
        """Build the data of one client."""
        rows = self.indices(client)
        mine = self._own(rows, copied, None if self._weights is None else self._weights[rows])
        if self.test_sizes[client - 1]:
            mine.test = self._own(self._test_parts.of(client), copied)
        return mine

    def _own(self, indices: torch.Tensor, copied: bool, weights: torch.Tensor | None = None) -> ClientData:
        order = self.drop_last, weights, self._shuffles, self._owned
        return ClientData(self._dataset, indices, self.batch_size, self._collate, copied, *order)

    def _owned_by(self, dataset: object, collate: object) -> list[Any]:
        return owned_generators(dataset, collate) if self._rules.reseeds_data else []

    def tokens_per_sample(self) -> float | None:
        """Return the mean number of tokens of evenly spaced training samples of a language model; None for other models."""
        length, num = len(self._dataset), min(_TOKENS_OF, len(self._dataset))
        with undisturbed():
            if tokens_in(self.example_batch()) is None:
                return None
            return (tokens_in(self.fetch(torch.tensor([i * length // num for i in range(num)]))) or 0) / num

    def example_batch(self, n: int = 2) -> Any:
        """Return the first ``n`` samples of the training set as one batch."""
        return self.fetch(torch.arange(min(n, len(self._dataset))))

    def fetch(self, rows: torch.Tensor) -> Any:
        """Return the given rows of the training set as one batch."""
        return self._fetch(rows)

    def test_batches(self, batch_size: int | None = None, *, first: int = 0) -> Iterator[Sized]:
        """Yield batches of the set that is measured during the run, in order.

        It is the validation set, without one the test set, without either a part of the training set. See `final_batches`.

        Each batch comes with its number of samples; the last batch may be smaller.

        `batch_size`: number of samples in a batch; None = that of the loader.

        Raises:
            BadInput: the loader is of a kind that is not supported.
        """
        if self._test is None:
            self._test = self._read_test()
        size = self._test.batch_size if batch_size is None else batch_size
        if size is None or size < 1:
            raise BadInput(f"batch_size is {size}: give at least 1")
        return self._test.batches(size, first)

    def final_batches(self) -> Callable[..., Iterator[Sized]] | None:
        """Return a function that yields the batches of the test set, which is measured once, at the end of the run.

        None = `test_batches` has all that is measured: the data module has no validation set beside its test set, or the
        partition keeps validation rows of the training set.
        """
        self.test_batches()  # for its effect: it loads the training and test set
        final = self._final
        return None if final is None else lambda first=0: final.batches(final.batch_size or 1, first)

    def _read_test(self) -> InOrder:
        name = type(self.datamodule).__name__
        self.measured = f"{name}.train_dataloader()"
        if len(self._validation):
            return self._in_order(self._of_training(self._validation.tolist()))
        test = self._measured("test_dataloader")
        validation = self._measured("val_dataloader") if test is None or self._rules.validates else None
        if test is not None or validation is not None:
            self.measured = f"{name}.{'test' if validation is None else 'val'}_dataloader()"
        if test is None or validation is None or test.dataset is validation.dataset:
            return self._in_order(test or validation or self._some_of_training())
        self.notes.append(
            f"the global model is measured on {name}.val_dataloader() during the run, and on test_dataloader() once, at its "
            "end, as test/..."
        )
        self._final = self._in_order(test)
        return self._in_order(validation)

    def _in_order(self, found: Loader) -> InOrder:
        """Make a reader that gives the batches of an evaluation loader in order; a small data set is stored in memory."""
        fetch, is_fast = fetcher(found.dataset, found.collate)
        num_samples = len(found.dataset)
        is_small = is_fast and _num_bytes(fetch, num_samples) <= _MOST_COPIED_BYTES
        tensors = fetch(torch.arange(num_samples)) if is_small else None
        drop_last = found.drop_last and self._rules.keeps_order
        owned = self._owned_by(found.dataset, found.collate)
        return InOrder(fetch, num_samples, found.batch_size, tensors, drop_last, owned)

    def _of_training(self, rows: list[int]) -> Loader:
        """Make a loader with the settings of the training loader for evaluation on ``rows`` of the training set."""
        return Loader(Subset(self._dataset, rows), self._collate, self.batch_size, False, None, False)

    def _measured(self, name: str) -> Loader | None:
        """Read the user's test or validation loader, whose method is ``name``; None if the data module has none."""
        module = self.datamodule
        if not overrides(module, name):
            return None
        with reading(type(module).__name__, self._rules):
            if name == "test_dataloader":
                module.setup("test")
            loader = getattr(module, name)()
        if loader is None or (isinstance(loader, (list, tuple)) and not loader):
            return None
        read = read_loader(loader, name)
        if read.weights is not None:
            raise BadInput(
                f"the sampler of {name}() is a WeightedRandomSampler, but an evaluation uses each sample once: "
                "leave the sampler out"
            )
        return read

    def _some_of_training(self) -> Loader:
        """Make a loader of evenly spaced training samples, for data modules without test set; add a note about that."""
        length, num = len(self._dataset), min(len(self._dataset), _MOST_MEASURED)
        self.notes.append(
            f"{type(self.datamodule).__name__} has no test or validation set: the global model is measured on "
            f"{num:,} samples of the training set, which says nothing of new data"
        )
        return self._of_training([i * length // num for i in range(num)])


def tokens_in(batch: object) -> int | None:
    """Return the number of tokens in a language model's batch, without padding; None for batches of other models.

    Such a batch has a target for each token: ``(tokens, targets)``, or ``input_ids`` and ``labels`` by name. Without a mask
    the padding of a row is what follows the last of its tokens that has a target.
    """
    mask: object = None
    if isinstance(batch, Mapping):
        tokens, targets, mask = (batch.get(name) for name in ("input_ids", "labels", "attention_mask"))
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        tokens, targets = batch
    else:
        return None
    for part in (tokens, targets):
        if not isinstance(part, torch.Tensor) or part.dim() != 2 or part.is_floating_point():
            return None
    assert isinstance(targets, torch.Tensor)
    counted = mask != 0 if isinstance(mask, torch.Tensor) else (targets != -100).flip(1).cumsum(1) > 0
    return int(counted.sum())


def _num_bytes(fetch: Fetch, num_samples: int) -> int:
    sample = fetch(torch.zeros(1, dtype=torch.int64))
    return int(num_samples * sum(tensor.nbytes for tensor in sample))
