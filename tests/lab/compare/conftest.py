"""Runs of a comparison are forked from the tests' process, which has imported everything; a few tests have real ones."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys

import pytest

from raafl.commands.cli import main
from raafl.lab.compare import processes
from tests.helpers import cached_models


def _command(argv, log, num_ranks):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    processes.set_up_process(log)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    with cached_models.reuse_findings(), processes.other_ranks(argv, num_ranks, log):
        sys.exit(main(argv))


def new_process(argv, log, num_ranks):
    return mp.get_context("fork").Process(target=_command, args=(list(argv), log, num_ranks))


def new_waiter(argv, log, cluster):
    return mp.get_context("fork").Process(target=processes._wait_for_job, args=(list(argv), log, cluster))


@pytest.fixture(scope="package", autouse=True)
def forked():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_new_process", new_process)
        patch.setattr(processes, "_new_waiter", new_waiter)
        cached_models.warm_up()
        yield
