"""The first Ctrl-C asks, its echo is ignored, a later one insists; afterwards signals are as they were."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from raafl.runtime import interrupt
from raafl.runtime.interrupt import Interrupt


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(interrupt.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks(number, clock):
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with Interrupt() as asked:
        assert not asked.asked
        os.kill(os.getpid(), number)
        assert asked.asked
        clock.now += 1.0
        os.kill(os.getpid(), number)  # an echo of the first
        clock.now += 2.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert {n: signal.getsignal(n) for n in before} == before


def test_signals_are_as_they_were_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), Interrupt():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_it_does_nothing():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter():
        with Interrupt() as asked:
            seen.append((asked.asked, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    assert seen == [(False, before)]
