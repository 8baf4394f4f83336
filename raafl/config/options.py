"""Define the options of a run that `Experiment` and later packages share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raafl.errors import BadInput

Mode = Literal["auto", "live", "plain", "verbose", "quiet"]
MODES: tuple[Mode, ...] = ("auto", "live", "plain", "verbose", "quiet")
_LOWER_IS_BETTER = ("loss", "perplexity", "error")

Group = Literal["who", "end", "shown", "computed", "other"]
GROUPS: dict[Group, str] = {
    "who": "who trains what",
    "end": "when it ends (the first that comes)",
    "shown": "what is measured, kept and shown",
    "computed": "how it is computed",
    "other": "",
}
"""The headings of `--help`."""


@dataclass(frozen=True, slots=True)
class About:
    """Help text and rules of a config field, beside its name, type and default."""

    help: str
    metavar: str | None = None
    group: Group = "other"
    must_match: bool = False
    sent_to_clients: bool = False
    may_change: bool = False
    keyword: bool = True
    used_by_replay: bool = True
    least: int | None = None
    most: int | None = None


def about(text: str, metavar: str | None = None, **more: Any) -> dict[str, About]:
    """Make the metadata of a dataclass field.

    Args:
        text: help text.
        metavar: placeholder of the value in the help; None = derived from the type.
        more: further attributes of `About`.
    """
    return {"about": About(text, metavar, **more)}


def lower_is_better(metric: str) -> bool:
    """Check whether a metric's name means that less is better: a loss, a perplexity or an error."""
    return metric.endswith(_LOWER_IS_BETTER)


@dataclass(frozen=True, slots=True)
class Target:
    """Metric value that ends the run, such as accuracy=0.93; for a loss, perplexity or error, reached from above."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse ``METRIC=VALUE``.

        Raises:
            BadInput: the text is not of that form.
        """
        metric, sign, value = text.partition("=")
        try:
            if not sign or not metric.strip():
                raise ValueError
            number = float(value)
            if not math.isfinite(number):
                raise ValueError
        except ValueError:
            raise BadInput(f"target is '{text}': give METRIC=VALUE, for example accuracy=0.93") from None
        return cls(metric.strip(), number)

    @property
    def at_most(self) -> bool:
        """Check whether less is better."""
        return lower_is_better(self.metric)

    def met(self, metrics: Mapping[str, float]) -> bool:
        """Check whether ``metrics`` reach the target."""
        if self.metric not in metrics:
            return False
        value = metrics[self.metric]
        return value <= self.value if self.at_most else value >= self.value

    def __str__(self) -> str:
        """Return METRIC=VALUE."""
        return f"{self.metric}={self.value:g}"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of a wall-clock run, in seconds.

    Attributes:
        join_s: for a client to connect.
        task_s: for the answer to an assignment.
        idle_s: for a client to hear anything from the server, which sends a heartbeat three times as often.
        stop_s: for threads and clients to end.
        eval_s: for the last evaluation, once the run has ended.
        alone_s: how long `raafl serve` runs without enough clients, and `raafl join` without a server.
    """

    join_s: float = 120.0
    task_s: float = 600.0
    idle_s: float = 60.0
    stop_s: float = 10.0
    eval_s: float = 600.0
    alone_s: float = 600.0
