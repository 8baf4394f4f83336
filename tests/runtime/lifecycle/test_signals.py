"""The first signal asks, the second insists; on the command line that ends the process, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from raafl.commands.starting import Terminated, starting
from raafl.runtime.lifecycle import signals
from raafl.runtime.lifecycle.signals import Interrupt
from tests.helpers.forked_command import pending, wait_for

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(signals.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.mark.parametrize("first", BOTH)
@pytest.mark.parametrize("second", BOTH)
def test_the_first_signal_only_asks_and_the_second_insists(first, second, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before = {n: signal.getsignal(n) for n in BOTH}
    with Interrupt() as interrupted:
        assert not interrupted.asked
        os.kill(os.getpid(), first)
        assert interrupted.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
    assert {n: signal.getsignal(n) for n in before} == before


def test_under_torchrun_one_echo_of_the_first_is_let_pass(monkeypatch, clock):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    with Interrupt() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        clock.now += 1.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted.asked
        clock.now += 1.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_under_torchrun_a_late_second_is_no_echo(monkeypatch, clock):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    with Interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        clock.now += 6.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_one_within_another_is_the_same():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as outer:
        inner = Interrupt()
        with inner:
            os.kill(os.getpid(), signal.SIGINT)
            assert inner.asked
        assert outer.asked and inner.asked
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with Interrupt() as again:
        assert not again.asked


def test_signals_are_as_they_were_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), Interrupt():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_it_does_nothing():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter():
        with Interrupt() as interrupted:
            seen.append((interrupted.asked, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    assert seen == [(False, before)]


# ---- a command that starts ----


def test_sigterm_ends_what_starts_and_a_run_within_handles_it_itself():
    with pytest.raises(Terminated), starting():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with starting(), Interrupt() as interrupted:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted.asked
    with pytest.raises(Terminated), starting():  # after the run, again
        os.kill(os.getpid(), signal.SIGTERM)


def test_code_that_makes_another_error_of_it_ends_as_well():
    with pytest.raises(Terminated), starting():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            raise RecursionError("a module that is half imported") from None
    with pytest.raises(ValueError, match="other"), starting():
        raise ValueError("other")


def test_a_forked_child_of_what_starts_ends_by_sigterm():
    with starting():
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_ranks_of_torchrun_end_by_sigterm_as_ever(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with starting():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow("a process imports torch")
@pytest.mark.parametrize("command", ["simulate", "serve --address 127.0.0.1:0", "fit --local 2"])
def test_a_command_that_is_stopped_while_it_starts_says_so(command, tmp_path):
    argv = [*command.split(), "--config", "quickstart", "--output", str(tmp_path / "run")]
    process = subprocess.Popen([sys.executable, "-m", "raafl", *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def imports_torch():
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children())]
        return any("libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text() for pid in family)

    try:
        wait_for(imports_torch, "the import of torch")
        process.send_signal(signal.SIGTERM)
        since = time.monotonic()
        out = process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, b"raafl: stopped by SIGTERM while no run was under way\n")
    assert time.monotonic() - since < 9  # without the time that clients have to leave a run
    assert not (tmp_path / "run").exists()


# ---- a process that is nothing but a run ----

HANGING = """
import ctypes, multiprocessing, os, sys, time
from pathlib import Path
from raafl.runtime.lifecycle.signals import Interrupt, ends_process
from raafl.atomic_file import atomic_file

def hang_in_c():  # where no handler of Python's can run
    while True:
        ctypes.CDLL(None).sleep(100)

def child():
    time.sleep(100)

with ends_process(), Interrupt(on_insist=lambda: os.write(1, b"insisted\\n")) as interrupted:
    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    with atomic_file(Path(sys.argv[1])) as file:
        file.write(b"half")
        file.flush()
        os.write(1, b"%d\\n" % process.pid)
        hang_in_c()
"""


@pytest.mark.parametrize("second", BOTH)
def test_the_second_ends_a_process_that_hangs_with_its_children_and_files(second, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(tmp_path / "file")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        wait_for(lambda: not pending(process.pid, signal.SIGINT), "the taking of the first")  # else two alike are one
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)  # it is asked, but cannot hear
        process.send_signal(second)
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out == b"insisted\n"
    assert err == b"raafl: stopped at once, without a summary; --resume RUN goes on from the last checkpoint\n"
    assert psutil.wait_procs([child], timeout=30)[1] == []
    assert list(tmp_path.iterdir()) == []


FORKED = """
import os, signal, time
from raafl.runtime.lifecycle.signals import Interrupt, ends_process

with ends_process(), Interrupt() as interrupted:
    pid = os.fork()
    if pid == 0:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), interrupted.asked, flush=True)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_a_forked_child_neither_answers_ctrl_c_nor_tells_its_parent():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"{-signal.SIGTERM} False", "True"], done.stderr


def test_a_clean_up_that_hangs_holds_up_nothing(tmp_path):
    code = HANGING.replace('os.write(1, b"insisted\\n")', "time.sleep(1000)")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "file")], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.communicate()


def test_nothing_is_left_of_it():
    threads, files = threading.active_count(), psutil.Process().num_fds()
    with signals.ends_process(), Interrupt() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 30
        while not interrupted.asked and time.monotonic() < deadline:
            pass
        assert interrupted.asked
    assert threading.active_count() <= threads and psutil.Process().num_fds() <= files
