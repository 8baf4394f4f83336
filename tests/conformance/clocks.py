"""One run on both clocks: simulated, and on real ranks that report in the simulated run's order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from raafl.config.experiment import Experiment
from raafl.submodel import cost
from raafl.submodel.cost import Cost
from raafl.submodel.spec import Spec
from raafl.submodel.submodels import Submodels
from tests.federation import Finished, finish
from tests.ranks import ranks
from tests.scripted_inbox import ScriptedInbox


def order_of(run):
    """The script that a run's journal is."""
    names = {"joined": "client", "lost": "client", "arrived": "assignment"}
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


@contextmanager
def predicted_once() -> Iterator[None]:
    """What a submodel costs is predicted once for all runs within, the forked ones' too: half of a short run's CPU time.

    It depends on nothing but the model's shape, the submodel and the batch; tests/submodel/test_cost.py has it.
    """
    predict, known = cost.predict, {}

    def remembered(submodels: Submodels, spec: Spec, *sizes: int) -> Cost:
        shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in submodels.module.named_parameters())
        key = (type(submodels.module), shapes, tuple(submodels.axes), spec, *sizes)
        if key not in known:
            known[key] = predict(submodels, spec, *sizes)
        return known[key]

    cost.predict = remembered
    try:
        yield
    finally:
        cost.predict = predict


def on_both_clocks(experiment: Experiment, output: Path) -> tuple[Finished, Finished]:
    """Run it simulated, then on real ranks in that order with its folder at ``output``; they are equal in all but times."""
    with predicted_once():
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
