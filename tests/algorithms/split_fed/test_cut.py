"""Where a model can be cut in two, and what each half has."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from raafl.algorithms.split_fed.cut import cuts_of
from raafl.algorithms.split_fed.exchange import halves
from raafl.submodel import FULL
from tests.algorithms.split_fed.models import Argmax, Conv, Masked, Skip, Tied, mlp, submodels_of

# ---- cut ----


def paths(make: Callable[[], nn.Module]) -> list[str]:
    return [cut.path for cut in cuts_of(submodels_of(make))[0]]


def test_a_chain_can_be_cut_after_every_layer_but_where_one_side_has_nothing_to_train():
    assert paths(mlp) == ["layers.1", "layers.2", "layers.3", "layers.4"]  # 0 flattens, 5 is the last layer
    first = cuts_of(submodels_of(mlp))[0][0]
    assert (first.num_layers, first.num_values, first.sample_bytes) == (1, 64 * 24 + 24, 24 * 4)
    assert first.lower == {"layers.1.weight", "layers.1.bias"}
    assert first.leaves == (1,)  # the labels: the inputs stay where they are


def test_a_skip_connection_is_not_cut_through():
    assert paths(Skip) == ["embed"]


def test_a_layer_used_on_both_sides_allows_no_cut():
    found, reason = cuts_of(submodels_of(Tied))
    assert found == ()
    assert "more than one value is passed" in reason


def test_what_leads_past_a_cut_without_a_gradient_counts_as_well():
    # After `low`, h goes on to `high` and `argmax`: only h itself crosses. After `high`, the choice made of h does, too.
    assert paths(Argmax) == ["low"]


def test_parts_of_the_batch_that_the_server_needs_are_found_through_layers_without_parameters():
    (cut,) = cuts_of(submodels_of(Masked))[0]
    assert (cut.path, cut.leaves) == ("low", (0, 1))
    assert cut.lower == {"scale", "low.weight", "low.bias"}


def test_batch_norms_statistics_belong_to_their_layer():
    cut = next(cut for cut in cuts_of(submodels_of(Conv))[0] if cut.path == "norm1")
    assert {"norm1.running_mean", "norm1.running_var", "norm1.num_batches_tracked"} <= cut.lower
    assert not any(name.startswith(("norm2", "conv2", "fc")) for name in cut.lower)


# ---- half ----


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
