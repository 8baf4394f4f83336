"""Try candidate methods in short simulations before a run: successive halving at the virtual clock, on the run's own data.

All candidates are simulated up to the same virtual time and compared by a metric; the better half goes on from there, twice as
far. They train with the run's settings and seed, and are measured on training samples that no client has, so that the test set
plays no part. The plan is made by predictions alone (`planned`), so that it can be announced; `tried` carries it out.

A difference counts only if it is clear beside the noise of so few samples: these are measured in parts, and the mean of the
parts' differences must be over twice its standard error. Else the table's order decides, also between all candidates where none
is clearly better than the untrained model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch

from raafl.config.experiment import Experiment
from raafl.config.options import Engine, Samples, seconds
from raafl.config.targets import direction
from raafl.core.algorithm import Algorithm
from raafl.data.federated import FederatedData, Sized
from raafl.data.loaders import reading
from raafl.errors import USER_ERRORS, RunFailed, format_error, one_line
from raafl.lab.plan.dry import Prediction
from raafl.local.evaluate import Evaluator
from raafl.rules import Rules
from raafl.runfolder.record import RunRecord
from raafl.runtime.lifecycle.checkpointer import AsItIs
from raafl.runtime.run import evaluator_of, form_of
from raafl.runtime.setup import build, load_data, make_executor
from raafl.runtime.simulation import Simulation

SHARE = 0.1
"""Share of the run's work that trials may take unless the user says otherwise."""
MOST = 4
"""Largest number of candidates that are tried."""
_STRETCH = 2.0
"""Factor by which two candidates' trials may exceed the share, where a run has so few tasks for each client."""
_LEAST_TASKS = 0.5
"""Least length of the first stage, in tasks of the median client: before that nothing has been learnt."""
_VALIDATION_SHARE, _VALIDATION_ROWS = 0.1, 2048
_MEASURED_AT = (0.75, 1.0)  # shares of a stage's time after which a candidate is evaluated: one evaluation is noisy
_PARTS = 8
"""Number of parts of the validation samples whose metrics tell how noisy a comparison is."""
_CLEAR = 2.0
"""Mean of the parts' differences, in its standard errors, above which one candidate is clearly better than another."""


@dataclass(frozen=True, slots=True)
class Load:
    """Predicted work of a candidate, in seconds in which one nominal machine would train its tasks."""

    per_s: float  # work for each second of the virtual clock
    per_update: float  # work for each merged update

    @classmethod
    def of(cls, predicted: Prediction) -> Load:
        """Return the load of a candidate that was predicted with a machine."""
        work_s = predicted.here_s or 0.0
        return cls(work_s / max(predicted.time_s, 1e-9), work_s / max(predicted.updates, 1))


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """Which candidates are tried, and for how long; made before anything is trained."""

    labels: tuple[str, ...]  # labels of the candidates, in the order of the table
    # for each stage: virtual seconds until the candidates are compared, and how many of them continue
    stages: tuple[tuple[float, int], ...]
    share: float  # largest share of the run's work that the trials may take

    def announcement(self) -> str:
        """Return a sentence about the candidates that are tried, and the work that this takes."""
        last_s = self.stages[-1][0]
        return (
            f"auto: tries {', '.join(self.labels)} first, for {last_s:.3g} virtual seconds at most, about {self.share:.0%} of the "
            "run's work (--algorithm.trials 0: by the table alone)"
        )


@dataclass(frozen=True, slots=True)
class Trials:
    """Outcome of the trials.

    Attributes:
        order: labels of the candidates that were tried, the best first.
        virtual_s: virtual seconds of all trials together, none of which are on the run's clock.
        real_s: real seconds of all trials together.
        updates: merged updates of all trials together.
        share: share of the run's predicted work that they took.
        metric: metric by which candidates were compared.
        stages: virtual time of each comparison, and the metric of each candidate there; a failed one has None.
        untrained: metric of the untrained model.
        decisive: whether a candidate of the last comparison is clearly better than the untrained model; else the trials say
            nothing, and the table decides.
        decided_by_table: whether the first of ``order`` measured no better than another, and is before it in the table.
        problems: reason for which a trial failed, by label.
    """

    order: Sequence[str]
    virtual_s: float
    real_s: float
    updates: int
    share: float
    metric: str
    stages: Sequence[tuple[float, Mapping[str, float | None]]]
    untrained: float | None = None
    decisive: bool = True
    decided_by_table: bool = False
    problems: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Convert the outcome to plain data, without real seconds."""
        return {
            "metric": self.metric,
            "stages": [{"virtual_s": at_s, "measured": dict(found)} for at_s, found in self.stages],
            "untrained": self.untrained,
            "decisive": self.decisive,
            "virtual_s": round(self.virtual_s, 6),
            "updates": self.updates,
            "share": round(self.share, 4),
            **({"problems": dict(self.problems)} if self.problems else {}),
        }

    def sentence(self) -> str:
        """Return a sentence about the trials' results and their work; without real seconds, which the journal has."""
        at_s, found = self.stages[-1]
        shown = ", ".join(f"{label} {'failed' if value is None else f'{value:.4g}'}" for label, value in found.items())
        text = (
            f"auto: {len(self.order)} methods were tried before virtual time 0, in {self.share:.0%} of the run's work; "
            f"{self.metric} after {at_s:.3g} virtual s: {shown}"
        )
        if not self.decisive:
            start = "not finite" if self.untrained is None else f"{self.untrained:.4g}"
            return f"{text}; none is clearly better than the untrained model, {start}, so that the table decides"
        first = self.order[0]
        others = [label for label in self.order if label != first and label in found]
        if others and self.decided_by_table:
            return f"{text}; {', '.join(others)} and {first} differ by no more than noise, so that the table decides between them"
        return text


