"""Resume an interrupted run from its last checkpoint, or a finished one to a farther goal, in its own folder.

A simulated run continues exactly at a checkpoint, so that it ends as if never interrupted. In a wall-clock run the clients are
gone: their tasks are lost, they join again as new incarnations, and merges after the checkpoint are lost, too, and reported.
"""

from __future__ import annotations

import csv
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.atomic_file import remove_leftovers
from raafl.config.experiment import marked
from raafl.config.options import seconds
from raafl.core.coordinator import Coordinator
from raafl.core.options import Privacy
from raafl.core.restoring import restore
from raafl.errors import BadInput, RunFailed
from raafl.plain_yaml import load_yaml
from raafl.runfolder import checkpoint_reader
from raafl.runfolder import checkpoints as checkpoint
from raafl.runfolder.append_file import read_table, write_table
from raafl.runfolder.books import END_UNSEALED, check_books, cut_incomplete_row
from raafl.runfolder.events import JournalReader, is_ended, read_summary
from raafl.runfolder.journal import FolderLock, RunFolder
from raafl.runfolder.record import RunRecord
from raafl.runfolder.schema import (
    BREAKS,
    CHECKPOINTS,
    CLIENT_COLUMNS,
    CLIENTS,
    CONFIG,
    EVENTS,
    GROWING,
    JOURNAL,
    LOST_AT_RESTART,
    MERGED,
    METRICS,
    SEALS,
    JournalRow,
    TableSeal,
)
from raafl.runfolder.seals import read_seals
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors, Layout

if TYPE_CHECKING:
    from raafl.config.experiment import Experiment

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedRun:
    """The checkpoint from which a run is resumed, loaded: its last one, or the last before an end that is undone."""

    folder: Path  # folder of the run
    named: dict[str, Any]  # tensors of the global model, by name
    # state of the run: ``runtime`` ("simulated" or "distributed"), ``finished`` (reason for the end, None = not
    # finished), ``coordinator``, ``record`` (counts and metrics) and ``clock`` (time and timers)
    section: dict[str, Any]
    undone: Path | None = None  # a later checkpoint, the run's end, which is deleted; None = there is none

    @property
    def restarts(self) -> bool:
        """Whether clients must join again after resuming, as in a run on the wall clock."""
        return bool(self.section["runtime"] != "simulated")

    def check_mode(self, experiment: Experiment) -> None:
        """Raise `BadInput` if a config batches clients in another mode than this run did."""
        same_mode(experiment, JournalReader(self.folder).first(), f"resume: '{self.folder}'")

    def values(self, layout: Layout) -> FlatTensors:
        """Return the values of the global model in the checkpoint as flat tensors, arranged as ``layout`` says."""
        return FlatTensors.from_named({entry.name: self.named[entry.name] for entry in layout.entries}, layout)

    def restore_clock(self, restore: Callable[[dict[str, Any]], object]) -> None:
        """Restore the time, and what waits, by a function that takes them as the checkpoint has them."""
        with restoring(self):
            restore(self.section["clock"])


def load(folder: Path, runtime: str, experiment: Experiment) -> SavedRun:
    """Load the checkpoint from which a run goes on: the last one, or that before the end if its goal is now farther.

    Raises:
        BadInput: there is no checkpoint, it was written before the first task, the run was simulated and is to be
            resumed on real clients, or the reverse, or it has reached a goal already.
    """
    if not folder.is_dir():
        raise BadInput(f"resume is '{folder}', which is not a folder: name the folder of a run")
    _refuse_links(folder)
    if checkpoint.newest(folder) is None:
        raise BadInput(f"resume is '{folder}', whose run has no checkpoint yet: start it again, with another output")
    found = _read(folder, folder)
    if found.section.get("runtime") != runtime:
        command = "simulate" if found.section.get("runtime") == "simulated" else "fit"
        raise BadInput(f"resume: '{folder}' is a {found.section.get('runtime')} run: resume it with raafl {command}")
    with restoring(found):
        if found.section["finished"] is not None:
            return _undo_end(found, experiment)
        # a target that it has reached ends it at once, or at its next evaluation
        if limits := [name for name in _reached(found.section, experiment) if name != "target"]:
            merged, now = found.section["coordinator"]["merged"], found.section["clock"]["now"]
            raise _not_farther(found, f"whose run has merged {merged} updates in {now:.1f} s", limits)
    return found


