"""Simulated runs by their options, and what ends one between two events without a word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raafl.config.parse import parse
from raafl.runtime.lifecycle.checkpointer import Checkpointer
from raafl.runtime.run import simulate
from tests import remembered
from tests.federation import whole


class Crash(Exception):
    """Stands for whatever ends a process between two events."""


def simulated(*options: str) -> dict[str, Any]:
    """Run it to its end; return the summary."""
    parsed = parse("simulate", ["--progress=quiet", *options])
    with remembered.findings():
        return whole(simulate(parsed.experiment, parsed.config_yaml))[0]


@contextmanager
def crash(monkeypatch: pytest.MonkeyPatch, num_settled: int) -> Iterator[None]:
    """End the run within this context once so many tasks are settled."""
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
    """Run it until so many tasks are settled."""
    with crash(monkeypatch, num_settled):
        simulated(*options)
