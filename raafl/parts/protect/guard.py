"""Wrap an algorithm's merge in the guard's options."""

from __future__ import annotations

from dataclasses import replace

from raafl.core.algorithm import Algorithm
from raafl.errors import BadInput
from raafl.parts.protect.centred import Centred
from raafl.parts.protect.options import Guard
from raafl.parts.protect.robust import CoordinateWise, NormFilter
from raafl.parts.trigger import EachArrival


def guarded(algorithm: Algorithm, guard: Guard) -> Algorithm:
    """Return ``algorithm`` with its merge wrapped as ``guard`` says.

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
