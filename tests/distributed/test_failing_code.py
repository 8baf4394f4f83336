"""The user's code, or memory, that fails in a client on real ranks: the run ends, or goes on, and says why."""

from __future__ import annotations

import pytest
import torch

from model_zoo import MLP
from raafl.rerun import replay
from raafl.runtime import checkpoint
from tests import ranks as of_this_process
from tests.federation import experiment
from tests.ranks import ranks

pytestmark = [pytest.mark.timeout(120), pytest.mark.distributed] if False else pytest.mark.timeout(120)


class FailsAtClient2(MLP):
    """Fails in client 2's third step."""

    steps = 0

    def training_step(self, batch, batch_idx):
        type(self).steps += 1
        if of_this_process.RANK == 2 and self.steps > 3:  # one is the trial before the run, or the measuring of costs
            raise KeyError("no such\nfile\x1b[31m")
        return super().training_step(batch, batch_idx)


def test_code_that_fails_in_a_rank_ends_the_run(tmp_path):
    made = experiment(tmp_path / "run", "fed_async", model=lambda: FailsAtClient2(64, (8,), 10), clients=2, max_updates=500)
    with ranks(made) as started:
        run = started.serve()
        codes = started.exit_codes()
    reason = run.summary["finished"]
    assert reason.startswith("failed: client 2, task ") and "submodel full, batch " in reason
    assert "KeyError: 'no such\\nfile\\x1b[31m' (tests/distributed/test_failing_code.py:" in reason
    assert "in training_step" in run.text("failure.txt")
    assert codes[2] == 1 and run.summary["updates_merged"] < 500
    assert run.rows()[-1]["client"] and checkpoint.load(run.folder).raafl["finished"] is None
    (lost,) = [event for event in run.events("lost")]
    assert lost["client"] == 2 and lost["reason"].startswith("failed: task ")
