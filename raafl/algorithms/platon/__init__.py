"""PLATON (Zhang et al., "PLATON: Pruning Large Transformer Models with Upper Confidence Bound of Weight Importance", ICML 2022).

Co-S2P's comparison trains with it on each client, under FedAvg (``trigger="all"``) or FedAsync (``trigger="each"``). At each step

    I = |theta * grad|                                            sensitivity of a weight,
    Ibar <- beta1 Ibar + (1 - beta1) I                            its importance, smoothed,
    U = |I - Ibar|,   Ubar <- beta2 Ubar + (1 - beta2) U          its uncertainty, smoothed,
    S = Ibar Ubar                                                 upper confidence bound,

and of the weights the share r(t) with the highest S stays. From r(0) it falls cubically to r(T):
``r(t) = r(T) + (r(0) - r(T)) (1 - (t - t_i) / (T - t_f - t_i))^3`` between the warm-up t_i and the last t_f steps.

Here, structured, as Co-S2P does to compare: I of a unit (neuron, channel, head) is the sum over its parameters, and pruned
units are absent from the client's model, which is small and dense.

The paper leaves open, or this does otherwise:
- Every axis keeps the same share, so that a budget holds; the paper has one threshold for all weights.
- The scores of a unit go on from task to task: a client sends them with its update, the server keeps them for it and tells
  them again (two numbers for each of at most `groups` groups of units of an axis). They are of its own data only.
- Pruned weights are 0 in the paper, and so is their sensitivity; here others train them, and their score stays as it was
  last measured. It falls for those that are kept as the gradients do, so that a pruned unit can come back. A unit never
  measured (on a client without memory for the whole model) is tried first.
- t is the number of a client's tasks: its share is the same within one. r(0) is the largest share that fits its memory,
  r(T) its rate. The paper's averaging over steps between two prunings is the smoothing's.
- The dealt rates are HeteroFL's, 1 to 1/16 of the width, where none are given.

At rate 1 everywhere it is FedAvg, or FedAsync, bit for bit.
"""

from __future__ import annotations

from typing import Literal

from raafl.algorithms.hetero_fl import LEVELS
from raafl.algorithms.platon.scores import BestUnits, ScoredMean, Sensitivity
from raafl.core.algorithm import Algorithm
from raafl.core.sample import Sample
from raafl.errors import refuse_unused
from raafl.parts.merge.staleness import Kind, Staleness
from raafl.parts.select.rate_select import Rates
from raafl.parts.trigger import all_or_each


def platon(
    rates: Rates | None = None,
    warm_up: int = 1,
    rounds: int = 20,
    beta1: float = 0.85,
    beta2: float = 0.95,
    groups: int = 64,
    trigger: Literal["all", "each"] = "all",
    alpha: float | None = None,
    staleness: Kind = "constant",
    staleness_a: float = 0.5,
    staleness_b: float = 4.0,
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Make PLATON under FedAvg or FedAsync.

    Args:
        rates: share of the width that is left at each client in the end (r(T)): one for all; a list dealt to clients 1, 2, ...
            and again from its beginning; or by name of device. None = 1, 1/2, 1/4, 1/8, 1/16 in turn.
        warm_up: tasks of a client before units are pruned (t_i).
        rounds: tasks of a client in which the share falls to its rate.
        beta1: smoothing of the importance, in [0, 1).
        beta2: smoothing of the uncertainty, in [0, 1).
        groups: the most scores of an axis; of an axis with more units, neighbours share one.
        trigger: all (FedAvg) or each (FedAsync).
        alpha: mixing weight where each arrival is merged, in (0, 1]; None = 0.75.
        staleness: s(.) where each arrival is merged: constant, polynomial or hinge.
        staleness_a: a of polynomial and hinge.
        staleness_b: b of hinge.
        cohort: clients in a round (or kept at work), drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
    """
    when = all_or_each(trigger)
    if trigger == "all":
        refuse_unused("trigger all waits for everyone", alpha=(alpha, None), staleness=(staleness, "constant"))
        merge = ScoredMean(groups=groups)
    else:
        mixed = 0.75 if alpha is None else alpha
        merge = ScoredMean(mixed, Staleness(staleness, staleness_a, staleness_b), by_samples=False, groups=groups)
    return Algorithm(
        name="platon",
        paper="Zhang et al. 2022, PLATON",
        sample=Sample(cohort, concurrency),
        select=BestUnits(list(LEVELS) if rates is None else rates, warm_up, rounds, groups),
        local=Sensitivity(beta1, beta2, groups),
        trigger=when,
        merge=merge,
    )
