"""Replay a recorded run from its journal, and check that all bits are equal.

The journal of a run, real or simulated, holds the events in the order the coordinator saw them, with their times, and a
digest of each update; no tensors. A replay feeds the same events to a fresh coordinator and trains each task again when
its answer arrives. A task is a pure function of its assignment, so the model comes out the same, to the last bit, if
versions, thread count and device are the same (`raafl.runtime.lifecycle.environment`) and the data is at hand.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from raafl.config.parse import load_run
from raafl.config.problems import seed_file_problems
from raafl.core.coordinator import Coordinator
from raafl.core.restoring import event_from_json
from raafl.core.subfederation import from_json
from raafl.core.types import OUT_OF_MEMORY, Action, Adjusted, Arrived, Assign, Assignment, Event, Lost, Received, Update
from raafl.data.federated import ClientData
from raafl.devices.recordings import long_series, restored
from raafl.errors import BadInput
from raafl.runfolder import checkpoint_reader
from raafl.runfolder import checkpoints as checkpoint
from raafl.runfolder.events import read_run
from raafl.runfolder.received import load_received
from raafl.runfolder.schema import EVENTS, JOURNAL, JournalRow
from raafl.runtime.driver import snapshots_of
from raafl.runtime.executors import Executor
from raafl.runtime.extensions import extensions_of
from raafl.runtime.lifecycle.checkpointer import SavedForm
from raafl.runtime.lifecycle.environment import conditions, differences
from raafl.runtime.lifecycle.resume import same_mode, undone_in
from raafl.runtime.run import ALONE
from raafl.runtime.setup import ServerSetup, build, make_executor
from raafl.submodel import FULL, FlatTensors, Layout, Spec

_log = logging.getLogger(__name__)
_PROGRESS_S = 10.0
"""Seconds between two log lines about the progress of a replay, which takes as long as the run's training."""


def replay(
    folder: Path,
    *,
    until: int | None = None,
    workers: int = 1,
    client_data: Mapping[int, Path] | None = None,
    trust_config: bool = False,
) -> dict[str, Any]:
    """Repeat a recorded run from its journal, and compare the resulting model with the recorded one.

    Args:
        folder: folder of the run.
        until: number of the event after which to stop and write a checkpoint to ``folder/replay``; None = replay all.
        workers: number of processes that train.
        client_data: YAML file with the ``data`` section of each client that trained on its own data, by client.
        trust_config: whether to import any class that the run's config names; else only classes of raafl.

    Returns:
        ``equal``: whether the models are equal (None = no digest was recorded); ``model_digest`` and
            ``recorded_digest``; ``parted_at``: first event that differs, or None; ``distance``: distance of the models,
            if they differ; ``events``: number of events; ``differences``: versions, hardware and settings that differ;
            ``altered``: numbers of the first journal rows that do not fit the journal's hash chain.

    Raises:
        BadInput: the folder does not contain a run, its config names classes of others, or data are missing.
    """
    if until is not None and until < 1:
        raise BadInput(f"until is {until}: give the number of an event, from 1")
    with ALONE:
        return _replay(folder, until, workers, client_data, trust_config=trust_config)


def _replay(
    folder: Path, until: int | None, workers: int, client_data: Mapping[int, Path] | None, *, trust_config: bool
) -> dict[str, Any]:
    rows, summary = read_run(folder, until)
    experiment = load_run(folder, trusted=trust_config, for_replay=True)
    for problem in seed_file_problems(experiment.privacy.seed_file, folder):
        raise BadInput(problem)
    own = _own_data(folder, rows, client_data or {}, trust_config)
    begun = next((row for row in rows if row.get("event") == "run"), JournalRow())
    same_mode(experiment, begun, f"'{folder}'")
    parts = build(experiment, pace=False, **_start(folder, begun))
    found = conditions(experiment)
    executor = make_executor(parts, workers, own)
    try:
        played = Replay(parts.coordinator, executor, folder)
        played.run(rows, until)
    finally:
        executor.close()
    digest = parts.coordinator.state.values.model_digest()
    wanted = summary["model_digest"] if summary is not None and until is None else None
    result: dict[str, Any] = {
        "equal": None if wanted is None else digest == wanted,
        "model_digest": digest,
        "recorded_digest": wanted,
        "parted_at": None if played.first_difference is None else played.first_difference.to_json(),
        "events": played.num_events,
        "versions": parts.coordinator.state.version,
        "differences": differences(begun.get("conditions", {}), found),
        "altered": _altered(folder),
    }
    if result["equal"] is False:
        result["distance"] = _distance(folder, parts)
    if until is not None:
        result["checkpoint"] = str(_save(folder / "replay", parts))
    return result


