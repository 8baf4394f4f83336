"""A listener with a client beside it, for its tests."""

from __future__ import annotations

import queue
import socket

from raafl.errors import parse_address
from raafl.transport.tcp.listener import Listener, connect
from tests.helpers.certificates import federation

WAIT_S = 30


class House:
    """A listener, what it admits and whom it turns away; over TLS unless it is given a token."""

    def __init__(self, address="127.0.0.1:0", admit=None, credentials=None, **more):
        self.admitted, self.refused = queue.Queue(), queue.Queue()
        self.credentials = credentials or federation().server
        self.theirs = credentials or federation().site()
        self.listener = Listener(address, self.credentials, admit or self.admit, self.refused.put, **more)
        self.pairs = []

    def admit(self, pair, peer):
        self.pairs.append(pair)
        self.admitted.put((pair, peer.client, peer.address))

    def call(self, client=1, credentials=None, **more):
        login = (credentials or self.theirs).client_login()
        return connect(self.listener.address, client, login, timeout_s=WAIT_S, **more)

    def reason(self):
        return self.refused.get(timeout=WAIT_S)

    def __enter__(self):
        self.listener.start()
        return self

    def __exit__(self, *error):
        self.listener.close()
        for pair in self.pairs:
            pair.close()


def nothing(kind, assignment, meta):
    return None


def raw(address):
    return socket.create_connection(parse_address(address), WAIT_S)


def all_bytes(sock):
    """Whatever comes until the other end hangs up, and whether it did so in an orderly way."""
    data = b""
    try:
        while more := sock.recv(4096):
            data += more
    except ConnectionResetError:
        return data, False
    return data, True
