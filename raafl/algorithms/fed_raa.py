"""Fed-RAA (Zhang et al., "A Resource-Adaptive Approach for Federated Learning under Resource-Constrained Environments").

The model's neurons are split into M disjoint fragments (Table 4). An idle client gets one fragment from Gre-RAA
(Algorithm 2), trains it alone as a physically smaller model, minimising
``f_n(theta_j) + rho/2 ||theta_j - theta_j_received||^2`` (eq. 2), and sends it back. The server merges at every
arrival: ``q(j) += 1; theta_j <- (1 - alpha_t) theta_j + alpha_t theta_j_new``, ``alpha_t = alpha * s(t - tau)``
(Algorithm 1).

Choices that the paper leaves open:
- alpha, s, rho and the fragments' scale: docs/results/fed-raa.md has the search behind the defaults. With a constant s an
  alpha near 1 does not learn once many clients work at a time (`raafl.parts.merge.mean.Mean.too_stale`).
- Parameters that lie in no fragment (output bias, norms over an uncut width) are sent with every fragment and mixed in like
  the rest, with the same alpha_t.
- A fragment is trained alone, yet the full network sums all M: `rescale`, which the paper does not have, multiplies a cut
  layer's activation by 1/keep-fraction while training, so that the sum has the scale each fragment was trained for. It also
  makes a fragment's gradients larger, like a higher learning rate; where several layers are cut their factors multiply, and
  training may diverge (docs/results/fed-raa.md has measurements of both).
- trigger "all" (Table 3's Sync): the updates of a round are mixed in at once, each element with the unweighted mean of the
  updates that cover it.
- On an axis with fewer units than fragments (two heads, three fragments) each fragment has one unit, and some share it.
  A model without axes is one fragment, whatever M is; the run logs a warning.
- K for the clients that floor(N/M) leaves over, and for N < M: see `raafl.parts.select.submodels.Ranking.bound`.

Table 3's rows: Gre-RAA (the default); Random ``select="random"``; MP ``select="fewest_updates"``; Sync ``trigger="all"``.
"""

from __future__ import annotations

from typing import Literal

from raafl.algorithm import Algorithm, Fragments, Kind, Local, Mean, Sample, Select, Staleness
from raafl.errors import refuse_unused
from raafl.parts.select.submodels import Choice, fragment_ratios
from raafl.parts.trigger import all_or_each


def fed_raa(
    fragments: int | list[float] = 3,
    select: Choice = "gre_raa",
    trigger: Literal["each", "all"] = "each",
    alpha: float = 0.9,
    staleness: Kind = "polynomial",
    staleness_a: float = 0.5,
    staleness_b: float = 4.0,
    prox: float = 0.0,
    rescale: bool = False,
    K: float | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return Fed-RAA, which divides the model into disjoint fragments and gives slow clients small ones.

    Args:
        fragments: number M of fragments, 1 to 5, with the paper's sizes (Table 4), or a list of their relative sizes.
        select: rule that assigns fragments: gre_raa (by speed), random, or fewest_updates (the fragment
            merged least often; the paper's MP).
        trigger: time of a merge: each (at each arrival) or all (when the whole round has reported, Sync Fed-RAA).
        alpha: weight of an arriving model in the mix with the global one (alpha), in (0, 1].
        staleness: form of the function s(.) by which late updates count less: constant, polynomial or hinge.
        staleness_a: parameter a of the polynomial and hinge functions.
        staleness_b: parameter b of the hinge function.
        prox: weight of the proximal term, which keeps a client's values close to the received ones (rho).
        rescale: multiply the activations of a narrowed layer by 1 / (kept share of its units) while training.
        K: longest time of a task in seconds (K); None = the one that an offline assignment of all clients needs.
        cohort: number of clients in a round, or at work in an asynchronous run, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the fragments, such as `raafl.parts.RateSelect`; leave
            fragments, select and K at their defaults then. None = fragments.
    """
    if submodel is not None:
        refuse_unused(
            "submodel says what each client trains", fragments=(fragments, 3), select=(select, "gre_raa"), K=(K, None)
        )
    return Algorithm(
        name="fed_raa",
        paper="Zhang et al. 2024, Fed-RAA",
        sample=Sample(cohort, concurrency),
        select=submodel or Fragments(fragment_ratios(fragments), select, K),
        local=Local(prox=prox, rescale=rescale),
        trigger=all_or_each(trigger),
        merge=Mean(alpha, Staleness(staleness, staleness_a, staleness_b), by_samples=False),
    )
