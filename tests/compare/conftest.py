"""Runs of a comparison are forked from the tests' process, which has imported everything; `test_ctrl_c` has real ones."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys

import pytest

from raafl.commands.cli import main
from raafl.compare import runs, verify
from tests.helpers import cached_models


def _command(argv, log):
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(log, "ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    with cached_models.reuse_findings():
        sys.exit(main(argv))


def start(argv, log):
    process = mp.get_context("fork").Process(target=_command, args=(list(argv), str(log)))
    process.start()
    return process


@pytest.fixture(scope="package", autouse=True)
def forked():
    with pytest.MonkeyPatch.context() as patch:
        for module in (runs, verify):
            patch.setattr(module, "start", start)
        cached_models.warm_up()
        yield