def _read(folder: Path, path: Path) -> SavedRun:
    """Load the checkpoint at ``path``, or of a folder the newest, of the run in ``folder``."""
    saved = checkpoint_reader.load(path)
    found = SavedRun(folder, saved.values, saved.raafl)
    with restoring(found):
        check_state(saved.raafl)
    return found


def _undo_end(last: SavedRun, experiment: Experiment) -> SavedRun:
    """Return the checkpoint from which a run goes on whose last one is its end.

    If the goal is farther now, the end is undone: on the wall clock clients join again and go on with the last model; a
    simulation goes on from the checkpoint before its end, as if it had had this goal from the start. Otherwise the run may
    lack only its last evaluation and its summary.
    """
    reason, reached = last.section["finished"], _reached(last.section, experiment)
    ended = f"whose run is finished ({reason})"
    if reason in _FARTHER and not reached:
        if last.restarts:
            return replace(last, section={**last.section, "finished": None})
        *older, end = checkpoint.versions(last.folder)
        if older:
            return replace(_read(last.folder, older[-1]), undone=end)
        if has_ended(last.folder):
            lacks = f"{ended}, and it has no checkpoint from before its end, where a simulation goes on"
            raise _not_farther(last, lacks, end=", which begins with the same updates")
    elif has_ended(last.folder):
        raise _not_farther(last, ended, reached if reason in _FARTHER else [])
    return last


_FARTHER = {
    "max_updates": "a larger max_updates",
    "max_time": "a larger max_time",
    "target": "a target that it has not reached",
}


def _not_farther(saved: SavedRun, state: str, reached: Sequence[str] = (), end: str = "") -> BadInput:
    """Return the error for a run that does not go on, ``state``; ``reached``: names of goals that must be farther."""
    farther = f"give {' and '.join(_FARTHER[name] for name in reached)} to go on, or " if reached else ""
    return BadInput(f"resume is '{saved.folder}', {state}: {farther}start a new one{end}")


def _reached(section: dict[str, Any], experiment: Experiment) -> list[str]:
    """Return the names of the goals of ``experiment`` that a run has reached at its checkpoint."""
    record, targets = section["record"], experiment.targets()
    measured = {name: value for name, value in {**record["row"], **record["metrics"]}.items() if value is not None}
    most, most_s = experiment.max_updates, seconds("max_time", experiment.max_time)
    goals = {
        "max_updates": most is not None and most <= section["coordinator"]["merged"],
        "max_time": most_s is not None and most_s <= section["clock"]["now"],
        "target": bool(targets)
        and all(record["time_to"].get(str(target)) is not None or target.met(measured) for target in targets),
    }
    return [name for name, is_reached in goals.items() if is_reached]


def has_ended(folder: Path) -> bool:
    """Check whether a run whose last checkpoint is its end has also made its last evaluation and its summary, and sealed it.

    A summary from before the run was resumed has another reason, such as that it was stopped.
    """
    if not is_ended(read_summary(folder)):
        return False
    seals = read_seals(folder / SEALS) if (folder / SEALS).is_file() else []  # none: of a version before them
    return not seals or (seals[-1] is not None and seals[-1].data.get("final") is True)


@contextmanager
def opened(experiment: Experiment, runtime: str) -> Iterator[SavedRun]:
    """Return a context that locks the folder of the run to be resumed, and has loaded a checkpoint of it; see `load`.

    Raises:
        BadInput: another process is writing the run, or it cannot be resumed.
    """
    path = Path(experiment.resume or "")
    # lock first, since another process must not write a newer checkpoint before the tables are cut back to this one
    with FolderLock(path, "resume") if path.is_dir() else nullcontext():
        yield load(path, runtime, experiment)


_WANDB_LOGS = ("loggers", "wandb", "logs")
"""Folders of a log that W&B links to its cache, `loggers/wandb/RUN/logs/FILE`, without the run's own name."""


def _refuse_links(folder: Path) -> None:
    """Raise `BadInput` for a symbolic link by which the run would write outside of its folder.

    Below the top folder, links that stay within are allowed, such as W&B's `latest-run`, and so are links of W&B's run
    logs to its cache, which are not written again.
    """
    inside = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for path in filter(Path.is_symlink, sorted(Path(parent, name) for name in (*folders, *files))):
            stays = path.parent != folder and path.resolve().is_relative_to(inside)
            wandb_log = len(parts := path.relative_to(folder).parts) == 5 and parts[:2] + parts[3:4] == _WANDB_LOGS
            if not stays and not wandb_log:
                raise BadInput(
                    f"resume: '{path}' is a symbolic link, which raafl does not write through: put the file itself there"
                )


