"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020).

FedAvg whose clients minimise ``F_n(theta) + mu/2 ||theta - theta_t||^2`` (eq. 2). mu = 0 is FedAvg.
"""

from __future__ import annotations

from raafl.core.algorithm import Algorithm, Local, Select
from raafl.core.sample import Sample
from raafl.parts.merge.mean import Mean
from raafl.parts.select.submodels import Full
from raafl.parts.trigger import AllReported


def fed_prox(
    prox: float = 0.01,
    cohort: int | None = None,
    concurrency: int | None = None,
    by_samples: bool = True,
    submodel: Select | None = None,
) -> Algorithm:
    """Make FedProx.

    Args:
        prox: weight of the proximal term (mu), 0 or more.
        cohort: clients in a round, drawn uniformly (K in Algorithm 2); None = all.
        concurrency: how many of them work at a time; None = no cap.
        by_samples: weigh by |D_n|; False = every client alike.
        submodel: what each client trains, such as `raafl.parts.RateSelect`; None = the whole model.
    """
    return Algorithm(
        name="fed_prox",
        paper="Li et al. 2020",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Local(prox=prox),
        trigger=AllReported(),
        merge=Mean(by_samples=by_samples),
    )
