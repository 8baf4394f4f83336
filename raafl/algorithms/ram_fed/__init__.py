"""RAM-Fed (Wang et al., "Theoretical Convergence Guaranteed Resource-Adaptive Federated Learning with Mixed Heterogeneity").

KDD 2023, Algorithm 2. Clients train arbitrary regions as in RA-Fed (`raafl.algorithms.ra_fed`). The server remembers each
client's latest update of each region, u_{q,n}^i, 0 before its first, and uses it where none is fresh::

    v_q^i = 1/N sum_n u_{q,n}^i                                                                    if Gamma_q^i = 0
    v_q^i = 1/N sum_n u_{q,n}^i + 1/Gamma_q^i sum_{n in N_q^i} (Delta_{q,n}^i - u_{q,n}^i)         else
    theta_{q+1}^i = theta_q^i - gamma v_q^i
    u_{q+1,n}^i = Delta_{q,n}^i  if n in N_q^i,  else u_{q,n}^i                                     (eq. 4)

The memory is of each client *and* each region: N copies of the model on the server, see `memory.Remembered`.

The paper leaves open, and this does:
- What RA-Fed leaves open is done as there, but for weights between two regions: the region of its output neuron owns a
  weight. A client that has this region and not the other covers the weight with Delta 0, which is what a masked
  neuron's gradient is. Else a weight that no client holds whole again after its first update would be moved by
  that update for ever, and the run diverges.
- Memories grow old (Remark 5, Figure 4). `max_age` forgets them after so many merges; `rest` sees to it that there are none.
- Running statistics of norms are averaged and not remembered: they are no direction to go on in.
- With a `cohort`, N is the number of clients that have been drawn so far, not the paper's of all: until each has had its turn,
  those unheard of do not count as updates of 0, so that the first rounds step further than eq. (4) has it.
- C(.) on the broadcast is the config's ``compress.down``, as in RA-Fed. With ``compress.up`` the memory is of updates as they
  were received.
- trigger "each" is an asynchronous RAM-Fed, which no paper has. Every update is merged as it arrives: N_q is its client alone, so
  v = mean of all memories + (Delta_n - u_n), Delta_n against the version that client started from. A region that it did not
  train moves by the mean memory. The step is 1/N, so that N arrivals together move the model as one round does, times
  s(t - tau): a late update moves it less, and is remembered whole, since it is its client's latest all the same. A
  client's q is then the number of its own merged updates; S* and Gamma* hold among clients at the same q.
"""

from __future__ import annotations

from tempfile import gettempdir
from typing import Literal

from raafl.algorithms.ra_fed import regions_of
from raafl.algorithms.ra_fed.regions import Regions
from raafl.algorithms.ram_fed.memory import Remembered
from raafl.core.algorithm import Algorithm, Local, Select
from raafl.core.sample import Sample
from raafl.errors import one_of, refuse_unused
from raafl.parts.merge.staleness import Kind, Staleness
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
) -> Algorithm:
    """Make RAM-Fed.

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
        trigger: all (the paper's rounds) or each (asynchronous).
        server_lr: factor of v, in (0, 1]; None = 1 in rounds, 1/N where each arrival is merged.
        staleness: s(.) where each arrival is merged: constant, polynomial or hinge.
        staleness_a: a of polynomial and hinge.
        staleness_b: b of hinge.
        max_age: merges after which a memory is forgotten; None = never.
        memory: where each client's latest update lies: ram (of the server's device), or disk, in files that are gone at the end.
        memory_folder: the folder with these files; None = the system's for temporary files.
        cohort: clients in a round (or kept at work), drawn uniformly; None = all. N is not the paper's then, see above.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains instead of regions, such as `raafl.parts.RateSelect`; mask to full_first must be left as
            they are then. None = regions.
    """
    server_lr = 1.0 if trigger == "all" and server_lr is None else server_lr
    folder = _folder(memory, memory_folder)
    rounds: Literal["client", "server"] = "server" if trigger == "all" else "client"
    wanted = Regions(mask, regions, trained, every, coverage, rest, full_first, rounds)
    return Algorithm(
        name="ram_fed",
        paper="Wang et al. 2023, RAM-Fed",
        sample=Sample(cohort, concurrency),
        select=regions_of(wanted, cohort, submodel),
        local=Local(rescale=rescale),
        trigger=all_or_each(trigger, staleness),
        merge=Remembered(server_lr, Staleness(staleness, staleness_a, staleness_b), max_age, folder),
    )


def _folder(memory: str, folder: str | None) -> str | None:
    """Return where files are to lie; None = there are none."""
    one_of("memory", memory, ("ram", "disk"))
    if memory == "disk":
        return folder or gettempdir()
    refuse_unused("with memory ram there are no files", memory_folder=(folder, None))
    return None