def planned(
    order: Sequence[str], loads: Mapping[str, Load], experiment: Experiment, share: float, task_s: float
) -> TrialPlan | str:
    """Plan trials of as many candidates as their share of the run's work allows; return the reason where it allows none.

    Args:
        order: labels of the candidates to try, the most promising first.
        loads: predicted work of each candidate, by label.
        experiment: settings of the run.
        share: share of the run's work that the trials may take.
        task_s: virtual seconds of a task of the median client.
    """
    if share <= 0 or len(order) < 2:
        return "no trials were asked for" if share <= 0 else "there is one candidate"
    if experiment.privacy.is_on:
        return "trials read the clients' data, and their privacy budget counts the run alone"
    max_time_s, work = seconds("max_time", experiment.max_time), _work_of(experiment, loads[order[0]])
    if work is None:
        return "neither max_time nor max_updates bounds the run, so that no share of it is known"
    if experiment.workers > 1 and experiment.fabric.accelerator != "cpu" and torch.cuda.device_count():
        return "workers cannot be started once this process has used a GPU"
    for num in range(min(MOST, len(order)), 1, -1):
        costs = [loads[label].per_s for label in order[:num]]
        first_s = share * work / _relative_work(costs)
        least_s, stretched = _LEAST_TASKS * task_s, share
        if num == 2 and first_s < least_s <= _STRETCH * first_s:
            first_s, stretched = least_s, share * least_s / first_s
        longest_s = first_s * 2 ** (len(_sizes(num)) - 1)
        if first_s >= least_s and (max_time_s is None or longest_s <= max_time_s):
            going = [*_sizes(num)[1:], 1]
            stages = tuple((first_s * 2**stage, left) for stage, left in enumerate(going))
            return TrialPlan(tuple(order[:num]), stages, stretched)
    return f"{share:.0%} of the run is less than half a task of each of two candidates"


def _work_of(experiment: Experiment, load: Load) -> float | None:
    """Predict the work of a run until its time or update limit, in seconds of one machine; None if it has no limit."""
    max_time_s = seconds("max_time", experiment.max_time)
    found = [] if max_time_s is None else [max_time_s * load.per_s]
    found += [] if experiment.max_updates is None else [experiment.max_updates * load.per_update]
    return min(found, default=None)


def _sizes(num: int) -> list[int]:
    """List how many candidates each stage has: half of the stage before, at least two."""
    found = [num]
    while found[-1] > 2:
        found.append(math.ceil(found[-1] / 2))
    return found


def _relative_work(costs: Sequence[float]) -> float:
    """Sum the work of all stages for each virtual second of the first stage, if the costliest candidates continue.

    `costs`: work of each candidate in a virtual second.
    """
    dearest, total, before = sorted(costs, reverse=True), 0.0, 0.0
    for stage, num in enumerate(_sizes(len(costs))):
        total += (2.0**stage - before) * sum(dearest[:num])
        before = 2.0**stage
    return total


