"""Warn of training that diverges; it is an error where the run is strict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from raafl.core.hooks import RunHooks
from raafl.core.types import HUGE_NORM, OVERFLOW, Settled

NON_FINITE = "refused:non-finite"
TOO_LARGE = frozenset({f"refused:{HUGE_NORM}", f"refused:{OVERFLOW}"})
"""Outcomes of updates that are far larger than others: of one client a fault of its own, of several that training diverges."""


class Divergence(RunHooks):
    """Looks for metrics that are no numbers any more, and for updates that are refused as not finite, or as far too large.

    Attributes:
        failure: why the run is to end; None = it may go on.
    """

    failure: str | None = None

    def __init__(
        self, warn: Callable[[str], None], *, strict: bool, fault: Callable[[int | None], str | None] = lambda client: None
    ) -> None:  # fmt: skip
        """Start with nothing found.

        Args:
            warn: told once for each metric, and once of clients.
            strict: what is found ends the run.
            fault: names a sample with a value that is not finite, of a client or, for None, of the test set; None = there is none.
        """
        self._warn, self._strict, self._fault = warn, strict, fault
        self._finite: set[str] = set()
        self._refused = False
        self._too_large: set[int] = set()  # clients; none that has been merged since
        self._said = False

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Look at the metrics; of one that never was a number the data may be why, else it says nothing."""
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
        """Look whether a client's update was not finite, or those of two clients too large with none of theirs merged since."""
        if settled.outcome == NON_FINITE and not self._refused:
            self._refused = True
            self._find(self._of_client(settled.client))
        if settled.outcome == "merged":
            self._too_large.discard(settled.client)
        elif settled.outcome in TOO_LARGE and settled.client not in self._too_large:
            self._too_large.add(settled.client)
            if len(self._too_large) > 1 and not self._said:
                self._said = True
                clients, reason = " and ".join(map(str, sorted(self._too_large))), settled.outcome.partition(":")[2]
                self._find(
                    f"training diverges: updates of clients {clients} are many times as large as those before, and refused "
                    f"({reason}): use a smaller learning rate, or clip gradients"
                )

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

    def stop_asked(self) -> str | None:
        """Return the reason for which the run is to end."""
        return self.failure


def _names(metrics: Mapping[str, float]) -> str:
    """List the metrics that are not finite."""
    return ", ".join(f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value))
