"""Every algorithm with what travels compressed: all that arrives is merged, and fewer bytes travel; or the config is refused."""

from __future__ import annotations

from itertools import groupby

import pytest

from raafl.algorithms import ALGORITHMS
from raafl.compression.plan import Compress
from raafl.errors import BadInput
from raafl.submodel import Spec, Submodels
from tests.helpers.methods import each_method
from tests.helpers.small_runs import experiment, finish, small_mlp

WIRES = {
    "int8 both ways": Compress("int8", "int8"),
    "top_k both ways": Compress("top_k", "top_k"),
    "bf16 down": Compress("bf16", "none"),
}
SHARES = {"none": 1.0, "bf16": 2 / 4, "int8": 1 / 4, "top_k": 0.1 * (4 + 4) / 4}
"""Of a float32 parameter's four bytes; of the largest tenth top_k sends elements and places."""
ROUNDING = 0.03
"""For the scales of int8, one to a row of 64 elements or a small tensor, and for whole numbers of elements."""
FIXED_UP = {"fed_mezo": "scalars", "fed_pm": "bits"}
"""Whose updates travel as something else already: `compress.up` is refused."""
SCORED = {"platon": 0.1}
"""What scores of units, beside the tensors, are of this small model's bytes, at most."""
MOVING = {"fed_raa", "fed_rolex", "ist", "ra_fed", "ram_fed"}
"""Whose clients get another submodel for each task: what a client has not had before, top_k sends down whole."""

WHOLE_DOWN = {"scaffold": 1 / 3}
"""Share of what travels down that top_k leaves as it is: the variates c_i, beside the model and c."""


def shares_of(algorithm, run):
    """Client, and of each of its merged tasks the bytes down and up over those without compression."""
    module = algorithm.local.prepare(small_mlp())
    submodels = Submodels(module)
    submodels.attach_base(module)  # what is frozen does not travel
    payload = algorithm.local.payload(submodels)
    specs = {row["id"]: Spec.from_json(row["spec"]) for row in run.journal() if row["event"] == "assigned"}
    merged = sorted((row for row in run.rows() if row["outcome"] == "merged"), key=lambda row: row["client"])
    for client, rows in groupby(merged, key=lambda row: row["client"]):
        found = []
        for row in rows:
            spec = specs[int(row["assignment"])]
            down, up = (payload.layout(spec, part).num_bytes for part in ("sent", "trained"))
            found.append((int(row["bytes_down"]) / down, int(row["bytes_up"]) / max(up, 1)))
        yield client, found


@pytest.mark.parametrize("plan", WIRES)
@pytest.mark.parametrize("name", each_method(but=["split_fed", "streaming_diloco"], parts=["local", "select"]))
def test_fewer_bytes_travel_and_all_that_arrives_is_merged(tmp_path, name, plan):
    """split_fed's and streaming_diloco's bytes follow from the task: their own tests count them."""
    algorithm, compress = ALGORITHMS[name](), WIRES[plan]
    settings = experiment(tmp_path / "run", algorithm, clients=2, max_updates=4, compress=compress)
    if name in FIXED_UP and compress.up != "none":
        reason = f"compress.up is '{compress.up}', but this algorithm's updates travel as {FIXED_UP[name]}: leave compress.up out"
        with pytest.raises(BadInput, match=reason):
            finish(settings)
        return
    run = finish(settings)
    assert run.summary["finished"] == "max_updates" and run.summary["updates_merged"] >= 4

    def close(share, *expected):
        return any(one - ROUNDING <= share <= one + ROUNDING + SCORED.get(name, 0.0) for one in expected)

    for _, shares in shares_of(algorithm, run):
        for place, (down, up) in enumerate(shares):
            assert name in FIXED_UP or close(up, SHARES[compress.up])
            whole = [1.0] if compress.down == "top_k" and (place == 0 or name in MOVING) else []
            plain = WHOLE_DOWN.get(name, 0.0) if compress.down == "top_k" else 0.0
            later = [SHARES[compress.down] * (1 - plain) + plain] if place or not whole else []
            assert close(down, *whole, *later)
