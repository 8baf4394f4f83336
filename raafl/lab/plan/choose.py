"""Choose a method and its settings for a set of devices, from measured runs on other sets and predicted times.

The time to a target is the product of the two. The first follows from this fleet alone and is exact on the virtual clock
(`raafl.lab.plan.dry`). The second is learnt: `choices.json` has, for each fleet and task of the grid, how many updates each method
took; fleets count by how near they are (`Features`). `python -m benchmarks.choices` makes that file. Before a simulation the
best candidates are tried on its own data (`raafl.lab.plan.trials`), since the table knows fleets and not the task.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from statistics import fmean, geometric_mean, median_low
from typing import Any

from raafl.algorithms import ALGORITHMS, AUTO
from raafl.algorithms.fed_buff import fed_buff
from raafl.config.experiment import Experiment
from raafl.core.algorithm import Algorithm
from raafl.core.select import SelectContext
from raafl.core.types import ClientInfo, Work
from raafl.devices.profiles import Profile
from raafl.errors import BadInput, RunFailed, cause, nearest, one_line
from raafl.lab.plan.dry import Prediction, World, predict
from raafl.lab.plan.trials import SHARE, Load, TrialPlan, Trials, planned, tried
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.select.submodels import Full
from raafl.runfolder.events import JournalReader
from raafl.runfolder.schema import JOURNAL
from raafl.runtime.lifecycle.last_entries import TRIALS_S
from raafl.sanitize import sanitize_text

TABLE = Path(__file__).with_name("choices.json")
TASK_S = "{task_s}"
"""Stands in a method's settings for the seconds that a task of a submodel may take."""
TASK_SHARE = 1.2
"""These seconds over a typical client's for a task with the whole model: the geometric mean over clients.

The median of a fleet of two kinds is that of one kind, so that clients of the other got the tiniest submodels."""
NOT_REACHED = 2.0
"""In the table a run that did not reach its target counts as reaching it after so many times the updates that it merged.

Choosing needs a number; what choices are worth is measured without it (`benchmarks.choices`)."""
_UNIT = Profile(name="unit", flops_per_s=1e9)
"""Machine in whose seconds the work of candidates is counted."""
_log = logging.getLogger(__name__)
_MOST_UPDATES, _UPDATES_EACH = 400, 10
_LEAST_AT_WORK = 2.0
"""Clients at work below which a buffer is left as it is: with so few it has one or two updates."""
_LEAST_S = 1e-300
"""Least seconds of an update: where tasks take no time, the numbers of updates alone decide."""
_MOST_SLACK = 0.15
"""Largest share of a round's interval for which TimelyFL waits for late clients: 0.3 cost updates where times vary much."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method with settings that may be chosen."""

    label: str  # name in the table of measured runs
    method: str  # name of the algorithm
    # arguments of the algorithm's factory; under ``submodel`` those of `raafl.parts.RateSelect`
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_clients: int = 1  # number of clients in the measured runs, by which settings are scaled
    steps: int = 1  # local steps per task in the measured runs, by which settings are scaled

    def for_fleet(self, fleet: FleetSummary) -> Candidate:
        """Adapt the settings to another fleet; return the adapted candidate.

        The aim is to keep the staleness of the measured runs. With C clients at work and a buffer of K updates, an
        update is on average about (C - 1) / K merges old (Alahyane et al. 2025, arXiv 2502.08206). So the buffer size
        is scaled with the number of clients; without a buffer, the number of clients at work is limited.
        """
        found: dict[str, Any] = {
            name: max(1, round(value * fleet.steps / self.steps)) if name.endswith("_steps") else value
            for name, value in self.settings.items()
        }
        trigger = ALGORITHMS[self.method]().trigger
        if "buffer_size" in found and self.num_clients > 1:
            scaled = found["buffer_size"] * (fleet.num_clients - 1) / (self.num_clients - 1)
            found["buffer_size"] = max(1, round(scaled))
        elif trigger.restart == "arrival" and trigger.staleness(2) > 0 and fleet.num_clients > self.num_clients:
            found["concurrency"] = self.num_clients
        if "submodel" in found:
            limit = {
                name: fleet.typical_s * TASK_SHARE if value == TASK_S else value
                for name, value in found["submodel"].items()
            }
            if "seconds" in limit:  # a simulation without variation measures exactly the predicted times
                limit |= {"measured": True, "relative": True}
            found["submodel"] = {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in limit.items()}
        return replace(self, settings=found)

    def algorithm(self) -> Algorithm:
        """Build the algorithm with its settings; raises the same errors as its factory."""
        made = dict(self.settings)
        if "submodel" in made:
            made["submodel"] = RateSelect(**made["submodel"])
        return ALGORITHMS[self.method](**made)

    def options(self) -> list[str]:
        """Return the command-line options that select this method and its settings."""
        shown = {
            name: {"class_path": "raafl.parts.RateSelect", "init_args": value} if name == "submodel" else value
            for name, value in self.settings.items()
        }
        return [
            "--algorithm",
            self.method,
            *(f"--algorithm.{name}={json.dumps(value)}" for name, value in shown.items()),
        ]

    def __str__(self) -> str:
        settings = ", ".join(
            _submodels(value) if name == "submodel" else f"{name} {value}" for name, value in self.settings.items()
        )
        return f"{self.method} ({settings})" if settings else self.method


