"""Whatever one client says of itself and with its answers, the loop goes on, and so do the others."""

from __future__ import annotations

import json

import pytest

from raafl.algorithms import ALGORITHMS
from raafl.core.coordinator import Coordinator
from raafl.core.types import LOSSES, ClientInfo, Joined
from raafl.devices import checks
from raafl.devices.profiles import Profile
from raafl.runfolder.record import RunRecord
from raafl.runtime.server.link import Inbox
from raafl.runtime.server.wall_clock import Server
from tests.helpers import cached_models
from tests.helpers.coordinators import coordinator_for
from tests.helpers.hostile_client import HOSTILE, Play, play, world
from tests.helpers.methods import each_method


def check(run: Play, folder) -> None:
    """Nothing was raised, nobody but the hostile client was refused, and what is written can be read."""
    assert run.blamed == [] and run.turned_away > 0
    assert set(run.coordinator.roster.clients) >= {1, 2, 3}
    refused = {client for client, num in run.coordinator.admission.backoff.refused.items() if num}
    assert refused <= {HOSTILE} and run.record.outcomes["merged"] > 0
    kinds = {outcome.partition(":")[2] for outcome in run.record.outcomes if outcome.startswith("lost:")}
    assert kinds <= LOSSES
    with (folder / "events.jsonl").open(encoding="utf-8") as file:
        longest = max(len(line) for line in file if json.loads(line)["event"] == "joined")
    assert longest < 16 << 10


@pytest.mark.parametrize("name", each_method(parts=["select", "trigger", "merge"]))
def test_hostile_profiles_and_answers_end_no_run(tmp_path, name):
    with cached_models.reuse_findings():
        run = world(tmp_path, name, seed=1)
    play(run, 24)
    check(run, tmp_path / "run")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_thousand_hostile_profiles_end_no_run(tmp_path, name):
    run = world(tmp_path, name, seed=2)
    play(run, 1000)
    check(run, tmp_path / "run")


def test_what_gets_past_the_door_is_turned_away_within(tmp_path, monkeypatch):
    """Without bounds on a profile TimelyFL divides by next to nothing: one client's words, which end its own part alone."""
    for name, value in {"LEAST_RATE": 5e-324, "MOST_RATE": 1.7e308, "MOST_S": 1.7e308}.items():
        monkeypatch.setattr(checks, name, value)
    run = world(tmp_path, "timely_fl", seed=1)
    for client in (1, 2, 3):
        run.join(client)
    run.tell(Joined(ClientInfo(HOSTILE, 5, Profile(flops_per_s=5e-324, latency_s=1e308))))
    for _ in range(3):
        run.step()
        for client in sorted(run.out):
            run.answer(client)
    assert [type(error) for error in run.blamed] == [ValueError]  # infinity less infinity is no whole number
    assert sorted(run.coordinator.roster.clients) == [1, 2, 3] and run.record.outcomes["merged"] >= 6


def test_an_error_of_the_servers_own_ends_the_run_with_a_reason_and_no_half_merged_checkpoint(monkeypatch):
    from raafl.algorithms import fed_async

    def served(coordinator: Coordinator) -> tuple[str, list[int]]:
        saved: list[int] = []
        server = Server(coordinator, Inbox(), RunRecord(None), None, patience_s=60.0)
        monkeypatch.setattr(server, "_checkpoint", lambda: saved.append(coordinator.state.version))
        server.inbox.put(Joined(ClientInfo(1, 5)))
        return server.run(), saved

    coordinator = coordinator_for(fed_async())
    monkeypatch.setattr(type(coordinator.algorithm.sample), "draw", lambda *_, **__: 1 / 0)
    reason, saved = served(coordinator)
    assert reason.startswith("failed: the server: ZeroDivisionError: division by zero") and saved == [0]
    coordinator = coordinator_for(fed_async())
    coordinator.is_merging = True
    assert served(coordinator)[1] == []


def test_an_interrupt_of_the_end_leaves_a_checkpoint_that_can_be_resumed(monkeypatch):
    from raafl.algorithms import fed_async

    coordinator, saved = coordinator_for(fed_async()), []
    server = Server(coordinator, Inbox(), RunRecord(None), None, patience_s=60.0)
    monkeypatch.setattr(server.hooks, "on_checkpoint", lambda coordinator, *_: saved.append(coordinator.finished))
    monkeypatch.setattr(server, "_turn", lambda: server.stop("interrupted"))

    def interrupted(action):  # Ctrl-C once more, before the action that ends the loop
        monkeypatch.undo()
        monkeypatch.setattr(server.hooks, "on_checkpoint", lambda coordinator, *_: saved.append(coordinator.finished))
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_do", interrupted)
    assert server.run() == "interrupted" and saved == [None]