@contextmanager
def restoring(saved: SavedRun) -> Iterator[None]:
    """Return a context that converts errors from missing or malformed saved state to `BadInput`.

    A checkpoint may come from another person, so any of its fields may have any type.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        if isinstance(error, BadInput | RunFailed):
            raise
        raise BadInput(
            f"resume: the last checkpoint of '{saved.folder}', or a table beside it, is damaged or was altered "
            f"({sanitize_text(f'{type(error).__name__}: {error}', 100)}): use an earlier one, or start a new run"
        ) from error


_COUNTS = {
    "coordinator": ("version", "last_id", "merged"),
    "record": ("num_events", "num_rows", "bytes", "staleness", "evaluated_version"),
}
_NEEDED = ("memory", "active", "idle", "drawn", "waiting", "evaluated", "started", "wake", "rng")
_BOOKS = ("counts", "busy", "tasks", "joins", "refused", "clipped", "refused_in_a_row", "times_out")
_TIMES = {"clock": ("now",), "record": ("wall_s",), "coordinator": ("opened_s", "arrived_s")}


def check_state(section: dict[str, Any]) -> None:
    """Raise `KeyError` for a missing entry, `ValueError` for a count or a time that is negative or not finite, or no end."""
    if (reason := section["finished"]) is not None and (not reason or reason.startswith(BREAKS)):
        raise ValueError(f"finished is {reason!r:.40}")
    for name in _NEEDED:
        section["coordinator"][name]
    coordinator, clock = section["coordinator"], section["clock"]
    counts = {name: section[part][name] for part, names in _COUNTS.items() for name in names}
    counts |= {name: [number for _, number in coordinator[name]] for name in _BOOKS}
    times = {name: section[part][name] for part, names in _TIMES.items() for name in names}
    times["unanswered_s"] = [seconds for _, each in coordinator.get("unanswered_s", ()) for seconds in each]
    times["timers"] = [entry[0] for entry in clock.get("timers", clock.get("heap", []))]
    for name, value in (counts | times).items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if type(number) not in ((int, float) if name in times or name == "staleness" else (int,)):
                raise ValueError(f"{name} is not a number")
            if not 0 <= number < math.inf:
                raise ValueError(f"{name} is {number}, but must be finite and at least 0")


def check_privacy(saved: SavedRun, experiment: Experiment) -> None:
    """Raise `BadInput` for another clipping norm or noise than the run began with, by which its epsilon is computed."""
    config = load_yaml((saved.folder / CONFIG).read_text(encoding="utf-8"))
    if not config:  # the run was started by Python code that wrote no config
        return
    begun = config.get("privacy") or {}
    for name in ("clip_norm", "noise_multiplier"):
        given, recorded = getattr(experiment.privacy, name), begun.get(name, getattr(Privacy(), name))
        if given != (None if recorded is None else float(recorded)):
            raise BadInput(
                f"privacy.{name} is {given}, but the run began with {recorded}, for which its epsilon is counted: leave it "
                "out"
            )


def same_mode(experiment: Experiment, begun: JournalRow, what: str) -> None:
    """Raise `BadInput` if a config batches clients in another mode than the simulated run that the journal records.

    `begun`: first row of the journal.
    """
    recorded, given = begun.get("batches") == "fast", experiment.batch_clients == "fast"
    if recorded != given and begun.get("runtime") == "simulated":
        mode = "fast" if recorded else "another than fast"
        raise BadInput(
            f"batch_clients is {experiment.batch_clients}, but {what} was run with {mode}, which gives other bits: give "
            f"{'fast' if recorded else 'the one in its config.yaml'}"
        )


def after_restart(experiment: Experiment) -> Experiment:
    """If torchrun has restarted the ranks, return ``experiment`` changed so that it resumes the previous attempt.

    With ``--max-restarts`` torchrun ends all ranks when one fails, and starts them again. The first attempt writes the
    name of its run folder to ``runs/.torchrun``. A later attempt resumes from the last checkpoint in that folder, or
    starts over in a new folder if there is none.
    """
    attempt, note = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), _note()
    if attempt == 0:
        note.unlink(missing_ok=True)  # of an earlier run: torchrun's default id is the same for all
    if attempt == 0 or experiment.resume is not None:
        return experiment
    folder = Path(note.read_text(encoding="utf-8")) if note.is_file() else None
    if folder is not None and checkpoint.newest(folder) is not None:
        return replace(experiment, resume=str(folder))
    return replace(experiment, output=f"{folder}-attempt-{attempt}" if folder is not None else None)


def leave_note(folder: Path) -> None:
    """Write the run folder's path to a file, if torchrun may restart the ranks; a restarted run resumes from this folder."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        _note().parent.mkdir(parents=True, exist_ok=True)
        _note().write_text(str(folder.absolute()), encoding="utf-8")


