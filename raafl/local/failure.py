"""Turn errors of the user's code, and lack of memory, into the outcome of a task."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from raafl.core.types import OUT_OF_MEMORY, Assignment, Update
from raafl.data.federated import ClientData
from raafl.errors import USER_ERRORS, BadInput, CodeFailed, GpuLost, TaskFailed, format_error
from raafl.local.context import ALONE, TaskContext
from raafl.local.train import LocalTrainer, Stopped
from raafl.submodel import FlatTensors, Layout, Spec

# texts of a plain RuntimeError that mean out of memory
_NO_MEMORY: Final = ("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")
_FILE: Final = "failure.txt"
_LONG: Final = 20_000


def attempt(
    trainer: LocalTrainer, assignment: Assignment, received: FlatTensors, data: ClientData, context: TaskContext = ALONE
) -> Update:
    """Train a task and return its update. If memory runs out, free it, and return an empty update that says so.

    Raises:
        TaskFailed: the user's code, or a library that it calls, raised an error.
        GpuLost: the GPU had an error from which it cannot recover.
        BadInput: see `LocalTrainer.run`.
        Stopped: see `LocalTrainer.run`.
    """
    try:
        return trainer.run(assignment, received, data, context)
    except (BadInput, Stopped, TaskFailed):
        raise
    except USER_ERRORS as error:
        # the other processes of the client wait for this one, so one process alone cannot refuse the task
        if context.process_group is not None:
            context.process_group.failed()
        if context.process_group is not None or not is_out_of_memory(error):
            raise _failed(trainer.fabric.device, assignment, context, error) from error
        traceback.clear_frames(error.__traceback__)  # the frames hold the task's tensors
    trainer.release()
    return unanswered(assignment, OUT_OF_MEMORY)


def unanswered(assignment: Assignment, refusal: str) -> Update:
    """Return an empty update, which tells the server why the client has not done a task."""
    nothing = FlatTensors.empty(Layout(()))
    return Update(assignment.id, assignment.client, assignment.incarnation, nothing, 0, refusal=refusal)


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether ``error`` means that the memory of the machine or of a GPU ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def _failed(device: torch.device, assignment: Assignment, context: TaskContext, error: BaseException) -> TaskFailed:
    where = f"task {assignment.task}, {_in_words(assignment.spec)}, {context.progress.place}"
    if _is_lost(device):
        return GpuLost(
            assignment.client, where, f"{format_error(error)}; its process can no longer use the GPU", _in_full(error)
        )
    return TaskFailed(assignment.client, where, format_error(error), _in_full(error))


def _is_lost(device: torch.device) -> bool:
    """Check whether the GPU is unusable in this process, as after an illegal access or a failed assertion."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


@contextmanager
def measuring(version: int) -> Iterator[None]:
    """Return a context in which a version of the global model is evaluated: errors of the user's code become `CodeFailed`."""
    try:
        yield
    except USER_ERRORS as error:
        raise CodeFailed(
            f"evaluation of the global model at version {version}: {format_error(error)}", _in_full(error)
        ) from error


def of_server(error: BaseException, client: int | None = None) -> CodeFailed:
    """Convert an error that the method's own code raised on the server to a `CodeFailed`.

    `client`: client whose data was being processed; None = no single client's.
    """
    if isinstance(error, CodeFailed):
        return error
    over = "" if client is None else f", for client {client}"
    failed = CodeFailed(f"the server{over}: {format_error(error)}", _in_full(error))
    failed.__cause__ = error
    return failed


def _in_full(error: BaseException) -> str:
    """Return an error's traceback as text, of a long one only the end."""
    return error.traceback if isinstance(error, CodeFailed) else "".join(traceback.format_exception(error))[-_LONG:]


def _in_words(spec: Spec) -> str:
    words = str(spec)
    return f"submodel {words if len(words) <= 60 else words[:57] + '...'}"


def leave_traceback(folder: Path, reason: str, error: BaseException) -> str | None:
    """Append an error to the file failure.txt of the run folder; return the file's name, or None if that failed."""
    try:
        with (folder / _FILE).open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{reason}\n\n{_in_full(error)}\n")
    except OSError:  # the error's summary is reported elsewhere
        return None
    return _FILE
