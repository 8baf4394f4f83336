"""Train the tasks of a simulation on a Ray cluster, whose workers may come, leave and die during the run.

Ray owns processes, placement and retries: a task is a pure function of its assignment, its snapshot and the client's data, so
one that a lost worker was training is trained again elsewhere, to the same bits. Each worker builds the model and the data once.
A snapshot goes into Ray's object store once, however many tasks start from it.
"""

from __future__ import annotations

import heapq
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from raafl.config.experiment import Experiment
from raafl.core.restoring import assignment_from_json
from raafl.core.saving import assignment_to_json
from raafl.core.types import Assignment, Update
from raafl.errors import BadInput, GpuLost, RunFailed, TaskFailed, installing
from raafl.local.context import ALONE, TaskContext
from raafl.local.train import LocalTrainer
from raafl.runtime.executors.base import Executor
from raafl.runtime.executors.rank_worker import answer_of, failure_of, update_of
from raafl.runtime.identity import Identity, agree
from raafl.runtime.protocol import Answer, Welcome
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors

try:
    import ray
except ImportError as error:
    raise BadInput(f"engine.name is 'ray', but Ray is not installed: {installing('ray')}") from error

_LOOK_S = 2.0  # seconds between two looks at the cluster's size, which may change
_PER_SLOT = 2  # number of tasks given to Ray for each worker, so that none waits for its next task
_REACHED_S = 10.0  # seconds for a connection to the address of a cluster

Build = Callable[[Experiment], tuple[LocalTrainer, Executor]]


@dataclass(frozen=True)
class _Setup:
    """Objects from which a worker builds its trainer."""

    build: Build
    experiment: Experiment
    identity: Mapping[str, Any]
    welcome: Mapping[str, Any]


@dataclass(slots=True)
class _Task:
    """A task, with Ray's reference to its result as `answer`; None = the task was not given to Ray yet."""

    assignment: Assignment
    snapshot: FlatTensors
    needed_at: float
    answer: Any = None


