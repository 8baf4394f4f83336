"""Collect the entries that only the end of a run adds to its summary: final metrics, the merge's report, costs of trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from raafl.core.coordinator import Coordinator
from raafl.errors import USER_ERRORS, cause
from raafl.local.evaluate import Evaluator
from raafl.runfolder.append_file import to_json
from raafl.runtime.setup import ServerSetup

TRIALS_S: Final = "trials_real_s"
"""Key of an algorithm's ``chosen`` that the summary shows and the journal leaves out, since journals of equal runs are equal."""


def final_metrics(parts: ServerSetup, evaluator: Evaluator, warn: Callable[[str], None]) -> dict[str, float]:
    """Evaluate the final model on the test set, if a validation set was used during the run; {} if not."""
    batches, state = parts.data.final_batches(), parts.coordinator.state
    if batches is None:
        return {}
    try:
        found = evaluator.on_other(batches, state.values, state.version)
    except USER_ERRORS as error:  # the run is over, and its results are kept
        warn(f"the test set cannot be measured: {cause(error)}")
        return {}
    return {f"test/{name}": value for name, value in found.items()}


def reported(coordinator: Coordinator, warn: Callable[[str], None]) -> dict[str, Any]:
    """Return the entries of the merge's report; {} if it fails or cannot be written."""
    try:
        report = coordinator.algorithm.merge.report(coordinator.state)
        to_json(report)
    except USER_ERRORS as error:  # the run is over, and its results are kept
        warn(f"the summary lacks what the merge reports: {cause(error)}")
        return {}
    return report


def trials(chosen: Mapping[str, Any] | None, resumed: Path | None) -> dict[str, Any]:
    """Return the costs of the trials by which a run's method was chosen; {} if there were none.

    `chosen`: how the method was chosen, as the algorithm has it; None = unknown. `resumed`: folder of a resumed run, whose
    journal, which was checked when the run went on, has it, too; None = a new run.
    """
    if chosen is None and resumed is not None:
        from raafl.runfolder.events import JournalReader

        chosen = JournalReader(resumed).first().get("chosen")
    found = dict((chosen or {}).get("trials", {}))
    return found | ({"real_s": chosen[TRIALS_S]} if chosen and TRIALS_S in chosen else {})
