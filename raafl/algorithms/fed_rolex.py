"""FedRolex (Alam et al., "Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022).

In round j client n trains a window of ``beta_n K_i`` of the K_i units of each hidden layer i. The window begins at unit
``j mod K_i`` and goes on at unit 0 behind the last one (eq. 3):
``S = {j^, ..., j^ + beta_n K_i - 1}`` or, across the end, ``{j^, ..., K_i - 1} u {0, ..., j^ + beta_n K_i - 1 - K_i}``.
So all units are trained alike within K_i rounds. An element becomes the weighted mean of the clients that trained it
(Algorithm 1); what none has stays.

The paper leaves open, and this does:
- Units are ``ceil(rate * size)`` where the paper rounds down, so that no layer is left without any. A client whose
  memory its rate would exceed gets the largest window that fits.
- The paper's clients have the setting of HeteroFL otherwise: `rescale` is HeteroFL's scaler, `masked` its masked cross entropy with
  output rows averaged by class, as in the config of the authors' code; static batch norm is the run's own
  ``submodels: {batch_norm: static}``.
- All clients count alike (p_n = 1/N) unless `by_samples`.

At rate 1, with all classes at every client, this is unweighted FedAvg, bit for bit.
"""

from __future__ import annotations

from raafl.algorithms.hetero_fl import LEVELS, by_class
from raafl.core.algorithm import Algorithm, Local, Select
from raafl.core.sample import Sample
from raafl.parts.merge.mean import Mean
from raafl.parts.select.rate_select import Rates, by_rate
from raafl.parts.trigger import AllReported


def fed_rolex(
    rates: Rates | None = None,
    rescale: bool = True,
    masked: bool = True,
    by_samples: bool = False,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Make FedRolex.

    Args:
        rates: share of the width at each client (beta_n): one for all; a list dealt to clients 1, 2, ... and again from its
            beginning; or by name of device. None = 1, 1/2, 1/4, 1/8, 1/16 in turn.
        rescale: scale a cut layer's activation by 1/keep-fraction while training.
        masked: set the logits of classes that a client does not have to 0, and average a class's output row over the clients that
            have it (see `raafl.algorithms.hetero_fl`).
        by_samples: weigh by |D_n| (p_n); False = every client alike.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains instead of rolling windows, such as `raafl.parts.RateSelect`; rates must be left out then.
    """
    return Algorithm(
        name="fed_rolex",
        paper="Alam et al. 2022",
        sample=Sample(cohort, concurrency),
        select=by_rate(submodel, "rolling", rates, LEVELS, "server"),
        local=Local(rescale=rescale, masked=masked),
        trigger=AllReported(),
        merge=by_class(Mean(by_samples=by_samples), masked),
    )
