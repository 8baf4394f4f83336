"""HeteroFL (Diao et al., "Computation and Communication Efficient Federated Learning for Heterogeneous Clients", ICLR 2021).

Client m of complexity level p trains the leading part of every hidden layer, ``W^p = W_g[: d_g r^(p-1), : k_g r^(p-1)]``
with shrinkage ratio r (section 3.1): submodels are nested, and the smallest part is trained by all. An element of the
global model becomes the mean of the clients that have it (eqs. 1 to 3, region by region); what none has stays.
Three things help submodels of different widths along (section 3.2):
- scaler: while training, a layer's activations are multiplied by ``1 / r^(p-1)``, one over its share of the width (`rescale`).
- masked cross entropy: logits of classes that a client has no samples of are set to 0 (`masked`). Rows of the output layer are
  then averaged over the clients that have the class (the authors' ``label_split``), see `raafl.parts.merge.label_split`.
- static batch norm (sBN): clients keep and send no running statistics. That is the run's own setting,
  ``submodels: {batch_norm: static}``, since it goes with every algorithm.

The paper leaves open, and this does:
- Which client has which level: `rates` are dealt in turn, or by device. A client whose memory its rate would exceed gets
  the largest submodel that fits.
- Units are ``ceil(rate * size)`` of each axis; the paper's widths are powers of two, where nothing is rounded.
- Masking needs logits of shape (batch, classes) from `forward`, and one whole-number label for each sample: anything
  else, such as a language model, or one that makes its loss inside `forward`, trains on the plain loss, and the run says so.

At rate 1, with all classes at every client, this is unweighted FedAvg, bit for bit.
"""

from __future__ import annotations

from raafl.core.algorithm import Algorithm, Local, Merge, Select
from raafl.core.sample import Sample
from raafl.parts.merge.label_split import LabelSplit
from raafl.parts.merge.mean import Mean
from raafl.parts.select.rate_select import Rates, by_rate
from raafl.parts.trigger import AllReported

LEVELS = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Shares of the width at complexity levels a to e, with r = 0.5 (section 4)."""


def hetero_fl(
    rates: Rates | None = None,
    rescale: bool = True,
    masked: bool = True,
    by_samples: bool = False,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Make HeteroFL.

    Args:
        rates: share of the width at each client (r^(p-1)): one for all; a list dealt to clients 1, 2, ... and again from its
            beginning; or by name of device. None = 1, 1/2, 1/4, 1/8, 1/16 in turn.
        rescale: scale a cut layer's activation by 1/keep-fraction while training (the scaler).
        masked: set the logits of classes that a client does not have to 0 (masked cross entropy), and average a class's output row
            over the clients that have it.
        by_samples: weigh by |D_n|; False = every client alike, as in the paper.
        cohort: clients in a round, drawn uniformly (C*M in Algorithm 1); None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains instead of leading parts, such as `raafl.parts.RateSelect`; rates must be left out then.
    """
    return Algorithm(
        name="hetero_fl",
        paper="Diao et al. 2021",
        sample=Sample(cohort, concurrency),
        select=by_rate(submodel, "leading", rates, LEVELS),
        local=Local(rescale=rescale, masked=masked),
        trigger=AllReported(),
        merge=by_class(Mean(by_samples=by_samples), masked),
    )


def by_class(mean: Mean, masked: bool) -> Merge:
    """Wrap ``mean`` so that each output row is averaged only over clients that have samples of its class."""
    return LabelSplit(mean) if masked else mean
