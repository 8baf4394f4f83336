"""The steps of a session, performed from a list of messages: no socket, no thread, no queue."""

from __future__ import annotations

from collections import Counter

import pytest

from raafl.core.saving import client_to_json
from raafl.core.types import Arrived, Joined
from raafl.errors import TaskFailed
from raafl.runtime.identity import PROTOCOL
from raafl.runtime.server import session_protocol as needs
from raafl.runtime.server.session_protocol import SessionProtocol, SessionSetup, Task
from raafl.transport import Kind, Message, PeerLost, Refused
from raafl.transport.frames import Frames
from tests.helpers.bent_frames import Bender
from tests.helpers.coordinators import filled, line_state
from tests.helpers.raw_frames import encode
from tests.runtime.server.sessions import INFO, task
from tests.transport.test_fuzz import Memory


class Played:
    """A session whose client, and whose loop, are lists; `sent` has what the session sends."""

    closed = stopping = False
    received_bytes = 7

    def __init__(self, messages, tasks=()):
        self.state, self.sent, self.events, self.turned_away = line_state(value=2.0), [], [], []
        self.messages, self.tasks = list(messages), list(tasks)
        self.protocol = SessionProtocol(4, 0, SessionSetup(self.state.submodels), self.events.append, self)

    def meet(self, need):
        match need:
            case needs.Send(message):
                self.sent.append(message)
                return 11
            case needs.Receive(expect):
                message = self.messages.pop(0)
                expect(message.kind, message.assignment, message.meta)
                return message
            case needs.NextTask():
                return self.tasks.pop(0) if self.tasks else None
            case needs.Compute(function):
                return function()
            case needs.TurnAway(reason):
                self.turned_away.append(reason)

    def play(self):
        steps, result, error = self.protocol.run(), None, None
        while True:
            try:
                need = steps.send(result) if error is None else steps.throw(error)
            except StopIteration:
                return
            try:
                result, error = self.meet(need), None
            except (Refused, PeerLost) as refused:
                result, error = None, refused


class Fuzzed(Played):
    """A session that is sent frames as bytes, through the code that reads those of a socket."""

    def __init__(self, frames, state):
        self.state, self.sent, self.events, self.turned_away, self.closed = state, [], [], [], False
        self.messages, self.tasks = list(frames), [Task(task(1), state.values)]
        self.protocol = SessionProtocol(4, 0, SessionSetup(state.submodels), self.events.append, self)

    def meet(self, need):
        if not isinstance(need, needs.Receive):
            return super().meet(need)
        if self.closed or not self.messages:
            raise PeerLost("connection-closed")
        reader = Frames(Memory(self.messages.pop(0)))
        try:
            return reader.receive(need.expect, need.finite)
        finally:
            self.closed = not reader.in_step


def fuzz(name, num, seed):
    """Send a session damaged frames in the place of its first message, or of its answer; count what came of them."""
    state, bender, seen = line_state(value=2.0), Bender(seed), Counter()
    honest = {"hello": hello(state), "update": answer(state, 1)}
    before = [] if name == "hello" else [encode(honest["hello"])]
    for _ in range(num):
        played = Fuzzed([*before, bender.frame(honest[name])], state)
        try:
            played.play()
            seen["over"] += 1
        except (Refused, PeerLost, TaskFailed) as error:
            seen[getattr(error, "reason", "failed")] += 1
        arrived = [event.update for event in played.events if isinstance(event, Arrived)]
        seen.update(update.refusal or "taken" for update in arrived)
        assert len(arrived) <= 1 and all(update.client == 4 for update in arrived)
    return seen


@pytest.mark.parametrize("name", ["hello", "update"])
def test_damaged_frames_without_a_socket(name):
    assert sum(fuzz(name, 300, 1).values()) >= 300


@pytest.mark.long("test_damaged_frames_without_a_socket")
@pytest.mark.parametrize("name", ["hello", "update"])
def test_ten_thousand_damaged_frames_without_a_socket(name, capsys):
    seen = fuzz(name, 10_000, 2)
    with capsys.disabled():
        print(f" {name}: {dict(sorted(seen.items()))} ", end="")


def hello(state):
    meta = {"protocol": PROTOCOL, "model": state.submodels.layout().fingerprint, **client_to_json(INFO)}
    return Message(Kind.HELLO, meta=meta)


def answer(state, number, **meta):
    counts = {"num_samples": 17, "num_steps": 2, "metrics": {"loss": 0.5}}
    return Message(Kind.UPDATE, number, 0, counts | meta, filled(state, 3.0))


def test_a_client_is_greeted_works_and_is_let_go():
    state = line_state(value=2.0)
    played = Played(
        [hello(state), answer(state, 1), answer(state, 9), answer(state, 3)],
        [Task(task(number), state.values) for number in (1, 2, 3)],
    )
    played.play()
    assert [message.kind for message in played.sent] == [Kind.WELCOME, *[Kind.ASSIGN] * 3]
    joined, *arrived = played.events
    assert joined == Joined(INFO) and all(isinstance(event, Arrived) for event in arrived)
    assert [event.update.refusal for event in arrived] == [None, "unknown-assignment", None]
    assert [(event.update.bytes_down, event.update.bytes_up) for event in arrived] == [(11, 7)] * 3


@pytest.mark.parametrize("kind", [Kind.UPDATE, Kind.KEEPALIVE, Kind.QUESTION])
def test_who_begins_otherwise_is_told_why_it_may_not_join(kind):
    played = Played([Message(kind)])
    with pytest.raises(Refused, match="incompatible"):
        played.play()
    assert played.turned_away == [f"refused: expected HELLO, got {kind.name}"] and played.events == played.sent == []
