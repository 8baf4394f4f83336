"""What clients measure of themselves is the same on real ranks, to the last bit."""

from __future__ import annotations

import csv

import pytest

from raafl.algorithms import fed_raa, hetero_fl
from raafl.data import Dirichlet
from tests.conformance.clocks import on_both_clocks
from tests.helpers.small_runs import experiment
from tests.runfolder.test_logged import Logging, check

pytestmark = pytest.mark.timeout(90)

VARIANTS = {"arrivals": fed_raa(), "rounds": hetero_fl()}


@pytest.mark.quick_cases("arrivals")
@pytest.mark.parametrize("name", VARIANTS)
def test_clients_measure_the_same_on_real_ranks(tmp_path, name):
    partition = Dirichlet(0.5, test_share=0.2)
    base = experiment(
        tmp_path / "simulated",
        VARIANTS[name],
        model=Logging,
        partition=partition,
        eval_every=1,
        emulate=False,
        logger="csv",
    )
    simulated, real = on_both_clocks(base, tmp_path / "real")
    columns = ("test/loss", "test/accuracy", "test/top5_accuracy", "test/macro_f1", "test/num_samples", "peak_bytes")
    columns = (*columns, "logged")

    def merged(run):
        rows = {row["assignment"]: row for row in run.rows() if row["outcome"] == "merged"}
        return {number: [row[column] for column in columns] for number, row in rows.items()}

    assert merged(real) == merged(simulated) and all(all(cells) for cells in merged(real).values())
    assert all(int(row["measured_bytes"]) > 1e7 for row in real.rows() if row["outcome"] == "merged")
    assert real.summary["peak_memory"]["measured_bytes"] > real.summary["peak_memory"]["predicted_bytes"]

    for run in (simulated, real):
        check(run)
    of_version = {row["version"]: row for row in simulated.rows("metrics.csv")}
    both = ("accuracy", "macro_f1", "staleness", "coverage", "peak_bytes")
    fields = [f for f in of_version["0"] if f.startswith("client_") or f in both]
    assert len(fields) == 9
    for row in real.rows("metrics.csv"):  # some versions are overtaken before they are measured
        assert [row[field] for field in fields] == [of_version[row["version"]][field] for field in fields]
    rows = real.rows("metrics.csv")
    assert set(rows[0]) - set(of_version["0"]) == {"measured_bytes"}
    measured = [int(row["measured_bytes"]) for row in rows[1:]]
    assert measured == sorted(measured) and measured[-1] == real.summary["peak_memory"]["measured_bytes"]
    (logged,) = (real.folder / "loggers" / "csv").glob("*/metrics.csv")
    with logged.open(newline="") as file:
        told = [row["measured_bytes"] for row in csv.DictReader(file)]
    assert [int(float(cell)) for cell in told if cell] == measured
    for field in ("final", "coverage", "participation_rate", "staleness"):
        assert real.summary[field] == simulated.summary[field]
