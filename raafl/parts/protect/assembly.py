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
    """Return ``algorithm`` with early closing of rounds, a guarded merge and privacy, wrapped in this order, innermost first.

    Args:
        algorithm: algorithm with the five parts that its factory made.
        rounds: conditions on which a round closes without its last clients.
        guard: clipping, refusal of outliers, robust means.
        privacy: client-level differential privacy.
        num_clients: number of clients N, for the privacy accountant.
        noise_key: seed of the privacy noise, which only the server has; empty if the algorithm is built only to be
            checked.

    Raises:
        BadInput: an option does not work with the algorithm, or with another option.
    """
    if rounds.is_on:
        if not isinstance(algorithm.trigger, AllReported):
            raise BadInput(
                f"rounds is {rounds}, but {algorithm.name} waits for no round of all clients (its trigger is "
                f"'{algorithm.trigger}'): leave rounds out"
            )
        algorithm = replace(algorithm, trigger=AllReported(rounds.close_at, rounds.deadline))
    return private(guarded(algorithm, guard), privacy, num_clients, noise_key)


def guarded(algorithm: Algorithm, guard: Guard) -> Algorithm:
    """Return ``algorithm`` with its merge wrapped as the options in ``guard`` ask.

    Raises:
        BadInput: a robust mean is requested, but updates are merged one by one, or separately for each client.
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
