"""Clients that measure their memory: they say so, the journal keeps it, and a limit decides what they train."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")

GIB = 2**30


def fit_local(folder, limit):
    def limited():
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    command = [
        sys.executable, "-m", "raafl", "fit", "--local", "2", "--config", "configs/quickstart.yaml", "--max_updates", "4",
        "--max_restarts", "0", "--progress", "plain", "--output", str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, preexec_fn=limited, check=False
    )


def joined(folder):
    rows = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [row["profile"]["memory_bytes"] for row in rows if row["event"] == "joined"]


@pytest.mark.slow("a server and two clients start from nothing")
def test_under_a_limit_each_client_has_what_it_leaves(tmp_path):
    result = fit_local(tmp_path / "run", limit=3 * GIB)
    assert result.returncode == 0, result.stderr
    found = joined(tmp_path / "run")
    assert len(found) == 2 and all(0.2 * GIB < number < 3 * GIB for number in found)
    said = (tmp_path / "run" / "logs" / "client-1.log").read_text()
    assert f"memory for a task: {found[0] / 1e6:,.0f} MB of" in said or f"{found[1] / 1e6:,.0f} MB of" in said
    assert "left (RLIMIT_DATA)" in said
