"""Show a run while it goes on: a live table in a terminal, plain lines in a log file; see docs/monitoring.md."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import io
import logging
import math
import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

from raafl.config.options import Mode
from raafl.log import Console, Notices, in_notebook
from raafl.units import duration, quantity, size
from raafl.watch.state import ClientProgress, ProgressState, RunState, follow

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console as RichConsole
    from rich.console import ConsoleOptions, RenderableType
    from rich.live import Live

    from raafl.runfolder.journal import RunFolder

_PERIOD_S = {"live": 0.25, "plain": 2.0, "quiet": float("inf")}
_EVALUATION_PERIOD_S = {"live": 0.0, "plain": 1.0, "quiet": float("inf")}
_UNCHANGED_S = 60.0  # seconds after which a status line is repeated although nothing has changed
_LONGEST_S = 10.0  # longest seconds without a status line, even if evaluations print lines meanwhile
_CELL_LINES = 30  # lines of log text that a notebook cell keeps below the table


class Progress(Notices):
    """Display of a run's progress on the terminal.

    Modes: `live` redraws a table four times a second. `plain` writes a line every two seconds, and a line for an
    evaluation unless one was written less than a second ago. `quiet` writes only warnings. `auto` is `live` on a
    terminal and in a notebook, and `plain` elsewhere. `verbose` is `auto` with a line for each task that begins or ends.

    The last evaluation is always shown. If the output can no longer be written (a closed pipe), nothing more is shown,
    and the run goes on.

    All output except the live table goes through `logging`: if the logger "raafl" has a handler, that handler gets the
    lines of `plain`, and nothing is printed.

    `file`: stream to write to; None = standard output.
    `verbose`: whether to pass a line for each task to `note`.
    """

    # called by `update` for a snapshot of the run, unless it is given one
    source: Callable[[], ProgressState] | None = None
    _state: RunState | None = None

    def __init__(
        self, mode: Mode = "auto", file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._file = sys.stdout if file is None else file
        self._in_cell = file is None and in_notebook()
        self.verbose = mode == "verbose"
        if mode in ("auto", "verbose"):
            terminal = self._file.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
            mode = "live" if is_printed() and (terminal or self._in_cell) else "plain"
        self.mode: Mode = mode
        self._clock = clock
        self._period_s, self._evaluation_period_s = _PERIOD_S[mode], _EVALUATION_PERIOD_S[mode]
        self._due_at = float("inf")
        self._shown_at = self._status_at = float("-inf")
        self._unseen: ProgressState | Callable[[], ProgressState] | None = None
        self._live: Live | Cell | None = None
        self._title = ""
        self._said: tuple[object, ...] = ()

    def follow(self, writer: RunFolder, folder: Path | None = None) -> None:
        """Show the rows that a run's ``writer`` writes from now on, after those of ``folder`` if it is given."""
        state = RunState()
        if folder is not None:
            watched = follow(folder)
            watched.look()
            state = watched.state
        state.say = self.note if self.verbose else None
        self._state = writer.reader = state
        self.source = state.snapshot

    def show_executor(self, executor: Any) -> None:
        """Show how many processes train, and whether they train tasks in batches."""
        super().show_executor(executor)

        def how() -> tuple[int | None, float | None, float | None]:
            told = executor.report()
            return executor.num_processes, told.get("share"), told.get("mean_cohort")

        if self._state is not None:
            self._state.how = how

    def start(self, title: str) -> None:
        """Start the display; `title` is the name of the run. Updates before this call show nothing."""
        self._title = title
        now = self._clock()
        self._due_at, self._status_at = now if self.mode == "live" else now + self._period_s, now
        if self.mode == "live":
            self._live = Cell() if self._in_cell else _make_live(self._file)
            self._live.start()
        self._say(title, partial(self._line, title, wrap=True))

    def update(
        self, snapshot: ProgressState | Callable[[], ProgressState] | None = None, evaluated: bool = False
    ) -> None:
        """Show a snapshot of the run if enough time has passed since the last one.

        `snapshot`: snapshot to show, or a function that returns one; the function is called only if something will be
        shown. None = call the attribute `source`.
        """
        now, snapshot = self._clock(), snapshot or self.source
        if snapshot is None or self._due_at == float("inf"):
            return
        if evaluated:
            self._unseen = snapshot
        if self._unseen is not None and now >= self._shown_at + self._evaluation_period_s:
            self._show(self._unseen, now, evaluated=True)
        elif now >= self._due_at:
            self._show(snapshot, now, evaluated=False)

    def _show(self, snapshot: ProgressState | Callable[[], ProgressState], now: float, *, evaluated: bool) -> None:
        state = snapshot() if callable(snapshot) else snapshot
        if self._live is None and not evaluated and not self._is_news(state, now):
            self._due_at = now + self._period_s
            return
        only_metrics = evaluated and bool(state.metrics) and state.finished is None
        self._shown_at, self._due_at = now, now + self._period_s
        if only_metrics:
            self._due_at = min(self._due_at, self._status_at + _LONGEST_S)
        else:
            self._status_at = now
        if evaluated:
            self._unseen = None
        if self._live is not None:
            self._guard(lambda live: live.update(table(state, self._title), refresh=True), self._live)
            return
        if not only_metrics:
            self._say(line := sentence(state, self._width), partial(self._line, line))
        if evaluated and state.metrics:
            self._say(line := evaluation(state, self._width), partial(self._line, line))

    def _is_news(self, state: ProgressState, now: float) -> bool:
        """Check whether a status line is due: the run has begun, and the last line said something else or is a minute old."""
        working, there = _counts(state)
        begun = state.version or state.num_updates or working
        said, self._said = self._said, (state.version, state.num_updates, working, there)
        return bool(begun) and (said != self._said or now - self._status_at >= _UNCHANGED_S)

    def note(self, text: str) -> None:
        """Log a line of text; the console prints it above the live table."""
        self._say(text, partial(self._print, text))

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._guard(lambda live: live.console.print(text, markup=False, highlight=False), self._live)
        else:
            # a wrapped warning could not be found by searching the output
            self._line(text, wrap=not text.startswith("warning: "))

    def _print_warning(self, text: str) -> None:
        alike = (
            self._in_cell or _is_same(self._file, sys.stderr) or (_is_terminal(self._file) and _is_terminal(sys.stderr))
        )
        if self.mode != "quiet":
            self._print(f"warning: {text}")
        if self.mode == "quiet" or not alike:
            super()._print_warning(text)

    def abandon(self) -> None:
        """Make the terminal's cursor visible again without waiting for other threads, just before the process exits."""
        if self._live is not None and not self._in_cell:
            os.write(self._file.fileno(), b"\x1b[?25h\n")

    def stop(self) -> None:
        """Show the last evaluation, end the display and restore the terminal; a second call does nothing."""
        if self._unseen is not None and self._due_at != float("inf"):
            self._show(self._unseen, self._clock(), evaluated=True)
        live, self._live, self._due_at = self._live, None, float("inf")
        if live is not None:
            self._guard(lambda live: live.stop(), live)

    @property
    def _width(self) -> int:
        return WIDTH - (len(_stamp()) if self.stamped else 0)

    def _line(self, text: str, *, wrap: bool = False) -> None:
        if self.mode == "plain":
            text = (_stamp() if self.stamped else "") + (wrapped(text, self._width) if wrap else text)
            self._guard(lambda file: (file.write(f"{text}\n"), file.flush()), self._file)

    def _guard(self, write: Callable[[Any], object], target: object) -> None:
        try:
            write(target)
        except (OSError, ValueError):  # ValueError: the file is closed
            live, self._live, self._due_at, self.mode = self._live, None, float("inf"), "quiet"
            if live is not None:
                with contextlib.suppress(OSError, ValueError):
                    live.stop()


