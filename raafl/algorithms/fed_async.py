"""FedAsync (Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", 2019); called FedSync in Fed-RAA's tables.

Each update of the full model is mixed into the global one as it arrives:
``theta_t = (1 - alpha_t) theta_{t-1} + alpha_t theta_new`` with ``alpha_t = alpha * s(t - tau)`` (Algorithm 1, section 5.2).
Clients may add a proximal term of weight rho to their loss (the regularised objective of Algorithm 1); by default it is 0.
"""

from __future__ import annotations

from raafl.algorithm import Algorithm, EachArrival, Full, Kind, Local, Mean, Sample, Select, Staleness
from raafl.parts.lora import LoRAMerge, with_lora


def fed_async(
    alpha: float = 0.75,
    staleness: Kind = "constant",
    staleness_a: float = 0.5,
    staleness_b: float = 4.0,
    prox: float = 0.0,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
    lora: LoRAMerge | None = None,
) -> Algorithm:
    """Return FedAsync, which mixes each update into the global model as soon as it arrives.

    Args:
        alpha: weight of an arriving model in the mix with the global one (alpha), in (0, 1].
        staleness: form of the function s(.) by which late updates count less: constant, polynomial or hinge.
        staleness_a: parameter a of the polynomial and hinge functions.
        staleness_b: parameter b of the hinge function.
        prox: weight of the proximal term, which keeps a client's values close to the received ones (rho).
        cohort: number of clients that the server keeps at work at any time, drawn uniformly; None = all.
        concurrency: upper limit on the clients at work, in case the cohort is larger; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
        lora: rule for merging LoRA adapters (docs/lora.md); None = average A and B separately, each rank over the
            clients that have it.
    """
    algorithm = Algorithm(
        name="fed_async",
        paper="Xie et al. 2019",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Local(prox=prox),
        trigger=EachArrival(),
        merge=Mean(alpha, Staleness(staleness, staleness_a, staleness_b), by_samples=False),
    )
    return with_lora(algorithm, lora)
