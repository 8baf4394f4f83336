"""SplitFed on both clocks where its client's half is compressed, refused in the middle, or leaves out the last batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.data import DataLoader

from model_zoo import MLP
from raafl.algorithms import split_fed
from raafl.algorithms.split_fed.exchange import Batches
from raafl.compression.plan import Compress
from raafl.core.algorithm import Training
from raafl.data import Digits
from raafl.errors import InvalidPayload
from raafl.runtime.run import simulate
from raafl.runtime.server.session_protocol import SessionProtocol
from raafl.transport import Refused
from tests.conformance.clocks import on_both_clocks
from tests.conformance.test_compress_two_clocks import assert_replays
from tests.helpers.crash import crash
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import equal_replay, experiment, finish

pytestmark = pytest.mark.timeout(240)

WIRES = [Compress("int8", "int8"), Compress("top_k", "top_k", 0.3), Compress("bf16", "none"), Compress("none", "top_k")]


def model() -> MLP:
    return MLP(64, (24, 16), 10, lr=0.05, momentum=0.5)


def made(output, compress=None, **more):
    more = {"model": model, "max_updates": 12, "emulate": False, **more}
    return experiment(output, split_fed(client_layers=1), compress=compress or Compress(), **more)


@pytest.mark.quick_cases("top_k top_k")
@pytest.mark.parametrize("compress", WIRES, ids=lambda one: f"{one.down} {one.up}")
def test_real_ranks_leave_the_simulated_runs_model(tmp_path, compress):
    simulated, real = on_both_clocks(made(tmp_path / "simulated", compress), tmp_path / "real")
    assert real.summary["updates_refused"] == simulated.summary["updates_refused"] == {}
    tasks = [sorted(run.rows(), key=lambda row: int(row["assignment"])) for run in (simulated, real)]
    for one, other in zip(*tasks, strict=True):
        for way in ("bytes_down", "bytes_up"):  # real frames have a head, too: those of a task and of its three batches
            assert 0 < int(other[way]) - int(one[way]) < 4 * 1000
    assert_replays(made(tmp_path / "real", compress), real)


@pytest.mark.long(
    "tests/conformance/test_compress_two_clocks.py::test_an_update_that_is_damaged_on_its_way_moves_its_clients_residual"
)
def test_a_refused_task_starts_its_clients_residual_anew_in_a_replay_too(tmp_path, monkeypatch):
    """Assignment 6 is refused in its second batch, 7 and 9 when all has come."""
    update, layout = SessionProtocol.update, Batches._expect

    def damaged(self, answer, *more):
        if answer.assignment in (7, 9):
            raise Refused("bad-checksum", "payload")
        return update(self, answer, *more)

    def strange(self, meta):
        if self._link._talk._assignment.id == 6 and self._index == 1:
            raise InvalidPayload("wrong-shape", "of a batch")
        return layout(self, meta)

    monkeypatch.setattr(SessionProtocol, "update", damaged)
    monkeypatch.setattr(Batches, "_expect", strange)
    config = made(tmp_path / "real", Compress("top_k", "top_k", 0.3), max_updates=20)
    with ranks(config) as fleet:
        real = fleet.serve()
        assert set(fleet.exit_codes().values()) == {0}
    assert real.summary["updates_refused"] == {"bad-checksum": 2, "wrong-shape": 1}
    assert_replays(config, real)


@pytest.mark.long(
    "tests/conformance/test_executors.py::test_every_algorithm_ends_alike_over_ranks_and_when_it_has_crashed_and_goes_on_elsewhere"
)
def test_a_simulation_that_crashed_ends_as_if_it_had_not(tmp_path, monkeypatch):
    compress, more = Compress("top_k", "top_k"), {"max_updates": 24, "checkpoint_every": 1}
    whole = finish(made(tmp_path / "whole", compress, **more))
    cut = made(tmp_path / "cut", compress, **more)
    with crash(monkeypatch, 13):
        simulate(cut)
    resumed = finish(replace(cut, output=None, resume=cut.output))
    assert resumed.digest == whole.digest
    assert all(resumed.summary[way] == whole.summary[way] for way in ("bytes_up", "bytes_down"))
    assert equal_replay(cut, resumed)


class Dropping(Digits):
    """Without the last batch of each epoch, which has fewer samples."""

    def train_dataloader(self):
        loader = super().train_dataloader()
        return DataLoader(loader.dataset, loader.batch_size, shuffle=True, drop_last=True)


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize("training", [Training(num_epochs=2), Training(num_epochs=None, num_steps=7)])
def test_the_server_waits_for_no_batch_that_is_left_out(tmp_path, training):
    """About 359 samples a client: in batches of 100 three, and one that is left out."""
    config = made(tmp_path / "s", data=lambda: Dropping(batch_size=100), train=training, max_updates=4)
    _, real = on_both_clocks(config, tmp_path / "real")
    assert real.summary["updates_refused"] == {}
    assert {row["num_steps"] for row in real.rows()} == {"6" if training.num_steps is None else "7"}
