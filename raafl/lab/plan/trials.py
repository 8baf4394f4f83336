"""Try candidate methods in short simulations before a run: successive halving at the virtual clock, on the run's own data.

All candidates are simulated up to the same virtual time and compared by a metric; the better half goes on from there, twice as
far. They train with the run's settings and seed, and are measured on training samples that no client has, so that the test set
plays no part. The plan is made by predictions alone (`planned`), so that it can be announced; `tried` carries it out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from raafl.config.experiment import Experiment
from raafl.config.options import Engine, Samples, seconds
from raafl.config.targets import direction
from raafl.core.algorithm import Algorithm
from raafl.errors import USER_ERRORS, RunFailed, format_error, one_line
from raafl.lab.plan.dry import Prediction
from raafl.local.evaluate import Evaluator
from raafl.runfolder.record import RunRecord
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
        """Return one sentence that says what is tried, and at what price."""
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
        problems: reason for which a trial failed, by label.
    """

    order: Sequence[str]
    virtual_s: float
    real_s: float
    updates: int
    share: float
    metric: str
    stages: Sequence[tuple[float, Mapping[str, float | None]]]
    problems: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Convert the outcome to plain data, without real seconds."""
        return {
            "metric": self.metric,
            "stages": [{"virtual_s": at_s, "measured": dict(found)} for at_s, found in self.stages],
            "virtual_s": round(self.virtual_s, 6),
            "updates": self.updates,
            "share": round(self.share, 4),
            **({"problems": dict(self.problems)} if self.problems else {}),
        }

    def sentence(self) -> str:
        """Return one sentence that says what was measured and what it took, without real seconds: the journal has it."""
        at_s, found = self.stages[-1]
        shown = ", ".join(f"{label} {'failed' if value is None else f'{value:.4g}'}" for label, value in found.items())
        return (
            f"auto: {len(self.order)} methods were tried before virtual time 0, in {self.share:.0%} of the run's work; "
            f"{self.metric} after {at_s:.3g} virtual s: {shown}"
        )


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
    experiment: Experiment, methods: Mapping[str, Algorithm], plan: TrialPlan, loads: Mapping[str, Load]
) -> Trials:
    """Carry out a plan; candidates that measure alike stay in the plan's order.

    Args:
        experiment: settings of the run.
        methods: candidates by label.
        plan: plan of the trials.
        loads: predicted work of each candidate, by label.

    Raises:
        RunFailed: every trial failed, or no metric is known of which better values could be told.
    """
    begun_s, problems, dropped = time.perf_counter(), dict[str, str](), list[str]()
    stages: list[tuple[float, dict[str, float | None]]] = []
    metric, work, virtual_s = "", 0.0, 0.0
    with ExitStack() as stack:
        common, trials = _of_trials(experiment), dict[str, _Trial]()
        for label in plan.labels:
            try:  # executors fork processes, which must happen before any of them has trained
                trials[label] = _Trial.of(replace(common, algorithm=methods[label]), stack)
            except USER_ERRORS as error:
                problems[label] = one_line(format_error(error))
                dropped.append(label)
        going = list(trials)
        for until_s, num_left in plan.stages:
            passed_s = until_s - (stages[-1][0] if stages else 0.0)
            work += passed_s * sum(loads[label].per_s for label in going)
            virtual_s += passed_s * len(going)
            measured = _measured({label: trials[label] for label in going}, until_s, problems)
            metric = metric or _metric(experiment, measured)
            values = {label: _finite(measured.get(label, {}).get(metric)) for label in going}
            sign = -1.0 if _grows(experiment, metric) else 1.0
            # stable: equal candidates stay in the plan's order
            ranked = sorted(going, key=lambda label: _rank(values[label], sign))
            stages.append((until_s, values))
            dropped = [*ranked[num_left:], *dropped]
            going = [label for label in plan.labels if label in ranked[:num_left]]
        updates = sum(trial.coordinator.merged for trial in trials.values())
    order = [*going, *dropped]
    if order[0] in problems or not metric:
        raise RunFailed(f"{order[0]}: {problems.get(order[0], 'no metric says which values are better')}")
    run_work = _work_of(experiment, loads[plan.labels[0]]) or math.inf
    real_s = time.perf_counter() - begun_s
    return Trials(order, virtual_s, real_s, updates, work / run_work, metric, stages, problems)


def _measured(going: Mapping[str, _Trial], until_s: float, problems: dict[str, str]) -> dict[str, dict[str, float]]:
    """Continue each trial until a virtual time and return its metrics, by label; add failed trials to ``problems``."""
    found = dict[str, dict[str, float]]()
    for label, trial in going.items():
        try:
            found[label] = trial.measured(until_s)
        except USER_ERRORS as error:
            problems[label] = one_line(format_error(error))
    return found


def _rank(value: float | None, sign: float) -> float:
    """Return a sort key for a trial's metric: ``sign`` is -1 if larger is better, and failed trials (None) come last."""
    return math.inf if value is None else sign * value


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _metric(experiment: Experiment, measured: Mapping[str, Mapping[str, float]]) -> str:
    """Choose the metric by which trials are compared: the first target's, else accuracy, loss or any other; "" if none."""
    names = next(iter(measured.values()), {})
    wanted = [*(target.metric for target in experiment.targets()), "accuracy", "loss", *names]
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
        trial._measure_now = evaluator_of(parts, form_of(parts))
        return trial

    _measure_now: Evaluator

    def measured(self, until_s: float) -> dict[str, float]:
        """Continue until a virtual time; return metrics of the model, averaged over that time and one shortly before."""
        from_s, found = self.reached_s, list[dict[str, float]]()
        for part in _MEASURED_AT:
            self.reached_s = from_s + part * (until_s - from_s)
            while self._heap and self._heap[0][0] <= self.reached_s and not self.reason:
                self._turn()
                if self.error is not None:
                    raise self.error
            state = self.coordinator.state
            found.append(self._measure_now(state.values, state.version))
        return {name: fmean(one[name] for one in found) for name in found[-1] if all(name in one for one in found)}

    def save(self) -> dict[str, Any]:
        """Return an empty state: a trial cannot be resumed."""
        return {}

    def _take_raised(self, error: BaseException, client: int | None) -> None:
        raise error
