"""Merges that a timer closes, on real ranks: Co-S2P's server does not wait for devices that its emulation slows down."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from raafl.config.parse import parse
from raafl.runtime.replay import replay
from tests.habits.source import ROOT
from tests.helpers.real_ranks import ranks

pytestmark = pytest.mark.timeout(120)

WAIT_S = 0.3
# a task of the fast ones takes a tenth of a second or two, of the slow ones 2 s at least, and 8 s of the whole model
SPEEDS = (2e8, 2e8, 1.4e6, 1.4e6)


def test_a_timer_merges_those_who_have_reported_and_the_run_replays(tmp_path):
    devices = [{"name": f"device-{number}", "flops_per_s": speed} for number, speed in enumerate(SPEEDS, start=1)]
    parsed = parse(
        "fit",
        [
            "--config",
            str(ROOT / "configs" / "quickstart.yaml"),
            "--algorithm=co_s2p",
            "--algorithm.trigger=semi",
            "--algorithm.min_ratio=0.5",
            f"--algorithm.wait_s={WAIT_S}",
            "--algorithm.rates=[1.0, 0.25]",
            "--algorithm.mask_rounds=1",
            "--algorithm.mask_epochs=null",
            "--algorithm.mask_steps=2",
            "--train.num_epochs=null",
            "--train.num_steps=5",
            "--partition=raafl.data.Iid",
            f"--devices={json.dumps(devices)}",
            "--max_updates=18",
            "--progress=quiet",
            f"--output={tmp_path / 'run'}",
        ],
    )
    with ranks(parsed.experiment) as fleet:
        run = fleet.serve()
        assert set(fleet.exit_codes().values()) == {0}
    assert (run.summary["runtime"], run.summary["finished"]) == ("distributed", "max_updates")

    merged = Counter(int(row["merged_version"]) for row in run.rows() if row["outcome"] == "merged")
    waiting, by_timer = [], []
    for row, after in zip(run.journal(), [*run.journal()[1:], {"event": "end"}], strict=True):
        waiting += [row["time_s"]] if row["event"] == "arrived" else []
        if after["event"] != "assigned" or row["event"] == "assigned" or not waiting:
            continue
        # work is handed out once a merge is made: what closed it is the event before
        assert len(waiting) == merged[after["version"]]
        if row["event"] == "timer":
            assert 2 <= len(waiting) < 4, "half of the four, but not all"
            assert row["time_s"] >= waiting[1] + WAIT_S, "the wait begins with the second report"
            by_timer.append(after["version"])
        waiting.clear()
    assert by_timer and by_timer[0] == 1, "in the first round the slow ones are seconds away"
    late = [row for row in run.rows() if row["outcome"] == "merged" and int(row["client"]) > 2]
    assert late and all(int(row["staleness"]) > 0 for row in late if row["version"] == "0")

    (run.folder / "config.yaml").write_text(parsed.config_yaml)
    result = replay(run.folder)
    assert result["equal"] is True and result["model_digest"] == run.digest
