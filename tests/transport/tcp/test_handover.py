"""Sockets that one process accepts and another one uses."""

from __future__ import annotations

import hashlib
import socket

import pytest

from raafl.sites.hosted_runs import HostedRun
from raafl.transport import PeerLost, Refused
from raafl.transport.tcp.handover import (
    PASSED,
    PassedSockets,
    asked_run,
    digest_of,
    inherited_socket,
    passing,
    preamble,
)
from raafl.transport.tcp.stream import SocketStream, TimeBudget, block


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, SocketStream(theirs, TimeBudget(1.0), 0)


def test_a_run_is_named_by_a_digest_which_does_not_show_its_name():
    made = preamble("north-1")
    assert made == b"RAFR\1\0\0\0" + hashlib.sha256(b"raafl run\0north-1").digest()
    assert digest_of("north-1") == made[8:]


def test_what_follows_the_preamble_stays_in_the_socket(pair):
    ours, stream = pair
    ours.sendall(preamble("a") + b"\x16tls")
    assert block(asked_run(stream)) == digest_of("a")
    assert stream.sock.recv(9) == b"\x16tls"


def test_a_caller_that_begins_with_tls_asks_for_no_run(pair):
    ours, stream = pair
    ours.sendall(b"\x16\x03\x01")
    assert block(asked_run(stream)) is None and stream.sock.recv(9) == b"\x16\x03\x01"


@pytest.mark.parametrize("head", [b"RAFR\2\0\0\0", b"RAJN\1\0\0\0"])
def test_another_version_is_refused(pair, head):
    ours, stream = pair
    ours.sendall(head + bytes(32))
    with pytest.raises(Refused, match="bad-version"):
        block(asked_run(stream))


def test_a_caller_that_leaves_in_the_middle_is_gone(pair):
    ours, stream = pair
    ours.sendall(preamble("a")[:39])
    ours.close()
    with pytest.raises(PeerLost):
        block(asked_run(stream))


@pytest.mark.parametrize("folder", ["s", "a-long-folder-" * 15])
def test_a_connection_is_passed_to_whoever_receives_there(tmp_path, folder):
    (tmp_path / folder).mkdir()
    run = HostedRun(tmp_path / folder, "a")
    run.ask_first()
    path = tmp_path / folder / ".raafl/a/socket"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as caller:
            accepted, where = listener.accept()
            with accepted:
                assert not run.pass_on(accepted), "nobody receives there"
                with run.receiving() as made, inherited_socket(made.detach()) as receiver:
                    assert isinstance(receiver, PassedSockets)
                    receiver.setblocking(False)
                    with pytest.raises(BlockingIOError):
                        receiver.accept()
                    assert run.pass_on(accepted)
                    accepted.close()
                    connection, peer = receiver.accept()
                    with connection:
                        assert peer == where
                        caller.sendall(b"hello")
                        assert connection.recv(9) == b"hello"
                assert not path.exists()


def test_a_message_without_a_socket_is_no_connection(tmp_path):
    run = HostedRun(tmp_path, "a")
    run.ask_first()
    with run.receiving() as made, inherited_socket(made.detach()) as receiver:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"x", str(tmp_path / ".raafl/a/socket"))
        with pytest.raises(ConnectionAbortedError):
            receiver.accept()


def test_a_plain_socket_that_does_not_listen_is_refused():
    with socket.socket() as made, pytest.raises(OSError, match="does not listen"):
        inherited_socket(made.detach())


@pytest.mark.parametrize(
    "result, told",
    [(True, "passed"), (False, "stopped"), (Refused("no-run", "none"), "no-run"), (BlockingIOError, "busy")],
)
def test_what_a_caller_is_told(pair, monkeypatch, result, told):
    monkeypatch.setattr("raafl.transport.tcp.handover._PATIENCE_S", 0.05)
    ours, stream = pair
    ours.sendall(preamble("a"))

    def pass_it(connection, digest):
        assert connection is stream.sock and digest == digest_of("a")
        if isinstance(result, bool):
            return result
        raise result

    found = block(passing(stream, pass_it))
    assert found.reason == told and (found is PASSED) == (result is True)
