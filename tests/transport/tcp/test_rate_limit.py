from __future__ import annotations

from raafl.transport.tcp.listener import TokenBucket


def test_some_turns_at_once_and_then_one_in_a_while():
    now = [100.0]
    turns = TokenBucket(3, 2.0, lambda: now[0])
    assert [turns.take(7) for _ in range(5)] == [True, True, True, False, False]
    assert turns.take(8) and not turns.has(7)  # each has its own
    now[0] += 1.9
    assert not turns.take(7)
    now[0] += 0.2
    assert turns.has(7) and turns.take(7) and not turns.take(7)
    now[0] += 1000.0
    assert [turns.take(7) for _ in range(4)] == [True, True, True, False]
