"""Training in several processes: the same results as in one, whatever the order, and nothing left when it ends or breaks."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from model_zoo import MLP
from raafl.algorithms import fed_async, fed_avg
from raafl.core.hooks import RunHooks
from raafl.errors import TaskFailed
from raafl.local import failure
from raafl.runtime.executors import Inline
from raafl.runtime.executors import ranks as ranks_module
from raafl.runtime.executors.ranks import RankExecutor
from tests.conformance.executors import WAIT_S, Slow, clients, one_by_one, pool, ranks, tasks_of, told
from tests.helpers.forked_command import command, wait_for
from tests.helpers.guards import is_tracker
from tests.helpers.small_runs import experiment, finish
from tests.local.bench import Bench, Net

HERE = os.getpid()
pytestmark = pytest.mark.timeout(120)


class Wide(Net):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(3, 3)


class Killed(MLP):
    """Dies in a worker as the kernel's memory killer would have it; never in the test's own process."""

    def training_step(self, batch, batch_idx):
        if os.getpid() != HERE and torch.rand(()) < 0.2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class Broken(MLP):
    def training_step(self, batch, batch_idx):
        if os.getpid() != HERE and torch.rand(()) < 0.2:
            raise ZeroDivisionError("in the user's code")
        return super().training_step(batch, batch_idx)


def of(make, **sizes):
    return lambda: make(64, (24,), 10, lr=0.05, momentum=0.5, **sizes)


def children():
    found = psutil.Process().children(recursive=True)
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE and not is_tracker(p)]


def open_files():
    gc.collect()
    return psutil.Process().num_fds()


class Failing(Net):
    """Fails everywhere but in the test's own process."""

    def training_step(self, batch, index):
        if os.getpid() != HERE:
            raise ZeroDivisionError("in the user's code")
        return super().training_step(batch, index)


def test_a_free_rank_is_given_the_most_urgent_task_and_nothing_once_the_run_has_ended():
    data, bench = clients(), Bench.of(Net)
    executor = RankExecutor(bench.trainer, Inline(bench.trainer, data.__getitem__))
    for (task, values), needed_at in zip(tasks_of(bench, 4), (3.0, 1.0, 2.0, 4.0), strict=True):
        executor.submit(task, values, needed_at)
    given = [executor._next() for _ in range(3)]
    assert [[task.assignment.id for task in some] for some in given] == [[2], [3], [1]]
    executor._end()
    assert executor._next() is None


@pytest.mark.quick_cases("1")
@pytest.mark.parametrize("num_killed", [1, 2])
def test_a_rank_that_is_killed_gives_its_task_back_and_the_run_goes_on(num_killed):
    data, bench = clients(), Bench.of(Slow, max_built=2)
    todo = tasks_of(bench, 160)
    todo, more = todo[:60], todo[60:]
    expected = one_by_one(bench, data, todo)
    with ranks(bench, data, 3) as executor:
        for task, values in todo:
            executor.submit(task, values, float(task.id))
        found = {}
        for task, _ in todo:
            if task.id == 20:
                for process in executor.processes[:num_killed]:
                    process.kill()
            found[task.id] = told(executor.result(task.id))
        for process in executor.processes[:num_killed]:
            process.join(WAIT_S)
        for task, values in more:  # one that had nothing to do is missed when it is given something
            if len(executor.warnings) == num_killed:
                break
            executor.submit(task, values, float(task.id))
            time.sleep(0.02)
            executor.result(task.id)
    assert found == expected
    assert sorted(text.split(" is lost")[0] for text in executor.warnings) == ["rank 1", "rank 2"][:num_killed]
    assert all(text.endswith("; the run goes on without it") for text in executor.warnings)
    assert executor.codes == [-signal.SIGKILL] * num_killed + [0] * (2 - num_killed)


def test_nothing_is_left_of_tasks_over_ranks_and_no_more_is_trained_ahead_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(ranks_module, "AHEAD_BYTES", 0)
    data, bench = clients(), Bench.of(Net, max_built=2)
    with ranks(bench, data, 3) as executor:
        todo = tasks_of(bench, 60)
        for task, values in todo:
            executor.submit(task, values, float(task.id))
        deadline = time.monotonic() + 0.2  # nobody asks for anything meanwhile
        while time.monotonic() < deadline:
            assert executor._num_ahead <= 2 * 3 + 2  # those that were begun together
            time.sleep(0.005)
        for task, _ in todo[::2]:
            executor.cancel(task.id)
        for task, _ in todo[1::2]:
            executor.result(task.id)
        last = time.monotonic() + WAIT_S
        while executor._tasks and time.monotonic() < last:  # what had been begun when it was cancelled
            time.sleep(0.01)
        assert not executor._tasks and (executor._num_ahead, executor._ahead_bytes) == (0, 0)


class Endless(Net):
    """Is at work for ever in another process."""

    def training_step(self, batch, index):
        while os.getpid() != HERE:
            time.sleep(0.02)
            if self.told.is_set():
                break
        return super().training_step(batch, index)


def test_ranks_in_the_middle_of_a_task_end_with_the_run_and_without_an_error():
    Endless.told = mp.get_context("fork").Event()  # lets the batch at hand end, of many to come
    data, bench = clients(), Bench.of(Endless, max_built=2)
    with ranks(bench, data, 3) as executor:
        for task, values in tasks_of(bench, 6):
            executor.submit(replace(task, num_epochs=10**6), values, float(task.id))
        while sum(task.begun for task in executor._tasks.values()) < 2:
            time.sleep(0.005)
        time.sleep(0.1)  # they are in their first batch, or about to
        threading.Timer(0.2, Endless.told.set).start()
    assert executor.codes == [0, 0] and executor.warnings == []


