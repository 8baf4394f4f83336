from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_zoo import CNN, MLP
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.parts.select.rate_select import magnitude, unit_scores
from raafl.parts.select.units import (
    Budget,
    at_random,
    count,
    largest_rate,
    leading,
    rolling,
    size_of,
    steps,
    width_of,
)
from raafl.parts.select.windows import window_starts
from raafl.submodel import FULL, Axis, Member, Spec, Stack, Submodels
from tests.helpers.coordinators import Line
from tests.submodel.models import Blocks, FusedAttention


def axis(name: str, size: int) -> Axis:
    return Axis(name, size, (Member(f"{name}.weight", 0),))


TWO = {"a": axis("a", 8), "b": axis("b", 5)}
MIXED = {"a": axis("a", 8), "blocks": Stack("blocks", ("0", "1", "2", "3"))}


@st.composite
def some_axes(draw: st.DrawFn) -> dict[str, Axis | Stack]:
    axes: dict[str, Axis | Stack] = {f"axis{i}": axis(f"axis{i}", n) for i, n in enumerate(draw(sizes))}
    if draw(st.booleans()):
        axes["stack"] = Stack("stack", tuple(map(str, range(draw(st.integers(1, 9))))))
    return axes


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=3)
rates = st.floats(0.01, 1.0)


def kept(spec: Spec, axes) -> dict[str, list[int]]:
    """The units that a spec keeps of each axis, written out."""
    named = {**dict(spec.kept), **dict(spec.blocks)}
    return {name: list(named.get(name, range(size_of(one)))) for name, one in axes.items()}


# ---- by hand ----


def test_a_rate_keeps_its_ceiling_and_at_least_one():
    assert [count(8, rate) for rate in (0.01, 0.125, 0.13, 0.5, 0.75, 1.0)] == [1, 1, 2, 4, 6, 8]
    assert count(30, 0.1) == 3  # 0.1 * 30 is 3.0000000000000004
    for rate in (0.0, -1.0, 1.1):
        with pytest.raises(BadInput, match=f"rate is {rate}: give a number above 0, at most 1"):
            count(8, rate)


def test_a_share_of_the_model_is_the_square_of_a_share_of_its_width():
    assert [width_of(rate) for rate in (1, 0.5625, 0.25, 0.0625)] == [1.0, 0.75, 0.5, 0.25]


def test_leading_by_hand():
    assert leading(TWO, 0.5) == Spec.select({"a": range(4), "b": range(3)})
    assert leading(TWO, {"b": 0.2}) == Spec.select({"b": [0]})
    assert leading(MIXED, 0.5) == Spec.select({"a": range(4)}, blocks={"blocks": range(2)})
    assert leading(TWO, 1.0) == FULL
    with pytest.raises(BadInput, match="rate has 'bb', which is no axis of this model: did you mean 'b'"):
        leading(TWO, {"bb": 0.5})


def test_rolling_by_hand():
    # FedRolex: start at round mod K, wrap at K; each axis by its own size
    assert rolling(TWO, 0.4, round=0) == Spec.select({"a": [0, 1, 2, 3], "b": [0, 1]})
    assert rolling(TWO, 0.4, round=4) == Spec.select({"a": [4, 5, 6, 7], "b": [4, 0]})
    assert rolling(TWO, 0.4, round=6) == Spec.select({"a": [6, 7, 0, 1], "b": [1, 2]})
    assert rolling(MIXED, 0.5, round=3) == Spec.select({"a": [3, 4, 5, 6]}, blocks={"blocks": [3, 0]})


def test_leading_units_of_a_cnn():
    submodels = Submodels(CNN(1, 8, (4, 6), (8, 5), 3), [torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)])
    spec = leading(submodels.axes, 0.5)
    assert kept(spec, submodels.axes) == {"conv1": [0, 1], "conv2": [0, 1, 2], "fc1": [0, 1, 2, 3], "fc2": [0, 1, 2]}
    # conv1 2*25+2, conv2 3*2*25+3, fc1 4*(3*4)+4, fc2 3*4+3, fc3 3*3+3
    assert submodels.cost(spec).params == 52 + 153 + 52 + 15 + 12


# ---- importance ----


