from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_zoo import CNN
from raafl.algorithms import co_s2p
from raafl.algorithms.co_s2p import MaskedAndDistilled
from raafl.algorithms.co_s2p.merge import ImportanceMerge
from raafl.compression.plan import Compress, CompressionPlan
from raafl.config.parse import load_experiment
from raafl.core.algorithm import Local, SelectContext, Training
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo
from raafl.devices.profiles import Profile
from raafl.parts.local.mask_training import SCORES
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Staleness
from raafl.parts.merge.personal import RecordingSelect, WithScores
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.select.windows import RollingWindows, first_window, split_rate
from raafl.parts.trigger import AllReported, EachArrival, MinRatio
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from tests.helpers.refusals import refuses


def test_every_argument_reaches_its_part():
    algorithm = co_s2p(
        rates=[0.25],
        width_depth=2.0,
        linear_masks="random",
        attention_masks="random",
        segments=4,
        mask_rounds=3,
        mask_epochs=2,
        mask_lr=0.1,
        mask_strength=1.5,
        distil_weight=0.3,
        temperature=2.0,
        min_ratio=0.4,
        wait_s=7.0,
        server_lr=0.5,
    )
    assert algorithm.select == RecordingSelect(RollingWindows([0.25], 2.0, "random", "random", 4, 3, 2, None, True))
    assert algorithm.local == MaskedAndDistilled(True, 0.3, 2.0, 1.5, 0.1, 4)
    assert algorithm.trigger == MinRatio(0.4, 7.0)
    assert algorithm.merge == WithScores(ImportanceMerge(0.5, 4))
    other = co_s2p(distil=False, mask_steps=9, trigger="sync", merge="mean")
    assert (other.select.inner.mask_epochs, other.select.inner.mask_steps) == (None, 9)
    assert not other.select.inner.distils and not other.local.distils
    assert (other.trigger, other.merge.inner) == (AllReported(), Deltas(1.0, Staleness()))
    assert co_s2p(trigger="async").trigger == EachArrival()
    assert co_s2p(submodel=RateSelect()).select == RecordingSelect(RateSelect())
    assert co_s2p(width_depth="inf").select.inner.ratio == float("inf")


def test_width_alone_is_asked_for_on_the_command_line():
    experiment = load_experiment(Path("configs/co-s2p.yaml"), "--algorithm.width_depth", "inf")
    assert experiment.algorithm.select.inner.ratio == float("inf")


test_bad_arguments_are_named = refuses(
    co_s2p,
    ({"rates": 1.5}, "a rate in rates is 1.5"),
    ({"width_depth": -1}, "ratio is -1: give 0"),
    ({"linear_masks": "learned"}, "linear is 'learned': known: random, trained"),
    ({"segments": 0}, "segments is 0"),
    ({"mask_rounds": -1}, "mask_rounds is -1"),
    ({"mask_rounds": 10_001}, "mask_rounds is 10001: give 0 .* to 10,000"),
    ({"mask_steps": 3, "mask_epochs": 2}, "mask_epochs is 2, but mask_steps is 3: leave out mask_epochs"),
    ({"mask_lr": 0}, "mask_lr is 0"),
    ({"mask_strength": -1.0}, "mask_strength is -1.0"),
    ({"distil_weight": 1.5}, "distil_weight is 1.5"),
    ({"temperature": 0}, "temperature is 0"),
    ({"trigger": "synch"}, "trigger is 'synch': did you mean"),
    ({"trigger": "sync", "wait_s": 60.0}, "wait_s is 60.0, but trigger is sync"),
    ({"min_ratio": 2.0}, "min_ratio is 2.0"),
    ({"merge": "median"}, "merge is 'median'"),
    ({"server_lr": 0}, "server_lr is 0"),
    ({"rates": 0.5, "submodel": RateSelect()}, "rates is 0.5, but submodel says"),
)


def test_how_a_rate_is_shared_by_width_and_depth():
    assert split_rate(0.25, 1.0) == (0.5, 0.5)
    assert split_rate(0.25, 0.0) == (1.0, 0.25)  # depth alone
    assert split_rate(0.25, float("inf")) == (0.25, 1.0)  # width alone
    width, depth = split_rate(0.125, 2.0)
    assert (width, depth) == (pytest.approx(0.25), pytest.approx(0.5))
    assert split_rate(0.125, 0.5) == (pytest.approx(0.5), pytest.approx(0.25))