def _submodels(settings: Mapping[str, Any]) -> str:
    seconds = settings.get("seconds")
    return "submodels" if seconds is None or seconds == TASK_S else f"submodels of {seconds:.3g} s"


@dataclass(frozen=True, slots=True)
class Cell:
    """Measured runs of all candidate methods on one fleet (set of client devices) and one learning task."""

    fleet: str  # names of the fleet's and the task's files
    task: str
    features: Features  # numbers that describe the fleet
    # median number of updates until the target over seeds, by the candidate's label; `NOT_REACHED` = never
    updates: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Table:
    """Table of measured runs: how many updates each candidate needed on each fleet (set of client devices).

    Attributes:
        candidates: methods with settings.
        cells: measured numbers of updates, for each fleet and learning task.
        held_out: summary of the choices on fleets that were left out; empty = unknown.
        rates: result of the learning-rate searches, one for each method and task: "pairs" = number of searches; "same" =
            number of searches that found the most common best rate; empty = unknown.
    """

    candidates: Sequence[Candidate]
    cells: Sequence[Cell]
    held_out: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path = TABLE) -> Table:
        """Read the table of measured runs from its file.

        Raises:
            BadInput: the file does not exist.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadInput(
                "algorithm is auto, but this version has no measurements to choose by: name a method"
            ) from None
        cells = [Cell(**{**one, "features": Features(**one["features"])}) for one in data["cells"]]
        return cls([Candidate(**one) for one in data["candidates"]], cells, data["held_out"], data.get("rates", {}))

    def to_json(self) -> dict[str, Any]:
        """Convert the table of measured runs to plain data."""
        return asdict(self)

    def updates(self, features: Features) -> dict[str, float]:
        """Estimate how many updates each candidate needs to reach a target: multiples of the smallest number.

        The estimate is the geometric mean over the measured runs; a run on a fleet at distance d has weight ``exp(-d^2)``.

        Args:
            features: description of the fleet (set of client devices) for which to estimate.
        """
        squares = [cell.features.distance(features) ** 2 for cell in self.cells]
        weights = [math.exp(min(squares) - square) for square in squares]
        found = {}
        for one in self.candidates:
            logs = [
                (weight, math.log(cell.updates[one.label] / min(cell.updates.values())))
                for weight, cell in zip(weights, self.cells, strict=True)
                if one.label in cell.updates
            ]
            total = sum(weight for weight, _ in logs)
            if total > 1e-6:
                found[one.label] = math.exp(sum(weight * log for weight, log in logs) / total)
        return found

    def text(self) -> str:
        """Describe how `auto` chooses a method, the candidates, and how well its choices did on fleets not in the table."""
        fleets, tasks = (dict.fromkeys(getattr(cell, name) for cell in self.cells) for name in ("fleet", "task"))
        held = self.held_out
        error = "not known"
        if held:
            error = f"{held['median']:.2f} x the best time (median of {held['cells']} cells), {held['worst']:.2f} x at worst"
        lines = [
            "auto  (chosen before the run)",
            "  expected time = seconds of an update here, by a dry run, x updates to a target on the nearest fleets of the grid",
            f"  grid: {', '.join(fleets)}; {', '.join(tasks)}",
            *(f"  candidate: {one.label}: {one}" for one in self.candidates),
            f"  on fleets left out: {error}",
            *self._rates(),
            f"  in a simulation the best are tried first, in about {SHARE:.0%} of its work: --algorithm.trials 0 leaves that out",
            "  --algorithm.methods '[fed_buff, fed_avg]' chooses among these alone",
        ]
        return "\n".join(lines)

    def _rates(self) -> list[str]:
        if not self.rates:
            return []
        same = f"{self.rates['same']} of {self.rates['pairs']}"
        return [
            f"  learning rate, local steps: as configured; in the grid's search {same} methods and tasks had one best rate"
        ]

    def nearest(self, features: Features) -> list[str]:
        """Return the names of the measured fleets, the most similar first."""
        return list(
            dict.fromkeys(cell.fleet for cell in sorted(self.cells, key=lambda c: c.features.distance(features)))
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen method, and the reasons for the choice."""

    candidate: Candidate  # chosen method, with settings for this fleet
    # expected time to a target as a multiple of the chosen candidate's, by label, best first
    scores: Mapping[str, float]
    problems: Mapping[str, str]  # why other candidates cannot be run, by label
    reasons: tuple[str, ...]  # explanations for the user, one line each
    features: Features  # numbers that describe the fleet
    trials: Trials | None = None  # result of the trials on the run's own data; None = no trials

    def to_json(self) -> dict[str, Any]:
        """Convert the choice to plain data, for the journal."""
        own = self.candidate
        return {
            "method": own.method,
            "settings": dict(own.settings),
            "reasons": list(self.reasons),
            "scores": {name: round(score, 4) for name, score in self.scores.items()},
            "problems": dict(self.problems),
            "features": {name: round(value, 4) for name, value in asdict(self.features).items()},
            **(
                {} if self.trials is None else {"trials": self.trials.to_json(), TRIALS_S: round(self.trials.real_s, 3)}
            ),
        }


