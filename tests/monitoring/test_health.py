"""The health check: a run is well while its loop turns, and as long as it starts or winds up."""

from __future__ import annotations

import json
from types import SimpleNamespace

from raafl.core.types import Stop
from raafl.monitoring.monitor import Health


def look(health):
    reply = health.report()
    body = json.loads(reply.body)
    assert reply.content_type == "application/json"
    return reply.status.value, body["status"], body["idle_s"]


def test_a_loop_that_does_not_turn_for_too_long_is_unwell_until_it_turns_again():
    now = [100.0]
    health = Health(30.0, lambda: now[0])
    now[0] = 1000.0
    assert look(health) == (200, "starting", 900.0)  # a model may take long to make
    assert health.stop_asked() is None
    now[0] += 30.0
    assert look(health) == (200, "running", 30.0)
    now[0] += 0.5
    assert look(health) == (503, "stalled", 30.5)
    health.stop_asked()
    assert look(health) == (200, "running", 0.0)


def test_a_run_that_winds_up_may_take_its_time():
    now = [0.0]
    health = Health(30.0, lambda: now[0])
    health.stop_asked()
    coordinator = SimpleNamespace(state=SimpleNamespace(version=7), finished=None)
    health.on_event(Stop("x"), coordinator, 1.0)
    assert json.loads(health.report().body)["version"] == 7
    coordinator.finished = "max_updates"
    health.on_event(Stop("x"), coordinator, 1.0)
    now[0] = 500.0
    assert look(health) == (200, "ending", 500.0)
