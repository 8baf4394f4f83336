"""What several files of tests of the runtime have in common."""

from __future__ import annotations

import pytest

from tests.runtime.server.sessions import Table


@pytest.fixture
def table():
    """A session, and the client at its other end, which the test plays."""
    table = Table()
    yield table
    table.close()
