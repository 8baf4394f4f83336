"""Run a coordinator with one hostile client, whose messages are drawn from a seed and parsed as a session parses them."""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from raafl.compression.streams import CompressedSnapshots
from raafl.core.saving import client_to_json
from raafl.core.types import Arrived, Assignment, Joined, Lost, Timer, Update
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.record import RunRecord
from raafl.runtime.driver import Driver
from raafl.runtime.identity import client_info
from raafl.runtime.protocol import Answer, Hello
from raafl.runtime.setup import ServerSetup, build, make_executor
from raafl.transport import Refused
from tests.helpers.small_runs import experiment

HOSTILE = 4
"""Its id, of four."""

NUMBERS: list[Any] = [
    0,
    -1,
    1,
    5e-324,
    2.3e-308,
    1e-300,
    1e-9,
    0.1,
    1e9,
    1e24,
    1e30,
    1e300,
    1.7e308,
    -1e308,
    2**53 - 1,
    2**53,
    2**63,
    2**64,
    10**30,
    10**400,
    True,
    None,
    "1e308",
    "fast",
    "",
    [],
    [1],
    {},
    {"a": 1},
]
NAMES = ["default", "", "x" * 300, "\x1b[2J", "a\nb", "\u202e", 7, None, ["phone"]]
SERIES = ("speed_changes", "link_changes")  # fields that a client may not send
SPREADS = ("speed_jitter", "link_jitter", "speed_drift", "link_drift")
FIGURES = (
    "flops_per_s",
    "down_bytes_per_s",
    "up_bytes_per_s",
    "memory_bytes",
    "latency_s",
    "launch_s",
    "bytes_per_s",
    "period_s",
)


class Words:
    """Source of random plain data for a hostile client's messages, mostly of the right types, so that these checks pass."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def number(self) -> Any:
        rng = self.rng
        return rng.choice(NUMBERS) if rng.random() < 0.5 else rng.choice([1, -1]) * 10 ** rng.uniform(-320, 308)

    def rate(self) -> Any:
        """Draw a number between the smallest and the largest accepted one."""
        return self.number() if self.rng.random() < 0.05 else 10 ** self.rng.uniform(-6, 24)

    def profile(self) -> Any:
        if self.rng.random() < 0.03:
            return self.number()
        found = {name: self.rate() for name in FIGURES if self.rng.random() < 0.4}
        if self.rng.random() < 0.2:
            found["availability"] = self.series()
        for name in SERIES:
            if self.rng.random() < 0.02:
                found[name] = self.rng.choice([self.series(), {"digest": "0" * 32}, {"digest": self.number()}])
        for name in SPREADS:
            if self.rng.random() < 0.2:
                found[name] = self.rng.uniform(0, 2) if self.rng.random() < 0.95 else self.number()
        if found.get("speed_drift") or found.get("link_drift") or self.rng.random() < 0.02:
            found["drift_s"] = 10 ** self.rng.uniform(-3, 12) if self.rng.random() < 0.95 else self.number()
        if "availability" not in found:
            found.pop("period_s", None)
        for name in ("latency_s", "launch_s", "period_s"):
            if name in found and self.rng.random() < 0.9:
                found[name] = 10 ** self.rng.uniform(-12, 12) if name != "period_s" else 1e4
        if self.rng.random() < 0.3:
            found["name"] = self.rng.choice(NAMES)
        if self.rng.random() < 0.05:
            found[self.rng.choice(["unheard_of", "__class__", "count", "x" * 500])] = self.number()
        return found

    def series(self) -> Any:
        length = self.rng.choice([0, 1, 2, 3, 3, 3, 100, 100, 100, 101, 3000])
        if self.rng.random() < 0.1:
            return [[self.number(), self.number()] for _ in range(min(length, 3))]
        return [[2.0 * i, 2.0 * i + self.rng.choice([0.5, 1e-6, 1.0])] for i in range(length)]

    def hello(self) -> dict[str, Any]:
        own = self.rng.random() < 0.5
        samples = self.rng.choice([1, 2, 100, 2**53 - 1] if own else [1, 2])
        if self.rng.random() < 0.1:
            samples = self.number()
        return {"num_samples": samples, "own_data": own, "profile": self.profile()}

    def metrics(self) -> Any:
        keys = ["loss", "peak_bytes", "accuracy", "test/accuracy", "test/num_samples", "test/" + "x" * 400, "", "\x1b"]
        found = {self.rng.choice(keys): self.number() for _ in range(self.rng.randrange(6))}
        if self.rng.random() < 0.9:  # otherwise a number beyond all floats, for which the whole answer is refused
            found = {name: value for name, value in found.items() if value != 10**400}
        if self.rng.random() < 0.1:
            found |= {f"test/{i}": self.number() for i in range(self.rng.choice([90, 200]))}
        return found if self.rng.random() < 0.97 else self.number()

    def extra(self, own: Any) -> Any:
        """Return an honest hook's `Update.extra` with one part replaced."""
        if self.rng.random() < 0.05:
            return self.number()
        return self._bent({**own, **({"more": self.number()} if self.rng.random() < 0.3 else {})})

    def _bent(self, value: Any) -> Any:
        if self.rng.random() < 0.25:
            return self.number()
        if isinstance(value, dict):
            return {k: self._bent(one) for k, one in value.items() if self.rng.random() < 0.9}
        if isinstance(value, list | tuple):
            whole = [self._bent(one) if self.rng.random() < 0.3 else one for one in value]
            return whole[: self.rng.randrange(len(whole) + 1)] if self.rng.random() < 0.2 else whole
        return value


