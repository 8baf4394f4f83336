"""FIARSE (Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction", NeurIPS 2024).

Client i of size r_i keeps the share r_i of the elements with the largest magnitude, over all layers together (`mask` elements)::

    w_eff = w 1[|w| >= tau],   dL/dw = dL/dw_eff (1 + 2 tau |w| / (|w| + tau)^2) 1[|w| >= tau]

with tau the smallest kept magnitude of the model that the client was sent: the second factor is the gradient of the mask itself,
which is a function of the weight. The server then moves each element by the mean over the clients that changed it::

    theta <- theta + eta sum_i Delta_i / #{i : Delta_i != 0}

**These submodels are not physically smaller**: a client holds, runs, receives and sends the whole model, most of it at 0. With
`mask` units the kept parts are whole units with the largest weights, cut to a small model, as in OAP (`raafl.algorithms.oap`): that
is physically smaller, and is not the paper's, nor has it the mask's gradient.

The equations are those of the authors' code (HarliWu/FIARSE); the paper's text could not be read here.

Choices that are left open, and differences:
- Elements of linear, convolutional and embedding layers are masked, those of norms are not, as in the authors' code.
- At size 1 nothing is masked, and tau is 0; the authors' code takes the smallest magnitude, whose gradient factor is nearly 1.
- An element whose change is exactly 0 does not count, whether it was masked or not, as in the authors' code.
- Running statistics get the same mean without eta.
- Asynchronous runs (`buffer_size`) are no paper's: deltas are buffered as in FedBuff, without a staleness factor.
"""

from __future__ import annotations

from typing import Literal

from raafl.algorithms.fiarse.elements import ChangedMean, ImportanceAware, ShareOfElements
from raafl.core.algorithm import Algorithm, Local, Merge, Select
from raafl.core.sample import Sample
from raafl.errors import one_of
from raafl.parts.merge.mean import Deltas, Staleness
from raafl.parts.select.rate_select import Rates, RateSelect
from raafl.parts.trigger import AllReported, Buffered

SIZES = [1.0, 0.25, 0.0625, 0.015625]
"""Shares of the parameters of the paper's four kinds of clients."""

Mask = Literal["elements", "units"]


def fiarse(
    mask: Mask = "elements",
    rates: Rates | None = None,
    server_lr: float = 1.0,
    buffer_size: int | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Return FIARSE, whose clients train the weights (or units) with the largest magnitudes.

    Args:
        mask: granularity of the mask: elements (single weights, as in the paper; tensors keep their size) or units (such
            as whole neurons; tensors become smaller).
        rates: share of the parameters that a client trains: one number for all; a list, one number for each of clients
            1, 2, ..., repeating; or a mapping from device name to number. None = the list 1, 1/4, 1/16, 1/64.
        server_lr: server learning rate (eta).
        buffer_size: number of updates in a merge of an asynchronous run; None = synchronous rounds.
        cohort: number of clients in a round, or at work in an asynchronous run, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
    """
    one_of("mask", mask, Mask)
    shares = list(SIZES) if rates is None else rates
    select: Select = ShareOfElements(shares)
    merge: Merge = ChangedMean(server_lr)
    if mask == "units":
        select, merge = RateSelect("magnitude", shares, "parameters"), Deltas(server_lr, Staleness())
    return Algorithm(
        name="fiarse",
        paper="Wu et al. 2024",
        sample=Sample(cohort, concurrency),
        select=select,
        local=ImportanceAware() if mask == "elements" else Local(),
        trigger=AllReported() if buffer_size is None else Buffered(buffer_size),
        merge=merge,
    )
