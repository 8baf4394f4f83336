from __future__ import annotations

import io
import re
import sys
import time

import pytest

from raafl.watch.progress import Progress, evaluation, sentence, wrapped
from raafl.watch.state import ClientProgress, ProgressState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def state(num_updates=0, **fields):
    return ProgressState(version=num_updates, num_updates=num_updates, time_s=fields.pop("time_s", 1.0), **fields)


def test_plain_lines_come_every_two_seconds_and_at_each_evaluation():
    file, clock = io.StringIO(), Clock()
    progress = Progress("plain", file, clock)
    progress.start("fed_raa on 4 clients")
    for step in range(100):  # ten seconds
        clock.now = 100 + 0.1 * step
        progress.update(state(step), evaluated=step == 33)
    progress.note("client 2 was lost")
    progress.stop()
    lines = file.getvalue().splitlines()
    assert lines[0] == "fed_raa on 4 clients"
    assert lines[-1] == "client 2 was lost"
    # 2.0 s, then the evaluation at 3.3 s, then every 2 s after it
    assert [line.split("version ")[1].split()[0] for line in lines[1:-1]] == ["20", "33", "53", "73", "93"]


def test_many_evaluations_give_a_line_a_second_and_the_last_one_is_always_shown():
    file, clock = io.StringIO(), Clock()
    progress = Progress("plain", file, clock)
    progress.start("title")
    for step in range(1, 38):  # one each 0.1 s, for 3.7 s
        clock.now = 100 + 0.1 * step
        progress.update(state(step), evaluated=True)
    lines = file.getvalue().splitlines()
    # the first at once, then each when the line before it is a second old
    assert [line.split("version ")[1].split()[0] for line in lines[1:]] == ["1", "11", "21", "31"]
    progress.stop()
    progress.stop()
    lines = file.getvalue().splitlines()
    assert [line.split("version ")[1].split()[0] for line in lines[5:]] == ["37"]


def test_a_last_evaluation_that_was_shown_is_not_shown_again():
    file, clock = io.StringIO(), Clock()
    progress = Progress("plain", file, clock)
    progress.start("title")
    progress.update(state(1), evaluated=True)
    clock.now += 0.5
    progress.update(state(2))
    progress.stop()
    assert len(file.getvalue().splitlines()) == 2


PACE = {"updates_per_s": 2.0, "bytes_per_s": 1.5e6, "staleness_mean": 0.5, "staleness_max": 2, "ends_in_s": 6.0}


def test_a_line_says_what_the_run_does_and_another_what_was_measured():
    file, clock = io.StringIO(), Clock()
    progress = Progress("plain", file, clock)
    progress.start("title")
    clients = (ClientProgress(1, "fragment 0", 3), ClientProgress(2), ClientProgress(3, "all", 1))
    now = state(8, time_s=12.25, metrics={"accuracy": 0.93751}, clients=clients, num_updates_goal=20, **PACE)
    clock.now += 4.0
    progress.update(now)
    clock.now += 1.0
    progress.update(now, evaluated=True)
    assert file.getvalue().splitlines()[1:] == [
        "     12.2 s  version 8  8 of 20 updates  2 updates/s  1.5 MB/s  2 of 3 at work  ends in 6 s",
        "     12.2 s  version 8  eval:  accuracy 0.9375",
    ]


def test_lines_fit_a_hundred_columns_and_lose_what_matters_least():
    how = {"trainings_per_s": 118.4, "num_processes": 2, "share_batched": 0.97, "mean_cohort": 42.0, "speed": 1.5}
    line = sentence(state(8, simulated=True, **PACE, **how))
    assert line == "      1.0 s  version 8  8 updates  2 updates/s  staleness 0.5 (at most 2)  ends in 6 s, here 4 s"
    line = sentence(state(8_000, simulated=True, num_updates_goal=100_000, num_clients=4, **PACE, **how))
    assert line == "      1.0 s  version 8000  8000 of 100000 updates  2 updates/s  1.5 MB/s  ends in 6 s, here 4 s"
    metrics = {f"metric_{i}": i / 7 for i in range(9)}
    line = evaluation(state(9, time_s=2.0, metrics=metrics, evaluated=(1.0, 8)))
    assert line == ("      1.0 s  version 8  eval:  metric_0 0  metric_1 0.1429  metric_2 0.2857  and 6 more")
    assert all(len(text) <= 100 for text in wrapped("select gre_raa over fragments 20/30/50 %, " * 9).splitlines())


