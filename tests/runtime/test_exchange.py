"""Tasks that talk to the server in their middle, on real ranks, and what a session does when the client does not behave."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import TensorDataset

from model_zoo import MLP
from raafl.algorithms import fed_avg, split_fed
from raafl.algorithms.split_fed.cut import Cut, Half
from raafl.config.options import Timeouts
from raafl.core.algorithm import Hook, Local, Training
from raafl.core.exchange import Exchange
from raafl.core.saving import client_to_json
from raafl.core.types import Arrived, Assignment, ClientInfo, Joined, Lost
from raafl.data.federated import ClientData
from raafl.local.train import LocalTrainer
from raafl.runtime.client.worker import Client
from raafl.runtime.exchange import SplitClient, SplitSession
from raafl.runtime.identity import PROTOCOL
from raafl.runtime.server.link import Inbox
from raafl.runtime.server.session_loop import LoopSession
from raafl.runtime.server.session_protocol import SessionSetup
from raafl.submodel import FULL, FlatTensors, Layout, Submodels
from raafl.transport import Kind, Message
from raafl.transport.tcp.connection import TcpConnection
from tests.algorithms.split_fed.models import Conv
from tests.conformance.clocks import on_both_clocks
from tests.helpers.coordinators import EXAMPLE, Line
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import experiment, finish
from tests.runtime.server.sessions import LOOP

pytestmark = pytest.mark.timeout(120)
TERMS = {"cut": "fc1", "batch_size": 2, "num_samples": 3, "per_epoch": 2, "batches": 2, "samples": 3}
META = {"precision": "32-true", "accumulate": 1, "sends": "values", "dtype": "float32"}


class Trained(Line):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Table:
    """A session of a client with three samples in batches of two; the test plays the client."""

    def __init__(self, local=None, greet=True, **waits):
        module = Trained(2)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(1.0)
        self.submodels, self.inbox, self.moved = Submodels(module, EXAMPLE), Inbox(), []
        self.values = self.submodels.state(module)
        ours, theirs = socket.socketpair()
        times = Timeouts(**{"join_s": 20.0, "task_s": 20.0, "idle_s": 20.0, "stop_s": 5.0, **waits})
        setup = SessionSetup(
            self.submodels,
            times,
            lambda down, up: self.moved.append((down, up)),
            local=local or split_fed(client_layers=1).local,
            extensions=[SplitSession],
        )
        self.session = LoopSession(LOOP, 4, 0, TcpConnection(ours, 20.0), setup, self.inbox)
        self.session.start()
        self.pair = TcpConnection(theirs, 20.0)
        if greet:
            self.greet()

    def greet(self):
        meta = {"protocol": PROTOCOL, "model": self.submodels.layout().fingerprint}
        self.pair.send(Message(Kind.HELLO, 0, 0, {**meta, **client_to_json(ClientInfo(4, 3))}))
        assert self.hear().kind is Kind.WELCOME
        self.inbox.get(10.0)

    def hear(self, into=None):
        return self.pair.recv(lambda kind, number, meta: into, 20.0)

    def assign(self, number=1):
        """Give the session a task; return the client's share of the values, as it comes over the wire."""
        task = Assignment(number, 4, 0, 0, 0, FULL, 0, 1, None, 5, 0.0, extra={"split": TERMS})
        self.session.assign(task, self.values)
        message = self.hear(FlatTensors.empty(Layout.pack([("fc1.weight", (2, 2), torch.float32)])))
        assert (message.kind, message.meta["extra"]) == (Kind.ASSIGN, {"split": TERMS})
        return message.tensors

    def activations(self, index, activation, labels, number=1, **changes):
        named = {"activation": torch.tensor(activation), "batch.1": torch.tensor(labels)}
        shapes = [[len(labels), 2], [len(labels)]]
        meta = {**META, "batch": index, "shapes": shapes, **changes}
        return self.pair.send(Message(Kind.QUESTION, number, 0, meta, FlatTensors.from_named(named)))

    def gradient(self, num_samples):
        into = FlatTensors.empty(Layout.pack([("gradient", (num_samples, 2), torch.float32)]))
        message = self.hear(into)
        assert message.kind is Kind.REPLY
        return into["gradient"].tolist()

    def update(self, value=9.0, number=1):
        tensors = FlatTensors.from_named({"fc1.weight": torch.full((2, 2), value)})
        return self.pair.send(
            Message(Kind.UPDATE, number, 0, {"num_samples": 3, "num_steps": 2, "metrics": {}}, tensors)
        )

    def event(self):
        return self.inbox.get(20.0)

    def close(self):
        self.pair.close()
        self.session.stop("over")
        self.session.join(timeout=8)
        assert not self.session.is_alive()


