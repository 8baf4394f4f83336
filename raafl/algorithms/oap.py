"""OAP (Zhou et al., "Convergence of Heterogeneous Federated Learning with Arbitrary Adaptive Online Model Pruning", 2022).

In round q client n prunes the global model for itself, ``theta_{q,n,0} = theta_q * m_{q,n}``, with a mask
``m_{q,n} = P(theta_q, n)`` that is chosen anew from the current model (online), and trains the rest for T steps. An element
i becomes the mean over the clients that kept it (Algorithm 1):
``theta_{q+1}^(i) = 1/|N_q^(i)| sum_{n in N_q^(i)} theta_{q,n,T}^(i)``; an element that no client kept stays unchanged.

Here pruning is structured: P keeps the units (neurons, channels, heads) with the largest L2 norm on each axis, so that the
submodel is small and dense; the paper masks single weights or neurons.

Choices that the paper leaves open:
- The clients' pruning levels: 1, 3/4, 1/2 and 1/4 of the width in turn. Convergence needs every weight trained by
  some client (Gamma_min >= 1): with all rates below 1 the units of small norm are never trained again.
- All clients have equal weights.

At rate 1 this is unweighted FedAvg, bit for bit.
"""

from __future__ import annotations

from raafl.algorithm import Algorithm, AllReported, Local, Mean, Rates, Sample, Select
from raafl.parts.select.rate_select import by_rate

LEVELS = (1.0, 0.75, 0.5, 0.25)


def oap(
    rates: Rates | None = None,
    by_samples: bool = False,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return OAP, whose clients train the units with the largest weights of each layer.

    Args:
        rates: share of each layer's units that a client trains: one number for all; a list, one number for each of
            clients 1, 2, ..., repeating; or a mapping from device name to number. None = the list 1, 3/4, 1/2, 1/4.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally, as in the paper.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of pruning (P), such as `raafl.parts.RateSelect`; leave out rates
            then.
    """
    return Algorithm(
        name="oap",
        paper="Zhou et al. 2022",
        sample=Sample(cohort, concurrency),
        select=by_rate(submodel, "magnitude", rates, LEVELS, "server"),
        local=Local(),
        trigger=AllReported(),
        merge=Mean(by_samples=by_samples),
    )
