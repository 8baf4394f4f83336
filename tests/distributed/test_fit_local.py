"""`raafl fit --local`, whole: real servers and clients; launch/test_scripts.py starts them from nothing."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from model_zoo import MLP
from raafl.runtime.replay import replay
from tests.helpers import forkserver
from tests.helpers.forked_command import Command, command, wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
SMALL = ["--config", CONFIG, "--train.num_epochs", "1", "--checkpoint_every", "2"]


class Local:
    """A supervisor and its ranks."""

    def __init__(self, folder: Path, started: Path, running: Command) -> None:
        self.folder, self.started, self.running = folder, started, running

    def ranks(self, *words: str) -> list[psutil.Process]:
        """Its processes with these words in their command lines."""
        return [one.process for one in forkserver.started(self.started, *words)]

    def merged(self) -> int:
        """Updates merged so far, by the table."""
        table = self.folder / "clients.csv"
        return table.read_text().count(",merged") if table.exists() else 0

    def wait_for(self, condition, what: str) -> None:
        def met():
            assert self.running.process.is_alive(), self.running.err
            return condition()

        wait_for(met, what)

    def end(self) -> tuple[int, str, str]:
        """Wait for it; nobody may be left."""
        code = self.running.end()
        assert self.ranks() == []
        return code, self.running.out, self.running.err


@pytest.fixture
def fit(tmp_path):
    """Start `raafl fit` with the options of a small run and more, its ranks forked."""
    with ExitStack() as stack:

        def start(*options):
            folder, started = tmp_path / "run", tmp_path / "started"
            started.mkdir()
            argv = ["fit", *SMALL, "--output", str(folder), *options]
            notes = {forkserver.STARTED: str(started)}
            return Local(
                folder, started, stack.enter_context(command(tmp_path, *argv, before=forkserver.start, **notes))
            )

        yield start


def test_a_run_lives_through_the_death_of_its_server_and_of_a_client(fit):
    local = fit("--local", "2", "--max_updates", "60", "--json")
    local.wait_for(lambda: local.merged() >= 4, "the first checkpoints")
    before = local.ranks("serve")
    before[0].kill()
    local.wait_for(lambda: local.ranks("serve") not in ([], before), "the next server")
    at_restart = local.merged()
    local.wait_for(lambda: local.merged() > at_restart + 4, "the run to go on")
    local.wait_for(lambda: local.ranks("--client", "2"), "client 2, which may have been started again, too")
    (client,) = local.ranks("--client", "2")
    client.kill()
    code, out, err = local.end()
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["finished"], summary["updates_merged"]) == ("max_updates", 60)
    assert summary == json.loads((local.folder / "summary.json").read_text())
    assert (
        "raafl: the server was killed by SIGKILL; it is started again in 1 s, from its last checkpoint if there is one"
        in err
    )
    assert "raafl: client 2 was killed by SIGKILL; it is started again in 1 s" in err
    assert {file.name for file in (local.folder / "logs").iterdir()} == {"client-1.log", "client-2.log"}
    assert replay(local.folder)["equal"] is True


def test_ctrl_c_ends_a_run_with_its_summary_and_no_rank_is_left(fit):
    local = fit("--local", "2", "--max_updates", "100000", "--progress", "quiet")
    local.wait_for(lambda: local.merged() >= 2, "work")
    local.running.send(signal.SIGINT)
    code, out, err = local.end()
    assert (code, err) == (130, "")
    assert "finished: interrupted" in out
    assert json.loads((local.folder / "summary.json").read_text())["finished"] == "interrupted"


def test_bad_input_is_said_once_and_before_anything_starts(fit, tmp_path):
    code, out, err = fit("--local", "2", "--model.hiden", "3").end()
    assert (code, out) == (2, "")
    assert err == "raafl: unknown field model.hiden: did you mean 'hidden'?\n"
    assert not (tmp_path / "run").exists()


class FailsAtClientTwo(MLP):
    """Fails in the process of client 2, whichever batch it is at."""

    def training_step(self, batch, batch_idx):
        is_client_2 = "join" in sys.argv and sys.argv[sys.argv.index("--client") + 1] == "2"
        if is_client_2 and len(batch[1]) > 2:
            raise ValueError(f"batch of {batch[1].sum()}")
        return super().training_step(batch, batch_idx)


@pytest.mark.long(
    "tests/runtime/local/test_supervisor.py::test_bad_input_and_an_interrupt_are_not_mended_by_another_start"
)
def test_a_client_whose_code_fails_twice_alike_ends_the_run(fit, tmp_path):
    """Once may be the machine: it is started again. What it says of its batch may differ."""
    local = fit("--local", "2", "--json", "--model", f"{__name__}.FailsAtClientTwo", "--max_updates", "100000")
    code, out, err = local.end()
    summary = json.loads(out)
    assert code == 1 and summary["finished"].startswith("failed: client 2, task ")
    assert "ValueError: batch of" in summary["finished"] and "test_fit_local.py:" in summary["finished"]
    assert summary["updates_lost_by_reason"] and len(summary["warnings"]) == 1
    assert (local.folder / "failure.txt").read_text().count("Traceback") == 2
    assert err.count("it is started again") >= 1  # and again until the server, which ends for it, has ended
    assert [line for line in err.splitlines() if line.startswith("raafl: client 2, task ")]
