"""CA2FL (Wang et al., "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update Calibration").

ICLR 2024, Algorithm 2. Clients work as in FedBuff. The server caches each client's latest update, h_t^i, 0 before its first, and
calibrates the buffer's updates with the mean of all caches::

    on arrival of Delta_t^i:   Delta_t <- Delta_t + (Delta_t^i - h_t^i),   h_{t+1}^i = Delta_t^i
    after K arrivals:          v_t = h_t + Delta_t / K,   x_{t+1} = x_t + eta v_t,   h_{t+1} = 1/N sum_i h_{t+1}^i

That is RAM-Fed's memory (`raafl.parts.merge.remembered`) with N = all clients of the run, merged when K updates wait.

The paper could not be read here: the equations are those of three implementations by others, which agree. Hence experimental.

Choices that the paper leaves open:
- A client that reports twice into one buffer counts twice in K, and its cache is the later update, as in those implementations.
- The updates in the buffer when the run ends are merged, divided by their number.
- Submodels (no paper has them): K counts the buffer's updates that cover an element, and h_t^i is 0 where client i has never
  trained. An element that no update of the buffer covers still moves by eta h_t. Rows are owned as in RAM-Fed.
- Running statistics of norms are averaged over the buffer and not cached, since they are no direction of descent.
- Memory: one copy of the trained part for each client, in RAM or in files. The paper's variant with less memory, MF-CA2FL, is
  not here.
"""

from __future__ import annotations

from typing import Literal

from raafl.algorithm import Algorithm, Buffered, Full, Local, Sample, Select
from raafl.parts.merge.remembered import Remembered, memory_folder_of


def ca2fl(
    buffer_size: int = 10,
    server_lr: float = 1.0,
    memory: Literal["ram", "disk"] = "ram",
    memory_folder: str | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return CA2FL, which merges every K updates and corrects their mean by the latest update of every client.

    Args:
        buffer_size: number of updates in a merge (K).
        server_lr: server learning rate (eta), in (0, 1].
        memory: storage of each client's latest update (h_t^i): ram (memory of the server's device), or disk (files that
            are deleted at the end).
        memory_folder: folder of these files; None = the system's folder for temporary files.
        cohort: number of clients that the server keeps at work at any time, drawn uniformly (the concurrency M_c); None = all.
        concurrency: upper limit on the clients at work, in case the cohort is larger; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    return Algorithm(
        name="ca2fl",
        paper="Wang et al. 2024, CA2FL",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Local(),
        trigger=Buffered(buffer_size),
        merge=Remembered(server_lr, folder=memory_folder_of(memory, memory_folder), of_all=True),
    )
