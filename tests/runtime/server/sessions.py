"""A session with a client that a test plays."""

from __future__ import annotations

import socket

from raafl.config.options import Timeouts
from raafl.core.saving import client_to_json
from raafl.core.types import Assignment, ClientInfo
from raafl.devices.profiles import Profile
from raafl.runtime.identity import PROTOCOL
from raafl.runtime.server.link import Inbox
from raafl.runtime.server.session import ThreadSession
from raafl.runtime.server.session_loop import LoopSession
from raafl.runtime.server.session_protocol import SessionSetup, Terms
from raafl.submodel import FULL, FlatTensors
from raafl.transport import Kind, Message
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.loop import SocketLoop
from tests.helpers.coordinators import filled, line_state

WAIT_S = 60.0  # for what comes at once on an idle machine, and before a sign of life that the test does not expect
LOOP = SocketLoop().start()
"""Loop of all sessions of a test process."""

INFO = ClientInfo(4, 17, Profile(name="phone", flops_per_s=1e8))


def task(number=1, **fields):
    values = {"id": number, "client": 4, "incarnation": 0, "task": 0, "version": 0, "spec": FULL, "region": 0}
    return Assignment(**{**values, "num_epochs": 1, "num_steps": None, "seed": 5, "assigned_s": 0.0, **fields})


class Table:
    """A session and the other end of its pair, which the test plays; ``has_thread``: whether the session has one of its own."""

    def __init__(self, terms=None, share=0, profile=None, extensions=(), has_thread=False, **waits):
        self.state, self.inbox, self.moved = line_state(value=2.0), Inbox(), []
        ours, theirs = socket.socketpair()
        times = Timeouts(**{"join_s": WAIT_S, "task_s": WAIT_S, "idle_s": WAIT_S, "stop_s": 2.0, **waits})
        moved = lambda down, up: self.moved.append((down, up))  # noqa: E731
        setup = SessionSetup(self.state.submodels, times, moved, terms=terms or Terms(), extensions=extensions)
        known = ClientInfo(4, share, profile or Profile())
        pair, more = TcpConnection(ours, 20.0), (setup, self.inbox, known)
        self.session = ThreadSession(4, 0, lambda: pair, *more) if has_thread else LoopSession(LOOP, 4, 0, pair, *more)
        self.session.start()
        self.theirs = theirs
        self.pair = TcpConnection(theirs, 20.0)

    def hello(self, **changes):
        meta = {"protocol": PROTOCOL, "model": self.state.submodels.layout().fingerprint, **client_to_json(INFO)}
        return self.say(Kind.HELLO, meta={**meta, **changes})

    def greet(self):
        self.hello()
        assert self.hear().kind is Kind.WELCOME
        return self.event()

    def say(self, kind, number=0, meta=None, tensors=None, incarnation=0):
        return self.pair.send(Message(kind, number, incarnation, meta or {}, tensors))

    def update(self, number=1, tensors=None, meta=None, incarnation=0):
        tensors = filled(self.state, 3.0) if tensors is None else tensors
        counts = {"num_samples": 17, "num_steps": 2, "metrics": {"loss": 0.5}}
        return self.say(Kind.UPDATE, number, {**counts, **(meta or {})}, tensors, incarnation)

    def hear(self, into=None, wait_s=WAIT_S):
        return self.pair.recv(lambda kind, number, meta: into, wait_s)

    def assign(self, number=1):
        self.session.assign(task(number), self.state.values.clone())
        into = FlatTensors.empty(self.state.submodels.layout())
        return self.hear(into)

    def event(self, timeout_s=WAIT_S):
        return self.inbox.get(timeout_s)

    def close(self):
        self.pair.close()
        self.session.stop("over")
        self.session.join(timeout=WAIT_S)
        assert not self.session.is_alive()