class Play(Driver):
    """Coordinator driven by hand: clients 1 to 3 train honestly, client 4 answers with hostile data.

    `out`: assignments by client. `turned_away`: how often hostile data was refused before the coordinator saw it.
    `blamed`: errors that it caused in the coordinator.
    """

    def __init__(self, parts: ServerSetup, folder: Path, seed: int) -> None:
        super().__init__(parts.coordinator, RunRecord(RunFolder(folder, "")), None, None, None)
        self.parts, self.words, self.at = parts, Words(seed), 0.0
        self.executor = make_executor(parts, 1)
        self._snapshots = CompressedSnapshots(parts.coordinator)
        self.out: dict[int, tuple[Assignment, Any]] = {}
        self.timers: list[tuple[float, int]] = []
        self.turned_away, self.blamed = 0, list[Exception]()

    @property
    def now(self) -> float:
        return self.at

    def save(self) -> dict[str, Any]:
        return {}

    def _deliver(self, assignment: Assignment) -> None:
        self.record.assigned(assignment)
        snapshot = self._snapshots.cut(assignment)
        # a client that claims to be very fast may be assigned very much work
        few = replace(assignment, num_epochs=None, num_steps=None)
        self.executor.submit(few if assignment.client == HOSTILE else assignment, snapshot, self.at)
        self.out[assignment.client] = (assignment, snapshot)

    def _set_timer(self, id: int, at: float) -> None:
        heapq.heappush(self.timers, (at, id))

    def _measure(self, version: int, now: float) -> None:
        raise AssertionError("there is no evaluator")

    def _blame(self, client: int, error: Exception) -> None:
        assert client == HOSTILE
        self.blamed.append(error)

    def step(self) -> None:
        """Advance the clock, and fire all timers that are due."""
        self.at += 1.0
        while self.timers and self.timers[0][0] <= self.at:
            self.tell(Timer(heapq.heappop(self.timers)[1]))

    def _given_up(self, client: int) -> None:
        assignment, snapshot = self.out.pop(client, (None, None))
        if assignment is not None:
            self.executor.cancel(assignment.id)
            self._snapshots.give_back(snapshot)

    def join(self, client: int) -> None:
        """Let an honest client join."""
        self.tell(Joined(self.parts.clients[client - 1]))

    def join_hostile(self, incarnation: int) -> bool:
        """Let the hostile client join; return True if it was admitted."""
        known = replace(self.parts.clients[HOSTILE - 1], id=HOSTILE)
        hello = json.loads(json.dumps({**client_to_json(known), **self.words.hello()}))
        try:
            info = client_info(hello, Hello.from_meta(hello).num_samples, known, incarnation)
        except Refused:
            self.turned_away += 1
            return False
        self._given_up(HOSTILE)
        self.tell(Joined(info))
        return True

    def answer(self, client: int) -> str:
        """Train a client's task and submit the update; return why it was refused, or None."""
        assignment, snapshot = self.out.pop(client)
        update = self.executor.result(assignment.id)
        self._snapshots.returned(assignment, update, snapshot)
        self._snapshots.give_back(snapshot)
        update.incarnation, update.train_s = assignment.incarnation, self.at - assignment.assigned_s
        if client == HOSTILE:
            self._speak(update)
        before = self.record.outcomes.copy()
        self.tell(Arrived(update))
        found = self.record.outcomes - before
        return next((outcome for outcome in found if outcome.startswith("refused:")), "")

    def _speak(self, update: Update) -> None:
        """Replace an update's own data by hostile data, as far as a session accepts that."""
        words, rng = self.words, self.words.rng
        meta: dict[str, Any] = {
            "num_samples": update.num_samples,
            "num_steps": update.num_steps,
            "metrics": words.metrics(),
        }
        meta["extra"] = words.extra(dict(update.extra))
        for name in ("num_samples", "num_steps"):
            if rng.random() < 0.3:
                meta[name] = words.number() if rng.random() < 0.3 else rng.choice([0, 1, 7, 2**53 - 1])
        meta = json.loads(json.dumps(meta))
        try:
            answer = Answer.from_meta(meta)
            update.num_samples, update.num_steps = answer.num_samples, answer.num_steps
            update.metrics, update.extra = dict(answer.metrics), dict(answer.extra)
        except Refused as refused:
            update.refusal = refused.reason

    def lose(self, client: int, reason: str, incarnation: int) -> None:
        """Report the loss of a client."""
        self._given_up(client)
        self.tell(Lost(client, reason, incarnation))


def world(folder: Path, algorithm: Any, seed: int, **fields: Any) -> Play:
    """Set up a run of ``algorithm`` in ``folder`` for random events; ``fields``: fields of the experiment."""
    made = experiment(folder / "config", algorithm, max_updates=10**9, eval_every=10**9, **fields)
    parts = build(made, pace=True, min_clients=1, count_lost=False)
    return Play(parts, folder / "run", seed)


def play(run: Play, num_profiles: int) -> None:
    """Let the hostile client join with ``num_profiles`` profiles and send updates; check that the honest clients make progress."""
    for client in (1, 2, 3):
        run.join(client)
    incarnation = 0
    for number in range(num_profiles):
        run.step()
        let_in = run.join_hostile(incarnation)
        incarnation += let_in
        if number % 8 == 0:  # in some rounds all clients must answer
            for client in (1, 2, 3):
                if client in run.out:
                    assert run.answer(client) == ""
        if HOSTILE in run.out:
            run.answer(HOSTILE)
        if let_in and run.words.rng.random() < 0.3:
            run.lose(HOSTILE, f"disconnected: {run.words.rng.choice(NAMES)}", incarnation - 1)
        assert run.coordinator.finished is None and run.reason == ""
