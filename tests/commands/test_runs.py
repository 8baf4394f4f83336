"""A server for many runs as processes that start from nothing, and what its commands refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import psutil
import pytest
import yaml

from raafl.commands.fit_local import ServerCommand
from raafl.commands.runs import command, keep, serve_runs, submit
from raafl.config.remote_options import split
from raafl.errors import BadInput
from raafl.runtime.replay import replay
from raafl.sites.hosted_runs import HostedRun
from tests.helpers.certificates import CertifiedSites
from tests.helpers.refusals import refuses

RAAFL = [sys.executable, "-m", "raafl"]


def runs_of(argv):
    serve_runs(*split("serve", ["--runs", "runs", *argv.split()]))


def join_of(argv):
    split("join", ["--address", "h:1", "--client", "1", *argv.split()])


test_what_is_of_one_run_is_refused = refuses(
    runs_of,
    ({"argv": "--config c.yaml"}, "--config is of one run, but --runs serves several: put configs into 'runs'"),
    ({"argv": "--output=x"}, "--output is of one run"),
    ({"argv": "--run a"}, "--run is of one run"),
    ({"argv": "--max_runs 0"}, "max_runs is '0'"),
)

test_options_of_clients_are_checked = refuses(
    join_of,
    ({"argv": "--run ../a"}, "run is '../a'"),
    ({"argv": "--at_once 2"}, "give --any, too"),
    ({"argv": "--any --run a"}, "--run is about one"),
    ({"argv": "--any --dry-run"}, "--dry-run is about one"),
)

test_questions_are_checked = refuses(
    lambda argv: command(argv.split()),
    ({"argv": "list"}, "--server HOST:PORT is missing"),
    ({"argv": "list a"}, "`raafl runs list` takes no name, but 'a' is given: `raafl runs show a`"),
    ({"argv": "stop --server h:1"}, "`raafl runs stop` needs a run's NAME"),
    ({"argv": "show a b"}, "`raafl runs show` needs a run's NAME"),
    ({"argv": "stop a/b"}, "run is 'a/b'"),
)

test_what_is_submitted_is_checked = refuses(
    lambda argv: submit(argv.split()),
    ({"argv": "nothing.yaml"}, "CONFIG is 'nothing.yaml', which cannot be read"),
    ({"argv": "quickstart --name A"}, "run is 'A'"),
    ({"argv": "quickstart"}, "--server HOST:PORT is missing"),
)


def test_options_of_a_server_for_many_need_its_folder():
    with pytest.raises(
        BadInput, match="--max_runs and --operators are about a server for many runs: give --runs FOLDER"
    ):
        split("serve", ["--max_runs", "2"])


@pytest.mark.parametrize("trusts", [False, True])
@pytest.mark.parametrize("by", [None, "operator"])
def test_who_keeps_a_run_trusts_only_the_owner_of_the_server(tmp_path, monkeypatch, trusts, by):
    run = HostedRun(tmp_path, "a")
    run.config.write_text("")
    run.ask_first(by, 3)
    made = []

    def end_at_once(supervisor):
        made.append(supervisor.server.command())
        (run.run_folder / "checkpoints").mkdir(parents=True)
        (run.run_folder / "checkpoints/version-000001.ckpt").touch()
        made.append(supervisor.server.command())
        return 0

    monkeypatch.setattr("raafl.commands.runs.Supervisor.run", end_at_once)
    own, rest = split("serve", ["--runs", str(tmp_path), "--keep", "a", *["--trust_config"] * trusts])
    assert keep(own, rest) == 0 and run.state == "completed"
    first, resumed = ([word for word in words if not word.startswith("fd:")] for words in made)
    shared = ["--certs", "certs", "--min_clients", "3", "--run", "a", *["--trust_config"] * trusts]
    source = "--submitted" if by else "--config"
    assert first == [*RAAFL, "serve", source, str(run.config), "--output", str(run.run_folder), *shared, "--address"]
    trusted = [] if by or trusts else ["--trust_config"]
    assert resumed == [*RAAFL, "serve", *shared, "--resume", str(run.run_folder), *trusted, "--address"]


def test_a_folder_without_a_checkpoint_is_put_aside_under_a_free_name(tmp_path):
    with socket.socket() as listener:
        made = ServerCommand(["--output", str(tmp_path / "a")], listener, folder=tmp_path / "a")
        for _ in range(2):
            (tmp_path / "a").mkdir()
            made.command()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-attempt-1", "a-attempt-2"]


# ---- the whole, with processes ----

CONFIG = {
    "clients": 3,
    "model": {"class_path": "model_zoo.MLP", "init_args": {"in_features": 64, "hidden": [24], "lr": 0.05}},
    "data": {"class_path": "raafl.data.Digits", "init_args": {"batch_size": 64}},
    "train": {"num_epochs": None, "num_steps": 3},
    "devices": [{"name": "slow", "flops_per_s": 2e6, "count": 3}],  # a second for each task
    "checkpoint_every": 2,
}


class Machine:
    """Folders and processes of a server, its operator, and its sites."""

    def __init__(self, folder, stack):
        self.folder, self._stack = folder, stack
        made = CertifiedSites(folder / "certs")
        (folder / "certs/sites.yaml").write_text("north: {clients: [1]}\nsouth: {clients: [2]}\neast: {clients: [3]}\n")
        for name in ("operator", "north", "south", "east"):
            files = made.site(name)
            (folder / f"at-{name}").mkdir()
            for file in (files.ca, files.cert, files.key, folder / "certs/revoked.crl"):
                shutil.copy2(file, folder / f"at-{name}")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}

    def start(self, name, *argv):
        with (self.folder / f"{name}.txt").open("ab") as said:
            made = subprocess.Popen(
                [*RAAFL, *argv], cwd=self.folder, env=self.environment, stdout=said, stderr=subprocess.STDOUT
            )
        self._stack.callback(made.wait)
        self._stack.callback(made.kill)
        return made

    def serve(self):
        return self.start("server", "serve", "--runs", "runs", "--address", self.address, "--min_clients", "2")

    def join(self, client, site, *argv):
        where = ("--address", self.address, "--client", str(client), "--certs", f"at-{site}")
        return self.start(site, "join", "--any", *where, "--at_once", "2", "--idle_s", "60", *argv)

    def ask(self, *argv, by="operator"):
        where = ["--server", self.address, "--certs", f"at-{by}"]
        found = subprocess.run(
            [*RAAFL, *argv, *where], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=400
        )
        return found.returncode, found.stdout.strip() if found.returncode == 0 else found.stderr.strip()

    def states(self):
        code, said = self.ask("runs", "list", "--json")
        assert code == 0, said
        return {row["run"]: row["state"] for row in json.loads(said)}

    def num_merged(self, run):
        file = self.folder / "runs" / run / "clients.csv"
        return sum(",merged," in line for line in file.read_text().splitlines()) if file.exists() else 0


def wait_until(condition, what, timeout_s=300):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"not within {timeout_s} s: {what}"
        time.sleep(0.5)


def processes(folder, *words):
    """Return the processes of this test whose command lines have ``words``."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        line = process.info["cmdline"] or []
        if process.info["cwd"] == str(folder) and all(word in line for word in words):
            found.append(process)
    return found


