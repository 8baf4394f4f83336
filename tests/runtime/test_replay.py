from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raafl.algorithms import fed_async
from raafl.commands.replay import lines_of
from raafl.config.parse import parse
from raafl.errors import BadInput
from raafl.local.train import LocalTrainer
from raafl.runfolder import checkpoint_reader
from raafl.runfolder.events import JournalReader
from raafl.runtime.replay import Replay, _distance, replay
from raafl.runtime.run import simulate
from raafl.submodel import FlatTensors
from tests.helpers import forkserver
from tests.helpers.coordinators import coordinator_for
from tests.helpers.forked_command import command

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")


def simulated(folder: Path, *options: str) -> dict:
    parsed = parse("simulate", ["--config", CONFIG, "--progress=quiet", f"--output={folder}", *options])
    return simulate(parsed.experiment, parsed.config_yaml)[0]


def rewrite(folder: Path, change) -> None:
    path = folder / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.quick_cases("fed_raa")
@pytest.mark.parametrize("name", ["fed_raa", "split_fed"])
def test_a_simulated_run_replays_to_the_last_bit(tmp_path, name):
    """Every algorithm's run does that was also resumed: test_resume.py."""
    summary = simulated(tmp_path / "run", "--algorithm", name, "--max_updates=24")
    result = replay(tmp_path / "run")
    assert result["equal"] is True and result["parted_at"] is None and result["differences"] == []
    assert result["model_digest"] == summary["model_digest"] and result["versions"] == summary["versions"]
    assert result["altered"] == []


def test_a_long_replay_logs_how_far_it_is(tmp_path, monkeypatch, caplog):
    simulated(tmp_path / "run", "--max_updates=6")
    monkeypatch.setattr("raafl.runtime.replay._PROGRESS_S", 0.0)
    caplog.set_level("INFO", "raafl.runtime.replay")
    replay(tmp_path / "run")
    assert caplog.messages[-1] == "replayed 6 of 6 updates, to version 6"


def test_a_changed_row_that_leaves_the_model_equal_is_named(tmp_path):
    simulated(tmp_path / "run", "--max_updates=6")
    path = tmp_path / "run" / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    row = next(i for i, line in enumerate(lines) if '"event":"joined"' in line)
    lines[row] = lines[row].replace('"num_samples":', '"num_samples":1', 1)
    path.write_text("".join(lines))
    result = replay(tmp_path / "run")
    assert result["equal"] is True and result["altered"] == [row + 1]
    assert (
        f"row {row + 1} was altered, or is not the one that followed row {row}; `raafl audit RUN`"
        in lines_of(result)[1]
    )


@pytest.mark.long(
    "tests/conformance/test_executors.py::test_every_algorithm_ends_alike_over_ranks_and_when_it_has_crashed_and_goes_on_elsewhere"
)
def test_clients_that_come_and_go_are_replayed(tmp_path):
    devices = (
        '[{"name": "steady", "flops_per_s": 1e8}, {"name": "flaky", "flops_per_s": 5e7,'
        ' "availability": [[0.0, 0.3]], "period_s": 0.5}]'
    )
    summary = simulated(tmp_path / "run", f"--devices={devices}", "--max_updates=40")
    assert summary["updates_lost"] > 0
    assert replay(tmp_path / "run", workers=2)["equal"] is True


def test_a_wall_clock_run_of_real_ranks_replays_to_the_last_bit(tmp_path):
    argv = (
        "--standalone",
        "--nproc-per-node=4",
        "-m",
        "raafl",
        "fit",
        "--config",
        CONFIG,
        "--clients=3",
        "--max_updates=20",
        f"--output={tmp_path / 'run'}",
        "--progress=quiet",
    )
    with command(tmp_path, *argv, before=forkserver.start, entry=forkserver.torchrun) as started:
        assert started.end() == 0, started.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["runtime"] == "distributed" and summary["updates_merged"] == 20
    result = replay(tmp_path / "run")
    assert result["equal"] is True and result["model_digest"] == summary["model_digest"]


def test_the_first_update_that_differs_is_named(tmp_path):
    simulated(tmp_path / "run", "--max_updates=24")
    arrivals = []

    def forge(rows):
        arrivals.extend(row for row in rows if row["event"] == "arrived")
        arrivals[10]["fingerprint"] = "0" * 32

    rewrite(tmp_path / "run", forge)
    parted = replay(tmp_path / "run")["parted_at"]
    assert parted["event"] == 4 + 11  # four joined, then the eleventh arrival
    assert parted["what"] == f"update of client {arrivals[10]['client']} for assignment {arrivals[10]['assignment']}"
    assert parted["recorded"] == "0" * 32 and len(parted["replayed"]) == 32