def _altered(folder: Path) -> list[int]:
    """Return the numbers of journal rows that were changed later: a replay reads only the fields that decide the model."""
    from raafl.runfolder.books import check_lines

    with (folder / JOURNAL).open("rb") as lines:
        return check_lines(lines).broken


def batches_of(rows: Iterable[JournalRow]) -> list[list[int]]:
    """Return the tasks that a recorded run trained as one batch, batch by batch.

    A batch that a run trained again after a crash, with one task in common at least, takes the place of the first.
    """
    found: dict[int, list[int]] = {}
    for batch in (row["assignments"] for row in rows if row.get("event") == "batch"):
        undone = {other for number in batch for other in found.get(number, ())}
        found = {number: other for number, other in found.items() if number not in undone} if undone else found
        found |= dict.fromkeys(batch, batch)
    return list({id(batch): batch for batch in found.values()}.values())


def _start(folder: Path, begun: JournalRow) -> dict[str, Any]:
    """Return the number of clients for which the recorded run waited at its start, and whether lost clients counted."""
    start = begun.get("start")
    least, counts = (start.get("min_clients"), start.get("count_lost")) if isinstance(start, dict) else (None, None)
    if not isinstance(least, int) or not isinstance(counts, bool):
        raise BadInput(
            f"events.jsonl in '{folder}': start is {start!r:.80} in the first row: the file was changed, so the run cannot be "
            "replayed; give an unchanged copy of the run's folder"
        )
    return {"min_clients": least, "count_lost": counts}


def _own_data(
    folder: Path, rows: Iterable[JournalRow], files: Mapping[int, Path], trusted: bool
) -> dict[int, ClientData]:
    """Load from the user's ``files`` the data of those clients that trained on data of their own."""
    from raafl.runtime.client.setup import whole

    # a subfederation's updates are read from the folder instead
    joined = (row for row in rows if row.get("event") == "joined" and not row.get("below"))
    wanted = {row["client"] for row in joined if row.get("own_data")}
    for client in sorted(wanted - set(files)):
        raise BadInput(
            f"client {client} trained on its own data: give --client_data {client}=FILE, a YAML file with the data "
            "section that it had"
        )
    loaded = {
        client: load_run(folder, f"--config={files[client]}", trusted=trusted, for_replay=True) for client in wanted
    }
    return {client: whole(experiment).client(1) for client, experiment in loaded.items()}


def _save(folder: Path, parts: ServerSetup) -> Path:
    state = parts.coordinator.state
    return checkpoint.write(folder, SavedForm(parts.module).contents(state.version, state.values))


def _distance(folder: Path, parts: ServerSetup) -> dict[str, Any] | None:
    """Return the largest and the root mean square difference of the replayed model from the run's last checkpoint."""
    with suppress(BadInput):
        saved = checkpoint_reader.load(folder)
        values = parts.coordinator.state.values
        theirs = FlatTensors.from_named({name: saved.values[name] for name, _ in values.items()}, values.layout)
        gaps = torch.cat([buffer.double() - theirs.buffers[dtype].double() for dtype, buffer in values.buffers.items()])
        return {"version": saved.version, "max": gaps.abs().max().item(), "rms": gaps.square().mean().sqrt().item()}
    return None


@dataclass
class FirstDifference:
    """The first difference between a replay and its recording."""

    number: int  # number of the event in the journal, from 1
    what: str  # name of what differs
    recorded: object  # value in the journal
    replayed: object  # value in the replay

    def to_json(self) -> dict[str, Any]:
        """Return the difference as plain data."""
        return {"event": self.number, "what": self.what, "recorded": self.recorded, "replayed": self.replayed}


def event_of(row: JournalRow, series: dict[str, Any]) -> Event | None:
    """Convert a row of the journal to an event; an `Arrived` event has no tensors yet.

    Returns:
        The event; None if the row is not an event.

    Raises:
        BadInput: the row was not written by raafl.
    """
    if row.get("event") not in EVENTS:
        return None
    with _converting(row):
        if row["event"] == "joined":
            series |= long_series({name: one for name, one in row["profile"].items() if isinstance(one, list)})
            row = {**row, "profile": restored(row["profile"], series)}
        return event_from_json(row)


@contextmanager
def _converting(row: JournalRow) -> Iterator[None]:
    """Return a context that converts errors from a row that raafl has not written to `BadInput`."""
    try:
        yield
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise BadInput(f"events.jsonl: the row {json.dumps(row)[:120]} is no event of raafl: {why}") from None


