from __future__ import annotations

import json

import pytest

from raafl.core.restoring import client_from_json
from raafl.core.saving import client_to_json
from raafl.core.types import ClientInfo, Joined
from raafl.devices.profiles import Profile
from raafl.devices.recordings import (
    MOST_PAIRS,
    as_sent,
    digest,
    full_profile,
    long_series,
    problem_of_sent,
    restored,
    shortened,
)
from raafl.runfolder.events import JournalReader
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.record import RunRecord
from raafl.runtime.replay import event_of

LONG = tuple((2.0 * i, 2.0 * i + 1.0) for i in range(MOST_PAIRS + 1))


def test_a_digest_goes_by_the_numbers_alone():
    assert digest([(0, 1), (2, 3)]) == digest([[0.0, 1.0], [2.0, 3.0]]) != digest([(0, 1), (2, 4)])


def test_only_what_is_long_goes_by_its_digest_and_comes_back():
    plain = client_to_json(ClientInfo(1, 5, Profile(availability=LONG, speed_changes=LONG[1:])))["profile"]
    short = shortened(plain)
    assert short["availability"] == {"digest": digest(LONG)} and short["speed_changes"] == plain["speed_changes"]
    assert restored(short, long_series(plain)) == plain
    with pytest.raises(ValueError, match=r"availability is a time series .digest"):
        restored(short, {})


def plain(**fields):
    return client_to_json(ClientInfo(1, 5, Profile(**fields)))["profile"]


def test_a_client_sends_the_digest_of_its_changes_however_short_and_gets_the_servers_where_it_has_none():
    changes = {"speed_changes": ((1, 0.5),), "link_changes": ((2, 2),), "repeat_s": 5.0}
    own = plain(**changes, availability=((0, 9),))
    sent = as_sent(own)
    assert sent["speed_changes"] == {"digest": digest([(1, 0.5)])} and sent["availability"] == ((0.0, 9.0),)
    assert problem_of_sent(sent) is None and full_profile(sent, own) == own
    assert full_profile(plain(flops_per_s=5.0), own) == {
        **plain(flops_per_s=5.0),
        **plain(**changes),
        "flops_per_s": 5.0,
    }
    with pytest.raises(ValueError, match=r"link_changes is a time series .digest"):
        full_profile(sent, plain(speed_changes=((1, 0.5),)))


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"speed_changes": [[1, 0.5]]}, "speed_changes is sent in full"),
        ({"link_changes": 5}, "link_changes is sent in full"),
        ({"link_changes": {"digest": "x" * 32}}, "link_changes is a mapping without a digest"),
        ({"availability": {"digest": "0" * 32, "more": 1}}, "availability is a mapping without a digest"),
        ({"availability": [[0, 1]] * 101}, "availability has 101 pairs"),
    ],
)
def test_a_client_sends_no_series(profile, said):
    assert said in problem_of_sent(profile)


def test_the_journal_has_a_long_series_once_however_often_its_client_joins(tmp_path):
    clients = [ClientInfo(1, 5, Profile(availability=LONG), incarnation=n) for n in range(50)]
    with RunFolder(tmp_path / "run", "") as folder:
        record = RunRecord(folder)
        for now, client in enumerate(clients):
            record.event(Joined(client), float(now))
    first, *others = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert len(first) > 1000 and max(map(len, others)) < 500
    series = {}
    assert [event_of(row, series).client for row in JournalReader(tmp_path / "run").written()] == clients


def test_a_window_that_never_ends_survives_the_wire_and_the_journal():
    client = ClientInfo(1, 5, Profile(availability=((0.0, 1.0), (2.0, float("inf")))))
    assert client_from_json(json.loads(json.dumps(client_to_json(client), allow_nan=False))) == client
