"""The wire: frames, and pairs that carry them. Nothing received is executed or evaluated."""

from __future__ import annotations

from raafl.runtime.transport.codec import Expect, Kind, Message, Refused
from raafl.runtime.transport.gloo import GlooPair
from raafl.runtime.transport.nccl import NcclPair, connect
from raafl.runtime.transport.pair import Pair, PeerLost, PeerTimeout

__all__ = ["Expect", "GlooPair", "Kind", "Message", "NcclPair", "Pair", "PeerLost", "PeerTimeout", "Refused", "connect"]
