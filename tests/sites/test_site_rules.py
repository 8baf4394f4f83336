"""Claims of a client, and what its site may claim."""

from __future__ import annotations

import pytest

from raafl.core.types import ClientInfo
from raafl.devices import Profile
from raafl.sites.server import SiteRules
from raafl.transport import Refused


def info(**changes):
    return ClientInfo(3, **{"num_samples": 50, "profile": Profile(flops_per_s=1e9)} | changes)


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        (info(), None),
        (info(num_samples=51), "too-many-samples"),
        (info(own_data=True), "own-data"),
        (info(profile=Profile(flops_per_s=3e9)), "profile"),
        (info(profile=Profile(flops_per_s=1e8)), "profile"),
    ],
)
def test_what_a_client_may_claim(claimed, reason):
    rules = SiteRules(frozenset({3}), 50, False, {"flops_per_s": (1e9, 2e9)})
    if reason is None:
        rules.check(claimed)
        return
    with pytest.raises(Refused) as refused:
        rules.check(claimed)
    assert refused.value.reason == reason
