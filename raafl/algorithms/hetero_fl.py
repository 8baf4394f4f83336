"""HeteroFL (Diao et al., "Computation and Communication Efficient Federated Learning for Heterogeneous Clients", ICLR 2021).

Client m of complexity level p trains the leading part of every hidden layer, ``W^p = W_g[: d_g r^(p-1), : k_g r^(p-1)]``
with shrinkage ratio r (section 3.1): submodels are nested, and all clients train the smallest part. An element of the
global model becomes the mean over the clients that have it (eqs. 1 to 3); an element that no client has stays unchanged.
Three techniques make submodels of different widths compatible (section 3.2):
- scaler: while training, a layer's activations are multiplied by ``1 / r^(p-1)``, one over its share of the width (`rescale`).
- masked cross entropy: logits of classes that a client has no samples of are set to 0 (`masked`). Rows of the output layer are
  then averaged over the clients that have the class (the authors' ``label_split``), see `raafl.parts.merge.label_split`.
- static batch norm (sBN): clients keep and send no running statistics. That is the run's own setting,
  ``submodels: {batch_norm: static}``, since it works with every algorithm.

Choices that the paper leaves open:
- The level of each client: clients take `rates` in turn, or by device ("fix" in the authors' code); with `drawn` each task's
  level is drawn, each equally likely ("dynamic", with which Table 1 has two and more levels). A client whose memory its rate
  would exceed gets the largest submodel that fits.
- An axis keeps ``ceil(rate * size)`` units; the paper's widths are powers of two, where nothing is rounded.
- Masking needs logits of shape (batch, classes) from `forward`, and one integer label for each sample. Other models, such as
  language models or models that compute their loss inside `forward`, train on the plain loss, and the run logs a note.

At rate 1, with all classes on every client, this is unweighted FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raafl.algorithm import (
    Algorithm,
    AllReported,
    BadInput,
    ClientInfo,
    Local,
    Mean,
    Merge,
    Rates,
    RateSelect,
    Sample,
    Select,
    SelectContext,
    Work,
    derive_seed,
)
from raafl.parts.merge.label_split import LabelSplit
from raafl.parts.select.rate_select import by_rate, rates_in_words

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
    drawn: bool = False,
) -> Algorithm:
    """Return HeteroFL: a client trains the first units of every layer, as many as its rate says.

    Args:
        rates: share of each layer's units that a client trains (r^(p-1)): one number for all; a list, one number for
            each of clients 1, 2, ..., repeating; or a mapping from device name to number. None = the list 1, 1/2, 1/4,
            1/8, 1/16.
        rescale: multiply the activations of a narrowed layer by 1 / (kept share of its units) while training; the
            paper's scaler.
        masked: whether to set the logits of classes that a client does not have to 0 (masked cross entropy), and to
            average a class's output row over the clients that have it.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally, as in the paper.
        cohort: number of clients in a round, drawn uniformly (C*M in Algorithm 1); None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the first units, such as `raafl.parts.RateSelect`; leave out
            rates then.
        drawn: whether a client's rate is drawn from the list `rates` for each round, each equally likely, in place of
            being its own; the paper's dynamic levels.

    Raises:
        BadInput: `drawn` is true, but `rates` is no list, or `submodel` is given.
    """
    levels = LEVELS if rates is None else rates
    if not drawn:
        select = by_rate(submodel, "leading", rates, LEVELS)
    elif submodel is None and isinstance(levels, Sequence):
        select = DrawnRates(tuple(levels))
    else:
        raise BadInput(
            "drawn is true, so each client's rate is drawn from a list: give rates as a list of numbers, or leave them out, "
            "and leave submodel out"
        )
    return Algorithm(
        name="hetero_fl",
        paper="Diao et al. 2021",
        sample=Sample(cohort, concurrency),
        select=select,
        local=Local(rescale=rescale, masked=masked),
        trigger=AllReported(),
        merge=by_class(Mean(by_samples=by_samples), masked),
    )


@dataclass(frozen=True)
class DrawnRates(Select):
    """Select part: a client trains the first units of every layer, at a rate that is drawn for each version of the model.

    Attributes:
        rates: shares of each layer's units, which are equally likely.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        RateSelect(rates=list(self.rates))  # refuses what is no share

    def _at(self, rate: float) -> RateSelect:
        return RateSelect("leading", rate, "width")

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the client's work at the rate drawn for it; raises `BadInput` if no size fits its memory."""
        drawn = derive_seed(fleet.seed, "rate", client.id, fleet.state.version) % len(self.rates)
        return self._at(self.rates[drawn])(client, fleet)

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the cached sizes of the client's submodels."""
        for rate in self.rates:
            self._at(rate).forget(client, fleet)

    def check(self, fleet: SelectContext) -> list[str]:
        """Return a problem for each client whose memory allows no submodel."""
        return self._at(min(self.rates)).check(fleet)

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return a warning if no dimension of the model can be cut, so that rates have no effect."""
        return self._at(min(self.rates)).notes(fleet)

    def __str__(self) -> str:
        return f"leading units, in each round one of {rates_in_words(list(self.rates))} of the width"


def by_class(mean: Mean, masked: bool) -> Merge:
    """Wrap ``mean`` so that each row of the output layer is averaged only over the clients that have its class.

    Args:
        mean: merge to wrap.
        masked: whether to wrap it; False = return ``mean`` itself.
    """
    return LabelSplit(mean) if masked else mean
