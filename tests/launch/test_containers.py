"""The image's recipe, the compose file and the certificates of its trial; no container runtime is needed."""

from __future__ import annotations

import http.server
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from raafl.commands.join import credentials
from raafl.config.remote_options import split
from tests.habits.source import ROOT
from tests.helpers import forkserver
from tests.helpers.tools import tool
from tests.launch.command_lines import check

FOLDER = ROOT / "launch" / "container"
SERVICES = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def test_hadolint_finds_nothing():
    if (program := tool("hadolint")) is None:
        pytest.skip("hadolint is not installed")
    found = subprocess.run([program, str(FOLDER / "Dockerfile")], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_is_not_root_and_what_it_copies_is_let_in_and_there():
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["${USER_ID}"] and "ARG USER_ID=10001" in lines  # Kubernetes' runAsNonRoot takes numbers alone
    copied = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    let_in = [
        line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    assert sorted(copied) == sorted(let_in)
    assert all((ROOT / name).exists() for name in copied)
    targets = [line.split()[-1] for line in lines if line.startswith("FROM ")]
    assert targets == ["build", "cpu", "cuda"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_nothing_to_write_to_but_its_volumes_and_a_command_that_raafl_takes(service):
    one = SERVICES[service]
    assert one["read_only"] and one["cap_drop"] == ["ALL"] and one["security_opt"] == ["no-new-privileges:true"]
    if service == "certificates":
        assert one["network_mode"] == "none" and (FOLDER / "certificates.sh").is_file()
        return
    command, *options = shlex.split(one["command"])
    assert command == ("serve" if service == "server" else "join")
    check(command, options)


def test_no_two_sites_share_a_network_a_folder_or_an_id():
    sites = {name: one for name, one in SERVICES.items() if name.startswith("site-")}
    assert len(sites) == 4
    networks = [network for one in sites.values() for network in one["networks"]]
    assert sorted(networks) == sorted(SERVICES["server"]["networks"]) and len(set(networks)) == 4
    for name, one in sites.items():
        number = name.removeprefix("site-")
        assert f"--client {number} " in one["command"]
        certificates, own = one["volumes"]
        assert certificates["volume"] == {"subpath": name} and certificates["read_only"] and own == f"{name}:/work"


def test_the_certificates_of_the_trial_let_each_site_be_the_client_of_its_number(tmp_path):
    (tmp_path / "tools").mkdir()
    with forkserver.stand_ins(tmp_path / "tools"):
        environment = os.environ | {"PATH": f"{tmp_path / 'tools'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        words = ["bash", str(FOLDER / "certificates.sh"), str(tmp_path / "out"), "server", "2"]
        subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
        before = (tmp_path / "out" / "server" / "server.crt").read_bytes()
        again = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    assert "has certificates" in again.stdout and (tmp_path / "out" / "server" / "server.crt").read_bytes() == before
    out = tmp_path / "out"
    assert yaml.safe_load((out / "server" / "sites.yaml").read_text()) == {
        "site-1": {"clients": [1]},
        "site-2": {"clients": [2]},
    }
    assert sorted(path.name for path in (out / "site-2").iterdir()) == [
        "ca.crt",
        "site-2.crt",
        "site-2.csr",
        "site-2.key",
    ]
    for command, folder in (("serve", "server"), ("join", "site-1")):
        more = ["--address", "server:29500", "--client", "1"] if command == "join" else []
        credentials(split(command, ["--certs", str(out / folder), *more])[0], server=command == "serve")


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_the_health_check_asks_the_monitor_port(status, code, tmp_path):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_address[1]
        if status is None:
            server.shutdown()
            server.server_close()
        found = health(f"http://127.0.0.1:{port}/healthz")
        server.shutdown()
        thread.join()
    assert found.returncode == code, found.stderr


def test_without_a_port_to_ask_a_container_is_healthy():
    assert health("").returncode == 0


def health(url):
    words = [sys.executable, "-I", str(Path(FOLDER) / "health.py")]
    return subprocess.run(words, env=os.environ | {"RAAFL_HEALTH": url}, capture_output=True, text=True, timeout=60)