@contextmanager
def machine(folder):
    with ExitStack() as stack:
        try:
            yield Machine(folder, stack)
        finally:
            for process in processes(folder):
                process.kill()


@pytest.mark.timeout(1800)
@pytest.mark.slow("starts a server, two runs, three clients of them, and most of these twice")
@pytest.mark.long("tests/sites/test_run_server.py::test_a_client_is_led_to_the_run_that_it_asks_for")
def test_two_runs_at_one_port_survive_their_processes(tmp_path):
    (tmp_path / "runs").mkdir()
    first, second = tmp_path / "runs/first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump({**CONFIG, "algorithm": {"class_path": "raafl.fed_async"}, "max_updates": 10_000}))
    second.write_text(yaml.safe_dump({**CONFIG, "algorithm": "fed_avg", "max_updates": 240, "seed": 1}))
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({**CONFIG, "algorithm": "fed_avg", "model": "os.system"}))
    (tmp_path / "only.yaml").write_text("algorithms: [fed_avg]\n")
    with machine(tmp_path) as one:
        server = one.serve()
        wait_until(lambda: "TLS 1.3" in (tmp_path / "server.txt").read_text(), "the server listens")
        clients = [one.join(1, "north"), one.join(2, "south"), one.join(3, "east", "--policy", "only.yaml")]
        code, said = one.ask("submit", "second.yaml", by="north")
        assert code == 1 and "site 'north' may not submit runs: use the certificate of an operator" in said
        code, said = one.ask("submit", "bad.yaml")
        assert code == 1 and "model is 'os.system', which is not raafl's own" in said
        assert one.ask("submit", "second.yaml", "--min_clients", "3")[0] == 0
        wait_until(lambda: one.num_merged("first") > 3 and one.num_merged("second") > 3, "both runs go on")
        assert not processes(tmp_path, "join", "first", "at-east") and processes(tmp_path, "join", "second", "at-east")
        (died,) = processes(tmp_path, "serve", "--run", "first")
        died.send_signal(signal.SIGKILL)
        server.kill()  # by SIGKILL, too
        server.wait()
        before = one.num_merged("second")
        wait_until(lambda: one.num_merged("second") > before, "a run goes on without the server for many")
        one.serve()
        log = tmp_path / "runs/first.log"
        wait_until(lambda: "it is started again in" in log.read_text(), "the run is started again")
        before = one.num_merged("first")
        wait_until(lambda: one.num_merged("first") > before + 3, "the resumed run goes on with the clients that it had")
        assert one.states()["first"] == "running"
        code, said = one.ask("runs", "show", "first")
        assert code == 0 and "first" in said and "progress: version" in said
        assert one.ask("runs", "stop", "first", "second")[0] == 0
        wait_until(lambda: "running" not in one.states().values(), "both have ended")
        assert one.states()["first"] == "stopped"
        for client in clients:
            assert client.wait(120) == 0
    for run in ("first", "second"):
        assert replay(tmp_path / "runs" / run)["equal"] is True
