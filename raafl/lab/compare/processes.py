"""Run commands of raafl in separate processes, several at a time, forked from a process that has already imported torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import multiprocessing as mp
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from raafl.errors import BadInput, installing
from raafl.runfolder.checkpoints import newest
from raafl.runfolder.schema import Summary
from raafl.runtime.lifecycle.signals import Interrupt
from raafl.runtime.supervisor import local_ranks
from raafl.sanitize import sanitize_text

Item = TypeVar("Item")

_log = logging.getLogger(__name__)

_LOOK_S = 0.5

_FROM_OUTSIDE = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
PRELOADED = (
    "raafl.runtime.run",
    "raafl.data.sources",
    "raafl.config.parse",
    "raafl.algorithms",
    "model_zoo.classifier",
)


def in_processes(
    queue: list[Item], jobs: int, start_one: Callable[[Item], BaseProcess], wait_on: Callable[[int], None]
) -> Generator[tuple[Item, BaseProcess, int]]:
    """Run a process for each item, ``jobs`` at a time; yield the item, its process and the number of items left as each ends.

    Where a function raises an error, or the caller closes the generator early, the other processes are interrupted, too.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM was received; the processes were interrupted and have ended.
    """
    active: dict[BaseProcess, Item] = {}
    with Interrupt() as interrupt, _ended_on_error(active):
        while queue or active:
            while queue and len(active) < jobs:
                item = queue.pop(0)
                active[start_one(item)] = item
            wait_on(len(queue) + len(active))
            sentinels = {process.sentinel: process for process in active}
            ended = [sentinels[sentinel] for sentinel in wait(list(sentinels), timeout=_LOOK_S)]  # type: ignore[index]
            for process in ended:
                process.join()
            if interrupt.asked:
                break
            yield from ((active.pop(process), process, len(queue) + len(active)) for process in ended)
        if interrupt.asked:
            _log.info("interrupted: waiting for the runs under way to save their state", extra={"prefix": ""})
            raise KeyboardInterrupt


@contextlib.contextmanager
def _ended_on_error(processes: Collection[BaseProcess]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _end(processes)
        raise


def _end(processes: Collection[BaseProcess]) -> None:
    """Interrupt runs and wait until they have ended, each after its current event and with a checkpoint."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # the process has ended meanwhile
            os.kill(cast(int, process.pid), signal.SIGINT)
    for process in processes:
        process.join()


def start(argv: Sequence[str], log: Path, num_ranks: int = 1, cluster: Cluster | None = None) -> BaseProcess:
    """Start a command of raafl in a new process, which ends when this process ends; with a cluster, it waits for the job there."""
    process = _new_process(argv, log, num_ranks) if cluster is None else _new_waiter(argv, log, cluster)
    # Block signals while the forkserver and its resource tracker start: both inherit the mask, so that a Ctrl-C for the
    # whole process group does not end them. Python unblocks signals once it has started the tracker.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_OUTSIDE)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_OUTSIDE)
    try:
        with _without_main():
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the user's script, which multiprocessing would run again in the new process: a command of raafl needs none."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _new_process(argv: Sequence[str], log: Path, num_ranks: int) -> BaseProcess:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context.Process(target=_command, args=(list(argv), log, num_ranks))


def check_free(log: Path) -> None:
    """Raise `BadInput` if some process is still writing to the file ``log``, even one that another program started."""
    with log.open("ab") as file:
        _lock(file.fileno(), log)


