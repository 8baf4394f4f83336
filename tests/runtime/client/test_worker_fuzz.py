"""A lying server's frames, damaged in every state of a client: each is taken, refused, or ends the session by name."""

from __future__ import annotations

import socket
import threading
from collections import Counter

import pytest
import torch
from torch.utils.data import TensorDataset

from raafl.config.options import Timeouts
from raafl.config.shared import for_clients
from raafl.config.trust import from_server
from raafl.core.algorithm import Training
from raafl.core.local import Local
from raafl.core.types import ClientInfo
from raafl.data.federated import ClientData
from raafl.errors import BadInput, RunFailed, TaskFailed
from raafl.local.train import LocalTrainer
from raafl.runtime.client.worker import Client
from raafl.runtime.protocol import Assign, Config, Reason, Welcome
from raafl.submodel import Submodels
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.connection import TcpConnection
from tests.habits.source import ROOT
from tests.helpers.bent_frames import NUM_LONG, NUM_QUICK, Bender
from tests.helpers.coordinators import EXAMPLE, filled, line_state
from tests.runtime.server.sessions import task as task_of
from tests.runtime.test_exchange import Trained

pytestmark = pytest.mark.timeout(3600)
STATE = line_state()


def assign(number):
    return Message(Kind.ASSIGN, number, 0, Assign(task_of(number)).to_meta(), filled(STATE, 1.0))


MESSAGES = {
    "welcome": lambda: Message(Kind.WELCOME, meta=Welcome(("hidden",), 4).to_meta()),
    "assign": lambda: assign(1),
    "keepalive": lambda: Message(Kind.KEEPALIVE, meta={"confirms": 1}),
    "stop": lambda: Message(Kind.STOP, meta=Reason("over").to_meta()),
    "refused": lambda: Message(Kind.REFUSED, 1, meta=Reason("a reason").to_meta()),
    "reply": lambda: Message(Kind.REPLY, 1, meta={"a": 1}, tensors=filled(STATE, 1.0)),
    "config": lambda: Message(Kind.CONFIG, meta=Config("clients: 4\n").to_meta()),
    "update": lambda: Message(Kind.UPDATE, 1, meta={}, tensors=filled(STATE, 1.0)),
}
STATES = {
    "joining": ("welcome", "assign", "stop", "refused", "reply", "config"),
    "idle": ("assign", "welcome", "keepalive", "stop", "refused", "reply", "update"),
    "training": ("assign", "refused", "reply", "stop", "keepalive"),
}
DATA = ClientData(TensorDataset(torch.zeros(2, 2), torch.zeros(2)), torch.arange(2), 1)
SUBMODELS = Submodels(Trained(4), EXAMPLE)
TRAINER = LocalTrainer(SUBMODELS, Local(), "values", Training(num_epochs=1, batch_size=1))
TIMES = Timeouts(join_s=5.0, idle_s=5.0, task_s=5.0, stop_s=0.05)


