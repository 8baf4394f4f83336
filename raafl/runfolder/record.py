"""Record a run: write its rows to the run folder, and count what the summary reports."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from raafl.core.saving import assignment_to_json, event_to_json
from raafl.core.types import Adjusted, Arrived, Assignment, Event, Joined, Received, Sending, Settled, Update
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.schema import (
    CLIENT,
    LOST,
    LOST_AT_RESTART,
    MERGED,
    REFUSED,
    TIME_TO,
    UNUSED,
    ClientRow,
    JournalRow,
    Measurement,
    RunFigures,
    Summary,
)
from raafl.runfolder.statistics import RunStatistics
from raafl.submodel import FlatTensors

if TYPE_CHECKING:
    from raafl.config.targets import Target
    from raafl.core.state import PendingUpdate

    Figures = Mapping[str, float | None]


_text_of = lru_cache(maxsize=1024)(str)
"""Text of a submodel, cached since many tasks have the same."""


class RunRecord:
    """Counters of a run and writer of its folder, for the run's loop; methods that other threads may call say so.

    Without a folder it only counts, as in benchmarks.
    """

    def __init__(
        self, folder: RunFolder | None, targets: Sequence[Target] = (), figures: RunStatistics | None = None
    ) -> None:
        self.figures = figures or RunStatistics()
        self.row: dict[str, float | None] = {}
        """Figures beside the metrics, as they were when the version measured last was made."""
        self._due: dict[int, dict[str, float | None]] = {}
        self.folder, self.targets = folder, targets
        self._series: dict[str, Any] = {}  # profiles that the journal has in full already, by digest
        self.started = time.perf_counter()
        self.outcomes: Counter[str] = Counter()
        self.participation: dict[int, int] = {}
        self.bytes_up = self.bytes_down = 0
        self.time_to: dict[str, float | None] = {str(target): None for target in targets}
        self.metrics: dict[str, float] = {}
        self.evaluated_version = -1
        self.num_events = self.num_rows = 0
        self._busy_s = 0.0  # seconds of finished tasks, summed over clients
        self._staleness_sum = self._staleness_max = 0
        self._turned_away: Counter[str] = Counter()
        self._kept_out: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def wall_s(self) -> float:
        """Seconds of real time since the run began."""
        return time.perf_counter() - self.started

    @property
    def reached(self) -> bool:
        """Whether the run has targets (metric values at which it ends) and has reached all of them."""
        return bool(self.time_to) and all(at_s is not None for at_s in self.time_to.values())

    def restart_clock(self) -> None:
        """Set the run's wall clock back to 0."""
        self.started = time.perf_counter()

    # ---- called during the run ----

    def event(self, event: Event, now: float) -> None:
        """Write an event to the journal; called in the order in which the coordinator handles events."""
        self.num_events += 1
        if isinstance(event, Joined):
            self.participation.setdefault(event.client.id, 0)
        elif isinstance(event, Sending):  # from now on the client may work on its next task
            self._busy_s += self.figures.trained(event.assignment, now)
        elif isinstance(event, Arrived) and self.folder is not None and event.update.needs_fingerprint:
            event.update.fingerprint = event.update.tensors.fingerprint()
        if self.folder is not None:
            self._keep_received(event)
            row = {"time_s": now, **event_to_json(event)}
            # a repeated profile is written as a reference: a client that joins again and again must not fill the disk
            if isinstance(event, Joined) and event.client.profile.has_series:
                from raafl.devices.recordings import shortened

                row["profile"] = shortened(row["profile"], self._series)
            self.folder.event(cast(JournalRow, row))

    def _keep_received(self, event: Event) -> None:
        """Store tensors that a replay cannot compute: models from a server above, and updates of whole subfederations."""
        assert self.folder is not None
        kept: Received | Update | None = event if isinstance(event, Received) else None
        if isinstance(event, Arrived) and event.update.contributions and event.update.refusal is None:
            kept = event.update
        if kept is not None:
            from raafl.runfolder.received import keep_received

            keep_received(self.folder.path, kept.fingerprint, kept.tensors)

    def assigned(self, assignment: Assignment) -> None:
        """Write the start of a task to the journal."""
        self.figures.assigned(assignment)
        if self.folder is not None:
            row = {"time_s": assignment.assigned_s, "event": "assigned", **assignment_to_json(assignment)}
            self.folder.event(cast(JournalRow, row))

    def batch_trained(self, assignments: Sequence[int], now: float) -> None:
        """Write to the journal which tasks were trained as one batch whose products have bits of their own."""
        if self.folder is not None:
            self.folder.event(JournalRow(time_s=now, event="batch", assignments=list(assignments)))

    def adjusted(self, adjusted: Adjusted, now: float) -> None:
        """Write to the journal that a part of the method has changed a setting; a replay must make the same change."""
        if self.folder is not None:
            row = {"time_s": now, "event": "adjusted", **asdict(adjusted)}
            self.folder.event(cast(JournalRow, row))

    def link(self, row: Mapping[str, Any], now: float) -> None:
        """Write to the journal that a client's connection broke or was restored; replays ignore such rows."""
        if self.folder is not None:
            self.folder.event(cast(JournalRow, {"time_s": now, **row}))

    def moved(self, down: int = 0, up: int = 0) -> None:
        """Count bytes sent to and received from clients; callable from any thread."""
        with self._lock:
            self.bytes_down += down
            self.bytes_up += up

    def turned_away(self, reason: str) -> None:
        """Count a connection that was refused; callable from any thread."""
        with self._lock:
            self._turned_away[reason] += 1

    def connections_refused(self) -> dict[str, int]:
        """Return the number of refused connections by reason; callable from any thread."""
        with self._lock:
            return dict(sorted(self._turned_away.items()))

    def suspended(self, client: int) -> None:
        """Count that a client was suspended: it gets no tasks for a while, since its updates were refused."""
        self._kept_out[client] += 1

    def settled(self, settled: Settled, now: float) -> None:
        """Count the end of a task, and write its row to clients.csv."""
        assignment, update, outcome = settled.assignment, settled.update, settled.outcome
        self.outcomes[outcome] += 1
        if outcome == MERGED:
            self.participation[settled.client] = self.participation.get(settled.client, 0) + 1
            self._staleness_sum += settled.staleness
            self._staleness_max = max(self._staleness_max, settled.staleness)
        if assignment is not None and self.figures.is_working(assignment.id):
            arrived = now if update is None else assignment.assigned_s + update.train_s
            self._busy_s += arrived - assignment.assigned_s
        self.num_rows += 1
        cells = self.figures.settled(settled, self.metrics)
        if self.folder is not None:
            self.folder.client({**self._client_row(settled, now), **cells})

    def _client_row(self, settled: Settled, now: float) -> ClientRow:
        assignment, update = settled.assignment, settled.update
        row: ClientRow = {"client": settled.client, "outcome": settled.outcome, "merged_version": settled.version}
        if assignment is not None:
            row |= {
                "task": assignment.task,
                "assignment": assignment.id,
                "incarnation": assignment.incarnation,
                "spec": _text_of(assignment.spec),
                "region": assignment.region,
                "version": assignment.version,
                "staleness": settled.staleness,
                "assigned_s": assignment.assigned_s,
            }
        if update is not None:
            row |= {
                "arrived_s": now if assignment is None else assignment.assigned_s + update.train_s,
                "train_s": update.train_s,
                "bytes_down": update.bytes_down,
                "bytes_up": update.bytes_up,
                "num_samples": update.num_samples,
                "num_steps": update.num_steps,
                "loss": update.metrics.get("loss"),
            }
        return row

    def due(self, version: int, now: float, more: Figures | None = None, waiting: Iterable[PendingUpdate] = ()) -> None:
        """Store the run's counters for the moment at which a version is queued for evaluation; its metrics come later."""
        self._due[version] = {**self._figures(version, now, waiting), **(more or {})}
        self.figures.logged.close(version)

    def awaits(self, version: int) -> bool:
        """Check whether a version is queued for an evaluation that has not ended."""
        return version in self._due

    def _figures(self, version: int, now: float, waiting: Iterable[PendingUpdate]) -> dict[str, float | None]:
        merged, num_clients, memory = self.outcomes[MERGED], len(self.participation), self.figures.memory()
        measured = memory["measured_bytes"]  # a simulation measures no memory, and its table lacks the column
        figures: RunFigures = {
            "utilisation": self._utilisation(now, waiting),
            "participation": self.figures.mean_participation(version, num_clients),
            "staleness": self._staleness_sum / merged if merged else 0.0,
            "coverage": self.figures.coverage()["mean"],
            "round_s": now / version if version else None,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "peak_bytes": memory["predicted_bytes"],
        }
        if measured is not None:
            figures["measured_bytes"] = measured
        if (tokens := self.figures.tokens(now)) is not None:
            figures["tokens_per_s"] = tokens[1]
        return {**self.figures.clients(), **cast(dict[str, float | None], figures)}

    def _utilisation(self, now: float, waiting: Iterable[PendingUpdate] = ()) -> float:
        """Compute the utilisation RU: seconds of all tasks / (N * elapsed seconds); Co-S2P paper, eq. 12."""
        ended = {item.update.assignment: item.update.train_s for item in waiting}  # ended, but not settled
        busy = self._busy_s + self.figures.working_s(now, ended)
        return min(busy / (max(len(self.participation), 1) * now), 1.0) if now > 0 else 0.0

    @property
    def client_metrics(self) -> dict[str, float]:
        """Metrics measured by clients, averaged over clients, at the version that was evaluated last."""
        return {name: value for name, value in self.row.items() if name.startswith(CLIENT) and value is not None}

    def evaluated(self, version: int, now: float, metrics: dict[str, float]) -> bool:
        """Record the metrics of the global model; return whether the run is to end, since all its targets are reached."""
        self.metrics, self.evaluated_version = metrics, version
        if version not in self._due:
            self.due(version, now)
        self.row = {**self._due[version], **self.figures.logged.take(version)}
        self.row = {name: value for name, value in self.row.items() if name not in metrics}
        self._due = {later: row for later, row in self._due.items() if later > version}
        for target in self.targets:
            if self.time_to[str(target)] is None and target.met({**metrics, **self.client_metrics}):
                self.time_to[str(target)] = now
        times = {TIME_TO + target: at_s for target, at_s in self.time_to.items()}
        self.row |= {name: at_s for name, at_s in times.items() if name not in metrics}
        if self.folder is not None:
            row: Measurement = {"version": version, "time_s": now, "wall_s": self.wall_s}
            self.folder.metrics({**row, **metrics, **self.row})
        return self.reached

    # ---- saving and resuming ----

    def save(self) -> dict[str, Any]:
        """Return all counters of the run as plain data, for a checkpoint."""
        return {
            "wall_s": self.wall_s,
            "outcomes": dict(self.outcomes),
            "participation": dict(self.participation),
            "bytes": [self.bytes_down, self.bytes_up],
            "time_to": dict(self.time_to),
            "metrics": dict(self.metrics),
            "evaluated_version": self.evaluated_version,
            "num_events": self.num_events,
            "num_rows": self.num_rows - (self.folder.num_clients_dropped if self.folder is not None else 0),
            "busy_s": self._busy_s,
            "staleness": [self._staleness_sum, self._staleness_max],
            "turned_away": dict(self._turned_away),
            "kept_out": dict(self._kept_out),
            "figures": self.figures.save(),
            "row": dict(self.row),
            "due": list(self._due.items()),
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the counters from the result of `save`."""
        self.started = time.perf_counter() - data["wall_s"]
        self.outcomes.update(data["outcomes"])
        self.participation.update(data["participation"])
        self.bytes_down, self.bytes_up = data["bytes"]
        self.time_to.update({name: at_s for name, at_s in data["time_to"].items() if name in self.time_to})
        self.metrics, self.evaluated_version = dict(data["metrics"]), data["evaluated_version"]
        self.num_events, self.num_rows = data["num_events"], data["num_rows"]
        self._busy_s = data["busy_s"]
        self._staleness_sum, self._staleness_max = data["staleness"]
        self._turned_away.update(data["turned_away"])
        self._kept_out.update(data["kept_out"])
        self.figures.restore(data["figures"])
        self.row, self._due = dict(data["row"]), {version: dict(row) for version, row in data.get("due", ())}

    def lose(self, num: int) -> None:
        """Count tasks that were marked lost when the run was resumed."""
        if num:  # a summary names no reason for which nothing was lost
            self.outcomes[LOST_AT_RESTART] += num
        self.num_rows += num

    # ---- called at the end ----

    def summary(
        self, *, algorithm: str, runtime: str, seed: int, version: int, values: FlatTensors, time_s: float, reason: str
    ) -> Summary:
        """Return the summary of the run, whose fields scripts may rely on."""
        merged = self.outcomes[MERGED]

        def by_reason(kind: str) -> dict[str, int]:
            return {k.removeprefix(kind + ":"): n for k, n in sorted(self.outcomes.items()) if k.startswith(kind + ":")}

        found: Summary = {
            "algorithm": algorithm,
            "runtime": runtime,
            "seed": seed,
            "finished": reason,
            "versions": version,
            "updates_merged": merged,
            "updates_refused": by_reason(REFUSED),
            "updates_lost": sum(by_reason(LOST).values()),
            "updates_lost_by_reason": by_reason(LOST),
            "updates_unused": self.outcomes[UNUSED],
            "clients_kept_out": {str(client): n for client, n in sorted(self._kept_out.items())},
            "connections_refused": self.connections_refused(),
            "time_s": time_s,
            "wall_s": self.wall_s,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "utilisation": self._utilisation(time_s),
            "participation": {str(client): n for client, n in sorted(self.participation.items())},
            "staleness": {"mean": self._staleness_sum / merged if merged else 0.0, "max": self._staleness_max},
            "participation_rate": self.figures.participation(version, len(self.participation)),
            "coverage": {
                **self.figures.coverage(),
                "regions": {str(region): n for region, n in sorted(self.figures.regions.items())},
            },
            "peak_memory": self.figures.memory(),
            "round_s": time_s / version if version else None,
            "final": {**self.metrics, **self.client_metrics},
            "time_to": self.time_to,
            "model_digest": values.model_digest(),
        }
        if (tokens := self.figures.tokens(time_s)) is not None:
            found["tokens"], found["tokens_per_s"] = tokens
        return found
