"""Every algorithm on a model that nothing can be cut from: it runs to its end, and says at the start what becomes of the method."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from model_zoo import MLP
from raafl.algorithms import ALGORITHMS
from raafl.devices.profiles import Device
from raafl.errors import BadInput
from raafl.runtime.run import simulate
from tests.helpers.methods import each_method
from tests.helpers.small_runs import experiment

WHOLE = "every client trains all of the model, which has no axes to "
NOTES = {
    "ada_vit": "ada_vit finds neither blocks nor hidden units to choose among in this model: it has no effect",
    "co_s2p": "the model's width stays whole: ",
    "fed_raa": WHOLE + "cut into fragments: ",
    "fed_rolex": WHOLE + "cut by rates: ",
    "fjord": WHOLE + "cut by rates: ",
    "hetero_fl": WHOLE + "cut by rates: ",
    "ist": WHOLE + "deal out: ",
    "oap": WHOLE + "cut by rates: ",
    "platon": "platon prunes nothing here, so it is plain averaging: ",
    "prune_fl": WHOLE + "prune: ",
    "ra_fed": WHOLE + "cut into regions: ",
    "ram_fed": WHOLE + "cut into regions: ",
    "timely_fl": "the model has only one layer that trains, so every client trains all of it: slow clients are late",
    "split_fed": "the model cannot be cut, so clients train all of it, as in FedAvg: ",
}
"""What methods that cut the model, or decide on its parts, say at the start; the others train all of any model."""


def logistic_regression():
    return MLP(64, (), 10, lr=0.05, momentum=0.5)


def run_of(tmp_path, algorithm, **fields):
    """The summary, and what was said at the start."""
    said = io.StringIO()
    fields = {"model": logistic_regression, "max_updates": 5, "progress": "plain", **fields}
    with redirect_stdout(said):
        summary, _ = simulate(experiment(tmp_path / "run", algorithm, **fields))
    return summary, said.getvalue()


@pytest.mark.parametrize("name", each_method(parts=["select"]))
def test_it_runs_to_its_end_and_says_what_becomes_of_it(tmp_path, name):
    summary, said = run_of(tmp_path, name)
    assert summary["updates_merged"] >= 5 and summary["finished"] == "max_updates"
    assert NOTES.get(name, "") in said
    assert (WHOLE in said) is NOTES.get(name, "").startswith(WHOLE)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fed_raa", {"fragments": [1.0, 3.0]}),
        ("hetero_fl", {"rates": 0.5}),
        ("fed_rolex", {"rates": [1.0, 0.25]}),
        ("oap", {"rates": {f"device-{i}": 0.5 for i in range(1, 5)}}),
        ("prune_fl", {"rates": 0.5, "every": 1}),
        ("ist", {"subnets": 3}),
    ],
)
def test_what_was_asked_for_makes_no_difference(tmp_path, name, arguments):
    summary, said = run_of(tmp_path, ALGORITHMS[name](**arguments))
    assert summary["updates_merged"] >= 5 and NOTES[name] in said


def test_a_deadline_by_width_says_that_nothing_is_narrower(tmp_path):
    summary, said = run_of(tmp_path, ALGORITHMS["timely_fl"](cut="width"))
    assert summary["updates_merged"] >= 5 and WHOLE + "narrow: " in said


def test_nothing_shrinks_is_a_warning_in_the_summary_with_the_reasons(tmp_path):
    summary, _ = run_of(tmp_path, "hetero_fl")
    (warning,) = summary["warnings"]
    assert warning.startswith(NOTES["hetero_fl"])
    assert summary["kept_whole"] == {"layers.1": "it is an output of the model"}


@pytest.mark.parametrize("name", ["hetero_fl", "fed_raa", "platon", "co_s2p", "ada_vit", "split_fed", "timely_fl"])
def test_it_is_an_error_where_the_run_is_strict(tmp_path, name):
    with pytest.raises(BadInput) as caught:
        run_of(tmp_path, name, strict=True)
    assert NOTES[name] in str(caught.value) and str(caught.value).endswith("(an error, since strict is true)")
    assert not (tmp_path / "run").exists()


def test_a_strict_run_without_warnings_is_like_any_other(tmp_path):
    summary, _ = run_of(tmp_path, "fed_avg", strict=True)
    assert summary["finished"] == "max_updates" and summary["warnings"] == []


@pytest.mark.parametrize("arguments", [{"rates": 1.0}, {"fragments": 1}])
def test_who_asks_for_the_whole_model_is_told_nothing(tmp_path, arguments):
    name = "hetero_fl" if "rates" in arguments else "fed_raa"
    assert WHOLE not in run_of(tmp_path, ALGORITHMS[name](**arguments))[1]


@pytest.mark.parametrize("name", ["fed_raa", "fed_rolex", "hetero_fl", "ist", "oap", "prune_fl", "ra_fed"])
def test_a_client_whose_memory_the_whole_model_exceeds_is_named(tmp_path, name):
    devices = [
        Device(name="large", flops_per_s=1e9, count=3),
        Device(name="small", flops_per_s=1e9, memory_bytes=1000.0),
    ]
    with pytest.raises(BadInput, match=r"^client 4: memory_bytes is 1000, [^\n]*smaller [^\n]*model") as caught:
        run_of(tmp_path, name, devices=devices)
    assert "client 3" not in str(caught.value)