class Lied:
    """A client of the worker's code, and the server's end of its connection."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.pair = TcpConnection(ours, 20.0)
        self.client = Client(ClientInfo(4, 2), TcpConnection(theirs, 20.0), SUBMODELS, TRAINER, DATA, TIMES)
        self.ended: str | BaseException = ""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.ended = f"told: {self.client.run()}"
        except BaseException as error:
            self.ended = error

    def reach(self, state):
        assert self.pair.recv(lambda *_: None, 20.0).kind is Kind.HELLO
        if state != "joining":
            self.pair.send(Message(Kind.WELCOME, meta=Welcome((), 4).to_meta()))
        if state == "training":
            self.pair.send(assign(1))

    def close(self, seen):
        self.pair.close()
        self.thread.join(30.0)
        assert not self.thread.is_alive(), "the client goes on without its server"
        if isinstance(self.ended, BaseException):
            assert isinstance(self.ended, Refused | PeerLost | PeerTimeout | TaskFailed), repr(self.ended)
            seen[getattr(self.ended, "reason", type(self.ended).__name__)] += 1
        else:
            seen["stopped"] += 1


def shoot(state, name, num, seed):
    """Send a client damaged frames of one message in one state, a few to each; return how their clients ended."""
    bender, seen, sent = Bender(seed), Counter(), 0
    while sent < num:
        lied = Lied()
        try:
            lied.reach(state)
            for _ in range(bender.rng.choice([1, 1, 2, 4])):
                lied.pair._stream.write([bender.frame(MESSAGES[name]())])
                sent += 1
        except PeerLost:
            pass  # it has gone
        finally:
            lied.close(seen)
    return seen


def test_a_server_may_say_welcome_once():
    """Another in the middle of a run would change axes under a task."""
    lied, seen = Lied(), Counter()
    lied.reach("idle")
    lied.pair.send(MESSAGES["welcome"]())
    lied.thread.join(30.0)
    lied.close(seen)
    assert seen == {"bad-kind": 1} and "WELCOME again" in str(lied.ended)


CASES = [(state, name) for state, names in STATES.items() for name in names]


@pytest.mark.parametrize(("state", "name"), CASES)
def test_damaged_frames_in_each_state_of_a_client(state, name):
    assert sum(shoot(state, name, NUM_QUICK // 3, 1).values()) > 0


@pytest.mark.slow("ten thousand frames of each message in each state")
@pytest.mark.long("test_damaged_frames_in_each_state_of_a_client")
@pytest.mark.parametrize(("state", "name"), CASES)
def test_many_damaged_frames_in_each_state_of_a_client(state, name, capsys):
    seen = shoot(state, name, NUM_LONG, 2)
    with capsys.disabled():
        print(f" {state}, {name}: {NUM_LONG} frames: {dict(sorted(seen.items()))} ", end="")


def bent_config(bender, text):
    """Return the text of a config with characters, lines or words of it replaced."""
    rng, lines = bender.rng, text.splitlines()
    for _ in range(rng.choice([1, 1, 2, 5])):
        place = rng.randrange(len(lines))
        word = rng.choice(
            [
                "!!python/object/apply:os.system [x]",
                "&a [*a]",
                "<<: *a",
                "\x00",
                "- ",
                "{",
                "{class_path: os.system}",
                "~",
                "'",
                "\t",
                "class_path: x",
                "9" * 400,
                "http://a",
                "/etc/passwd",
                "\ud800",
                "[" * 2000,
                "package:os/x",
                ".inf",
                "? a",
            ],
        )
        line = lines[place]
        at = rng.randrange(len(line) + 1)
        lines[place] = rng.choice(
            [word, line[:at] + word + line[at:], line.partition(":")[0] + ": " + word, line[:at], line * 2]
        )
    return "\n".join(lines)


def configs(num, seed):
    """Read damaged configs as a client reads a server's; return how many were taken and refused."""
    bender, seen = Bender(seed), Counter()
    text = for_clients((ROOT / "configs" / "fed-avg.yaml").read_text())
    for _ in range(num):
        try:
            from_server(bent_config(bender, text))
            seen["taken"] += 1
        except (RunFailed, BadInput) as refused:
            assert "\n" not in str(refused) and len(str(refused)) < 2000
            seen["refused"] += 1
    return seen


def test_damaged_configs_of_a_server_are_refused_in_a_line_or_plain():
    assert configs(NUM_QUICK // 3, 1)["refused"] > 0


@pytest.mark.slow("ten thousand configs")
@pytest.mark.long("test_damaged_configs_of_a_server_are_refused_in_a_line_or_plain")
def test_many_damaged_configs_of_a_server_are_refused_in_a_line_or_plain(capsys):
    seen = configs(NUM_LONG, 2)
    with capsys.disabled():
        print(f" {NUM_LONG} configs: {dict(seen)} ", end="")