def tried(
    experiment: Experiment,
    methods: Mapping[str, Algorithm],
    plan: TrialPlan,
    loads: Mapping[str, Load],
    order: Sequence[str],
) -> Trials:
    """Carry out a plan; between candidates of which none is clearly better, the table's order decides.

    Args:
        experiment: settings of the run.
        methods: candidates by label.
        plan: plan of the trials.
        loads: predicted work of each candidate, by label.
        order: labels of all candidates in the table's order, the best first.

    Raises:
        RunFailed: every trial failed, or no metric is known of which better values could be told.
    """
    begun_s, problems, dropped = time.perf_counter(), dict[str, str](), list[str]()
    stages: list[tuple[float, dict[str, float | None]]] = []
    metric, work, virtual_s = "", 0.0, 0.0
    with ExitStack() as stack:
        trials = _prepared(experiment, methods, plan.labels, stack, problems)
        dropped += problems
        going = [label for label in order if label in trials]
        untrained = trials[going[0]].metrics() if going else {}
        start, ranking = None, Ranking([], False, False)
        for until_s, num_left in plan.stages:
            passed_s = until_s - (stages[-1][0] if stages else 0.0)
            work += passed_s * sum(loads[label].per_s for label in going)
            virtual_s += passed_s * len(going)
            measured = _measured({label: trials[label] for label in going}, until_s, problems)
            metric = metric or _metric(experiment, measured)
            start = _finite(untrained.get(metric))
            values = {label: _finite(measured.get(label, {}).get(metric)) for label in going}
            means = {label: None if value is None else fmean(value) for label, value in values.items()}
            stages.append((until_s, means))
            ranking = ranked(values, start, 1.0 if _grows(experiment, metric) else -1.0)
            dropped = [*ranking.order[num_left:], *dropped]
            going = [label for label in going if label in ranking.order[:num_left]]
        updates = sum(trial.coordinator.merged for trial in trials.values())
    found = [*going, *dropped]
    if not found or found[0] in problems or not metric:
        why = problems.get(found[0]) if found else None
        raise RunFailed(f"{next(iter(found), 'auto')}: {why or 'no metric says which values are better'}")
    run_work = _work_of(experiment, loads[plan.labels[0]]) or math.inf
    return Trials(
        found,
        virtual_s,
        time.perf_counter() - begun_s,
        updates,
        work / run_work,
        metric,
        stages,
        None if start is None else fmean(start),
        ranking.decisive,
        ranking.by_table,
        problems,
    )


def _prepared(
    experiment: Experiment,
    methods: Mapping[str, Algorithm],
    labels: Sequence[str],
    stack: ExitStack,
    problems: dict[str, str],
) -> dict[str, _Trial]:
    """Build the trial of each candidate; add the error of one that cannot be built to ``problems``."""
    common, trials = _of_trials(experiment), dict[str, _Trial]()
    for label in labels:
        try:  # executors fork processes, which must happen before any of them has trained
            trials[label] = _Trial.of(replace(common, algorithm=methods[label]), stack)
        except USER_ERRORS as error:
            problems[label] = one_line(format_error(error))
    return trials


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates in the order of a comparison, the best first."""

    order: Sequence[str]
    decisive: bool  # whether one of them is clearly better than the untrained model
    by_table: bool  # whether the first has a worse mean than another, and is before it in the table


def ranked(values: Mapping[str, Sequence[float] | None], untrained: Sequence[float] | None, sign: float) -> Ranking:
    """Rank candidates by their metrics; the first in the table of those than which none is clearly better is next.

    Where none is clearly better than the untrained model, the table's order is kept. Failed candidates come last.

    Args:
        values: metric of each candidate in each part of the validation samples, in the table's order; None = it failed.
        untrained: metric of the untrained model in each part; None = it is not finite.
        sign: 1 if larger values are better, -1 if smaller ones are.
    """
    measured = {label: value for label, value in values.items() if value is not None}
    failed = [label for label in values if label not in measured]
    decisive = untrained is None or any(_clearly_better(value, untrained, sign) for value in measured.values())
    if not decisive or not measured:
        return Ranking([*measured, *failed], decisive and bool(measured), False)
    left, found = dict(measured), list[str]()
    while left:
        best = max(left.values(), key=lambda value: sign * fmean(value))
        found.append(next(label for label, value in left.items() if not _clearly_better(best, value, sign)))
        del left[found[-1]]
    means = {label: sign * fmean(value) for label, value in measured.items()}
    return Ranking([*found, *failed], True, means[found[0]] < max(means.values()))


def _clearly_better(one: Sequence[float], other: Sequence[float], sign: float) -> bool:
    """Check whether ``one`` beats ``other`` by more than `_CLEAR` standard errors; both have a metric's values on equal parts."""
    gains = [sign * (a - b) for a, b in zip(one, other, strict=True)]
    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return fmean(gains) > _CLEAR * error


_Parts = tuple[float, ...]
"""A metric in each part of the validation samples."""


def _measured(going: Mapping[str, _Trial], until_s: float, problems: dict[str, str]) -> dict[str, dict[str, _Parts]]:
    """Continue trials until a virtual time and return the metrics of each; record failures in ``problems``."""
    found = dict[str, dict[str, _Parts]]()
    for label, trial in going.items():
        try:
            found[label] = trial.measured(until_s)
        except USER_ERRORS as error:
            problems[label] = one_line(format_error(error))
    return found