class RayExecutor(Executor):
    """Executor that gives tasks to Ray in the order in which they are needed, a few more than the cluster trains at a time."""

    def __init__(self, experiment: Experiment, trainer: LocalTrainer, build: Build) -> None:
        """Connect to the Ray cluster of ``experiment.engine``, or start one on this machine.

        `build`: function by which a worker builds its trainer, and the executor that trains there.

        Raises:
            BadInput: the cluster cannot be reached, or has no room for a worker.
        """
        self._options, self._most = experiment.engine, experiment.workers
        self._payload, self._device = trainer.payload, trainer.fabric.device
        self._tasks: dict[int, _Task] = {}
        # heap of (time at which the result is needed, task's id); may still hold tasks that were begun or dropped
        self._waiting: list[tuple[float, int]] = []
        self._out: dict[Any, int] = {}  # by Ray's reference to the result: id of a task that Ray trains
        # by id of a snapshot: Ray's copy of it, and the number of tasks that use this
        self._stored: dict[int, tuple[Any, int]] = {}
        self._slots, self._looked_s = 0, -_LOOK_S
        self._owns = not ray.is_initialized()
        if self._owns:
            _connect(experiment)
        submodels = trainer.submodels
        welcome = Welcome(tuple(sorted(submodels.refuted))).to_meta()
        try:
            setup = _Setup(build, experiment, Identity.of(submodels).to_meta(), welcome)
            self._setup = [ray.put(setup)]  # in a list, so that a task gets the reference and not the value
            if not self._num_slots():
                raise BadInput(
                    f"engine asks for {self._options.cpus_per_worker:g} CPUs and {self._options.gpus_per_worker:g} GPUs for "
                    f"each worker, but the cluster has {_resources()}: ask for less"
                )
        except (TypeError, BadInput) as wrong:
            self.close()
            if isinstance(wrong, BadInput):
                raise
            raise BadInput(
                f"engine.name is 'ray', to which the model or the data cannot be sent ({sanitize_text(wrong, 200)}): let the "
                "data module open files and connections in setup(), or leave engine out"
            ) from wrong
        self._train = ray.remote(_train).options(
            num_cpus=self._options.cpus_per_worker,
            num_gpus=self._options.gpus_per_worker,
            max_retries=-1,  # a task whose worker or node dies is trained again, as often as needed
            name="raafl task",
        )

    @property
    def num_processes(self) -> int:
        """Number of processes that train at a time; this one does not."""
        return max(self._num_slots(), 1)

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Accept a task for training; see `Executor.submit`."""
        self._tasks[assignment.id] = _Task(assignment, snapshot, needed_at)
        heapq.heappush(self._waiting, (needed_at, assignment.id))
        self._fill()

    def result(self, assignment_id: int, context: TaskContext = ALONE) -> Update:
        """Return the update of a task, and meanwhile give Ray further tasks as others end."""
        task = self._tasks[assignment_id]
        if task.answer is None:
            self._give(task)
        while task.answer in self._out:
            self._note_ended(timeout_s=None)
            self._fill()
        try:
            meta, arrays = ray.get(task.answer)
        except ray.exceptions.RayTaskError as failed:  # an error in raafl, or a worker with another version or model
            raise RunFailed(f"a worker of Ray has failed: {sanitize_text(failed.cause, 400)}") from failed
        except ray.exceptions.RayError as lost:
            raise RunFailed(f"Ray cannot train task {assignment_id}: {sanitize_text(lost, 400)}") from lost
        self._forget(assignment_id)
        if self.needed is not None:  # the simulation sets this anew at the next event
            self.needed -= 1
        self._fill()
        return self._found(task.assignment, meta, arrays)

    def cancel(self, assignment_id: int) -> None:
        """Remove a task; one that a worker has begun is ended there."""
        task = self._tasks.get(assignment_id)
        if task is None:
            return
        if self._out.pop(task.answer, None) is not None:  # it may have ended, or not been given
            ray.cancel(task.answer)
        self._forget(assignment_id)

    def close(self) -> None:
        """End this run's tasks, and the cluster if this run has started it."""
        for answer in self._out:
            ray.cancel(answer)
        self._out.clear()
        self._tasks.clear()
        self._stored.clear()
        if self._owns:
            ray.shutdown()
        self._owns = False

    def _fill(self) -> None:
        """Give Ray the most urgent of the needed tasks, a few more than it has workers."""
        self._note_ended(timeout_s=0.0)
        room = (self._most if self._most > 1 else _PER_SLOT * self._num_slots()) - len(self._out)
        if self.needed is not None and self.needed < len(self._tasks):
            room = min(room, self.needed - sum(task.answer is not None for task in self._tasks.values()))
        while room > 0 and self._waiting:
            task = self._tasks.get(heapq.heappop(self._waiting)[1])
            if task is not None and task.answer is None:
                self._give(task)
                room -= 1

    def _give(self, task: _Task) -> None:
        key = id(task.snapshot)
        stored, num_tasks = self._stored.get(key, (None, 0))
        if stored is None:
            stored = ray.put(_to_arrays(task.snapshot))
        self._stored[key] = stored, num_tasks + 1
        task.answer = self._train.remote(self._setup, assignment_to_json(task.assignment), stored)
        self._out[task.answer] = task.assignment.id

    def _note_ended(self, timeout_s: float | None) -> None:
        """Remove ended tasks from those that Ray trains, after waiting up to ``timeout_s``; None = until one ends."""
        if self._out:
            num = 1 if timeout_s is None else len(self._out)
            ended, _ = ray.wait(list(self._out), num_returns=num, timeout=timeout_s, fetch_local=False)
            for answer in ended:
                del self._out[answer]

    def _forget(self, assignment_id: int) -> None:
        """Drop a task, and Ray's copy of its snapshot if no other task uses that."""
        task = self._tasks.pop(assignment_id)
        if task.answer is None:
            return
        key = id(task.snapshot)
        stored, num_tasks = self._stored.pop(key)
        if num_tasks > 1:
            self._stored[key] = stored, num_tasks - 1

    def _num_slots(self) -> int:
        """Return for how many workers the cluster has room, looked up every few seconds."""
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s, there = time.monotonic(), ray.cluster_resources()  # type: ignore[no-untyped-call]
            asked = {"CPU": self._options.cpus_per_worker, "GPU": self._options.gpus_per_worker}
            self._slots = min((int(there.get(name, 0.0) / share) for name, share in asked.items() if share))
        return self._slots

    def _found(self, assignment: Assignment, meta: dict[str, Any], arrays: list[np.ndarray] | None) -> Update:
        if arrays is None:
            found = failure_of(assignment, meta)
            if isinstance(found, TaskFailed):
                raise found
            return found
        tensors = FlatTensors.empty(self._payload.layout(assignment.spec, "trained"), self._device)
        _fill_from(tensors, arrays)
        return update_of(assignment, Answer.from_rank(meta), tensors)


