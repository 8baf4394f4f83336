"""A client from the command line: servers that mean ill, refuse, or are not there."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from raafl import fed_avg
from raafl.commands.cli import main
from raafl.commands.join import _given_alone_s
from raafl.config.options import Timeouts
from raafl.errors import BadInput, Replaced, RunFailed
from raafl.runtime.client.join import join
from raafl.transport import Kind, Message, PeerLost, Refused
from raafl.transport.tcp import transport
from raafl.transport.tcp.listener import Listener
from tests.helpers.certificates import TOKEN, federation

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
CONFIG = yaml.safe_load(QUICKSTART.read_text())
SYSTEM = {"class_path": "os.system", "init_args": {"command": "touch PWNED"}}
WAIT_S = 20.0


@pytest.mark.parametrize(
    "form", [SYSTEM, json.dumps(SYSTEM), "os.system", {"class_path": "raafl.commands.cli.os.system"}], ids=str
)
def test_the_config_of_a_server_is_data(tmp_path, monkeypatch, form):
    """A server that has a certificate, and sends a config that would run a command."""
    monkeypatch.chdir(tmp_path)
    text = yaml.safe_dump({**CONFIG, "model": form})

    def make_site(config_yaml):
        raise AssertionError(f"the client has taken {config_yaml}")

    def admit(pair, peer):
        with pair:
            assert pair.recv(lambda kind, assignment, meta: None, WAIT_S).kind is Kind.CONFIG
            pair.send(Message(Kind.CONFIG, 0, 0, {"config_yaml": text}, None))

    with (
        Listener("127.0.0.1:0", federation().server, admit, lambda reason: None) as listener,
        pytest.raises(RunFailed) as failed,
    ):
        join(listener.address, 1, federation().site(), make_site, needs_config=True, alone_s=0.1)
    said = str(failed.value)
    assert said.startswith("the server's config is refused: model is ") and said.endswith("give it as --config FILE")
    assert list(tmp_path.iterdir()) == []


def told_to_stop(reason):
    """Join a server that answers the request for a config by a STOP; return what `join` returns, and the lines it shows."""

    def admit(pair, peer):
        with pair:
            pair.recv(lambda kind, assignment, meta: None, WAIT_S)
            pair.send(Message(Kind.STOP, meta={"reason": reason}))

    said = []
    with Listener("127.0.0.1:0", TOKEN, admit, lambda reason: None) as listener:
        return join(listener.address, 1, TOKEN, lambda _: None, needs_config=True, alone_s=0.1, say=said.append), said


def test_a_run_that_ends_before_a_client_has_its_config_is_a_good_end():
    assert told_to_stop("max_updates") == ("max_updates", [])
    with pytest.raises(RunFailed, match=r"^client 1: refused: client is 1: this run has no client$"):
        told_to_stop("refused: client is 1: this run has no client")


def test_a_second_client_of_one_process_is_refused():
    """Both would seed torch's generator, of which there is one: with dropout each would change the other's update."""

    class Built:
        notes = ()
        experiment = SimpleNamespace(
            algorithm=fed_avg(), secure_aggregation=SimpleNamespace(is_on=False), waits=Timeouts()
        )

        def __init__(self, run):
            self.run = run

        def client(self, pair, **_):
            return SimpleNamespace(
                info=SimpleNamespace(id=2), run=self.run, unsent=None, num_answered=0, has_task=False
            )

    def other():
        return join(listener.address, 2, TOKEN, lambda _: Built(lambda: "done"), needs_config=False)

    def refused():
        with pytest.raises(RunFailed) as failed:
            other()
        said.append(str(failed.value))

    def first():
        thread = threading.Thread(target=refused)
        thread.start()
        thread.join(WAIT_S)
        return "max_updates"

    said = []
    with Listener("127.0.0.1:0", TOKEN, lambda pair, peer: None, lambda reason: None) as listener:
        assert join(listener.address, 1, TOKEN, lambda _: Built(first), needs_config=False) == "max_updates"
        assert "client 2: another client works in this process" in said[0]
        assert other() == "done"  # once the first has ended


def test_a_client_that_builds_its_model_while_the_run_ends_is_told():
    """The server's STOP lies in the closed connection until the client has built its model and looks."""

    class Built:
        notes = ()
        experiment = SimpleNamespace(algorithm=fed_avg(), secure_aggregation=SimpleNamespace(is_on=False))

        def client(self, pair, **_):
            return SimpleNamespace(run=lambda: hello(pair), unsent=None, num_answered=0, has_task=False)

    def hello(pair):
        pair.send(Message(Kind.HELLO))
        message = pair.recv(lambda *_: None, WAIT_S)
        return message.meta["reason"]

    def build(config_yaml):
        assert gone.wait(WAIT_S)
        return Built()

    def admit(pair, peer):
        with pair:
            pair.recv(lambda kind, assignment, meta: None, WAIT_S)
            pair.send(Message(Kind.CONFIG, 0, 0, {"config_yaml": QUICKSTART.read_text()}, None))
            pair.send(Message(Kind.STOP, meta={"reason": "max_updates"}))
        gone.set()

    gone, certificates = threading.Event(), federation()
    with Listener("127.0.0.1:0", certificates.server, admit, lambda reason: None) as listener:
        assert join(listener.address, 1, certificates.site(), build, needs_config=True, alone_s=1.0) == "max_updates"