# ---- windows of a transformer ----


@pytest.fixture(scope="module")
def fleet():
    pytest.importorskip("transformers")
    import model_zoo.vit
    from raafl.parts.local.distilled import with_every_exit

    before = model_zoo.vit.SIZES["micro"]
    model_zoo.vit.SIZES["micro"] = (4, 16, 32, 4)
    torch.manual_seed(0)
    model = with_every_exit(model_zoo.ViT("micro", 8, 4, num_classes=3))
    model_zoo.vit.SIZES["micro"] = before
    submodels = Submodels(model, (torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)))
    return model, submodels


def fleet_of(fleet, **counts):
    import random

    model, submodels = fleet
    state = GlobalState(submodels, submodels.state(model))
    return SelectContext(state, {}, random.Random(0), Training(), 4, local=MaskedAndDistilled())


def tasks(select, fleet, number, client=None):
    """The first so many tasks of a client, each of which is merged."""
    client = client or ClientInfo(1, 10)
    found = []
    for merged in range(number):
        fleet.state.counts[1] = merged
        found.append(select(client, fleet))
    return found


def blocks(spec):
    return sorted({int(name.split(".")[3]) for name in spec.trained if ".layers." in name})


def test_windows_with_masks_are_refused_where_nobody_trains_masks(fleet):
    """Before, the first task failed: it trained nothing."""
    masks = replace(fleet_of(fleet), clients={1: ClientInfo(1, 10)})
    plain = replace(masks, local=Local(), cache={})
    (problem,) = RollingWindows(0.25).check(plain)
    assert "mask_rounds is 5, and the algorithm trains no masks: set it to 0" in problem
    assert RollingWindows(0.25).check(masks) == []
    assert RollingWindows(0.25, mask_rounds=0).check(replace(plain, cache={})) == []


def test_a_small_clients_windows_move_up_and_train_every_block_alike(fleet):
    select = RollingWindows(0.0625, mask_rounds=0)  # r_d = 1/4: one block of four
    found = [work.spec for work in tasks(select, fleet_of(fleet), 8)]
    assert [blocks(spec) for spec in found] == [[0], [1], [2], [3]] * 2
    assert [list(dict(spec.blocks).get("model.vit.layers", range(4))) for spec in found[:4]] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]
    assert [spec.exits for spec in found[:4]] == [("model.exit1",), ("model.exit2",), ("model.exit3",), ()]
    kept = dict(found[2].kept)
    assert {name: len(units) for name, units in kept.items()} == {
        f"model.vit.layers.{i}.{axis}": 1 if axis == "heads" else 8 for i in range(3) for axis in ("heads", "ffn")
    }
    below, above = "model.vit.embeddings", "model.classifier"
    assert below in found[0].trained and below not in found[1].trained
    assert above in found[3].trained and above not in found[2].trained


def test_exits_inside_a_window_train_as_students(fleet):
    select = RollingWindows(0.25, mask_rounds=0)  # two blocks of four
    first, second = (work.spec for work in tasks(select, fleet_of(fleet), 2))
    assert first.exits == ("model.exit1", "model.exit2")
    assert {"model.exits.exit1", "model.exits.exit2"} <= set(first.trained)
    assert second.exits is None and blocks(second) == [2, 3]
    assert {name.split(".")[2] for name in second.trained if "exits" in name} == {"exit3"}
    plain = [work.spec for work in tasks(RollingWindows(0.25, mask_rounds=0, distils=False), fleet_of(fleet), 2)]
    assert [spec.exits for spec in plain] == [("model.exit2",), ()]
    assert RollingWindows(1.0)(ClientInfo(1, 10), fleet_of(fleet)).spec == FULL