@pytest.fixture
def table():
    table = Table()
    yield table
    table.close()


def test_the_server_trains_its_half_by_hand(table):
    """Two batches, of two samples and of one; the prediction is w . relu(a) + b, the loss the mean square."""
    assert table.assign()["fc1.weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    up = table.activations(0, [[3.0, 3.0], [1.0, -1.0]], [5.0, 2.0])
    # Predictions 3 + 3 + 1 = 7 and 1 + 0 + 1 = 2, errors 2 and 0: dL/dpred = 2 * 2 / 2 = 2 and 0.
    assert table.gradient(2) == [[2.0, 2.0], [0.0, 0.0]]
    # w = 1 - 0.1 * 2 * 3 = 0.4 each, b = 1 - 0.1 * 2 = 0.8. Then 0.4 * 5 + 0.8 = 2.8, error 0.8: dL/dpred = 1.6.
    up += table.activations(1, [[5.0, -5.0]], [2.0])
    ((first, second),) = table.gradient(1)
    assert first == pytest.approx(1.6 * 0.4) and second == 0.0
    up += table.update()
    event = table.event()
    assert isinstance(event, Arrived)
    update = event.update
    assert (update.refusal, update.num_samples, update.num_steps) == (None, 3, 2)
    assert update.tensors["fc1.weight"].tolist() == [[9.0, 9.0], [9.0, 9.0]]  # as the client says
    assert update.tensors["fc2.weight"].flatten().tolist() == pytest.approx([0.4 - 0.1 * 1.6 * 5, 0.4])
    assert update.tensors["fc2.bias"].item() == pytest.approx(0.8 - 0.16)
    assert update.metrics["loss"] == pytest.approx((2.0 + 0.64) / 2)
    assert update.bytes_up == up
    assert (update.bytes_down, update.bytes_up) == tuple(map(sum, zip(*table.moved, strict=True)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"shapes": [[1, 2], [1]]},
            "wrong-shape",
        ),  # by the method: see split_fed/test_questions.py
        ({"precision": "16-mixed"}, "bad-json"),
        ({"precision": ["32-true"]}, "bad-json"),
        ({"accumulate": 0}, "bad-json"),
        ({"sends": "gold"}, "bad-json"),
        ({"activation": [[3.0, 3.0]]}, "wrong-layout"),  # fewer numbers than it says
        ({"activation": [[float("nan"), 3.0], [1.0, 1.0]]}, "non-finite"),
        ({"number": 7}, "unknown-assignment"),
    ],
)
def test_activations_that_are_not_as_they_must_be_are_refused_once_and_the_next_task_goes_on(table, changes, reason):
    table.assign()
    changes = {"activation": [[3.0, 3.0], [1.0, 1.0]], "labels": [5.0, 2.0], **changes}
    table.activations(0, changes.pop("activation"), changes.pop("labels"), **changes)
    told = table.hear()
    assert told.kind is Kind.REFUSED and told.meta["reason"].startswith(reason)
    event = table.event()
    assert (event.update.assignment, event.update.refusal) == (1, reason)
    table.assign(number=2)
    table.activations(0, [[3.0, 3.0], [1.0, -1.0]], [5.0, 2.0], number=2)
    assert table.gradient(2) == [[2.0, 2.0], [0.0, 0.0]]  # nothing is left of the first task


