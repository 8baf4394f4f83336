"""IST (Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training", VLDB 2022).

In each round the hidden neurons are dealt out at random, every one to exactly one of S sites (section 3.1); inputs and outputs
are everybody's. A weight between two hidden neurons of one site is trained by that site alone, for T local steps; one between
neurons of two sites by nobody in this round. Then trained weights are copied back, and the neurons are dealt anew.

The paper leaves open, or this does otherwise:
- Parameters that several sites have (the output bias, norms over an uncut width) become their mean, all sites alike.
- S is the number of clients in the round, unless `subnets` says so.
- Any axis is dealt out: channels, heads. Of one with fewer units than sites, each site has one unit, some the same.
- Neurons are shared out evenly, whatever the clients' devices can do (Zhang et al. call it "uniformly assigned").

With one subnet this is unweighted FedAvg, bit for bit.
"""

from __future__ import annotations

from raafl.algorithms.ist.random_partition import DisjointUnits
from raafl.core.algorithm import Algorithm, Local, Select
from raafl.core.sample import Sample
from raafl.errors import positive, refuse_unused
from raafl.parts.merge.mean import Mean
from raafl.parts.trigger import AllReported


def ist(
    subnets: int | None = None,
    rescale: bool = False,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Make IST.

    Args:
        subnets: number of disjoint subnets in a round (S); with fewer than clients, several train the same one. None = one for
            each client of the round.
        rescale: scale a cut layer's activation by 1/keep-fraction while training.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains instead, such as `raafl.parts.RateSelect`; subnets must be left out then.
    """
    if submodel is not None:
        refuse_unused("submodel says what each client trains", subnets=(subnets, None))
    positive("subnets", subnets, optional=True)
    return Algorithm(
        name="ist",
        paper="Yuan et al. 2022",
        sample=Sample(cohort, concurrency),
        select=submodel or DisjointUnits(subnets, cohort),
        local=Local(rescale=rescale),
        trigger=AllReported(),
        merge=Mean(by_samples=False),
    )
