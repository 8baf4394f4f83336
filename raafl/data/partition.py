"""Partitions: which client owns which training samples.

A partition is a frozen description; `split` turns it into one sorted index tensor per client. The parts are disjoint
and together hold every sample. Randomness is numpy's PCG64 from the seed alone, so that every rank of a run and every
platform computes the same parts (for one version of numpy) and no indices need to travel.
"""

from __future__ import annotations

import heapq
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from raafl.data.labels import class_numbers
from raafl.errors import USER_ERRORS, BadInput, at_least, briefly, cause
from raafl.units import quantity

_log = logging.getLogger(__name__)
_MAX_TRIES = 100
_EVEN_ALPHA = 1e300
"""Concentration from which all shares are equal to the last bits; draws of a larger one would overflow."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Partition(ABC):
    """Base class of rules that divide the training set among clients.

    Args:
        test_share: share of each client's samples that is not used for training, but to evaluate the client's own submodel;
            at least 0 and below 1; 0 = none (0.2 in the Co-S2P paper, section VI-A).
        validation_share: share of the training set that no client gets, at least 0 and below 1; 0 = none. The global
            model is evaluated on it instead of the test set, so that nobody tunes hyperparameters on the test set.
    """

    # no slots: dataclass would create each subclass twice, and a config could name it only by its full path

    test_share: float = field(default=0.0, kw_only=True)
    validation_share: float = field(default=0.0, kw_only=True)

    needs_labels: ClassVar[bool] = True
    """Whether `split` looks at the labels' values; if not, their number is enough."""

    def held_out(self, part: torch.Tensor, client: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide a client's samples at random into a training part and a test part, both ascending.

        The test part has the share `test_share`, rounded to whole samples, but at least one sample is left for
        training. The draw depends only on the seed, the client and the number of samples.

        Args:
            part: indices of the client's samples.
            client: id of the client.
            seed: seed of the run.

        Raises:
            BadInput: `test_share` is out of range.
        """
        train, test = _divided(len(part), self.test_share, "test_share", (seed, client))
        return (part[train], part[test]) if len(test) else (part, part[:0])

    def validation_rows(self, num_samples: int, seed: int) -> torch.Tensor:
        """Draw the rows of the training set on which the global model is validated, ascending int64; none if the share is 0.

        Raises:
            BadInput: `validation_share` is out of range, or so small that it is no sample, since the test set would be
                used instead.
        """
        drawn = _divided(num_samples, self.validation_share, "validation_share", (seed, num_samples))[1]
        if self.validation_share and not len(drawn):
            raise BadInput(
                f"partition.validation_share is {self.validation_share}, which is no sample of {num_samples}: give "
                + (
                    f"{math.ceil(1e4 / num_samples) / 1e4:g} or more"
                    if num_samples > 1
                    else "0, as it takes two samples"
                )
            )
        return drawn

    def split(
        self,
        labels: torch.Tensor | npt.ArrayLike,
        num_clients: int,
        seed: int,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[torch.Tensor]:
        """Divide the samples among the clients by `assign`, and check the result.

        Args:
            labels: class of each sample, whole numbers of shape `(num_samples,)`.
            num_clients: number of clients, each of which gets a part.
            seed: seed of all random choices, at least 0.
            columns: further values of each sample, by name, for partitions that use them.

        Returns:
            Indices of each client's samples, ascending, as int64 tensors; none is empty.

        Raises:
            BadInput: there are more clients than samples, or these labels do not allow this partition.
        """
        rows, sizes = self.rows_of_all(labels, num_clients, seed, columns)
        return list(torch.split(torch.from_numpy(rows), sizes))

    def rows_of_all(
        self,
        labels: torch.Tensor | npt.ArrayLike,
        num_clients: int,
        seed: int,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> tuple[Ints, list[int]]:
        """Do as `split`, for very many clients: return the rows of all, client by client, and each one's number of rows.

        A tensor for each client would take half a kilobyte.
        """
        labels_n = class_numbers(labels)
        at_least("num_clients", num_clients, 1)
        at_least("seed", seed, 0)
        _check_enough(len(labels_n), num_clients, max(1, getattr(self, "min_samples", 1)))
        rng = np.random.Generator(np.random.PCG64(seed))
        try:
            parts = self.assign(labels_n, num_clients, rng, {} if columns is None else columns)
        except BadInput:
            raise
        except USER_ERRORS as error:
            raise BadInput(f"{type(self).__name__}.assign fails: {cause(error)}") from error
        checked = _checked(type(self).__name__, parts, len(labels_n), num_clients)
        sizes, rows = [len(part) for part in checked], np.concatenate(checked)
        if num_shared := int(np.count_nonzero(np.bincount(rows) > 1)):
            name, some = type(self).__name__, quantity(num_shared, "sample")
            _log.warning("%s.assign gave out %s more than once: each counts as often", name, some)
        return rows[np.lexsort((rows, np.repeat(np.arange(num_clients), sizes)))], sizes

    @abstractmethod
    def assign(
        self, labels: Ints, num_clients: int, rng: np.random.Generator, columns: Mapping[str, Sequence[Any]]
    ) -> Sequence[npt.ArrayLike]:
        """Assign samples to clients. Override this method for a partition of your own; `split` checks the result.

        Args:
            labels: class of each sample, int64 of shape `(num_samples,)`; all 0 if `needs_labels` is False.
            num_clients: number of clients, each of which gets a part.
            rng: random generator for all random choices, so that the run's seed determines the partition.
            columns: further values of each sample, by name.

        Returns:
            Indices of each client's samples, in any order; a sample may belong to no client, or be given out more than
            once, which is warned of.
        """


@dataclass(frozen=True)
class Iid(Partition):
    """Random division into parts whose sizes differ by at most one sample, so that all clients have the same distribution."""

    needs_labels: ClassVar[bool] = False

    def assign(
        self, labels: Ints, num_clients: int, rng: np.random.Generator, columns: Mapping[str, Sequence[Any]]
    ) -> list[Ints]:
        """Distribute all samples at random; see `Partition.assign`."""
        return np.array_split(rng.permutation(len(labels)), num_clients)


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Partition with unequal labels: each class is divided in random proportions, drawn from a Dirichlet distribution.

    With a small `alpha` a client has few classes, and the numbers of samples differ widely; a large `alpha` approaches
    `Iid`. Hsu, Qi and Brown 2019 (arXiv:1909.06335) introduced the Dirichlet distribution for this purpose; drawing one
    vector of proportions per class follows Li et al. 2022 (arXiv:2102.02079, section 4.1).

    Drawing is repeated, at most 100 times, until every client has `min_samples`. All draws may fail if alpha is small
    and there are few clients and classes. Then the last draw is repaired, with a warning: random samples move from the
    largest client to those with too few.

    Args:
        alpha: concentration of the distribution, above 0 (alpha or beta in the papers).
        min_samples: smallest number of samples of a client.
        capped: whether a client that already has its equal share of all samples gets no further class, as in the code
            of Li et al.; labels stay unequal, but sizes differ less.
    """

    alpha: float
    min_samples: int = 1
    capped: bool = False

    def __post_init__(self) -> None:
        _check_alpha("Dirichlet", self.alpha)
        at_least("Dirichlet: min_samples", self.min_samples, 1)

    def assign(
        self, labels: Ints, num_clients: int, rng: np.random.Generator, columns: Mapping[str, Sequence[Any]]
    ) -> list[Ints]:
        """Divide each class in random proportions; see `Partition.assign`."""
        classes = [np.flatnonzero(labels == value) for value in np.unique(labels)]
        for _ in range(_MAX_TRIES):
            cuts_cn: list[Ints] = []
            sizes = np.zeros(num_clients, np.int64)
            for members in classes:
                has_room = sizes < len(labels) / num_clients if self.capped else None
                cuts_cn.append(self._cuts(len(members), num_clients, rng, has_room))
                sizes += np.diff(cuts_cn[-1], prepend=0, append=len(members))
            if np.min(sizes) >= self.min_samples:
                break
        pieces = [np.split(rng.permutation(c), cuts) for c, cuts in zip(classes, cuts_cn, strict=True)]
        parts = [np.concatenate(mine) for mine in zip(*pieces, strict=True)]
        num_moved = _rebalance(parts, self.min_samples, rng)
        if num_moved:
            _log.warning(
                "Dirichlet(alpha=%g): none of %d draws gave each of %d clients at least %d sample(s): moved %d samples",
                *(self.alpha, _MAX_TRIES, num_clients, self.min_samples, num_moved),
            )
        return parts

    def _cuts(
        self, num_members: int, num_clients: int, rng: np.random.Generator, has_room: npt.NDArray[np.bool_] | None
    ) -> Ints:
        """Draw positions `(num_clients - 1,)` that split a class's samples; ``has_room`` None = no client is full."""
        shares = _proportions(self.alpha, num_clients, rng)
        if has_room is not None:
            # with a tiny alpha all who have room may have drawn 0: then they are alike
            shares = np.where(has_room, shares if shares[has_room].sum() > 0 else 1.0, 0.0)
            shares /= np.sum(shares[has_room])
        return np.floor(np.cumsum(shares)[:-1] * num_members).astype(np.int64)


@dataclass(frozen=True)
class ClassesPerClient(Partition):
    """Partition with unequal labels: every client has samples of exactly `num_classes` classes.

    This is the setting "#C = k" of Li et al. 2022 (arXiv:2102.02079). Each client takes the classes that the fewest
    clients have so far; ties are broken at random. Then each class is divided evenly among its clients.

    Args:
        num_classes: number k of classes of each client.
        even: whether clients take their classes in this way; False = they take one class in turn and draw the others, as
            in the code of Li et al., so that some classes have many clients.
    """

    num_classes: int
    even: bool = True

    def __post_init__(self) -> None:
        at_least("ClassesPerClient: num_classes", self.num_classes, 1)

    def assign(
        self, labels: Ints, num_clients: int, rng: np.random.Generator, columns: Mapping[str, Sequence[Any]]
    ) -> list[Ints]:
        """Distribute each class among its clients; see `Partition.assign`."""
        values = np.unique(labels)
        owners = self._owners(len(values), num_clients, rng)
        pieces: list[list[Ints]] = [[] for _ in range(num_clients)]
        for value, clients in zip(values, owners, strict=True):
            members = np.flatnonzero(labels == value)
            if len(members) < len(clients):
                raise BadInput(
                    f"ClassesPerClient: class {value} has {len(members)} samples for its {len(clients)} clients: "
                    "use fewer clients or a smaller num_classes"
                )
            for client, piece in zip(clients, np.array_split(rng.permutation(members), len(clients)), strict=True):
                pieces[client].append(piece)
        return [np.concatenate(mine) for mine in pieces]

    def _owners(self, num_values: int, num_clients: int, rng: np.random.Generator) -> list[list[int]]:
        """Draw which clients get samples of each class; return the clients by class."""
        if self.num_classes > num_values:
            raise BadInput(f"ClassesPerClient: num_classes is {self.num_classes}: give {num_values} or fewer")
        if num_clients * (self.num_classes if self.even else 1) < num_values:
            change = f"num_classes to {math.ceil(num_values / num_clients)} or more" if self.even else "even to true"
            raise BadInput(
                f"ClassesPerClient: {num_clients} clients with {self.num_classes} classes each leave some of the "
                f"{num_values} classes without a client: set {change}, or use more clients"
            )
        owners: list[list[int]] = [[] for _ in range(num_values)]
        for client in range(num_clients):
            for value in self._evenly(owners, rng) if self.even else self._drawn(client, num_values, rng):
                owners[value].append(client)
        return owners

    def _evenly(self, owners: list[list[int]], rng: np.random.Generator) -> list[int]:
        ties = rng.permutation(len(owners))
        return sorted(range(len(owners)), key=lambda value: (len(owners[value]), ties[value]))[: self.num_classes]

    def _drawn(self, client: int, num_values: int, rng: np.random.Generator) -> list[int]:
        mine = [client % num_values]
        while len(mine) < self.num_classes:
            drawn = int(rng.choice(num_values, 1)[0])
            if drawn not in mine:
                mine.append(drawn)
        return mine


@dataclass(frozen=True)
class QuantitySkew(Partition):
    """Partition with unequal sizes: all clients have the same distribution, but random numbers of samples.

    Sizes follow proportions drawn from a symmetric Dirichlet distribution ("quantity skew" of Li et al. 2022,
    arXiv:2102.02079, section 4.3). Each client first gets `min_samples`; the remaining samples are divided in these
    proportions.

    Args:
        alpha: concentration of the distribution, above 0; a large one gives nearly equal sizes.
        min_samples: smallest number of samples of a client.
    """

    alpha: float
    min_samples: int = 1

    needs_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_alpha("QuantitySkew", self.alpha)
        at_least("QuantitySkew: min_samples", self.min_samples, 1)

    def assign(
        self, labels: Ints, num_clients: int, rng: np.random.Generator, columns: Mapping[str, Sequence[Any]]
    ) -> list[Ints]:
        """Divide the samples at random, in proportions drawn from the Dirichlet distribution; see `Partition.assign`."""
        num_free = len(labels) - num_clients * self.min_samples
        free_cuts = np.floor(np.cumsum(_proportions(self.alpha, num_clients, rng))[:-1] * num_free).astype(np.int64)
        cuts = free_cuts + self.min_samples * np.arange(1, num_clients)
        return np.split(rng.permutation(len(labels)), cuts)


@dataclass(frozen=True)
class ByColumn(Partition):
    """Partition by real-world owners: samples with the same value in a column (a writer, a speaker, a hospital) stay together.

    With as many values as clients, client i gets the i-th value in sorted order. With more values, these are divided
    among the clients at random, and the clients' numbers of values differ by at most one.

    Args:
        column: name of the column with the owners.
    """

    column: str

    needs_labels: ClassVar[bool] = False

    def assign(
        self, labels: Ints, num_clients: int, rng: np.random.Generator, columns: Mapping[str, Sequence[Any]]
    ) -> list[Ints]:
        """Give all samples that share a value of the column to one client; see `Partition.assign`."""
        if self.column not in columns:
            known = f"columns {', '.join(sorted(columns))}: name one, or" if columns else "no columns:"
            raise BadInput(
                f"ByColumn: column is {self.column!r}, but the training data has {known} give it an attribute "
                f"{self.column!r} with a value for each sample, or use Iid"
            )
        try:
            owners = _one_dimensional(columns[self.column])
            values, group = np.unique(owners, return_inverse=True)
        except (TypeError, ValueError):
            raise BadInput(
                f"ByColumn: column {self.column!r} has entries that cannot be sorted, such as "
                f"{_unsorted(columns[self.column])}: give each sample a text or a number"
            ) from None
        if len(group) != len(labels):
            raise BadInput(
                f"ByColumn: {self.column!r} has {len(group)} entries for {len(labels)} samples: give as many"
            )
        if len(missing := _without_owner(columns[self.column], owners)):
            raise BadInput(
                f"ByColumn: column {self.column!r} has no value for {len(missing)} samples, such as sample {missing[0]} (NaN): "
                "give each sample a text or a number, or leave those without out of the data"
            )
        if len(values) < num_clients:
            raise BadInput(
                f"ByColumn: column {self.column!r} has {len(values)} different values for {num_clients} clients: "
                f"set the number of clients to {len(values)} or fewer"
            )
        members = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])
        if len(values) == num_clients:
            return members
        hands = np.array_split(rng.permutation(len(values)), num_clients)
        return [np.concatenate([members[value] for value in hand]) for hand in hands]


