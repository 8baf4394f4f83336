"""FedOpt: FedAdam, FedYogi, FedAdagrad (Reddi et al., "Adaptive Federated Optimization", ICLR 2021).

Rounds are those of FedAvg, but the mean of the clients' deltas is the pseudo-gradient of an adaptive server optimizer
(Algorithm 2).
"""

from __future__ import annotations

from raafl.algorithm import Algorithm, AllReported, BadInput, Full, Local, Sample, Select
from raafl.parts.merge.server_optimizer import ServerKind, ServerOptimizer


def fed_opt(
    optimizer: ServerKind = "adam",
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return FedOpt: the server applies Adam, Yogi or Adagrad to the mean change of a round.

    Args:
        optimizer: optimizer of the server: adam, yogi or adagrad.
        server_lr: server learning rate (eta).
        beta1: decay of the first moment (beta_1).
        beta2: decay of the second moment (beta_2); leave it out for adagrad, which has none.
        tau: constant added to the square root in the denominator (tau, the degree of adaptivity).
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    if optimizer == "adagrad" and beta2 != 0.99:
        raise BadInput(f"beta2 is {beta2}, but adagrad has no beta2: leave beta2 out, or use adam or yogi")
    return Algorithm(
        name="fed_opt",
        paper="Reddi et al. 2021",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Local(),
        trigger=AllReported(),
        merge=ServerOptimizer(optimizer, server_lr, beta1, beta2, tau),
    )
