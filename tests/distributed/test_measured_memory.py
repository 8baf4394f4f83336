"""Clients that measure their memory: they say so, the journal keeps it, and a limit decides what they train."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

from raafl.units import size
from tests.helpers import forkserver
from tests.helpers.forked_command import command

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")

GIB = 2**30


def room():
    """A limit that leaves this process a GiB more than it has."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024 + GIB


def joined(folder):
    rows = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [row["profile"]["memory_bytes"] for row in rows if row["event"] == "joined"]


@pytest.mark.long("tests/devices/test_measure.py::test_a_process_under_a_limit_finds_what_it_leaves")
def test_under_a_limit_each_client_has_what_it_leaves(tmp_path):
    limit = room()

    def limited():
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        forkserver.start()

    argv = ["fit", "--local=2", "--config=configs/quickstart.yaml", "--max_updates=4", "--max_restarts=0"]
    argv += ["--progress=plain", f"--output={tmp_path / 'run'}"]
    with command(tmp_path / "c", *argv, before=limited) as started:
        assert started.end() == 0, started.err
    found = joined(tmp_path / "run")
    assert len(found) == 2 and all(0.2 * GIB < number < limit for number in found)
    said = (tmp_path / "run" / "logs" / "client-1.log").read_text()
    assert f"memory for a task: {size(found[0])} of" in said or f"{size(found[1])} of" in said
    assert "left (RLIMIT_DATA)" in said
