"""A logged-in client's frames, damaged in every state of its session: each is taken, refused, or ends this session by name."""

from __future__ import annotations

from collections import Counter

import pytest

from raafl.core.saving import client_to_json
from raafl.core.types import Arrived, Joined, Lost
from raafl.runtime.identity import PROTOCOL
from raafl.runtime.protocol import Answer, Failed, Question, Resume
from raafl.runtime.server.link import Resumption, Unassigned
from raafl.runtime.server.session_protocol import Terms
from raafl.sites.secure_messages import KEY_BYTES, Claim, layout_of, to_tensors
from raafl.sites.secure_server import MaskedSession, Reply, SecureStep
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.resumable import Position
from tests.helpers.bent_frames import NUM_LONG, NUM_QUICK, Bender
from tests.helpers.coordinators import filled
from tests.runtime.server.sessions import INFO, Table
from tests.runtime.server.sessions import task as task_of

pytestmark = pytest.mark.timeout(3600)
CONFIG = "clients: 4\n"


def hello(table):
    model = table.state.submodels.layout().fingerprint
    return Message(Kind.HELLO, meta={"protocol": PROTOCOL, "model": model, **client_to_json(INFO), "unsent": 3})


def update(table):
    answer = Answer(17, 2, {"loss": 0.5, "mine": 1.0}, {"a": [1, {"b": 2.0}]}).to_meta()
    answer["logs"] = [["info", "a line"]]
    return Message(Kind.UPDATE, table.number, 0, answer, filled(table.state, 3.0))


MESSAGES = {
    "config": lambda table: Message(Kind.CONFIG),
    "resume": lambda table: Message(Kind.RESUME, meta=Resume(Position(1, 0)).to_meta()),
    "hello": hello,
    "no client": lambda table: Message(Kind.FAILED, meta=Failed("policy").to_meta()),
    "update": update,
    "failed": lambda table: Message(
        Kind.FAILED, table.number, meta=Failed("out-of-memory", "w", "e: x", "t\nt").to_meta()
    ),
    "question": lambda table: Message(
        Kind.QUESTION, table.number, meta=Question("32-true", 1, "values").to_meta(), tensors=filled(table.state, 1.0)
    ),
    "keepalive": lambda table: Message(Kind.KEEPALIVE),
}
PHASES = ("ready", "shares", "masked", "signed", "opened")
"""Of a task whose update is masked: each message of the client but the last is a question."""


def masked(table):
    """Return a client's honest message of the phase that the session is in."""
    meta = {**Answer(17, 2).to_meta(), **Claim("r", "s", "north", 0.9).to_meta(), "signature": "ab" * 64}
    kind = Kind.UPDATE if table.phase == "opened" else Kind.QUESTION
    size = 3 * KEY_BYTES if table.phase == "ready" else 64
    return Message(kind, table.number, 0, meta, to_tensors(**{"keys" if table.phase == "ready" else "x": bytes(size)}))


MESSAGES |= dict.fromkeys(PHASES, masked)
STATES = {
    "first": ("config", "resume", "hello", "no client", "update", "keepalive"),
    "configured": ("hello", "no client", "config", "resume"),
    "idle": ("update", "hello", "failed", "config", "resume"),
    "training": ("update", "failed", "question", "hello", "keepalive", "resume"),
}


