"""IST (Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training", VLDB 2022).

In each round every hidden neuron is assigned at random to exactly one of S sites (section 3.1); all sites share inputs and
outputs. A weight between two hidden neurons of one site is trained by that site alone, for T local steps; a weight between
neurons of two sites is not trained in this round. Then trained weights are copied back, and the neurons are assigned anew.

Choices that the paper leaves open, and deviations from it:
- Parameters that several sites have (the output bias, norms over an uncut width) become their unweighted mean.
- S is the number of clients in the round, unless `subnets` says otherwise.
- Any axis is partitioned: channels and heads, too. If it has fewer units than sites, each site has one unit, and some share it.
- Sites get equal numbers of neurons, whatever the clients' devices can do (Zhang et al. call it "uniformly assigned").

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
    """Return IST: in each round the model's units are divided at random, and each client trains a subnet of its own.

    Args:
        subnets: number of disjoint subnets in a round (S); if there are more clients, several of them train the same
            subnet. None = one for each client of the round.
        rescale: multiply the activations of a narrowed layer by 1 / (kept share of its units) while training.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the subnets, such as `raafl.parts.RateSelect`; leave out
            subnets then.
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