def _stamp() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S  ")


def _is_same(file: TextIO, other: TextIO | None) -> bool:
    """Check whether two streams write to the same file or pipe, as after ``2>&1``."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if other is not None and file is not other:
            return os.path.samestat(os.fstat(file.fileno()), os.fstat(other.fileno()))
    return file is other


def _is_terminal(file: TextIO | None) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return file is not None and file.isatty()
    return False


def _make_live(file: TextIO) -> Live:
    # import here: rich takes 0.1 s, which only a live table needs
    from rich.console import Console
    from rich.live import Live

    # no refresh thread, since the table changes only in update(); and do not redirect output that goes to a file, or
    # the table would be written there
    return Live(
        console=Console(file=file, force_terminal=True),
        auto_refresh=False,
        redirect_stdout=file is sys.stdout,
        redirect_stderr=file is sys.stderr or sys.stderr.isatty(),
    )


class Cell:
    """Live table in a notebook, with the methods of rich's `Live`: one output of the cell, which each update replaces.

    Lines of text are kept below the table, so that the cell has one output for each run, and none that grows.
    """

    def __init__(self) -> None:
        self.console, self._table = self, ""
        self._handle: Any = None
        self._lines = deque[str](maxlen=_CELL_LINES)

    def start(self) -> None:
        """Add the output to the current cell."""
        self._handle = import_module("IPython.display").display(self._html(), display_id=True)

    def print(self, text: str, **_: bool) -> None:
        """Show a line of text below the table."""
        self._lines.append(text)
        self._refresh()

    def update(self, renderable: RenderableType, refresh: bool = True) -> None:
        """Show another table."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=110, height=100, color_system=None, force_jupyter=False)
        with console.capture() as captured:
            console.print(renderable)
        self._table = captured.get().rstrip()
        if refresh:
            self._refresh()

    def stop(self) -> None:
        """Do nothing: the last output remains."""

    def _refresh(self) -> None:
        self._handle.update(self._html())

    def _html(self) -> Any:
        text = "\n".join(["\n".join(line.rstrip() for line in self._table.splitlines()), *self._lines])
        return import_module("IPython.display").HTML(f"<pre>{html.escape(text)}</pre>")


