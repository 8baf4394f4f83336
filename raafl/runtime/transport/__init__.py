"""The wire: frames, and pairs that carry them. Nothing received is executed or evaluated."""

from __future__ import annotations

from raafl.runtime.transport.cipher import RecordCipher
from raafl.runtime.transport.codec import GIVEN_UP, Expect, Kind, Message, Refused
from raafl.runtime.transport.gloo import GlooPair
from raafl.runtime.transport.handshake import ClientKey, Secret, load_secret
from raafl.runtime.transport.listener import Listener, call, parse_address
from raafl.runtime.transport.nccl import NcclPair, connect
from raafl.runtime.transport.pair import Pair, PeerLost, PeerTimeout
from raafl.runtime.transport.tcp import TcpPair

__all__ = [
    "GIVEN_UP",
    "ClientKey",
    "Expect",
    "GlooPair",
    "Kind",
    "Listener",
    "Message",
    "NcclPair",
    "Pair",
    "PeerLost",
    "PeerTimeout",
    "RecordCipher",
    "Refused",
    "Secret",
    "TcpPair",
    "call",
    "connect",
    "load_secret",
    "parse_address",
]