@dataclass
class Replay:
    """Replay of a run: passes the events in a journal to a new coordinator, and compares the results.

    Attribute ``first_difference`` is the first difference from the recording, or None.
    """

    coordinator: Coordinator
    executor: Executor
    folder: Path | None = None  # folder of the recorded run, which has the tensors that it received
    first_difference: FirstDifference | None = None
    num_events: int = 0
    now: float = 0.0
    _out: dict[int, tuple[Assignment, FlatTensors]] = field(default_factory=dict)
    # by digest: device profiles, which the journal names by their digest after the first time
    _series: dict[str, Any] = field(default_factory=dict)
    _adjusted: deque[Adjusted] = field(default_factory=deque)
    # assignments of the replay that are not compared with the recording yet
    _expected: deque[Assignment] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Create the store of snapshots and the extensions of the replay."""
        self._snapshots = snapshots_of(self.coordinator)
        self._extensions = [made(self.coordinator) for made in extensions_of(self.coordinator, "replay")]

    def run(self, rows: Iterable[JournalRow], until: int | None = None) -> None:
        """Replay the rows of a journal in order, and compare each result with the recorded one.

        Args:
            rows: rows of the journal; they are read twice, so a generator cannot be used.
            until: number of the last event to replay, from 1; None = all.
        """
        arrived = (one for one in enumerate(rows) if one[1].get("event") == "arrived")
        order = {row["assignment"]: place for place, row in arrived if "contributions" not in row}
        together, never = batches_of(rows), len(order)
        num_arrived, num_updates, logged_s = 0, len(order), time.monotonic()
        self.executor.follow(together)
        # a task without a recorded answer may have been in a batch with tasks that have one
        order = {**{number: never for batch in together for number in batch}, **order}
        for row in rows:
            if until is not None and self.num_events >= until:
                return
            if row.get("event") == "resumed":
                self._go_on(row)
            if row.get("event") == "assigned":
                self._check_assigned(row)
                continue
            if row.get("event") == "adjusted":
                self._check_adjusted(row)
                continue
            event = self._event(row)
            if event is None:
                continue
            self.num_events += 1
            self.now = row["time_s"]
            for action in self.coordinator.handle(event, self.now):
                self._do(action, order)
            if isinstance(event, Lost):
                self._forget(event.client)
            num_arrived += isinstance(event, Arrived)
            if time.monotonic() - logged_s >= _PROGRESS_S:
                logged_s = time.monotonic()
                _log.info(
                    f"replayed {num_arrived} of {num_updates} updates, to version {self.coordinator.state.version}"
                )

    def _event(self, row: JournalRow) -> Event | None:
        if row.get("event") == "received":
            with _converting(row):
                spec = Spec.from_json(row["spec"])
                values = self._received(row["fingerprint"] or "", self.coordinator.payload.layout(spec, "sent"))
                return Received(row["task"], row["version"], spec, values, row["fingerprint"] or "")
        if row.get("event") == "arrived":
            return self._arrived(row) if "contributions" not in row else self._of_subfederation(row)
        return event_of(row, self._series)

    def _received(self, fingerprint: str, layout: Layout) -> FlatTensors:
        """Read tensors that the recorded run received, from its folder."""
        assert self.folder is not None
        return load_received(self.folder, fingerprint, layout).to(self.coordinator.state.values.device)

    def _of_subfederation(self, row: JournalRow) -> Arrived:
        """Read a subfederation's update from the run folder, since only the subfederation could compute it again."""
        number = row["assignment"]
        assignment, _ = self._out.get(number, (None, None))
        spec = FULL if assignment is None else assignment.spec
        with _converting(row):
            values = self._received(row["fingerprint"] or "", self.coordinator.payload.returned(spec))
            update = Update(
                number, row["client"], row["incarnation"], values, row["num_samples"], row["num_steps"] or 0
            )
            update.contributions, update.journal = from_json(row["contributions"]), row["journal"]
            update.fingerprint, update.refusal = row["fingerprint"] or "", row["refusal"]
        if assignment is not None:
            self._release(number)
        return Arrived(update)

    def _go_on(self, row: JournalRow) -> None:
        """Continue as the resumed run did: at its next assignment id, with its limits and privacy budget."""
        with _converting(row):
            last_id, restarted, undone = row["last_id"], row["restarted"], undone_in(row)
            start, goals = row["start"], row["goals"]
            limits = replace(
                self.coordinator.limits,
                min_clients=int(start["min_clients"]),
                count_lost=bool(start["count_lost"]),
                max_updates=None if goals["max_updates"] is None else int(goals["max_updates"]),
                max_time_s=None if goals["max_time_s"] is None else float(goals["max_time_s"]),
            )
        self.coordinator.roster.last_id = last_id
        if restarted:
            self.coordinator.algorithm.merge.on_rollback(self.coordinator.state, undone)
            self.coordinator.restart()
        self.coordinator.change(limits=limits)

    def _do(self, action: Action, order: dict[int, int]) -> None:
        if isinstance(action, Adjusted):
            self._adjusted.append(action)
        if isinstance(action, Assign):
            assignment = action.assignment
            snapshot = self._snapshots.cut(assignment)
            self._out[assignment.id] = (assignment, snapshot)
            if self.first_difference is None:
                self._expected.append(assignment)
            needed = order.get(assignment.id)
            if needed is not None:
                self.executor.submit(assignment, snapshot, float(needed))

    def _check_assigned(self, row: JournalRow) -> None:
        """Compare a recorded assignment with the replayed one, and store the difference if it is the first."""
        if self.first_difference is not None:
            return
        assignment = self._expected.popleft() if self._expected else None
        wanted = (row["id"], row["client"], row["version"], row["spec"], row["seed"])
        found = None
        if assignment is not None:
            found = (assignment.id, assignment.client, assignment.version, assignment.spec.to_json(), assignment.seed)
        if found != wanted:
            self.first_difference = FirstDifference(
                self.num_events, "assignment (id, client, version, spec, seed)", wanted, found
            )

    def _check_adjusted(self, row: JournalRow) -> None:
        """Compare a recorded change of a setting with the replayed one, and store the difference if it is the first."""
        adjusted = self._adjusted.popleft() if self._adjusted else None
        found = None if adjusted is None else asdict(adjusted)
        wanted = {name: row.get(name) for name in Adjusted.__dataclass_fields__}
        if self.first_difference is None and found != wanted:
            self.first_difference = FirstDifference(self.num_events, "adjusted setting", wanted, found)

    def _arrived(self, row: JournalRow) -> Arrived:
        """Return the update of an answered task, trained again unless training cannot reproduce its refusal."""
        number = row["assignment"]
        assignment, snapshot = self._out.get(number, (None, None))
        there = self.coordinator.roster.find(row["client"])  # a suspended client may still answer its current task
        life = None if there is None else (there.id, there.incarnation)
        known = assignment is not None and (assignment.client, assignment.incarnation) == life
        # a refused task with exchanges may have ended in its middle, which a replay cannot repeat
        exchanges = assignment is not None and self._exchanges(assignment)
        sound = row["refusal"] is None or (row["refusal"] == "non-finite" and not exchanges)
        sent = row["refusal"] != OUT_OF_MEMORY
        again = sound or (self._snapshots.remembers and not exchanges and sent)
        if assignment is None or snapshot is None or not known or not again:
            if assignment is not None and known and row["incarnation"] == assignment.incarnation:
                self.executor.cancel(number)
                self._release(number)
                if exchanges:
                    self._snapshots.refused(assignment)
            nothing = FlatTensors.empty(self.coordinator.state.submodels.layout(part="trained"))
            return Arrived(Update(number, row["client"], row["incarnation"], nothing, 0, refusal=row["refusal"]))
        update = self.executor.result(number)
        self._snapshots.returned(assignment, update, snapshot)
        self._release(number)
        # the update was damaged on its way: its client has sent it, and so keeps its compression error for the next one
        if not sound:
            update.refusal, update.incarnation = row["refusal"], row["incarnation"]
            return Arrived(update)
        update.incarnation, update.num_samples = row["incarnation"], row["num_samples"]
        for one in self._extensions:
            one.trained(assignment, update, row)
        fingerprint = update.tensors.fingerprint()
        if self.first_difference is None and row["fingerprint"] not in ("", None, fingerprint):
            what = f"update of client {row['client']} for assignment {number}"
            self.first_difference = FirstDifference(self.num_events + 1, what, row["fingerprint"], fingerprint)
        return Arrived(update)

    def _exchanges(self, assignment: Assignment) -> bool:
        coordinator = self.coordinator
        return coordinator.algorithm.local.exchange(coordinator.state.submodels, assignment.extra) is not None

    def _release(self, number: int) -> None:
        _, snapshot = self._out.pop(number)
        self._snapshots.give_back(snapshot)

    def _forget(self, client: int) -> None:
        for number in [n for n, (assignment, _) in self._out.items() if assignment.client == client]:
            if number not in self.coordinator.roster.active:
                self.executor.cancel(number)
                self._release(number)
