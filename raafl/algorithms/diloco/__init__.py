"""DiLoCo (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023), in rounds or not.

Each worker makes H steps of AdamW from the global model. The mean of their deltas is the gradient of an outer Nesterov step
(Algorithm 1): ``m <- beta m + Delta; theta <- theta + eta (Delta + beta m)``, eta = 0.7, beta = 0.9.

The asynchronous form is that of Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024: *delayed Nesterov*
(Algorithm 3, `raafl.parts.merge.nesterov.DelayedNesterov`) at each arrival, and *dynamic local updates* (`steps` "speed"), where
a slow worker makes fewer steps. The quorum with a grace window, and its weights by tokens, are those of Douillard et al.,
"Decoupled DiLoCo for Resilient Distributed Pre-training", 2026; their formula is taken from a second source, without fragments.

Choices that the papers leave open, and this does:
- H is `train.num_steps`; the inner optimizer is the model's own.
- A client keeps nothing between tasks, so the inner optimizer starts anew in each (as in the authors' public toy of the
  asynchronous form). `inner_state` "kept" is DiLoCo's own: the moments of AdamW travel with the task, three times the bytes.
- `outer` "heloco" corrects deltas by their angle to the momentum (`raafl.algorithms.diloco.heloco`); experimental.
- Submodels: means, momentum and N are over the updates that cover an element (`raafl.parts.merge.nesterov`).
- Algorithm 3's c, which spreads the momentum over the N updates, is 0, the paper's default.
- A client that is lost takes part again when it returns, from the model as it is then.
"""

from __future__ import annotations

from typing import Literal

from raafl.algorithms.diloco.heloco import HeLoCo
from raafl.algorithms.diloco.inner import KeptInner, WithInner
from raafl.core.algorithm import Algorithm, Local, Merge, Select, Trigger
from raafl.core.sample import Sample
from raafl.errors import one_of, refuse_unused
from raafl.parts.merge.mean import Kind, Staleness
from raafl.parts.merge.nesterov import DelayedNesterov, Nesterov, Weights
from raafl.parts.select.by_speed import BySpeed
from raafl.parts.select.submodels import Full
from raafl.parts.trigger import AllReported, EachArrival, MinRatio

When = Literal["all", "quorum", "each"]
Steps = Literal["equal", "speed"]
InnerState = Literal["new", "kept"]
Outer = Literal["nesterov", "heloco"]


def diloco(
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    trigger: When = "all",
    quorum: float = 0.5,
    grace_s: float = 0.0,
    delay: int | None = None,
    steps: Steps = "equal",
    least_steps: int = 5,
    weights: Weights = "equal",
    staleness: Kind = "constant",
    staleness_a: float = 0.5,
    inner_state: InnerState = "new",
    outer: Outer = "nesterov",
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return DiLoCo: clients make many local steps, and the server steps along their changes with Nesterov momentum.

    Args:
        outer_lr: outer learning rate (eta).
        outer_momentum: outer momentum (beta); 0 = none.
        trigger: time of a merge: all (when all clients of the round have reported), quorum (when a share has, and a
            wait is over) or each (at each arrival, with delayed Nesterov momentum).
        quorum: share of the clients at work that must have reported, from 0 to 1; for trigger quorum.
        grace_s: seconds for which a merge waits for further updates: for trigger quorum, after the quorum has reported;
            for trigger each, after the first arrival, so that clients that finish together get the same model.
        delay: number of updates (N) after which the momentum is applied once, for trigger each; the updates between are
            added without it. 1 = at each arrival, the naive form; None = the number of clients, the least otherwise.
        steps: number of local steps of a client: equal (H for all) or speed (dynamic local updates: H for the fastest,
            fewer for slower clients).
        least_steps: smallest number of local steps of a task; for steps speed.
        weights: weight of an update: equal; samples (its client's |D_n|); or tokens (tokens x tokens / steps). For
            triggers all and quorum.
        staleness: form of the function s(.) by which late updates count less: constant, polynomial or hinge.
        staleness_a: parameter a of the polynomial and hinge functions.
        inner_state: state of the clients' Adam or AdamW: new = it starts anew in each task; kept = it continues from
            the client's last task, for which its moments travel with each task and are stored on the server.
        outer: rule of the server's step: nesterov (delayed for trigger each), or heloco (experimental), which corrects
            the mean change by its angle to the momentum.
        cohort: number of clients in a round, or at work, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    for name, value, allowed in (
        ("trigger", trigger, When),
        ("steps", steps, Steps),
        ("inner_state", inner_state, InnerState),
        ("outer", outer, Outer),
    ):
        one_of(name, value, allowed)
    if steps == "equal":
        refuse_unused("steps is 'equal'", least_steps=(least_steps, 5))
    stale = Staleness(staleness, staleness_a)
    select: Select = submodel or Full()
    if outer == "heloco":
        refuse_unused("outer is 'heloco', whose merges are whole steps", delay=(delay, None))
        merge: Merge = HeLoCo(outer_lr, outer_momentum, weights, stale)
    else:
        merge = _merge(trigger, outer_lr, outer_momentum, delay, weights, stale)
    return Algorithm(
        name="diloco",
        paper="Douillard et al. 2023",
        sample=Sample(cohort, concurrency),
        select=BySpeed(select, least_steps) if steps == "speed" else select,
        local=KeptInner() if inner_state == "kept" else Local(),
        trigger=_trigger(trigger, quorum, grace_s),
        merge=WithInner(merge) if inner_state == "kept" else merge,
    )


def _trigger(when: When, quorum: float, grace_s: float) -> Trigger:
    if when == "quorum":
        return MinRatio(quorum, grace_s)
    refuse_unused(f"trigger is '{when}'", quorum=(quorum, 0.5))
    if when == "each":
        return MinRatio(0.0, grace_s) if grace_s else EachArrival()
    refuse_unused(f"trigger is '{when}'", grace_s=(grace_s, 0.0))
    return AllReported()


def _merge(when: When, lr: float, beta: float, delay: int | None, weights: Weights, stale: Staleness) -> Merge:
    if when == "each":
        refuse_unused("trigger is 'each', which moves by 1/N of each update", weights=(weights, "equal"))
        return DelayedNesterov(lr, beta, staleness=stale, every=delay)
    refuse_unused(f"trigger is '{when}', whose merges are whole steps", delay=(delay, None))
    if when == "all":
        refuse_unused("in a round nothing is late", staleness=(stale.kind, "constant"))
    return Nesterov(lr, beta, weights, stale)
