"""Clients that `fit(local=N)` starts, and that end before they have joined."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from raafl.api.local_clients import _Starting
from raafl.core.types import ClientInfo, Joined


def started(*programs: str) -> list[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-S", "-E", "-c"]
    return [
        subprocess.Popen([*argv, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE)
        for program in programs
    ]


@pytest.fixture
def stays():
    """A program that goes on until its input ends."""
    return "import sys; sys.stdin.read()"


def end(process: subprocess.Popen[bytes]) -> None:
    process.stdin.close()
    process.wait(20)


def until_asked(watch: _Starting) -> str:
    deadline = time.monotonic() + 20
    while (why := watch.stop_asked()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return why


def test_a_client_that_dies_at_its_start_ends_the_run_with_its_last_lines(stays, capfd, caplog):
    processes = started(stays, "import sys; print('reading'); sys.exit('no disk here')")
    watch = _Starting(processes)
    with caplog.at_level(logging.WARNING):
        assert until_asked(watch) == "failed: client 2 ended with exit code 1 before it joined: no disk here"
    (line,) = [record.message for record in caplog.records]
    assert line == "client 2 ended with exit code 1 before it joined. The end of its output:\n  reading\n  no disk here"
    assert "no disk here" in capfd.readouterr().err  # as it came
    end(processes[0])


def test_one_that_ends_without_a_word_is_named_too(stays, caplog):
    processes = started("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", stays)
    watch = _Starting(processes)
    assert until_asked(watch) == "failed: client 1 was killed by SIGKILL before it joined"
    assert caplog.records[-1].message.endswith("The end of its output:\n  (nothing)")
    end(processes[1])


def test_one_that_has_joined_is_the_servers_to_see_to(stays):
    processes = started("", stays)
    watch = _Starting(processes)
    watch.on_event(Joined(ClientInfo(1, 5)), SimpleNamespace(), 0.0)
    processes[0].wait()
    assert watch.stop_asked() is None
    end(processes[1])
