"""What systemd is told, over a real datagram socket, by the class and by the two commands of a service."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from raafl.runfolder import checkpoint_reader
from raafl.runtime.lifecycle.service_manager import ServiceManager
from tests.helpers.certificates import federation
from tests.helpers.forked_command import command, wait_for

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")


@pytest.fixture
def systemd(tmp_path):
    """A socket as systemd has it; a datagram that is not there yet raises BlockingIOError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def heard(listener):
    found = []
    while True:
        try:
            found.append(listener.recv(4096).decode())
        except BlockingIOError:
            return found


def test_each_state_is_one_datagram(tmp_path, systemd):
    now = [100.0]
    manager = ServiceManager(str(tmp_path / "notify"), watchdog_s=10.0, clock=lambda: now[0])
    manager.ready("works\nfor" + "x" * 1000)
    for now[0] in (100.0, 104.0, 105.0, 109.0, 110.0):  # a sign of life each 5 s, half the watchdog's time
        assert manager.stop_asked() is None
    manager.stopping()
    ready, *signs, last = heard(systemd)
    assert ready == "READY=1\nSTATUS=works for" + "x" * 191  # 200 characters, and no line that would be another state
    assert signs == ["WATCHDOG=1"] * 3
    assert last == "STOPPING=1"


def test_a_name_in_the_abstract_namespace_is_found():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0raafl-{os.getpid()}")
        listener.setblocking(False)
        ServiceManager.here({"NOTIFY_SOCKET": f"@raafl-{os.getpid()}"}).status("here")
        assert heard(listener) == ["STATUS=here"]


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/nowhere/notify"}, {"NOTIFY_SOCKET": "@"}])
def test_without_systemd_nothing_is_said_and_nothing_fails(environment):
    ServiceManager.here(environment | {"WATCHDOG_USEC": "1000"}).ready("here")
    ServiceManager.here(environment | {"WATCHDOG_USEC": "1000"}).stop_asked()


@pytest.mark.parametrize(
    "environment",
    [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}],
)
def test_a_watchdog_that_is_not_for_this_process_hears_nothing(environment, tmp_path, systemd):
    ServiceManager.here(environment | {"NOTIFY_SOCKET": str(tmp_path / "notify")}).stop_asked()
    assert heard(systemd) == []


def test_a_server_is_ready_alive_and_after_sigterm_leaves_a_checkpoint_and_130(tmp_path, systemd):
    run, certs = tmp_path / "run", federation().authority.folder
    words = ("serve", "--config", QUICKSTART, "--certs", str(certs), "--output", str(run), "--progress", "plain")
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    told: list[str] = []
    with command(tmp_path / "c", *words, **environment) as server:
        wait_for(lambda: told.extend(heard(systemd)) or "WATCHDOG=1" in told, "a sign of life")
        server.send(signal.SIGTERM)
        assert server.end() == 130, server.err
    assert told[0].startswith("READY=1\nSTATUS=quickstart: listening at 127.0.0.1:")
    assert (told + heard(systemd))[-1] == "STOPPING=1"
    assert checkpoint_reader.load(run).raafl["finished"] is None


def test_a_client_is_ready_before_its_server_is_there_and_ends_with_130(tmp_path, systemd, free_port):
    site = federation().site()
    words = ("join", "--address", f"127.0.0.1:{free_port}", "--client", "1", "--tls_ca", str(site.ca))
    words += ("--tls_cert", str(site.cert), "--tls_key", str(site.key))
    told: list[str] = []
    with command(tmp_path / "c", *words, NOTIFY_SOCKET=str(tmp_path / "notify")) as client:
        wait_for(lambda: told.extend(heard(systemd)) or len(told) > 1, "a client that looks for its server")
        client.send(signal.SIGTERM)
        assert client.end() == 130, client.err
    assert told[0] == f"READY=1\nSTATUS=client 1: connecting to the server at 127.0.0.1:{free_port}"
    assert told[1].startswith(f"STATUS=no server at 127.0.0.1:{free_port} yet (")
