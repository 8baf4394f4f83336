"""Records of the protocol: they come back as they were sent, and a peer's words are either a record or refused."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raafl.core.types import OUT_OF_MEMORY, Assignment, ClientInfo
from raafl.devices.profiles import Profile
from raafl.errors import GpuLost, TaskFailed
from raafl.runtime.identity import Identity, agree, client_info
from raafl.runtime.protocol import (
    MAX_LOG_LINES,
    MAX_LOG_TEXT,
    MAX_METRIC,
    Answer,
    Assign,
    Config,
    Failed,
    Hello,
    LogLine,
    Measure,
    Question,
    Reason,
    SignedHead,
    Welcome,
    count_of,
    log_lines_of,
)
from raafl.submodel import FULL
from raafl.transport import Refused

TASK = Assignment(
    id=3,
    client=4,
    incarnation=1,
    task=2,
    version=5,
    spec=FULL,
    region=0,
    num_epochs=1,
    num_steps=None,
    seed=9,
    assigned_s=0.5,
)
RECORDS = {
    "config": Config("clients: 2\n"),
    "config request": Config(),
    "welcome": Welcome(("hidden", "heads"), 4),
    "welcome of a rank": Welcome(("hidden",)),
    "assign": Assign(TASK),
    "assign, more to come": Assign(TASK, more=True),
    "assign with a head": Assign(TASK, head=SignedHead("a" * 64, "c2lnbmVk", "a2V5")),
    "answer": Answer(17, 2, {"loss": 0.5}, {"scores": [1]}, "digest"),
    "answer with log lines": Answer(17, 2, logs=(LogLine("error", "a"), LogLine("info", "b"))),
    "failed, with a log line": Failed("", "task 2", "RuntimeError: x", logs=(LogLine("warning", "a"),)),
    "failed": Failed("gpu", "task 2", "RuntimeError: x", "Traceback\nline"),
    "out of memory": Failed(OUT_OF_MEMORY),
    "reason": Reason("the run has ended"),
    "question": Question("bf16-mixed", 4, "delta"),
    "measure": Measure(0, 7, True),
}


def over_the_wire(meta):
    return json.loads(json.dumps(meta, allow_nan=False))


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_comes_back_as_it_was_sent(name):
    record = RECORDS[name]
    again = type(record).from_meta(over_the_wire(record.to_meta()))
    if isinstance(record, Welcome):  # the id is for a log at the other end
        assert again.kept_whole == record.kept_whole
    else:
        assert again == record


def test_a_hello_comes_back_and_describes_its_client():
    info = ClientInfo(4, 17, Profile(name="phone", flops_per_s=1e8))
    hello = Hello.of_client(Identity("fingerprint", "base", {"data": "x"}), info, unsent=8)
    again = Hello.from_meta(over_the_wire(hello.to_meta()))
    assert again.identity == hello.identity and again.unsent == 8 and again.num_samples == 17
    assert client_info(again.client, 17, ClientInfo(4, 20), 2) == ClientInfo(4, 17, info.profile, incarnation=2)


def test_exact_metrics_survive_json_to_the_bit():
    metrics = {"loss": 0.1 + 0.2, "diverged": math.nan, "most": math.inf}
    answer = Answer(0, 0, metrics, refusal="non-finite", counted={"tasks": 3})
    again = Answer.from_rank(over_the_wire(answer.to_meta(exact=True)))
    assert (
        again.metrics["loss"] == 0.1 + 0.2
        and math.isnan(again.metrics["diverged"])
        and again.metrics["most"] == math.inf
    )
    assert again.refusal == "non-finite" and again.counted == {"tasks": 3}
    assert Answer(0, 0, metrics).to_meta()["metrics"] == {"loss": 0.1 + 0.2}  # a client's metrics are finite


@pytest.mark.parametrize(
    ("kind", "meta"),
    [
        (Config, {"config_yaml": 3}),
        (Hello, {"unsent": 0}),
        (Hello, {"unsent": True}),
        (Hello, {"memory_bytes": -1}),
        (Hello, {"memory_bytes": "much"}),
        (Welcome, {"kept_whole": "hidden"}),
        (Welcome, {"kept_whole": [1]}),
        (Assign, {}),
        (Assign, {**Assign(TASK).to_meta(), "spec": 5}),
        (Assign, {**Assign(TASK).to_meta(), "other": 5}),
        (Assign, {**Assign(TASK).to_meta(), "head": 5}),
        (Assign, {**Assign(TASK).to_meta(), "head": "a" * 1001}),
        (Assign, {**Assign(TASK).to_meta(), "head": "a", "head_key": "\x1b[2J"}),
        (Answer, {"num_samples": 0, "num_steps": 1}),
        (Answer, {"num_samples": 2**53, "num_steps": 1}),
        (Answer, {"num_samples": 1.5, "num_steps": 1}),
        (Answer, {"num_samples": 1, "num_steps": -1}),
        (Answer, {"num_samples": 1, "num_steps": 1, "metrics": []}),
        (Answer, {"num_samples": 1, "num_steps": 1, "metrics": {str(n): 0 for n in range(101)}}),
        (Answer, {"num_samples": 1, "num_steps": 1, "metrics": {"loss": 10**400}}),
        (Answer, {"num_samples": 1, "num_steps": 1, "extra": [1]}),
        (Question, {"precision": "16-mixed", "accumulate": 1, "sends": "values"}),
        (Question, {"precision": "32", "accumulate": 0, "sends": "values"}),
        (Question, {"precision": "32", "accumulate": True, "sends": "values"}),
        (Question, {"precision": "32", "accumulate": 1, "sends": "all"}),
        (Measure, {"start": -1, "stop": 2}),
        (Measure, {"start": 0, "stop": 0}),
    ],
)
def test_a_field_out_of_its_bounds_is_refused(kind, meta):
    with pytest.raises(Refused):
        kind.from_meta(meta)


def test_metrics_beyond_the_bound_are_left_out():
    answer = Answer.from_meta({"num_samples": 1, "num_steps": 1, "metrics": {"a": 1, "b": 2 * MAX_METRIC, "c": "x"}})
    assert answer.metrics == {"a": 1.0}


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted(
    {name for record in RECORDS.values() for name in record.to_meta()} | {"unsent", "memory_bytes", "config"}
)


@given(st.dictionaries(st.sampled_from(FIELDS), TREES, max_size=8))
def test_whatever_a_peer_says_is_a_record_or_refused(meta):
    for kind in {type(record) for record in RECORDS.values()} | {Hello}:
        try:
            kind.from_meta(meta)
        except Refused:
            continue
    hello = Hello(Identity.from_meta(meta), client=meta)
    agree(Identity("x"), hello.identity)
    with contextlib.suppress(Refused):
        client_info(meta, 1, ClientInfo(1, 5), 0)
    with contextlib.suppress(Refused):
        Answer.from_rank(meta)


def test_unknown_fields_are_ignored():
    assert Measure.from_meta({"start": 0, "stop": 2, "has_values": True, "else": 1}) == Measure(0, 2, True)
    assert Reason.from_meta({"reason": "x", "color": 1}) == Reason("x")


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (Identity("m", "b", {"data": "d", "seed": "s"}, "9.9"), None),
        (Identity("m", "b", {"data": "d", "seed": "s"}, protocol=9), "protocol"),
        (Identity("m", "b", {"data": "d", "seed": "t"}), "config.seed"),
        (Identity("m", "b", None), "config"),
        (
            Identity("n", "b", {"data": "d", "seed": "t"}),
            "config.seed",
        ),  # the config comes first: the model follows from it
        (Identity("n", "b", {"data": "d", "seed": "s"}), "model"),
        (Identity("m", None, {"data": "d", "seed": "s"}), "base"),
        (Identity("m", "b", {"data": "own", "seed": "s"}), None),
        (Identity("m", "b", {"data": "d", "seed": "s", "more": "x"}), None),
    ],
)
def test_the_first_difference_is_named(theirs, field):
    different = agree(Identity("m", "b", {"data": "d", "seed": "s"}), theirs)
    assert (different.field if different else None) == field


def test_no_config_is_compared_where_this_side_has_none():
    assert agree(Identity("m"), Identity("m", config={"seed": "t"})) is None


def test_a_private_failure_says_its_type_and_place_only():
    failure = TaskFailed(
        4, "task 2", "ValueError: row 17 of Mrs Smith (model.py:12)", 'File "/m/model.py", line 12: Mrs Smith'
    )
    told = Failed.of(failure, private=True)
    assert told.error == "ValueError (model.py:12)" and not told.traceback
    assert isinstance(Failed.of(GpuLost(4, "w", "e", "t"), private=False).to_error(4), GpuLost)


def test_a_count_is_no_boolean():
    with pytest.raises(Refused, match="n is True"):
        count_of({"n": True}, "n")


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ([["info", "one\ntwo\x1b"]], [LogLine("info", r"one\ntwo\x1b")]),
        (
            [["debug", "x"], ["info"], ["info", "a", "b"], "text", None, [["info"], "x"], ["error", {}]],
            [LogLine("error", "{}")],
        ),
        ("text", []),
        ({"info": "x"}, []),
        (None, []),
        (7, []),
    ],
)
def test_log_lines_are_cleaned_and_what_is_none_is_left_out(sent, taken):
    assert list(log_lines_of({"logs": sent})) == taken


def test_log_lines_are_bounded():
    found = log_lines_of({"logs": [["info", "x" * 10_000]] * 1000})
    assert len(found) == MAX_LOG_LINES and {len(line.text) for line in found} == {MAX_LOG_TEXT}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("id", [-1, 2**64, 1.0, True, "1", None]),
        ("incarnation", [2**32, -1, None]),
        ("seed", [-1, 2**64, None]),
        ("num_epochs", [0, -1, 2**53, 1.5, "1"]),
        ("num_steps", [0, 2**60]),
        ("pace_s", [1e9, float("nan"), "1", None]),
        ("lr_scale", [1e31, float("inf"), []]),
        ("assigned_s", [None, 1e300]),
        ("extra", [[], 1, "x"]),
        ("region", [-2, None]),
        ("next_seed", [-1, 2**64, "x"]),
        ("task", [2**53]),
        ("version", [-1]),
        ("client", [2**32]),
    ],
)
def test_an_assignment_has_bounds_in_each_field(field, values):
    good = Assign(TASK).to_meta()
    assert Assign.from_meta(good).assignment == TASK
    for value in values:
        with pytest.raises(Refused, match=f"bad-json: assignment: {field} is"):
            Assign.from_meta({**good, field: value})
