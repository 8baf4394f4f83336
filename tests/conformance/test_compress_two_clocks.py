"""Compressed runs: both clocks leave the same model, recorded ones replay to the last bit, workers change nothing."""

from __future__ import annotations

from itertools import count

import pytest

from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_rolex, ram_fed
from raafl.compression.plan import Compress
from raafl.runtime.replay import Replay
from raafl.runtime.server.session_protocol import SessionProtocol
from raafl.runtime.setup import build, make_executor
from raafl.transport import Refused
from tests.conformance.clocks import on_both_clocks
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import experiment, finish

pytestmark = pytest.mark.timeout(120)

RUNS = {
    "fed_avg, int8 both ways": (fed_avg(), Compress("int8", "int8")),
    "fed_buff, top_k up": (fed_buff(buffer_size=3), Compress(up="top_k")),
    "fed_buff, top_k both ways": (fed_buff(buffer_size=3), Compress("top_k", "top_k", 0.3)),
    "fed_rolex, top_k both ways": (fed_rolex(), Compress("top_k", "top_k", 0.2)),
    "ram_fed, bf16 down": (ram_fed(), Compress(down="bf16")),
}


@pytest.mark.quick_cases("fed_rolex, top_k both ways")
@pytest.mark.parametrize("name", RUNS)
def test_a_scripted_order_gives_the_simulated_runs_model(tmp_path, name):
    algorithm, compress = RUNS[name]
    base = experiment(tmp_path / "simulated", algorithm, max_updates=10, emulate=False, compress=compress)
    simulated, real = on_both_clocks(base, tmp_path / "real")
    for field in ("versions", "updates_merged", "staleness", "participation", "final"):
        assert real.summary[field] == simulated.summary[field]
    for one, other in zip(_merged(simulated), _merged(real), strict=True):
        for way in ("bytes_down", "bytes_up"):  # real frames have a head, too
            assert 0 < int(other[way]) - int(one[way]) < 1000


def _merged(run):
    rows = [row for row in run.rows() if row["outcome"] == "merged"]
    return sorted(rows, key=lambda row: int(row["assignment"]))


@pytest.mark.quick_cases("fed_buff, top_k both ways")
@pytest.mark.parametrize("name", ["fed_avg, int8 both ways", "fed_buff, top_k both ways", "ram_fed, bf16 down"])
def test_a_recorded_run_of_real_ranks_replays_to_the_last_bit(tmp_path, name):
    algorithm, compress = RUNS[name]
    made = experiment(tmp_path / "real", algorithm, max_updates=20, emulate=False, compress=compress)
    with ranks(made) as fleet:
        real = fleet.serve()
        assert set(fleet.exit_codes().values()) == {0}
    assert_replays(made, real)


def assert_replays(made, real):
    (start,) = [row["start"] for row in real.events("run")]
    parts = build(made, pace=False, **start)
    executor = make_executor(parts, 1)
    replay = Replay(parts.coordinator, executor)
    replay.run(real.events())
    executor.close()
    assert replay.first_difference is None and parts.coordinator.state.values.model_digest() == real.digest


def test_an_update_that_is_damaged_on_its_way_moves_its_clients_residual(tmp_path, monkeypatch):
    """The client does not know, and goes on with what it left out of that one; so does a replay."""
    sound, arrived = SessionProtocol.update, count(1)

    def damaged(self, answer, *more):
        # not assignments of these numbers, one of which a slow client may have until the run's end
        if next(arrived) in (5, 6, 9):
            raise Refused("bad-checksum", "payload")
        return sound(self, answer, *more)

    monkeypatch.setattr(SessionProtocol, "update", damaged)
    compress = Compress("top_k", "top_k", 0.3)
    made = experiment(tmp_path / "real", fed_async(), max_updates=20, emulate=False, compress=compress)
    with ranks(made) as fleet:
        real = fleet.serve()
        assert set(fleet.exit_codes().values()) == {0}
    assert real.summary["updates_refused"] == {"bad-checksum": 3}
    assert_replays(made, real)


@pytest.mark.quick_cases("fed_buff, top_k both ways")
@pytest.mark.parametrize("name", RUNS)
def test_two_workers_give_the_bits_of_one(tmp_path, name):
    algorithm, compress = RUNS[name]
    one = finish(experiment(tmp_path / "one", algorithm, compress=compress))
    two = finish(experiment(tmp_path / "two", algorithm, compress=compress, workers=2))
    plain = finish(experiment(tmp_path / "plain", algorithm))
    assert one.digest == two.digest != plain.digest and one.rows() == two.rows()
    assert one.summary["time_s"] < plain.summary["time_s"]
    for way, is_less in (("bytes_down", compress.down != "none"), ("bytes_up", compress.up != "none")):
        assert (one.summary[way] < plain.summary[way]) is is_less
