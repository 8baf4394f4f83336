"""A relay on loopback that lets the handshake of a client and its server pass, and then speaks as the server."""

from __future__ import annotations

import json
import queue
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from raafl.commands.cli import main
from raafl.commands.serve import serve
from raafl.errors import Replaced, RunFailed, parse_address
from raafl.runtime.client.join import join
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp import transport
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.handshake import Secret
from raafl.transport.tcp.listener import Listener
from tests.helpers.small_runs import experiment

SECRET = Secret(b"a secret for tests only")
HANDSHAKE = (("client", 44), ("server", 40), ("client", 64), ("server", 68))
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
CONFIG = yaml.safe_load(QUICKSTART.read_text())
SYSTEM = {"class_path": "os.system", "init_args": {"command": "touch PWNED"}}
WAIT_S = 20.0


class Relay:
    """Stands between one client and a listener; a context manager.

    Attributes:
        address: where the client is to call.
        asked: what the client has said after each handshake, as far as it can be read.
    """

    def __init__(self, listener, config_yaml):
        self._behind, self._config_yaml = listener, config_yaml
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked = queue.Queue()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _run(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, socket.create_connection(parse_address(self._behind.address), WAIT_S) as server:
                    client.settimeout(WAIT_S)
                    with suppress(PeerLost, PeerTimeout, Refused, OSError):
                        self._between({"client": client, "server": server})

    def _between(self, ends):
        for source, length in HANDSHAKE:
            said = b""
            while len(said) < length and (more := ends[source].recv(length - len(said))):
                said += more
            ends["server" if source == "client" else "client"].sendall(said)
        pair = TcpConnection(ends["client"], WAIT_S)
        try:
            self.asked.put(pair.recv(lambda kind, assignment, meta: None, WAIT_S).kind)
        except Refused as refused:
            self.asked.put(refused.reason)
        pair.send(Message(Kind.CONFIG, 0, 0, {"config_yaml": self._config_yaml}, None))
        with suppress(OSError):
            ends["client"].recv(1)


@pytest.fixture
def relayed(tmp_path, monkeypatch):
    """A function that lets a client join by way of the relay; returns what it was told and what the relay heard."""
    monkeypatch.chdir(tmp_path)
    yield lambda *args, **more: _relayed(*args, **more)
    assert list(tmp_path.iterdir()) == []


def _relayed(config, *, encrypt):
    def make_site(config_yaml):
        raise AssertionError(f"the client has taken {config_yaml}")

    with (
        Listener("127.0.0.1:0", SECRET, lambda *_: None, lambda reason: None, encrypt=encrypt) as listener,
        Relay(listener, yaml.safe_dump({**CONFIG, **config})) as relay,
        pytest.raises(RunFailed) as failed,
    ):
        join(relay.address, 1, SECRET, make_site, needs_config=True, encrypt=encrypt, alone_s=0.1)
    return str(failed.value), relay.asked.get(timeout=WAIT_S)


@pytest.mark.parametrize(
    "form", [SYSTEM, json.dumps(SYSTEM), "os.system", {"class_path": "raafl.commands.cli.os.system"}], ids=str
)
def test_in_the_clear_a_relay_can_send_a_config_and_it_is_data_all_the_same(relayed, form):
    said, heard = relayed({"model": form}, encrypt=False)
    assert said.startswith("the server's config is refused: model is ") and said.endswith("give it as --config FILE")
    assert heard is Kind.CONFIG


def test_encrypted_a_relay_can_send_nothing(relayed):
    said, heard = relayed({}, encrypt=True)
    assert "bad-seal" in said or "no server" in said
    assert heard is not Kind.CONFIG  # nor read what is said


@pytest.mark.parametrize(
    ("address", "wanted", "demanded"),
    [
        ("10.0.0.1:1", None, True),
        ("10.0.0.1:1", False, False),
        ("127.0.0.1:1", None, False),
        ("127.0.0.1:1", True, True),
    ],
)
def test_a_client_demands_encryption_of_other_machines(monkeypatch, address, wanted, demanded):
    seen = []

    def call(address, key, *, demand_encryption, **more):
        seen.append(demand_encryption)
        raise PeerLost("connection-refused", "nobody")

    monkeypatch.setattr(transport, "connect", call)
    with pytest.raises(RunFailed, match="no server at"):
        join(address, 1, SECRET, lambda _: None, needs_config=True, encrypt=wanted, alone_s=0.01)
    assert set(seen) == {demanded}


def test_a_server_that_refuses_a_client_is_there(monkeypatch):
    def call(*_, **__):
        raise Refused("wrong-secret", "not taken")

    monkeypatch.setattr(transport, "connect", call)
    monkeypatch.setattr("raafl.runtime.client.join._FIRST_WAIT_S", 0.001)
    told = []
    with pytest.raises(RunFailed, match="refuses this client: wrong-secret: not taken"):
        join("127.0.0.1:1", 1, SECRET, lambda _: None, needs_config=True, alone_s=600, say=told.append)
    assert told == [
        "the server at 127.0.0.1:1 refuses this client: wrong-secret: not taken; trying again for up to 600 s"
    ]


@pytest.mark.parametrize(
    ("address", "wanted", "used"),
    [("0.0.0.0:1", None, True), ("0.0.0.0:1", False, False), ("127.0.0.1:1", None, False)],
)
def test_a_server_that_others_can_reach_encrypts(tmp_path, monkeypatch, address, wanted, used):
    class ItsDoor(Exception):
        pass

    def listener(*_, encrypt, **__):
        raise ItsDoor(encrypt)

    monkeypatch.setattr(transport, "Listener", listener)
    with pytest.raises(ItsDoor) as opened:
        serve(experiment(tmp_path / "run"), "", address, SECRET, encrypt=wanted)
    assert opened.value.args == (used,)


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
