"""What is read of a run folder, whole, unfinished or damaged."""

from __future__ import annotations

import math
import os
from itertools import pairwise

import numpy as np
import pytest

from raafl.errors import BadInput
from raafl.runfolder.reading import number, read
from tests.lab.report.folders import EVENTS, QUICK, SUMMARY, TASKS, write


def test_a_whole_folder_is_read_without_a_note(tmp_path):
    run = read(write(tmp_path / "run"))
    assert run.notes == []
    assert (run.name, run.seed, run.end_s, run.is_simulated) == ("run", 0, 10.0, True)
    assert run.tasks.client.tolist() == [1, 2, 1, 2, 1]
    assert run.tasks.kind.tolist() == [0, 0, 0, 3, 1]
    assert run.tasks["arrived_s"][:3].tolist() == [4.0, 5.0, 9.0]
    assert np.isnan(run.tasks["arrived_s"][3:]).all()
    assert run.metrics["accuracy"].tolist() == [0.1, 0.5, 0.9]
    assert run.clients[2].spells == [(0.0, 6.0), (8.0, math.inf)]
    assert (run.clients[1].device, run.clients[1].flops_per_s, run.clients[1].num_samples) == ("quick", 2e9, 30)
    assert run.open_tasks == [(2, 8.0)]
    assert run.lost_at == {2: [6.0]}


def test_a_resumed_run_is_read_without_what_it_has_gone_back_behind(tmp_path):
    """A server is killed at 60 s and resumed from its checkpoint at 9 s: what happened in between is no part of the run."""
    undone = [
        {"time_s": 40.0, "event": "lost", "client": 1, "reason": "gone", "incarnation": 0},
        {"time_s": 50.0, "event": "joined", "client": 1, "incarnation": 1, **QUICK},
        {"time_s": 60.0, "event": "assigned", "id": 9, "client": 1},
    ]
    rows = [*EVENTS, *undone, {"time_s": 9.0, "event": "resumed", "kept": 4}]
    run = read(write(tmp_path / "run", events=rows, summary={**SUMMARY, "finished": "interrupted", "time_s": 7.0}))
    assert (run.clients[1].spells, run.lost_at, run.open_tasks) == ([(0.0, math.inf)], {2: [6.0]}, [(2, 8.0)])
    assert (run.end_s, run.notes) == (7.0, [])
    os.utime(run.path / "summary.json", (100, 100))  # of an interruption before
    run = read(run.path)
    assert (run.end_s, run.summary) == (9.0, None)
    assert run.notes == ["the run has not ended since it was resumed: summary.json is older, and is left out"]


@pytest.mark.parametrize("missing", ["config", "events", "tasks", "metrics", "summary"])
def test_a_folder_that_lacks_a_file_is_read_and_says_so(tmp_path, missing):
    run = read(write(tmp_path / "run", **{missing: None}))
    files = {"events": "events.jsonl", "tasks": "clients.csv", "metrics": "metrics.csv", "config": "config.yaml"}
    assert len(run.notes) == 1
    assert f"there is no {files.get(missing, 'summary.json')}" in run.notes[0]
    assert run.is_simulated
    assert run.end_s == (10.0 if missing != "summary" else 9.0)
    assert run.client_ids() == [1, 2]


def test_only_what_is_damaged_is_left_out(tmp_path):
    folder = write(tmp_path / "run")
    with (folder / "clients.csv").open("a") as file:
        file.write("2,5,torn\nx" + "," * 17 + "merged\n" + '1,"' + "y" * 200_000 + '"\n')
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time_s": 9.0, "event": "lost", "client": 1}\nnot JSON\n{"event": "joined", "client": 7}\n')
    with (folder / "metrics.csv").open("ab") as file:
        file.write(b"\xff\xfe,\x00\n3,zero,1,nan,1,1\n")
    (folder / "summary.json").write_text('{"algo')
    run = read(folder)
    assert len(run.tasks) == len(TASKS)
    assert run.clients[1].spells == [(0.0, 9.0)]
    assert 7 not in run.clients
    assert run.metrics["version"].tolist() == [0.0, 2.0, 3.0, 3.0]
    assert np.isnan([run.metrics["time_s"][3], run.metrics["accuracy"][3]]).all()
    assert run.summary is None
    said = "\n".join(run.notes)
    for part in ("2 damaged rows", "1 row without a client", "journal is damaged", "summary.json is damaged"):
        assert part in said


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words", "!!python/object:os.system {}"])
def test_a_config_that_is_none_is_noted(tmp_path, text):
    folder = write(tmp_path / "run")
    (folder / "config.yaml").write_text(text)
    run = read(folder)
    assert run.config == {}
    assert "config.yaml" in run.notes[0]


def test_values_of_other_types_than_they_should_have_do_no_harm(tmp_path):
    odd = [
        {"time_s": "soon", "event": "joined", "client": 1},
        {"time_s": 1.0, "event": "joined", "client": "one"},
        {"time_s": 1.0, "event": "joined", "client": 3, "num_samples": "many", "profile": [1]},
        {"time_s": 1.0, "event": "assigned", "client": 3, "id": "x"},
        {"event": ["lost"], "client": {}},
    ]
    run = read(
        write(tmp_path / "run", events=EVENTS + odd, summary={**SUMMARY, "time_s": "long", "final": [], "seed": {}})
    )
    assert run.client_ids() == [1, 2, 3]
    assert math.isnan(run.clients[3].flops_per_s)
    assert run.end_s == 9.0


def test_an_empty_run_is_read(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.csv").write_text("")
    run = read(folder)
    assert (len(run.tasks), run.metrics, run.end_s, run.client_ids()) == (0, {}, 0.0, [])


def test_what_is_no_run_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    write(tmp_path / "runs" / "one")
    for name, said in (
        ("nowhere", "nothing there"),
        ("file", "it is a file"),
        ("runs", r"it holds 1 of them: raafl report"),
    ):
        with pytest.raises(BadInput, match=f"not a run folder: .*{said}"):
            read(tmp_path / name)


def test_numbers_are_finite_or_nan():
    assert [number(value) for value in (1, 2.5, "3e2")] == [1.0, 2.5, 300.0]
    assert all(math.isnan(number(value)) for value in (None, True, "x", "inf", math.inf, [], {}, 10**400))


def test_a_config_of_aliases_of_aliases_takes_no_memory(tmp_path):
    folder = write(tmp_path / "run")
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"{name}: &{name} [{', '.join(['*' + before] * 9)}]" for before, name in pairwise("abcdefghij")]
    (folder / "config.yaml").write_text("\n".join(lines))
    run = read(folder)
    assert run.config == {} and run.notes == ["config.yaml is not one of raafl's: it has more than 100,000 values"]


def test_a_row_that_nothing_can_be_made_of_ends_the_reading_without_harm(tmp_path):
    folder = write(tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time_s": 9.0, "event": "assigned", "client": 1, "id": [1]}\n{"a": ' + "[" * 100_000 + "\n")
    run = read(folder)
    assert run.open_tasks == [(2, 8.0), (1, 9.0)]
    assert len(run.notes) == 1 and run.notes[0].startswith("the journal is damaged")
