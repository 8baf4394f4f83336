"""A client that says it has next to no memory, whatever it has checked itself, is told to go; the run goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.algorithms import fed_raa
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import experiment

pytestmark = pytest.mark.timeout(120)


def _small(rank: int) -> None:
    if rank == 2:
        import raafl.runtime.client.setup

        raafl.runtime.client.setup.with_memory = lambda made, info, *rest: (
            replace(info, profile=replace(info.profile, memory_bytes=10.0)),
            [],
        )


def test_a_client_that_nothing_suits_is_let_go(tmp_path):
    with ranks(experiment(tmp_path / "run", fed_raa(), max_updates=9, emulate=False), _small) as fleet:
        run = fleet.serve()
        codes = fleet.exit_codes()
    assert run.summary["updates_merged"] == 9 and codes[2] != 0 and {codes[n] for n in (1, 3, 4)} == {0}
    assert run.summary["participation"]["2"] == 0