def test_magnitude_counts_all_slices_of_a_unit():
    # Line: unit i has row i of fc1 (2 values) and column i of fc2 (1 value)
    submodels = Submodels(Line(4))
    state = {
        "fc1.weight": torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [1.0, 1.0]]),
        "fc2.weight": torch.tensor([[3.0, 0.0, -1.0, 1.0]]),
    }
    assert unit_scores(submodels.axes["hidden"], state).tolist() == [10.0, 4.0, 1.0, 3.0]
    assert magnitude(submodels.axes, 0.5, state=state) == Spec.select({"hidden": [0, 1]})
    # squared gradients are summed as they are
    assert unit_scores(submodels.axes["hidden"], state, squared=False).tolist() == [4.0, 2.0, -1.0, 3.0]
    assert unit_scores(submodels.axes["hidden"], {"fc1.weight": state["fc1.weight"]}).tolist() == [1.0, 4.0, 0.0, 2.0]


def test_of_equal_units_the_first_are_kept():
    state = {"a.weight": torch.ones(8, 3), "b.weight": torch.zeros(5, 3)}
    assert magnitude(TWO, 0.4, state=state) == Spec.select({"a": range(4), "b": range(2)})


def test_a_whole_group_of_heads_is_weighed_together():
    torch.manual_seed(0)
    submodels = Submodels(FusedAttention())
    state = {name: torch.zeros(entry.shape) for name, entry in submodels.layout().by_name.items()}
    state["qkv.weight"][15:18] = 1.0  # the key of group 1
    state["out.weight"][:, :6] = 0.5  # group 0, less: 24 * 0.25 = 6 against 15
    assert unit_scores(submodels.axes["heads"], state).tolist() == [6.0, 15.0]
    assert magnitude(submodels.axes, 0.5, state=state) == Spec.select({"heads": [1]})


def test_blocks_are_weighed_by_their_parameters():
    module = Blocks()
    with torch.no_grad():
        for place, scale in enumerate((3.0, 1.0, 2.0, 4.0)):
            for parameter in module.stack[place].parameters():
                parameter.fill_(scale)
    submodels = Submodels(module)
    state = dict(module.named_parameters())
    # of a block 24 + 6 + 24 + 4 = 58 values
    assert unit_scores(submodels.stacks["depth"], state).tolist() == [58 * s for s in (9.0, 1.0, 4.0, 16.0)]
    assert magnitude(submodels.stacks, 0.5, state=state) == Spec.select(blocks={"depth": [0, 3]})


def test_importance_needs_something_to_weigh():
    with pytest.raises(
        BadInput, match="state is None, but units are chosen by importance: give the model's parameters"
    ):
        magnitude(TWO, 0.5)
    with pytest.raises(BadInput, match="state has no tensor on the axis 'a'"):
        magnitude(TWO, 0.5, state={"c": torch.zeros(3)})


# ---- whatever the axes ----


@pytest.mark.parametrize("selector", [leading, rolling, at_random, magnitude])
@given(some_axes(), rates, st.integers(0, 2**40), st.integers(0, 1000))
def test_every_selector_keeps_the_size_asked_for_and_repeats_itself(selector, axes, rate, seed, round):
    state = {
        f"{name}.0.weight" if isinstance(one, Stack) else f"{name}.weight": torch.ones(size_of(one), 2)
        for name, one in axes.items()
    }
    spec = selector(axes, rate, state=state, seed=seed, round=round)
    assert {name: len(units) for name, units in kept(spec, axes).items()} == {
        name: count(size_of(one), rate) for name, one in axes.items()
    }
    assert spec == selector(axes, rate, state=state, seed=seed, round=round)
    assert Spec.from_json(spec.to_json()) == spec


@given(some_axes(), rates)
def test_rolling_trains_every_unit_as_often_as_any_other_in_a_cycle(axes, rate):
    for name, one in axes.items():
        seen = Counter(i for q in range(size_of(one)) for i in kept(rolling(axes, rate, round=q), axes)[name])
        assert set(seen) == set(range(size_of(one)))
        assert set(seen.values()) == {count(size_of(one), rate)}


