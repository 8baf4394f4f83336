"""Real ranks that die, hang, come late or dawdle: one is lost alone, the run ends well, and nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace

import psutil
import pytest

from model_zoo import MLP
from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_raa
from raafl.config.options import Timeouts
from raafl.core.algorithm import Training
from raafl.core.options import SecureAggregation
from raafl.core.state import OneValue
from raafl.core.types import Arrived, Joined, Lost, Stop
from raafl.parts.merge.mean import Mean
from tests.helpers import real_ranks as here
from tests.helpers.real_ranks import Watched, held, ranks
from tests.helpers.small_runs import experiment

pytestmark = pytest.mark.timeout(240)
SHORT = Timeouts(join_s=40.0, task_s=40.0, idle_s=40.0, stop_s=5.0)
THIRTY_STEPS = Training(num_epochs=None, num_steps=30)


class Dawdling(MLP):
    """Its second client takes a second for each step, the others three hundredths."""

    def training_step(self, batch, batch_idx):
        time.sleep(1.0 if here.RANK == 2 else 0.03)
        return super().training_step(batch, batch_idx)


def dawdling():
    return Dawdling(64, (24,), 10, lr=0.05, momentum=0.5)


def settings(tmp_path, algorithm, **fields):
    known = {"clients": 3, "emulate": False, "waits": SHORT, "max_updates": 30, **fields}
    return experiment(tmp_path / "run", algorithm, **known)


def after(number, kind, action):
    """An inbox that acts when the server takes the so-manieth event of a kind."""
    seen = []

    def look(event):
        if isinstance(event, kind):
            seen.append(event)
            if len(seen) == number:
                action()

    return Watched(look)


def lost_rows(run):
    return [row for row in run.rows() if row["outcome"].startswith("lost")]


@pytest.mark.quick_cases("fed_avg")
@pytest.mark.parametrize(
    "algorithm", [fed_async(), fed_buff(buffer_size=4), fed_raa(), fed_avg()], ids=lambda a: a.name
)
def test_a_client_killed_in_a_task_is_lost_alone_and_at_once(tmp_path, algorithm):
    killed_at = []
    with ranks(settings(tmp_path, algorithm, model=dawdling)) as fleet:

        def kill():
            killed_at.append(time.perf_counter())
            fleet.send(2, signal.SIGKILL)

        inbox = after(2, Arrived, kill)
        run = fleet.serve(inbox)
        assert fleet.exit_codes() == {1: 0, 2: -signal.SIGKILL, 3: 0}
    assert run.summary["finished"] == "max_updates"
    assert run.summary["updates_merged"] >= 30
    (reason,) = run.summary["updates_lost_by_reason"]
    assert reason == "disconnected"
    assert [(row["client"], row["task"]) for row in lost_rows(run)] == [("2", "0")]
    assert run.summary["participation"]["2"] == 0
    assert min(run.summary["participation"]["1"], run.summary["participation"]["3"]) > 0
    (put_at,) = [at for at, event in inbox.put_at if isinstance(event, Lost) and event.client == 2]
    assert put_at - killed_at[0] < SHORT.task_s / 2  # not at its deadline


def test_a_client_that_hangs_is_lost_at_its_deadline(tmp_path):
    """The others go on meanwhile, and afterwards: the run ends at their sixth update from then on."""
    waits = replace(SHORT, task_s=5.0, stop_s=2.0)
    more = {"model": lambda: Slowly(64, (24,), 10), "waits": waits, "max_updates": None, "max_time": 100.0}
    with ranks(settings(tmp_path, fed_async(), **more)) as fleet:
        stopped_at, later = [], []

        def look(event):
            # its next task is still to come
            if isinstance(event, Arrived) and event.update.client == 2 and not stopped_at:
                fleet.send(2, signal.SIGSTOP)
                stopped_at.append(time.perf_counter())
            if later or isinstance(event, Lost):
                later.append(event)
                if len(later) == 7:
                    inbox.put(Stop("stopped: seen"))

        inbox = Watched(look)
        run = fleet.serve(inbox)
        fleet.send(2, signal.SIGCONT)
        codes = fleet.exit_codes()
    assert run.summary["finished"] == "stopped: seen"
    assert all(isinstance(event, Arrived) for event in later[1:7])
    (row,) = lost_rows(run)
    assert (row["client"], row["outcome"]) == ("2", "lost:timeout")
    (put_at,) = [at for at, event in inbox.put_at if isinstance(event, Lost) and event.client == 2]
    assert 4.9 < put_at - stopped_at[0] < SHORT.task_s / 2
    assert any(isinstance(event, Arrived) and stopped_at[0] < at < put_at for at, event in inbox.put_at)
    assert codes == {1: 0, 2: 0, 3: 0}  # by the time the second goes on, the run has ended


class Slowly(MLP):
    def training_step(self, batch, batch_idx):
        time.sleep(0.03)
        return super().training_step(batch, batch_idx)


def test_a_round_does_not_wait_for_a_client_that_hangs_beyond_its_deadline(tmp_path):
    with ranks(settings(tmp_path, fed_avg(), waits=replace(SHORT, task_s=5.0, stop_s=1.0), max_updates=9)) as fleet:
        run = fleet.serve(after(3, Arrived, lambda: fleet.send(3, signal.SIGSTOP)))
    assert run.summary["finished"] == "max_updates"
    assert [row["client"] for row in lost_rows(run)] == ["3"]
    assert run.summary["participation"] == {"1": 4, "2": 4, "3": 1}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("when", ["before it joins", "while others are still to join"])
def test_a_client_that_dies_before_the_start_is_not_waited_for(tmp_path, when):
    joins_s = 6.0 if when == "before it joins" else 40.0  # it may take seconds: c10d looks up names
    waits = replace(SHORT, join_s=joins_s, idle_s=9.0)
    ready = tmp_path / "ready"

    def before(rank):
        if rank == 2 and when == "before it joins":
            os._exit(3)
        while rank == 3 and when != "before it joins" and not ready.exists():
            time.sleep(0.02)

    with ranks(settings(tmp_path, fed_avg(), waits=waits, max_updates=4), before) as fleet:
        inbox = Watched()

        def look(event):
            if when != "before it joins" and isinstance(event, Joined) and event.client.id == 2:
                fleet.send(2, signal.SIGKILL)
            if isinstance(event, Lost):
                ready.touch()

        inbox.seen = look
        run = fleet.serve(inbox)
        assert {code for rank, code in fleet.exit_codes().items() if rank != 2} == {0}
    assert run.summary["finished"] == "max_updates"
    assert [event["client"] for event in run.events("lost")] == [2]
    assert run.summary["participation"]["1"] == run.summary["participation"]["3"] == 2


def test_when_every_client_dies_the_run_fails_by_name(tmp_path):
    with ranks(settings(tmp_path, fed_async(), model=dawdling)) as fleet:
        run = fleet.serve(after(2, Arrived, lambda: [fleet.send(rank, signal.SIGKILL) for rank in (1, 2, 3)]))
    assert run.summary["finished"] == "failed: every client was lost"
    assert run.summary["updates_merged"] >= 1
    assert (run.folder / "summary.json").is_file()


def test_a_run_does_not_wait_for_a_task_that_nobody_needs_and_its_client_ends_well(tmp_path):
    """The second client's task takes half a minute, which the run does not let it."""
    more = {"model": dawdling, "waits": replace(SHORT, stop_s=0.5), "max_updates": 10, "train": THIRTY_STEPS}
    with ranks(settings(tmp_path, fed_async(), **more)) as fleet:
        run = fleet.serve()
        assert run.summary["wall_s"] < 25.0
        assert fleet.exit_codes() == {1: 0, 2: 0, 3: 0}
    assert {row["client"] for row in run.rows() if row["outcome"] == "unused"} >= {"2"}


