"""OAP (Zhou et al., "Convergence of Heterogeneous Federated Learning with Arbitrary Adaptive Online Model Pruning", 2022).

In round q client n prunes the global model for itself, ``theta_{q,n,0} = theta_q * m_{q,n}`` with the mask
``m_{q,n} = P(theta_q, n)`` decided anew from what the model is now (online), and trains what is left for T steps. An element
i becomes the mean of the clients that kept it (Algorithm 1):
``theta_{q+1}^(i) = 1/|N_q^(i)| sum_{n in N_q^(i)} theta_{q,n,T}^(i)``; what none kept stays.

Here, structured: P keeps the units (neurons, channels, heads) of the largest L2 norm of each axis, so that the submodel
is small and dense; the paper masks single weights or neurons.

The paper leaves open, and this does:
- The clients' pruning levels, with 1, 3/4, 1/2 and 1/4 of the width in turn. Convergence needs every weight trained by
  somebody (Gamma_min >= 1): with all rates below 1 the units of small norm are never trained again.
- All clients count alike.

At rate 1 this is unweighted FedAvg, bit for bit.
"""

from __future__ import annotations

from raafl.core.algorithm import Algorithm, Local, Select
from raafl.core.sample import Sample
from raafl.parts.merge.mean import Mean
from raafl.parts.select.rate_select import Rates, by_rate
from raafl.parts.trigger import AllReported

LEVELS = (1.0, 0.75, 0.5, 0.25)


def oap(
    rates: Rates | None = None,
    by_samples: bool = False,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Make OAP.

    Args:
        rates: share of the width at each client: one for all; a list dealt to clients 1, 2, ... and again from its beginning;
            or by name of device. None = 1, 3/4, 1/2, 1/4 in turn.
        by_samples: weigh by |D_n|; False = every client alike, as in the paper.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains instead (P), such as `raafl.parts.RateSelect`; rates must be left out then.
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
