"""RA-Fed (Wang et al., "Theoretical Convergence Guaranteed Resource-Adaptive Federated Learning with Mixed Heterogeneity").

KDD 2023, Algorithm 1. The neurons are split into K regions. In round q client n trains those of its mask m_{q,n}, as a
physically smaller model: ``theta_{q,n,t} = theta_{q,n,t-1} - gamma grad F_n(theta_{q,n,t-1}) * m_{q,n}``, T times. Then
for each region i with N_q^i its clients and Gamma_q^i their number, ``Delta_{q,n} = (theta_{q,n,0} - theta_{q,n,T}) / gamma``::

    theta_{q+1}^i = theta_q^i                                                      if Gamma_q^i = 0
    theta_{q+1}^i = theta_q^i - gamma / Gamma_q^i sum_{n in N_q^i} Delta_{q,n}^i   else

gamma cancels: that is the mean of the trained values over the clients that cover a region, and what nobody covers is
kept, bit for bit. Section 6.2 has K = 4 and three levels of masks: L-Arb (2 regions each), S-Arb (1), MIX-Arb (half 2, half 1).

The paper leaves open, and this does:
- A region is an equal range of every axis (hidden neurons, channels, heads); what lies on no axis (the output's bias, norms
  over an uncut width) is trained by all, and so is the whole of a model that has no axes.
- A weight between two regions is held by the clients that have both, and takes the mean over those. (Counted by region, the
  mean would be over all that have its second region, with Delta 0 from those without the first: RAM-Fed does that, see
  there. Here nothing is remembered, and a mean over more zeros would be a lower learning rate.)
- MIX-Arb's half is another in each round, also under control, where `rest` allows it (see `regions.Regions`).
- Which regions are left untrained, and when ("periodically", section 6.2): `trained` and `every`. Without them, and
  without `coverage` and `rest`, each client draws by itself, and regions are left out as chance will have it.
- Figure 3: mask S-Arb with (coverage, trained) = (1, 4), (2, 4), (10, 1).
  Figure 4: mask S-Arb with (coverage, rest) = (1, 200), (2, 200), (1, 4), (2, 4).
- "All neuron regions are trained on all clients in the first round" (Remark 5) is `full_first`; not by default, since
  a client that has room for one region cannot.
- The mean is over clients, not over samples, as eq. (1) has it.
- C(.), which compresses the broadcast, is the config's ``compress.down`` (bf16, int8 or top_k), there for every algorithm and
  both ways; see `raafl.compression.compressors`.
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
) -> Algorithm:
    """Make RA-Fed.

    Args:
        mask: level of the masks: L-Arb, S-Arb, MIX-Arb, or the number of regions of clients 1, 2, ... as a list, dealt again
            from its beginning.
        regions: regions of the model (K).
        trained: regions trained in a round that leaves some out (S*); None = all.
        every: of so many rounds, the last leaves regions out.
        coverage: clients that train a trained region, at least (Gamma*); None = 1 where trained or rest is given, else chance.
        rest: rounds in a row for which a client may leave a region alone (tau_q); None = any number.
        full_first: the first round has all regions on all clients, as far as their memory allows.
        rescale: scale a cut layer's activation by 1/keep-fraction while training.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains instead of regions, such as `raafl.parts.RateSelect`; all before cohort must be left as it
            is then. None = regions.
    """
    return Algorithm(
        name="ra_fed",
        paper="Wang et al. 2023, RA-Fed",
        sample=Sample(cohort, concurrency),
        select=regions_of(Regions(mask, regions, trained, every, coverage, rest, full_first), cohort, submodel),
        local=Local(rescale=rescale),
        trigger=AllReported(),
        merge=Mean(by_samples=False),
    )


def regions_of(regions: Regions, cohort: int | None, submodel: Select | None) -> Select:
    """Return ``submodel`` where there is one, else ``regions``.

    Raises:
        BadInput: ``submodel``, or ``cohort``, leaves what was asked of ``regions`` without effect.
    """
    if submodel is not None:
        default = Regions(rounds=regions.rounds)
        names = ("mask", "regions", "trained", "every", "coverage", "rest", "full_first")
        refuse_unused(
            "submodel says what each client trains",
            **{name: (getattr(regions, name), getattr(default, name)) for name in names},
        )
        return submodel
    if cohort is not None and regions.is_controlled:
        raise BadInput(
            f"cohort is {cohort}, but trained, coverage and rest say what all clients do together: leave out the one or the "
            "others"
        )
    return regions