def test_labels_that_break_the_servers_step_are_refused_and_the_next_task_goes_on(table, monkeypatch):
    step = Trained.training_step

    def strict(self, batch, index):
        if bool((batch[1] > 100).any()):
            raise IndexError("Target 101 is out of bounds.")
        return step(self, batch, index)

    monkeypatch.setattr(Trained, "training_step", strict)
    table.assign()
    table.activations(0, [[3.0, 3.0], [1.0, -1.0]], [5.0, 101.0])
    assert table.hear().meta["reason"] == "failed-step: IndexError: Target 101 is out of bounds."
    assert table.event().update.refusal == "failed-step"
    table.assign(number=2)
    table.activations(0, [[3.0, 3.0], [1.0, -1.0]], [5.0, 2.0], number=2)
    assert table.gradient(2) == [[2.0, 2.0], [0.0, 0.0]]


def test_an_answer_before_all_batches_have_come_is_refused(table):
    table.assign()
    table.activations(0, [[3.0, 3.0], [1.0, -1.0]], [5.0, 2.0])
    table.gradient(2)
    table.update()
    assert table.hear().meta["reason"].startswith("bad-kind: expected QUESTION, got UPDATE")
    assert table.event().update.refusal == "bad-kind"


def test_a_client_that_goes_in_the_middle_is_lost(table):
    table.assign()
    table.activations(0, [[3.0, 3.0], [1.0, -1.0]], [5.0, 2.0])
    table.gradient(2)
    table.pair.close()
    event = table.event()
    assert isinstance(event, Lost) and event.reason.startswith("disconnected")


def test_a_client_that_says_nothing_more_is_lost_at_the_deadline():
    table = Table(task_s=4.0)
    try:
        table.assign()
        table.activations(0, [[3.0, 3.0], [1.0, -1.0]], [5.0, 2.0])
        table.gradient(2)
        event = table.event()
        assert isinstance(event, Lost) and event.reason.startswith("timeout")
    finally:
        table.close()


def test_a_stop_reaches_the_client_in_the_middle(table):
    table.assign()
    table.activations(0, [[3.0, 3.0], [1.0, -1.0]], [5.0, 2.0])
    table.gradient(2)
    table.session.stop("target")
    message = table.hear()
    assert (message.kind, message.meta) == (Kind.STOP, {"reason": "target"})
    table.pair.close()
    table.session.join(timeout=8)
    assert table.inbox.get(0.0) is None  # it was let go, not lost


# ---- a method of one's own ----


class Asks(Hook):
    """The client trains fc1 on the server's word: the loss is its sum, times what is replied."""

    def loss(self, batch, index):
        question = {"number": torch.tensor([index + 1.0])}
        layout = Layout.pack([("twice", (1,), torch.float32)])
        return self.task.module.fc1.weight.sum() * self.task.link.ask({}, question, layout)["twice"].sum()


class Answers(Hook):
    def loss(self, batch, index):
        return self.task.module.fc2.weight.sum() * batch


class Numbers:
    """Two numbers in the place of data."""

    num_samples, test = 2, None

    def __init__(self, link):
        self.link = link
        self.number = self.hear()

    def hear(self):
        return self.link.hear(lambda meta: Layout.pack([("number", (1,), torch.float32)]))["number"].sum()

    def num_batches(self, batch_size=None):
        return 2

    def batches(self, *_, **__):
        yield self.number, 1
        self.link.reply({"twice": (2 * self.number).view(1)})
        self.number = self.hear()
        yield self.number, 1
        self.link.reply({"twice": (2 * self.number).view(1)})


class Own(Exchange):
    def questions(self, assignment, link):
        return Numbers(link)


class Asking(Local):
    """fc1 is the client's, all else the server's; nothing is cut."""

    def exchange(self, submodels, extra=None):
        def make():
            cut = Cut("fc1", frozenset({"fc1.weight"}), 1, 4, (), 8.0)
            return Own(Half(submodels, cut, "lower"), Half(submodels, cut, "upper"))

        return submodels.cached("own", "", make)

    def hook(self, task):
        return Asks(task) if task.link is not None else Answers(task)


