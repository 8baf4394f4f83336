from __future__ import annotations

import threading

import torch

from raafl.runtime.overlap import Sender
from raafl.submodel import FlatTensors

WAIT_S = 30.0


def test_updates_are_sent_one_after_the_other_from_storage_of_their_own():
    errors, sent, go = [], [], threading.Event()
    sender = Sender(errors.append)
    trained = FlatTensors.from_named({"w": torch.ones(3)})
    copied = sender.copy(trained)
    trained["w"].fill_(2.0)  # the next task trains in the same place

    def send():
        assert go.wait(WAIT_S)
        sent.append(copied["w"].tolist())

    sender.start(send)
    assert sender.is_busy
    sender.wait(0.01)
    assert sender.is_busy and not sent
    go.set()
    sender.wait()
    assert not sender.is_busy and sent == [[1.0] * 3] and not errors
    assert sender.copy(trained) is copied  # the last one is sent: its storage is used again
    other = FlatTensors.from_named({"v": torch.ones(2)})
    assert sender.copy(other).layout == other.layout


def test_an_error_of_the_sending_thread_is_passed_on():
    errors = []
    sender = Sender(errors.append)
    sender.start(lambda: 1 // 0)
    sender.wait()
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_there_is_nothing_to_wait_for_before_the_first():
    sender = Sender([].append)
    sender.wait()
    assert not sender.is_busy
