"""Wrap an algorithm's trigger and merge in the options that any algorithm takes: rounds, guard, privacy."""

from __future__ import annotations

from dataclasses import replace

from raafl.core.algorithm import Algorithm
from raafl.errors import BadInput
from raafl.parts.protect.centred import Centred
from raafl.parts.protect.options import Guard, Privacy, Rounds
from raafl.parts.protect.privacy import private
from raafl.parts.protect.robust import CoordinateWise, NormFilter
from raafl.parts.trigger import AllReported, EachArrival


def with_options(
    algorithm: Algorithm, rounds: Rounds, guard: Guard, privacy: Privacy, num_clients: int, noise_key: bytes = b""
) -> Algorithm:
    """Add the options that any algorithm takes: early closing of rounds, protection from bad updates, and privacy.

    Raises:
        BadInput: an option does not work with the algorithm or with another option.
    """
    if rounds.is_on:
        if not isinstance(algorithm.trigger, AllReported):
            raise BadInput(
                f"rounds is {rounds}, but {algorithm.name} does not work in rounds (its trigger is "
                f"'{algorithm.trigger}'): leave rounds out"
            )
        algorithm = replace(algorithm, trigger=AllReported(rounds.close_at, rounds.deadline))
    return private(guarded(algorithm, guard), privacy, num_clients, noise_key)


def guarded(algorithm: Algorithm, guard: Guard) -> Algorithm:
    """Return ``algorithm`` with the protection of its merge that ``guard`` asks for, such as clipping or a robust mean.

    Raises:
        BadInput: a robust mean is requested, but the algorithm merges updates one by one, or treats each client
            separately.
    """
    merge = algorithm.merge
    if guard.combine != "mean":
        if merge.by_client:
            raise BadInput(
                f"guard.combine is '{guard.combine}', but {algorithm.name} remembers each client's own update: choose another "
                "algorithm, such as ra_fed, or use guard.clip_norm and guard.outlier"
            )
        if isinstance(algorithm.trigger, EachArrival) or getattr(algorithm.trigger, "size", 2) == 1:
            raise BadInput(
                f"guard.combine is '{guard.combine}', but {algorithm.name} merges each update alone: choose an algorithm that "
                "merges several at a time, such as fed_buff or fed_avg, or use guard.clip_norm and guard.outlier"
            )
        is_centred = guard.combine == "centred_clip"
        merge = Centred(merge, guard.radius) if is_centred else CoordinateWise(merge, guard.combine, guard.trim)
    if guard.clip_norm is not None or guard.outlier is not None:
        merge = NormFilter(merge, guard.clip_norm, guard.outlier, guard.warm_up)
    return algorithm if merge is algorithm.merge else replace(algorithm, merge=merge)
