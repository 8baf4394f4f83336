"""Wrap an algorithm's trigger and merge in the options that any algorithm takes: rounds, guard, privacy, and sound numbers.

Each wrapper's module is imported where a run needs it.
"""

from __future__ import annotations

from dataclasses import replace

from raafl.core.algorithm import Algorithm
from raafl.core.options import Guard, Privacy, Rounds
from raafl.errors import BadInput
from raafl.parts.trigger import AllReported, EachArrival
from raafl.submodel import Submodels
from raafl.submodel.batch_norm import Pooling


def with_options(
    algorithm: Algorithm, rounds: Rounds, guard: Guard, privacy: Privacy, num_clients: int, seed: int | None = None
) -> Algorithm:
    """Add the options that any algorithm takes: early closing of rounds, protection from bad updates, and privacy.

    `seed`: the run's, from which the noise follows unless privacy names a file; None = check only, without noise.

    Raises:
        BadInput: an option does not work with the algorithm or with another option.
    """
    if rounds.is_on:
        if not isinstance(algorithm.trigger, AllReported):
            off = {"close_at 1": rounds.close_at < 1, "deadline null": rounds.deadline is not None}
            raise BadInput(
                f"rounds is {rounds}, but {algorithm.name} does not work in rounds (its trigger is "
                f"'{algorithm.trigger}'): leave rounds out, on the command line by "
                + " ".join(f"--rounds.{option}" for option, is_set in off.items() if is_set)
            )
        algorithm = replace(algorithm, trigger=AllReported(rounds.close_at, rounds.deadline))
    algorithm = guarded(algorithm, guard)
    if not privacy.is_on:
        return algorithm
    from raafl.parts.protect.privacy import noise_key, private

    return private(algorithm, privacy, num_clients, b"" if seed is None else noise_key(privacy, seed))


def guarded(algorithm: Algorithm, guard: Guard) -> Algorithm:
    """Return ``algorithm`` with the protection of its merge that ``guard`` asks for, such as clipping or a robust mean.

    Raises:
        BadInput: a robust mean is requested, but the algorithm merges updates one by one, or treats each client
            separately.
    """
    if guard.combine == "mean" and guard.clip_norm is None and guard.outlier is None:
        return algorithm
    from raafl.parts.protect.robust import Centred, CoordinateWise, NormFilter

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
    return replace(algorithm, merge=merge)


def sound(algorithm: Algorithm, submodels: Submodels, max_norm_ratio: float | None) -> Algorithm:
    """Return ``algorithm`` with a merge that computes in at least single precision, and whose result is always finite.

    From the inside: pooled statistics of batch norm; conversion of half-precision updates; and the limit on the norm of an
    update, which is checked before anything else.
    """
    return bounded(widened(pooled(algorithm, submodels), submodels), max_norm_ratio)


def pooled(algorithm: Algorithm, submodels: Submodels) -> Algorithm:
    """Return ``algorithm`` with exact merging of batch norm's running statistics; unchanged if the model has none."""
    pooling = Pooling.of(submodels.module, submodels.batch_norm)
    if pooling is None:
        return algorithm
    from raafl.parts.merge.pooled import Pooled

    return replace(algorithm, merge=Pooled(algorithm.merge, pooling))


def widened(algorithm: Algorithm, submodels: Submodels) -> Algorithm:
    """Return ``algorithm`` with its merge computed in at least single precision; unchanged if all trained parameters have it."""
    trained = submodels.layout(part="trained")
    if trained.wide is trained:
        return algorithm
    from raafl.parts.merge.wide import WideMerge, WideSubmodels

    return replace(algorithm, merge=WideMerge(algorithm.merge, WideSubmodels(submodels)))


def bounded(algorithm: Algorithm, max_norm_ratio: float | None) -> Algorithm:
    """Return ``algorithm`` with a merge whose result is always finite, whatever clients send; see `Bounded`.

    `max_norm_ratio`: multiple of the usual norm above which an update is refused; None = no bound.
    """
    from raafl.parts.protect.bounded import Bounded

    return replace(algorithm, merge=Bounded(algorithm.merge, max_norm_ratio))
