"""Search for the best settings of each row, by equally many trials, on other data and seeds than those reported."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raafl.errors import BadInput, RunFailed
from raafl.lab.compare.comparison import Comparison, Halving, Options, Search
from raafl.lab.compare.results import curve_of
from raafl.lab.compare.runs import Outcome, Run, Runner, resolve


@dataclass
class Trial:
    """One trial of a search: settings, its runs and their scores."""

    settings: Options  # options that the trial sets
    runs: list[Run]  # runs with these settings, one for each seed of the search
    # value of the metric at the end of each run, by seed; a failed run has none
    scores: dict[int, float] = field(default_factory=dict)
    fraction: float = 0.0  # part of the budget that was used; below 1 if the trial ended early

    def rank(self, maximize: bool) -> float:
        """Return a sort key: the best trial comes first, and trials with a failed run come last."""
        if len(self.scores) < len(self.runs) or not all(map(math.isfinite, self.scores.values())):
            return math.inf
        return -statistics.fmean(self.scores.values()) if maximize else statistics.fmean(self.scores.values())


def trials_of(comparison: Comparison, search: Search) -> dict[str, list[Trial]]:
    """List the trials (settings to try) for each row of a comparison, under the row's label.

    Raises:
        BadInput: an option is wrong, two trials of a row have the same settings, or trials that are to be halved have no
            budget.
    """
    extra = (*search.options, "--partition.validation_share", str(search.validation_share))
    trials = {
        label: [
            Trial(
                settings,
                resolve(
                    comparison.config,
                    f"{label} (search)",
                    comparison.options_of(label, (*extra, *settings)),
                    search.seeds,
                ),
            )
            for settings in search.settings(label)
        ]
        for label in comparison.rows
    }
    for label, some in trials.items():
        if search.halving is not None and any(trial.runs[0].limits == (None, None) for trial in some):
            raise BadInput(
                f"search.halving needs a budget, and trials of row '{label}' end by a target alone: give --max_updates or "
                "--max_time in search.options, or leave halving out"
            )
        first: dict[str, Options] = {}
        for trial in some:
            same = first.setdefault(trial.runs[0].digest, trial.settings)
            if same is not trial.settings:
                raise BadInput(
                    f"search of row '{label}' tries the same settings twice, {' '.join(same)} and "
                    f"{' '.join(trial.settings)}: give each value once"
                )
    return trials


def run_trials(
    trials: Mapping[str, Sequence[Trial]], comparison: Comparison, search: Search, runner: Runner
) -> dict[str, Trial]:
    """Run the trials of all rows and return the best trial of each.

    Raises:
        BadInput: a run does not measure the metric.
        RunFailed: a run was interrupted from outside, or all trials of a row failed, for example by diverging.
    """
    going = {label: list(some) for label, some in trials.items()}
    fractions = rungs(search.halving)
    for fraction in fractions:
        asked = [run.part(fraction) for some in going.values() for trial in some for run in trial.runs]
        outcomes = {outcome.run: outcome for outcome in runner.run_all(asked, comparison.metric)}
        for outcome in outcomes.values():
            if outcome.summary is None and not outcome.by_itself:
                raise RunFailed(
                    f"a trial of {outcome.run.label}, seed {outcome.run.seed}, was interrupted ({outcome.error}): "
                    "run the same command again"
                )
        for some in going.values():
            for trial in some:
                trial.fraction = fraction
                trial.scores = scores_of(trial, outcomes, comparison)
        for label, some in going.items():
            # a stable sort: among equal trials the first in the grid wins
            some.sort(key=lambda trial: trial.rank(comparison.maximize))
            if math.isinf(some[0].rank(comparison.maximize)):
                errors = [outcomes[run.part(fraction)].error for run in some[0].runs]
                raise RunFailed(
                    f"all trials of row '{label}' failed, the first with: {next(filter(None, errors), 'no value')}: "
                    "search other settings"
                )
            if fraction < 1 and search.halving is not None:
                going[label] = some[: max(1, math.ceil(len(some) * search.halving.keep))]
    return {label: some[0] for label, some in going.items()}


def rungs(halving: Halving | None) -> list[float]:
    """Return the fractions of the budget after which trials are compared, so that only the better ones continue."""
    num = 1 if halving is None else halving.rungs
    return [2.0 ** (rung - num + 1) for rung in range(num)]


def scores_of(trial: Trial, outcomes: Mapping[Run, Outcome], comparison: Comparison) -> dict[int, float]:
    """Return the metric's value at the end of each run of a trial, by seed; a run that failed has none."""
    scores = {}
    for run in trial.runs:
        outcome = outcomes.get(run.part(trial.fraction))
        if outcome is not None and outcome.summary is not None:
            curve = comparison.points(curve_of(Path(outcome.folder), comparison.metric))
            if curve:
                scores[run.seed] = curve[-1][1]
    return scores
