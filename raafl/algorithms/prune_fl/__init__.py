"""PruneFL (Jiang et al., "Model Pruning Enables Efficient Federated Learning on Edge Devices", IEEE TNNLS 2022).

FedAvg on a pruned model, one for all clients, whose size and parts are chosen again and again (adaptive pruning): those that
maximise the expected decrease of the loss per second of a round, ``Gamma(M) = sum_{j in M} g_j^2 / (c + sum_{j in M} t_j)``,
with the squared gradient ``g_j^2`` as the importance of a parameter, ``t_j`` its time and c the round's fixed time. Of what is
in use, only a share with the smallest weights may be dropped; these and all that was dropped before are candidates, and come in
by ``g_j^2 / t_j``, descending, as long as that is at least the Gamma of what is in already.

Here, structured: j is a unit (neuron, channel, head), ``g_j^2`` the sum over its parameters, so that the pruned model is
small and dense.

The paper leaves open, or this does otherwise:
- Gradients come from the rounds 0, ``every``, 2 ``every``, ...: in these all clients train the whole model (the paper's
  clients then send gradients of pruned parameters, too), and g is the change of the merged model. The first of them stands
  for the paper's pruning at one chosen client before the start.
- t_j is a unit's share of the training FLOPs, c the FLOPs of a model with one unit on each axis: the same for all
  devices, since one model is chosen for all.
- Dropped units keep their values, and the measured model has them: a unit at zero would never get a gradient again.
- The share that may be dropped is the same throughout; the authors' code halves theirs every 10,000 rounds.
- `rates` bounds each client's part, as Zhang et al. do to compare (L-Arb: 0.5): of the chosen units the best within it.
- A client whose memory is too small gets the best units that fit, and in the rounds of the whole model the largest leading
  part.

With ``every=1`` every round is one of the whole model: FedAvg, bit for bit.
"""

from __future__ import annotations

from raafl.algorithms.prune_fl.pruned import ChosenMean, Pruned, check_settings
from raafl.core.algorithm import Algorithm, Local, Select
from raafl.core.sample import Sample
from raafl.errors import refuse_unused
from raafl.parts.select.rate_select import Rates
from raafl.parts.trigger import AllReported


def prune_fl(
    every: int = 50,
    prunable: float = 0.3,
    rates: Rates = 1.0,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Make PruneFL.

    Args:
        every: rounds from one choice of units to the next; each begins with a round of the whole model.
        prunable: share of the units in use that may be dropped at a choice, in (0, 1).
        rates: the most that a client gets of the model's parameters: one for all; a list dealt to clients 1, 2, ... and again
            from its beginning; or by name of device.
        by_samples: weigh by |D_n|; False = every client alike.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains instead, such as `raafl.parts.RateSelect`: leave out every, prunable
            and rates then.
    """
    if submodel is not None:
        refuse_unused(
            "submodel says what each client trains", every=(every, 50), prunable=(prunable, 0.3), rates=(rates, 1.0)
        )
    check_settings(every, prunable)
    return Algorithm(
        name="prune_fl",
        paper="Jiang et al. 2022",
        sample=Sample(cohort, concurrency),
        select=submodel or Pruned(every, rates),
        local=Local(),
        trigger=AllReported(),
        merge=ChosenMean(by_samples=by_samples, every=every, prunable=prunable),
    )
