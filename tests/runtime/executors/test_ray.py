"""Ray as the engine of a simulation: the digests of one process, whichever workers come, die and train."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from model_zoo import MLP
from raafl.config.options import Engine
from raafl.errors import BadInput, RunFailed, TaskFailed
from tests.conformance.executors import clients, on_cluster, tasks_of
from tests.helpers.emulated_ray import emulated_ray
from tests.helpers.forked_command import command
from tests.helpers.small_runs import experiment, finish, small_mlp
from tests.local.bench import Bench, Net


class Killed(MLP):
    """Kills the first worker that trains it, as the kernel's memory killer would; not the process that has the run."""

    def __init__(self, mark: str, home: int):
        super().__init__(64, (24,), 10, lr=0.05, momentum=0.5)
        self.mark, self.home = Path(mark), home

    def training_step(self, batch, batch_idx):
        if os.getpid() != self.home:
            with suppress(FileExistsError):
                self.mark.touch(exist_ok=False)  # in one step: two workers may begin at the same moment
                os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class Broken(MLP):
    def training_step(self, batch, batch_idx):
        raise ZeroDivisionError("in the user's code")


def broken():
    return Broken(64, (24,), 10)


def on_ray(argv):
    """Runs on one cluster, an entry for `tests.helpers.forked_command.command`: workers killed, code that fails, no room."""
    import ray

    from raafl.runtime.executors.ray_engine import _connect

    folder, home = Path(argv[0]), os.getpid()
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    _connect(experiment(folder / "started", "fed_raa", engine=Engine("ray"), workers=2))
    seen = ray.remote(lambda: os.environ.get("CUDA_VISIBLE_DEVICES")).options(num_gpus=0)
    print(f"={ray.get(seen.remote())}")

    def killed():
        return Killed(str(folder / "killed"), home)

    for name, more in (("alone", {}), ("ray", {"engine": Engine("ray"), "workers": 2})):
        run = finish(experiment(folder / name, "fed_raa", model=killed, **more))
        print(f"={run.digest}", run.summary["final"])
    print(f"={(folder / 'killed').exists()}")
    for model, engine in ((broken, Engine("ray")), (small_mlp, Engine("ray", gpus_per_worker=1.0))):
        try:
            finish(experiment(folder / "run", "fed_avg", model=model, engine=engine))
        except (BadInput, TaskFailed) as error:
            print(f"={error}".replace("\n", " "))
    ray.shutdown()


@pytest.mark.timeout(400)
@pytest.mark.slow("Ray starts a cluster, and each of its workers imports torch")
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_killed_workers_are_replaced_to_the_digest_of_one_process_and_errors_are_named(tmp_path):
    with command(tmp_path / "c", str(tmp_path), entry=on_ray, HOME=str(tmp_path)) as started:
        assert started.end(deadline_s=360) == 0, started.err  # on a busy machine Ray alone takes a minute to start
        # Ray writes on standard output, too
        devices, alone, ray, killed, *errors = [line[1:] for line in started.out.splitlines() if line.startswith("=")]
    assert (
        devices == "3"
    )  # without RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO Ray hides all GPUs from a task that asks for none
    assert ray == alone and killed == "True"
    assert "ZeroDivisionError: in the user's code" in errors[0]
    assert "asks for 1 CPUs and 1 GPUs for each worker, but the cluster has 2 CPUs and 0 GPUs" in errors[-1]


@pytest.fixture
def bench():
    return Bench.of(Net, max_built=2)


def given(executor, cluster):
    """Return the ids of the tasks that the cluster was given, in their order, while the executor has them."""
    ids = {task.answer: number for number, task in executor._tasks.items()}
    return [ids.get(answer) for answer in cluster.tasks]


def test_a_cluster_is_given_two_tasks_for_each_worker_and_then_the_most_urgent_as_others_end(bench):
    todo = tasks_of(bench, 9)
    with on_cluster(bench, clients(), 2) as (executor, cluster):
        for (task, values), needed_at in zip(todo, (1, 2, 3, 4, 8, 7, 6, 5), strict=False):
            executor.submit(task, values, float(needed_at))
        assert given(executor, cluster) == [1, 2, 3, 4]
        executor.result(1)  # waits for no other task
        assert given(executor, cluster) == [None, 2, 3, 4, 8]
        assert [answer.call is None for answer in cluster.tasks] == [True, False, False, False, False]
        cluster.tasks[2].end()
        cluster.tasks[3].end()
        task, values = todo[8]
        executor.submit(task, values, 9.0)  # both places are filled at once
        assert given(executor, cluster) == [None, 2, 3, 4, 8, 7, 6]
        executor.result(9)  # out of turn: nobody else could go on
        assert given(executor, cluster)[7:] == [None, 5]
        assert all(executor.result(number).assignment == number for number in range(2, 9))


