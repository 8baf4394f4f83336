"""Ends of each transport, for the tests of them all."""

from __future__ import annotations

import pytest

from tests.conformance.transports import KINDS, Hub, started


@pytest.fixture(scope="module", params=KINDS)
def hub(request):
    with Hub(request.param) as hub:
        yield hub


@pytest.fixture
def ends(hub):
    server, client = hub.ends()
    with server, client:
        yield server, client


@pytest.fixture(scope="module")
def pool():
    with started(4) as pool:
        yield pool
