"""Client-level differential privacy: clip each client's update, add Gaussian noise once per merge, account for the loss.

DP-FedAvg (McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018, Algorithm 1) in rounds; the same
at every full buffer or every arrival of asynchronous algorithms. `private` wraps an algorithm's own merge: everything that the
merge does (mixing, staleness, a server optimizer) is post-processing of the noisy mean that is released here.

Accounting: a client's updates compose one after another as Gaussian mechanisms, without amplification by sampling, whose
conditions raafl's sampling does not meet (docs/privacy.md). Neighbouring runs differ in one client's updates, all of them replaced
by zero (zero-out: Kairouz et al. 2021, definition 1.1). The participants of each merge, their times and their submodels are
public.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from raafl.atomic_file import write_private
from raafl.core.algorithm import Algorithm
from raafl.core.options import Privacy
from raafl.core.state import GlobalState, MergeMemory
from raafl.core.types import EPSILON, Update
from raafl.errors import BadInput, installing
from raafl.parts.merge.label_split import joint_notes
from raafl.parts.merge.mean import zeros_like
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.protect.robust import difference, feed, norm_of
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.flat import CHUNK, is_merged

OLDEST_ACCOUNTING: Final = (0, 6)
"""Oldest dp-accounting with `get_epsilon_gaussian`; the extra `privacy` asks for it."""

NEIGHBOURS = "one client's updates replaced by zero"
"""Adjacency of every epsilon here, in words."""

MECHANISM = "Gaussian noise on the sum of clipped updates at each merge; composed, no amplification by sampling"


def private(
    algorithm: Algorithm, privacy: Privacy, num_clients: int, key: bytes, follows_sum: bool = False
) -> Algorithm:
    """Return ``algorithm`` with a differentially private merge; unchanged if privacy is off.

    `key`, `follows_sum`: as returned by `noise_key`.

    Raises:
        BadInput: the package dp-accounting is not installed, delta is too large for so few clients, or the algorithm
            needs each client's own update.
    """
    if privacy.clip_norm is None:
        return algorithm
    if algorithm.merge.by_client:
        raise BadInput(
            f"privacy.clip_norm is {privacy.clip_norm:g}, but {algorithm.name} merges each client's update by itself, "
            "which privacy does not allow: choose another algorithm, such as ra_fed"
        )
    if getattr(algorithm.trigger, "at_work", None) is not None:
        raise BadInput(
            f"privacy.clip_norm is {privacy.clip_norm:g}, which needs merges of a fixed number of updates, but clients_at_work "
            "changes this number: leave clients_at_work out"
        )
    if privacy.noise_multiplier > 0:
        check_accounting("privacy.clip_norm")
    if privacy.delta * num_clients >= 1:
        raise BadInput(f"privacy.delta is {privacy.delta}: give less than 1 / clients, {1 / num_clients:g}")
    merge = Private(
        algorithm.merge,
        privacy.clip_norm,
        privacy.noise_multiplier,
        privacy.delta,
        privacy.divisor or expected_updates(algorithm, num_clients),
        key,
        privacy.max_epsilon,
        follows_sum,
    )
    return replace(algorithm, merge=merge)


def expected_updates(algorithm: Algorithm, num_clients: int) -> float:
    """Return the usual number of updates in a merge: the cohort's size (or all clients), the buffer's size, or 1."""
    trigger: Any = algorithm.trigger
    if trigger.restart == "merge":
        return float(getattr(algorithm.sample, "cohort", None) or num_clients)
    return float(getattr(trigger, "size", 1))


FOLLOWS_SUM = "sum "
"""Begin of a seed file whose noise depends on the sums, too. Files of earlier versions lack it, and give the same noise as ever."""


def noise_key(privacy: Privacy, seed: int) -> tuple[bytes, bool]:
    """Return the 32 bytes from which all noise is generated, and whether the noise depends on each sum, too.

    The bytes are read from `Privacy.seed_file`, or derived from the run's ``seed``. If the file is missing, it is created
    from the operating system's randomness, readable only by its owner.

    Raises:
        BadInput: the file cannot be read or created, or does not contain 64 hexadecimal digits.
    """
    if privacy.seed_file is None:
        return hashlib.blake2b(f"raafl noise/{seed}".encode(), digest_size=32).digest(), False
    path = Path(privacy.seed_file)
    try:
        if not path.exists():
            write_private(path, f"{FOLLOWS_SUM}{secrets.token_hex(32)}\n".encode())
        text = path.read_text(encoding="ascii").strip()
        key = bytes.fromhex(text.removeprefix(FOLLOWS_SUM))
        if len(key) < 32:
            raise ValueError("the file has fewer than 64 hexadecimal digits")
        return key, text.startswith(FOLLOWS_SUM)
    except (OSError, ValueError) as error:
        raise BadInput(f"privacy.seed_file is '{path}': {error}: name a new file, or one that raafl has made") from None


def check_accounting(field: str) -> None:
    """Raise `BadInput` unless a dp-accounting is installed that has the function of which `epsilon` is made."""
    found = importlib.util.find_spec("dp_accounting") is not None
    with suppress(metadata.PackageNotFoundError):  # importable without being installed: it is tried
        found = found and tuple(map(int, metadata.version("dp-accounting").split(".")[:2])) >= OLDEST_ACCOUNTING
    if not found:
        needed = ".".join(map(str, OLDEST_ACCOUNTING))
        raise BadInput(f"{field} needs the package dp-accounting, {needed} or newer: {installing('privacy')}")


@lru_cache(4096)
def epsilon(noise_multiplier: float, compositions: int, delta: float) -> float | None:
    """Return the epsilon that a client spends in several merges with Gaussian noise; None if it is infinite.

    A merge with one update of the client is a Gaussian mechanism of sensitivity 1. Together the merges are one with the
    standard deviation ``noise_multiplier / sqrt(compositions)`` (Dong et al. 2019, corollary 3.3), whose epsilon
    dp-accounting computes exactly (Balle and Wang 2018, theorem 8).
    """
    if compositions == 0:
        return 0.0
    if noise_multiplier == 0:
        return None
    import dp_accounting

    value = float(dp_accounting.get_epsilon_gaussian(noise_multiplier / math.sqrt(compositions), delta))
    return value if math.isfinite(value) else None


def gaussian(key: bytes, num: int) -> Iterator[Tensor]:
    """Yield ``num`` standard normal numbers, float64, in pieces of `CHUNK`; they depend only on ``key``.

    They are computed from the output of SHAKE-256 by the Box-Muller transform. torch's own generator has only 2^32
    seeds; an attacker could try all of them to find the noise of a published model.
    """
    for number, start in enumerate(range(0, num, CHUNK)):
        pairs = -(-min(CHUNK, num - start) // 2)
        stream = hashlib.shake_256(key + number.to_bytes(8, "little")).digest(16 * pairs)
        bits = np.frombuffer(stream, dtype="<u8") >> np.uint64(11)
        # make doubles in (0, 1) of 53 random bits; the added half avoids log(0), and bounds |noise| by 8.7
        uniform = (bits + 0.5) * 2.0**-53
        radius, angle = np.sqrt(-2.0 * np.log(uniform[:pairs])), 2.0 * math.pi * uniform[pairs:]
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        yield torch.from_numpy(both[: min(CHUNK, num - start)])


@dataclass
class PrivacyMemory(MergeMemory):
    """State of `Private`: the privacy budget spent so far, and the sums of the updates that wait."""

    key = "privacy"
    updates: dict[int, int] = field(default_factory=dict)  # by client: number of its updates that were merged
    # by client: sum of n^2 over all merges, where n of its updates are in one merge
    squares: dict[int, int] = field(default_factory=dict)
    sums: dict[Spec, FlatTensors] = field(default_factory=dict)  # by submodel: sum of clipped changes


@dataclass(frozen=True)
class Private(Wrapped):
    """Wrapper of a merge that passes on only a noisy mean of clipped updates, for differential privacy.

    The mean is ``(sum_n d_n min(1, C / ||d_n||) + N(0, (sigma C)^2)) / m``, where d_n is client n's change of the model
    and m a number that is fixed before the run. Noise is added to every element that an update of the merge trains. All
    updates have weight 1, whatever number of samples a client reports. The result is multiplied by the updates' mean
    staleness factor.

    The noise is generated from a secret key and the ids of the merged tasks. So runs replay and resume to the bit, and
    if a merge is lost in a crash and done again with other tasks, its noise is new. With a key from a file it depends on a
    digest of the sum, too: no two sums get the same noise, whose difference would be free of it, even if ids are used
    again, by another run with that file or after a power failure. Memory: one sum for each distinct submodel in a merge.

    Attributes:
        clip_norm: norm C to which changes are clipped.
        noise_multiplier: standard deviation sigma of the noise, as a multiple of C.
        delta: probability for which epsilon is reported.
        divisor: number m by which the noisy sum is divided.
        key: secret seed of the noise, as bytes.
        max_epsilon: largest epsilon that a client may spend; None = no limit.
        follows_sum: whether the noise depends on the sum, too.
    """

    clip_norm: float
    noise_multiplier: float
    delta: float
    divisor: float
    key: bytes = field(repr=False)
    max_epsilon: float | None = None
    follows_sum: bool = False

    def check(self, state: GlobalState) -> list[str]:
        """Return the wrapped merge's problems, and those that rule out privacy, such as running statistics in the model."""
        trained = state.submodels.layout(part="trained").entries
        problems = super().check(state)
        statistics = [entry.name for entry in trained if entry.name not in state.submodels.parameter_names]
        if statistics:
            problems = [
                *problems,
                f"privacy: the model has running statistics ({statistics[0]}), which noise would spoil: "
                "use GroupNorm or LayerNorm in the place of BatchNorm",
            ]
        first = epsilon(self.noise_multiplier, 1, self.delta) if self.max_epsilon is not None else None
        if first is not None and self.max_epsilon is not None and first > self.max_epsilon:
            problems = [
                *problems,
                f"privacy.max_epsilon is {self.max_epsilon:g}, and a client's first merge spends {first:.3g}: give a larger "
                "noise_multiplier or max_epsilon",
            ]
        return problems

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return notes for the user: the wrapped merge's, one on the meaning of epsilon, and a warning if it averages by class."""
        noisy = [f"privacy: epsilon is between runs that differ in {NEIGHBOURS}, at delta {self.delta:g}"]
        return super().notes(state, num_clients) + joint_notes(self.inner) + (noisy if self.noise_multiplier else [])

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Clip the norm of the update's change, and add the change to the sum of its submodel."""
        sums = state.memory.of(PrivacyMemory).sums
        change = difference(state, update, spec, self.sends)
        norm = norm_of(change, state.submodels)
        factor = self.clip_norm / norm if norm > self.clip_norm else 1.0
        if spec not in sums:
            sums[spec] = FlatTensors.zeros(change.layout, change.device)
        for dtype, buffer in sums[spec].buffers.items():
            buffer.add_(change.buffers[dtype], alpha=factor)

    def apply(self, state: GlobalState) -> None:
        """Pass the noisy mean to the wrapped merge, and charge it to the privacy budget."""
        memory = state.memory.of(PrivacyMemory)
        sums, memory.sums = memory.sums, {}
        if len(sums) == 1:
            self._make_noisy(state, next(iter(sums.values())))
        else:
            total = zeros_like(state.values)
            for spec, part in sums.items():
                state.submodels.plan(spec).add_(total, part)
            self._make_noisy(state, total)
            sums = {spec: state.submodels.plan(spec).gather(total, part) for spec, part in sums.items()}
        self._feed(state, sums)

    def release_sum(self, state: GlobalState, total: FlatTensors) -> None:
        """Add noise to the sum of the updates that wait, and merge the resulting mean; for secure aggregation.

        It reveals only the sum, and the clients have clipped their changes themselves.

        Args:
            state: the global model.
            total: sum of the changes, in the layout of the whole model; changed in place.
        """
        self._make_noisy(state, total)
        specs = dict.fromkeys(item.spec for item in state.waiting)
        self._feed(state, {spec: state.submodels.plan(spec).gather(total) for spec in specs})

    def _spend(self, state: GlobalState, contributions: Mapping[int, int]) -> None:
        """Account for the release of one noisy sum; ``contributions``: number of updates in it by client."""
        memory = state.memory.of(PrivacyMemory)
        for client, num in contributions.items():
            memory.updates[client] = memory.updates.get(client, 0) + num
            # n updates of one client change a sum by up to n C, which costs as much as n^2 mechanisms of sensitivity C
            memory.squares[client] = memory.squares.get(client, 0) + num**2

    def on_rollback(self, state: GlobalState, merged: Sequence[tuple[int, int]]) -> None:
        """Charge merges that a crash of the server has undone to the privacy budget, since clients have seen their results."""
        for version in {version for _, version in merged}:
            self._spend(state, Counter(client for client, of in merged if of == version))
        super().on_rollback(state, merged)

    def _make_noisy(self, state: GlobalState, total: FlatTensors) -> None:
        """Turn the sum of clipped changes into their noisy mean, in place."""
        assignments = [item.update.assignment for item in state.waiting]
        scale = self.noise_multiplier * self.clip_norm if self.noise_multiplier else 0.0
        digest = (total.model_digest(),) if self.follows_sum and scale else ()
        for number, (dtype, buffer) in enumerate(total.buffers.items()):
            if not is_merged(dtype):  # updates have no integer buffers
                continue
            if scale:
                key = hashlib.blake2b(self.key + repr((assignments, number, *digest)).encode(), digest_size=32).digest()
                for piece, noise in zip(torch.split(buffer, CHUNK), gaussian(key, len(buffer)), strict=True):
                    piece.add_((noise * scale).to(piece))
            buffer.div_(self.divisor)

    def _feed(self, state: GlobalState, means: Mapping[Spec, FlatTensors]) -> None:
        """Pass the noisy means to the wrapped merge as updates, with the global values added if the merge expects values."""
        if self.inner.sends == "values":
            for spec, part in means.items():
                current = state.submodels.plan(spec).gather(state.values)
                for dtype, buffer in part.buffers.items():
                    buffer.add_(current.buffers[dtype])
        feed(self.inner, state, means)
        self._spend(state, Counter(item.update.client for item in state.waiting))

    def _epsilon(self, compositions: int) -> float | None:
        return epsilon(self.noise_multiplier, compositions, self.delta)

    def ends_run(self, state: GlobalState) -> str | None:
        """Return a reason to end the run if merging the updates that wait would exceed a client's ``max_epsilon``.

        Else the wrapped merge decides.
        """
        if self.max_epsilon is not None:
            memory = state.memory.of(PrivacyMemory)
            waiting = Counter(item.update.client for item in state.waiting)
            after = max((memory.squares.get(client, 0) + num**2 for client, num in waiting.items()), default=0)
            spent = self._epsilon(after)
            if spent is None or spent > self.max_epsilon:
                return EPSILON
        return super().ends_run(state)

    def figures(self, state: GlobalState) -> dict[str, float | None]:
        """Return values for metrics.csv, by column: those of the wrapped merge, and the largest epsilon of a client."""
        squares = state.memory.of(PrivacyMemory).squares
        return {**super().figures(state), "epsilon": self._epsilon(max(squares.values(), default=0))}

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return entries for the run's summary: under "privacy" each client's epsilon, and the largest of them."""
        memory = state.memory.of(PrivacyMemory)
        compositions = max(memory.squares.values(), default=0)
        spent = {
            "epsilon": self._epsilon(compositions),
            "max_epsilon": self.max_epsilon,
            "delta": self.delta,
            "mechanism": MECHANISM,
            "neighbours": NEIGHBOURS,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.clip_norm,
            "divisor": self.divisor,
            "max_contributions": max(memory.updates.values(), default=0),
            "compositions": compositions,
            "clients": {
                str(client): {"updates": num, "epsilon": self._epsilon(memory.squares[client])}
                for client, num in sorted(memory.updates.items())
            },
        }
        return {**super().report(state), "privacy": spent}

    def __str__(self) -> str:
        noise = f"norms clipped to {self.clip_norm:g}, noise {self.noise_multiplier:g} x that on the sum"
        return f"{noise} / {self.divisor:g}, every weight 1, then {self.inner}"
