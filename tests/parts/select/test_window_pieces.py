"""Windows of blocks and slices of their width, handed out by Gre-RAA."""

from __future__ import annotations

import io
from collections import Counter
from contextlib import redirect_stdout

import pytest
import torch

from model_zoo import MLP, ViT
from raafl.algorithms import fed_raa
from raafl.core.state import GlobalState
from raafl.data import Digits
from raafl.parts import WindowPieces
from raafl.parts.local.distilled import with_every_exit
from raafl.runtime.run import simulate
from raafl.submodel import Submodels
from tests.helpers.coordinators import coordinator_for
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import experiment, finish


def vit():
    return ViT("micro", image_size=8, patch_size=4, in_channels=1)


@pytest.fixture
def submodels():
    torch.manual_seed(0)
    return Submodels(vit(), (torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)))


def test_the_pieces_of_a_rate_train_every_unit_of_every_block_once(submodels):
    pieces = WindowPieces(rates=[0.25], segments=4).pieces(submodels)
    assert len(pieces) == 4  # two windows of one block, two slices of half of its heads and segments
    trained: Counter[tuple[str, int]] = Counter()
    for spec in pieces:
        top = [name for name in spec.trained or () if "layers." in name]
        assert len({name.split("layers.")[1][0] for name in top}) == 1
        block = top[0].split("layers.")[1][0]
        trained.update((axis, unit) for axis, units in spec.kept if f"layers.{block}." in axis for unit in units)
    wanted = {(name, unit) for name, axis in submodels.axes.items() for unit in range(axis.size) if "layers." in name}
    assert set(trained) == wanted and set(trained.values()) == {1}


def test_rate_one_is_the_whole_model_and_comes_first(submodels):
    pieces = WindowPieces(rates=[0.25, 1.0]).pieces(submodels)
    assert pieces[0].is_full and len(pieces) == 5


def test_width_or_depth_alone(submodels):
    narrow = WindowPieces(rates=[0.5], ratio=float("inf")).pieces(submodels)
    assert len(narrow) == 2 and not any(spec.blocks for spec in narrow)
    low = WindowPieces(rates=[0.5], ratio=0).pieces(submodels)
    assert len(low) == 2 and not any(spec.kept for spec in low)


def test_a_model_without_blocks_is_cut_in_width():
    model = MLP(8, (8,), 3)
    (name,) = (submodels := Submodels(model)).axes
    pieces = WindowPieces(rates=[0.25], segments=4).pieces(submodels)
    assert [list(spec.indices(name)) for spec in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_gre_raa_spreads_merges_over_the_pieces_that_clients_manage(tmp_path):
    torch.manual_seed(0)
    algorithm = fed_raa(submodel=WindowPieces(rates=[0.25]), rescale=False)
    run = finish(experiment(tmp_path / "run", algorithm, model=vit, data=lambda: Digits(batch_size=64), max_updates=12))
    regions = Counter(row["region"] for row in run.journal() if row.get("event") == "assigned")
    assert set(regions) == {1, 2, 3, 4} and max(regions.values()) - min(regions.values()) <= 4


def notes_of(model):
    fleet = coordinator_for(fed_raa(submodel=WindowPieces()), GlobalState(model, model.state(model.module))).fleet
    return WindowPieces().notes(fleet)


def test_what_is_not_of_co_s2p_is_said(submodels):
    notes = notes_of(submodels)
    assert "no masks are trained" in notes[0] and "there is no distillation" in notes[0]
    assert notes[1:] == ["the model has no exits: its own last layers end windows of blocks of every depth"]
    with_exits = Submodels(with_every_exit(vit()))
    assert len(with_exits.exits) == 1 and notes_of(with_exits) == notes[:1]
    plain = notes_of(Submodels(MLP(8, (), 3)))
    assert (
        len(plain) == 3 and "no stack of blocks" in plain[1] and plain[2].startswith("the model's width stays whole: ")
    )


def test_a_run_says_it_at_its_start(tmp_path):
    said = io.StringIO()
    algorithm = fed_raa(submodel=WindowPieces(rates=[0.25]), rescale=False)
    settings = experiment(tmp_path / "run", algorithm, model=vit, max_updates=2, progress="plain")
    with redirect_stdout(said):
        simulate(settings)
    assert "these are Co-S2P's windows without its training: " in said.getvalue()


test_bad_arguments_are_named = refuses(
    WindowPieces,
    ({"rates": []}, "rates is empty"),
    ({"rates": [1.5]}, "a rate in rates is 1.5"),
    ({"how": "best"}, "select is 'best'"),
    ({"ratio": -1.0}, "ratio is -1.0"),
)