def test_a_setting_that_was_adjusted_otherwise_is_named(tmp_path):
    """Four are at work where 1.5 were expected, so that after 12 updates the buffer of 2 gets its most, 4."""
    options = ("--algorithm=fed_buff", "--algorithm.buffer_size=2", "--algorithm.clients_at_work=1.5")
    simulated(tmp_path / "run", *options, "--max_updates=16")
    assert replay(tmp_path / "run")["equal"] is True

    def forge(rows):
        (adjusted,) = (row for row in rows if row["event"] == "adjusted")
        assert (adjusted["before"], adjusted["after"]) == (2, 4)
        adjusted["after"] = 3

    rewrite(tmp_path / "run", forge)
    parted = replay(tmp_path / "run")["parted_at"]
    assert parted["event"] == 4 + 12 and parted["what"] == "adjusted setting"
    assert (parted["recorded"]["after"], parted["replayed"]["after"]) == (3, 4)


@pytest.mark.long("test_the_first_update_that_differs_is_named")
def test_another_order_of_arrivals_parts_from_the_recording(tmp_path):
    simulated(tmp_path / "run", "--max_updates=24")

    def swap(rows):
        places = [place for place, row in enumerate(rows) if row["event"] == "arrived"]
        first, second = places[8], places[9]
        rows[first], rows[second] = rows[second], rows[first]

    rewrite(tmp_path / "run", swap)
    result = replay(tmp_path / "run")
    assert result["equal"] is False and result["parted_at"]["event"] >= 4 + 9
    assert result["distance"]["max"] > 0 and result["distance"]["rms"] > 0


def test_the_distance_of_another_model_is_that_from_the_last_checkpoint(tmp_path):
    simulated(tmp_path / "run", "--max_updates=4", "--checkpoint_every=2", "--keep_checkpoints=5")
    values = FlatTensors.from_named(checkpoint_reader.load(tmp_path / "run").values)
    (buffer,) = values.buffers.values()
    buffer[5] += 4.0
    buffer[-1] -= 3.0
    parts = SimpleNamespace(coordinator=SimpleNamespace(state=SimpleNamespace(values=values)))
    distance = _distance(tmp_path / "run", parts)
    rms = 5.0 / len(buffer) ** 0.5
    assert distance == {"version": 4, "max": pytest.approx(4.0), "rms": pytest.approx(rms, rel=1e-6)}
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert _distance(tmp_path / "run", parts) is None


@pytest.mark.long("test_the_first_update_that_differs_is_named")
def test_another_seed_is_not_the_same_run(tmp_path):
    simulated(tmp_path / "run", "--max_updates=12")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("\nseed: 0\n", "\nseed: 1\n"))
    result = replay(tmp_path / "run")
    assert result["equal"] is False and result["parted_at"]["event"] == 4


def test_until_stops_after_an_event_and_leaves_a_checkpoint(tmp_path):
    simulated(tmp_path / "run", "--max_updates=24", "--checkpoint_every=10", "--keep_checkpoints=5")
    result = replay(tmp_path / "run", until=4 + 10)
    assert result["events"] == 14 and result["versions"] == 10 and result["equal"] is None
    at_ten = checkpoint_reader.load(tmp_path / "run" / "checkpoints" / "version-000010.ckpt")
    replayed = checkpoint_reader.load(result["checkpoint"])
    assert at_ten.state_dict.keys() == replayed.state_dict.keys()
    assert all(torch.equal(at_ten.state_dict[name], replayed.state_dict[name]) for name in at_ten.state_dict)


def test_different_conditions_are_said(tmp_path):
    simulated(tmp_path / "run", "--max_updates=8")

    def change(rows):
        run = next(row for row in rows if row["event"] == "run")
        run["conditions"]["torch"] = "1.0"

    rewrite(tmp_path / "run", change)
    assert replay(tmp_path / "run")["differences"] == [f"torch was 1.0, is {torch.__version__} here"]


def test_a_task_whose_answer_was_refused_is_not_trained_or_held(tmp_path, monkeypatch):
    simulated(tmp_path / "run", "--max_updates=4", "--clients=2")
    trained, replays = [], []
    run, ready = LocalTrainer.run, Replay.__post_init__
    monkeypatch.setattr(
        LocalTrainer, "run", lambda self, task, *rest: trained.append(task.id) or run(self, task, *rest)
    )
    monkeypatch.setattr(Replay, "__post_init__", lambda self: replays.append(self) or ready(self))
    replay(tmp_path / "run")
    first = trained.pop(0)
    trained.clear()
    rewrite(
        tmp_path / "run", lambda rows: next(r for r in rows if r["event"] == "arrived").update(refusal="wrong-layout")
    )
    replay(tmp_path / "run")
    assert first not in trained and first not in replays[1]._out and first not in replays[1].executor._tasks


