"""Streaming DiLoCo (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025): a fragment at a time.

Workers train on without being reset to the global model. Of P fragments of the model one is synchronised every H/P inner steps: its
outer gradient ``Delta_p``, the difference to the values that the worker received last of it, is averaged, and an outer Nesterov
step moves the global fragment. The worker mixes that in tau steps later: ``theta_p <- alpha theta_p + (1 - alpha) theta_p global``.

Choices that the paper leaves open, or that differ from it here:
- A task is H/P steps, so H is ``fragments`` times `train.num_steps`. Fragments go out at its end, and come in with the next task.
- What a worker holds stays on the client (`raafl.compression.streams`): its parameters, the values that it received last, and with
  `inner_state` "kept" AdamW's moments. A client that joins, or returns, gets the whole model once and begins from it.
- The paper overlaps a transfer with tau steps, and then waits for it. So it is here with `overlap`: a client makes the first tau
  steps of its next task (`Traits.steps_ahead`) while its update and the merged fragment travel. tau is `sync_delay`, at most the
  steps of a task, H/P, so that a fragment is mixed in before the client sends its next one. Without `overlap` the arithmetic is the
  same, but a task starts once its fragment has arrived.
- alpha and tau are as torchft and others describe the method; the paper's text was not at hand. alpha = 0 takes the global values,
  alpha = 1 would never synchronise. With one fragment, alpha 0 and tau 0 it is `diloco`.
- The wire is `compress`: bf16 or int8; the paper has 4 bits.
- `trigger` "each" is raafl's: each client goes through the fragments by itself, and delayed Nesterov
  (`raafl.parts.merge.nesterov.DelayedNesterov`) counts N = clients times fragments.
"""

from __future__ import annotations

from typing import Literal

from raafl.algorithms.streaming_diloco.fragments import ByFragment, DelayedByFragment, Fragments, InTurn, Pattern
from raafl.algorithms.streaming_diloco.replica import Replica, ReplicaWithMoments
from raafl.core.algorithm import Algorithm
from raafl.core.sample import Sample
from raafl.errors import one_of, refuse_unused
from raafl.parts.merge.nesterov import Nesterov
from raafl.parts.select.by_speed import BySpeed
from raafl.parts.select.submodels import Full
from raafl.parts.trigger import all_or_each

When = Literal["all", "each"]
Steps = Literal["equal", "speed"]
InnerState = Literal["new", "kept"]


def streaming_diloco(
    fragments: int = 4,
    pattern: Pattern = "strided",
    alpha: float = 0.5,
    sync_delay: int = 1,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    trigger: When = "all",
    delay: int | None = None,
    steps: Steps = "equal",
    least_steps: int = 5,
    inner_state: InnerState = "new",
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Return Streaming DiLoCo: clients keep their own copy of the model, and exchange only one fragment of it with each task.

    Args:
        fragments: number of fragments P into which the model's layers are divided; at most as many as there are layers.
        pattern: assignment of layers to fragments: strided = layer l is in fragment l mod P; sequential = neighbouring
            layers, in fragments of about equal size.
        alpha: weight of the client's own values when a received fragment is mixed in (alpha), 0 to below 1; 0 = take
            the global values.
        sync_delay: number of local steps after which a received fragment is mixed in (tau); at the end of the task at
            the latest. With `overlap` these steps hide transfers: they are made before the fragment is there.
        outer_lr: outer learning rate (eta).
        outer_momentum: outer momentum (beta); 0 = none.
        trigger: time of a merge: all (when the whole round has reported) or each (at each arrival, with delayed
            Nesterov momentum).
        delay: number of updates after which the momentum is applied once, for trigger each; None = clients times fragments.
        steps: number of local steps of a client: equal (H/P) or speed (H/P for the fastest, fewer for slower clients).
        least_steps: smallest number of local steps of a task; for steps speed.
        inner_state: state of the clients' Adam or AdamW: new = it starts anew in each task; kept = it continues from
            the client's last task; its moments stay on the client.
        cohort: number of clients in a round, or at work in an asynchronous run, drawn uniformly; None = all. A client
            that is rarely drawn trains on with old fragments, since it only receives the one that it has sent before.
        concurrency: largest number of clients that work at the same time; None = no limit.
    """
    for name, value, allowed in (
        ("trigger", trigger, When),
        ("steps", steps, Steps),
        ("inner_state", inner_state, InnerState),
    ):
        one_of(name, value, allowed)
    if steps == "equal":
        refuse_unused("steps is 'equal'", least_steps=(least_steps, 5))
    divided = Fragments(fragments, pattern)
    if trigger == "each":
        merge: Nesterov = DelayedByFragment(outer_lr, outer_momentum, every=delay, fragments=divided)
    else:
        refuse_unused("trigger is 'all', whose merges are whole steps", delay=(delay, None))
        merge = Nesterov(outer_lr, outer_momentum)
    local = ReplicaWithMoments if inner_state == "kept" else Replica
    return Algorithm(
        name="streaming_diloco",
        paper="Douillard et al. 2025",
        sample=Sample(cohort, concurrency),
        select=InTurn(BySpeed(Full(), least_steps) if steps == "speed" else Full(), divided, trigger == "all"),
        local=local(divided, alpha, sync_delay),
        trigger=all_or_each(trigger),
        merge=ByFragment(merge, divided),
    )
