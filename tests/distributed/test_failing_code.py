"""The user's code, or memory, that fails in a client on real ranks: the run ends, or goes on, and says why."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from model_zoo import MLP
from raafl.core.types import OUT_OF_MEMORY
from raafl.runtime import checkpoint
from raafl.runtime.session import Waits
from tests import ranks as of_this_process
from tests.federation import experiment
from tests.ranks import ranks

pytestmark = pytest.mark.timeout(120)


class FailsAtClient2(MLP):
    """Fails in client 2's third step."""

    steps = 0

    def training_step(self, batch, batch_idx):
        type(self).steps += 1
        if of_this_process.RANK == 2 and self.steps > 3:  # one is the trial before the run, or the measuring of costs
            raise KeyError("no such\nfile\x1b[31m")
        return super().training_step(batch, batch_idx)


def test_code_that_fails_in_a_rank_ends_the_run(tmp_path):
    made = experiment(
        tmp_path / "run", "fed_async", model=lambda: FailsAtClient2(64, (8,), 10), clients=2, max_updates=500
    )
    with ranks(made) as started:
        run = started.serve()
        codes = started.exit_codes()
    reason = run.summary["finished"]
    assert reason.startswith("failed: client 2, task ") and "submodel full, batch " in reason
    assert "KeyError: 'no such\\nfile\\x1b[31m' (tests/distributed/test_failing_code.py:" in reason
    assert "in training_step" in run.text("failure.txt")
    assert codes[2] == 1 and run.summary["updates_merged"] < 500
    assert run.rows()[-1]["client"] and checkpoint.load(run.folder).raafl["finished"] is None
    (lost,) = run.events("lost")
    assert lost["client"] == 2 and lost["reason"].startswith("failed: task ")


class HungryAtClient1(MLP):
    """Needs more memory than client 1 has, in every real step after the trial."""

    def training_step(self, batch, batch_idx):
        followed = type(batch[0]) is not torch.Tensor or batch[0].is_meta
        if of_this_process.RANK == 1 and len(batch[1]) > 2 and not followed:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("algorithm", ["fed_async", "split_fed"])
def test_a_rank_without_memory_is_refused_and_the_other_goes_on(tmp_path, algorithm):
    made = experiment(tmp_path / "run", algorithm, model=lambda: HungryAtClient1(64, (8,), 10), clients=2, devices=None)
    with ranks(replace(made, max_updates=9)) as started:
        run = started.serve()
        codes = started.exit_codes()
    assert run.summary["finished"] == "max_updates" and codes == {1: 0, 2: 0}
    assert run.summary["updates_refused"][OUT_OF_MEMORY] == 3 and run.summary["participation"] == {"1": 0, "2": 9}
    assert run.summary["clients_kept_out"] == {"1": 1}


class SlowAtFirst(MLP):
    """Takes longer for its first evaluation than clients wait to join."""

    seen = 0

    def validation_step(self, batch, batch_idx):
        type(self).seen += 1
        if self.seen == 1:
            time.sleep(2.5)
        return super().validation_step(batch, batch_idx)


def test_clients_wait_for_a_first_evaluation_longer_than_join_s(tmp_path, monkeypatch):
    monkeypatch.setattr(SlowAtFirst, "seen", 0)
    made = experiment(tmp_path / "run", model=lambda: SlowAtFirst(64, (8,), 10), clients=2, waits=Waits(join_s=1.0))
    with ranks(made) as started:
        run = started.serve()
        assert started.exit_codes() == {1: 0, 2: 0}
    assert run.summary["finished"] == "max_updates" and SlowAtFirst.seen > 1
