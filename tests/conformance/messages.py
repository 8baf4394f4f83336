"""Messages between two ends, for the tests of transports."""

from __future__ import annotations

import torch

from raafl.submodel.flat import FlatTensors
from raafl.transport import Kind, Message
from raafl.transport.frames import CHUNK_BYTES
from tests.conformance.transports import WAIT_S

CHUNK = CHUNK_BYTES // 4  # float32 elements


def flat(**tensors):
    return FlatTensors.from_named(tensors)


def random_flat(numel):
    return flat(w=torch.randn(numel, generator=torch.Generator().manual_seed(numel)))


def nothing(kind, assignment, meta):
    return None


def into(target):
    return lambda kind, assignment, meta: target


def exchange(pool, sender, receiver, message, expect=nothing, **more):
    sent = pool.submit(sender.send, message)
    try:
        received = receiver.recv(expect, WAIT_S, **more)
    finally:
        assert sent.result(WAIT_S) == receiver.received_bytes
    return received


def still_works(pool, sender, receiver):
    tensors = random_flat(10)
    target = FlatTensors.zeros(tensors.layout)
    got = exchange(pool, sender, receiver, Message(Kind.UPDATE, 77, 0, {"again": 1}, tensors), into(target))
    assert (got.assignment, got.meta) == (77, {"again": 1}) and target.fingerprint() == tensors.fingerprint()
