"""Search for the best settings of each row, by equally many trials, on other data and seeds than those reported."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from raafl.errors import BadInput, RunFailed, installing
from raafl.lab.compare.comparison import Comparison, Halving, Options, Range, Search, word_of
from raafl.lab.compare.results import curve_of
from raafl.lab.compare.runs import Outcome, Run, Runner, parsed, resolve
from raafl.lab.compare.statistics import time_to
from raafl.runfolder.journal import FolderLock
from raafl.sanitize import sanitize_text

_NO_BUDGET = (
    "search.{0} needs a budget, and trials of row '{1}' end by a target alone: give --max_updates or --max_time in "
    "search.options, or leave {0} out"
)
NO_RANK = (math.inf, math.inf)  # of a trial with a run that failed


@dataclass
class Trial:
    """One trial of a search: settings, its runs and their scores."""

    settings: Options  # options that these settings consist of
    runs: list[Run]  # one run for each seed of the search
    # metric at the end of each run, or seconds to the target, by seed; a failed run has none
    scores: dict[int, float] = field(default_factory=dict)
    fraction: float = 0.0  # share of a full run's budget that was used; below 1 if the trial was stopped early
    finals: dict[int, float] = field(default_factory=dict)  # metric at the end of each run, by seed

    def rank(self, comparison: Comparison, search: Search) -> tuple[float, float]:
        """Return a sort key: the best trial comes first, and trials with a failed run come last.

        Of trials with a run that missed the search's target, the better by the metric at their end comes first.
        """
        if search.target is None:
            return self._mean(self.scores, comparison.maximize), math.inf
        return self._mean(self.scores, False), self._mean(self.finals, comparison.maximize)

    def _mean(self, values: Mapping[int, float], maximize: bool) -> float:
        if len(values) < len(self.runs) or not all(map(math.isfinite, values.values())):
            return math.inf
        return -statistics.fmean(values.values()) if maximize else statistics.fmean(values.values())


def trials_of(comparison: Comparison, search: Search) -> dict[str, list[Trial]]:
    """List the trials (settings to try) for each row of a comparison, under the row's label.

    Raises:
        BadInput: an option is wrong, two trials of a row have the same settings, or trials that are to be halved have no
            budget.
    """
    extra = search.trial_options
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
            raise BadInput(_NO_BUDGET.format("halving", label))
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
    by_end = search if search.target is None else replace(search, target=None)
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
                trial.scores = scores_of(trial, outcomes, comparison, search)
                trial.finals = trial.scores if by_end is search else scores_of(trial, outcomes, comparison, by_end)
        for label, some in going.items():
            # a stable sort: of equal trials the first in the search's order wins
            some.sort(key=lambda trial: trial.rank(comparison, search))
            if some[0].rank(comparison, search) == NO_RANK:
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


def scores_of(
    trial: Trial, outcomes: Mapping[Run, Outcome], comparison: Comparison, search: Search
) -> dict[int, float]:
    """Return the metric's value at the end of each run of a trial, by seed; a run that failed has none.

    With a target it is the seconds until the target, infinity where it was not reached.
    """
    scores = {}
    for run in trial.runs:
        outcome = outcomes.get(run.part(trial.fraction))
        if outcome is not None and outcome.summary is not None:
            curve = comparison.points(curve_of(Path(outcome.folder), comparison.metric))
            if curve and search.target is None:
                scores[run.seed] = curve[-1][1]
            elif curve and search.target is not None:
                time_s = time_to(curve, search.target, comparison.maximize)
                scores[run.seed] = math.inf if time_s is None else time_s
    return scores


def _maximizes(comparison: Comparison, search: Search) -> bool:
    return comparison.maximize and search.target is None


# Search the settings of each row by an Optuna study: ranges, samplers, pruners by virtual time, and a storage that resumes.
#
# Each row has a study of its own, in the comparison's folder (`search.journal`) or in a storage that several share; Optuna's
# dashboard reads either. Trials use the study's ask and tell calls, so that they run as all runs do: several at a time, on a
# cluster, and reused once they have ended. A sampler is seeded anew for each batch of trials by their number, so that a search
# that was killed continues with the settings that it would have tried.

STORAGE = "search.journal"
_FRACTIONS = {1: 0.25, 2: 0.5, 4: 1.0}  # share of a trial's budget at each step at which a pruner may stop it
_ENDED = "ended"  # user attribute of a trial in Optuna: whether it has been run, successfully or not
_SETTINGS = "settings"
_FOLDER = "folder"  # user attribute of a study in Optuna: folder of the comparison that began its running trials
_SPACE = "space"  # user attribute of a study in Optuna: digest of what it searches
# names of errors of a new database whose tables another search is making
_MADE_NOW = ("IntegrityError", "OperationalError", "ProgrammingError")


def run_studies(
    comparison: Comparison, search: Search, runner: Runner, folder: Path, jobs: int
) -> tuple[dict[str, list[Trial]], dict[str, Trial]]:
    """Run the trials of all rows, equally many for each; return them, and the best of each row.

    `folder`: folder of the comparison, which gets the studies.
    `jobs`: number of runs at a time; as many trials are asked for at once.

    Raises:
        BadInput: Optuna is not installed, settings are wrong, or another process searches in the folder.
        RunFailed: a run was interrupted from outside, or all trials of a row failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder, "output"):  # else a second search would take the first one's trials for killed ones
        return _run_studies(comparison, search, runner, folder, jobs)


