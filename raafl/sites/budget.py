"""Store how many bytes and how much of its privacy budget a site has used, in a folder that later processes read.

`books.json` is replaced as a whole under a lock, so that several clients of one site share one budget, and a crash leaves the old
or the new one. Whoever deletes it resets the budget: that is the site's own decision.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import date, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raafl.errors import BadInput
from raafl.local.train import LocalTrainer
from raafl.parts.merge.mean import CHUNK
from raafl.parts.protect.privacy import epsilon, gaussian
from raafl.sites.policy import SitePrivacy
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.flat import is_merged, reals

FILE, LEDGER = "books.json", "ledger.jsonl"
_LOCK = "lock"


@dataclass(slots=True)
class Used:
    """Number of bytes that a site has sent and received, and the part of its privacy budget that it has used."""

    day: str = ""  # day, in local time, to which ``bytes`` belongs; empty = none yet
    bytes: int = 0  # number of bytes sent and received on that day
    releases: int = 0  # number of updates that were sent after clipping or noise
    # sum over these updates of 1 / sigma^2, sigma being the noise level; infinite if one had no noise
    inverse_squares: float = 0.0

    def bytes_on(self, day: date) -> int:
        """Return the number of bytes sent and received on ``day``; 0 if the stored number is of another day."""
        return self.bytes if self.day == day.isoformat() else 0


class BudgetSpent(Exception):
    """Raised if sending another update would exceed the privacy budget; the message says by how much."""


def _after_update(used: Used, privacy: SitePrivacy) -> float:
    """Return the new value of `Used.inverse_squares` after one more update."""
    return used.inverse_squares + (privacy.noise_multiplier**-2 if privacy.noise_multiplier else math.inf)


class SiteBooks:
    """Stored account of the bytes and the privacy budget that one site has used.

    Each call reads the files anew, since another client of the site may have changed them.
    """

    def __init__(self, folder: str) -> None:
        """Open the books in ``folder``; create it, readable only by its owner, if it is missing.

        Raises BadInput if the folder cannot be written or its books cannot be read.
        """
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._changing(lasting=True):
                pass
        except OSError as error:
            raise BadInput(
                f"policy.state is '{folder}', in which no file can be written ({error.strerror}): name another folder"
            ) from None

    def used(self) -> Used:
        """Read the bytes and the privacy budget that the site has used; raise `BadInput` if the file cannot be read."""
        file = self._folder / FILE
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            used = Used(**found)
            if not all(type(getattr(used, one.name)) is type(one.default) for one in fields(Used)):
                raise ValueError("a value has a wrong type")
            return used
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(
                f"policy.state is '{self._folder}', whose {FILE} cannot be read ({error}): restore it from a copy; "
                "without it the used budget is unknown"
            ) from None

    def add_bytes(self, num: int, day: date) -> None:
        """Add ``num`` to the number of bytes sent and received on ``day``; the number of an earlier day is discarded."""
        with self._changing() as used:
            used.bytes = used.bytes_on(day) + num
            used.day = day.isoformat()

    def release(self, privacy: SitePrivacy, about: Mapping[str, Any]) -> float | None:
        """Charge an update to the privacy budget before it is sent; return the epsilon used so far, None = infinite.

        Raises:
            BudgetSpent: the update would exceed ``max_epsilon``; nothing was charged.
        """
        with self._changing(lasting=True) as used:
            used.inverse_squares, used.releases = _after_update(used, privacy), used.releases + 1
            epsilon = spent(used.inverse_squares, privacy.delta)
            if privacy.max_epsilon is not None and (epsilon is None or epsilon > privacy.max_epsilon):
                raise BudgetSpent(
                    f"another update would raise epsilon to {math.inf if epsilon is None else epsilon:.3g}, but "
                    f"policy.privacy.max_epsilon is {privacy.max_epsilon:g}"
                )
            row = {
                "time": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
                **about,
                "clip_norm": privacy.clip_norm,
                "noise_multiplier": privacy.noise_multiplier,
                "delta": privacy.delta,
                "epsilon": epsilon,
            }
            with (self._folder / LEDGER).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return epsilon

    def check_budget(self, privacy: SitePrivacy) -> None:
        """Raise `BudgetSpent` if one more update would exceed the site's privacy budget."""
        epsilon = spent(_after_update(self.used(), privacy), privacy.delta)
        if privacy.max_epsilon is not None and (epsilon is None or epsilon > privacy.max_epsilon):
            raise BudgetSpent(f"the privacy budget is used up: policy.privacy.max_epsilon is {privacy.max_epsilon:g}")

    @contextmanager
    def _changing(self, *, lasting: bool = False) -> Iterator[Used]:
        """Lock and read the books, let the block change them, then write them."""
        with (self._folder / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            used = self.used()
            yield used
            new = self._folder / f"{FILE}.new"
            with new.open("w", encoding="utf-8") as file:
                json.dump(asdict(used), file)
                if lasting:
                    file.flush()
                    os.fsync(file.fileno())
            new.replace(self._folder / FILE)


NEIGHBOURS = "this site's data replaced by any other data"
"""Adjacency of the site's epsilon, in words."""


def spent(inverse_squares: float, delta: float) -> float | None:
    """Return the epsilon (privacy budget) that the updates sent by this site have used.

    Returns:
        The epsilon; None = infinite.
    """
    if inverse_squares == 0:
        return 0.0
    return None if math.isinf(inverse_squares) else epsilon(0.5 / math.sqrt(inverse_squares), 1, delta)


def problem(trainer: LocalTrainer) -> str | None:
    """Return the reason why noise cannot make this trainer's updates private, such as activations that it sends.

    None if noise on the update's tensors is enough.
    """
    local, submodels = trainer.local, trainer.submodels
    if local.exchange(submodels) is not None:
        return "its method sends activations during a task"
    if local.traits.up_as is not None:
        return f"its method sends {local.traits.up_as} in the place of values"
    if trainer.payload.is_resident:
        return "its method goes on from what the last task has left on the client, which noise would spoil"
    if local.masked:
        return "its method sends which classes the client has"
    entries = submodels.layout(part="trained").entries
    if statistics := [entry.name for entry in entries if entry.name not in submodels.parameter_names]:
        return f"its model sends running statistics ({statistics[0]}), which noise would spoil"
    if numbers := [entry.name for entry in trainer.payload.layout(way="trained").entries if not is_merged(entry.dtype)]:
        return f"its method sends whole numbers ({numbers[0]})"
    return None


def privatise(
    privacy: SitePrivacy, trainer: LocalTrainer, spec: Spec, trained: FlatTensors, received: FlatTensors
) -> None:
    """Clip a trained update and add Gaussian noise, in place: ``d min(1, C / ||d||) + N(0, (sigma C)^2)``.

    d is the difference of all trained tensors from the received values, with one norm over all of them. If the client
    sends parameter values and not differences, the received values are added to the result.

    Raises:
        ValueError: the update contains NaN or infinity.
    """
    before = trainer.payload.split(received, spec, "sent")[0]
    values, bundles = trainer.payload.split(trained, spec, "trained")
    adds_back = trainer.sends == "values"
    pairs = [(reals(buffer), reals(before.buffers[dtype])[: len(buffer)]) for dtype, buffer in values.buffers.items()]
    changes = [reals(buffer) for bundle in bundles.values() for buffer in bundle.buffers.values()]
    if adds_back:
        for buffer, old in pairs:
            buffer.sub_(old.to(buffer.device))
    changes += [buffer for buffer, _ in pairs]
    norm = math.sqrt(math.fsum(square for buffer in changes for square in _squares(buffer)))
    if not math.isfinite(norm):
        raise ValueError("the update contains NaN or infinity")
    key = secrets.token_bytes(32)
    for number, buffer in enumerate(changes):
        if norm > privacy.clip_norm:
            buffer.mul_(privacy.clip_norm / norm)
        if privacy.noise_multiplier > 0:
            flat = buffer.flatten()  # a view, since the storage is contiguous
            noise = gaussian(key + number.to_bytes(4, "little"), len(flat))
            for piece, drawn in zip(torch.split(flat, CHUNK), noise, strict=True):
                piece.add_((drawn * (privacy.noise_multiplier * privacy.clip_norm)).to(piece))
    if adds_back:
        for buffer, old in pairs:
            buffer.add_(old.to(buffer.device))


def _squares(buffer: Tensor) -> Iterator[float]:
    for piece in torch.split(buffer.flatten(), CHUNK):
        yield piece.double().square().sum().item()
