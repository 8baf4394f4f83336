"""Every byte of a connection is counted, also of a message that is refused."""

from __future__ import annotations

import socket

import pytest
import torch

from raafl.sites.gate import MeteredConnection
from raafl.submodel import FlatTensors
from raafl.transport import Kind, Message, PeerLost, Refused
from raafl.transport.tcp.connection import TcpConnection


def refuse(kind, assignment, meta):
    raise Refused("too-large", "")


def test_messages_are_counted_both_ways_and_refused_ones_too():
    ours, theirs = socket.socketpair()
    moved = []
    pair, other = MeteredConnection(TcpConnection(ours, 5.0), moved.append), TcpConnection(theirs, 5.0)
    try:
        sent = pair.send(Message(Kind.HELLO, meta={"a": 1}))
        other.recv(lambda *_: None, 5.0)
        assert sum(moved) == sent == other.received_bytes
        moved.clear()
        tensors = FlatTensors.from_named({"w": torch.zeros(1000)})
        assert other.send(Message(Kind.ASSIGN, 1, tensors=tensors)) > 4000
        with pytest.raises(Refused):
            pair.recv(refuse, 5.0)
        assert moved == [pair.received_bytes] and moved[0] > 4000
        moved.clear()
        whole = pair.send(Message(Kind.UPDATE, 1, tensors=tensors))
        assert moved == [4000, whole - 4000]  # the tensors before they are sent
        assert not pair.closed
        other.close()
        with pytest.raises(PeerLost):
            pair.recv(refuse, 5.0)
        assert pair.closed
    finally:
        pair.close()
        other.close()
