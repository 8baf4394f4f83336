"""A supervisor over stand-in ranks: who is started again, what a signal does, and that nobody is left."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from raafl.runtime.supervisor import exit_in_words
from tests.helpers import stand_in_ranks

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(sys.platform != "linux", reason="orphans are killed by Linux"),
]
FOR_EVER = "until(lambda: False)"
LOST = "until(lambda: 'ready' in lines('the-server')); sys.exit(2)"
LEAVES = "signals('SIGTERM'); until(lambda: lines('the-server')[-1:] == ['end'])"


@pytest.fixture
def run(tmp_path):
    """Supervise a plan in this process: (exit code, what was said)."""

    def supervise(server, *clients, **plan):
        said: list[str] = []
        made = stand_in_ranks.supervisor(tmp_path, {"server": server, "clients": clients, **plan}, said.append)
        code = made.run()
        wait_for(lambda: not running(tmp_path), "all children to be gone")  # whom init has to reap may take a moment
        return code, said

    return supervise


@pytest.fixture
def started(tmp_path):
    """Start a supervisor as a process of its own, in a session of its own."""
    processes = []

    def start(server, *clients, terminal=None, **plan):
        file = tmp_path / "plan.json"
        file.write_text(json.dumps({"server": server, "clients": clients, **plan}))
        process = subprocess.Popen(
            [sys.executable, stand_in_ranks.__file__, str(tmp_path), str(file)],
            start_new_session=terminal is None,
            stdin=terminal,
            stdout=terminal or subprocess.PIPE,
            stderr=terminal or subprocess.PIPE,
            text=True,
            preexec_fn=None if terminal is None else lambda: os.login_tty(terminal),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def noted(folder: Path, name: str) -> list[str]:
    file = folder / name
    return file.read_text().splitlines() if file.exists() else []


def pids(folder: Path) -> list[int]:
    names = [file.name for file in folder.iterdir() if file.name.startswith(("the-server", "client-"))]
    return [int(line.split()[1]) for name in names for line in noted(folder, name) if line.startswith("pid ")]


def running(folder: Path) -> list[int]:
    alive = []
    for pid in pids(folder):
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
        except psutil.NoSuchProcess:
            continue
    return alive


def wait_for(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


# ---- the ends of a run ----


@pytest.mark.quick_cases("1")
@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_the_servers_exit_code_is_the_runs(code, run, tmp_path):
    assert run(f"until(lambda: lines('client-1')); note('end'); sys.exit({code})", LEAVES) == (code, [])


def test_the_servers_output_goes_where_the_supervisors_goes_and_a_clients_into_its_log(run, tmp_path, capfd):
    leaves = "print('of a client', flush=True); note('ready'); until(lambda: lines('the-server')[-1:] == ['end'])"
    server = "until(lambda: 'ready' in lines('client-1')); print('of the server'); note('end')"
    assert run(server, leaves) == (0, [])
    assert capfd.readouterr().out == "of the server\n"
    assert (tmp_path / "log-1").read_text() == "of a client\n"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_client_that_does_not_leave_is_killed(stopped, run, tmp_path):
    """It had SIGTERM before, unless it was stopped and could not take it."""
    patience = {"leave_s": 0.1, "stop_s": 0.5 if stopped else 5.0}
    server = "until(lambda: 'deaf' in lines('client-1'))"
    deaf = "signals('SIGTERM'); note('deaf'); "
    if stopped:
        server += "; until(lambda: state(lines('client-1')[0]) == 'T')"
        deaf += "os.kill(os.getpid(), signal.SIGSTOP); "
    code, _ = run(server, deaf + FOR_EVER, policy=patience)
    assert code == 0
    assert noted(tmp_path, "client-1")[1:] == (["deaf"] if stopped else ["deaf", "SIGTERM"])


def test_what_a_rank_has_started_ends_with_it(run, tmp_path):
    """A child forked by the client notes its own number; the client then fails, and its child would live for ever."""
    forks = f"os.fork() or (note(f'pid {{os.getpid()}}'), {FOR_EVER}); until(lambda: len(lines('client-1')) > 1); die()"
    server = "until(lambda: len(lines('client-1')) >= 4)"
    assert run(server, forks, policy={"leave_s": 0.1})[0] == 0
    assert len(pids(tmp_path)) >= 5


# ---- starting again ----


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize("death, told", [("die()", "was killed by SIGKILL"), ("print('raafl: oh'); sys.exit(1)", "oh")])
def test_a_client_that_dies_is_started_again(death, told, run, tmp_path):
    server = "until(lambda: len(lines('client-1')) == 3); note('end')"
    code, said = run(server, f"if len(lines('client-1')) < 3: {death}\n{LEAVES}")
    assert code == 0
    assert len(said) == 2
    assert all(line.startswith("client 1 ") and told in line and "started again in 0.0" in line for line in said)


def test_the_wait_doubles_up_to_the_longest_and_begins_anew_after_a_sound_life(tmp_path):
    from raafl.runtime.supervisor import Child, RestartPolicy

    child = Child("client 1", lambda: ["true"], {})
    policy = RestartPolicy(first_s=1.0, longest_s=5.0, sound_s=60.0)
    child._started_s = time.monotonic()
    assert [child.start_again(policy) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    child._started_s -= 61
    assert child.start_again(policy) == 1.0


def test_after_the_last_restart_a_client_stays_away_and_the_run_goes_on(run, tmp_path):
    failing = "print('line one\\nline two', flush=True); die()"
    server = "until(lambda: len(lines('client-1')) == 3 and gone(lines('client-1')[2])); note('end')"
    code, said = run(server, failing, LEAVES, policy={"max_restarts": 2})
    assert code == 0
    assert len(noted(tmp_path, "client-1")) == 3
    assert said[2:] == [
        "client 1 was killed by SIGKILL and is not started again after 2 restarts in all. The end of its output:",
        "\n".join(["  line one", "  line two"] * 3),
    ]


@pytest.mark.quick_cases("2")
@pytest.mark.parametrize("code", [2, 130])
def test_bad_input_and_an_interrupt_are_not_mended_by_another_start(code, run, tmp_path):
    server = "until(lambda: lines('client-1')); until(lambda: gone(lines('client-1')[0])); note('end')"
    assert run(server, f"sys.exit({code})", LEAVES)[0] == 0
    assert len(noted(tmp_path, "client-1")) == 1


def test_a_client_without_which_the_run_cannot_start_ends_it_with_its_last_lines(run, tmp_path):
    server = (
        "signals('SIGTERM'); note('ready'); until(lambda: 'SIGTERM' in lines('the-server')); note('end'); sys.exit(130)"
    )
    dies = "until(lambda: 'ready' in lines('the-server')); print('no disk here', flush=True); sys.exit(1)"
    code, said = run(server, LEAVES, dies, joined=[1], needed=2)
    assert code == 1 and len(pids(tmp_path)) == 3
    assert said == [
        "client 2 ended with exit code 1 and is not started again. The end of its output:",
        "  no disk here",
        "the run cannot start without client 2: it ends",
    ]


def test_a_run_that_starts_without_it_goes_on_and_starts_it_again(run, tmp_path):
    server = "until(lambda: len(lines('client-2')) == 2); note('end')"
    twice = "until(lambda: len(lines('client-2')) == 2 or sys.exit(1)); " + LEAVES
    code, said = run(server, LEAVES, twice, joined=[1], needed=1)
    assert code == 0 and said == ["client 2 ended with exit code 1; it is started again in 0.02 s"]


def test_a_run_whose_clients_are_all_lost_fails(run, tmp_path):
    server = "signals('SIGTERM'); note('ready'); until(lambda: 'SIGTERM' in lines('the-server')); sys.exit(130)"
    code, said = run(server, LOST, LOST)
    assert code == 1
    assert said[-1] == "every client is lost: the run ends"


def test_a_server_that_does_not_end_when_all_clients_are_lost_is_killed(run, tmp_path):
    code, said = run("signals('SIGTERM'); note('ready'); " + FOR_EVER, LOST, policy={"stop_s": 0.3})
    assert code == 1
    assert said[-1] == "every client is lost: the run ends"
    assert len(pids(tmp_path)) == 2


def test_clients_that_find_bad_input_do_not_speak_before_the_server(run, tmp_path):
    """They read the same config; what is wrong with it is said once."""
    server = "until(lambda: lines('client-1') and gone(lines('client-1')[0])); sys.exit(2)"
    assert run(server, "sys.exit(2)", "sys.exit(2)", watch_begun=True) == (2, [])


def test_a_server_that_is_killed_is_started_again_and_so_is_a_client_that_it_had_let_go(run, tmp_path):
    server = """
