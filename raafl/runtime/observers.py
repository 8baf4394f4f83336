"""Bring along the observers that a run's config asks for; each is imported only when its settings are set."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from raafl.core.hooks import RunHooks
from raafl.log import Notices
from raafl.sanitize import is_url

if TYPE_CHECKING:
    from raafl.config.experiment import Experiment


@dataclass(frozen=True)
class Entry:
    """An observer of the table: who makes it, and when a run has it."""

    maker: str  # MODULE:NAME of the function that creates the observer for a `raafl.runtime.run.Run`
    is_wanted: Callable[[Experiment], bool]  # whether a run with these settings has the observer
    absent: Mapping[str, Any] = field(default_factory=dict)  # entries in the summary of a run without the observer

    def make(self, run: Any) -> RunHooks:
        """Import the observer, and make that of ``run``."""
        module, _, name = self.maker.partition(":")
        made: RunHooks = getattr(import_module(module), name)(run)
        return made


BEFORE_CALLER: Final = (
    Entry(
        "raafl.runtime.lifecycle.best_checkpoint:BestCheckpoint",
        lambda experiment: experiment.keep_best is not None,
        {"best": None},
    ),
)
"""Observers that add to the summary what the caller's own observer sees there."""

AFTER_CALLER: Final = (
    Entry("raafl.runtime.lifecycle.divergence:Divergence", lambda experiment: True),
    # without peft there are no adapters to measure
    Entry("raafl.parts.merge.low_rank:RankEnergy", lambda experiment: "peft" in sys.modules),
    Entry("raafl.runtime.lifecycle.samples:SampleRecorder", lambda experiment: bool(experiment.samples)),
    Entry("raafl.loggers:Loggers", lambda experiment: bool(experiment.logger), {"loggers": {}}),
    Entry("raafl.monitoring.monitor:Monitor", lambda experiment: experiment.monitor is not None),
    Entry(
        "raafl.monitoring.spans:exported",
        lambda experiment: "opentelemetry.sdk.trace" in sys.modules or bool(os.environ.get("OTEL_TRACES_EXPORTER")),
    ),
    Entry(
        "raafl.runtime.lifecycle.hub:HubUpload", lambda experiment: experiment.push_to_hub is not None, {"hub": None}
    ),
    Entry(
        "raafl.runtime.lifecycle.mirror:StoreCopy",
        lambda experiment: experiment.output is not None and is_url(experiment.output),
        {"mirror": None},
    ),
)
"""All other observers; the copy in an object store comes last, since it holds what the others write."""


def observers_of(run: Any, *own: RunHooks) -> list[RunHooks]:
    """Make the observers that the settings of ``run`` ask for, with the run's ``own`` at their place among them."""
    experiment = run.parts.experiment

    def made(entries: tuple[Entry, ...]) -> list[RunHooks]:
        return [entry.make(run) for entry in entries if entry.is_wanted(experiment)]

    return [*made(BEFORE_CALLER), *own, *made(AFTER_CALLER)]


def display_of(experiment: Experiment) -> Notices:
    """Make what shows a run to a person; a quiet run only logs."""
    if experiment.progress == "quiet":
        return Notices()
    from raafl.watch.progress import Progress

    return Progress(experiment.progress)  # type: ignore[arg-type]


def absent() -> dict[str, Any]:
    """Return the entries that the summary of a run without any observer of the table has."""
    return {key: value for entry in (*BEFORE_CALLER, *AFTER_CALLER) for key, value in entry.absent.items()}
