"""What is said of code that fails, and what of it a client tells the server."""

from __future__ import annotations

from raafl.errors import TaskFailed
from raafl.local.failure import from_meta, one_line, to_meta

FAILED = TaskFailed(3, "task 0, submodel full, batch 2", "KeyError: 'Ann (34)' (data.py:7)", "Traceback\n  of Ann")


def test_a_failure_goes_over_the_wire_as_it_is_or_without_what_may_name_the_data():
    told = from_meta(3, to_meta(FAILED, private=False))
    assert (str(told), told.traceback) == (str(FAILED), FAILED.traceback)
    private = from_meta(3, to_meta(FAILED, private=True))
    assert str(private) == "client 3, task 0, submodel full, batch 2: KeyError (data.py:7)"
    assert private.traceback == "" and private.kind == from_meta(3, to_meta(FAILED, private=True)).kind
    bare = TaskFailed(3, "", "KeyError: 'Ann'", "")
    assert to_meta(bare, private=True)["error"] == "KeyError"


def test_what_a_peer_says_is_cleaned_and_cut():
    told = from_meta(
        1, {"where": "a\x1b[31m\nb", "error": "x" * 9000, "traceback": "one\n  two\x07\u202e" + "y" * 90000}
    )
    assert told.where == "a\\x1b[31m\\nb" and len(told.error) == 400
    assert len(told.traceback) <= 20_000 and "\x07" not in told.traceback
    assert from_meta(1, {"where": 3}).where == "3"
    assert one_line("a\n  b\tc" + "d" * 500) == "a b c" + "d" * 192 + "..."


def test_failures_are_alike_by_kind_and_place():
    other = TaskFailed(3, "task 9, submodel full, batch 0", "KeyError: 'Bob' (data.py:7)", "")
    assert FAILED.kind == other.kind
    assert FAILED.kind != TaskFailed(2, "", "KeyError: 'Bob' (data.py:7)", "").kind
    assert FAILED.kind != TaskFailed(3, "", "KeyError: 'Bob' (data.py:8)", "").kind
