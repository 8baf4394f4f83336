"""Describe an error of the user's code by where it was raised, and write its traceback."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import Final

import torch

from raafl.core.types import Assignment
from raafl.errors import CodeFailed, GpuLost, TaskFailed, briefly, format_error
from raafl.local.context import TaskContext
from raafl.submodel import Spec

_FILE: Final = "failure.txt"
_LONG: Final = 20_000


def of_task(device: torch.device, assignment: Assignment, context: TaskContext, error: BaseException) -> TaskFailed:
    """Convert an error of the user's code in a client's task to a `TaskFailed`; `GpuLost` if the GPU is unusable since."""
    where = f"task {assignment.task}, {_in_words(assignment.spec)}, {context.progress.place}"
    if _is_lost(device):
        return GpuLost(
            assignment.client, where, f"{format_error(error)}; its process can no longer use the GPU", _in_full(error)
        )
    return TaskFailed(assignment.client, where, format_error(error), _in_full(error))


def _is_lost(device: torch.device) -> bool:
    """Check whether this process can no longer use the GPU, as after an illegal access or a failed assertion."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def of_evaluation(error: BaseException, version: int) -> CodeFailed:
    """Convert an error of the user's code in an evaluation of the global model to a `CodeFailed`."""
    failed = CodeFailed(f"evaluation of the global model at version {version}: {format_error(error)}", _in_full(error))
    failed.__cause__ = error
    return failed


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
    """Return an error's traceback as text, or only its end if it is long."""
    return error.traceback if isinstance(error, CodeFailed) else "".join(traceback.format_exception(error))[-_LONG:]


def _in_words(spec: Spec) -> str:
    words = str(spec)
    return f"submodel {words if len(words) <= 60 else words[:57] + '...'}"


def leave_traceback(folder: Path, reason: str, error: BaseException) -> str | None:
    """Append an error to the file failure.txt of the run folder; return the file's name, or None if that failed."""
    try:
        with (folder / _FILE).open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{reason}\n\n{_in_full(error)}\n")
    except OSError:  # the error itself is reported elsewhere
        return None
    return _FILE


def misfit(error: BaseException) -> str:
    """Describe an argument of the model whose type is not that of its default; "" if there is none."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name != "__init__" or not isinstance(module, torch.nn.Module):
            continue
        for name, parameter in inspect.signature(type(module).__init__).parameters.items():
            value, kind = frame.f_locals.get(name, parameter.default), type(parameter.default)
            allowed = {float: (int, float), list: (list, tuple), tuple: (list, tuple)}.get(kind, (kind,))
            if kind in _KINDS and value is not None and type(value) not in allowed:
                return f"model.{name} is {briefly(value)}: give {_KINDS[kind]}, as its default, {briefly(parameter.default)}"
        return ""
    return ""


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    tuple: "a list",
}