def _run_studies(
    comparison: Comparison, search: Search, runner: Runner, folder: Path, jobs: int
) -> tuple[dict[str, list[Trial]], dict[str, Trial]]:
    storage = _storage(search, folder)
    trials, best = {}, {}
    for label in comparison.rows:
        study = _study(storage, comparison, search, label, folder)
        while (num := len(_ended(study, search))) < (search.trials or 0):
            study.sampler = _sampler(search, label, num)
            asked = [study.ask() for _ in range(min(max(jobs // len(search.seeds), 1), (search.trials or 0) - num))]
            if search.storage is not None:
                _check_still_own(study, folder, asked)
            _run(study, asked, comparison, search, label, runner)
        trials[label] = [
            _trial(one.user_attrs, _runs(comparison, search, label, tuple(one.user_attrs[_SETTINGS])))
            for one in _ended(study, search)
        ]
        # of equal trials the first wins
        best[label] = min(trials[label], key=lambda trial: (trial.fraction < 1, trial.rank(comparison, search)))
        if best[label].rank(comparison, search)[0] == math.inf:
            what = "failed" if search.target is None else f"failed or did not reach {search.target:g}"
            raise RunFailed(f"all trials of row '{label}' {what}: search other settings")
    return trials, best


def _storage(search: Search, folder: Path) -> Any:
    """Open the storage of Optuna's studies; raise `BadInput` if Optuna is missing or cannot open it."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise BadInput(f"search.sampler needs Optuna, which is not installed: {installing('tune')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where = str(folder / STORAGE) if search.storage is None else search.storage
    problem = Exception()
    for wait_s in (0.2, 1.0, 0.0):
        try:
            if "://" in where:
                return optuna.storages.RDBStorage(where)
            Path(where).parent.mkdir(parents=True, exist_ok=True)
            return optuna.storages.JournalStorage(JournalFileBackend(where))
        except Exception as error:  # Optuna and database drivers raise many types of error
            problem = error
        if type(problem).__name__ not in _MADE_NOW:
            break
        time.sleep(wait_s)
    raise BadInput(
        f"search.storage is '{where:.200}', which Optuna cannot open ({sanitize_text(str(problem), 200)}): give a path, or "
        "a URL such as sqlite:///studies.db"
    )


def _study(storage: Any, comparison: Comparison, search: Search, label: str, folder: Path) -> Any:
    """Open or create the Optuna study of a row; raise `BadInput` if the storage has another search of that name."""
    import optuna

    name = label if search.storage is None else f"{comparison.name}: {label}"
    direction: Literal["maximize", "minimize"] = "maximize" if _maximizes(comparison, search) else "minimize"
    make = partial(optuna.create_study, storage=storage, study_name=name, direction=direction, pruner=_pruner(search))
    try:
        study = make()
        study.set_user_attr(_FOLDER, str(folder.resolve()))  # at once: another search may be about to load it
    except optuna.exceptions.DuplicatedStudyError:
        study = make(load_if_exists=True)
    base = [run.digest for run in _runs(comparison, search, label, ())]
    grid = dict(search.rows.get(label, search.grid))
    space = hashlib.sha256(repr([base, grid, comparison.metric, search.target, search.pruner]).encode()).hexdigest()
    if study.user_attrs.get(_SPACE, space) != space:
        raise BadInput(
            f"the study '{name}' searched other settings, data, budget or metric: choose another "
            f"{'--output' if search.storage is None else 'name'}, or give the settings that it had"
        )
    if search.storage is None or _take_over(study, folder):
        _renew_killed(study)
    study.set_user_attr(_SPACE, space)
    return study


def check_space(comparison: Comparison, search: Search) -> None:
    """Check the values of lists and the ends of ranges, and that trials which a pruner may stop have a budget.

    Raises:
        BadInput: a row cannot have one of the settings, or its trials end by a target alone.
    """
    tried = [
        (label, option, value)
        for label in comparison.rows
        for option, values in search.rows.get(label, search.grid).items()
        for value in (values if isinstance(values, list) else _ends(option, values))
    ]
    for label, option, value in tried:
        settings = comparison.options_of(label, (*search.options, option, word_of(value)))
        row = parsed(comparison.config, f"{label} (search)", settings, search.seeds[0]).experiment
        if search.pruner is not None and row.max_updates is None and row.max_time is None:
            raise BadInput(_NO_BUDGET.format("pruner", label))


def _ends(option: str, values: Mapping[str, Any]) -> list[float]:
    space = Range.of(option, values)
    return [space.low, space.high]


def _ended(study: Any, search: Search) -> list[Any]:
    """Return the first trials that have ended, as many as each row has: an earlier search may have asked for more."""
    return [trial for trial in study.get_trials(deepcopy=False) if _ENDED in trial.user_attrs][: search.trials]


def _take_over(study: Any, folder: Path) -> bool:
    """Make a study of a shared storage this search's; return whether it was before, so that its running trials were killed.

    Raises `BadInput` if a search in another folder has it, which may still go on: trials run, or it has not begun yet.
    """
    from optuna.trial import TrialState

    for _ in range(20):  # another search may have created the study in this moment
        if (owner := study.user_attrs.get(_FOLDER)) is not None:
            break
        time.sleep(0.05)
    is_own, trials = owner in (None, str(folder.resolve())), study.get_trials(deepcopy=False)
    goes_on = any(one.state == TrialState.RUNNING and _ENDED not in one.user_attrs for one in trials)
    if not is_own and (goes_on or not trials):
        raise _taken(study)
    study.set_user_attr(_FOLDER, str(folder.resolve()))
    return is_own


def _check_still_own(study: Any, folder: Path, asked: Sequence[Any]) -> None:
    """Give up the trials that were ``asked`` and raise `BadInput` if another search has taken the study meanwhile."""
    from optuna.trial import TrialState

    if study.user_attrs.get(_FOLDER) == str(folder.resolve()):
        return
    for trial in asked:
        study.tell(trial, state=TrialState.FAIL)
    raise _taken(study)


def _taken(study: Any) -> BadInput:
    owner = sanitize_text(str(study.user_attrs.get(_FOLDER)), 200)
    return BadInput(
        f"the study '{study.study_name}' in search.storage has trials that run in '{owner}': wait until they end, go on with "
        "a killed search by that --output, or choose another name"
    )


def _renew_killed(study: Any) -> None:
    """Mark as failed the trials that ran when an earlier search was killed, and queue their settings again."""
    from optuna.trial import TrialState

    waiting = {TrialState.RUNNING, TrialState.WAITING}
    for trial in [one for one in study.get_trials() if one.state in waiting and _ENDED not in one.user_attrs]:
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
            if trial.params:
                study.enqueue_trial(trial.params)


def _run(study: Any, asked: Sequence[Any], comparison: Comparison, search: Search, label: str, runner: Runner) -> None:
    """Run a batch of trials at the same time and report their scores to the study; a pruner may stop some after a stage."""
    from optuna.trial import TrialState

    settings = {trial.number: settings_of(trial, search, label) for trial in asked}
    going = {trial.number: (trial, _runs(comparison, search, label, settings[trial.number])) for trial in asked}
    for step, fraction in _FRACTIONS.items() if search.pruner else [(4, 1.0)]:
        runs = [run.part(fraction) for _, some in going.values() for run in some]
        outcomes = {outcome.run: outcome for outcome in runner.run_all(runs, comparison.metric)}
        for outcome in outcomes.values():
            if outcome.summary is None and not outcome.by_itself:
                raise RunFailed(f"a trial of {label} was interrupted ({outcome.error}): run the same command again")
        for number, (trial, some) in list(going.items()):
            made = Trial(settings[number], some, fraction=fraction)
            made.scores = scores_of(made, outcomes, comparison, search)
            # a run that misses the target is a bad result, from which the sampler learns, not a failure
            missed = search.target is not None and len(made.scores) == len(some) and math.inf in made.scores.values()
            failed = not missed and made.rank(comparison, search) == NO_RANK
            score = None if failed else statistics.fmean(made.scores.values())
            pruned = False
            if score is not None and fraction < 1:
                trial.report(score, step)
                pruned = trial.should_prune()
            if failed or pruned or fraction == 1:
                _keep(trial, made)
                state = TrialState.FAIL if failed else TrialState.PRUNED if pruned else None
                study.tell(trial, None if failed or pruned else score, state=state)
                del going[number]


def _keep(trial: Any, made: Trial) -> None:
    trial.set_user_attr(_SETTINGS, list(made.settings))
    trial.set_user_attr("scores", {str(seed): score for seed, score in made.scores.items()})
    trial.set_user_attr("fraction", made.fraction)
    trial.set_user_attr(_ENDED, True)


def _trial(kept: Mapping[str, Any], runs: list[Run]) -> Trial:
    scores = {int(seed): score for seed, score in kept["scores"].items()}
    return Trial(tuple(kept[_SETTINGS]), runs, scores, kept["fraction"])


@lru_cache(1000)
def _resolved(config: str, label: str, options: Options, seeds: tuple[int, ...]) -> list[Run]:
    return resolve(config, label, options, seeds)


def _runs(comparison: Comparison, search: Search, label: str, settings: Options) -> list[Run]:
    extra = (*search.trial_options, *settings)
    return _resolved(comparison.config, f"{label} (search)", comparison.options_of(label, extra), search.seeds)


def settings_of(trial: Any, search: Search, label: str) -> Options:
    """Return the options of a trial: a value for each entry of the row's grid, as the study's sampler suggests it."""
    words: list[str] = []
    for option, values in search.rows.get(label, search.grid).items():
        if isinstance(values, list):
            words += [option, word_of(trial.suggest_categorical(option, values))]
            continue
        space = Range.of(option, values)
        suggest = trial.suggest_int if space.whole else trial.suggest_float
        words += [option, str(suggest(option, space.low, space.high, log=space.log))]
    return tuple(words)


def _sampler(search: Search, label: str, num: int) -> Any:
    from optuna import samplers

    seed = zlib.crc32(f"raafl compare {label} {num}".encode())
    if search.sampler == "tpe":
        return samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(1, (search.trials or 1) // 3)))
    return {"random": samplers.RandomSampler, "gp": samplers.GPSampler}[str(search.sampler)](seed=seed)


def _pruner(search: Search) -> Any:
    from optuna import pruners

    if search.pruner == "halving":
        return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    return pruners.MedianPruner(n_startup_trials=3) if search.pruner == "median" else pruners.NopPruner()