def test_the_workers_have_work_while_one_result_is_awaited_or_others_are_read(bench):
    with on_cluster(bench, clients(), 2) as (executor, cluster):
        for task, values in tasks_of(bench, 12):
            executor.submit(task, values, float(task.id))
        executor.result(4)
        assert cluster.num_running == [4, 4, 4, 4]  # as long as there are tasks, four are given
        cluster.tasks[5].end()
        executor.result(2)  # has ended before
        assert given(executor, cluster)[-1] == 9


@pytest.mark.parametrize(("workers", "num_cpus", "expected"), [(3, 1, 3), (2, 8, 2), (1, 1, 2), (1, 3, 6), (1, 2.9, 4)])
def test_workers_bounds_what_is_given_at_a_time(bench, workers, num_cpus, expected):
    with on_cluster(bench, clients(), num_cpus, workers=workers) as (executor, cluster):
        for task, values in tasks_of(bench, 8):
            executor.submit(task, values, 1.0)
        assert len(cluster.tasks) == expected and executor.num_processes == int(num_cpus)
        assert cluster.options == {"num_cpus": 1.0, "num_gpus": 0.0, "max_retries": -1, "name": "raafl task"}


def test_no_more_results_are_begun_than_the_run_still_needs(bench):
    with on_cluster(bench, clients(), 8) as (executor, cluster):
        executor.needed = 2
        for task, values in tasks_of(bench, 4):
            executor.submit(task, values, float(task.id))
        assert given(executor, cluster) == [1, 2]
        executor.result(1)
        assert executor.needed == 1 and given(executor, cluster) == [None, 2]
        executor.cancel(2)  # another must be merged in its place
        executor.needed = 2
        executor.result(3)
        assert given(executor, cluster) == [None, None, None, 4]


def test_a_snapshot_is_stored_once_and_freed_after_the_last_task_that_starts_from_it(bench):
    todo = tasks_of(bench, 4)
    same = todo[2][1]  # tasks 3 and 1 are of no submodel, 4 and 1 of one
    with on_cluster(bench, clients(), 8) as (executor, cluster):
        before = cluster.num_stored
        for number in (3, 6, 9):
            task = replace(todo[2][0], id=number)
            executor.submit(task, same, float(number))
        executor.submit(*todo[0], 10.0)
        assert cluster.num_stored - before == 2
        executor.result(3)
        executor.result(1)
        for answer in cluster.tasks:
            answer.call = answer.call and answer.end()
        gc.collect()
        assert len(cluster.stored) - before == 1
        executor.cancel(6)
        executor.submit(*todo[3], 11.0)
        assert len(cluster.stored) - before == 2
        executor.cancel(9)
        executor.cancel(4)
        gc.collect()
        assert len(cluster.stored) == before


def test_a_task_that_is_dropped_is_ended_in_the_cluster_and_one_that_waits_never_begins(bench):
    with on_cluster(bench, clients(), 1) as (executor, cluster):
        for task, values in tasks_of(bench, 4):
            executor.submit(task, values, float(task.id))
        first, second = cluster.tasks
        executor.cancel(3)
        executor.cancel(99)  # unknown
        executor.cancel(1)
        assert cluster.cancelled == [first]
        executor.result(2)
        executor.cancel(2)  # no longer known
        assert given(executor, cluster) == [None, None, 4] and cluster.cancelled == [first]
        executor.close()
        assert cluster.cancelled == [first, cluster.tasks[2]] and cluster.started, "somebody else has started it"
        assert second.call is None and not executor._tasks
        cluster.started = False
        executor.close()  # does nothing: in Ray, to cancel a task again would start a cluster
        gc.collect()
        assert len(cluster.stored) == 1  # the model and the data


def test_the_size_of_the_cluster_is_looked_up_every_few_seconds(bench, monkeypatch):
    with on_cluster(bench, clients(), 2) as (executor, cluster):
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now)
        cluster.resources["CPU"] = 5.0
        assert executor.num_processes == 2
        now += 2.0
        assert executor.num_processes == 5
        cluster.resources.clear()  # all nodes are gone, and new ones may come
        now += 2.0
        assert executor.num_processes == 1