def _note() -> Path:
    name = re.sub(r"[^\w.-]", "_", os.environ.get("TORCHELASTIC_RUN_ID", "none"))
    return Path("runs") / ".torchrun" / name


@dataclass(frozen=True)
class Mended:
    """Result of `mend`: what the files of a run have after its last checkpoint, to which `cut_back` cuts its tables."""

    last_id: int  # largest task id in the journal, after which new ids begin
    lost: list[list[str]]  # rows of clients.csv for tasks that began after the checkpoint, and so are lost
    num_missing: int  # number of events before the checkpoint that are not in the journal
    joins: dict[int, int]  # by client id: number of times that the client has joined
    merged: list[tuple[int, int]]  # client id and model version of each update that was merged after the checkpoint
    # the same of earlier restarts that the checkpoint does not know of; a list for each restart
    before: list[list[tuple[int, int]]]


def mend(saved: SavedRun) -> Mended:
    """Read from the run's journal and tables which results after the checkpoint are lost; nothing is changed."""
    section, folder = saved.section, saved.folder
    coordinator = section["coordinator"]
    last_id, joins, num_events = 0, dict[int, int](), section["record"]["num_events"]
    later: dict[int, JournalRow] = {}  # by id: tasks that were assigned after the checkpoint
    # of each resume: its line, the number of events that it kept, what it has undone
    resumes: list[tuple[int, int, list[tuple[int, int]]]] = []
    announced: list[tuple[int, int]] = []  # undone by the resumes since the last event
    has_gap = False
    # read also the rows that a resume has cut off, since their ids must not be used again
    for line, row in enumerate((journal := JournalReader(folder)).written()):
        if row.get("event") == "assigned":
            last_id = max(last_id, row["id"])
            if saved.restarts and row["id"] > coordinator["last_id"]:
                later[row["id"]] = row
        elif row.get("event") == "gap":
            last_id, has_gap = max(last_id, row["last_id"]), True
        elif row.get("event") == "joined":
            joins[row["client"]] = max(joins.get(row["client"], 0), row["incarnation"] + 1)
        elif row.get("event") == "resumed":
            resumes.append((line, row["kept"], undone_in(row)))
            announced += resumes[-1][-1]
        if row.get("event") in EVENTS:
            announced = []
    # the checkpoint knows of all resumes before its last event, whose place is unknown where rows are missing
    first = 0 if has_gap else journal.line_after(num_events)
    before = [undone for line, kept, undone in resumes if line >= first and kept >= num_events]
    rows = read_table(folder / CLIENTS)
    header = next(rows, list(CLIENT_COLUMNS))
    client, outcome, version = (header.index(name) for name in ("client", "outcome", "merged_version"))
    undone = islice(rows, section["record"]["num_rows"], None)
    merged = [(int(row[client]), int(row[version])) for row in undone if row[outcome] == MERGED]
    if merged == announced:  # a resume was ended before it cut the table, and its row counts them
        merged = []
    num_missing = max(num_events - journal.num_events, 0)
    lost = [_lost_row(later[number], header) for number in sorted(later)]
    return Mended(last_id, lost, num_missing, joins, merged, before)


def undone_in(row: JournalRow) -> list[tuple[int, int]]:
    """Return client id and model version of each update whose merge was undone by the restart in a row of the journal."""
    return [(int(client), int(version)) for client, version in row.get("undone", ())]


