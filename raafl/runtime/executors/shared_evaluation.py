"""Share an evaluation between ranks: rank 0 evaluates from the first batch on, other ranks from the last one backwards.

Rank 0 adds partial sums in the order of batches, so that metrics have the bits of one process.
"""

from __future__ import annotations

import threading
from typing import Any

from raafl.local.evaluation.evaluate import Evaluator
from raafl.runtime.executors.rank_worker import FOR_EVER_S
from raafl.runtime.protocol import Measure, no_tensors
from raafl.submodel import FlatTensors
from raafl.transport import Connection, Kind, Message

_PARTS = 8
"""Number of parts of an evaluation for each process, so that fast processes take more and none waits long."""


class Shared:
    """One evaluation whose batches several ranks share.

    Attributes:
        is_refused: whether a rank found that the evaluation cannot be shared, or failed in it.
    """

    def __init__(
        self, evaluator: Evaluator, values: FlatTensors, version: int, num_processes: int, changed: threading.Condition
    ) -> None:
        """Start an evaluation.

        Args:
            evaluator: evaluator of rank 0.
            values: values of the global model.
            version: version of the global model.
            num_processes: number of processes, rank 0 included.
            changed: condition that guards state shared by the ranks' threads.
        """
        self._evaluator, self._changed = evaluator, changed
        self._values = evaluator.begin(values, version)
        num = evaluator.num_batches
        size = max(num // (_PARTS * num_processes), 1)
        self._parts = [(start, min(start + size, num)) for start in range(0, num, size)]
        # range of parts that no process has begun; the first part is always rank 0's
        self._first, self._last = 1, len(self._parts)
        # by part: its partial sums; None = a rank has returned it unevaluated
        self._found: dict[int, dict[str, Any] | None] = {}
        self._num_out = 0
        self.is_refused = self._is_closed = False

    @property
    def has_more(self) -> bool:
        """Whether batches are left that no rank has begun; the caller must hold the shared lock."""
        return self._first < self._last and not (self.is_refused or self._is_closed)

    def close(self) -> None:
        """Give the other ranks no more batches, and wait until they have evaluated theirs; the caller must hold the shared lock."""
        self._is_closed = True
        while self._num_out:  # parts are left in progress only if evaluating here has failed
            self._changed.wait()

    def measure(self) -> dict[str, float]:
        """Evaluate batches in this process while other ranks help; return the metrics."""
        for place, (start, stop) in enumerate(self._parts):
            partials = self._of_another(place)
            if partials is None:
                self._evaluator.measure(start, stop)
            else:
                self._evaluator.add(partials)
        return self._evaluator.end()

    def _of_another(self, place: int) -> dict[str, Any] | None:
        """Wait for the partial sums of a part that another process evaluates; None = this process must evaluate it."""
        with self._changed:
            if place < self._last:
                self._first = max(self._first, place + 1)
                return None
            while place not in self._found:
                self._changed.wait()
            return self._found.pop(place)

    def measure_at(self, pair: Connection) -> None:
        """Let one rank evaluate parts of the batches until none is left; runs on the thread for that rank."""
        values: FlatTensors | None = self._values  # the values are sent only with a rank's first part
        while (place := self._take()) is not None:
            partials = None
            try:
                start, stop = self._parts[place]
                asked = Measure(start, stop, values is not None)
                pair.send(Message(Kind.MEASURE, meta=asked.to_meta(), tensors=values))
                answer = pair.recv(no_tensors, FOR_EVER_S)
                values = None
                if answer.kind is not Kind.MEASURED:
                    self.is_refused = True
                    return
                partials = answer.meta
            finally:
                with self._changed:
                    self._found[place] = partials
                    self._num_out -= 1
                    self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            if not self.has_more:
                return None
            self._last -= 1
            self._num_out += 1
            return self._last