def test_any_method_may_ask_in_the_middle_of_a_task():
    """Two batches: x <- x - 0.1 * (2 * 1) - 0.1 * (2 * 2) = 0.4 for fc1, x - 0.1 * 1 - 0.1 * 2 = 0.7 for fc2, with x = 1."""
    table = Table(local=Asking(), greet=False)
    submodels = Submodels(Trained(2), EXAMPLE)
    trainer = LocalTrainer(submodels, Asking(), "values", Training(num_epochs=1, batch_size=1))
    data = ClientData(TensorDataset(torch.zeros(2, 2), torch.zeros(2)), torch.arange(2), 1)
    client = Client(ClientInfo(4, 2), table.pair, submodels, trainer, data, Timeouts(), extensions=[SplitClient])
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(client.run)
        assert isinstance(table.event(), Joined)
        table.session.assign(Assignment(1, 4, 0, 0, 0, FULL, 0, 1, None, 5, 0.0), table.values)
        update = table.event().update
        table.session.stop("over")
        assert ended.result(timeout=20) == "over"
    assert (update.refusal, update.num_samples, update.num_steps) == (None, 2, 2)
    assert update.tensors["fc1.weight"].flatten().tolist() == pytest.approx([0.4] * 4)
    assert update.tensors["fc2.weight"].flatten().tolist() == pytest.approx([0.7] * 2)
    assert update.tensors["fc2.bias"].tolist() == [1.0]
    assert update.metrics["loss"] == pytest.approx((2 * 1 + (2 - 0.2) * 2) / 2)  # the server's, whose own it is
    assert (update.bytes_down, update.bytes_up) == tuple(map(sum, zip(*table.moved, strict=True)))
    table.close()


# ---- real ranks ----


def dropping() -> MLP:
    return MLP(64, (24, 16), 10, lr=0.05, momentum=0.5, dropout=0.3)


@pytest.mark.long("tests/conformance/test_exchange_two_clocks.py::test_real_ranks_leave_the_simulated_runs_model")
@pytest.mark.parametrize("model", [dropping, Conv])
def test_real_ranks_leave_the_simulated_runs_model(tmp_path, model):
    base = experiment(tmp_path / "s", split_fed(client_layers=1), max_updates=8, emulate=False, model=model)
    simulated, real = on_both_clocks(base, tmp_path / "real")
    assert real.summary["updates_refused"] == simulated.summary["updates_refused"] == {}
    whole = finish(experiment(tmp_path / "whole", fed_avg(), max_updates=8, model=model))
    assert (real.digest == whole.digest) is (model is Conv)  # dropout is drawn by each half


def _ends_in_its_third_batch(rank: int) -> None:
    ask = SplitClient.ask

    def broken(self, meta, *args):
        if meta["batch"] == 2:
            os._exit(3)
        return ask(self, meta, *args)

    if rank == 2:
        SplitClient.ask = broken  # in this process alone


def test_the_run_goes_on_without_a_client_that_dies_in_the_middle_of_a_batch(tmp_path):
    with ranks(
        experiment(tmp_path / "run", split_fed(), max_updates=6, emulate=False), _ends_in_its_third_batch
    ) as fleet:
        run = fleet.serve()
        assert fleet.exit_codes() == {1: 0, 2: 3, 3: 0, 4: 0}
    assert run.summary["updates_merged"] == 6
    assert [row["client"] for row in run.rows() if row["outcome"].startswith("lost:")] == ["2"]


def _waits_in_its_second_batch(rank: int) -> None:
    begin, ask, stops = SplitClient.begin, SplitClient.ask, []

    def seen(self, assignment, trainer, context):
        stops.append(context.stop)
        return begin(self, assignment, trainer, context)

    def slow(self, meta, *args):
        if meta["batch"] == 1:
            stops[-1].wait(60.0)
        return ask(self, meta, *args)

    if rank == 2:
        SplitClient.begin, SplitClient.ask = seen, slow


def test_a_run_that_ends_stops_a_client_in_the_middle_of_its_batches(tmp_path):
    algorithm = split_fed()
    fields = {"max_updates": None, "max_time": 3.0, "emulate": False}
    with ranks(experiment(tmp_path / "run", algorithm, **fields), _waits_in_its_second_batch) as fleet:
        run = fleet.serve()
        assert fleet.exit_codes() == {1: 0, 2: 0, 3: 0, 4: 0}
    assert run.summary["updates_lost"] == 0
