"""The schema beside a run: nothing is written that it does not name."""

from __future__ import annotations

import csv
import json

from raafl.data import Iid
from raafl.runfolder.schema import (
    CLIENT_COLUMNS,
    METRIC_COLUMNS,
    RUN_COLUMNS,
    TESTED,
    TIME_TO,
    JournalRow,
    MemoryCells,
    Summary,
    is_metric,
    kind_of,
)
from raafl.runtime.run import simulate
from tests.helpers.small_runs import experiment


def test_a_run_writes_what_the_schema_names(tmp_path):
    summary, folder = simulate(
        experiment(tmp_path / "run", "fed_async", partition=Iid(test_share=0.3), target="accuracy=0.99")
    )
    assert summary.keys() == Summary.__annotations__.keys() - {
        "traceback",
        "batched",
        "captured",
        "data_on_device",
        "tokens",
        "tokens_per_s",
        "trials",
        "subfederations",
    }  # of a failure, of `batch_clients`, of a GPU, of language models, of `auto` and of regions
    assert json.loads((folder / "summary.json").read_text()).keys() == summary.keys()
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {name for row in rows for name in row} <= JournalRow.__annotations__.keys()
    with (folder / "clients.csv").open() as file:
        header = next(csv.reader(file))
    assert tuple(header[: len(CLIENT_COLUMNS)]) == CLIENT_COLUMNS
    more = header[len(CLIENT_COLUMNS) :]
    assert [name for name in more if not name.startswith(TESTED)] == ["peak_bytes"]
    assert "peak_bytes" in MemoryCells.__annotations__ and TESTED + "accuracy" in more
    with (folder / "metrics.csv").open() as file:
        header = next(csv.reader(file))
    assert tuple(header[: len(METRIC_COLUMNS)]) == METRIC_COLUMNS
    known = {*METRIC_COLUMNS, *RUN_COLUMNS}
    assert [name for name in header if not is_metric(name) and name not in known] == [TIME_TO + "accuracy=0.99"]
    assert {"accuracy", "client_accuracy"} <= set(filter(is_metric, header))


def test_the_kind_of_an_outcome_stands_before_its_reason():
    assert [kind_of(outcome) for outcome in ("merged", "refused:non-finite", "lost:failed: x")] == [
        "merged",
        "refused",
        "lost",
    ]
