"""Tasks trained by several processes of this machine, forked from this one, which share memory."""

from __future__ import annotations

import heapq
import json
import mmap
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import numpy as np
import torch

from raafl.core.types import OUT_OF_MEMORY, Assignment, Update, assignment_from_json, assignment_to_json
from raafl.data.federated import ClientData
from raafl.errors import BadInput, RunFailed, TaskFailed
from raafl.local.failure import attempt, out_of_memory
from raafl.local.heap import give_back, keep_freed
from raafl.local.train import LocalTrainer
from raafl.runtime.executors.base import Executor, Inline
from raafl.submodel import FlatTensors, Layout

_ALIGN = 64
AHEAD = 2  # tasks queued or begun for each process, so that none waits for the next
SLOT_BYTES = 1 << 29  # shared memory to stay within, if the least number of slots allows it


@dataclass(slots=True)
class _Task:
    assignment: Assignment
    snapshot: FlatTensors
    slot: int = -1
    update: Update | TaskFailed | None = None
    cancelled: bool = False


def _view(memory: torch.Tensor, layout: Layout) -> FlatTensors:
    """Return flat tensors of ``layout`` over the bytes of ``memory``."""
    buffers, start = {}, 0
    for dtype in layout.dtypes:
        num_bytes = layout.numel[dtype] * dtype.itemsize
        buffers[dtype] = memory[start : start + num_bytes].view(dtype)
        start += -(-num_bytes // _ALIGN) * _ALIGN
    return FlatTensors(layout, buffers)


def _slot_bytes(layout: Layout) -> int:
    return sum(-(-layout.numel[d] * d.itemsize // _ALIGN) * _ALIGN for d in layout.dtypes) or _ALIGN


class _Slots:
    """Pieces of shared memory, each as large as a task of the whole model, without its frozen base."""

    def __init__(self, num: int, layout: Layout) -> None:
        size = _slot_bytes(layout)
        memory = mmap.mmap(-1, size * num)
        whole = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        self._pieces = [whole[i * size : (i + 1) * size] for i in range(num)]
        self._views: dict[tuple[int, Layout], FlatTensors] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def view(self, slot: int, layout: Layout) -> FlatTensors:
        """Return the slot's memory as tensors of ``layout``; the same object each time, for its cached views."""
        found = self._views.get((slot, layout))
        if found is None:
            found = self._views[(slot, layout)] = _view(self._pieces[slot], layout)
        return found


class _Bench:
    """Where one process trains tasks in shared memory."""

    def __init__(self, trainer: LocalTrainer, data: Callable[[int], ClientData], slots: _Slots) -> None:
        self._trainer, self._data, self._slots = trainer, data, slots

    def train(self, message: bytes) -> dict[str, Any]:
        """Train the task that ``message`` names from its slot, leave the result there, and return the answer."""
        task = json.loads(message)
        assignment = assignment_from_json(task["assignment"])
        received = self._slots.view(task["slot"], self._trainer.payload.layout(assignment.spec, "sent"))
        try:
            update = attempt(self._trainer, assignment, received, self._data(assignment.client))
        except TaskFailed as failed:
            told = [failed.client, failed.where, failed.error, failed.traceback]
            return {"assignment": assignment.id, "failed": told}
        self._slots.view(task["slot"], update.tensors.layout).copy_(update.tensors)
        return {
            "assignment": assignment.id,
            "num_samples": update.num_samples,
            "num_steps": update.num_steps,
            "metrics": update.metrics,
            "refusal": update.refusal,
            "extra": dict(update.extra),
        }


class _TaskQueue:
    """Tasks that any process may take: a pipe behind a lock, which a worker holds while it waits for the next."""

    def __init__(self, context: Any) -> None:
        self._reader, self._writer = context.Pipe(duplex=False)
        self._lock = context.Lock()

    def put(self, message: bytes) -> None:
        """Add a task."""
        self._writer.send_bytes(message)

    def take(self) -> bytes:
        """Wait for a task and remove it; empty when the process is to end."""
        with self._lock:
            message: bytes = self._reader.recv_bytes()
            return message

    def take_now(self) -> bytes | None:
        """Remove a task if there is one."""
        if not self._lock.acquire(timeout=1e-3):
            return None  # a worker waits: there is none
        try:
            return self._reader.recv_bytes() if self._reader.poll(0) else None
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close this process's ends."""
        self._reader.close()
        self._writer.close()


class Pool(Executor):
    """``num_processes`` in all: this one and forked workers, which see the model and the data without a copy.

    Snapshots and results go through slots of shared memory. Every process, this one too while it waits, takes tasks
    from one short queue, most urgent first. Linux and macOS, CPU only (a forked process cannot use CUDA).
    """

    def __init__(self, trainer: LocalTrainer, data: Callable[[int], ClientData], num_processes: int) -> None:
        """Fork the workers; to be called before any thread is started."""
        num_workers = num_processes - 1
        payload = self._payload = trainer.payload
        layout = max(payload.layout(way="sent"), payload.layout(way="trained"), key=_slot_bytes)
        wanted = min(16 * num_workers, SLOT_BYTES // _slot_bytes(layout))
        self._slots = _Slots(max(wanted, 4 * num_workers), layout)
        self._bench = _Bench(trainer, data, self._slots)
        self._inline = Inline(trainer, data)
        self._tasks: dict[int, _Task] = {}
        self._waiting: list[tuple[float, int]] = []
        self._free = list(range(len(self._slots)))
        # The slot of the last result is lent until the next is asked for: the merge reads it, so nothing may be put there.
        self._queued, self._room, self._lent = 0, num_processes * AHEAD, -1
        context = mp.get_context("fork")
        self._queue = _TaskQueue(context)
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker, args=(self._queue, theirs, self._bench, torch.get_num_threads()), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def num_processes(self) -> int:
        """Count this process and the workers."""
        return 1 + len(self._processes)

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Take the task; it is queued by when it is needed."""
        self._tasks[assignment.id] = _Task(assignment, snapshot)
        heapq.heappush(self._waiting, (needed_at, assignment.id))
        self._supply()

    def result(self, assignment_id: int) -> Update:
        """Return the update, training whatever is queued here as long as it is not there."""
        self._release(self._lent)
        self._lent = -1
        task = self._tasks[assignment_id]
        while True:
            self._collect(block=False)
            if task.update is not None:
                break
            if task.slot < 0:  # more urgent than all that is queued
                del self._tasks[assignment_id]
                self._inline.submit(task.assignment, task.snapshot, 0.0)
                return self._inline.result(assignment_id)
            message = self._queue.take_now()
            if message is None:
                self._collect(block=True)
            else:
                self._take_in(self._bench.train(message))
        del self._tasks[assignment_id]
        self._lent = task.slot
        if isinstance(task.update, TaskFailed):  # said when its turn comes, however many processes there are
            raise task.update
        return task.update

    def cancel(self, assignment_id: int) -> None:
        """Drop the task; a process that has begun it finishes in vain."""
        task = self._tasks.get(assignment_id)
        if task is None:
            return
        if task.slot < 0 or task.update is not None:
            self._release(task.slot)
            del self._tasks[assignment_id]
        else:
            task.cancelled = True

    def close(self) -> None:
        """Stop the workers, at once where they are in the middle of a task that nobody needs."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
        for process in processes:
            process.join(timeout=10)
        for pipe in self._pipes:
            pipe.close()
        self._queue.close()

    # ---- how tasks move ----

    def _supply(self) -> None:
        """Queue the most urgent tasks, as long as there are slots, the queue is short, and they are needed."""
        while self._free and self._waiting and self._queued < self._room and not self._has_enough():
            task = self._tasks.get(heapq.heappop(self._waiting)[1])
            if task is None:
                continue
            task.slot = self._free.pop()
            self._slots.view(task.slot, task.snapshot.layout).copy_(task.snapshot)
            self._queued += 1
            message = {"slot": task.slot, "assignment": assignment_to_json(task.assignment)}
            self._queue.put(json.dumps(message).encode())

    def _has_enough(self) -> bool:
        """Check whether all results that are needed are there or under way."""
        if self.needed is None or self.needed >= len(self._tasks):
            return False
        return sum(task.slot >= 0 and not task.cancelled for task in self._tasks.values()) >= self.needed

    def _collect(self, *, block: bool) -> None:
        """Take in whatever the workers have finished."""
        ready = connection.wait(self._pipes, timeout=None if block else 0)
        for pipe in ready:
            try:
                message = json.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):  # OSError: it died within a message
                worker = self._pipes.index(pipe)  # type: ignore[arg-type]
                self._processes[worker].join(timeout=1)
                raise RunFailed(
                    f"worker process {worker + 1} died (exit code {self._processes[worker].exitcode})"
                ) from None
            if "bad_input" in message:
                raise BadInput(message["bad_input"])
            if "error" in message:
                raise RuntimeError(f"a worker process failed:\n{message['error']}")
            self._take_in(message)
        self._supply()

    def _take_in(self, answer: dict[str, Any]) -> None:
        self._queued -= 1
        task = self._tasks[answer["assignment"]]
        if task.cancelled:
            self._release(task.slot)
            del self._tasks[answer["assignment"]]
            return
        task.update = self._update(task, answer)
        self._supply()

    def _update(self, task: _Task, answer: dict[str, Any]) -> Update | TaskFailed:
        assignment = task.assignment
        if "failed" in answer:
            return TaskFailed(*answer["failed"])
        if answer["refusal"] == OUT_OF_MEMORY:
            return out_of_memory(assignment)
        layout = self._payload.layout(assignment.spec, "trained")
        return Update(
            assignment.id, assignment.client, assignment.incarnation, self._slots.view(task.slot, layout),
            answer["num_samples"], answer["num_steps"], answer["metrics"], extra=answer["extra"],
            refusal=answer["refusal"],
        )  # fmt: skip

    def _release(self, slot: int) -> None:
        if slot >= 0:
            self._free.append(slot)


def _worker(queue: _TaskQueue, pipe: connection.Connection, bench: _Bench, num_threads: int) -> None:
    """Train what is queued until told to end, or until the parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or a cluster sends them to all; the parent sees to them
        signal.signal(number, signal.SIG_IGN)
    keep_freed()  # before there are threads
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # In a thread of its own: where the forking thread has computed with several threads, OpenMP believes in this one
    # that they are still there, and would wait for them for ever.
    trainer = threading.Thread(target=_train, args=(queue, pipe, bench, num_threads))
    trainer.start()
    trainer.join()


def _train(queue: _TaskQueue, pipe: connection.Connection, bench: _Bench, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    try:
        while message := queue.take():
            pipe.send_bytes(json.dumps(bench.train(message)).encode())
            give_back()  # the next task may be long in coming
    except (EOFError, OSError):
        pass
    except BadInput as error:
        pipe.send_bytes(json.dumps({"bad_input": str(error)}).encode())
    except BaseException:
        pipe.send_bytes(json.dumps({"error": traceback.format_exc()}).encode())
    finally:
        os._exit(0)


def _end_with(parent: int) -> None:
    """End this process soon after its parent."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
