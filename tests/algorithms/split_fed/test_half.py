from __future__ import annotations

from raafl.algorithms.split_fed.questions import halves
from raafl.submodel import FULL
from tests.algorithms.split_fed.models import mlp, submodels_of


def test_each_half_has_its_own_values_and_no_memory_for_the_others():
    submodels = submodels_of(mlp)
    found = halves(submodels, "layers.2")
    both = {"lower": found.client, "upper": found.server}
    whole = submodels.layout(FULL, "trained").num_bytes
    sizes = {side: half.layout(FULL, "trained").num_bytes for side, half in both.items()}
    assert sizes == {"lower": 1560 * 4, "upper": whole - 1560 * 4}
    for side, half in both.items():
        shrunk = half.shrink()
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in shrunk.module.parameters()}
        blanks = 4 * (4 if side == "lower" else 2)  # one element for each tensor that is not there
        assert sum(held.values()) == sizes[side] + blanks
        assert {p.requires_grad for n, p in shrunk.module.named_parameters() if not half.has(n)} == {False}
