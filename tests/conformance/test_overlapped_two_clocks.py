"""Clients that train while their updates travel: the same model, bit for bit, on both clocks."""

from __future__ import annotations

import pytest

from raafl.algorithms import fed_async, fed_buff, streaming_diloco
from raafl.core.algorithm import Training
from raafl.core.options import Compress
from raafl.parts.select.rate_select import RateSelect
from raafl.runtime.overlap import EarlyTask
from tests.conformance.clocks import on_both_clocks
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import equal_replay, experiment, unequal

pytestmark = pytest.mark.timeout(90)

CASES = {
    "fed_buff of submodels": (fed_buff(buffer_size=3, submodel=RateSelect(rates=[1.0, 0.5])), Compress()),
    "fed_async, top_k": (fed_async(), Compress(down="top_k", up="top_k")),
    "fed_async, int8": (fed_async(), Compress(down="int8", up="int8")),
}


@pytest.mark.quick_cases("fed_buff of submodels", "fed_async, top_k")
@pytest.mark.parametrize("name", CASES)
def test_real_ranks_in_the_simulated_order_leave_the_same_model(tmp_path, name):
    """On an uplink as slow as the devices, so that most tasks begin while an update travels."""
    algorithm, compress = CASES[name]
    made = experiment(
        tmp_path / "simulated",
        algorithm,
        overlap=True,
        emulate=False,
        compress=compress,
        devices=unequal(up_bytes_per_s=8e4),
    )
    simulated, real = on_both_clocks(made, tmp_path / "real")
    assert real.summary["staleness"] == simulated.summary["staleness"]
    assert len(real.events("sending")) == len(simulated.events("sending")) >= 12
    assert equal_replay(made, real)


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize(("trigger", "schedule"), [("all", "constant"), ("each", "linear")], ids=["all", "each"])
def test_real_clients_that_begin_tasks_before_they_arrive_leave_the_simulated_model(
    tmp_path, monkeypatch, trigger, schedule
):
    """In rounds each task but a client's first is the expected one. With ``each`` its rate is another: it is trained anew."""
    train, begun = EarlyTask.train, tmp_path / "begun"

    def watched(early, *args):
        train(early, *args)
        if not isinstance(early.item, str):  # the run ends while each of four clients is ahead
            with begun.open("a") as file:
                file.write(f"{early.update is not None}\n")

    monkeypatch.setattr(EarlyTask, "train", watched)
    length = {} if schedule == "constant" else {"lr_versions": 30}
    algorithm = streaming_diloco(2, sync_delay=2, trigger=trigger)
    made = experiment(
        tmp_path / "simulated",
        algorithm,
        overlap=True,
        emulate=False,
        compress=Compress(down="bf16", up="int8"),
        devices=unequal(up_bytes_per_s=8e4),
        max_updates=16,
        train=Training(None, 3, lr_schedule=schedule, **length),
    )
    _, real = on_both_clocks(made, tmp_path / "real")
    words = begun.read_text().split()
    assert words.count(str(trigger == "all")) >= 16 - 4 and words.count(str(trigger != "all")) <= 4
    assert equal_replay(made, real)


@pytest.mark.parametrize("trigger", ["all", "each"])
def test_a_real_client_that_begins_a_task_before_it_arrives_has_one_task_at_a_time(tmp_path, trigger):
    """In no order but their own: a client's next task has what the merge of its last update made."""
    algorithm = streaming_diloco(2, sync_delay=2, trigger=trigger)
    made = experiment(tmp_path / "real", algorithm, overlap=True, emulate=False, max_updates=16)
    with ranks(made) as fleet:
        real = fleet.serve()
        assert set(fleet.exit_codes().values()) == {0}
    at_work = set()
    for row in real.events():
        if row["event"] == "assigned":
            assert row["client"] not in at_work
            at_work.add(row["client"])
        at_work.discard(row["client"] if row["event"] == "arrived" else None)
    assert not real.events("sending") and equal_replay(made, real)