def choose(
    experiment: Experiment, table: Table | None = None, *, share: float = 0.0, only_plan: bool = False
) -> Choice:
    """Choose a method for an experiment with `algorithm: auto`; the same experiment always gets the same method.

    `table`: table of measured runs; None = the table that raafl contains.
    `share`: share of the run's work for trials of the best candidates; 0 = the table alone decides (see `trial_share`).
    `only_plan`: make no trials, but say which would be made.

    Raises:
        BadInput: no candidate can be run, or the user asked for a method that is not in the table.
    """
    table, world = table or Table.load(), World(experiment)
    fleet = FleetSummary.of(world)
    candidates = {one.label: one.for_fleet(fleet) for one in _asked_for(experiment, table)}
    needed = table.updates(fleet.features)
    most = min(_MOST_UPDATES, _UPDATES_EACH * fleet.num_clients)
    scores, problems = dict[str, float](), dict[str, str]()
    found = dict[str, Prediction]()
    for label, one in candidates.items():
        predicted = _predicted(world, one, most)
        if predicted.update_s is None or predicted.note is not None or label not in needed:
            problems[label] = predicted.problem or predicted.note or "it was not measured on similar fleets"
        else:
            found[label] = predicted
            scores[label] = max(predicted.update_s, _LEAST_S) * needed[label]
    if not scores:
        label, why = next(iter(problems.items()))
        raise BadInput(f"algorithm is auto, but none of the methods to choose from can run here; {label}: {why}")
    order = sorted(scores, key=lambda label: (scores[label], label))
    trials, notes = None, list[str]()
    if share > 0:
        loads = {label: Load.of(one) for label, one in found.items()}
        # stable: equal candidates stay in the table's order
        promising = sorted(order, key=_promise(table, fleet.features, found).__getitem__)
        plan = planned(promising, loads, experiment, share, fleet.median_s)
        if isinstance(plan, str):
            notes.append(f"auto: by the table alone: {plan}")
        elif only_plan:
            notes.append(plan.announcement())
        else:
            trials, notes = _tried(experiment, candidates, plan, loads, order)
    best = candidates[_first(order, trials)]
    relative = {label: scores[label] / scores[best.label] for label in order}
    best = _adjusting(best, found[best.label], experiment)
    reasons = (*_reasons(best, relative, found[best.label].update_s or 0.0, fleet, table), *notes)
    return Choice(best, relative, problems, reasons, fleet.features, trials)


