"""RAM-Fed (Wang et al., "Theoretical Convergence Guaranteed Resource-Adaptive Federated Learning with Mixed Heterogeneity").

KDD 2023, Algorithm 2. Clients train arbitrary regions as in RA-Fed (`raafl.algorithms.ra_fed`). The server remembers each
client's latest update of each region, u_{q,n}^i, 0 before its first, and uses it if the client sends no new one::

    v_q^i = 1/N sum_n u_{q,n}^i                                                                    if Gamma_q^i = 0
    v_q^i = 1/N sum_n u_{q,n}^i + 1/Gamma_q^i sum_{n in N_q^i} (Delta_{q,n}^i - u_{q,n}^i)         else
    theta_{q+1}^i = theta_q^i - gamma v_q^i
    u_{q+1,n}^i = Delta_{q,n}^i  if n in N_q^i,  else u_{q,n}^i                                     (eq. 4)

The memory is of each client *and* each region: N copies of the model on the server, see `raafl.parts.merge.remembered`.

Choices that the paper leaves open:
- They are as in RA-Fed, except for weights between two regions: the region of its output neuron owns a weight. A client with
  this region and without the other covers the weight with Delta 0, which is the gradient of a masked neuron. Otherwise a weight
  that no client trains again after its first update would be moved by that update forever, and the run would diverge.
- Memories become stale (Remark 5, Figure 4). `max_age` deletes them after a number of merges; `rest` prevents them.
- Running statistics of norms are averaged and not remembered, since they are no direction of descent.
- With a `cohort`, N is the number of clients drawn so far, not of all clients as in the paper: a client that was never drawn
  does not count as an update of 0, so that the first rounds take larger steps than eq. (4).
- C(.) on the broadcast is the config's ``compress.down``, as in RA-Fed. With ``compress.up`` the server remembers updates as
  it received them.
- trigger "each" is an asynchronous RAM-Fed, which no paper has. Every update is merged as it arrives: N_q is its client alone, so
  v = mean of all memories + (Delta_n - u_n), Delta_n against the version from which that client started. A region that it did not
  train moves by the mean memory. The step is 1/N, so that N arrivals together move the model as one round does, times
  s(t - tau): a late update moves it less, but is remembered in full, since it is still its client's latest. A
  client's q is then the number of its own merged updates; S* and Gamma* hold among clients at the same q.
"""

from __future__ import annotations

from typing import Literal

from raafl.algorithm import Algorithm, Kind, Local, Sample, Select, Staleness
from raafl.algorithms.ra_fed import Regions, regions_of
from raafl.parts.merge.remembered import Remembered, memory_folder_of
from raafl.parts.select.coverage import Level
from raafl.parts.trigger import all_or_each


def ram_fed(
    mask: Level | list[int] = "L-Arb",
    regions: int = 4,
    trained: int | None = None,
    every: int = 1,
    coverage: int | None = None,
    rest: int | None = None,
    full_first: bool = False,
    rescale: bool = False,
    trigger: Literal["all", "each"] = "all",
    server_lr: float | None = None,
    staleness: Kind = "constant",
    staleness_a: float = 0.5,
    staleness_b: float = 4.0,
    max_age: int | None = None,
    memory: Literal["ram", "disk"] = "ram",
    memory_folder: str | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
    hold: bool = False,
) -> Algorithm:
    """Return RAM-Fed: clients train changing regions of the model, and the server remembers their latest updates of each.

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
        trigger: time of a merge: all (when the whole round has reported, as in the paper) or each (at each arrival).
        server_lr: factor on the server's step v, in (0, 1]; None = 1 for trigger all, 1/N (N clients) for trigger each.
        staleness: form of the function s(.) by which late updates count less, for trigger each: constant, polynomial or hinge.
        staleness_a: parameter a of the polynomial and hinge functions.
        staleness_b: parameter b of the hinge function.
        max_age: number of merges after which a stored update is set to 0; None = never.
        memory: storage of each client's latest update: ram (memory of the server's device), or disk (files that are deleted
            at the end).
        memory_folder: folder of these files; None = the system's folder for temporary files.
        cohort: number of clients in a round, or at work in an asynchronous run, drawn uniformly; None = all. With a
            cohort, N is the number of clients drawn so far.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the regions, such as `raafl.parts.RateSelect`; leave mask to
            full_first at their defaults then. None = regions.
        hold: whether each client keeps its regions for the whole run. If trained is below regions, the other regions
            are then trained in the first round if full_first is true, else never.
    """
    server_lr = 1.0 if trigger == "all" and server_lr is None else server_lr
    folder = memory_folder_of(memory, memory_folder)
    rounds: Literal["client", "server"] = "server" if trigger == "all" else "client"
    wanted = Regions(mask, regions, trained, every, coverage, rest, full_first, rounds, hold)
    return Algorithm(
        name="ram_fed",
        paper="Wang et al. 2023, RAM-Fed",
        sample=Sample(cohort, concurrency),
        select=regions_of(wanted, cohort, submodel),
        local=Local(rescale=rescale),
        trigger=all_or_each(trigger, staleness),
        merge=Remembered(server_lr, Staleness(staleness, staleness_a, staleness_b), max_age, folder),
    )
