"""Which faults, to whom, in which order: all of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

EARLY = {
    "kill client": 6.0,  # SIGKILL
    "pause client": 1.0,  # SIGSTOP, for less than the deadline of a task
    "stall client": 0.7,  # SIGSTOP, for more
    "reset": 1.5,  # the connection, by RST
    "hang up": 1.0,  # the connection, by FIN
    "delay": 0.8,  # each chunk of a connection, both ways
    "throttle": 0.8,  # a connection
    "hold": 0.7,  # nothing passes for longer than every deadline: a half-open connection
    "corrupt up": 1.5,  # one bit of what a client sends
    "corrupt down": 1.5,  # one bit of what the server sends
    "twin": 0.7,  # a second client with the id of one that is there
    "wrong credentials": 0.3,  # a client with another token, or of another authority
    "garbage": 0.7,  # a caller that is no raafl
    "silent caller": 0.5,  # callers that connect and say nothing
}
"""Faults that the server lives through, with how often each comes."""

LATE = {
    **EARLY,
    "kill client": 14.0,
    "kill server": 1.5,  # SIGKILL; it goes on from its last checkpoint
    "pause server": 0.5,  # SIGSTOP, for less than a client's patience
    "stall server": 0.4,  # SIGSTOP, for more
    "vanish": 0.5,  # SIGKILL to every client at once
}
"""Faults of the rest of the run."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: a key of `LATE`.
        client: whom it concerns, where it concerns one.
        share: from 0 to 1: where in its kind's range of durations or strengths it lies.
        gap: until the next fault, over the mean.
    """

    kind: str
    client: int
    share: float
    gap: float


def script(seed: int, num_clients: int) -> Iterator[Fault]:
    """Faults for ever: every client dies, each early kind once, every client dies again; then every late kind once, then any.

    The server is the same process up to the second time that all clients vanish, so that what it holds on to can be compared.
    """
    random_ = random.Random(seed)

    def fault(kind: str) -> Fault:
        return Fault(kind, random_.randint(1, num_clients), random_.random(), random_.uniform(0.5, 1.5))

    def once(kinds: list[str]) -> list[Fault]:
        random_.shuffle(kinds)
        return [fault(kind) for kind in kinds]

    yield from [fault("vanish"), *once(list(EARLY)), fault("vanish"), *once(sorted(LATE.keys() - EARLY.keys()))]
    while True:
        yield fault(random_.choices(list(LATE), list(LATE.values()))[0])
