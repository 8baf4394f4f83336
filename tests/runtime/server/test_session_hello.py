"""What a session makes of a client's greeting: version, model, config, data, names."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest

from raafl.core.saving import client_to_json
from raafl.core.types import Lost
from raafl.devices.profiles import Profile
from raafl.runtime.identity import Identity
from raafl.runtime.protocol import Hello
from raafl.runtime.server.session_protocol import Terms
from raafl.transport import Kind
from tests.runtime.server.sessions import INFO, Table

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"protocol": 0}, "different protocol: the server has"), ({"model": "0" * 32}, "different model: the server has")],
)
def test_a_client_with_another_version_or_model_is_told_so_and_lost(table, changes, named):
    table.hello(**changes)
    message = table.hear()
    assert message.kind is Kind.STOP
    assert message.meta["reason"].startswith("refused: ") and named in message.meta["reason"]
    event = table.event()
    assert (event.client, event.incarnation) == (4, 0)
    assert named in event.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"num_samples": -1},
        {"num_samples": 0},
        {"num_samples": "many"},
        {"num_samples": True},
        {"num_samples": 10**30},
        {"profile": None},
        {"profile": 3},
        {"profile": {"flops_per_s": -1.0}},
        {"profile": {"flops_per_s": "fast"}},
        {"profile": {"unheard_of": 1}},
        {"profile": {"flops_per_s": 10**400}},
    ],
)
def test_a_hello_that_makes_no_sense_loses_the_client_and_never_hangs(table, changes):
    table.hello(**changes)
    event = table.event()
    assert isinstance(event, Lost), event
    assert event.client == 4


def test_a_client_that_does_not_say_hello_is_lost(table):
    table.update()
    event = table.event()
    assert isinstance(event, Lost)
    assert "wrong-layout: declared float32[13], expected no tensors" in event.reason  # a hello has none


def test_a_client_that_begins_with_something_else_is_lost(table):
    table.say(Kind.KEEPALIVE)
    assert "expected HELLO, got KEEPALIVE" in table.hear().meta["reason"]
    assert "expected HELLO, got KEEPALIVE" in table.event().reason


def test_the_config_is_given_to_a_client_that_asks_and_compared_with_one_that_has_its_own():
    table = Table(terms=Terms("name: x\n", {"model": "aa", "data": "bb"}))
    try:
        table.say(Kind.CONFIG)
        assert table.hear().meta == {"config_yaml": "name: x\n"}
        table.hello(config={"model": "aa", "data": "cc"})
        reason = table.hear().meta["reason"]
        assert reason == "refused: different config: 'data' differs from the server's config.yaml"
        assert "different config" in table.event().reason
    finally:
        table.close()


def test_a_client_that_has_the_config_may_take_long_to_build_its_model_or_to_be_consented_to():
    table = Table(terms=Terms("name: x\n"), join_s=0.2)
    try:
        table.say(Kind.CONFIG)
        assert table.hear().kind is Kind.CONFIG
        time.sleep(0.4)
        table.greet()
    finally:
        table.close()


@pytest.mark.parametrize("data", ["bb", "own"])
def test_a_client_may_have_data_of_its_own(data):
    table = Table(terms=Terms("name: x\n", {"model": "aa", "data": "bb"}))
    try:
        table.hello(config={"model": "aa", "data": data}, own_data=data == "own")
        assert table.hear().kind is Kind.WELCOME
        assert table.event().client.own_data is (data == "own")
    finally:
        table.close()


def test_a_client_has_no_more_samples_than_it_was_dealt():
    table = Table(share=16)
    try:
        table.hello()
        reason = table.hear().meta["reason"]
        assert reason.startswith("refused: client 4 says that it has 17 samples, but its share of the run's data is 16")
        assert table.event().reason.startswith("disconnected: too-many-samples: ")
    finally:
        table.close()


@pytest.mark.parametrize("fields", [{"own_data": True}, {"num_samples": 16}, {"num_samples": 3}])
def test_a_client_with_data_of_its_own_or_fewer_than_its_share_may_come(fields):
    table = Table(share=16)
    try:
        table.hello(**fields)
        assert table.hear().kind is Kind.WELCOME
    finally:
        table.close()


HOSTILE = "\x1b[2J\u202e" + "x" * (1 << 12) + "\nnews"


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": HOSTILE},
        {"model": [HOSTILE]},
        {"config": {HOSTILE: 1}},
        {"num_samples": HOSTILE},
        {"profile": {"name": HOSTILE, "flops_per_s": -1.0}},
        {"profile": {HOSTILE: 1}},
    ],
)
def test_what_a_client_says_of_itself_reaches_no_log_raw(changes):
    table = Table(terms=Terms("", {"model": "aa"}))
    try:
        table.hello(**{"config": {"model": "aa"}, **changes})
        event = table.event()
        assert isinstance(event, Lost) and event.reason.isprintable() and len(event.reason) < 600
    finally:
        table.close()


def test_names_that_a_client_gives_are_cleaned_where_they_come_in(table):
    table.hello(profile={**client_to_json(INFO)["profile"], "name": HOSTILE})
    assert table.hear().kind is Kind.WELCOME
    name = table.event().client.profile.name
    assert name.isprintable() and len(name) == 200 and name.startswith(r"\x1b[2J\u202e")
    table.assign()
    table.update(meta={"metrics": {HOSTILE: 1.0, "loss": 0.5}})
    metrics = table.event().update.metrics
    assert sorted(map(len, metrics)) == [4, 200] and all(name.isprintable() for name in metrics)


LONG = tuple((2.0 * i, 2.0 * i + 1.0) for i in range(300))


def test_a_hello_of_more_than_sixteen_kilobytes_is_refused_and_the_client_told(table):
    table.hello(profile={**client_to_json(INFO)["profile"], "name": "x" * (17 << 10)})
    assert re.fullmatch(r"refused: HELLO of 17\d{3} bytes, at most 16384", table.hear().meta["reason"])
    assert table.event().reason.startswith("disconnected: bad-length: HELLO of")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("availability", "has 101 pairs, at most 100 are sent"),
        ("speed_changes", "is sent in full, where only its digest is allowed"),
        ("link_changes", "is sent in full, where only its digest is allowed"),
    ],
)
def test_a_series_is_refused_with_the_remedy(table, name, wrong):
    table.hello(profile={**client_to_json(INFO)["profile"], name: LONG[:101]})
    reason = table.hear().meta["reason"]
    assert f"client 4: {name} {wrong}: give it the same devices in the server's config" in reason


def test_how_much_a_device_varies_is_sent_within_bounds(table):
    table.hello(profile={**client_to_json(INFO)["profile"], "link_drift": 1e9, "drift_s": 1.0})
    assert "link_drift is 1000000000.0; it must be the standard deviation" in table.hear().meta["reason"]


def test_a_client_that_has_the_servers_config_gets_the_changes_that_the_server_keeps():
    profile = Profile(link_changes=((1, 0.5),), repeat_s=9.0, speed_jitter=0.1)
    table = Table(profile=profile)
    try:
        table.hello(profile=client_to_json(replace(INFO, profile=Profile(speed_jitter=0.2)))["profile"])
        assert table.hear().kind is Kind.WELCOME
        assert table.event().client.profile == replace(profile, speed_jitter=0.2)
    finally:
        table.close()


@pytest.mark.parametrize("name", ["availability", "speed_changes", "link_changes"])
def test_a_long_series_that_the_server_has_goes_by_its_digest(name):
    profile = Profile(**{name: LONG})
    hello = Hello.of_client(Identity("m"), replace(INFO, profile=profile)).client
    assert len(json.dumps(hello)) < 1000
    for known, welcome in ((profile, True), (Profile(**{name: LONG[1:]}), False), (Profile(), False)):
        table = Table(profile=known)
        try:
            table.hello(**hello)
            heard = table.hear()
            assert (heard.kind is Kind.WELCOME) is welcome
            assert welcome or "is a time series (digest" in heard.meta["reason"]
            assert not welcome or table.event().client.profile == profile
        finally:
            table.close()


def test_data_of_ones_own_may_be_forbidden():
    table = Table(terms=Terms("", own_data=False))
    try:
        table.hello(own_data=True)
        assert table.hear().meta["reason"] == (
            "refused: client 4 has data of its own, which guard.own_data of this run forbids"
        )
        assert table.event().reason.startswith("disconnected: own-data: ")
    finally:
        table.close()


@pytest.mark.parametrize("reason", ["policy", "dry-run"])
def test_a_client_may_say_in_the_place_of_a_hello_that_it_does_not_join(table, reason):
    table.say(Kind.FAILED, meta={"reason": reason, "error": "what else it says is nobody's business"})
    assert table.hear().kind is Kind.STOP
    event = table.event()
    assert isinstance(event, Lost) and event.reason.startswith(f"disconnected: {reason}: ")
    assert "nobody's business" not in event.reason


def test_no_other_failure_takes_the_place_of_a_hello(table):
    table.say(Kind.FAILED, meta={"reason": "out-of-memory"})
    assert "incompatible: expected HELLO, got FAILED" in table.event().reason
