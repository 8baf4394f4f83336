"""`raafl fit --local`, whole: real servers and clients, found by what they have in their environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from model_zoo import MLP

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
MARK = "RAAFL_TEST_MARK"
DEADLINE_S = 120.0
SMALL = ["--config", "configs/quickstart.yaml", "--train.num_epochs", "1", "--checkpoint_every", "2"]


class Local:
    """A supervisor and its ranks."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.mark, self.folder = uuid.uuid4().hex, folder
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raafl", "fit", *SMALL, "--output", str(folder), *options], cwd=ROOT, text=True,
            env={**environment, MARK: self.mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def ranks(self, command: str = "", client: str = "") -> list[psutil.Process]:
        """Its processes that run `raafl COMMAND`, of one client."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                ours = process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
                wanted = command in words if command else process.pid != self.process.pid
                if ours and wanted and (not client or ["--client", client] == words[-2:]):
                    found.append(process)
        return found

    def merged(self) -> int:
        """Updates merged so far, by the table."""
        table = self.folder / "clients.csv"
        return table.read_text().count(",merged") if table.exists() else 0

    def wait_for(self, condition, what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.05)

    def end(self) -> tuple[int, str, str]:
        """Wait for it; nobody may be left."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        assert self.ranks() == []
        return self.process.returncode, out, err


@pytest.fixture
def fit(tmp_path):
    """Start `raafl fit` with the options of a small run and more."""
    started: list[Local] = []

    def start(*options):
        started.append(Local(tmp_path / "run", *options))
        return started[-1]

    yield start
    for local in started:
        for process in [local.process, *local.ranks()]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        local.process.communicate()


@pytest.mark.slow("a supervisor, a server twice and two clients, one twice, start from nothing")
def test_a_run_lives_through_the_death_of_its_server_and_of_a_client(fit):
    local = fit("--local", "2", "--max_updates", "60", "--json")
    local.wait_for(lambda: local.merged() >= 4, "the first checkpoints")
    before = local.ranks("serve")
    before[0].kill()
    local.wait_for(lambda: local.ranks("serve") not in ([], before), "the next server")
    at_restart = local.merged()
    local.wait_for(lambda: local.merged() > at_restart + 4, "the run to go on")
    (client,) = local.ranks("join", client="2")
    client.kill()
    code, out, err = local.end()
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["finished"], summary["updates_merged"]) == ("max_updates", 60)
    assert summary == json.loads((local.folder / "summary.json").read_text())
    assert (
        "raafl: the server was killed by SIGKILL; it goes on from its last checkpoint, if there is one, in 1 s" in err
    )
    assert "raafl: client 2 was killed by SIGKILL; it is started again in 1 s" in err
    assert {file.name for file in (local.folder / "logs").iterdir()} == {"client-1.log", "client-2.log"}
    replayed = subprocess.run(
        [sys.executable, "-m", "raafl", "replay", str(local.folder), "--json"],
        cwd=ROOT,
        capture_output=True,
        timeout=100,
    )
    assert json.loads(replayed.stdout)["equal"] is True


@pytest.mark.long
def test_ctrl_c_ends_a_run_with_its_summary_and_no_rank_is_left(fit):
    local = fit("--local", "2", "--max_updates", "100000", "--progress", "quiet")
    local.wait_for(lambda: local.merged() >= 2, "work")
    local.process.send_signal(signal.SIGINT)
    code, out, err = local.end()
    assert (code, err) == (130, "")
    assert "finished: interrupted" in out
    assert json.loads((local.folder / "summary.json").read_text())["finished"] == "interrupted"


@pytest.mark.slow("a supervisor and a server start from nothing")
def test_bad_input_is_said_once_and_before_anything_starts(fit, tmp_path):
    code, out, err = fit("--local", "2", "--model.hiden", "3").end()
    assert (code, out) == (2, "")
    assert err == "raafl: unknown field model.hiden: did you mean 'hidden'?\n"
    assert not (tmp_path / "run").exists()


class FailsWhereTheLabelIsNine(MLP):
    """Fails in the process of client 2, whichever batch it is at."""

    def training_step(self, batch, batch_idx):
        if "join" in sys.argv and sys.argv[-1] == "2" and len(batch[1]) > 2:
            raise ValueError(f"batch of {batch[1].sum()}")
        return super().training_step(batch, batch_idx)


@pytest.mark.long
def test_a_client_whose_code_fails_twice_alike_ends_the_run(fit, tmp_path):
    """Once may be the machine: it is started again. What it says of its batch may differ."""
    local = fit("--local", "2", "--json", "--model", f"{__name__}.FailsWhereTheLabelIsNine", "--max_updates", "100000")
    code, out, err = local.end()
    summary = json.loads(out)
    assert code == 1 and summary["finished"].startswith("failed: client 2, task ")
    assert "ValueError: batch of" in summary["finished"] and "test_fit_local.py:" in summary["finished"]
    assert summary["updates_lost_by_reason"] and len(summary["warnings"]) == 1
    assert (local.folder / "failure.txt").read_text().count("Traceback") == 2
    assert err.count("it is started again") >= 1  # and again until the server, which ends for it, has ended
    assert [line for line in err.splitlines() if line.startswith("raafl: client 2, task ")]
