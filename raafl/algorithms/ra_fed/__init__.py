"""RA-Fed (Wang et al., "Theoretical Convergence Guaranteed Resource-Adaptive Federated Learning with Mixed Heterogeneity").

KDD 2023, Algorithm 1. The neurons are split into K regions. In round q client n trains the regions of its mask m_{q,n}, as a
physically smaller model: ``theta_{q,n,t} = theta_{q,n,t-1} - gamma grad F_n(theta_{q,n,t-1}) * m_{q,n}``, T times. Then
for each region i with its clients N_q^i and their number Gamma_q^i, ``Delta_{q,n} = (theta_{q,n,0} - theta_{q,n,T}) / gamma``::

    theta_{q+1}^i = theta_q^i                                                      if Gamma_q^i = 0
    theta_{q+1}^i = theta_q^i - gamma / Gamma_q^i sum_{n in N_q^i} Delta_{q,n}^i   else

gamma cancels: the result is the mean of the trained values over the clients that cover a region; a region that no client covers
stays unchanged, bit for bit. Section 6.2 has K = 4 and three levels of masks: L-Arb (2 regions each), S-Arb (1), MIX-Arb (half 2,
half 1).

Choices that the paper leaves open:
- A region is an equal range of every axis (hidden neurons, channels, heads); all clients train parameters on no axis (the
  output's bias, norms over an uncut width), and the whole of a model that has no axes.
- The clients that have both regions train a weight between the two, and its mean is over these clients. (Counted by region, the
  mean would be over all clients with its second region, with Delta 0 from those without the first: RAM-Fed does that, see
  there. Here nothing is remembered, and a mean over more zeros would act as a lower learning rate.)
- MIX-Arb draws its half anew in each round, also with trained, coverage or rest, if `rest` allows it (see `regions.Regions`).
- Rounds that leave regions untrained ("periodically", section 6.2) are set by `trained` and `every`. Without them, and
  without `coverage` and `rest`, each client draws by itself, and regions are left out by chance.
- Figure 3: mask S-Arb with (coverage, trained) = (1, 4), (2, 4), (10, 1).
  Figure 4: mask S-Arb with (coverage, rest) = (1, 4), (2, 4); for tau 200 the authors' code keeps one assignment, in which nobody
  trains one of the regions: hold, full_first, trained 3, coverage 1 and 2.
- "All neuron regions are trained on all clients in the first round" (Remark 5) is `full_first`; it is off by default, since
  a client that has memory for one region cannot do that.
- The mean is over clients, not samples, as in eq. (1).
- C(.), which compresses the broadcast, is the config's ``compress.down`` (bf16, int8 or top_k), which every algorithm has, in
  both directions; see `raafl.compression.compressors`.
"""

from __future__ import annotations

from raafl.algorithms.ra_fed.regions import Regions
from raafl.core.algorithm import Algorithm, Local, Select
from raafl.core.sample import Sample
from raafl.errors import BadInput, refuse_unused
from raafl.parts.merge.mean import Mean
from raafl.parts.select.coverage import Level
from raafl.parts.trigger import AllReported


def ra_fed(
    mask: Level | list[int] = "L-Arb",
    regions: int = 4,
    trained: int | None = None,
    every: int = 1,
    coverage: int | None = None,
    rest: int | None = None,
    full_first: bool = False,
    rescale: bool = False,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
    hold: bool = False,
) -> Algorithm:
    """Return RA-Fed: clients train changing regions of the model, and each element is averaged over those who trained it.

    Args:
        mask: number of regions for each client: L-Arb = 2, S-Arb = 1, MIX-Arb = 2 for half of the clients and 1 for the
            others; or a list, one number for each of clients 1, 2, ..., repeating.
        regions: number K of regions into which the units of the model are divided.
        trained: number of regions that are trained in a round, if some are to be left out (S*); None = all of them.
        every: regions are left out in one of this many rounds; all regions are trained in the other rounds. 1 = regions
            are left out in each round. Needs trained.
        coverage: smallest number of clients that train each region in a round (Gamma*); None = clients are spread over the
            regions as evenly as the other settings allow.
        rest: largest number of rounds in a row in which a client does not train a region (tau_q); None = no limit.
        full_first: whether all clients train all regions in the first round, as far as their memory allows.
        rescale: multiply the activations of a narrowed layer by 1 / (kept share of its units) while training.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the regions, such as `raafl.parts.RateSelect`; leave mask to
            full_first at their defaults then. None = regions.
        hold: whether each client keeps its regions for the whole run. If trained is below regions, the other regions
            are then trained in the first round if full_first is true, else never.
    """
    return Algorithm(
        name="ra_fed",
        paper="Wang et al. 2023, RA-Fed",
        sample=Sample(cohort, concurrency),
        select=regions_of(
            Regions(mask, regions, trained, every, coverage, rest, full_first, hold=hold), cohort, submodel
        ),
        local=Local(rescale=rescale),
        trigger=AllReported(),
        merge=Mean(by_samples=False),
    )


def regions_of(regions: Regions, cohort: int | None, submodel: Select | None) -> Select:
    """Return the rule that chooses each client's submodel: the user's own if there is one, else RA-Fed's regions.

    Args:
        regions: RA-Fed's rule, which assigns regions of the model to clients.
        cohort: number of clients in a round; None = all.
        submodel: the user's own rule; None = use ``regions``.

    Raises:
        BadInput: a setting of ``regions`` would have no effect because of ``submodel`` or ``cohort``.
    """
    if submodel is not None:
        default = Regions(rounds=regions.rounds)
        names = ("mask", "regions", "trained", "every", "coverage", "rest", "full_first", "hold")
        refuse_unused(
            "submodel says what each client trains",
            **{name: (getattr(regions, name), getattr(default, name)) for name in names},
        )
        return submodel
    if cohort is not None and regions.is_controlled:
        raise BadInput(
            f"cohort is {cohort}, but trained, coverage, rest and hold need all clients in each round: leave out "
            "cohort, or these fields"
        )
    return regions
