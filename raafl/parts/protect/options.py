"""Define the options that any algorithm takes: rounds, the guard, privacy, masks. Importing them does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raafl.errors import BadInput, one_of, positive, refuse_unused_fields

Combine = Literal["mean", "trimmed_mean", "median", "centred_clip"]


@dataclass(frozen=True, slots=True)
class Guard:
    """Protection of the merge from bad updates.

    Attributes:
        clip_norm: largest L2 norm of an update's change; a larger change is scaled down. null = no clipping.
        outlier: multiple of the median of accepted norms above which an update is refused; null = refuse none.
        warm_up: number of accepted updates of similar size before `outlier` applies.
        combine: rule for combining updates: mean (the algorithm's own); trimmed_mean or median of each element over the
            updates that trained it; or centred_clip, a mean of updates that are clipped around the last result.
        max_weight: largest weight of a client with its own data (`raafl join --data`), as a multiple of the median of the
            clients' numbers of samples; null = as the client reports. Other clients count with their share of the run's
            data.
        max_norm_ratio: multiple of the median norm of accepted updates with the same layout above which an update is
            refused, once eight are accepted; null = refuse none. See `raafl.parts.protect.bounded`.
        own_data: whether clients may train on their own data; false = such a client is refused when it joins.
        trim: share that trimmed_mean drops at each end, from 0 to below 0.5.
        radius: distance from the last result beyond which centred_clip clips an update, as an L2 norm; null = the median
            distance of the updates.
    """

    clip_norm: float | None = None
    outlier: float | None = None
    warm_up: int = 5
    combine: Combine = "mean"
    trim: float = 0.1
    max_weight: float | None = 10.0
    max_norm_ratio: float | None = 1e4
    own_data: bool = True
    radius: float | None = None

    def __post_init__(self) -> None:
        positive("guard.clip_norm", self.clip_norm, optional=True)
        if self.outlier is not None and not self.outlier > 1:
            raise BadInput(f"guard.outlier is {self.outlier}: give a number above 1, a multiple of the median norm")
        positive("guard.warm_up", self.warm_up)
        one_of("guard.combine", self.combine, Combine)
        positive("guard.radius", self.radius, optional=True)
        if self.max_weight is not None and not self.max_weight >= 1:
            raise BadInput(f"guard.max_weight is {self.max_weight}: give 1 or more, a multiple of the median, or null")
        if self.max_norm_ratio is not None and not self.max_norm_ratio > 1:
            raise BadInput(
                f"guard.max_norm_ratio is {self.max_norm_ratio}: give a number above 1, a multiple of the median norm, or null"
            )
        if not 0 <= self.trim < 0.5:
            raise BadInput(f"guard.trim is {self.trim}: give a number from 0 to below 0.5")
        for name, needed, is_given in (
            ("trim", "guard.combine trimmed_mean", self.combine == "trimmed_mean"),
            ("radius", "guard.combine centred_clip", self.combine == "centred_clip"),
            ("warm_up", "guard.outlier", self.outlier is not None),
        ):
            if not is_given:
                refuse_unused_fields("guard", self, (name,), f"it belongs to {needed}", f"give {needed}")

    @property
    def is_on(self) -> bool:
        """Whether clipping, refusal of outliers or a robust mean is on; `max_norm_ratio`, on by default, does not count."""
        return self.clip_norm is not None or self.outlier is not None or self.combine != "mean"


@dataclass(frozen=True, slots=True)
class Privacy:
    """Options of client-level differential privacy; it is off unless a clipping norm is given.

    Attributes:
        clip_norm: L2 norm to which each update is clipped (S or C); null = no differential privacy.
        noise_multiplier: standard deviation of the noise on a merge's sum, as a multiple of clip_norm (z or sigma).
        delta: probability that the guarantee epsilon does not hold; below 1 / clients.
        divisor: number by which the noisy sum is divided; null = the number of updates expected in a merge (cohort,
            buffer size or 1).
        max_epsilon: largest epsilon that any client may spend; the run ends before a merge would exceed it. null = no
            limit.
        seed_file: file with the secret seed of the noise, created if missing; null = derive it from the run's seed.
    """

    clip_norm: float | None = None
    noise_multiplier: float = 1.0
    delta: float = 1e-5
    divisor: float | None = None
    seed_file: str | None = None
    max_epsilon: float | None = None

    def __post_init__(self) -> None:
        positive("privacy.max_epsilon", self.max_epsilon, optional=True)
        if self.max_epsilon is not None and not (self.noise_multiplier > 0 and self.clip_norm is not None):
            name = "clip_norm" if self.clip_norm is None else "noise_multiplier"
            raise BadInput(
                f"privacy.max_epsilon is {self.max_epsilon:g}, and privacy.{name} is {getattr(self, name)}: give a "
                "clip_norm and a noise_multiplier above 0, since epsilon is infinite without noise"
            )
        positive("privacy.clip_norm", self.clip_norm, optional=True)
        positive("privacy.divisor", self.divisor, optional=True)
        if not 0 <= self.noise_multiplier < math.inf:
            raise BadInput(f"privacy.noise_multiplier is {self.noise_multiplier}: give a finite number, 0 or more")
        if not 0 < self.delta < 1:
            raise BadInput(f"privacy.delta is {self.delta}: give a number between 0 and 1, such as 1e-5")
        if self.clip_norm == math.inf and self.noise_multiplier > 0:
            raise BadInput("privacy.clip_norm is inf: give a finite norm, since the noise is proportional to it")
        if not self.is_on:
            names = ("noise_multiplier", "delta", "divisor", "seed_file")
            refuse_unused_fields(
                "privacy", self, names, "privacy.clip_norm is null, so privacy is off", "give a clip_norm"
            )

    @property
    def is_on(self) -> bool:
        """Whether differential privacy is on."""
        return self.clip_norm is not None


@dataclass(frozen=True, slots=True)
class SecureAggregation:
    """Options of secure aggregation, where the server can read only sums of updates; off unless min_cover is given.

    Attributes:
        min_cover: smallest number of clients that must have trained an element for the server to learn its sum; null =
            no secure aggregation.
        bound: largest magnitude of an element of a client's change; an update beyond it is refused (out-of-range).
        clip_norm: L2 norm to which each client scales its change down before masking; null = no clipping.
        threshold: share of a group's clients, from 0.5 to below 1; more than this share must help to unmask the sum.
        simulate_masks: whether simulated updates are masked, too; false = they are added unmasked, which gives the same
            model to the bit.
        step_s: seconds that a client has for each step of the protocol in a wall-clock run.
    """

    min_cover: int | None = None
    bound: float = 8.0
    clip_norm: float | None = None
    threshold: float = 2 / 3
    simulate_masks: bool = False
    step_s: float = 60.0

    def __post_init__(self) -> None:
        if self.min_cover is not None and self.min_cover < 2:
            raise BadInput(
                f"secure_aggregation.min_cover is {self.min_cover}: give 2 or more, or null, since a sum over one "
                "client reveals its update"
            )
        positive("secure_aggregation.bound", self.bound)
        positive("secure_aggregation.clip_norm", self.clip_norm, optional=True)
        positive("secure_aggregation.step_s", self.step_s)
        if not 0.5 <= self.threshold < 1:
            raise BadInput(f"secure_aggregation.threshold is {self.threshold}: give a number from 0.5 to below 1")
        if self.bound == math.inf:
            raise BadInput("secure_aggregation.bound is inf: give a finite number, such as 8")
        if not self.is_on:
            names = ("bound", "clip_norm", "threshold", "simulate_masks", "step_s")
            reason = "secure_aggregation.min_cover is null, so the server reads each update"
            refuse_unused_fields("secure_aggregation", self, names, reason, "give a min_cover, such as 3")

    @property
    def is_on(self) -> bool:
        """Whether secure aggregation is on."""
        return self.min_cover is not None


@dataclass(frozen=True, slots=True)
class Rounds:
    """Conditions under which a round closes without its slowest clients; by default a round waits for all.

    An update that arrives after its round has closed is refused (refused:late), which counts for its client like any
    refusal.

    Attributes:
        close_at: share of a round's tasks that must report before the round closes, rounded up to whole tasks; 1 = all.
        deadline: time after which the round closes, as a multiple above 1 of the median time from its start to an
            update; null = none.
    """

    close_at: float = 1.0
    deadline: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether a round may close before all of its tasks have reported."""
        return self != Rounds()
