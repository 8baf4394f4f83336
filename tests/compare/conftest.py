"""The process that runs are forked from is started once for all tests of this folder, and ended after them."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest

from raafl.compare.runs import PRELOADED


@pytest.fixture(scope="package", autouse=True)
def fork_server():
    forkserver.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()
