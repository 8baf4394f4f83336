"""Evaluate snapshots of the global model while a run on the wall clock continues."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raafl.errors import CodeFailed
from raafl.local.evaluation.evaluate import Evaluator
from raafl.local.failure import measuring
from raafl.submodel import FlatTensors


class SnapshotEvaluator(threading.Thread):
    """Evaluator on its own thread. If a newer snapshot is offered before one is evaluated, the older one is skipped.

    `failure`: error of the user's code in an evaluation, after which nothing more is evaluated; None = no error.
    """

    def __init__(self, evaluator: Evaluator, on_values: Callable[[int, dict[str, float], FlatTensors], None]) -> None:
        """Evaluate with ``evaluator`` on this thread; then call ``on_values`` with version, metrics and values."""
        super().__init__(name="evaluator", daemon=True)
        self._evaluator, self._changed, self._ended = evaluator, threading.Condition(), False
        self._on_values = on_values
        self._next: tuple[int, float, FlatTensors] | None = None
        self._spare: FlatTensors | None = None
        self._done: list[tuple[int, float, dict[str, float]]] = []
        self.failure: CodeFailed | None = None

    def offer(self, version: int, at_s: float, values: FlatTensors) -> None:
        """Copy a snapshot of the model for evaluation, replacing a snapshot that still waits; return once it is copied."""
        with self._changed:
            # a snapshot whose evaluation has not begun may be overwritten; one being evaluated is in neither variable
            snapshot = self._next[2] if self._next is not None else self._spare
            self._spare = None
            if snapshot is None:
                snapshot = values.clone()
            else:
                snapshot.copy_(values)
            self._next = (version, at_s, snapshot)
            self._changed.notify()

    def done(self) -> list[tuple[int, float, dict[str, float]]]:
        """Return (version, time of the snapshot, metrics) of each evaluation that was finished since the last call."""
        with self._changed:
            done, self._done = self._done, []
            return done

    def finish(self, timeout_s: float) -> list[tuple[int, float, dict[str, float]]]:
        """Evaluate the waiting snapshot, end the thread, and return the last results; give up after ``timeout_s`` seconds."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self.join(timeout_s)
        return self.done()

    def run(self) -> None:
        """Evaluate offered snapshots until `finish` is called; this is the main function of the thread."""
        while True:
            with self._changed:
                while self._next is None and not self._ended:
                    self._changed.wait()
                if self._next is None:
                    return
                version, at_s, snapshot = self._next
                self._next = None
            try:
                with measuring(version):
                    metrics = self._evaluator(snapshot, version)
                    # called here, so that its errors end the run and not only this thread
                    self._on_values(version, metrics, snapshot)
            except CodeFailed as failed:
                with self._changed:
                    self.failure = failed
                return
            with self._changed:  # not held during an evaluation, since the run's loop must never wait for one
                self._done.append((version, at_s, metrics))
                self._spare = snapshot
