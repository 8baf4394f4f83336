"""FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017).

Each round a cohort trains the full model; when all have reported, ``theta = sum_n |D_n| theta_n / sum_n |D_n|``
(Algorithm 1). With a cohort smaller than the fleet this is the papers' SyncFL.
"""

from __future__ import annotations

from raafl.core.algorithm import Algorithm, Local, Select
from raafl.core.sample import Sample
from raafl.parts.lora import LoRAMerge, with_lora
from raafl.parts.merge.mean import Mean
from raafl.parts.select.submodels import Full
from raafl.parts.trigger import AllReported


def fed_avg(
    cohort: int | None = None,
    concurrency: int | None = None,
    by_samples: bool = True,
    submodel: Select | None = None,
    lora: LoRAMerge | None = None,
) -> Algorithm:
    """Make FedAvg.

    Args:
        cohort: clients in a round, drawn uniformly (C*K in Algorithm 1); None = all.
        concurrency: how many of them work at a time; None = no cap.
        by_samples: weigh by |D_n| (n_k in Algorithm 1); False = every client alike.
        submodel: what each client trains, such as `raafl.parts.RateSelect`; None = the whole model.
        lora: how adapters are merged (docs/submodels.md); None = A and B apart, each rank over those who have it.
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
    return with_lora(algorithm, lora)