def test_gpus_bound_the_workers_too_and_a_cluster_without_room_is_refused(bench):
    shared = Engine("ray", gpus_per_worker=0.25)
    with on_cluster(bench, clients(), 8, shared, num_gpus=1) as (executor, _):
        assert executor.num_processes == 4
    words = r"asks for 1 CPUs and 0\.25 GPUs for each worker, but the cluster has 8 CPUs and 0 GPUs"
    with pytest.raises(BadInput, match=words), on_cluster(bench, clients(), 8, shared):
        pytest.fail("there is no GPU")


def test_a_worker_that_cannot_train_ends_the_run_by_name(bench):
    with on_cluster(bench, clients(), 1) as (executor, cluster):
        for task, values in tasks_of(bench, 2):
            executor.submit(task, values, 1.0)
        for answer, error in zip(
            cluster.tasks, (cluster.TaskError(OSError("full")), cluster.Error("lost")), strict=True
        ):
            answer.call, answer.value = None, error
        with pytest.raises(RunFailed, match="a worker of Ray has failed: full"):
            executor.result(1)
        with pytest.raises(RunFailed, match="Ray cannot train task 2: lost"):
            executor.result(2)


@pytest.mark.parametrize(
    ("workers", "cpus_per_worker", "expected"), [(1, 1.0, 7), (3, 1.0, 3), (3, 0.5, 1), (2, 2.0, 4)]
)
def test_a_cluster_that_the_run_starts_has_room_for_its_workers_and_ends_with_it(
    bench, monkeypatch, workers, cpus_per_worker, expected
):
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "as before the test")
        monkeypatch.delenv(name)
    made = experiment("unused", engine=Engine("ray", cpus_per_worker=cpus_per_worker), workers=workers)
    with emulated_ray(expected, started=False) as (module, cluster):
        started = module.RayExecutor(made, bench.trainer, None)
        assert cluster.begun["num_cpus"] == expected and cluster.begun["address"] is None
        assert not cluster.begun["include_dashboard"] and not cluster.begun["log_to_driver"]
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0"
        started.close()
        assert not cluster.started
        cluster.started = True  # by somebody else
        started.close()
        assert cluster.started


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (None, None, "engine asks for 2 CPUs and 0 GPUs for each worker, but the cluster has 1 CPUs and 0 GPUs in all"),
        (
            "put",
            TypeError("no file"),
            "engine.name is 'ray', to which the model or the data cannot be sent (no file): let",
        ),
        ("init", ConnectionError("nobody"), "engine.address is None, where no Ray cluster can be used (nobody): give"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused_and_left_alone(bench, monkeypatch, function, error, words):
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")

    def fail(*_, **__):
        raise error

    made = experiment("unused", engine=Engine("ray", cpus_per_worker=1.0 if function else 2.0), workers=2)
    with emulated_ray(1, started=False) as (module, cluster):
        if function is not None:
            monkeypatch.setattr(cluster.module, function, fail)
        with pytest.raises(BadInput, match=f"^{re.escape(words)}"):
            module.RayExecutor(made, bench.trainer, None)
        assert not cluster.started, "what the run has started ends with it"


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://localhost:{}", "127.0.0.1:99999{}"])
def test_an_address_where_nobody_listens_is_refused_at_once(bench, monkeypatch, address):
    """Ray itself tells it after many minutes."""
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
    with socket.socket() as bound, emulated_ray(1, started=False) as (module, cluster):
        bound.bind(("127.0.0.1", 0))  # without listening, so that nobody else gets the port
        engine = Engine("ray", address=address.format(bound.getsockname()[1]))
        with pytest.raises(BadInput, match=f"^engine.address is '{engine.address}', where no Ray cluster can be used"):
            module.RayExecutor(experiment("unused", engine=engine), bench.trainer, None)
        assert not cluster.started


def test_ray_is_named_with_its_extra_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "raafl.runtime.executors.ray_engine", raising=False)
    with pytest.raises(BadInput, match=r"engine.name is 'ray', but Ray is not installed: pip install"):
        finish(experiment(tmp_path / "run", "fed_avg", engine=Engine("ray")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "dask"}, r"engine.name is 'dask': give processes or ray"),
        ({"address": "auto"}, r"only Ray takes these options: give engine.name ray"),
        ({"name": "ray", "gpus_per_worker": -1.0}, r"engine.gpus_per_worker is -1.0: give 0 or more"),
        ({"name": "ray", "cpus_per_worker": 0.0}, r"engine.cpus_per_worker is 0.0"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(BadInput, match=message):
        Engine(**options)
