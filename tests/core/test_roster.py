"""The coordinator's books on clients."""

from __future__ import annotations

import random

from raafl.core.roster import Roster
from raafl.core.sample import Sample
from raafl.core.types import ClientInfo
from raafl.devices.profiles import Profile


def test_who_was_drawn_starts_in_turn_and_who_leaves_meanwhile_does_not():
    roster = Roster()
    for client in (3, 1, 4, 2):
        roster.join(ClientInfo(client, 1, Profile()))
    assert roster.draw(Sample(), random.Random(0), rolling=False) and list(roster.drawn) == [1, 2, 3, 4]
    roster.drop(2)
    roster.drop(4)
    assert [client.id for client in roster.out] == [1, 3] and roster.num_out == 2
    assert [roster.next_to_start(None).id, roster.next_to_start(None).id] == [1, 3]
    assert roster.next_to_start(None) is None