def test_clients_notice_that_the_server_is_gone(tmp_path):
    """A server that dies without a word: they end soon, as failed."""
    with ranks(settings(tmp_path, fed_async(), max_updates=100000), fork_server=True) as fleet:
        deadline = time.monotonic() + 20
        journal = tmp_path / "run" / "events.jsonl"
        while time.monotonic() < deadline and (not journal.exists() or journal.read_text().count("arrived") < 5):
            time.sleep(0.02)
        fleet.send(0, signal.SIGKILL)
        assert fleet.exit_codes() == {0: -signal.SIGKILL, 1: 1, 2: 1, 3: 1}
    # what was journalled is whole
    assert all(json.loads(line) for line in journal.read_text().splitlines())


# ---- nothing waits for what it need not wait for ----


ARRIVED = [0]
SPANS: list[tuple[int, int]] = []
"""Of the process, not of the class: what a module's class keeps would carry over from client to client."""


class Measured(MLP):
    """Notes how many updates had come in when a validation began and when it ended."""

    def validation_step(self, batch, batch_idx):
        began = ARRIVED[0]
        time.sleep(0.15)
        SPANS.append((began, ARRIVED[0]))
        return super().validation_step(batch, batch_idx)

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def test_a_slow_evaluation_delays_no_merge_and_measures_a_snapshot(tmp_path):
    ARRIVED[0] = 0
    SPANS.clear()

    def count(event):
        ARRIVED[0] += isinstance(event, Arrived)

    more = {"model": lambda: Measured(64, (24,), 10, lr=0.05), "eval_every": 1, "max_updates": 240}
    with ranks(settings(tmp_path, fed_async(), **more)) as fleet:
        run = fleet.serve(Watched(count))
    assert run.summary["finished"] == "max_updates"
    during = [end - start for start, end in SPANS if start and end < 240]
    assert max(during) >= 2  # within a sixth of an evaluation; none, or one, if merges waited for it
    # test data is six batches: no evaluation ends within 0.9 s, so most versions are passed over, in order
    versions = [int(row["version"]) for row in run.rows("metrics.csv")]
    assert versions == sorted(versions) and versions[0] == 0 and versions[-1] == 240
    assert len(versions) < 80
    merged_s = [float(row["arrived_s"]) for row in run.rows() if row["outcome"] == "merged"]
    gaps = [b - a for a, b in zip(sorted(merged_s), sorted(merged_s)[1:], strict=False)]
    assert sum(gap > 0.6 for gap in gaps) < len(versions) / 2  # of the 0.9 of each evaluation


