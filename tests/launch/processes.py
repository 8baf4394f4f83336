"""Programs that a test starts, and that are gone when it ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
WAIT_S = 400
"""For a program of several processes, on a machine that does other things too."""


@contextlib.contextmanager
def started(*command, cwd=ROOT, **more):
    """A program, killed at the end with all that it has started, in whatever session."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    everyone = [psutil.Process(process.pid)]
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            everyone += everyone[0].children(recursive=True)
        for one in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()


def until(happened, *processes):
    """Wait until something has happened, for as long as the programs run."""
    deadline = time.monotonic() + WAIT_S
    while not happened():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