def _one_dimensional(column: Sequence[Any]) -> npt.NDArray[Any]:
    """Return a column as an array with one entry for each sample.

    Raises:
        ValueError: its entries are lists, or texts among numbers, of which numpy would make texts: 3 and "3" one owner.
    """
    found = np.asarray(column)
    if found.ndim != 1:
        raise ValueError
    if found.dtype.kind in "SU" and not all(isinstance(one, str | bytes) or one != one for one in column):
        raise ValueError
    return found


def _without_owner(column: Sequence[Any], owners: npt.NDArray[Any]) -> Ints:
    """Return the samples whose entry is NaN or NaT, which equals nothing, not even itself."""
    if owners.dtype.kind in "SU":  # of a list with texts NaN has become a text, too
        return np.flatnonzero([bool(one != one) for one in column])
    return np.flatnonzero(owners != owners)


def _unsorted(column: Sequence[Any]) -> str:
    """Name the type of the first entry of a column that is neither text nor a number; its value may be private."""
    found = ((row, one) for row, one in enumerate(column) if not isinstance(one, str | int | float | np.generic))
    return next((f"the {type(one).__name__} of sample {row}" for row, one in found), "texts among numbers")


def _checked(name: str, parts: Sequence[npt.ArrayLike], num_samples: int, num_clients: int) -> list[Ints]:
    """Check that a partition has one part for each client, with valid sample indices; return the parts as arrays."""
    if (given := f"{len(parts)} parts" if isinstance(parts, Sized) else briefly(parts)) != f"{num_clients} parts":
        raise BadInput(f"{name}.assign returned {given} for {num_clients} clients: return one for each")
    checked = []
    for client, part in enumerate(parts, start=1):
        rows = np.asarray(part)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or len(rows) == 0:
            raise BadInput(
                f"{name}.assign returned {len(rows) if rows.ndim else 'no'} samples of type {rows.dtype} for client "
                f"{client}: return the indices of one or more samples"
            )
        if rows.min() < 0 or rows.max() >= num_samples:
            raise BadInput(
                f"{name}.assign returned samples {rows.min()} to {rows.max()} for client {client}: return indices "
                f"from 0 to {num_samples - 1}"
            )
        checked.append(rows.astype(np.int64, copy=False))
    return checked


