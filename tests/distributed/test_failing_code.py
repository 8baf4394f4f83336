"""The user's code, or memory, that fails in a client on real ranks: the run ends, or goes on, and says why."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace

import pytest
import torch

from model_zoo import MLP
from raafl.config.options import Timeouts
from raafl.core.types import OUT_OF_MEMORY, Arrived, Lost, Stop
from raafl.local import failure
from raafl.runfolder import checkpoint_reader
from tests.helpers import real_ranks as of_this_process
from tests.helpers.joining_clients import remote
from tests.helpers.real_ranks import Watched, ranks
from tests.helpers.small_runs import experiment

pytestmark = pytest.mark.timeout(120)
ENDLESS = {"clients": 2, "max_updates": 100_000}


def until(num, awaited, client):
    """An inbox that ends the run at the first answer of ``client`` after so many events that are ``awaited``."""
    left = [num]

    def look(event):
        left[0] -= bool(awaited(event))
        if left[0] <= 0 and isinstance(event, Arrived) and event.update.client == client:
            inbox.put(Stop("stopped: seen"))

    inbox = Watched(look)
    return inbox


NUM_STEPS = [0]


class FailsAtClient2(MLP):
    """Fails in client 2's third step."""

    def training_step(self, batch, batch_idx):
        NUM_STEPS[0] += 1
        if of_this_process.RANK == 2 and NUM_STEPS[0] > 3:  # one is the trial before the run, or the measuring of costs
            raise KeyError("no such\nfile\x1b[31m")
        return super().training_step(batch, batch_idx)


def test_code_that_fails_in_a_rank_ends_the_run(tmp_path):
    made = experiment(tmp_path / "run", "fed_async", model=lambda: FailsAtClient2(64, (8,), 10), **ENDLESS)
    with ranks(made) as started:
        run = started.serve()
        codes = started.exit_codes()
    reason = run.summary["finished"]
    assert reason.startswith("failed: client 2, task ") and "submodel full, batch " in reason
    assert "KeyError: 'no such\\nfile\\x1b[31m' (tests/distributed/test_failing_code.py:" in reason
    assert "in training_step" in run.text("failure.txt")
    assert codes[2] == 1
    assert run.rows()[-1]["client"] and checkpoint_reader.load(run.folder).raafl["finished"] is None
    (lost,) = run.events("lost")
    assert lost["client"] == 2 and lost["reason"].startswith("failed: task ")


def _no_gpu_any_more(rank: int) -> None:
    failure._is_lost = lambda device: True


def test_a_gpu_that_fails_ends_its_client_alone_with_a_message(tmp_path, capfd):
    made = experiment(tmp_path / "run", "fed_async", model=lambda: FailsAtClient2(64, (8,), 10), **ENDLESS)
    with ranks(made, _no_gpu_any_more) as started:
        run = started.serve(until(1, lambda event: isinstance(event, Lost), 1))
        codes = started.exit_codes()
    assert run.summary["finished"] == "stopped: seen"
    assert codes == {1: 0, 2: 0}  # or torchrun would end all
    (lost,) = [row for row in run.events("lost") if row["client"] == 2]
    assert lost["reason"].startswith("gpu: task ") and lost["reason"].endswith(
        "; its process can no longer use the GPU"
    )
    assert any(row["outcome"] == "lost:gpu" for row in run.rows())
    said = " ".join(capfd.readouterr().err.split())  # lines are fitted to the terminal
    assert re.search(r"client 2, task .*; its process can no longer use the GPU; the others go on", said)


class HungryAtClient1(MLP):
    """Needs more memory than client 1 has, in every real step after the trial."""

    def training_step(self, batch, batch_idx):
        followed = type(batch[0]) is not torch.Tensor or batch[0].is_meta
        if of_this_process.RANK == 1 and len(batch[1]) > 2 and not followed:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("algorithm", ["fed_async", "split_fed"])
def test_a_rank_without_memory_is_refused_and_the_other_goes_on(tmp_path, algorithm):
    made = experiment(tmp_path / "run", algorithm, model=lambda: HungryAtClient1(64, (8,), 10), devices=None, **ENDLESS)
    with ranks(made) as started:
        run = started.serve(
            until(3, lambda event: isinstance(event, Arrived) and event.update.refusal == OUT_OF_MEMORY, 2)
        )
        codes = started.exit_codes()
    assert run.summary["finished"] == "stopped: seen" and codes == {1: 0, 2: 0}
    assert run.summary["updates_refused"][OUT_OF_MEMORY] == 3
    assert run.summary["participation"]["1"] == 0 < run.summary["participation"]["2"]
    assert run.summary["clients_kept_out"] == {"1": 1}


NUM_VALIDATED = [0]


class SlowAtFirst(MLP):
    """Takes longer for its first evaluation than clients wait to join."""

    def validation_step(self, batch, batch_idx):
        NUM_VALIDATED[0] += 1
        if NUM_VALIDATED[0] == 1:
            time.sleep(4.0)
        return super().validation_step(batch, batch_idx)


def test_clients_wait_for_a_first_evaluation_longer_than_join_s(tmp_path, monkeypatch):
    NUM_VALIDATED[0] = 0
    made = experiment(tmp_path / "run", model=lambda: SlowAtFirst(64, (8,), 10), clients=2, waits=Timeouts(join_s=3.0))
    with ranks(made) as started:
        run = started.serve()
        assert started.exit_codes() == {1: 0, 2: 0}
    assert run.summary["finished"] == "max_updates" and NUM_VALIDATED[0] > 1


def test_code_that_fails_in_a_client_that_has_joined_ends_that_client_alone(tmp_path):
    made = experiment(tmp_path / "run", "fed_async", model=lambda: FailsAtClient2(64, (8,), 10), **ENDLESS)
    with remote(made, "", tmp_path, [1, 2]) as fleet:
        run = fleet.serve(until(1, lambda event: isinstance(event, Lost), 1))
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 1]
        words = fleet.joiners[1].words()
    assert run.summary["finished"] == "stopped: seen"
    (warning,) = [text for text in run.summary["warnings"] if text.startswith("client 2, task ")]
    assert warning in words and "Traceback" not in words
    assert run.text("failure.txt").count("in training_step") == 1


class FailsAtTheEnd(MLP):
    """Fails in the server's evaluations after the one of the initial model."""

    fails = True

    def validation_step(self, batch, batch_idx):
        if self.fails and threading.current_thread().name == "evaluator":
            raise ZeroDivisionError("no share")
        return super().validation_step(batch, batch_idx)


def test_a_last_evaluation_that_failed_is_made_when_the_run_is_resumed(tmp_path, monkeypatch):
    model = {"model": lambda: FailsAtTheEnd(64, (8,), 10)}
    made = experiment(tmp_path / "run", "fed_async", clients=2, eval_every=100, **model)
    with ranks(made) as started:
        failed = started.serve()
        assert started.exit_codes() == {1: 0, 2: 0}
    assert failed.summary["finished"].startswith("failed: evaluation of the global model at version 12: ZeroDivision")
    monkeypatch.setattr(FailsAtTheEnd, "fails", False)
    with ranks(replace(made, resume=str(failed.folder))) as started:
        run = started.serve()
        assert started.exit_codes() == {1: 0, 2: 0}
    assert run.summary["finished"] == "max_updates" and run.digest == failed.digest
    assert [row["version"] for row in run.rows("metrics.csv")] == ["0", "12"]
    assert run.rows() == failed.rows() and not run.events("lost")
    assert run.summary["model"] == "checkpoints/version-000012.ckpt"
