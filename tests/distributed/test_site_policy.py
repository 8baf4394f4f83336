"""A real server, and real clients whose sites do not allow all that it asks for."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from pathlib import Path

import pytest

from model_zoo import MLP
from raafl.core.types import Arrived
from raafl.sites.policy import SiteLogs, SitePolicy, SitePrivacy, spent
from tests.distributed.test_come_and_go import ENDLESS, On, after, arrived, joined, nothing, parsed, settled
from tests.helpers.joining_clients import remote

pytestmark = pytest.mark.timeout(120)


def refused(client):
    return lambda event: (
        isinstance(event, Arrived) and (event.update.client, event.update.refusal) == (client, "policy")
    )


def told(folder):
    """All that the server has written down, but for numbers of tensors."""
    return "".join(
        file.read_text() for file in Path(folder).iterdir() if file.suffix in (".jsonl", ".csv", ".json", ".txt")
    )


def test_a_site_refuses_a_task_or_a_whole_run_and_the_others_go_on(tmp_path):
    """A task is one step of 32 samples: the second site wants more behind an update, the third another model."""
    experiment, config = parsed(tmp_path, "--clients=3", ENDLESS, "--train.batch_size=32")
    few, other = SitePolicy(min_samples=33), SitePolicy(models=["CNN"])
    clients = [1, (2, {"policy": few}), (3, {"policy": other, "needs_config": True})]
    with remote(experiment, config, tmp_path, clients, held_back=[2]) as fleet:
        third = fleet.joiners[2]
        on = On((joined(2), third.begin), (refused(2), lambda: third.exit_code()), (arrived(1), None))
        run = fleet.serve(on.inbox, min_clients=2)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0, 1]
    assert {row["outcome"] for row in run.rows() if row["client"] == "2"} <= {"refused:policy", "unused"}
    assert run.summary["updates_refused"]["policy"] >= 1 and run.summary["updates_merged"] >= 1
    assert run.summary["connections_refused"] == {"policy": 1}
    assert "its model is model_zoo.MLP, but policy.models allows only ['CNN']" in third.words()
    assert "min_samples" not in told(run.folder) and "CNN" not in told(run.folder)
    settled(run)


def test_a_site_adds_noise_until_its_budget_is_spent_and_then_leaves(tmp_path):
    """Two updates are within the budget, the third is not; of its metrics the server sees the one that is named."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    experiment, config = parsed(tmp_path, "--clients=2", ENDLESS)
    most = (spent(2 / 9, 1e-5) + spent(3 / 9, 1e-5)) / 2
    policy = SitePolicy(
        privacy=SitePrivacy(clip_norm=0.1, noise_multiplier=3.0, max_epsilon=most),
        metrics=["loss"],
        state=str(tmp_path / "site"),
    )
    with remote(experiment, config, tmp_path, [1, (2, {"policy": policy})]) as fleet:
        second = fleet.joiners[1]
        on = On((refused(2), second.exit_code), (arrived(1), None))
        run = fleet.serve(on.inbox)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 1]
    rows = [row for row in run.rows() if row["client"] == "2"]
    assert [row["outcome"] for row in rows][:3] == ["merged", "merged", "refused:policy"]
    assert all(row["loss"] and not row["measured_bytes"] for row in rows[:2])
    assert "the privacy budget is used up: policy.privacy.max_epsilon is" in second.words()
    ledger = [json.loads(line) for line in (tmp_path / "site" / "ledger.jsonl").read_text().splitlines()]
    assert [row["assignment"] for row in ledger] == [int(row["assignment"]) for row in rows[:2]]
    assert [row["epsilon"] for row in ledger] == [spent(1 / 9, 1e-5), spent(2 / 9, 1e-5)]
    settled(run)


