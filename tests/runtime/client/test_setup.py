"""What a client builds from its config, and which sections of it the server compares with its own."""

from __future__ import annotations

import pytest

from raafl.errors import BadInput
from raafl.runtime.client.setup import ClientSetup
from tests.helpers.small_runs import experiment

CONFIG = "seed: 0\ndata: {batch_size: 64}\n"


@pytest.mark.parametrize(
    ("client", "own_data", "data_named"),
    [(1, False, False), (4, True, False), (4, False, True), (1, True, True)],
)
def test_data_that_a_client_names_itself_are_not_compared_whether_it_trains_on_all_or_a_share_of_them(
    tmp_path, client, own_data, data_named
):
    made = experiment(tmp_path / "run")
    site = ClientSetup.build(made, CONFIG, client, own_data=own_data, data_named=data_named)
    assert (site.sections["data"] == "own") is (own_data or data_named)
    assert "own" not in [digest for name, digest in site.sections.items() if name != "data"]
    # all 1,438 samples for training, or one of four shares of them
    share = {1: 360, 4: 359}[client]
    assert (site.info.num_samples, site.info.own_data) == ((1438, True) if own_data else (share, False))
    assert (site.info.id, site.info.profile.name) == (client, f"device-{client}")


@pytest.mark.parametrize("client", [0, 5])
def test_a_client_beyond_the_run_is_refused(tmp_path, client):
    with pytest.raises(BadInput, match=f"client is {client}: this run has clients 1 to 4"):
        ClientSetup.build(experiment(tmp_path / "run"), "", client, own_data=False)