if len(lines('the-server')) == 1:
    until(lambda: 'let go' in lines('client-1'))
    until(lambda: gone(lines('client-1')[0]))
    die()
until(lambda: len(lines('client-1')) > 2)
note('end')
"""
    client = "note('let go')\nif len(lines('client-1')) > 2: " + LEAVES
    code, said = run(server, client, LEAVES)
    assert code == 0
    assert said == [
        "the server was killed by SIGKILL; it is started again in 0.02 s, from its last checkpoint if there is one"
    ]
    assert len(noted(tmp_path, "client-1")) == 3 + 1
    assert len(noted(tmp_path, "client-2")) == 1


def test_a_server_that_is_killed_too_often_fails_the_run(run, tmp_path):
    code, said = run("die()", FOR_EVER, policy={"max_restarts": 2, "leave_s": 0.1})
    assert code == 1
    assert len(noted(tmp_path, "the-server")) == 3
    assert said[-1] == "the server was killed by SIGKILL and is not started again after 2 restarts"


def test_fates_in_words():
    assert exit_in_words(-9) == "was killed by SIGKILL"
    assert exit_in_words(-64) == "was killed by SIGRTMAX" or exit_in_words(-64) == "was killed by signal 64"
    assert (
        exit_in_words(1, ["raafl: client 1: the server is gone"])
        == "ended with exit code 1: client 1: the server is gone"
    )


# ---- signals ----

SERVER = """
signals('SIGINT', 'SIGTERM', 'SIGHUP')
note('ready')
until(lambda: len([line for line in lines('the-server') if line.startswith('SIG')]) >= {num})
note('end')
sys.exit(130)
"""
CLIENT = "signals('SIGINT', 'SIGHUP'); note('ready'); until(lambda: lines('the-server')[-1:] == ['end'])"


def ready(folder: Path) -> None:
    wait_for(lambda: all("ready" in noted(folder, name) for name in ("the-server", "client-1")), "the ranks")


def got(folder: Path, name: str) -> list[str]:
    return [line for line in noted(folder, name) if line.startswith("SIG")]


@pytest.mark.parametrize("number, passed_on", [("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM")])
def test_a_signal_goes_to_the_server_alone(number, passed_on, started, tmp_path):
    process = started(SERVER.format(num=1), CLIENT)
    ready(tmp_path)
    process.send_signal(getattr(signal, number))
    assert process.wait(60) == 130
    assert (got(tmp_path, "the-server"), got(tmp_path, "client-1")) == ([passed_on], [])
    assert not running(tmp_path)


def test_ctrl_c_in_a_terminal_reaches_the_server_once_and_no_client(started, tmp_path):
    ours, theirs = pty.openpty()
    process = started(SERVER.format(num=2), CLIENT, terminal=theirs)
    ready(tmp_path)
    os.write(ours, b"\x03")
    wait_for(lambda: got(tmp_path, "the-server"), "the first Ctrl-C")
    assert got(tmp_path, "the-server") == ["SIGINT"]
    os.write(ours, b"\x03")
    assert process.wait(60) == 130
    os.close(ours)
    os.close(theirs)
    assert (got(tmp_path, "the-server"), got(tmp_path, "client-1")) == (["SIGINT"] * 2, [])


def test_a_server_that_does_not_heed_the_second_ctrl_c_is_killed(started, tmp_path):
    process = started(SERVER.format(num=99), "note('ready'); " + FOR_EVER, policy={"stop_s": 0.5})
    ready(tmp_path)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: got(tmp_path, "the-server"), "the signal")  # else two alike are one
    process.send_signal(signal.SIGINT)  # the server may be killed before it can note this one
    assert process.wait(60) == 130
    assert not running(tmp_path)


def test_a_third_ctrl_c_kills_at_once(started, tmp_path):
    process = started(SERVER.format(num=99), "signals('SIGTERM'); note('ready'); " + FOR_EVER, policy={"stop_s": 600.0})
    ready(tmp_path)
    for count in (1, 2):
        process.send_signal(signal.SIGINT)
        wait_for(lambda: len(got(tmp_path, "the-server")) >= count, "the signal")  # noqa: B023
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "SIGTERM" in noted(tmp_path, "client-1"), "the supervisor to end the clients")
    process.send_signal(signal.SIGINT)  # insists once more, or it would be patient with the client
    assert process.wait(60) == 130
    assert not running(tmp_path)


def test_a_job_that_is_stopped_stops_and_goes_on_with_its_ranks(started, tmp_path):
    process = started(SERVER.format(num=1), CLIENT)
    ready(tmp_path)
    everyone = [psutil.Process(pid) for pid in (process.pid, *pids(tmp_path))]
    process.send_signal(signal.SIGTSTP)
    wait_for(lambda: all(p.status() == psutil.STATUS_STOPPED for p in everyone), "all to stop")
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: all(p.status() != psutil.STATUS_STOPPED for p in everyone), "all to go on")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


def test_a_supervisor_that_is_killed_leaves_no_orphan(started, tmp_path):
    process = started(SERVER.format(num=99), "signals('SIGTERM'); note('ready'); " + FOR_EVER)
    ready(tmp_path)
    assert len(running(tmp_path)) == 2
    process.kill()
    wait_for(lambda: not running(tmp_path), "the ranks to die")