@dataclass
class Spans(OneValue[list[int]]):
    key = "spans"
    value: list[int] = field(default_factory=list)


class SlowMean(Mean):
    """A merge that takes as long as several tasks."""

    def apply(self, state):
        began = time.perf_counter()
        time.sleep(0.15)
        super().apply(state)
        state.memory.of(Spans).value.append(0)
        SPANS.append((began, time.perf_counter()))


SPANS: list[tuple[float, float]] = []


def test_updates_are_received_while_others_are_merged(tmp_path):
    SPANS.clear()
    algorithm = replace(fed_async(), merge=SlowMean(alpha=0.5, by_samples=False))
    inbox = Watched()
    with ranks(settings(tmp_path, algorithm, max_updates=12)) as fleet:
        fleet.serve(inbox)
    arrivals = [at for at, event in inbox.put_at if isinstance(event, Arrived)]
    within = [at for at in arrivals if any(began < at < ended for began, ended in SPANS)]
    assert len(within) >= 2  # the others' of the first merge; none if merges held them up


# ---- nothing is left ----


@pytest.mark.long("tests/runtime/executors/test_ranks.py::test_runs_in_several_processes_leave_no_file_open")
@pytest.mark.slow("four runs on real ranks")
def test_threads_files_and_processes_are_gone_after_each_run(tmp_path):
    def one(name, inbox_action=None):
        task_s = 5.0 if inbox_action == signal.SIGSTOP else SHORT.task_s  # busy neighbours may take a task's second
        base = settings(tmp_path, fed_async(), max_updates=8, waits=replace(SHORT, task_s=task_s, stop_s=1.0))
        with ranks(replace(base, output=str(tmp_path / name))) as fleet:
            action = None if inbox_action is None else (lambda: fleet.send(2, inbox_action))
            run = fleet.serve(after(3, Arrived, action) if action else None)
            assert run.summary["finished"] == "max_updates"

    one("warm")
    before = held()
    one("plain")
    one("killed", signal.SIGKILL)
    one("hung", signal.SIGSTOP)

    def more():
        now = held()
        return now if now[0] > before[0] or now[2] > before[2] else None

    deadline = time.monotonic() + 60
    while more() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not more(), (before, more())
    assert [t.name for t in threading.enumerate() if t.name.startswith(("client-", "evaluator", "checkpoint"))] == []
    assert psutil.Process().children() == []


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", [fed_async(), fed_buff(buffer_size=3)], ids=lambda a: a.name)
def test_a_model_may_lie_on_a_gpu(tmp_path, algorithm):
    from raafl.local.train import FabricOptions
    from raafl.runtime.run import simulate

    base = settings(tmp_path, algorithm, server_device="cuda:0", fabric=FabricOptions(accelerator="cuda"))
    summary, _ = simulate(base)
    assert summary["finished"] == "max_updates"


def test_clients_that_mask_do_not_wait_for_ever_for_one_that_is_gone(tmp_path):
    masked = {"secure_aggregation": SecureAggregation(min_cover=3), "max_updates": 3_000}
    with ranks(settings(tmp_path, fed_buff(buffer_size=3), **masked)) as fleet:
        run = fleet.serve(after(3, Joined, lambda: fleet.send(3, signal.SIGKILL)))
        assert {code for rank, code in fleet.exit_codes().items() if rank != 3} == {1}
    assert run.summary["finished"] == "failed: only 2 clients are left, of 3 or more"