def trial_share(algorithm: Algorithm, *, simulated: bool) -> float:
    """Return the share of a run's work for trials: as the user says, else `SHARE` in a simulation and 0 with real clients."""
    own = algorithm.select.trials if isinstance(algorithm.select, Unchosen) else 0.0
    return (SHARE if simulated else 0.0) if own is None else own


def _first(order: Sequence[str], trials: Trials | None) -> str:
    """Return the label of the best candidate in the trials; if they decide nothing, or there are none, in the table."""
    if trials is None:
        return order[0]
    return trials.order[0] if trials.decisive else next(label for label in order if label not in trials.problems)


def _promise(table: Table, features: Features, found: Mapping[str, Prediction]) -> dict[str, float]:
    """Return each candidate's expected time as a ratio to the best one's, on the table's task that suits the candidate most.

    The table cannot tell which of its tasks resembles the run's task, so each task's best candidates are worth a trial.
    """
    promise = dict.fromkeys(found, math.inf)
    for task in {cell.task for cell in table.cells}:
        needed = replace(table, cells=[cell for cell in table.cells if cell.task == task]).updates(features)
        times = {
            label: max(one.update_s or 0.0, _LEAST_S) * needed[label] for label, one in found.items() if label in needed
        }
        for label, time in times.items():
            promise[label] = min(promise[label], time / min(times.values()))
    return promise


def _tried(
    experiment: Experiment,
    candidates: Mapping[str, Candidate],
    plan: TrialPlan,
    loads: Mapping[str, Load],
    order: Sequence[str],
) -> tuple[Trials | None, list[str]]:
    """Run the trials of candidate methods; return their result, or None if they failed, and lines about it for the user."""
    quiet = experiment.progress == "quiet"
    if not quiet:
        _log.info(plan.announcement(), extra={"prefix": ""})
    try:
        found = tried(experiment, {label: candidates[label].algorithm() for label in plan.labels}, plan, loads, order)
    except (BadInput, RunFailed) as error:
        return None, [f"auto: by the table alone, since the trials failed: {one_line(str(error))}"]
    if not quiet:
        _log.info(f"auto: the trials took {found.real_s:.1f} s", extra={"prefix": ""})
    return found, [found.sentence()]


def chosen(experiment: Experiment, choice: Choice) -> Experiment:
    """Return the experiment with the chosen method; the reasons for the choice will be recorded in the run's journal."""
    return replace(experiment, algorithm=replace(choice.candidate.algorithm(), chosen=choice.to_json()))


def chosen_for(experiment: Experiment, simulated: bool | None) -> Experiment:
    """Return the experiment of a script with the chosen method; a resumed run keeps its own.

    `simulated`: whether the run is a simulation; None = it is one that is only predicted.

    Raises:
        BadInput: as `choose`; or trials are asked for in a run of several processes.
    """
    if experiment.resume is not None and (algorithm := chosen_by(Path(experiment.resume))) is not None:
        return replace(experiment, algorithm=algorithm)
    share = trial_share(experiment.algorithm, simulated=simulated is not False)
    if share > 0 and simulated is False:
        raise BadInput(
            f"trials is {share}, but of a real run's processes only one could try methods: name the method that `simulate` has "
            "chosen, or leave trials out"
        )
    return chosen(experiment, choose(experiment, share=share, only_plan=simulated is None))


