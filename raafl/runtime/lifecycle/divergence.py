"""Warn about a run that diverges, or whose data are not finite, and end it if ``strict`` is set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raafl.core.hooks import RunHooks
from raafl.core.types import HUGE_NORM, OVERFLOW, Settled
from raafl.data.federated import FederatedData, Sized
from raafl.local.evaluate import LOSS, PEAK, TEST
from raafl.submodel.nested_batch import batch_tensors

if TYPE_CHECKING:
    from raafl.runtime.run import Run

NON_FINITE = "refused:non-finite"
TOO_LARGE = frozenset({f"refused:{HUGE_NORM}", f"refused:{OVERFLOW}"})
"""Outcomes of updates that are far larger than others; if several clients have them, training diverges."""
_AT_A_TIME = 32
"""Samples of a batch that is searched where the data module names no batch size."""


class Divergence(RunHooks):
    """Observer that looks for signs of divergence: metrics that become NaN, and updates refused as non-finite or far too large."""

    failure: str | None = None  # reason for which to end the run as failed; None = it goes on

    def __init__(self, run: Run) -> None:
        self._run, self._warn, self._strict = run, run.progress.warn, run.parts.experiment.strict
        self._finite: set[str] = set()
        self._refused = False
        self._too_large: set[int] = set()  # clients with a too large update, and none merged since
        self._said = False
        self._left_out: set[str] = set()  # names of logged values that were not finite, each of which gets one warning

    def opened(self) -> None:
        """Check the metrics of the initial model, or of a resumed one: what is finite now can diverge."""
        self.on_evaluate(0, 0.0, self._run.first_metrics)

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Check that metrics are finite; if the initial model's are not, look for the fault in the data. See `RunHooks`."""
        if version == 0 and not all(map(math.isfinite, metrics.values())) and (fault := self._fault(None)) is not None:
            self._find(f"{_names(metrics)} at the start: {fault} has NaN or an infinity: correct it, or leave it out")
        bad = [name for name, value in metrics.items() if name in self._finite and not math.isfinite(value)]
        self._finite |= {name for name, value in metrics.items() if math.isfinite(value)}
        self._finite -= set(bad)
        if bad:
            what = _names({name: metrics[name] for name in bad})
            self._find(
                f"training diverges: {what} at version {version}: use a smaller learning rate, or clip gradients"
            )

    def on_settled(self, settled: Settled, now: float) -> None:
        """Look for a sign of divergence: an update refused as non-finite, or updates of two clients as far too large.

        Once a later update of one of these clients is merged, its too large update no longer counts.
        """
        if settled.outcome == NON_FINITE and not self._refused:
            self._refused = True
            self._find(self._of_client(settled.client))
        if settled.outcome == "merged":
            self._too_large.discard(settled.client)
            self._warn_of_logged(settled)
        elif settled.outcome in TOO_LARGE and settled.client not in self._too_large:
            self._too_large.add(settled.client)
            if len(self._too_large) > 1 and not self._said:
                self._said = True
                clients, reason = " and ".join(map(str, sorted(self._too_large))), settled.outcome.partition(":")[2]
                self._find(
                    f"training diverges: updates of clients {clients} are many times as large as earlier ones, and "
                    f"were refused ({reason}): use a smaller learning rate, or clip gradients"
                )

    def _warn_of_logged(self, settled: Settled) -> None:
        values = {} if settled.update is None else logged_not_finite(settled.update.metrics)
        if values.keys() - self._left_out:
            self._warn(left_out(settled.client, values))
            self._left_out |= values.keys()

    def _of_client(self, client: int) -> str:
        what = f"an update of client {client} is not finite, and refused; more are counted in updates_refused"
        fault = self._fault(client)
        if fault is None:
            return f"training diverges: {what}: use a smaller learning rate, or clip gradients"
        return f"{what}: its data has NaN or an infinity, first in {fault}: correct it, or leave it out"

    def _find(self, what: str) -> None:
        self._warn(what)
        if self._strict and self.failure is None:
            self.failure = f"failed: {what} (an error, since strict is true)"

    def _fault(self, client: int | None) -> str | None:
        """Describe a non-finite sample in a client's data (None = the test set); None if there is none, or data are remote."""
        info = None if client is None else self._run.parts.coordinator.roster.find(client)
        return None if info is not None and info.own_data else fault_in(self._run.parts.data, client)

    def stop_asked(self) -> str | None:
        """Return the reason for ending the run; None = the run goes on."""
        return self.failure


def _names(metrics: Mapping[str, float]) -> str:
    """Format the metrics that are not finite, with their values."""
    return ", ".join(f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value))


def logged_not_finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the values logged by ``training_step`` that are NaN or infinite, which no file of the run folder records."""
    return {
        name: value
        for name, value in metrics.items()
        if name not in (LOSS, PEAK) and not name.startswith(TEST) and not math.isfinite(value)
    }


def left_out(client: int, values: Mapping[str, float]) -> str:
    """Return the warning about the result of `logged_not_finite`, if there is any, for a client."""
    named = ", ".join(f"'{name}' is {value}" for name, value in values.items())
    return f"client {client}: training_step logs values that are not recorded, {named}: log finite numbers"


def fault_in(data: FederatedData, client: int | None) -> str | None:
    """Look for a sample with NaN or infinity in a client's data, and describe it; None = none was found.

    The result is also None if the data cannot be read. This function must not fail, since any client can cause its call
    by sending a non-finite update.

    `client`: id of the client; None = search the data on which the run evaluates.
    """
    try:
        return _fault_in(data, client)
    except Exception:
        return None


def _fault_in(data: FederatedData, client: int | None) -> str | None:
    if client is None:
        place = first_not_finite(data.test_batches())
        return None if place is None else f"row {place} of the test set"
    mine = data.client(client)
    place = first_not_finite(mine.in_order(mine.batch_size or _AT_A_TIME))
    return None if place is None else f"row {int(data.indices(client)[place])} of the training set"


def first_not_finite(batches: Iterable[Sized]) -> int | None:
    """Name the first sample with NaN or infinity by its position; if a batch's samples cannot be separated, name the batch."""
    before = 0
    for batch, num_samples in batches:
        places = [_row(x, num_samples) for x in batch_tensors(batch) if x.is_floating_point() or x.is_complex()]
        found = [place for place in places if place is not None]
        if found:
            return before + min(found)
        before += num_samples
    return None


def _row(x: Tensor, num_samples: int) -> int | None:
    bad = ~torch.isfinite(x)
    if not bool(bad.any()):
        return None
    if x.dim() == 0 or len(x) != num_samples:
        return 0
    # `view` would fail where a collate function has permuted dimensions
    return int(bad.reshape(num_samples, -1).any(1).nonzero()[0])