MAX_ROWS = 16
WIDTH = 100
"""Columns that a line of a log has at most."""


def sentence(state: ProgressState, width: int = WIDTH) -> str:
    """Format a run's progress as one line of at most ``width`` characters; less important parts are left out to make it fit."""
    parts = [(0, _moment(state.time_s, state.version)), (0, _updates(state)), *_rates(state)]
    if state.clients or state.num_clients:
        working, there = _counts(state)
        parts.append((2, f"{working} of {there} at work"))
    if (ends := _ends(state)) is not None:
        parts.append((0, ends))
    room, chosen = width + 2, set[str]()
    for rank, text in sorted(parts, key=lambda part: part[0]):
        if not rank or len(text) + 2 <= room:
            chosen.add(text)
            room -= len(text) + 2
    return "  ".join(text for _, text in parts if text in chosen)


def evaluation(state: ProgressState, width: int = WIDTH) -> str:
    """Format the last evaluation as one line of at most ``width`` characters, with as many metrics as fit."""
    metrics, head = _metrics(state), f"{_moment(*(state.evaluated or (state.time_s, state.version)))}  eval:"
    shown = len(metrics)
    while len(line := "  ".join([head, *metrics[:shown], *_more(len(metrics) - shown)])) > width and shown > 1:
        shown -= 1
    return line


def wrapped(text: str, width: int = WIDTH) -> str:
    """Wrap a text to ``width`` columns, with continuation lines indented."""
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


class _Fitted:
    """The progress table for rich, with as many rows of clients as the terminal has room for.

    Of a table that is too high a live view shows the top alone: metrics and the remaining time would not be seen.
    """

    def __init__(
        self, above: Sequence[RenderableType], rows: Callable[[int], RenderableType], below: Sequence[RenderableType]
    ) -> None:
        """Store the lines around the rows, and a function that makes a number of rows."""
        self._above, self._rows, self._below = above, rows, below

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> Iterator[RenderableType]:
        def num_lines(*parts: RenderableType) -> int:
            return sum(len(console.render_lines(part, options)) for part in parts)

        room = console.height - 1 - num_lines(*self._above, *self._below)
        # beside the clients: the columns' names, and the number of other clients; in a narrow terminal a row has several lines
        most = min(max(room - 2, 1), MAX_ROWS)
        while most > 1 and num_lines(self._rows(most)) > room:
            most -= 1
        yield from self._above
        yield self._rows(most)
        yield from self._below


