"""A run with a monitor: what a scrape reads is what the summary says, and no caller changes or delays the run."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
from dataclasses import replace

import pytest

from raafl.config.problems import plain_problems
from raafl.core.hooks import RunHooks
from raafl.errors import BadInput
from raafl.monitoring.monitor import MAX_CALLERS, Monitor
from raafl.runtime.run import simulate
from tests.helpers.forked_command import in_fork
from tests.helpers.small_runs import experiment, finish

pytest.importorskip("prometheus_client", reason="needs the extra monitoring")


class Looks(RunHooks):
    """Reads both paths at the last evaluation, while others hold connections open from the first event on."""

    def begin(self, run, saved=None):
        self.monitor, self.callers = next(found for found in run.observers if isinstance(found, Monitor)), []

    @property
    def where(self):
        host, _, port = self.monitor.address.rpartition(":")
        return host, int(port)

    def on_event(self, event, coordinator, now):
        if not self.callers:
            self.callers = [socket.create_connection(self.where) for _ in range(MAX_CALLERS)]
            for caller in self.callers:
                caller.sendall(b"GET /metrics HTTP/1.1\r\nA: " + b"a" * 4000)

    def end(self, summary):
        self.metrics, self.health = (self.ask(path) for path in ("/metrics", "/healthz"))
        for caller in self.callers:
            caller.close()

    def ask(self, path):
        connection = http.client.HTTPConnection(*self.where, timeout=20)
        connection.request("GET", path)
        with connection.getresponse() as answer:
            return answer.status, answer.read().decode()


def test_a_scrape_reads_what_the_summary_says_and_hostile_callers_change_nothing(tmp_path):
    plain, looks = finish(experiment(tmp_path / "plain", "fed_async")), Looks()
    made = experiment(tmp_path / "run", "fed_async", monitor="127.0.0.1:0", monitor_clients=4)
    run = finish(made, lambda experiment: simulate(experiment, observer=looks))
    assert run.digest == plain.digest
    status, text = looks.metrics
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert status == 200
    wanted = {
        'raafl_updates_total{outcome="merged",reason=""}': run.summary["updates_merged"],
        'raafl_transferred_bytes_total{direction="up"}': run.summary["bytes_up"],
        'raafl_evaluation{metric="accuracy"}': run.summary["final"]["accuracy"],
        "raafl_model_version": run.summary["versions"],
        "raafl_merge_seconds_count": run.summary["versions"],
        "raafl_staleness_versions_sum": run.summary["staleness"]["mean"] * run.summary["updates_merged"],
        **{
            f'raafl_client_updates_total{{client="{client}",outcome="merged"}}': number
            for client, number in run.summary["participation"].items()
            if number
        },
    }
    assert {name: float(shown[name]) for name in wanted} == pytest.approx(wanted)
    status, text = looks.health
    assert (status, json.loads(text)["status"]) == (200, "ending")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(looks.where)


class LooksAtTheStart(Looks):
    """Reads both paths before the first event of a run that is resumed."""

    def start(self):
        self.first = (self.ask("/metrics")[1], json.loads(self.ask("/healthz")[1]))


def test_a_resumed_run_shows_where_it_stands_before_its_first_event(tmp_path):
    class Stops(RunHooks):
        merged = 0

        def on_merged(self, version, now, seconds):
            self.merged = version

        def stop_asked(self):
            return "interrupted" if self.merged == 5 else None

    made = experiment(tmp_path / "run", "fed_async")
    summary, folder = simulate(made, observer=Stops())
    looks = LooksAtTheStart()
    simulate(replace(made, resume=str(folder), monitor="127.0.0.1:0"), observer=looks)
    text, health = looks.first
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(shown["raafl_model_version"]) == health["version"] == 5
    assert float(shown["raafl_run_clock_seconds"]) == pytest.approx(summary["time_s"])
    assert float(shown["raafl_tasks_in_flight"]) == float(shown['raafl_sessions{state="working"}']) > 0


class Hangs(Looks):
    """Keeps the loop from turning at version 1, until the health check has noticed."""

    def on_event(self, event, coordinator, now):
        if coordinator.state.version == 1:
            deadline = time.monotonic() + 20
            while not self.codes or (self.codes[-1] != 503 and time.monotonic() < deadline):
                self.codes.append(self.ask("/healthz")[0])
        elif coordinator.state.version == 2 and coordinator.finished is None:
            self.again = json.loads(self.ask("/healthz")[1])

    def begin(self, run, saved=None):
        super().begin(run, saved)
        self.codes, self.again = [], {}


def test_a_loop_that_stands_still_is_said_to(tmp_path):
    hangs = Hangs()
    made = experiment(
        tmp_path / "run", "fed_async", monitor="127.0.0.1:0", monitor_stall_s=0.2, clients=1, max_updates=3
    )
    finish(made, lambda experiment: simulate(experiment, observer=hangs))
    assert hangs.codes[-1] == 503 and hangs.again["version"] == 1  # of its last event


def test_a_port_that_is_taken_is_bad_input_before_there_is_a_folder(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadInput, match=f"monitor is '{where}', on which this machine cannot listen"):
            finish(experiment(tmp_path / "run", monitor=where))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ({"monitor": "9464"}, "monitor is '9464': give HOST:PORT"),
        ({"monitor": "127.0.0.1:99999"}, "monitor is '127.0.0.1:99999', whose port is '99999': give 0 to 65535"),
        ({"monitor_stall_s": "soon"}, "monitor_stall_s is soon: give seconds above 0"),
        ({"monitor_clients": -1}, "monitor_clients is -1: give 0 or more"),
    ],
)
def test_a_wrong_field_is_bad_input(tmp_path, field, problem):
    (found,) = plain_problems(experiment(tmp_path / "run", **field))
    assert found.startswith(problem)


def what_a_run_imports(folder):
    """Run without a monitor, as if neither library had been imported; return what of them is there afterwards."""
    names = ("prometheus_client", "opentelemetry", "asyncio.streams", "raafl.monitoring.monitor")
    for name in [name for name in sys.modules if name.startswith(names)]:
        del sys.modules[name]
    simulate(experiment(folder, max_updates=1, clients=1))
    return [name for name in sys.modules if name.startswith(names)]


def test_a_run_without_the_option_imports_none_of_it(tmp_path, monkeypatch):
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    assert in_fork(what_a_run_imports, tmp_path / "run") == []