def _connect(experiment: Experiment) -> None:
    """Connect to the Ray cluster of the config, or start one on this machine."""
    options, own = experiment.engine, dict[str, Any]()
    if options.address is None:
        workers = experiment.workers if experiment.workers > 1 else (os.cpu_count() or 1)
        own = {"num_cpus": max(int(workers * options.cpus_per_worker), 1), "include_dashboard": False}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send usage reports only if the user wants it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    host, _, port = (options.address or "").rpartition("://")[2].rpartition(":")
    try:
        if port.isdecimal():  # not auto, for instance; Ray itself looks for an absent cluster for many minutes
            socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
        ray.init(address=options.address, logging_level=logging.ERROR, log_to_driver=False, **own)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"engine.address is {options.address!r}, where no Ray cluster can be used ({sanitize_text(error, 200)}): give that "
            "of a running one, or null to start one on this machine"
        ) from None


def _resources() -> str:
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs in all"


# ---- in a worker ----


def _train(setup: list[Any], task: dict[str, Any], values: list[np.ndarray]) -> tuple[dict[str, Any], list[Any] | None]:
    """Train a task in a worker; return fields and tensors of the answer, with None for the tensors if training failed."""
    trainer, inner = _built(setup[0])
    assignment = assignment_from_json(task)
    snapshot = FlatTensors.empty(trainer.payload.layout(assignment.spec, "sent"), trainer.fabric.device)
    _fill_from(snapshot, values)
    inner.submit(assignment, snapshot, 0.0)
    try:
        message = answer_of(inner, assignment, ALONE)
    except GpuLost:
        os._exit(1)  # this process can no longer use its GPU, so Ray trains the task in another
    return message.meta, None if message.tensors is None else _to_arrays(message.tensors)


@lru_cache(maxsize=1)
def _built(setup_ref: Any) -> tuple[LocalTrainer, Executor]:
    """Build the run's trainer in this worker; raises `BadInput` if its model or raafl's version is not that of the run."""
    setup: _Setup = ray.get(setup_ref)
    trainer, inner = setup.build(setup.experiment)
    theirs = Identity.from_meta(setup.identity)
    if (different := agree(Identity.of(trainer.submodels), theirs, same_package=True)) is not None:
        raise BadInput(
            f"another {different.field} on a worker of Ray: {different.ours}, where the run has {different.theirs}: install the "
            "same versions on all nodes of the cluster"
        )
    Welcome.from_meta(setup.welcome).apply_to(trainer.submodels)
    return trainer, inner


def _to_arrays(tensors: FlatTensors) -> list[np.ndarray]:
    """Return each buffer's bytes as an array, which workers on one machine read without a copy."""
    return [buffer.cpu().view(torch.uint8).numpy() for buffer in tensors.buffers.values()]


def _fill_from(tensors: FlatTensors, arrays: list[np.ndarray]) -> None:
    for buffer, array in zip(tensors.buffers.values(), arrays, strict=True):
        # copy, since Ray's arrays are read-only, and tensors cannot be
        buffer.view(torch.uint8).copy_(torch.from_numpy(np.array(array)))