def test_who_only_looks_sees_what_is_asked_and_does_not_join(tmp_path):
    """The quick start's model has 64 x 200 + 200 + 200 x 10 + 10 parameters of four bytes; the third's site allows fewer."""
    experiment, config = parsed(tmp_path, "--clients=3", ENDLESS, "--train.batch_size=32")
    small = SitePolicy(max_parameters=100)
    clients = [
        1,
        (2, {"looks": True, "needs_config": True}),
        (3, {"looks": True, "needs_config": True, "policy": small}),
    ]
    with remote(experiment, config, tmp_path, clients, held_back=[1, 2]) as fleet:
        second, third = fleet.joiners[1:]

        def look():
            second.begin()
            third.begin()
            assert (second.exit_code(), third.exit_code()) == (0, 0)

        on = On((arrived(1), look), (arrived(1), None))
        run = fleet.serve(on.inbox, min_clients=1)
        assert fleet.joiners[0].exit_code() == 0
    said = second.words()
    assert "model: model_zoo.MLP(in_features=64, " in said and "data: raafl.data.Digits(" in said
    assert "the model has 15,010 parameters, digest " in said
    assert "a task: 1 batch of 32, " in said and "its answer has at most 60 kB (compressed: " in said
    refused = "the site's policy refuses this run: its model has 15,010 parameters, but policy.max_parameters is 100"
    assert refused in third.words() and "a task: " not in third.words()
    assert run.summary["connections_refused"] == {"dry-run": 2}
    assert {event["client"] for event in run.events("joined")} == {1}
    settled(run)


class Talks(MLP):
    """Logs in each step; the second client's batches hold what a site would not show."""

    def training_step(self, batch, index):
        logging.getLogger("ward.training").warning("step %d\n\x1b[31m of a secret", index)
        logging.getLogger("ward.training").info("too low a level")
        return super().training_step(batch, index)


def scraped(address):
    host, _, port = address.rpartition(":")
    found = []
    for path in ("/metrics", "/healthz"):
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.request("GET", path)
        with connection.getresponse() as answer:
            found.append((answer.status, answer.read().decode()))
    return found


def test_log_lines_reach_the_server_where_the_site_lets_them_and_a_scraper_sees_real_clients(tmp_path, caplog):
    """A third caller has a connection half open all the while."""
    pytest.importorskip("prometheus_client", reason="needs the extra monitoring")
    caplog.set_level(logging.INFO, "raafl")
    experiment, config = parsed(
        tmp_path, "--clients=2", ENDLESS, "--model", f"{__name__}.Talks", "--monitor=127.0.0.1:0"
    )
    open_site = SitePolicy(logs=SiteLogs("warning", ["ward"]))
    seen, held = [], []

    def hold():
        (line,) = [record.message for record in caplog.records if record.message.startswith("metrics at http://")]
        seen.append(line.removeprefix("metrics at http://").partition("/")[0])
        held.append(socket.create_connection(seen[0].split(":")))
        held[0].sendall(b"GET /metrics")

    with remote(experiment, config, tmp_path, [(1, {"policy": open_site}), (2, {"policy": SitePolicy()})]) as fleet:
        on = On(
            (joined(1), hold),
            (after(3, arrived(1)), nothing),
            (arrived(2), lambda: seen.extend(scraped(seen[0]))),
            (arrived(1), None),
        )
        run = fleet.serve(on.inbox)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0]
    held[0].close()
    rows = [json.loads(line) for line in (run.folder / "client-logs.jsonl").read_text().splitlines()]
    assert len(rows) >= 3 and {(row["client"], row["level"], row["text"]) for row in rows} == {
        (1, "warning", r"step 0\n\x1b[31m of a secret")
    }
    assert r"client 1 logs: step 0\n\x1b[31m of a secret" in caplog.messages
    (status, metrics), (healthy, health) = seen[1:]
    shown = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert (status, healthy, json.loads(health)["status"]) == (200, 200, "running")
    least = 0.2 * 4 * 15_010  # bytes of a fifth of the model
    assert float(shown['raafl_transferred_bytes_total{direction="up"}']) > 4 * least
    assert float(shown["raafl_task_seconds_count"]) >= 2  # the third may not have been handled
    assert float(shown['raafl_transfer_seconds_count{direction="up"}']) >= 2
    assert sum(float(shown[f'raafl_sessions{{state="{state}"}}']) for state in ("idle", "working", "suspended")) == 2
    settled(run)