def test_a_failure_in_another_rank_is_told_with_its_own_words_when_its_turn_comes():
    data, bench = clients(), Bench.of(Failing, max_built=2)
    with ranks(bench, data, 2) as executor:
        ((first, values),) = tasks_of(bench, 1)
        executor.submit(first, values, 0.0)
        while not executor._tasks[first.id].result:
            time.sleep(0.005)
        with pytest.raises(TaskFailed, match="ZeroDivisionError: in the user's code"):
            executor.result(first.id)
        assert not executor._tasks


def test_a_rank_whose_gpu_fails_gives_its_task_back_and_ends(monkeypatch):
    monkeypatch.setattr(failure, "_is_lost", lambda device: True)
    data, bench = clients(), Bench.of(Failing, max_built=2)
    ((task, values),) = todo = tasks_of(bench, 1)
    expected = one_by_one(bench, data, todo)
    with ranks(bench, data, 2) as executor:
        executor.submit(task, values, 0.0)
        while not executor.warnings:
            time.sleep(0.005)
        assert {task.id: told(executor.result(task.id))} == expected
    assert executor.warnings[0].startswith("rank 1 is lost (") and executor.codes == [1]


def test_a_rank_with_another_model_takes_no_part():
    data, bench, other = clients(), Bench.of(Net, max_built=2), Bench.of(Wide, max_built=2)
    todo = tasks_of(bench, 3)
    expected = one_by_one(bench, data, todo)
    with ranks(bench, data, 2, other) as executor:
        while not executor.warnings:
            time.sleep(0.005)
        for task, values in todo:
            executor.submit(task, values, 0.0)
        assert {task.id: told(executor.result(task.id)) for task, _ in todo} == expected
    assert executor.warnings[0].startswith("rank 1 is lost (incompatible: another model: ")


def test_workers_killed_while_training_are_missed_by_nothing_but_a_line_each(tmp_path):
    made = experiment(tmp_path / "one", fed_async(), model=of(Killed), max_updates=200)
    one, before = finish(made), open_files()
    run = finish(replace(made, output=str(tmp_path / "r"), workers=3))
    assert run.digest == one.digest
    lost = [text for text in run.summary["warnings"] if "worker process" in text]
    assert sorted(text.split(" is lost (")[0] for text in lost) == ["worker process 1", "worker process 2"]
    assert all(text.endswith("; the run goes on without it") and "\n" not in text for text in lost)
    assert children() == []
    assert open_files() <= before


@pytest.mark.parametrize("num_processes", [2, 3])
def test_a_worker_killed_while_it_waits_is_noticed(num_processes):
    data, bench = clients(), Bench.of(Slow, max_built=2)
    todo = tasks_of(bench, 30)
    expected = one_by_one(bench, data, todo)
    with pool(bench, data, num_processes) as executor:
        warnings = []
        executor.warn = warnings.append
        time.sleep(0.3)
        executor._processes[0].kill()
        for task, values in todo:
            executor.submit(task, values, 0.0)
        found = {task.id: told(executor.result(task.id)) for task, _ in todo}
        wait_for(lambda: warnings, "the loss of the worker")
        assert executor.num_processes == num_processes - 1
    assert found == expected and [text.split(" (")[0] for text in warnings] == ["worker process 1 is lost"]
    assert children() == []


def test_an_error_in_a_worker_is_told_with_its_own_words(tmp_path):
    run = finish(experiment(tmp_path / "r", fed_async(), model=of(Broken), workers=2, max_updates=100_000))
    assert run.summary["finished"].startswith("failed: client ") and "in the user's code" in run.summary["finished"]
    assert children() == []


def killed_at_its_first_evaluation(argv):
    """A run that names its workers and dies without a word: an entry for `tests.helpers.forked_command.command`."""

    def killed(self, version, now, metrics):
        print(*[child.pid for child in children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    RunHooks.on_evaluate = killed
    finish(experiment(Path(argv[0]), fed_async(), workers=3, max_updates=100000))


def test_workers_end_soon_after_their_parent(tmp_path):
    with command(tmp_path / "c", str(tmp_path / "r"), entry=killed_at_its_first_evaluation) as started:
        assert started.end() == -signal.SIGKILL, started.err
        workers = [int(pid) for pid in started.out.split()]
        wait_for(lambda: not any(map(psutil.pid_exists, workers)), "the end of the workers")
    assert len(workers) == 2


def test_runs_in_several_processes_leave_no_file_open(tmp_path):
    finish(experiment(tmp_path / "warm", fed_async(), workers=2))
    before = open_files()
    for number in range(3):
        finish(experiment(tmp_path / str(number), fed_async(), workers=3))
    assert open_files() <= before
    assert children() == []


@pytest.mark.slow("a model large enough to be computed by several threads")
@pytest.mark.timeout(90)
def test_several_threads_in_several_processes_do_not_hang_and_agree(tmp_path):
    """OpenMP's threads do not survive a fork: a worker that counts on its parent's would wait for ever."""
    wide = lambda: MLP(64, (600, 600), 10, lr=0.05)  # noqa: E731  # large enough to be computed by several threads
    shape = {"model": wide, "threads": 2, "max_updates": 2, "clients": 2}
    one, two = (finish(experiment(tmp_path / str(n), fed_avg(), workers=n, **shape)) for n in (1, 2))
    assert one.digest == two.digest
    torch.set_num_threads(1)
