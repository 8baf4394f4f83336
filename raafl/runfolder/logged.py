"""Collect values that the clients' `training_step` logs, and average them over the tasks between two evaluations.

The values come from clients, so their number, names and sizes are bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from raafl.core.types import Update
from raafl.local.evaluation.metrics import LOSS, MAX_LOGGED, MAX_METRIC, PEAK, TEST
from raafl.runfolder.schema import TRAIN
from raafl.sanitize import sanitize_text

MAX_NAME = 100
"""Characters kept of a metric's name."""
MAX_OTHERS = 50
"""Metrics that get a mean though the server's own trial step has not logged them."""
MAX_OF_ONE = 16
"""Of these, the metrics that the updates of one client may be the first to name."""

Sums = dict[str, list[float]]
"""By metric, the sum of weight times value and the sum of weights."""


def logged_values(update: Update) -> dict[str, float]:
    """Return the values that `training_step` logged in a task, sorted by name."""
    found = (
        (sanitize_text(name, MAX_NAME), value)
        for name, value in update.metrics.items()
        if name not in (LOSS, PEAK) and not name.startswith(TEST) and abs(value) <= MAX_METRIC
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
        """Start empty."""
        self._names: dict[str, bool] = {}  # of metrics that get a mean, and whether the trial step has logged it
        self._named_by: Counter[int] = Counter()  # client -> names that it was the first to log
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
        self._named_by.update(dict(data.get("named_by", ())))  # which earlier versions did not count
        self._open = _copied(data["open"])
        self._closed = [(version, _copied(sums)) for version, sums in data["closed"]]


def _copied(sums: Mapping[str, list[float]]) -> Sums:
    return {name: list(pair) for name, pair in sums.items()}
