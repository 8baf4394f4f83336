"""Count the files of raafl that an event of a simulated run enters, and the calls from one file into another.

The quick start runs for a few updates under `sys.setprofile`. A switch is a call of a function in another file of raafl than
the caller's; what libraries do between two files counts as one call. Rows show the event of each kind with the median of
switches; of joins the one that begins the run, since the others only wait; other kinds leave out the first half, which fills
caches.

- ``join``: the last client joins, and all clients are given work.
- ``task``: a client's task is trained, from its values to its update.
- ``merge``: an update arrives, is merged and recorded, and its client is given new work.
- ``evaluation``: the same, and the new version is evaluated.
- ``update``: ``task`` and ``merge``, the whole way of an update.

    python -m benchmarks.way [--json] [--out FILE]     a table
    python -m benchmarks.way --of merge                every switch of a merge, with how often
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import raafl
from benchmarks.common import Row, main
from raafl.core.types import Arrived, Joined

PACKAGE = str(Path(raafl.__file__).parent) + "/"
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"
NUM_UPDATES = 32


class Trace:
    """Record of an event: the files of raafl that it entered, and its switches from file to file.

    `files`: calls into each file. `switches`: calls from another file, by both files and the function's name.
    """

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.switches: Counter[tuple[str | None, str, str]] = Counter()
        self._stack: list[str] = []

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Record a call or a return; the signature is that for `sys.setprofile`."""
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return
        if event == "call":
            name = name[len(PACKAGE) :]
            caller = self._stack[-1] if self._stack else None
            if name != caller:
                self.switches[caller, name, frame.f_code.co_qualname] += 1
            self.files[name] += 1
            self._stack.append(name)
        elif event == "return" and self._stack:
            self._stack.pop()

    def __add__(self, other: Trace) -> Trace:
        both = Trace()
        both.files, both.switches = self.files + other.files, self.switches + other.switches
        return both

    def counts(self) -> tuple[int, int]:
        """Return the number of files, and the number of switches."""
        return len(self.files), self.switches.total()


def traced(call: Callable[[], Any]) -> tuple[Any, Trace]:
    """Return what ``call`` returns, and its trace."""
    trace, before = Trace(), sys.getprofile()
    sys.setprofile(trace)
    try:
        return call(), trace
    finally:
        sys.setprofile(before)


def traces(num_updates: int = NUM_UPDATES) -> dict[str, list[Trace]]:
    """Run the quick start for ``num_updates`` updates; return the traces of its events by kind."""
    from raafl.commands.cli import main as command

    found: dict[str, list[Trace]] = {name: [] for name in ("join", "task", "merge", "evaluation", "update")}
    with tempfile.TemporaryDirectory() as folder, _watched(found):
        options = ["--max_updates", str(num_updates), "--output", f"{folder}/run", "--progress", "quiet"]
        code = command(["simulate", "--config", str(CONFIG), *options])
    if code:
        raise RuntimeError(f"the quick start failed with {code}")
    return found


@contextmanager
def _watched(found: dict[str, list[Trace]]) -> Iterator[None]:
    """Record a trace of each event of the simulations within the block in ``found``."""
    from raafl.runtime.simulation import Simulation

    tell, trained = Simulation.tell, Simulation.trained

    def traced_tell(self: Simulation, event: Any) -> None:
        state, evaluated = self.coordinator.state, self.coordinator.evaluated
        version = state.version
        _, trace = traced(lambda: tell(self, event))
        if isinstance(event, Joined):
            found["join"].append(trace)
        elif isinstance(event, Arrived) and self.coordinator.evaluated > evaluated:
            found["evaluation"].append(trace)
        elif isinstance(event, Arrived) and state.version > version:
            found["merge"].append(trace)
            found["update"].append(found["task"][-1] + trace)

    def traced_training(self: Simulation, due: Any) -> Any:
        update, trace = traced(lambda: trained(self, due))
        found["task"].append(trace)
        return update

    with patch.object(Simulation, "tell", traced_tell), patch.object(Simulation, "trained", traced_training):
        yield


def typical(kind: str, events: list[Trace]) -> Trace:
    """Select the trace with the median number of switches in the second half of a kind's events; of joins the longest."""
    ordered = sorted(events if kind == "join" else events[len(events) // 2 :], key=Trace.counts)
    return ordered[-1 if kind == "join" else len(ordered) // 2]


def rows(num_updates: int = NUM_UPDATES) -> list[Row]:
    """Return a row for each kind of event."""
    shown = {kind: typical(kind, found).counts() for kind, found in traces(num_updates).items()}
    return [{"event": kind, "files": files, "switches": switches} for kind, (files, switches) in shown.items()]


def listed(kind: str) -> str:
    """List the switches of a kind's typical event, one a line: how often, from where, to which function."""
    switches = typical(kind, traces()[kind]).switches.most_common()
    return "\n".join(f"{num:5}  {source or 'start'} -> {target} {name}" for (source, target, name), num in switches)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of"]:
        print(listed(sys.argv[2]))
    else:
        main("way", rows)