def test_what_is_drawn_depends_on_seed_round_and_axis():
    twins = {"a": axis("a", 40), "b": axis("b", 40)}
    one = at_random(twins, 0.5, seed=1, round=1)
    assert one != at_random(twins, 0.5, seed=2, round=1) and one != at_random(twins, 0.5, seed=1, round=2)
    assert one.indices("a") != one.indices("b")
    seen = Counter(i for q in range(400) for i in at_random(twins, 0.5, seed=0, round=q).indices("a"))
    assert min(seen.values()) > 140 and max(seen.values()) < 260  # 200 on average, deviation 10


def test_the_selectors_of_one_family_are_called_alike():
    for selector in (leading, rolling, at_random, magnitude):
        names = list(inspect.signature(selector).parameters)
        assert (names[0], names[2:]) == ("axes", ["state", "seed", "round"])


# ---- depth ----


def test_windows_follow_each_other_to_the_last_block():
    assert window_starts(8, 0.25) == [0, 2, 4, 6]
    assert window_starts(8, 0.375) == [0, 3, 5]
    assert window_starts(8, 0.75) == [0, 2]
    assert window_starts(8, 1.0) == [0]


# ---- the largest within a budget ----


def test_the_steps_are_the_rates_at_which_something_changes():
    assert steps({"a": axis("a", 4), "b": axis("b", 2)}) == [0.25, 0.5, 0.75, 1.0]
    assert steps({"a": axis("a", 2), "b": axis("b", 3)}) == [1 / 3, 0.5, 2 / 3, 1.0]


SMALL = Submodels(MLP(8, (7, 5), 3), [torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)])


def cost_of(spec: Spec):
    return SMALL.cost(spec, 4)


def spec_of_rate(rate: float) -> Spec:
    return leading(SMALL.axes, rate)


PROFILE = Profile(flops_per_s=1e6, down_bytes_per_s=1e4, up_bytes_per_s=5e3, latency_s=0.01, bytes_per_s=1e6)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "memory_bytes": st.floats(400, 5000),
            "flops": st.floats(2000, 20000),
            "wire_bytes": st.floats(300, 1500),
            "seconds": st.floats(0.05, 0.3),
            "params": st.floats(30, 140),
        },
    )
)
def test_largest_agrees_with_trying_every_size(limits):
    budget = Budget(profile=PROFILE, samples=10, **limits)

    def fits(rate: float) -> bool:
        cost = cost_of(spec_of_rate(rate))
        flops, moved = 10 * cost.flops_per_sample, 10 * cost.moved_bytes_per_sample
        need = {
            "memory_bytes": cost.peak_bytes,
            "flops": flops,
            "wire_bytes": cost.down_bytes + cost.up_bytes,
            "seconds": flops / 1e6 + moved / 1e6 + cost.down_bytes / 1e4 + cost.up_bytes / 5e3 + 0.02,
            "params": cost.params,
        }
        return all(need[name] <= limit for name, limit in limits.items())

    rates = [n / size for size in (5, 7) for n in range(1, size + 1)]
    fitting = [rate for rate in rates if fits(rate)]
    if fitting:
        found = largest_rate(spec_of_rate, cost_of, budget, rates=steps(SMALL.axes))
        assert found == max(fitting)
    else:
        with pytest.raises(BadInput, match="too little for any submodel"):
            largest_rate(spec_of_rate, cost_of, budget, rates=steps(SMALL.axes))


def test_nothing_fits_names_client_budgets_and_the_smallest():
    smallest = cost_of(spec_of_rate(1 / 7))
    # 1 x 8 + 1, 1 x 1 + 1, 3 x 1 + 3
    assert smallest.params == 17
    with pytest.raises(BadInput) as caught:
        largest_rate(
            spec_of_rate, cost_of, Budget(memory_bytes=100, params=16), rates=steps(SMALL.axes), who="client 7"
        )
    text = str(caught.value)
    assert text.startswith("client 7: memory_bytes is 100, params is 16, too little for any submodel")
    assert "layers.1[0:1] layers.3[0:1]" in text and "params 17" in text
    assert f"memory_bytes {smallest.peak_bytes:.4g}" in text


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(BadInput, match="seconds is 0"):
        Budget(seconds=0)
