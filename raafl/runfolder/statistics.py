"""Compute the participation of clients, the trained share of the model, and the memory of tasks in a run."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from raafl.core.payload import Payload
from raafl.core.types import NUM_TESTED, Assignment, Settled, Update
from raafl.local.evaluate import LOSS, MAX_LOGGED, MAX_METRIC, PEAK, TEST
from raafl.runfolder.schema import CLIENT, MERGED, TESTED, TRAIN
from raafl.sanitize import sanitize_text
from raafl.submodel import FULL, FlatTensors, Spec, Submodels

MAX_ELEMENTS = 50_000_000
"""Elements of the largest model for which the union of several submodels is counted."""
MOST = 2**53
"""Upper bound on the samples and bytes of one client."""
_MAX_CACHED = 256


class Coverage:
    """Calculator of the share of the model that a set of submodels trains (coverage)."""

    def __init__(self, submodels: Submodels) -> None:
        self._submodels, self._payload = submodels, Payload(submodels)
        self._shares: OrderedDict[frozenset[Spec], float | None] = OrderedDict()
        self._layout = submodels.layout(FULL, "trained")  # trained tensors only: frozen ones may be most of the model
        self._entries = [entry for entry in self._layout.entries if entry.name in submodels.parameters]
        self._total = sum(entry.numel for entry in self._entries)

    def share(self, specs: Iterable[Spec]) -> float | None:
        """Return the share, 0 to 1, of the trainable parameters that are in at least one of the submodels.

        The result is None if the model has more than `MAX_ELEMENTS` parameters and there are several submodels, since
        counting would take too long.
        """
        key = frozenset(map(self._submodels.normal, specs))
        if key not in self._shares:
            self._shares[key] = self._share(key)
            if len(self._shares) > _MAX_CACHED:
                self._shares.popitem(last=False)
        return self._shares[key]

    def _share(self, specs: frozenset[Spec]) -> float | None:
        if FULL in specs or not self._total:
            return 1.0
        if len(specs) == 1:
            (spec,) = specs
            entries = self._submodels.layout(spec, "trained").by_name
            return sum(entries[e.name].numel for e in self._entries if e.name in entries) / self._total
        if self._total > MAX_ELEMENTS:
            return None
        count = FlatTensors.zeros(self._layout)
        for spec in specs:
            self._payload.plan(spec, "trained").cover_(count)
        return sum(int(count[entry.name].count_nonzero()) for entry in self._entries) / self._total


class RunStatistics:
    """Statistics of a run, such as working time and coverage, updated at the start and end of each task."""

    def __init__(
        self,
        coverage: Coverage | None = None,
        peak_bytes: Callable[[Assignment], int] | None = None,
        num_tokens: Callable[[Assignment, Update], float] | None = None,
    ) -> None:
        """Store the counters' functions.

        `coverage`: counter of which elements of the model were trained; None = not counted. `peak_bytes`: returns a
        task's predicted memory in bytes; None = not counted. `num_tokens`: returns the number of tokens on which a task
        trained; None = the model is no language model.
        """
        self._coverage, self._peak_bytes, self._num_tokens = coverage, peak_bytes, num_tokens
        self._tokens = 0.0  # tokens of all merged updates
        self._open: tuple[int, set[Spec]] = (0, set())  # next version, and submodels of the tasks merged into it
        self._shares: list[float] = [0, 0.0, math.inf]  # number, sum and minimum of the coverage of all versions so far
        self._since: dict[int, float] = {}  # seconds at which each open task was assigned, by assignment id
        # latest version in which a client took part, and the number of versions in which it did, by client id
        self._rounds: dict[int, list[int]] = {}
        self._num_rounds = 0  # sum over clients of the number of versions in which they took part
        # number of test samples, and latest metrics on them, by client id
        self._tested: dict[int, tuple[float, dict[str, float]]] = {}
        self._memory = [0.0, 0.0]  # most memory of a task in bytes, predicted and measured
        self.regions: Counter[int] = Counter()
        self.logged = LoggedMeans()

    # ---- called during the run ----

    def assigned(self, assignment: Assignment) -> None:
        """Count the start of a task."""
        self._since[assignment.id] = assignment.assigned_s

    def is_working(self, assignment: int) -> bool:
        """Check whether the task of an assignment has begun and not ended."""
        return assignment in self._since

    def trained(self, assignment: int, now: float) -> float:
        """Count the end of a task's training, when the update is about to be sent; return the seconds that the task took."""
        return now - self._since.pop(assignment, now)

    def settled(self, settled: Settled, known: Mapping[str, float]) -> dict[str, Any]:
        """Count the end of a task; return the cells of its row in clients.csv."""
        assignment, update = settled.assignment, settled.update
        cells: dict[str, Any] = {}
        if assignment is not None:
            self._since.pop(assignment.id, None)
            if self._peak_bytes is not None:
                cells["peak_bytes"] = self._peak_bytes(assignment)
                self._memory[0] = max(self._memory[0], cells["peak_bytes"])
        tested = {} if update is None else _own_metrics(update, known)
        logged = {} if update is None else logged_values(update)
        if update is not None:
            if logged:
                cells["logged"] = logged
            measured = update.metrics.get(PEAK, 0.0)
            if 0 < measured < MOST:
                cells["measured_bytes"] = int(measured)
                self._memory[1] = max(self._memory[1], measured)
            if tested:
                cells |= {TESTED + name: value for name, value in tested.items()}
                cells[f"{TESTED}num_samples"] = int(update.metrics[NUM_TESTED])
        if settled.outcome == MERGED and assignment is not None:
            self._merged(settled.client, settled.version, assignment)
            if update is not None:
                self.logged.add(settled.client, logged, update.num_samples)
                self._tokens += self._num_tokens(assignment, update) if self._num_tokens is not None else 0.0
            if tested and update is not None:
                self._tested[settled.client] = (update.num_samples + update.metrics[NUM_TESTED], tested)
        return cells

    def _merged(self, client: int, version: int, assignment: Assignment) -> None:
        if self._open[0] != version:
            self._close()
            self._open = (version, set())
        self._open[1].add(assignment.spec)
        self.regions[assignment.region] += 1
        rounds = self._rounds.setdefault(client, [0, 0])
        rounds[1] += (is_new := rounds[0] != version)
        self._num_rounds += is_new
        rounds[0] = version

    def _close(self) -> None:
        """Store the coverage of the version that the latest merge has completed."""
        specs = self._open[1]
        share = self._coverage.share(specs) if self._coverage is not None and specs else None
        if share is not None:
            number, total, least = self._shares
            self._shares = [number + 1, total + share, min(least, share)]
        self._open = (self._open[0], set())

    # ---- current values ----

    def working_s(self, now: float, ended: Mapping[int, float]) -> float:
        """Return the seconds of all open tasks until ``now``; ``ended``: of those that wait for a merge, by assignment id."""
        return sum(ended.get(number, now - since) for number, since in self._since.items())

    def clients(self) -> dict[str, float]:
        """Return the clients' metrics on their own test data: the latest of each client, averaged by number of samples."""
        means: dict[str, float] = {}
        for name in dict.fromkeys(name for _, metrics in self._tested.values() for name in metrics):
            having = [(size, metrics[name]) for size, metrics in self._tested.values() if name in metrics]
            means[CLIENT + name] = sum(size * value for size, value in having) / sum(size for size, _ in having)
        return means

    def coverage(self) -> dict[str, float | None]:
        """Compute the share of parameters trained by the updates in each model version; return mean and minimum over versions."""
        self._close()
        number, total, least = self._shares
        return {"mean": total / number if number else None, "min": least if number else None}

    def participation(self, version: int, num_clients: int) -> dict[str, float]:
        """Compute the share of model versions that contain an update of each client; return mean and minimum over clients."""
        least = min((num for _, num in self._rounds.values()), default=0) if len(self._rounds) >= num_clients else 0
        return {"mean": self.mean_participation(version, num_clients), "min": least / max(version, 1)}

    def mean_participation(self, version: int, num_clients: int) -> float:
        """Return the mean over clients of the share of model versions that contain an update of the client, in constant time."""
        return self._num_rounds / (max(num_clients, 1) * max(version, 1))

    def memory(self) -> dict[str, int | None]:
        """Return the largest predicted and the largest measured memory of any task, in bytes."""
        predicted, measured = (int(value) or None for value in self._memory)
        return {"predicted_bytes": predicted, "measured_bytes": measured}

    def tokens(self, time_s: float) -> tuple[int, float | None] | None:
        """Return the tokens of merged updates and those a second (None at 0 s); None if the model is no language model."""
        return (
            None if self._num_tokens is None else (round(self._tokens), self._tokens / time_s if time_s > 0 else None)
        )

    # ---- saving and resuming ----

    def save(self) -> dict[str, Any]:
        """Return the state of the statistics as plain data, for a checkpoint."""
        self._close()
        return {
            "open": self._open[0],
            "shares": list(self._shares),
            "since": dict(self._since),
            "rounds": {client: list(rounds) for client, rounds in self._rounds.items()},
            "tested": {client: [size, dict(metrics)] for client, (size, metrics) in self._tested.items()},
            "memory": list(self._memory),
            "regions": dict(self.regions),
            "logged": self.logged.save(),
            "tokens": self._tokens,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore the statistics from the result of `save`."""
        self._open = (data["open"], set())
        self._shares, self._memory = list(data["shares"]), list(data["memory"])
        self._since.update(data["since"])
        self._rounds.update({client: list(rounds) for client, rounds in data["rounds"].items()})
        self._num_rounds = sum(num for _, num in self._rounds.values())
        self._tested.update({client: (size, dict(metrics)) for client, (size, metrics) in data["tested"].items()})
        self.regions.update(data["regions"])
        self.logged.restore(data["logged"])
        self._tokens = data.get("tokens", 0.0)  # checkpoints of earlier versions lack tokens


def _own_metrics(update: Update, known: Mapping[str, float]) -> dict[str, float]:
    """Select the known metrics that a client has measured on its own test data; none if its number of samples is invalid."""
    if not 1 <= update.metrics.get(NUM_TESTED, 0.0) < MOST:
        return {}
    found = {name: update.metrics.get(TEST + name, math.nan) for name in known}
    # the comparison is False for NaN, too
    return {name: value for name, value in found.items() if abs(value) <= MAX_METRIC}


# Average what clients' `training_step` logs, over the tasks between two evaluations. Clients choose it freely, so the
# number, names and sizes are bounded.

MAX_NAME = 100
"""Characters kept of a metric's name."""
MAX_OTHERS = 50
"""Metrics that get a mean though the server's own trial step has not logged them."""
MAX_OF_ONE = 16
"""Largest number of metrics that one client's updates may introduce."""

Sums = dict[str, list[float]]
"""Sum of weight times value, and sum of weights, by metric."""


_NOT_LOGGED = frozenset({LOSS, PEAK})


def logged_values(update: Update) -> dict[str, float]:
    """Return the values that `training_step` logged in a task, sorted by name."""
    if update.metrics.keys() <= _NOT_LOGGED:
        return {}
    found = (
        (sanitize_text(name, MAX_NAME), value)
        for name, value in update.metrics.items()
        if name not in _NOT_LOGGED and not name.startswith(TEST) and abs(value) <= MAX_METRIC
    )
    return dict(sorted(islice(found, MAX_LOGGED)))


def column_of(name: str) -> str:
    """Return the name of the column in metrics.csv for the mean of a value that `training_step` logs."""
    return name if name.startswith(TRAIN.rstrip("/")) else TRAIN + name


class LoggedMeans:
    """Means, weighted by samples, of the values logged in tasks that were merged between two evaluations.

    A task counts for the first evaluation that is requested after its merge. If that evaluation is skipped in favour of
    a newer one, the task counts for the newer one.
    """

    def __init__(self) -> None:
        self._names: dict[str, bool] = {}  # whether the trial step has logged it, by the metric's name
        self._named_by: Counter[int] = Counter()  # number of names that a client was the first to log, by client id
        self._open: Sums = {}
        self._closed: list[tuple[int, Sums]] = []

    def expect(self, names: Iterable[str]) -> None:
        """Reserve columns for the names that `training_step` logs, since the number of columns is limited."""
        self._names |= {sanitize_text(name, MAX_NAME): True for name in names}

    def add(self, client: int, values: Mapping[str, float], num_samples: int) -> None:
        """Add the values logged in a merged task."""
        for name, value in values.items():
            if not self._admits(client, name):
                continue
            sums = self._open.setdefault(name, [0.0, 0.0])
            sums[0] += num_samples * value
            sums[1] += num_samples

    def _admits(self, client: int, name: str) -> bool:
        if name in self._names:
            return True
        num_others = sum(not is_expected for is_expected in self._names.values())
        if num_others >= MAX_OTHERS or self._named_by[client] >= MAX_OF_ONE:
            return False
        self._names[name] = False
        self._named_by[client] += 1
        return True

    def close(self, version: int) -> None:
        """Mark that an evaluation of ``version`` was requested: values added from now on count for a later evaluation."""
        self._closed.append((version, self._open))
        self._open = {}

    def take(self, version: int) -> dict[str, float]:
        """Return the means that belong to the evaluation of ``version``, by their columns in metrics.csv."""
        due = [sums for closed, sums in self._closed if closed <= version]
        self._closed = [(closed, sums) for closed, sums in self._closed if closed > version]
        means: dict[str, float] = {}
        for name in dict.fromkeys(name for sums in due for name in sums):
            total, weight = (sum(sums[name][place] for sums in due if name in sums) for place in (0, 1))
            column = column_of(name)
            if weight > 0 and (column == name or column not in means):
                means[column] = total / weight
        return means

    def save(self) -> dict[str, Any]:
        """Return the state of the means as plain data, for a checkpoint."""
        closed = [[version, _copied(sums)] for version, sums in self._closed]
        named_by = [list(pair) for pair in self._named_by.items()]
        return {"names": dict(self._names), "open": _copied(self._open), "closed": closed, "named_by": named_by}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore the means from the result of `save`."""
        self._names |= data["names"]
        self._named_by.update(dict(data.get("named_by", ())))  # checkpoints of earlier versions lack it
        self._open = _copied(data["open"])
        self._closed = [(version, _copied(sums)) for version, sums in data["closed"]]


def _copied(sums: Mapping[str, list[float]]) -> Sums:
    return {name: list(pair) for name, pair in sums.items()}
