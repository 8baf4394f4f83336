"""Training that diverges is said, and is an error where the run is strict."""

from __future__ import annotations

import math
from collections.abc import Callable

from raafl.core.hooks import Hooks
from raafl.core.types import Settled

NON_FINITE = "refused:non-finite"


class Divergence(Hooks):
    """Looks for metrics that are no numbers any more, and for updates that are refused since they are not finite.

    Attributes:
        failure: why the run is to end; None = it may go on.
    """

    failure: str | None = None

    def __init__(self, warn: Callable[[str], None], *, strict: bool) -> None:
        """Say it to ``warn``, once for each metric and once of clients; ``strict`` ends the run."""
        self._warn, self._strict = warn, strict
        self._finite: set[str] = set()
        self._refused = False

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Look at the metrics; one that never was a number says nothing."""
        bad = [name for name, value in metrics.items() if name in self._finite and not math.isfinite(value)]
        self._finite |= {name for name, value in metrics.items() if math.isfinite(value)}
        self._finite -= set(bad)
        if bad:
            what = ", ".join(f"{name} is {metrics[name]}" for name in bad)
            self._find(
                f"training diverges: {what} at version {version}: use a smaller learning rate, or clip gradients"
            )

    def on_settled(self, settled: Settled, now: float) -> None:
        """Look whether a client's update was not finite."""
        if settled.outcome == NON_FINITE and not self._refused:
            self._refused = True
            self._find(
                f"training diverges: an update of client {settled.client} is not finite, and refused; more are counted in "
                "updates_refused: use a smaller learning rate, or clip gradients"
            )

    def _find(self, what: str) -> None:
        self._warn(what)
        if self._strict and self.failure is None:
            self.failure = f"failed: {what} (an error, since strict is true)"

    def stop_asked(self) -> str | None:
        """Return the reason for which the run is to end."""
        return self.failure
