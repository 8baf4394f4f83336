"""A client whose words make a part of the method raise is turned away; a part that raises for everybody ends the run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from raafl.algorithms import fed_async, fed_avg
from raafl.core.types import LOSSES, Arrived, ClientInfo, Dismiss, Fail, Joined, Lost, SetTimer, Settled, Timer, Work
from raafl.parts.merge.mean import Mean
from raafl.parts.select.submodels import Full
from tests.helpers.coordinators import answer, assigned, coordinator_for, join, update_for, values_of


@dataclass(frozen=True)
class Fragile(Full):
    """Raises for some clients in one of its calls."""

    at: str
    bad: tuple[int, ...]

    def _look(self, at: str, *clients: ClientInfo) -> None:
        if at == self.at and any(client.id in self.bad for client in clients):
            raise OverflowError("cannot convert float infinity to integer")

    def __call__(self, client, fleet):
        self._look("call", client)
        return Work()

    def on_join(self, client, fleet):
        self._look("joined", client)

    def on_round_start(self, out, fleet):
        self._look("drawn", *out)

    def on_update(self, client, assignment, seconds, fleet):
        self._look("answered", client)


def fragile(at, bad=(2,), make=fed_avg, **limits):
    return coordinator_for(replace(make(), select=Fragile(at, bad)), num_clients=3, **limits)


def dismissed(actions):
    return [(action.client, type(action.error)) for action in actions if isinstance(action, Dismiss)]


def outcomes(actions):
    return [(action.client, action.outcome) for action in actions if isinstance(action, Settled)]


@pytest.mark.parametrize("at", ["joined", "drawn", "call", "answered"])
def test_who_makes_a_selector_raise_is_turned_away_and_the_others_go_on(at):
    coordinator = fragile(at, min_clients=2 if at == "joined" else 3)
    actions = join(coordinator, [1, 2, 3])
    tasks = assigned(actions)
    if at == "answered":
        actions = answer(coordinator, tasks.pop(2), 1.0)
        assert outcomes(actions) == [(2, "refused:error")]
    assert dismissed(actions) == [(2, OverflowError)] and SetTimer(-2, 10.0) in actions
    assert sorted(tasks) == [1, 3] and sorted(coordinator.roster.clients) == [1, 3]
    answer(coordinator, tasks[1], 1.0)
    assert outcomes(answer(coordinator, tasks[3], 3.0)) == [(1, "merged"), (3, "merged")]
    assert values_of(coordinator.state).unique().tolist() == [2.0]


def test_a_selector_that_raises_for_whoever_it_has_not_seen_join_is_no_fault_of_the_others(monkeypatch):
    def on_loss(self, client, fleet):
        raise KeyError(client.id)

    monkeypatch.setattr(Fragile, "on_loss", on_loss)
    coordinator = fragile("joined", min_clients=2)
    actions = join(coordinator, [1, 2, 3])
    assert dismissed(actions) == [(2, OverflowError)] and sorted(assigned(actions)) == [1, 3]
    with pytest.raises(KeyError):
        coordinator.handle(Lost(1, "disconnected", 0), 1.0)


def test_who_was_turned_away_is_suspended_for_longer_each_time():
    coordinator = fragile("call", make=fed_async)
    join(coordinator, [1, 2])
    assert coordinator.handle(Joined(ClientInfo(2, 1, incarnation=1)), 3.0) == []
    assert SetTimer(-2, 30.0) in coordinator.handle(Timer(-2), 10.0)


@pytest.mark.parametrize("at", ["joined", "call", "answered"])
def test_a_selector_that_raises_for_everybody_ends_the_run(at):
    coordinator = fragile(at, bad=(1, 2, 3), make=fed_async)
    actions = join(coordinator, [1, 2, 3])
    if at == "answered":
        for task in assigned(actions).values():
            actions += answer(coordinator, task, 1.0)
    (reason,) = [action.reason for action in actions if isinstance(action, Fail)]
    assert reason.startswith("failed: every client was turned away, client 3 for OverflowError: cannot convert float")


def test_a_round_that_no_client_alone_makes_raise_is_the_methods_own_fault():
    coordinator = fragile("drawn", bad=(1, 2, 3), min_clients=3)
    with pytest.raises(OverflowError):
        join(coordinator, [1, 2, 3])


class Picky(Mean):
    """Takes in no update of client 2."""

    where = "receive"

    def reject_reason(self, state, update, spec, staleness):
        self._look("problem", update)
        return super().reject_reason(state, update, spec, staleness)

    def receive(self, state, update, spec, staleness):
        self._look("receive", update)
        super().receive(state, update, spec, staleness)

    def _look(self, where, update):
        if where == type(self).where and update.client == 2:
            raise KeyError("extra")


@pytest.mark.parametrize("where", ["problem", "receive"])
def test_an_update_whose_words_make_the_merge_raise_is_refused_and_its_client_turned_away(where, monkeypatch):
    monkeypatch.setattr(Picky, "where", where)
    coordinator = coordinator_for(replace(fed_avg(), merge=Picky()), min_clients=3, num_clients=3)
    tasks = assigned(join(coordinator, [1, 2, 3]))
    answer(coordinator, tasks[1], 1.0)
    actions = coordinator.handle(Arrived(update_for(coordinator.state, tasks[2], 9.0)), 1.0)
    assert outcomes(actions) == [(2, "refused:error")] and dismissed(actions) == [(2, KeyError)]
    assert outcomes(answer(coordinator, tasks[3], 3.0)) == [(1, "merged"), (3, "merged")]
    assert values_of(coordinator.state).unique().tolist() == [2.0] and coordinator.admission.refused == {"error": 1}


def test_what_raises_in_a_merge_is_the_servers_own_and_the_model_may_be_half_merged(monkeypatch):
    coordinator = coordinator_for(fed_async())
    task = assigned(join(coordinator, [1]))[1]
    monkeypatch.setattr(Mean, "apply", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        answer(coordinator, task, 1.0)
    assert coordinator.is_merging


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("timeout: nothing from the peer within 5 s", "timeout"),
        ("disconnected: \x1b[2J", "disconnected"),
        ("failed", "failed"),
        ("gpu: task 3: lost", "gpu"),
        ("a client's own words", "other"),
        ("", "other"),
    ],
)
def test_outcomes_are_a_closed_set_whatever_a_client_says(reason, outcome):
    coordinator = coordinator_for(fed_async(), min_clients=1)
    join(coordinator, [1])
    assert outcomes(coordinator.handle(Lost(1, reason), 1.0)) == [(1, f"lost:{outcome}")]
    assert outcome in LOSSES


@pytest.mark.parametrize(
    ("work", "most"),
    [
        (Work(num_epochs=5, num_steps=200), 200),  # as in training, the number of steps wins
        (Work(num_epochs=5), 100),
        (Work(num_steps=7), 7),
        (Work(), 20),  # the run's own setting, one epoch
    ],
)
def test_a_client_counts_no_more_steps_than_its_task_can_have(work, most):
    class Given(Full):
        def __call__(self, client, fleet):
            return work

    coordinator = coordinator_for(replace(fed_avg(), select=Given()), num_clients=1)
    (task,) = assigned(coordinator.handle(Joined(ClientInfo(1, 20)), 0.0)).values()
    update = replace(update_for(coordinator.state, task, 1.0), num_steps=1_000)
    coordinator.admission.clip(coordinator.roster.clients[1], task, update)
    assert update.num_steps == most