def _lock(file: int, log: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(
            f"output is '{log.parent}', where another process is running {log.stem}: wait until it ends"
        ) from None
    except OSError:  # the file system cannot lock, of which the run itself warns
        pass


def _new_waiter(argv: Sequence[str], log: Path, cluster: Cluster) -> BaseProcess:
    return mp.get_context("forkserver").Process(target=_wait_for_job, args=(list(argv), log, cluster))


def _wait_for_job(argv: list[str], log: Path, cluster: Cluster) -> None:
    set_up_process(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(cluster.run(argv, log))


def _command(argv: list[str], log: Path, num_ranks: int) -> None:
    set_up_process(log)
    sys.argv = ["raafl", *argv]
    with other_ranks(argv, num_ranks, log):
        runpy.run_module("raafl", run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def other_ranks(argv: Sequence[str], num_ranks: int, log: Path) -> Iterator[None]:
    """Start the ranks 1, 2, ... of a command, and make this process its rank 0, as under torchrun; they end after it.

    A rank that dies before rank 0 ends is named in the file of their output; rank 0 does without it.
    """
    if num_ranks == 1:
        yield
        return
    command = [sys.executable, "-m", "raafl", *argv]
    with (
        ranks_log(log).open("ab") as others,
        local_ranks(command, num_ranks, stdout=others, stderr=others) as ranks,
        _dead_named(ranks, ranks_log(log)),
    ):
        yield


@contextlib.contextmanager
def _dead_named(ranks: Sequence[subprocess.Popen[bytes]], log: Path) -> Iterator[None]:
    try:
        yield
    finally:
        dead = {rank: process.returncode for rank, process in enumerate(ranks, 1) if process.poll()}
        with log.open("a") as others:
            others.writelines(f"rank {rank} had ended before the run, with exit code {dead[rank]}\n" for rank in dead)


def ranks_log(log: Path) -> Path:
    """Return the file for the output of a run's ranks 1, 2, ..., beside that of rank 0."""
    return log.with_suffix(".ranks.log")


def set_up_process(log: Path) -> None:
    """Prepare a new process, from inside: send its output to the file ``log``, lock the file, and end with the parent."""
    os.setsid()  # a new session: a Ctrl-C at the terminal reaches only the parent, which passes it on once
    with log.open("ab", buffering=0) as file:
        _lock(file.fileno(), log)
        # a lock of the open file lasts as long as any of its descriptors, so also while the output goes there
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # only now, since a Ctrl-C that has been waiting raises here, and its traceback belongs into the file
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FROM_OUTSIDE)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Interrupt this process when its parent ends; otherwise a later run could meet it in the same folder."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGINT)


def chosen(result: Mapping[str, Any], share: float) -> list[dict[str, Any]]:
    """Choose a random share of a comparison's runs, to be replayed as a check; the number of runs is rounded up.

    Raises:
        BadInput: all runs failed, so that nothing would be checked.
    """
    runs = [run | {"row": row["row"]} for row in result["rows"] for run in row["runs"] if "error" not in run]
    if not runs:
        raise BadInput(f"verify is {share:g}, but no run of '{result['name']}' has ended: run the comparison first")
    return random.Random(0).sample(runs, math.ceil(share * len(runs)))


def verify(runs: Sequence[Mapping[str, Any]], root: Path, jobs: int = 1) -> Iterator[dict[str, Any]]:
    """Check runs by replaying them in separate processes, that is, computing their models again from their event logs.

    Yields for each run its `row`, its `seed`, whether the replayed model is `equal` to the recorded one, and if not, `why`.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM was received; replays in progress were ended.
    """

    def replay_one(run: Mapping[str, Any]) -> BaseProcess:
        return replay(root / run["folder"])

    for run, _, _ in in_processes(list(runs), jobs, replay_one, lambda _: None):
        why = replay_difference(run, log_of(root / run["folder"]))
        verdict = {"row": run["row"], "seed": run["seed"], "equal": why is None}
        yield verdict if why is None else verdict | {"why": why}


def replay(folder: Path) -> BaseProcess:
    """Start the replay of a run in a new process, which writes its output to the file ``log_of(folder)``."""
    log = log_of(folder)
    log.unlink(missing_ok=True)
    return start(["replay", str(folder), "--json"], log)


def log_of(folder: Path) -> Path:
    """Return the file for the output of a run's replay."""
    return folder.with_suffix(".replay.log")


def replay_difference(run: Mapping[str, Any] | Summary | None, log: Path) -> str | None:
    """Explain why the replay of a run does not give the recorded model; None if it does."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    try:
        replayed = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    except (StopIteration, ValueError):
        return lines[-1] if lines else "the replay printed nothing"
    said = str(run["model_digest"]) if run is not None else ""
    if replayed["model_digest"] != said:
        return f"the result says {said[:16]}, the replay {str(replayed['model_digest'])[:16]}"
    if not replayed["equal"]:
        return f"the run folder's summary says {str(replayed['recorded_digest'])[:16]}"
    return None


# Run the runs of a comparison on a cluster: as jobs of Slurm (by submitit), or as tasks of Ray.

Name = Literal["ray", "slurm", "local"]
_CLUSTER_LOOK_S = 2.0
_FAILED = 1


@dataclass(frozen=True)
class Cluster:
    """Where the runs of a comparison run.

    Attributes:
        name: ray; slurm; or local, which is submitit's stand-in for Slurm on this machine.
        options: for Slurm, parameters of submitit such as ``timeout_min`` or ``slurm_partition``; for Ray ``address``,
            ``num_cpus`` and ``num_gpus`` of each run.
    """

    name: Name
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: Name, given: Sequence[str]) -> Cluster:
        """Parse options of the form KEY=VALUE, and check that the cluster's package is installed.

        Raises:
            BadInput: an option has another form, or a package is missing.
        """
        options: dict[str, Any] = {}
        for text in given:
            key, equals, value = text.partition("=")
            if not (key and equals):
                raise BadInput(f"engine_options has {text!r}: give KEY=VALUE, such as timeout_min=120")
            options[key] = _number(value)
        _check_installed(name)
        return cls(name, options)

    def run(self, argv: Sequence[str], log: Path) -> int:
        """Run a command of raafl on the cluster, with its output in the file ``log``; return its exit code.

        SIGINT ends the run there as it would here, with a checkpoint.
        """
        job = _Job(tuple(argv), str(log))
        try:
            return self._on_ray(job) if self.name == "ray" else self._by_submitit(job)
        except ConnectionError as error:
            _log.error(
                f"engine is '{self.name}', and no cluster answers ({sanitize_text(error, 200)}): start one (ray start --head), "
                "or give --engine_options address=HOST:PORT"
            )
            return _FAILED
        except (ValueError, TypeError, RuntimeError) as error:
            _log.error(f"engine is '{self.name}', which has not run the job: {sanitize_text(error, 400)}")
            return _FAILED

    def _by_submitit(self, job: _Job) -> int:
        import submitit

        executor = submitit.AutoExecutor(folder=Path(job.log).parent / "jobs", cluster=self.name)
        executor.update_parameters(**{"name": "raafl", **self.options})
        submitted = executor.submit(job)
        try:
            while not submitted.done():
                time.sleep(_CLUSTER_LOOK_S / 4 if self.name == "local" else _CLUSTER_LOOK_S)
        except KeyboardInterrupt:
            submitted.cancel()
            while not submitted.done():
                time.sleep(_CLUSTER_LOOK_S / 4)
            return 130
        error = submitted.exception()
        if error is not None:
            _log.error(f"job {submitted.job_id} has failed: {sanitize_text(error, 400)}")
            return _FAILED
        return int(submitted.result())

    def _on_ray(self, job: _Job) -> int:
        import ray

        shares = dict(self.options)
        ray.init(address=shares.pop("address", "auto"), logging_level=logging.ERROR, log_to_driver=False)
        # Ray starts the task again, on another worker, however often one dies; the run is then resumed
        submitted = ray.remote(_Job.__call__).options(max_retries=-1, name="raafl run", **shares).remote(job)
        try:
            while not ray.wait([submitted], timeout=_CLUSTER_LOOK_S)[0]:
                pass
        except KeyboardInterrupt:
            ray.cancel(submitted)
            ray.wait([submitted], timeout=None)
            return 130
        return int(ray.get(submitted))


@dataclass(frozen=True)
class _Job:
    """Command that runs on another machine; if the cluster starts it again, the run resumes from its last checkpoint."""

    argv: tuple[str, ...]
    log: str

    def __call__(self) -> int:
        """Run the command on the machine that the cluster has chosen; return its exit code."""
        argv = self.argv
        if "--output" in argv and newest(folder := Path(argv[argv.index("--output") + 1])) is not None:
            argv = (argv[0], "--resume", str(folder), "--progress", "quiet")
        with Path(self.log).open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", "raafl", *argv], stdout=log, stderr=log)
            try:
                return process.wait()
            except BaseException:  # the cluster cancels the job: let the run write a checkpoint first
                process.send_signal(signal.SIGINT)
                process.wait()
                raise

    def checkpoint(self) -> Any:
        """Let submitit queue the job again after Slurm has taken its machine away."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _check_installed(name: Name) -> None:
    package, extra = ("ray", "ray") if name == "ray" else ("submitit", "slurm")
    if find_spec(package) is None:
        raise BadInput(f"engine is '{name}', which needs {package}: {installing(extra)}")


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