def cut_back(saved: SavedRun, lost: list[list[str]]) -> None:
    """Cut a run's tables back to the checkpoint, and add the rows of ``lost`` tasks.

    In a simulation, rows after the checkpoint are dropped, since the resumed run writes them again. On the wall clock,
    tasks that began after the checkpoint are marked lost:restart.
    """
    most, metrics, rows = _last_metrics(saved), read_table(saved.folder / METRICS), read_table(saved.folder / CLIENTS)
    header = [next(metrics, [])]
    write_table(saved.folder / METRICS, chain(filter(None, header), (row for row in metrics if int(row[0]) <= most)))
    header = [next(rows, list(CLIENT_COLUMNS))]
    kept = islice(rows, saved.section["record"]["num_rows"])
    write_table(saved.folder / CLIENTS, chain(header, kept, lost))


def _last_metrics(saved: SavedRun) -> int:
    """Return the last version whose row of metrics.csv was written before the checkpoint."""
    measured: int = saved.section["record"]["evaluated_version"]
    # a stop evaluates the model after its checkpoint, as the run had not done without it
    return max(measured, saved.section["coordinator"]["version"] - 1) if saved.restarts else measured


def _sealed_tables(saved: SavedRun) -> dict[str, TableSeal]:
    """Return digests of the rows that `cut_back` leaves in the tables, by file name."""
    most, num_rows = _last_metrics(saved), saved.section["record"]["num_rows"]
    return {
        METRICS: _sealed(saved.folder / METRICS, lambda _, row: int(row[0]) <= most),
        CLIENTS: _sealed(saved.folder / CLIENTS, lambda number, _: number < num_rows),
    }


def _sealed(path: Path, stays: Callable[[int, list[str]], bool]) -> TableSeal:
    """Return the digest of a table's rows up to the first that does not stay; ``stays`` gets their numbers, from 0."""
    from raafl.runfolder.seals import TableDigest

    with path.open(encoding="utf-8", newline="\n") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        begin = end = rows.line_num
        for number, row in enumerate(rows):
            if not stays(number, row):
                break
            end = rows.line_num
    return TableDigest.of_file(path, end - begin).seal(header)


def resume(saved: SavedRun, mended: Mended, coordinator: Coordinator, record: RunRecord) -> None:
    """Restore the state of a run from a checkpoint into a new coordinator and a new record; clocks are not restored."""
    record.restore(saved.section["record"])
    coordinator.state.values.copy_(saved.values(coordinator.state.values.layout))
    restore(coordinator, saved.section["coordinator"])
    coordinator.finished = saved.section["finished"]
    if not saved.restarts or coordinator.finished is not None:
        return
    roster = coordinator.roster
    roster.last_id = max(roster.last_id, mended.last_id)  # the ids of lost tasks are not used again
    for client, num in mended.joins.items():  # incarnations are not used again either
        roster.joins[client] = max(roster.joins[client], num)
    for merged in (*mended.before, mended.merged):
        coordinator.algorithm.merge.on_rollback(coordinator.state, merged)
    record.lose(len(mended.lost))
    coordinator.restart()


def reopened(path: Path, warn: Callable[[str], None] = _log.warning) -> RunFolder:
    """Open the folder of an interrupted run to continue it; an incomplete last row of a file is removed.

    The caller holds the folder's lock, since it has read the run's state there before.

    Raises:
        BadInput: the folder does not contain a run.
        OSError: the folder cannot be written.
    """
    _make_whole(path)
    return RunFolder(path, (path / CONFIG).read_text(encoding="utf-8"), warn, new=False)


def _make_whole(path: Path) -> None:
    """Remove incomplete last rows and temporary files, which a killed process has left in a run folder."""
    for name in (CONFIG, *GROWING):
        if not (path / name).is_file():
            raise BadInput(f"resume: '{path}' is not a run folder: it has no {name}")
    for file in (path / name for name in (*GROWING, SEALS)):
        if file.is_file():
            cut_incomplete_row(file)
    for place in (path, path / CHECKPOINTS):
        remove_leftovers(place)