class Bent(Table):
    """A session whose other end sends damaged frames; what the loop is told is counted."""

    def __init__(self, state):
        terms, masked = Terms(config_yaml=CONFIG), [MaskedSession] if state.startswith("masked") else []
        self.phase = ""
        super().__init__(terms, extensions=masked, join_s=20.0, task_s=20.0, idle_s=20.0, resume_s=0.0, stop_s=0.02)
        self.number, self.is_out, self.lost = 0, False, None

    def reach(self, state):
        if state == "configured":
            self.say(Kind.CONFIG)
            assert self.hear().kind is Kind.CONFIG
        if state in ("idle", "training"):
            self.greet()
            self.number = 1
        if state == "training":
            self.next_task()
        if state.startswith("masked"):
            self.reach_phase(state.partition(", ")[2])

    def reach_phase(self, wanted):
        """Take the client through the phases before the wanted one, as an aggregator would."""
        self.greet()
        self.assign()
        self.number = 1
        for self.phase in PHASES[: PHASES.index(wanted)]:
            self.pair.send(masked(self))
            self.event().replies.put(Reply({"phase": 1}, None, layout_of(x=64)))
            assert self.hear().kind is Kind.REPLY
        self.phase = wanted

    def next_task(self):
        self.session.assign(task_of(self.number), self.state.values.clone())
        self.is_out = True

    def send(self, data):
        """Send bytes, and nothing more: what they lack, they lack for good."""
        self.pair._stream.write([data])

    def events(self, seen):
        """Count what the session tells the loop, until it is done with what was sent."""
        while (event := self.inbox.get(0.0)) is not None:
            self.count(event, seen)

    def count(self, event, seen):
        assert isinstance(event, Joined | Arrived | Lost | Resumption | SecureStep | Unassigned)
        if isinstance(event, SecureStep):
            assert event.phase == self.phase and event.tensors is not None
            event.replies.put(None)
            seen["step"] += 1
        elif isinstance(event, Resumption):
            event.is_taken.put(False)
        elif isinstance(event, Unassigned):
            event.assignment.put(None)
        elif isinstance(event, Lost):
            self.lost = event
            assert not event.reason.startswith("failed: ") or event.failure is not None, event.reason
            seen[event.reason.split(":")[0]] += 1
        elif isinstance(event, Arrived):
            one = event.update
            assert one.client == 4 and type(one.num_samples) is int and 0 <= one.num_samples <= 17
            assert all(abs(value) <= 3.5e38 for value in one.metrics.values()), one.metrics
            self.is_out &= one.refusal == "late"
            seen[one.refusal or "taken"] += 1
        else:
            assert 1 <= event.client.num_samples < 2**53
            seen["joined"] += 1


def shoot(state, name, num, seed):
    """Send damaged frames of one message in one state, on new sessions where one has ended; return what came of them."""
    bender, seen, sent = Bender(seed), Counter(), 0
    while sent < num:
        table = Bent(state)
        try:
            table.reach(state)
            while sent < num and table.session.is_alive() and table.lost is None:
                if state == "training" and not table.is_out:
                    table.number += 1
                    table.next_task()
                table.send(bender.frame(MESSAGES[name](table)))
                sent += 1
                if state == "idle":  # it lies there when the next task goes out
                    table.next_task()
                elif state in ("first", "configured"):
                    break
                event = table.inbox.get(0.1)  # a frame that is cut, or longer than it is, has none
                if event is None:
                    seen["unfinished"] += 1
                    break
                table.count(event, seen)
                if state != "training":
                    break
        except (PeerLost, PeerTimeout, Refused) as error:
            seen[getattr(error, "reason", "timeout")] += 1
        finally:
            table.pair.close()
            table.session.join(30.0)
            assert not table.session.is_alive(), "the session goes on without its client"
            table.events(seen)
    return seen


STATES |= {f"masked, {phase}": (phase,) for phase in PHASES}
CASES = [(state, name) for state, names in STATES.items() for name in names]


@pytest.mark.parametrize(("state", "name"), CASES)
def test_damaged_frames_in_each_state_of_a_session(state, name):
    assert sum(shoot(state, name, NUM_QUICK if state == "training" else NUM_QUICK // 30, 1).values()) > 0


@pytest.mark.slow("ten thousand frames of each message in each state")
@pytest.mark.long("test_damaged_frames_in_each_state_of_a_session")
@pytest.mark.parametrize(("state", "name"), CASES)
def test_many_damaged_frames_in_each_state_of_a_session(state, name, capsys):
    seen = shoot(state, name, NUM_LONG, 2)
    with capsys.disabled():
        print(f" {state}, {name}: {NUM_LONG} frames: {dict(sorted(seen.items()))} ", end="")