def chosen_by(folder: Path) -> Algorithm | None:
    """Return the algorithm that was chosen for a run, from its journal; None if the run's method was not chosen by raafl."""
    try:
        found = JournalReader(folder).first().get("chosen")
        if found is None:
            return None
        return replace(Candidate("", found["method"], found["settings"]).algorithm(), chosen=found)
    except FileNotFoundError:
        raise BadInput(f"resume is '{folder}', which has no {JOURNAL}: name the folder of a run") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadInput(
            f"resume is '{folder}', of whose {JOURNAL} the first row, which names the chosen method, is damaged or was altered "
            f"({sanitize_text(cause(error), 150)}): restore it from a copy, or start a new run"
        ) from error


def is_open(algorithm: Algorithm) -> bool:
    """Check whether an algorithm is the placeholder `auto`, for which a method must still be chosen."""
    return algorithm.name == NAME and isinstance(algorithm.select, Unchosen)


def _adjusting(best: Candidate, predicted: Prediction, experiment: Experiment) -> Candidate:
    """Let the chosen method adapt its buffer size or slack to measured times, unless privacy options fix them."""
    takes = signature(ALGORITHMS[best.method]).parameters
    fixed = experiment.privacy.is_on or experiment.secure_aggregation.is_on
    more: dict[str, float] = {}
    if "clients_at_work" in takes and not fixed and predicted.at_work >= _LEAST_AT_WORK:
        more["clients_at_work"] = float(f"{predicted.at_work:.3g}")
    if "most_slack" in takes:
        more["most_slack"] = _MOST_SLACK
    return replace(best, settings={**best.settings, **more})


def _asked_for(experiment: Experiment, table: Table) -> list[Candidate]:
    select = experiment.algorithm.select
    names = select.methods if isinstance(select, Unchosen) else None
    if names is None:
        return list(table.candidates)
    known = [one.method for one in table.candidates]
    for name in names:
        if name not in known:
            raise BadInput(
                f"algorithm.methods has '{name}', for which raafl has no measurements: {nearest(name, known)}"
            )
    return [one for one in table.candidates if one.method in names]


def _predicted(world: World, candidate: Candidate, most: int) -> Prediction:
    try:
        return predict(world, candidate.algorithm(), candidate.label, most, _UNIT)
    except (BadInput, TypeError) as error:
        return Prediction(candidate.label, problem=" ".join(str(error).split()))


def _reasons(
    best: Candidate, scores: Mapping[str, float], update_s: float, fleet: FleetSummary, table: Table
) -> tuple[str, str]:
    others = [f"{label} {score:.2g} x" for label, score in scores.items() if label != best.label][:3]
    beside = f"; expected time beside it by the table: {', '.join(others)}" if others else ""
    near = " and ".join(table.nearest(fleet.features)[:2])
    held = table.held_out
    record = ""
    if held:
        record = f"; on fleets left out its choices took {held['median']:.2f} x the best time, {held['worst']:.2f} x at worst"
    return (
        f"auto: {best}, an update every {update_s:.3g} s{beside}",
        f"auto: {fleet.features.sentence()}; nearest in the grid: {near}{record}",
    )


_SCALES = {"slowest": 1.0, "fastest": 1.0, "link": 0.3, "fits": 0.3, "present": 0.3, "clients": 1.0}
_MOMENTS, _TASKS_AHEAD = 64, 50