def test_a_folder_that_is_not_a_run_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"is not a run folder: it has no config\.yaml"):
        replay(tmp_path)
    with pytest.raises(BadInput, match="until is 0"):
        replay(tmp_path, until=0)


ARRIVED = {"event": "arrived", "time_s": 0.0, "assignment": 1, "client": 1, "incarnation": 0}
RESUMED = {
    "event": "resumed",
    "kept": 4,
    "last_id": 9,
    "restarted": False,
    "start": {"min_clients": 1, "count_lost": True},
}
GOALS = {"goals": {"max_updates": None, "max_time_s": None}}
WITHOUT = {
    "fingerprint": {**ARRIVED, "num_samples": 1, "refusal": None},
    "num_samples": {**ARRIVED, "fingerprint": "", "refusal": None},
    "seed": {"event": "assigned", "id": 1, "client": 1, "version": 0, "spec": {}},
    "assignments": {"event": "batch"},
    "rows": {"event": "gap"},
    "time_s": {"event": "timer", "id": 1},
}
STRANGE = {
    "it has no 'goals'": RESUMED,
    "it has no 'max_time_s'": {**RESUMED, "goals": {"max_updates": None}},
    "unpack": {**RESUMED, **GOALS, "undone": [5]},
    "'x'": {**RESUMED, **GOALS, "undone": [[1, "x"]]},
    "it has no 'count_lost'": {**RESUMED, **GOALS, "start": {"min_clients": 1}},
    "'two'": {**RESUMED, **GOALS, "start": {"min_clients": "two", "count_lost": True}},
    "contributions is no list": {**ARRIVED, "num_samples": 1, "num_steps": 1, "fingerprint": "", "contributions": 5}
    | {"refusal": None, "journal": ""},
    "it has no 'spec'": {"event": "received", "time_s": 0.0, "fingerprint": ""},
}


def played(rows):
    replayed = Replay(coordinator_for(fed_async()), SimpleNamespace(follow=list))
    replayed._received = lambda fingerprint, layout: None
    replayed.run(rows)


@pytest.mark.parametrize("says", STRANGE)
def test_a_row_that_raafl_has_not_written_is_named(says):
    with pytest.raises(BadInput, match=rf"^events.jsonl: the row {{.* is no event of raafl: .*{re.escape(says)}"):
        played([STRANGE[says]])


@pytest.mark.parametrize("name", WITHOUT)
def test_a_row_without_a_field_that_a_replay_needs_is_named(tmp_path, name):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "run"}) + "\n" + json.dumps(WITHOUT[name]) + "\n")
    with pytest.raises(BadInput, match=rf"^events.jsonl: the row {{.* has no {name}; the journal was changed"):
        replay(tmp_path)


def test_merges_that_a_crash_has_undone_count_in_a_replay_as_they_did_in_the_run(monkeypatch):
    """They are charged to the privacy budget, at whose end a run ends."""
    coordinator = coordinator_for(fed_async())
    told = []
    monkeypatch.setattr(
        type(coordinator.algorithm.merge), "on_rollback", lambda merge, state, merged: told.append(merged)
    )
    row = {"event": "resumed", "last_id": 9, "restarted": True, "undone": [[1, 3], [2, 3]]}
    row |= {"start": {"min_clients": 2, "count_lost": True}, "goals": {"max_updates": 8, "max_time_s": None}}
    Replay(coordinator, SimpleNamespace(follow=list)).run([row])
    assert told == [[(1, 3), (2, 3)]] and coordinator.limits.max_updates == 8


def test_merges_undone_before_a_run_went_back_further_count_in_a_replay(tmp_path, monkeypatch):
    """The checkpoint of two events was lost after a resume from it, so that the run went back to one event."""
    coordinator = coordinator_for(fed_async())
    told = []
    monkeypatch.setattr(
        type(coordinator.algorithm.merge), "on_rollback", lambda merge, state, merged: told.append(merged)
    )
    resumed = {**RESUMED, **GOALS, "time_s": 3.0, "restarted": True}
    rows = [{"event": "timer", "id": 5, "time_s": float(number)} for number in range(3)]
    rows += [{**resumed, "kept": 2, "undone": [[1, 3]]}, {**rows[-1], "time_s": 3.5}]
    rows += [{**resumed, "kept": 1, "last_id": 11, "undone": [[1, 3], [2, 2]]}, {**rows[-1], "time_s": 4.0}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    played = Replay(coordinator, SimpleNamespace(follow=list))
    played.run(JournalReader(tmp_path))
    assert told == [[(1, 3)], [(1, 3), (2, 2)]]
    assert (played.num_events, coordinator.roster.last_id) == (2, 11)