def _finite(value: _Parts | None) -> _Parts | None:
    return value if value is not None and all(map(math.isfinite, value)) else None


def _metric(experiment: Experiment, measured: Mapping[str, Mapping[str, _Parts]]) -> str:
    """Return the metric by which to compare trials: the first target's, else loss, accuracy or another; "" = none.

    The loss tells models apart that have hardly learnt: a language model has the accuracy of its commonest token for long.
    """
    names = next(iter(measured.values()), {})
    wanted = [*(target.metric for target in experiment.targets()), "loss", "accuracy", *names]
    return next((name for name in wanted if name in names and _grows(experiment, name) is not None), "")


def _grows(experiment: Experiment, metric: str) -> bool | None:
    """Check whether larger values of a metric are better, by a target or its name; None if neither tells."""
    for target in experiment.targets():
        if target.metric == metric:
            return (target.mode or direction(metric)) == "max"
    found = direction(metric)
    return None if found is None else found == "max"


def _of_trials(experiment: Experiment) -> Experiment:
    """Derive the settings of trials from the run's: candidates are evaluated on training data that no client gets."""
    with reading("the data module", Rules(experiment.rules)):
        module = experiment.data()
    partition = experiment.partition
    if not partition.validation_share:
        num = sum(load_data(replace(experiment, data=lambda: module)).sizes)
        partition = replace(partition, validation_share=min(_VALIDATION_SHARE, _VALIDATION_ROWS / num))
    # the results of "fast" depend on how clients are grouped, so trials use the exact mode
    exact = 1 if experiment.batch_clients == "fast" else experiment.batch_clients
    return replace(
        experiment, data=lambda: module, partition=partition, engine=Engine(), samples=Samples(), batch_clients=exact
    )


class _Trial(Simulation):
    """Simulation that runs to a virtual time and can continue later; it writes neither a run folder nor checkpoints."""

    reached_s = 0.0  # virtual seconds that the trial has simulated

    @classmethod
    def of(cls, experiment: Experiment, stack: ExitStack) -> _Trial:
        """Set up a simulation for one candidate; ``stack`` closes its executor. Raise the errors of `raafl.runtime.setup.build`."""
        parts = build(experiment, pace=False)
        executor = make_executor(parts, experiment.workers)
        stack.callback(executor.close)
        trial = cls(parts.coordinator, parts.clients, executor, RunRecord(None), None)
        trial._norms = form_of(parts)
        batches, trial._bounds = _in_parts(parts.data)
        trial._evaluator = evaluator_of(parts, AsItIs(), batches)
        return trial

    _evaluator: Evaluator
    _norms: AsItIs
    _bounds: Sequence[tuple[int, int]]

    def measured(self, until_s: float) -> dict[str, _Parts]:
        """Continue to the virtual time ``until_s``; return metrics, averaged over the model then and the model shortly before."""
        from_s, found = self.reached_s, list[dict[str, _Parts]]()
        for part in _MEASURED_AT:
            self.reached_s = from_s + part * (until_s - from_s)
            while self._heap and self._heap[0][0] <= self.reached_s and not self.reason:
                self._turn()
                if self.error is not None:
                    raise self.error
            found.append(self.metrics())
        return {
            name: tuple(map(fmean, zip(*(one[name] for one in found), strict=True)))
            for name in found[-1]
            if all(name in one for one in found)
        }

    def metrics(self) -> dict[str, _Parts]:
        """Evaluate the model on each part of the validation samples; return each metric's values, one for each part."""
        state, found = self.coordinator.state, list[dict[str, float]]()
        with self._norms.filled(state.values, anew=True):
            for start, stop in self._bounds:
                self._evaluator.begin(state.values, state.version)
                self._evaluator.measure(start, stop)
                found.append(self._evaluator.end())
        return {name: tuple(one[name] for one in found) for name in found[-1] if all(name in one for one in found)}

    def save(self) -> dict[str, Any]:
        """Return an empty state: a trial cannot be resumed."""
        return {}

    def _take_raised(self, error: BaseException, client: int | None) -> None:
        raise error


def _in_parts(data: FederatedData) -> tuple[Callable[..., Iterable[Sized]], list[tuple[int, int]]]:
    """Return a function that yields the validation batches, and their division into parts as (first, end) batch numbers."""
    sizes = [num for _, num in data.test_batches()]
    size = min(sizes[0], max(1, sum(sizes) // _PARTS))
    num = sum(1 for _ in data.test_batches(size))
    ends = [num * (part + 1) // _PARTS for part in range(_PARTS)]
    bounds = [(start, end) for start, end in zip([0, *ends], ends, strict=False) if start < end]
    return partial(data.test_batches, size), bounds