def _rows(state: ProgressState, most: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    rows, clients = Table(box=None, pad_edge=False), state.clients[:most]
    for name, right in (("client", 0), ("trains", 0), ("version", 1), ("for", 1), ("back in", 1), ("merged", 1)):
        rows.add_column(name, justify="right" if right else "left", no_wrap=name != "trains")
    for client in clients:
        rows.add_row(*(Text(cell) for cell in _cells(client)))
    if hidden := (state.num_clients or len(state.clients)) - len(clients):
        at_work = _counts(state)[0] - sum(bool(client.doing) for client in clients)
        rows.add_row("...", f"{hidden} more, {at_work} at work")
    return rows


def table(state: ProgressState, title: str = "") -> RenderableType:
    """Return the progress table for a terminal: title, a row per client, the run's counts, metrics and remaining time."""
    from rich.text import Text

    rates = [text for _, text in _rates(state)]
    head = [f"version {state.version}", _updates(state), f"{state.time_s:.1f} s", *rates, *_troubles(state)]
    above = [Text(line) for line in dict.fromkeys((title, state.title)) if line]
    below = [Text("  ".join(head)), Text("  ".join(_metrics(state)), style="bold")]
    below += [Text(line) for line in (_goals(state), _ends(state)) if line]
    return _Fitted(above, partial(_rows, state), below)


def plain(state: ProgressState) -> dict[str, Any]:
    """Convert a snapshot of a run's progress to plain data, for JSON."""
    metrics = {name: value if math.isfinite(value) else None for name, value in state.metrics.items()}
    now = "running" if state.finished is None else "finished"
    return {**dataclasses.asdict(state), "metrics": metrics, "state": now}


def _metrics(state: ProgressState) -> list[str]:
    """Format the global model's metrics for a line, without the shares of LoRA ranks, which only reports show."""
    return [f"{name} {value:.4g}" for name, value in state.metrics.items() if not name.startswith("rank_energy/")]


def _cells(client: ClientProgress) -> tuple[str, ...]:
    name = f"{client.client} {client.device}".strip()
    if not client.doing:
        return (name, "idle" if client.there else "gone", "", "", "", str(client.num_tasks))
    version = "" if client.version is None else f"{client.version}"
    version += f" (-{client.behind})" if client.behind else ""
    since = "" if client.since_s is None else duration(client.since_s)
    due = client.due_in_s
    back = "?" if due is None else duration(due) if due >= 0 else f"late {duration(-due)}"
    return (name, client.doing, version, since, "" if client.since_s is None else back, str(client.num_tasks))


def _counts(state: ProgressState) -> tuple[int, int]:
    working = sum(bool(client.doing) for client in state.clients) if state.num_working is None else state.num_working
    return working, len(state.clients) if state.num_there is None else state.num_there


def _updates(state: ProgressState) -> str:
    done, goal = state.num_updates, state.num_updates_goal
    return quantity(done, "update") if goal is None else f"{done} of {quantity(goal, 'update')}"


def _moment(time_s: float, version: int) -> str:
    return f"{time_s:9.1f} s  version {version}"


def _more(num: int) -> list[str]:
    return [f"and {num} more"] if num else []


def _rates(state: ProgressState) -> list[tuple[int, str]]:
    """Format the run's rates as pairs (priority, text); a narrow line drops the highest priority numbers first."""
    if state.updates_per_s is None or state.bytes_per_s is None:
        return []
    rates = [(1, f"{state.updates_per_s:.3g} updates/s"), (4, f"{size(state.bytes_per_s)}/s")]
    if state.simulated and state.speed is not None:
        rates.append((5, f"{state.speed:.3g} times real time"))
    if state.trainings_per_s is not None:
        rates.append((6, f"{state.trainings_per_s:.3g} trainings/s{_how(state)}"))
    return [*rates, (3, f"staleness {state.staleness_mean:.3g} (at most {state.staleness_max})")]


def _how(state: ProgressState) -> str:
    processes = f" in {state.num_processes} processes" if (state.num_processes or 1) > 1 else ""
    if not state.share_batched or state.mean_cohort is None:
        return processes
    return f"{processes} ({state.share_batched:.0%} in batches of {state.mean_cohort:.3g} clients)"


def _troubles(state: ProgressState) -> list[str]:
    return [f"{num} {kind}" for kind, num in sorted(state.outcomes.items()) if kind != "merged" and num]


def _goals(state: ProgressState) -> str:
    found = [f"{eta.goal} {_when(state, eta.in_s)}" for eta in state.etas]
    return "  ".join(found) if len(found) > 1 else ""


def _ends(state: ProgressState) -> str | None:
    if state.finished is not None:
        return f"ended: {state.finished}"
    if state.ends_in_s is None:
        return None
    return f"ends {_when(state, state.ends_in_s)}" if state.ends_in_s > 0 else "ends now"


def _when(state: ProgressState, in_s: float | None) -> str:
    if in_s is None:
        return "at an unknown time"
    if in_s == 0:
        return "reached"
    here = f", here {duration(in_s / state.speed)}" if state.simulated and state.speed else ""
    return f"in {duration(in_s)}{here}"


def is_printed() -> bool:
    """Check whether raafl's log records are printed on the console, and not sent to other handlers or turned off."""
    logger = logging.getLogger("raafl")
    return logger.isEnabledFor(logging.INFO) and any(isinstance(handler, Console) for handler in logger.handlers)