@pytest.mark.parametrize("reason", ["run-ended", "run-failed"])
def test_a_client_does_not_look_again_for_a_run_that_is_over(monkeypatch, reason):
    calls = []

    def call(*_, **__):
        calls.append(1)
        raise Refused(reason, "here:1: run 'one' has ended: the server offers none now")

    monkeypatch.setattr(transport, "connect", call)
    expected = "here:1: run 'one' has ended: the server offers none now"
    if reason == "run-failed":
        with pytest.raises(RunFailed, match=f"^client 1: failed: {expected}$"):
            join("127.0.0.1:1", 1, TOKEN, lambda _: None, needs_config=True)
    else:
        assert join("127.0.0.1:1", 1, TOKEN, lambda _: None, needs_config=True) == expected
    assert len(calls) == 1


def test_a_server_that_refuses_a_client_is_there(monkeypatch):
    def call(*_, **__):
        raise Refused("unknown-site", "not taken")

    monkeypatch.setattr(transport, "connect", call)
    monkeypatch.setattr("raafl.runtime.client.join._FIRST_WAIT_S", 0.001)
    told = []
    with pytest.raises(RunFailed, match="refuses this client: unknown-site: not taken"):
        join("127.0.0.1:1", 1, TOKEN, lambda _: None, needs_config=True, alone_s=600, say=told.append)
    assert told == [
        "the server at 127.0.0.1:1 refuses this client: unknown-site: not taken; trying again, until it has refused 3 times"
    ]


def test_a_server_that_ends_each_connection_is_not_said_to_be_missing(monkeypatch):
    def call(*_, **__):
        raise PeerLost("connection-closed", "the peer ended the connection")

    monkeypatch.setattr(transport, "connect", call)
    told = []
    with pytest.raises(RunFailed, match=r"no server answered at 127.0.0.1:1 for 0.01 s \(the server ended it\)"):
        join("127.0.0.1:1", 1, TOKEN, lambda _: None, needs_config=True, alone_s=0.01, say=told.append)
    assert told == [
        "the server at 127.0.0.1:1 ends each connection before it admits this client: it is busy or about to stop, or this "
        "client comes back too often; trying again for up to 0.01 s"
    ]


def test_a_client_that_looks_for_its_server_says_from_time_to_time_how_long_it_goes_on(monkeypatch):
    def call(*_, **__):
        raise PeerLost("connection-refused", "nothing listens at 127.0.0.1:1")

    monkeypatch.setattr(transport, "connect", call)
    monkeypatch.setattr("raafl.runtime.client.join._FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("raafl.runtime.client.join._LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr("raafl.runtime.client.join._FIRST_NOTE_S", 0.1)
    told = []
    with pytest.raises(RunFailed, match=r"for 0.6 s \(nothing listens at 127.0.0.1:1\)"):
        join("127.0.0.1:1", 1, TOKEN, lambda _: None, needs_config=True, alone_s=0.6, say=told.append)
    assert told[0] == "no server at 127.0.0.1:1 yet (nothing listens at 127.0.0.1:1); waiting for up to 0.6 s"
    # after 0.1, 0.2 and 0.4 s, fewer on a busy machine
    assert 1 <= len(told[1:]) <= 3
    for line in told[1:]:
        assert line.startswith("no server at 127.0.0.1:1 for 0.") and "; giving up in 0." in line


def test_a_client_looks_for_a_server_that_has_gone_as_long_as_that_server_s_config_says(monkeypatch):
    class Built:
        notes = ()
        experiment = SimpleNamespace(
            algorithm=fed_avg(), secure_aggregation=SimpleNamespace(is_on=False), waits=Timeouts(alone_s=0.1)
        )

        def client(self, pair, **_):
            return SimpleNamespace(run=lambda: lost(), unsent=None, num_answered=0, has_task=False)

    def lost():
        listener.close()
        raise PeerLost("connection-closed", "the peer ended the connection")

    def admit(pair, peer):
        with pair:
            pair.recv(lambda kind, assignment, meta: None, WAIT_S)
            pair.send(Message(Kind.CONFIG, 0, 0, {"config_yaml": QUICKSTART.read_text()}, None))

    told = []
    with (
        Listener("127.0.0.1:0", TOKEN, admit, lambda reason: None) as listener,
        pytest.raises(RunFailed, match=r"^no server answered at \S+ for 0\.1 s"),
    ):
        join(listener.address, 1, TOKEN, lambda _: Built(), needs_config=True, say=told.append)
    assert "trying again for 0.1 s" in told[0]


def test_how_long_a_server_is_looked_for_may_be_said_without_a_config():
    assert _given_alone_s(["--seed", "1", "--waits.alone_s", "5"]) == 5.0
    assert _given_alone_s(["--waits.alone_s=0.5"]) == 0.5 and _given_alone_s([]) is None
    for wrong in ("soon", "-5", "0", "nan", "inf", ""):
        with pytest.raises(BadInput, match=rf"waits\.alone_s is '{wrong}': give seconds above 0"):
            _given_alone_s(["--waits.alone_s", wrong])


@pytest.mark.parametrize("command", [["serve"], ["join", "--client", "1"]])
def test_a_host_that_is_not_found_is_said_at_once(command, monkeypatch, capsys):
    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    options = ["--config", str(QUICKSTART)] if command == ["serve"] else []
    assert main([*command, "--address", "nowhere.invalid:29500", *options]) == 2
    assert capsys.readouterr().err == (
        "raafl: address is 'nowhere.invalid:29500', whose host is not found (Name or service not known): correct its name, "
        "or give an IP address\n"
    )


def unknown_host(*args, **kwargs):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_client_that_is_replaced_ends_with_a_code_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr("raafl.commands.join.command", replaced)
    assert main(["join", "--client", "1", "--address", "127.0.0.1:1"]) == 3
    assert capsys.readouterr().err == "raafl: client 1: replaced: client 1 has joined from elsewhere\n"


def replaced(argv):
    raise Replaced("client 1: replaced: client 1 has joined from elsewhere")
