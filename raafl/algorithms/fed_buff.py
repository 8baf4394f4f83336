"""FedBuff (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022).

Clients train the full model without waiting for each other and send ``Delta_i``, their trained values minus the values
*they* received. Once K updates have arrived: ``theta <- theta + eta_g / K * sum_i s(staleness_i) Delta_i`` with
``s = 1/sqrt(1 + staleness)`` (Algorithm 1, section 5). Updates still in the buffer when the run ends are merged as well,
divided by their number. With K = 1 every delta is applied at once.

With `server_optimizer` the mean without eta_g is the pseudo-gradient of a FedOpt step (Reddi et al. 2021, Algorithm 2): the
"FedBuff with FedOpt" that TimelyFL compares with (its Table 1).
"""

from __future__ import annotations

from raafl.algorithm import Algorithm, Buffered, Deltas, Full, Kind, Local, Merge, Sample, Select, Staleness
from raafl.parts.lora import LoRAMerge, with_lora
from raafl.parts.merge.server_optimizer import ServerKind, ServerOptimizer


def fed_buff(
    buffer_size: int = 10,
    server_lr: float | None = None,
    staleness: Kind = "polynomial",
    staleness_a: float = 0.5,
    staleness_b: float = 4.0,
    server_optimizer: ServerKind | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
    lora: LoRAMerge | None = None,
    clients_at_work: float | None = None,
) -> Algorithm:
    """Return FedBuff, which waits for K updates and adds the mean of their changes to the model.

    Args:
        buffer_size: number of updates in a merge (K).
        server_lr: server learning rate (eta_g, or eta of the server optimizer); None = 1, or 0.01 with a server
            optimizer.
        staleness: form of the function s(.) by which late updates count less; polynomial with a = 0.5 is the paper's
            1/sqrt(1 + staleness).
        staleness_a: parameter a of the polynomial and hinge functions.
        staleness_b: parameter b of the hinge function.
        server_optimizer: optimizer of the server, adam, yogi or adagrad (FedOpt); None = add the mean change itself.
        cohort: number of clients that the server keeps at work at any time, drawn uniformly (the paper's concurrency M_c); None =
            all.
        concurrency: upper limit on the clients at work, in case the cohort is larger; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
        lora: rule for merging LoRA adapters (docs/lora.md); None = average A and B separately, each rank over the
            clients that have it.
        clients_at_work: mean number of clients at work for which buffer_size is meant; K then follows the measured number, from
            half of buffer_size to twice, so that the mean staleness stays. None = K never changes.
    """
    stale = Staleness(staleness, staleness_a, staleness_b)
    merge: Merge
    if server_optimizer is None:
        merge = Deltas(1.0 if server_lr is None else server_lr, stale)
    else:
        lr = 0.01 if server_lr is None else server_lr
        merge = ServerOptimizer(server_optimizer, lr, staleness=stale, by_samples=False)
    algorithm = Algorithm(
        name="fed_buff",
        paper="Nguyen et al. 2022",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Local(),
        trigger=Buffered(buffer_size, clients_at_work),
        merge=merge,
    )
    return with_lora(algorithm, lora)
