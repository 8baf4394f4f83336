"""One run on both clocks: simulated, and on real ranks that report in the simulated run's order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from raafl.config.experiment import Experiment
from tests.helpers import cached_models
from tests.helpers.real_ranks import ranks
from tests.helpers.scripted_inbox import ScriptedInbox
from tests.helpers.small_runs import Finished, finish


def order_of(run):
    """The script that a run's journal is."""
    names = {"joined": "client", "lost": "client", "arrived": "assignment", "sending": "assignment"}
    return [(row["event"], row[names[row["event"]]]) for row in run.events() if row["event"] in names]


def story(run):
    """What was asked and answered, without times: those are the clock's."""
    rows = run.rows()
    fields = (
        "client",
        "task",
        "assignment",
        "spec",
        "region",
        "version",
        "merged_version",
        "staleness",
        "num_samples",
        "num_steps",
        "loss",
    )
    return [{field: row[field] for field in fields} for row in rows if row["outcome"] == "merged"]


def fingerprints(run):
    return [
        (row["assignment"], row["fingerprint"], row["num_samples"], row["refusal"]) for row in run.events("arrived")
    ]


def on_both_clocks(experiment: Experiment, output: Path) -> tuple[Finished, Finished]:
    """Run it simulated, then on real ranks in that order with its folder at ``output``; they are equal in all but times."""
    with cached_models.reuse_findings():
        simulated, real = _both(experiment, output)
    assert order_of(real) == order_of(simulated)
    assert fingerprints(real) == fingerprints(simulated)
    assert story(real) == story(simulated)
    assert real.digest == simulated.digest
    return simulated, real


def _both(experiment: Experiment, output: Path) -> tuple[Finished, Finished]:
    simulated = finish(experiment)
    with ranks(replace(experiment, output=str(output))) as fleet:
        real = fleet.serve(ScriptedInbox(order_of(simulated)))
        assert set(fleet.exit_codes().values()) == {0}
    return simulated, real
