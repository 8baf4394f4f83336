"""Define the sections of a run's configuration that other packages need, too."""

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
    """Help text and rules of a field of the configuration, stored in the field's metadata."""

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
    """Return the metadata of a dataclass field: its help text and rules.

    Args:
        text: help text of the field.
        metavar: placeholder of the value in the help text; None = derived from the type.
        more: further attributes of `About`, by name.
    """
    return {"about": About(text, metavar, **more)}


def lower_is_better(metric: str) -> bool:
    """Check by a metric's name whether lower values are better, as for a loss, a perplexity or an error."""
    return metric.endswith(_LOWER_IS_BETTER)


@dataclass(frozen=True, slots=True)
class Target:
    """Value of a metric at which the run ends, such as accuracy=0.93."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse a target of the form ``METRIC=VALUE``.

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
        """Whether lower values of the metric are better, so that the target is an upper limit."""
        return lower_is_better(self.metric)

    def met(self, metrics: Mapping[str, float]) -> bool:
        """Check whether the metrics of an evaluation reach the target."""
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
        join_s: seconds for a client to connect.
        task_s: seconds for a client to answer an assignment.
        idle_s: seconds without a message after which a client gives the server up; the server sends three heartbeats in
            this time.
        stop_s: seconds for threads and clients to end.
        eval_s: seconds for the last evaluation, once the run has ended.
        alone_s: seconds after which `raafl serve` ends if it has too few clients, and `raafl join` if it has no server.
        resume_s: seconds for which `raafl serve` waits for a client whose connection broke during a task, and keeps the
            part of its update that has arrived; 0 = the task is lost at once. Only for runs on several machines.
    """

    join_s: float = 120.0
    task_s: float = 600.0
    idle_s: float = 60.0
    stop_s: float = 10.0
    eval_s: float = 600.0
    alone_s: float = 600.0
    resume_s: float = 60.0
