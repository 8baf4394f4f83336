"""What is said of code that fails, and what of it a client tells the server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from raafl.errors import GpuLost, TaskFailed, one_line
from raafl.local.failure import of_evaluation
from raafl.runtime.executors.base import attempt
from raafl.runtime.protocol import Failed
from tests.local.bench import assignment

LINE = 'Traceback\n  File "/home/me/data.py", line 7, in row\n of Ann'
FAILED = TaskFailed(3, "task 0, submodel full, batch 2", "KeyError: 'Ann (34)' (data.py:7)", LINE)


def to_meta(failure, private):
    return Failed.of(failure, private=private).to_meta()


def from_meta(client, meta):
    return Failed.from_meta(meta).to_error(client)


def test_a_failure_goes_over_the_wire_as_it_is_or_without_what_may_name_the_data():
    told = from_meta(3, to_meta(FAILED, private=False))
    assert (str(told), told.traceback) == (str(FAILED), FAILED.traceback)
    private = from_meta(3, to_meta(FAILED, private=True))
    assert str(private) == "client 3, task 0, submodel full, batch 2: KeyError (data.py:7)"
    assert private.traceback == "" and private.kind == from_meta(3, to_meta(FAILED, private=True)).kind
    bare = TaskFailed(3, "", "KeyError: 'Ann'", "")
    assert to_meta(bare, private=True)["error"] == "KeyError"


@pytest.mark.parametrize(
    "message", ["no row (Ann, 34)", "no row (Ann:34)", "no row (data.py:70)", "no (row", "no row ()"]
)
def test_a_message_that_ends_in_parentheses_names_no_place(message):
    """An error raised within a library has no place in the user's code, and its message may end like one."""
    told = to_meta(TaskFailed(3, "task 0", f"ValueError: {message}", LINE + f"\nValueError: {message}"), private=True)
    assert told == {"where": "task 0", "error": "ValueError"}


def test_what_a_peer_says_is_cleaned_and_cut():
    told = from_meta(
        1, {"where": "a\x1b[31m\nb", "error": "x" * 9000, "traceback": "one\n  two\x07\u202e" + "y" * 90000}
    )
    assert told.where == "a\\x1b[31m\\nb" and len(told.error) == 400
    assert len(told.traceback) <= 20_000 and "\x07" not in told.traceback
    assert from_meta(1, {"where": 3}).where == "3"
    assert one_line("a\n  b\tc" + "d" * 500) == "a b c" + "d" * 192 + "..."


ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")


class Trainer:
    """Its task raises an error, and so does what a GPU is asked from then on, where it does not get over it."""

    def __init__(self, monkeypatch, device, error, stays):
        self.fabric, self.error, self.stays = SimpleNamespace(device=torch.device(device)), error, stays
        monkeypatch.setattr(torch.cuda, "synchronize", self.ask)

    def ask(self, device):
        if self.stays:
            raise self.error

    def run(self, assignment, received, data, context):
        context.progress.place = "batch 2"
        raise self.error


@pytest.mark.parametrize(
    ("device", "stays", "kind"), [("cuda:1", True, GpuLost), ("cuda:1", False, TaskFailed), ("cpu", True, TaskFailed)]
)
def test_an_error_that_stays_with_the_gpu_is_told_from_one_of_the_users_code(monkeypatch, device, stays, kind):
    trainer = Trainer(monkeypatch, device, ILLEGAL, stays)
    with pytest.raises(
        TaskFailed, match=r"client 1, task 0, .*batch 2: RuntimeError: CUDA error: an illegal"
    ) as raised:
        attempt(trainer, assignment(), None, None)
    assert type(raised.value) is kind
    for private in (True, False):
        assert type(from_meta(1, to_meta(raised.value, private=private))) is kind


def test_code_that_exits_the_process_fails_as_any_other(monkeypatch):
    with pytest.raises(TaskFailed, match=r"client 1, task 0, .*batch 2: SystemExit: 3 \(tests"):
        attempt(Trainer(monkeypatch, "cpu", SystemExit(3), False), assignment(), None, None)
    assert "at version 4: SystemExit" in str(of_evaluation(SystemExit(), 4))


def test_failures_are_alike_by_kind_and_place():
    other = TaskFailed(3, "task 9, submodel full, batch 0", "KeyError: 'Bob' (data.py:7)", "")
    assert FAILED.kind == other.kind
    assert FAILED.kind != TaskFailed(2, "", "KeyError: 'Bob' (data.py:7)", "").kind
    assert FAILED.kind != TaskFailed(3, "", "KeyError: 'Bob' (data.py:8)", "").kind
