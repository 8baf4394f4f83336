"""PLATON (Zhang et al., "PLATON: Pruning Large Transformer Models with Upper Confidence Bound of Weight Importance", ICML 2022).

Co-S2P compares with PLATON trained on each client, under FedAvg (``trigger="all"``) or FedAsync (``trigger="each"``). At each step

    I = |theta * grad|                                            sensitivity of a weight,
    Ibar <- beta1 Ibar + (1 - beta1) I                            its importance, smoothed,
    U = |I - Ibar|,   Ubar <- beta2 Ubar + (1 - beta2) U          its uncertainty, smoothed,
    S = Ibar Ubar                                                 upper confidence bound,

and the share r(t) of the weights with the highest S is kept. The share falls cubically from r(0) to r(T):
``r(t) = r(T) + (r(0) - r(T)) (1 - (t - t_i) / (T - t_f - t_i))^3`` between the warm-up t_i and the last t_f steps.

Here pruning is structured, as in Co-S2P's comparison: I of a unit (neuron, channel, head) is the sum over its parameters, and
pruned units are absent from the client's model, which is small and dense.

Choices that the paper leaves open, and deviations from it:
- Every axis keeps the same share, so that a budget holds; the paper has one threshold for all weights.
- The scores of a unit continue from task to task: a client sends them with its update, the server stores them and sends
  them back with the client's next task (two numbers for each of at most `groups` groups of units of an axis). They come from the
  client's own data only.
- In the paper pruned weights are 0, and so is their sensitivity; here other clients train them, and their score stays as it was
  last measured. Scores of kept units fall with their gradients, so that a pruned unit can return. A unit that was never
  measured (on a client without memory for the whole model) is tried first.
- t is the number of a client's tasks: its share is constant within one. r(0) is the largest share that fits its memory,
  r(T) its rate. Smoothing takes the place of the paper's averaging over the steps between two prunings.
- The default rates are HeteroFL's, 1 to 1/16 of the width.

At rate 1 everywhere it is FedAvg, or FedAsync, bit for bit.
"""

from __future__ import annotations

from typing import Literal

from raafl.algorithms.hetero_fl import LEVELS
from raafl.algorithms.platon.scores import BestUnits, ScoredMean, Sensitivity
from raafl.core.algorithm import Algorithm
from raafl.core.sample import Sample
from raafl.errors import refuse_unused
from raafl.parts.merge.mean import Kind, Staleness
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
    """Return PLATON, whose clients prune the units of low score; the server merges as in FedAvg or FedAsync.

    The score of a unit, such as a neuron, is its importance times its uncertainty.

    Args:
        rates: final share of each layer's units for a client (r(T)): one number for all; a list, one number for each of
            clients 1, 2, ..., repeating; or a mapping from device name to number. None = the list 1, 1/2, 1/4, 1/8,
            1/16.
        warm_up: number of a client's first tasks in which nothing is pruned (t_i).
        rounds: number of a client's tasks over which its share falls to the final one.
        beta1: smoothing factor of the importance, in [0, 1).
        beta2: smoothing factor of the uncertainty, in [0, 1).
        groups: largest number of scores for a layer; neighbouring units of a wider layer share a score.
        trigger: time of a merge: all (when the whole round has reported, FedAvg) or each (at each arrival, FedAsync).
        alpha: weight of an arriving model for trigger each, in (0, 1]; None = 0.75.
        staleness: form of the function s(.) by which late updates count less, for trigger each: constant, polynomial or hinge.
        staleness_a: parameter a of the polynomial and hinge functions.
        staleness_b: parameter b of the hinge function.
        cohort: number of clients in a round, or at work in an asynchronous run, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
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
