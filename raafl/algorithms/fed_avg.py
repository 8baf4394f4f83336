"""FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017).

In each round a cohort trains the full model; once all have reported, the model becomes their weighted mean
``theta = sum_n |D_n| theta_n / sum_n |D_n|`` (Algorithm 1). With a cohort smaller than the fleet this is what later papers
call SyncFL.
"""

from __future__ import annotations

from raafl.algorithm import Algorithm, AllReported, Full, Local, Mean, Sample, Select
from raafl.parts.lora import LoRAMerge, with_lora


def fed_avg(
    cohort: int | None = None,
    concurrency: int | None = None,
    by_samples: bool = True,
    submodel: Select | None = None,
    lora: LoRAMerge | None = None,
    prune_ranks: float | None = None,
    prune_penalty: float = 0.0,
) -> Algorithm:
    """Return FedAvg, which averages the models of a round's clients.

    Args:
        cohort: number of clients in a round, drawn uniformly (C*K in Algorithm 1); None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        by_samples: whether to weight clients by their numbers of samples |D_n| (n_k in Algorithm 1); False = equally.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
        lora: rule for merging LoRA adapters (docs/lora.md); None = average A and B separately, each rank over the
            clients that have it.
        prune_ranks: share of its LoRA ranks that a client keeps once training has made the other ranks small (HetLoRA's
            gamma); only with lora hetlora or hetlora_paper. None = all ranks stay.
        prune_penalty: weight of the loss that shrinks the ranks to be removed (HetLoRA's lambda).
    """
    algorithm = Algorithm(
        name="fed_avg",
        paper="McMahan et al. 2017",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Local(),
        trigger=AllReported(),
        merge=Mean(by_samples=by_samples),
    )
    return with_lora(algorithm, lora, prune_ranks, prune_penalty)