def test_evaluations_without_end_leave_room_for_how_the_run_proceeds():
    file, clock = io.StringIO(), Clock()
    progress = Progress("plain", file, clock)
    progress.start("title")
    for step in range(1, 251):  # 25 s
        clock.now = 100 + 0.1 * step
        progress.update(state(step, metrics={"loss": 1.0}), evaluated=True)
        progress.update(state(step, metrics={"loss": 1.0}))
    others = [line for line in file.getvalue().splitlines()[1:] if "eval:" not in line]
    assert [line.split("version ")[1].split()[0] for line in others] == ["100", "200"]


def test_a_snapshot_is_made_only_when_it_is_shown():
    clock = Clock()
    progress = Progress("plain", io.StringIO(), clock)
    made = []
    progress.update(lambda: made.append(0) or state())  # not started
    progress.start("title")
    progress.update(lambda: made.append(1) or state())
    clock.now += 2.5
    progress.update(lambda: made.append(2) or state())
    progress.stop()
    progress.update(lambda: made.append(3) or state(), evaluated=True)
    assert made == [2]


def test_an_update_that_is_not_due_costs_microseconds():
    progress = Progress("plain", io.StringIO())
    progress.start("title")
    snapshot = state()
    best = float("inf")
    for _ in range(20):
        start = time.thread_time()
        for _ in range(500):
            progress.update(snapshot)
        best = min(best, (time.thread_time() - start) / 500)
    assert best < 10e-6


def test_quiet_writes_nothing():
    file, clock = io.StringIO(), Clock()
    progress = Progress("quiet", file, clock)
    progress.start("title")
    clock.now += 100
    progress.update(state(), evaluated=True)
    progress.note("text")
    progress.stop()
    assert file.getvalue() == ""


def test_a_source_is_shown_where_nothing_is_given():
    file, clock = io.StringIO(), Clock()
    progress = Progress("plain", file, clock)
    progress.source = lambda: state(5)
    progress.start("title")
    clock.now += 3
    progress.update()
    assert "version 5  5 updates" in file.getvalue()


