"""Which runs a site takes, and how many at once, with shell scripts in the place of clients."""

from __future__ import annotations

import os
import signal
import threading
import time
from argparse import Namespace

import pytest

from raafl.commands import join_any
from raafl.commands.join_any import Clients, free_memory, most_memory
from raafl.errors import RunFailed
from raafl.runtime.supervisor import Child, RestartPolicy
from raafl.transport import PeerLost

# What a client does, by the name of its run: ends well, waits for another one beside it, is refused, has bad options, is killed
# twice, or works until it is told to leave.
CLIENT = """#!/bin/sh
while [ "$1" != --run ]; do shift; done
trap 'echo "$2 leaves" >> {log}; exit 130' INT
echo "$2 $LOCAL_RANK/$LOCAL_WORLD_SIZE begins" >> {log}
case $2 in
  good*) sleep 0.1 ;;
  pair*) until [ "$(grep -c '^pair.*begins' {log})" -ge 2 ]; do sleep 0.02; done ;;
  refused) exit 1 ;;
  bad) exit 2 ;;
  killed) [ "$(grep -c killed {log})" -gt 2 ] || kill -9 $$ ;;
  long*) while true; do sleep 0.02; done ;;
esac
echo "$2 ends" >> {log}
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    client, log = tmp_path / "client", tmp_path / "log"
    client.write_text(CLIENT.format(log=log))
    client.chmod(0o755)
    monkeypatch.setattr(join_any.sys, "executable", str(client))
    monkeypatch.setattr(join_any, "_TICK_S", 0.01)
    monkeypatch.setattr(join_any, "_ASK_S", 0.02)

    def work(*runs, at_once=1, idle_s=0.5, **options):
        own = Namespace(address="h:1", client=1, at_once=at_once, idle_s=idle_s)
        rows = [{"run": run, "id": f"id-{number}", "state": "running"} for number, run in enumerate(runs)]
        policy = RestartPolicy(first_s=0.01, longest_s=0.02, stop_s=5.0)
        code = Clients(own, ["--client", "1"], lambda: rows, policy, **options).work()
        return code, log.read_text().splitlines() if log.exists() else []

    return work


def test_runs_are_taken_one_after_the_other_and_each_once(site):
    code, log = site("good-1", "good-2")
    assert code == 0 and log == ["good-1 / begins", "good-1 ends", "good-2 / begins", "good-2 ends"]


def test_a_run_that_is_refused_is_left_and_a_killed_client_is_started_again(site, caplog):
    caplog.set_level("INFO")
    code, log = site("refused", "bad", "killed")
    began = [line.split()[0] for line in log if line.endswith("begins")]
    assert code == 0 and began == ["refused", "refused", "bad", "killed", "killed", "killed"]
    assert "run 'refused' is left: its client ended with exit code 1" in caplog.text
    assert "run 'killed' has ended" in caplog.text


def test_several_at_once_share_the_machine(site):
    code, log = site("pair-1", "pair-2", "good", at_once=2)
    assert code == 0 and log[:2] == ["pair-1 0/2 begins", "pair-2 1/2 begins"]
    assert next(line for line in log if line.startswith("good")).endswith("/2 begins")


def test_no_other_client_is_started_without_memory_for_it(site, monkeypatch):
    monkeypatch.setattr(join_any, "most_memory", lambda child: 100)
    assert site("good-1", "good-2", at_once=2, free_bytes=lambda: 109.0)[1][1] == "good-1 ends"


def test_a_signal_lets_clients_leave(site, tmp_path):
    def end():
        while not (tmp_path / "log").exists() or (tmp_path / "log").read_text().count("begins") < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    code, log = site("long-1", "long-2", at_once=2, idle_s=None)
    thread.join()
    assert code == 130 and {*log[2:]} == {"long-1 leaves", "long-2 leaves"}


def test_a_server_that_stays_away_ends_it(site, monkeypatch, caplog):
    monkeypatch.setattr(join_any, "_ALONE_S", 0.05)

    def gone():
        raise PeerLost("connection-refused", "nothing listens")

    own = Namespace(address="h:1", client=1, at_once=1, idle_s=None)
    with pytest.raises(RunFailed, match="no server for many runs answered at h:1"):
        Clients(own, [], gone).work()


def test_memory_of_processes(tmp_path):
    assert free_memory() > 1e6
    child = Child("a client", lambda: ["sleep", "30"], {})
    assert most_memory(child) == 0
    child.start()
    try:
        while most_memory(child) < 1e5:  # until it is `sleep`
            time.sleep(0.01)
        assert most_memory(child) < 1e9
    finally:
        child.send(signal.SIGKILL)
        child.process.wait()
    assert most_memory(child) == 0
