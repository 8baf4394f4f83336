from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from raafl.algorithms import ALGORITHMS
from raafl.config.experiment import Experiment
from raafl.core.options import Guard, Privacy, Rounds
from raafl.errors import BadInput
from raafl.parts.protect.assembly import with_options
from raafl.runfolder.journal import FolderLock
from raafl.runtime.server.host import _admit, _seldom_collecting, _storage, host, waits_note
from raafl.submodel.tensor_files import PayloadRoom
from raafl.transport import Kind, Refused, Transport
from tests.helpers.small_runs import digits, small_mlp


@pytest.mark.parametrize(
    ("algorithm", "more", "says"),
    [
        ("fed_avg", {}, "waits.task_s, 10.0 min: set rounds.deadline, such as 10 (times the median time)"),
        ("fed_avg", {"rounds": Rounds(deadline=10.0)}, None),
        ("fed_avg", {"rounds": Rounds(close_at=0.9)}, None),
        ("co_s2p", {"settings": {"min_ratio": 1.0}}, "waits.task_s, 10.0 min: lower it, or the share of clients"),
        ("co_s2p", {}, None),
        ("fed_buff", {}, None),
        ("fed_async", {}, None),
    ],
)
def test_what_a_silent_client_would_hold_up_is_said_at_the_start(algorithm, more, says):
    method = ALGORITHMS[algorithm](**more.pop("settings", {}))
    experiment = Experiment(model=small_mlp, data=digits, algorithm=method, clients=2, **more)
    found = waits_note(experiment, with_options(method, experiment.rounds, Guard(), Privacy(), 2).trigger)
    assert found is None if says is None else says in found


@pytest.mark.parametrize(
    ("payload_bytes", "can_reserve", "expected"),
    [(100, True, ("folder", 100, 5000)), (100, False, None), (None, True, None), (None, False, None)],
)
def test_large_payloads_are_stored_in_files_where_the_system_can_reserve_their_space(
    monkeypatch, payload_bytes, can_reserve, expected
):
    """Without a reservation a full disk would kill the server, when it writes to a file that is mapped into its memory."""
    if not can_reserve:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    sizes = {"payload_memory_bytes": payload_bytes, "payload_memory_total_bytes": 5000}
    made = Experiment(model=small_mlp, data=digits, algorithm=ALGORITHMS["fed_avg"](), clients=2, **sizes)
    assert _storage(made, Path("folder")) == (PayloadRoom() if expected is None else PayloadRoom(*expected))


class Port(Transport):
    """A transport that can take its port, or cannot, and whom nobody calls."""

    comes_and_goes = True

    def __init__(self, problem=None):
        self.problem, self.states = problem, []

    def __enter__(self):
        if self.problem is not None:
            raise BadInput(self.problem)
        self.states.append("open")
        return self

    def __exit__(self, *_):
        self.states.append("closed")

    def listen(self, *_):
        pytest.fail("a run has begun")

    def connect(self, *_):
        pytest.fail("the server calls")


def test_a_run_that_another_process_writes_is_not_resumed_after_the_port_is_taken(tmp_path):
    algorithm = ALGORITHMS["fed_avg"]()
    experiment = Experiment(model=small_mlp, data=digits, algorithm=algorithm, clients=2, resume=str(tmp_path))
    with FolderLock(tmp_path, "resume"):
        with pytest.raises(BadInput, match="address is in use"):
            host(experiment, "", Port("address is in use"))
        with pytest.raises(BadInput, match=r"resume is '.*', where another process is writing its run"):
            host(experiment, "", port := Port())
    assert port.states == ["open", "closed"] and list(tmp_path.iterdir()) == []
    # now the lock is free
    with pytest.raises(BadInput, match=r"resume is .*, whose run has no checkpoint yet: start it again"):
        host(experiment, "", Port())
    FolderLock(tmp_path, "resume").close()


@pytest.mark.parametrize("place", ["note", "sessions"])
def test_a_server_that_fails_before_it_listens_gives_its_folder_back(tmp_path, place):
    def away(_):
        raise OSError("the disk is away")

    algorithm, folder = ALGORITHMS["fed_avg"](), tmp_path / "run"
    experiment = Experiment(
        model=small_mlp,
        data=digits,
        algorithm=algorithm,
        clients=2,
        max_updates=2,
        output=str(folder),
        progress="quiet",
    )
    with pytest.raises(OSError, match="the disk is away") as raised:  # whose traceback keeps the run
        host(experiment, "", Port(), **{place: away})
    FolderLock(folder, "resume").close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]
    del raised


def test_garbage_is_collected_the_less_often_the_more_clients_there_are():
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 9, 8)
        for num_clients, expected in ((3, 700), (70, 700), (71, 710), (10_000, 100_000)):
            with _seldom_collecting(num_clients):
                assert gc.get_threshold() == (expected, 9, 8)
            assert gc.get_threshold() == (700, 9, 8)
        gc.set_threshold(0, 9, 8)  # the user has turned it off
        with _seldom_collecting(10_000):
            assert gc.get_threshold() == (0, 9, 8)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("reason", "detail", "told"), [("stopped", "max_updates", 1), ("stopped", "", 0), ("busy", "come later", 0)]
)
def test_a_client_that_comes_when_the_run_is_over_is_told_so(reason, detail, told):
    def enter(client, make):
        raise Refused(reason, detail)

    sent, parts = [], SimpleNamespace(clients=[None], experiment=SimpleNamespace(clients=1))
    connection = SimpleNamespace(send=lambda message, timeout_s: sent.append((message.kind, message.meta["reason"])))
    admit = _admit(SimpleNamespace(parts=parts), SimpleNamespace(enter=enter), None, None)
    with pytest.raises(Refused, match=reason):
        admit(1, "here", lambda: connection)
    assert sent == [(Kind.STOP, detail)] * told