def go_on(run: Any, saved: SavedRun) -> None:
    """Restore a `raafl.runtime.run.Run` from a checkpoint; rows that it wrote after that are marked as rolled back."""
    from raafl.runfolder.seals import sync

    coordinator, section = run.parts.coordinator, saved.section
    changed = check_settings(run)
    try:
        check_privacy(saved, run.parts.experiment)
        # check before new seals are written, which would hide changes of sealed files
        altered = [finding for finding in check_books(run.folder).findings if finding != END_UNSEALED]
        _make_whole(run.folder)
        run.record = RunRecord(None, run.parts.experiment.targets(), figures=run.figures())
        with restoring(saved), run.norms.untouched(coordinator.state.values):
            mended = mend(saved)
            resume(saved, mended, coordinator, run.record)
            run.evaluator.revive(section.get("metrics", {}))  # "metrics" is missing in checkpoints of earlier versions
            tables = _sealed_tables(saved)
        # the row is on the disk before the tables are cut back, since these alone tell which merges are undone
        with reopened(run.folder, run.progress.warn) as folder:
            folder.signer = run.signer
            # seal first, and only rows that stay: else a process killed after it added a row would leave a finished run
            # with an extra row, and one killed after it cut a table would leave one with too few
            sealed = replace(folder.sealed(), tables=tables)
            if not folder.seal(sealed, coordinator.state.version, [CONFIG], altered=altered):
                raise OSError(f"{SEALS} takes no row")
            # after the seal, since the one before has this file's digest, and before the row, by which its events count no more
            if saved.undone is not None:
                saved.undone.unlink()
            if mended.num_missing:
                folder.gap(mended.num_missing)
                run.progress.warn(missing(run.folder, mended.num_missing))
            folder.event(_resumed(run, saved, mended))
            if JOURNAL in folder.unwritten:
                raise OSError(f"{JOURNAL} takes no row")
            sync(run.folder)
        with restoring(saved):
            cut_back(saved, mended.lost)
        run.writer = run.record.folder = reopened(run.folder, run.progress.warn)
        run.writer.signer = run.signer
    except OSError as error:
        raise BadInput(f"resume is '{run.folder}', where writing fails ({error}): make it writable") from error
    if changed:
        run.progress.warn(changed)
    if altered:
        run.progress.warn(f"the books of the run were altered before it was resumed: {'; '.join(altered[:5])}")
    run.progress.follow(run.writer, run.folder)
    run.progress.note(f"resumed from version {coordinator.state.version}; {len(mended.lost)} later tasks are lost")


def check_settings(run: Any) -> str:
    """Return a warning of settings that decide what a run computes, and are not as in its folder; "" if all are the same.

    Raises:
        BadInput: the run is strict, or has other subfederations, whose runs the checkpoint does not have.
    """
    if not (run.folder / CONFIG).is_file():  # see `_make_whole`
        return ""
    before, now = (
        load_yaml(text) or {} for text in ((run.folder / CONFIG).read_text(encoding="utf-8"), run.config_yaml)
    )
    free = (*marked("may_change"), "json")
    other = [name for name in now if name in before and name not in free and now[name] != before[name]]
    if not other:
        return ""
    changed = f"resume: {', '.join(other)} not as in '{run.folder / CONFIG}'"
    if "subfederations" in other:
        raise BadInput(f"{changed}: give the same as in that run")
    changed += (
        ": the run goes on with what is given now, and a replay of it, which takes that config, finds another model; give the "
        "same to go on as it began"
    )
    if run.parts.experiment.strict:
        raise BadInput(f"{changed} (an error, since strict is true)")
    return changed


def _resumed(run: Any, saved: SavedRun, mended: Mended) -> JournalRow:
    """Return the row of the journal by which a `raafl.runtime.run.Run` continues."""
    coordinator = run.parts.coordinator
    row: JournalRow = {
        "time_s": saved.section["clock"]["now"],
        "event": "resumed",
        "kept": run.record.num_events,
        "last_id": coordinator.roster.last_id,
        "version": coordinator.state.version,
        "goals": run.goals().to_json(),
        "restarted": saved.restarts,
        "start": run.limits(),
    }
    if saved.restarts and mended.merged:
        # clients.csv will list these merges no more: if the server crashes again before its next checkpoint, they still count
        row["undone"] = mended.merged
    return row


def missing(folder: Path, num_events: int) -> str:
    """Return a warning that the journal lacks events."""
    return (
        f"{num_events} events from before the checkpoint are missing in {folder / JOURNAL}, which could not be "
        "written at the time: the run goes on from the checkpoint, but cannot be replayed, and clients.csv may lack rows"
    )


def _lost_row(assigned: JournalRow, header: list[str]) -> list[str]:
    known: dict[str, Any] = {
        **assigned,
        "assignment": assigned["id"],
        "outcome": LOST_AT_RESTART,
        "spec": assigned["spec"],
    }
    return [str(known.get(column, "")) for column in header]
