"""PruneFL (Jiang et al., "Model Pruning Enables Efficient Federated Learning on Edge Devices", IEEE TNNLS 2022).

FedAvg on one pruned model for all clients, whose units are chosen again and again (adaptive pruning): those that maximise the
expected decrease of the loss per second of a round, ``Gamma(M) = sum_{j in M} g_j^2 / (c + sum_{j in M} t_j)``. The squared
gradient ``g_j^2`` is the importance of a parameter, ``t_j`` its time, and c the round's fixed time. Of the parameters in use only
a share with the smallest weights may be dropped. These, and all that were dropped before, are candidates, added in descending
order of ``g_j^2 / t_j`` as long as that is at least the Gamma of those already chosen.

Here pruning is structured: j is a unit (neuron, channel, head) and ``g_j^2`` the sum over its parameters, so that the pruned model
is small and dense.

Choices that the paper leaves open, and deviations from it:
- Gradients come from the rounds 0, ``every``, 2 ``every``, ..., in which all clients train the whole model; g is the change of the
  merged model. (In the paper clients send gradients of pruned parameters in these rounds.) The first of them replaces the
  paper's pruning at one chosen client before the start.
- t_j is a unit's share of the training FLOPs, and c the FLOPs of a model with one unit on each axis: equal for all
  devices, since one model is chosen for all.
- Dropped units keep their values, and evaluation of the model includes them: a unit of zeros would never get a gradient again.
- The share that may be dropped is constant; the authors' code halves theirs every 10,000 rounds.
- `rates` bounds each client's part, as in Zhang et al.'s comparison (L-Arb: 0.5): it gets the best of the chosen units within it.
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
    """Return PruneFL, whose clients train the units that reduce the loss most per unit of training time.

    Args:
        every: number of rounds between two choices of units; before each choice, clients train the whole model for one
            round.
        prunable: share of the units in use that one choice may drop, in (0, 1).
        rates: largest share of the model's parameters for each client: one number for all; a list, one number for each
            of clients 1, 2, ..., repeating; or a mapping from device name to number.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of pruning, such as `raafl.parts.RateSelect`; leave out every,
            prunable and rates then.
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
