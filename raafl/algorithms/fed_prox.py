"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020).

FedAvg whose clients minimise ``F_n(theta) + mu/2 ||theta - theta_t||^2`` (eq. 2). With mu = 0 it is FedAvg.
"""

from __future__ import annotations

from raafl.algorithm import Algorithm, AllReported, Full, Local, Mean, Sample, Select


def fed_prox(
    prox: float = 0.01,
    cohort: int | None = None,
    concurrency: int | None = None,
    by_samples: bool = True,
    submodel: Select | None = None,
) -> Algorithm:
    """Return FedProx: FedAvg with a term in the clients' loss that keeps them close to the received model.

    Args:
        prox: weight of the proximal term (mu), at least 0.
        cohort: number of clients in a round, drawn uniformly (K in Algorithm 2); None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
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
