"""Training in several processes: the same results as in one, whatever the order, and nothing left when it ends or breaks."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from model_zoo import MLP
from raafl.algorithms import fed_async, fed_avg
from raafl.core.types import derive_seed
from raafl.data.federated import ClientData
from raafl.runtime.executors import Inline, Pool
from raafl.submodel import Spec
from tests.federation import experiment, finish
from tests.local.bench import BATCH_SIZE, Bench, Net, assignment, samples

ROOT = Path(__file__).parents[2]
HERE = os.getpid()
pytestmark = pytest.mark.timeout(120)


class Dropping(Net):
    dropout = 0.3


class Slow(Net):
    """Takes its time in workers only, so that the order in which tasks end is not the one in which they were given."""

    def training_step(self, batch, index):
        if os.getpid() != HERE:
            time.sleep(0.002)
        return super().training_step(batch, index)


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
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def open_files():
    gc.collect()
    return psutil.Process().num_fds()


def tasks_of(bench, count):
    """Tasks of three submodels from three clients, with what each starts from."""
    axis = next(iter(bench.submodels.axes))
    specs = [Spec(), Spec.keep({axis: range(0, 3)}), Spec.keep({axis: (1, 4, 6, 7)})]
    generator = torch.Generator().manual_seed(9)
    tasks = []
    for number in range(1, count + 1):
        task = assignment(specs[number % 3], seed=derive_seed(number), epochs=1)
        task = type(task)(**{**{f: getattr(task, f) for f in task.__slots__}, "id": number, "client": number % 3})
        values = bench.submodels.plan(task.spec, "present").gather(bench.values)
        for buffer in values.buffers.values():
            buffer.add_(torch.randn(buffer.shape, generator=generator), alpha=0.1)
        tasks.append((task, values))
    return tasks


def clients():
    return [ClientData(samples(seed), torch.arange(4 + 6 * seed), BATCH_SIZE) for seed in range(3)]


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("make", [Dropping, Slow])
def test_any_number_of_tasks_in_any_order_give_what_one_process_gives(make, num_processes):
    data = clients()
    bench = Bench.of(make, max_built=2)
    inline = Inline(bench.trainer, data.__getitem__)
    todo = tasks_of(bench, 90)  # more than there is shared memory for
    expected = {}
    for task, values in todo:
        inline.submit(task, values, 0.0)
        update = inline.result(task.id)
        expected[task.id] = (update.tensors.fingerprint(), update.num_samples, update.num_steps, update.metrics)
    draw = random.Random(2)
    pool = Pool(bench.trainer, data.__getitem__, num_processes)
    try:
        for task, values in todo:
            pool.submit(task, values, draw.random())
        order = [task for task, _ in todo]
        draw.shuffle(order)
        found = {}
        for task in order:
            if draw.random() < 0.3:
                pool.cancel(task.id)
                continue
            update = pool.result(task.id)
            assert (update.assignment, update.client) == (task.id, task.client)
            found[task.id] = (update.tensors.fingerprint(), update.num_samples, update.num_steps, update.metrics)
    finally:
        pool.close()
    assert 40 < len(found) < 80
    assert found == {number: expected[number] for number in found}


def test_a_pool_can_be_used_again_and_again_without_running_out_of_slots():
    data, bench = clients(), Bench.of(Dropping, max_built=2)
    pool = Pool(bench.trainer, data.__getitem__, 2)
    try:
        for _ in range(6):
            todo = tasks_of(bench, 40)
            for task, values in todo:
                pool.submit(task, values, float(task.id))
            for task, _ in todo[::2]:
                pool.cancel(task.id)
            for task, _ in todo[1::2]:
                pool.result(task.id)
        last = time.monotonic() + 10
        while pool._tasks and time.monotonic() < last:  # what had been begun when it was cancelled
            pool._collect(block=False)
        pool._release(pool._lent)
        assert sorted(pool._free) == list(range(len(pool._slots)))
        assert pool._queued == 0
    finally:
        pool.close()
        pool.close()


def test_a_worker_killed_while_training_ends_the_run_with_one_line_and_no_orphan(tmp_path):
    before = open_files()
    with pytest.raises(RuntimeError, match=r"^worker process \d died \(exit code -9\)[^\n]*$"):
        finish(experiment(tmp_path / "r", fed_async(), model=of(Killed), workers=3, max_updates=500))
    assert children() == []
    assert open_files() <= before


@pytest.mark.parametrize("num_processes", [2, 3])
def test_a_worker_killed_while_it_waits_is_noticed(num_processes):
    """It holds the queue's lock then, which nobody gives back."""
    data, bench = clients(), Bench.of(Slow, max_built=2)
    pool = Pool(bench.trainer, data.__getitem__, num_processes)
    try:
        time.sleep(0.3)
        pool._processes[0].kill()
        todo = tasks_of(bench, 30)
        with pytest.raises(RuntimeError, match="worker process 1 died"):
            for task, values in todo:
                pool.submit(task, values, 0.0)
            for task, _ in todo:
                pool.result(task.id)
    finally:
        pool.close()
    assert children() == []


def test_an_error_in_a_worker_is_told_with_its_own_words(tmp_path):
    run = finish(experiment(tmp_path / "r", fed_async(), model=of(Broken), workers=2, max_updates=500))
    assert run.summary["finished"].startswith("failed: client ") and "in the user's code" in run.summary["finished"]
    assert children() == []


@pytest.mark.slow("a process starts from nothing, and workers of it")
def test_workers_end_soon_after_their_parent(tmp_path):
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from raafl.algorithms import fed_async
        from raafl.core.hooks import Hooks
        from raafl.commands.run import Saver
        from tests.federation import experiment, finish
        import psutil
        def killed(self, version, now, metrics):
            print(*[child.pid for child in psutil.Process().children()], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        Hooks.on_evaluate = killed
        finish(experiment(Path({str(tmp_path)!r}) / "r", fed_async(), workers=3, max_updates=100000))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    workers = [int(pid) for pid in ended.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, workers))


def test_runs_in_several_processes_leave_no_file_open(tmp_path):
    finish(experiment(tmp_path / "warm", fed_async(), workers=2))
    before = open_files()
    for number in range(3):
        finish(experiment(tmp_path / str(number), fed_async(), workers=3))
    assert open_files() == before
    assert children() == []


@pytest.mark.slow("a model large enough to be computed by several threads")
@pytest.mark.timeout(90)
def test_several_threads_in_several_processes_do_not_hang_and_agree(tmp_path):
    """OpenMP's threads do not survive a fork: a worker that counts on its parent's would wait for ever."""
    wide = lambda: MLP(64, (1500, 1500), 10, lr=0.05)  # noqa: E731  # large enough to be computed by several threads
    shape = {"model": wide, "threads": 2, "max_updates": 4, "clients": 2}
    one, two = (finish(experiment(tmp_path / str(n), fed_avg(), workers=n, **shape)) for n in (1, 2))
    assert one.digest == two.digest
    torch.set_num_threads(1)
