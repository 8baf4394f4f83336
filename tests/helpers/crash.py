"""Simulate runs by command-line options, and let one crash between two events, or be interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raafl.config.parse import parse
from raafl.core.hooks import RunHooks
from raafl.runtime.lifecycle.checkpointer import Checkpointer
from raafl.runtime.run import simulate
from tests.helpers import cached_models
from tests.helpers.small_runs import whole


class Crash(Exception):
    """Exception that stands for the death of a process between two events."""


def simulated(*options: str) -> dict[str, Any]:
    """Simulate with these command-line options to the end; return the summary."""
    parsed = parse("simulate", ["--progress=quiet", *options])
    with cached_models.reuse_findings():
        return whole(simulate(parsed.experiment, parsed.config_yaml))[0]


@contextmanager
def crash(monkeypatch: pytest.MonkeyPatch, num_settled: int) -> Iterator[None]:
    """Make the run within the block raise `Crash` once ``num_settled`` tasks are settled."""
    seen = []

    def on_settled(self: Checkpointer, settled: Any, now: float) -> None:
        seen.append(settled)
        if len(seen) == num_settled:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "on_settled", on_settled)
        with pytest.raises(Crash):
            yield


def crashed(monkeypatch: pytest.MonkeyPatch, num_settled: int, *options: str) -> None:
    """Simulate a run by ``options`` that crashes once ``num_settled`` tasks are settled."""
    with crash(monkeypatch, num_settled):
        simulated(*options)


class StopAt(RunHooks):
    """Interrupts a run, as Ctrl-C does, after a version."""

    def __init__(self, version: int) -> None:
        self.version, self.now = version, 0

    def on_merged(self, version: int, now: float, seconds: float) -> None:
        self.now = version

    def stop_asked(self) -> str | None:
        return "interrupted" if self.now >= self.version else None


def stopped(version: int, *options: str) -> None:
    """Simulate a run by ``options`` that is interrupted after a version."""
    parsed = parse("simulate", ["--progress=quiet", *options])
    assert simulate(parsed.experiment, parsed.config_yaml, StopAt(version))[0]["finished"] == "interrupted"
