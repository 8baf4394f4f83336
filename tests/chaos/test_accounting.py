"""The audit finds nothing wrong with a sound run, and each kind of wrong in one that was tampered with."""

from __future__ import annotations

import csv
import json
import shutil

import pytest

from tests.chaos.accounting import audit, journal, that_count
from tests.helpers.small_runs import experiment, finish


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return finish(experiment(tmp_path_factory.mktemp("sound") / "run", "fed_buff", max_updates=20)).folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "run")


def rewrite(folder, change):
    """Let `change` tamper with the rows of clients.csv."""
    with (folder / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows = change(rows)
    with (folder / "clients.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def merged_first(rows):
    return sorted(rows, key=lambda row: row["outcome"] != "merged")


def found(folder):
    return {check for check, problems in audit(folder).items() if problems}


def test_a_sound_run_is_sound(folder):
    assert found(folder) == set()


ACCOUNTS, TOTALS = "every assignment is accounted for once", "the summary agrees with the tables"


@pytest.mark.parametrize(
    "change, wrong",
    [
        (lambda rows: merged_first(rows)[1:], {ACCOUNTS, TOTALS}),
        (lambda rows: [*rows, merged_first(rows)[0]], {ACCOUNTS, TOTALS}),
        (lambda rows: [{**rows[0], "assignment": "999"}, *rows[1:]], {ACCOUNTS, "what was merged has arrived once"}),
        (lambda rows: [{**merged_first(rows)[0], "outcome": "vanished"}, *merged_first(rows)[1:]], {ACCOUNTS, TOTALS}),
        (lambda rows: [{**merged_first(rows)[0], "outcome": "lost:x"}, *merged_first(rows)[1:]], {TOTALS}),
        (lambda rows: [{**merged_first(rows)[0], "client": "9"}, *merged_first(rows)[1:]], {ACCOUNTS, TOTALS}),
    ],
    ids=["missing", "twice", "unknown", "outcome", "miscounted", "client"],
)
def test_tampered_rows_are_found(change, wrong, folder):
    rewrite(folder, change)
    assert found(folder) == wrong


def test_an_id_that_is_used_again_is_found(folder):
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    first = next(line for line in lines if '"assigned"' in line)
    (folder / "events.jsonl").write_text("".join([*lines, first]))
    assert found(folder) == {"ids are never reused"}


def test_leftovers_and_torn_metrics_are_found(folder):
    (folder / ".summary.json.7.tmp").touch()
    (folder / "checkpoints" / ".version-000001.ckpt.7.tmp").touch()
    (folder / "metrics.csv").write_text("version,time_s,wall_s,loss,accuracy\n0,0,0,1,1\n0,0,0,1,1\n")
    problems = audit(folder)
    assert len(problems["nothing else is in the folder"]) == 2
    assert len(problems["metrics go on"]) == 2


def test_rows_that_a_resumed_run_went_back_behind_do_not_count():
    names = ["joined", "assigned", "arrived", "assigned", "arrived", "assigned"]
    rows = [{"event": name, "row": number} for number, name in enumerate(names)]
    rows += [{"event": "resumed", "kept": 2, "row": 6}, {"event": "joined", "row": 7}]
    assert [row["row"] for row in that_count(rows)] == [0, 1, 2, 3, 6, 7]


def test_a_torn_last_line_of_the_journal_is_left_out(folder):
    whole = journal(folder)
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(whole[-1])[:10])
    assert journal(folder) == whole
