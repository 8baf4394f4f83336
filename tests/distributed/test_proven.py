"""What the server has not proven is whole at the clients, too, who prove nothing themselves."""

from __future__ import annotations

import json

import pytest

from raafl.algorithms import ALGORITHMS
from raafl.submodel import FULL
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import experiment
from tests.submodel.models import WrongAxes

pytestmark = pytest.mark.timeout(120)


def test_clients_keep_whole_what_the_server_says(tmp_path):
    made = experiment(
        tmp_path / "run",
        ALGORITHMS["hetero_fl"](rates=[1.0, 0.5], masked=False),
        clients=2,
        max_updates=4,
        model=lambda: WrongAxes(64, (8,), 10),
    )
    with ranks(made) as started:
        run = started.serve()
        assert started.exit_codes() == {1: 0, 2: 0}
    assert run.summary["kept_whole"].keys() == {"classes"}
    assert run.summary["updates_merged"] == 4 and run.summary["updates_refused"] == {}
    specs = {str(row["client"]): json.dumps(row["spec"]) for row in run.events("assigned")}
    assert specs["1"] == json.dumps(FULL.to_json())
    assert "hidden" in specs["2"] and "classes" not in specs["2"]