def test_scores_train_before_their_window_and_then_decide_it(fleet):
    select, one = RollingWindows(0.25, segments=4, mask_rounds=1, mask_epochs=3), fleet_of(fleet)
    masks, first, again, second, third = (tasks(select, one, 5)[i] for i in range(5))
    assert [work.num_epochs for work in (masks, first, again, second, third)] == [3, None, 3, None, None]
    assert masks.spec.trained == () and not masks.spec.kept  # whole in width, frozen
    assert masks.extra["rate"] == 0.5
    wanted = {f"model.vit.layers.{i}.{axis}" for i in (0, 1) for axis in ("heads", "ffn")}
    assert set(masks.extra["masks"]) == wanted and set(again.extra["masks"]) == {
        name.replace(".0.", ".2.").replace(".1.", ".3.") for name in wanted
    }
    scores = {name: torch.tensor([0.0, 3.0, -1.0, 2.0]) for name in wanted}
    one.state.clients.values[SCORES] = {1: FlatTensors.from_named(scores)}
    _, first, again, *_ = tasks(select, one, 5)
    assert list(first.spec.indices("model.vit.layers.0.heads")) == [1, 3]
    assert list(first.spec.indices("model.vit.layers.1.ffn")) == [*range(8, 16), *range(24, 32)]
    # below the next window they are as narrow as these, and the window itself is whole
    assert list(again.spec.indices("model.vit.layers.0.heads")) == [1, 3]
    assert again.spec.indices("model.vit.layers.2.heads") is None


def windows_and_masks(select, fleet, number, client):
    """Of each task the block that it is of, and whether it trains scores; a window here is one block."""
    found = []
    for work in tasks(select, fleet, number, client):
        axes = work.extra.get("masks", ())
        (block,) = {int(name.split(".")[3]) for name in axes} if axes else blocks(work.spec)
        found.append((block, bool(axes)))
    return found


@pytest.mark.parametrize("mask_rounds", [1, 2])
def test_scores_of_every_block_train_in_its_first_visits(fleet, mask_rounds):
    """One block of four at a time: four windows go by before a block is visited again, and none keeps a random mask."""
    select = RollingWindows(0.0625, mask_rounds=mask_rounds)
    found = windows_and_masks(select, fleet_of(fleet), 8 * mask_rounds + 4, ClientInfo(1, 10))
    once = [(block, masks) for block in range(4) for masks in (True, False)]
    assert found == once * mask_rounds + [(block, False) for block in range(4)]


def test_a_block_that_two_windows_have_counts_each_visit(fleet):
    """Three blocks of four: the windows are 0 to 2 and 1 to 3, so that the second visits blocks 1 and 2 again."""
    found = tasks(RollingWindows(0.5625, mask_rounds=1), fleet_of(fleet), 5)
    axes = [{int(name.split(".")[3]) for name in work.extra.get("masks", ())} for work in found]
    assert axes == [{0, 1, 2}, set(), {3}, set(), set()]
    assert [blocks(found[i].spec) for i in (1, 3, 4)] == [[0, 1, 2], [1, 2, 3], [0, 1, 2]]


def test_clients_begin_with_different_windows(fleet):
    assert [first_window(client, 4) for client in range(1, 9)] == [0, 1, 2, 3, 1, 2, 3, 0]
    assert [first_window(client, 4) for client in (4, 8, 12, 16)] == [3, 0, 1, 2]  # every fourth is of one kind
    assert [first_window(client, 1) for client in (1, 2, 77)] == [0, 0, 0]
    select, one = RollingWindows(0.0625, mask_rounds=0), fleet_of(fleet)
    firsts = [blocks(select(ClientInfo(client, 10), one).spec) for client in range(1, 5)]
    assert firsts == [[0], [1], [2], [3]]
    one.state.counts[4] = 1
    assert blocks(select(ClientInfo(4, 10), one).spec) == [0]  # and goes on at the bottom


@pytest.mark.parametrize("rate", load_experiment(Path("configs/co-s2p.yaml")).algorithm.select.inner.rates.values())
def test_the_shipped_config_trains_the_mask_of_every_block(fleet, rate):
    """Of the paper's clients, with one, two and three of four blocks at a time, none keeps a random mask anywhere."""
    select = replace(load_experiment(Path("configs/co-s2p.yaml")).algorithm.select.inner, rates=rate)
    found = tasks(select, fleet_of(fleet), 12)
    assert {int(axis.split(".")[3]) for work in found for axis in work.extra.get("masks", ())} == {0, 1, 2, 3}