def test_auto_follows_the_file(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for mode, terminal, found in (("verbose", True, "live"), ("verbose", False, "plain"), ("auto", False, "plain")):
        progress = Progress(mode, Terminal() if terminal else io.StringIO())
        assert (progress.mode, progress.verbose) == (found, mode == "verbose")
    assert Progress("auto", io.StringIO()).mode == "plain"
    assert Progress("auto", Terminal()).mode == "live"
    monkeypatch.setenv("TERM", "dumb")
    assert Progress("auto", Terminal()).mode == "plain"


def test_the_live_table_shows_clients_and_numbers(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    file, clock = Terminal(), Clock()
    before = sys.stdout, sys.stderr
    progress = Progress("live", file, clock)
    progress.start("fed_raa [digits]")
    clients = tuple(ClientProgress(i, "fragment [0]" if i % 2 else "", i) for i in range(1, 21))
    progress.update(state(7, metrics={"accuracy": 0.5}, clients=clients))
    clock.now += 0.1
    progress.update(state(8888))  # too early
    progress.note("client 2 was [lost]")
    progress.stop()
    progress.stop()
    text = file.getvalue()
    for part in ("fed_raa [digits]", "fragment [0]", "idle", "7 updates", "accuracy 0.5", "client 2 was [lost]"):
        assert part in text
    assert "4 more, 2 at work" in text  # 16 are shown; of 17 to 20, 17 and 19 are at work
    assert "8888" not in text
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize(("width", "height"), [(80, 20), (80, 12), (40, 24), (200, 60)])
def test_a_live_table_leaves_room_for_what_stands_below_it(monkeypatch, width, height):
    """Of a table that is too high rich shows the top, and dots in the place of metrics and end."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", str(height))
    file = Terminal()
    progress = Progress("live", file, Clock())
    progress.start("a run with a title of more than forty columns")
    clients = tuple(ClientProgress(i, "full", i, since_s=1.0) for i in range(1, 17))
    progress.update(
        state(7, metrics={"accuracy": 0.5}, clients=clients, num_clients=500, num_working=400, ends_in_s=9.0)
    )
    shown = file.getvalue()  # before the end, at which a table is shown whole
    progress.stop()
    assert "accuracy 0.5" in shown and "ends in 9 s" in shown
    lines = shown.splitlines()
    assert ("484 more, 384 at work" in shown) == (height == 60) and len(lines) <= height
    assert any(re.match("1 ", line) for line in lines)


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_closed_file_ends_the_progress_and_not_the_run(mode):
    file, clock = Terminal(), Clock()
    before = sys.stdout, sys.stderr
    progress = Progress(mode, file, clock)
    progress.start("title")
    file.close()
    clock.now += 10
    progress.update(state())
    progress.note("text")
    progress.update(state(), evaluated=True)
    progress.stop()
    assert progress.mode == "quiet"
    assert (sys.stdout, sys.stderr) == before


def test_rich_is_imported_only_for_the_live_table():
    import subprocess

    code = (
        "import sys; from raafl.watch.progress import Progress; from raafl.watch.state import ProgressState\n"
        "p = Progress('plain', sys.stderr); p.start('t')\n"
        "p.update(ProgressState(1, 1, 1.0), evaluated=True); p.stop()\n"
        "sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_warning_is_said_once_in_the_view_and_once_on_standard_error(capsys):
    file = io.StringIO()
    progress = Progress("plain", file, Clock())
    progress.start("title")
    for text in ("the disk is full", "the disk is full", "a logger hangs"):
        progress.warn(text)
    assert progress.warnings == ["the disk is full", "a logger hangs"]
    assert file.getvalue().splitlines() == ["title", "warning: the disk is full", "warning: a logger hangs"]
    assert capsys.readouterr().err.splitlines() == [
        "raafl: warning: the disk is full",
        "raafl: warning: a logger hangs",
    ]


@pytest.mark.parametrize(("mode", "said"), [("plain", "warning: full\n"), ("quiet", "raafl: warning: full\n")])
def test_a_view_on_standard_error_says_a_warning_once(capsys, mode, said):
    progress = Progress(mode, sys.stderr, Clock())
    progress.warn("full")
    assert capsys.readouterr().err == said


def test_a_warning_is_said_once_where_both_streams_end_in_one_log(tmp_path, monkeypatch):
    with (
        (tmp_path / "log").open("a") as out,
        (tmp_path / "log").open("a") as err,
        (tmp_path / "other").open("w") as other,
    ):
        monkeypatch.setattr(sys, "stderr", err)
        Progress("plain", out, Clock()).warn("full")
        Progress("plain", other, Clock()).warn("slow")
    assert (tmp_path / "log").read_text() == "warning: full\nraafl: warning: slow\n"
    assert (tmp_path / "other").read_text() == "warning: slow\n"


def test_warnings_are_bounded_and_need_no_standard_error(monkeypatch):
    progress = Progress("quiet", io.StringIO(), Clock())
    monkeypatch.setattr(sys, "stderr", None)
    for number in range(200):
        progress.warn(str(number))
    assert len(progress.warnings) == 100


def test_a_live_view_that_is_abandoned_gives_the_cursor_back(tmp_path):
    with (tmp_path / "screen").open("w+") as file:
        progress = Progress("live", file, Clock())
        progress.start("title")
        progress.abandon()
        assert (tmp_path / "screen").read_bytes().endswith(b"\x1b[?25h\n")
        progress.stop()


def test_a_log_has_time_stamps_and_no_line_twice():
    """Nothing before the run has begun; then a line when something has changed, and one a minute."""
    file, clock = io.StringIO(), Clock()
    progress = Progress("plain", file, clock)
    progress.stamped = True
    progress.start("title")
    for second in range(1, 200):
        clock.now = 100 + second
        here = {"num_there": 2, "num_clients": 2, "num_working": 2 if second >= 50 else 0}
        progress.update(state(3 if second >= 90 else 0, time_s=float(second), **here, **PACE))
    lines = file.getvalue().splitlines()
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  .*", line) and len(line) <= 100 for line in lines)
    assert [float(line[21:].split()[0]) for line in lines[1:]] == [50.0, 90.0, 150.0]