@dataclass(frozen=True, slots=True)
class Features:
    """A fleet (all clients' devices) described by six numbers; task times are for training the whole model.

    Attributes:
        slowest: base-2 logarithm of the slowest client's task time divided by the median.
        fastest: base-2 logarithm of the median task time divided by the fastest client's.
        link: share of the median client's task time that is spent on transfers.
        fits: share of the clients that have enough memory for the whole model.
        present: mean share of the time in which a client is available.
        clients: base-10 logarithm of the number of clients.
    """

    slowest: float
    fastest: float
    link: float
    fits: float
    present: float
    clients: float

    def distance(self, other: Features) -> float:
        """Return the Euclidean distance between the numbers that describe two fleets, after scaling them to similar ranges."""
        ours, theirs = asdict(self), asdict(other)
        return math.sqrt(sum(((ours[name] - theirs[name]) / scale) ** 2 for name, scale in _SCALES.items()))

    def sentence(self) -> str:
        """Describe the fleet in one sentence."""
        return (
            f"slowest client {2**self.slowest:.3g} x the median, fastest 1/{2**self.fastest:.3g}; {self.link:.0%} of a task "
            f"is transfers; the model fits {self.fits:.0%}; a client is there {self.present:.0%} of the time"
        )


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """Properties of an experiment's fleet (all clients' devices), from which a method is chosen."""

    features: Features  # numbers that describe the fleet
    num_clients: int  # number of clients (N)
    median_s: float  # predicted seconds of a task with the whole model on the median client
    typical_s: float  # geometric mean of these seconds over clients
    steps: int  # local steps of a task on the median client

    @classmethod
    def of(cls, world: World) -> FleetSummary:
        """Compute the properties of an experiment's fleet from the predicted times of tasks."""
        fleet = world.fleet(ALGORITHMS["fed_avg"]())
        times = {client.id: fleet.task_time(client, Work()) for client in world.clients}
        seconds = sorted(max(time.total_s, 1e-9) for time in times.values())
        median_s = median_low(seconds)
        links = [(time.down_s + time.up_s) / max(time.total_s, 1e-9) for time in times.values()]
        steps = [fleet.samples(client.num_samples, Work()) / world.batch_size for client in world.clients]
        features = Features(
            slowest=math.log2(seconds[-1] / median_s),
            fastest=math.log2(median_s / seconds[0]),
            link=median_low(links),
            fits=fmean(fleet.fits(client, Work().spec) for client in world.clients),
            present=fmean(_present(client, median_s) for client in world.clients),
            clients=math.log10(len(world.clients)),
        )
        return cls(
            features, len(world.clients), median_s, geometric_mean(seconds), max(math.ceil(median_low(steps)), 1)
        )


def _present(client: ClientInfo, task_s: float) -> float:
    """Return the share of time, 0 to 1, in which a client is available, over its profile's period or else its next tasks."""
    horizon_s = client.profile.period_s or _TASKS_AHEAD * task_s
    return fmean(client.profile.available((i + 0.5) / _MOMENTS * horizon_s) for i in range(_MOMENTS))


NAME = AUTO


@dataclass(frozen=True, slots=True)
class Unchosen(Full):
    """Placeholder for the select part (choice of submodels), until `auto` has chosen a method."""

    # names of the methods among which to choose; None = all that raafl has measured
    methods: tuple[str, ...] | None = None
    # share of the run's work that trials may take; None = a tenth in a simulation, no trials with real clients
    trials: float | None = None

    def check(self, fleet: SelectContext) -> list[str]:
        """Return an error that no method has been chosen, so that no run starts with the placeholder."""
        return [
            "algorithm is auto, but no method has been chosen yet: start the run by a command of raafl, or name a "
            "method"
        ]

    def __str__(self) -> str:
        return "chosen before the run"


def auto(methods: list[str] | None = None, trials: float | None = None) -> Algorithm:
    """Choose the method automatically before the run starts, from the clients' devices, the model and the data.

    Args:
        methods: names of the methods among which to choose; None = all that raafl has measurements of.
        trials: share of the run's work that trials of the best candidates may take before the run starts, at least 0
            and below 1; 0 = no trials. None = 0.1 in a simulation, 0 with real clients, whose server then tries on its
            own data.

    Raises:
        BadInput: ``trials`` is out of range.
    """
    if trials is not None and not 0 <= trials < 1:
        raise BadInput(f"trials is {trials}: give a share of the run's work, at least 0 and below 1, such as 0.1")
    select = Unchosen(None if methods is None else tuple(methods), trials)
    return replace(fed_buff(), name=NAME, paper="none", select=select)