def test_a_window_without_scores_goes_straight_to_its_training(fleet, monkeypatch):
    """Such as one of blocks whose masks cannot be trained, where others can."""
    axes_of = RollingWindows._trained_axes
    monkeypatch.setattr(
        RollingWindows,
        "_trained_axes",
        lambda self, model, start, *more: [] if start else axes_of(self, model, start, *more),
    )
    found = tasks(RollingWindows(0.25, mask_rounds=2), fleet_of(fleet), 7)
    assert ["masks" in work.extra for work in found] == [True, False, False, True, False, False, False]
    assert [blocks(found[i].spec) for i in (1, 2, 4, 5, 6)] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize(("linear", "attention"), [("random", "trained"), ("trained", "random"), ("random", "random")])
def test_the_rows_of_table_7_train_no_scores_of_what_is_random(fleet, linear, attention):
    select = RollingWindows(0.25, linear=linear, attention=attention, mask_rounds=1)
    work, *rest = tasks(select, fleet_of(fleet), 6)
    kinds = {name.rpartition(".")[2] for name in work.extra.get("masks", ())}
    trained = {kind for kind, how in (("ffn", linear), ("heads", attention)) if how == "trained"}
    assert kinds == trained
    assert len({work.spec for work in rest}) > 3, "random masks are drawn anew"
    for work in rest:
        assert all(len(units) == (2 if name.endswith("heads") else 16) for name, units in work.spec.kept)


@pytest.mark.slow("a transformer's costs are predicted")
def test_a_client_gets_what_its_memory_holds(fleet):
    one, select = fleet_of(fleet), RollingWindows(1.0, mask_rounds=1)
    need = one.cost(FULL).peak_bytes
    small = ClientInfo(1, 10, Profile(memory_bytes=0.5 * need))
    for work in tasks(select, one, 6, small):
        assert one.local.cost(one.state.submodels, work.spec, 4, work.extra).peak_bytes <= 0.5 * need
    tiny = ClientInfo(1, 10, Profile(memory_bytes=100.0))
    (problem,) = select.check(SelectContext(one.state, {1: tiny}, one.rng, Training(), 4))
    assert "client 1: memory_bytes is 100, too little for any submodel" in problem


def test_students_and_gates_cost_something_and_scores_travel(fleet):
    one, submodels = MaskedAndDistilled(), fleet[1]
    plain, distilled = submodels.cost(FULL, 4), one.cost(submodels, FULL, 4, {})
    assert distilled.flops_per_sample > plain.flops_per_sample and distilled.up_bytes == plain.up_bytes
    frozen = Spec(trained=(), exits=())
    extra = {"masks": ["model.vit.layers.0.ffn"], "rate": 0.5}
    masks = one.cost(submodels, frozen, 4, extra)
    assert masks.flops_per_sample > 1.5 * submodels.cost(frozen, 4).flops_per_sample
    plan, num_scores = CompressionPlan.of(submodels, Compress(), "delta", one), 4 * (4 + 16)  # of four blocks
    assert plan.cost(masks, frozen).up_bytes == 4 * num_scores
    assert plan.cost(masks, frozen).down_bytes - masks.down_bytes == 4 * num_scores
    assert plan.cost(plain, FULL).up_bytes == plain.up_bytes
    beside = submodels.layout(FULL, "trained").num_bytes  # of the values that are sent beside the scores
    assert MaskedAndDistilled(distils=False).cost(submodels, FULL, 4, {}) == replace(
        plain, peak_bytes=plain.peak_bytes + beside
    )


def test_masks_of_convolutions_are_trained_through_channels_that_are_padding():
    submodels = Submodels(
        CNN(image_size=8, channels=(4, 4), hidden=(8, 8)), (torch.zeros(2, 1, 8, 8), torch.zeros(2).long())
    )
    frozen, extra = Spec(trained=()), {"masks": list(submodels.axes), "rate": 0.5}
    forward = submodels.cost(frozen, 4).padding_flops_per_sample
    assert MaskedAndDistilled(segments=4).cost(submodels, frozen, 4, extra).padding_flops_per_sample > forward > 0