def _divided(num: int, share: float, name: str, seed: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Split `range(num)` at random; return the rest, which is never empty, and the drawn ``share``, both ascending."""
    if not 0 <= share < 1:
        raise BadInput(f"partition.{name} is {share}: give at least 0 and less than 1, such as 0.2")
    num_drawn = min(math.floor(share * num + 0.5), num - 1)
    if num_drawn <= 0:
        return torch.arange(num), torch.arange(0)
    order = torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).permutation(num))
    return order[num_drawn:].sort().values, order[:num_drawn].sort().values


def _proportions(alpha: float, num_clients: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    shares = rng.dirichlet(np.full(num_clients, min(alpha, _EVEN_ALPHA)))
    # with a tiny alpha all shares underflow to 0; in the limit one client has everything
    is_sound = np.isfinite(shares).all() and shares.sum() > 0.5
    return shares if is_sound else np.eye(num_clients)[rng.integers(num_clients)]


def _rebalance(parts: list[Ints], min_samples: int, rng: np.random.Generator) -> int:
    """Move samples from the largest parts to those below `min_samples`; return the number moved."""
    donors = [(-len(part), client) for client, part in enumerate(parts) if len(part) > min_samples]
    heapq.heapify(donors)
    pools = {client: rng.permutation(parts[client]).tolist() for _, client in sorted(donors)}
    num_moved = 0
    for client, part in enumerate(parts):
        num_missing = max(0, min_samples - len(part))
        gained = []
        for _ in range(num_missing):
            size, donor = donors[0]
            gained.append(pools[donor].pop())
            heapq.heapreplace(donors, (size + 1, donor))
        parts[client] = np.concatenate([part, np.array(gained, dtype=np.int64)])
        num_moved += num_missing
    if num_moved:
        for client, pool in pools.items():
            parts[client] = np.array(pool, dtype=np.int64)
    return num_moved


def _check_enough(num_samples: int, num_clients: int, min_samples: int) -> None:
    if num_samples < num_clients * min_samples:
        raise BadInput(
            f"more clients than data: {num_clients} clients need {min_samples} sample(s) each, and there are {num_samples}: "
            f"use at most {num_samples // min_samples} clients"
        )


def _check_alpha(name: str, alpha: float) -> None:
    if not 0 < alpha < math.inf:
        raise BadInput(f"{name}: alpha is {alpha}: give a finite number above 0, such as 0.5 (use Iid for no skew)")
