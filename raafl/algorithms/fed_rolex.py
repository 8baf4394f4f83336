"""FedRolex (Alam et al., "Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022).

In round j client n trains a window of ``beta_n K_i`` of the K_i units of each hidden layer i. The window starts at unit
``j mod K_i`` and wraps around at the last unit (eq. 3):
``S = {j^, ..., j^ + beta_n K_i - 1}`` or, across the end, ``{j^, ..., K_i - 1} u {0, ..., j^ + beta_n K_i - 1 - K_i}``.
So all units are trained equally often within K_i rounds. An element becomes the weighted mean over the clients that trained it
(Algorithm 1); an element that no client trained stays unchanged.

Choices that the paper leaves open:
- A window has ``ceil(rate * size)`` units where the paper rounds down, so that no layer is empty. A client whose memory its
  rate would exceed gets the largest window that fits.
- Everything else is as in HeteroFL, like the paper's clients: `rescale` is HeteroFL's scaler, `masked` its masked cross entropy
  with output rows averaged by class, as in the config of the authors' code; static batch norm is the run's own setting
  ``submodels: {batch_norm: static}``.
- All clients have equal weights (p_n = 1/N) unless `by_samples`.

At rate 1, with all classes on every client, this is unweighted FedAvg, bit for bit.
"""

from __future__ import annotations

from raafl.algorithm import Algorithm, AllReported, Local, Mean, Rates, Sample, Select
from raafl.algorithms.hetero_fl import LEVELS, by_class
from raafl.parts.select.rate_select import by_rate


def fed_rolex(
    rates: Rates | None = None,
    rescale: bool = True,
    masked: bool = True,
    by_samples: bool = False,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return FedRolex: a client trains a window of each layer's units, and the window moves on in each round.

    Args:
        rates: share of each layer's units that a client trains (beta_n): one number for all; a list, one number for
            each of clients 1, 2, ..., repeating; or a mapping from device name to number. None = the list 1, 1/2, 1/4,
            1/8, 1/16.
        rescale: multiply the activations of a narrowed layer by 1 / (kept share of its units) while training.
        masked: whether to set the logits of classes that a client does not have to 0, and to average a class's output
            row over the clients that have it (see `raafl.algorithms.hetero_fl`).
        by_samples: whether to weight clients by their numbers of samples |D_n| (p_n); False = equally.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the windows, such as `raafl.parts.RateSelect`; leave out rates
            then.
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
