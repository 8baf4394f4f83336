"""Merges of half precision and of complex numbers, against sums by hand; what is neither is merged as ever."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.algorithms import fed_avg, fed_buff
from raafl.core.options import Guard
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.deltas import Deltas, DeltasMemory
from raafl.parts.merge.mean import Mean
from raafl.parts.merge.pooled import Pooled
from raafl.parts.merge.wide import WideMerge, WideSubmodels
from raafl.parts.protect.assembly import widened
from raafl.parts.protect.robust import guarded
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from raafl.submodel.batch_norm import Pooling
from tests.helpers.coordinators import Line, line_state
from tests.helpers.merges import merge_all, take

FRONT = Spec.select({"hidden": range(2)})


def half_state(dtype=torch.bfloat16, value=0.0):
    module = Line().to(dtype)
    for parameter in module.parameters():
        parameter.detach().fill_(value)
    submodels = Submodels(module)
    return GlobalState(submodels, submodels.state(module))


def wide(state, merge):
    return WideMerge(merge, WideSubmodels(state.submodels))


def give(state, merge, *values, spec=FULL, samples=None):
    for place, value in enumerate(values):
        tensors = FlatTensors.zeros(state.submodels.layout(spec, "trained"))
        for buffer in tensors.buffers.values():
            buffer.fill_(value)
        take(merge, state, Update(place + 1, place + 1, 0, tensors, samples[place] if samples else 1), spec, 0)
        if place + 1 < len(values):
            merge.detach(state)
    merge_all(merge, state)


def test_only_models_that_train_other_than_float32_and_float64_are_widened():
    algorithm = fed_avg()
    assert widened(algorithm, line_state().submodels) is algorithm
    assert isinstance(widened(algorithm, half_state().submodels).merge, WideMerge)
    assert str(widened(algorithm, half_state().submodels).merge) == str(algorithm.merge)


def test_little_deltas_beside_a_large_one_count():
    """1 + 2^-8 is 1 in bfloat16, to even; the mean of 1, 2^-8 and 2^-8 is 1.0078125 / 3 = 0.3359375."""
    state = half_state()
    give(state, wide(state, Deltas()), 1.0, 2.0**-8, 2.0**-8)
    assert state.values["fc1.weight"].unique().tolist() == [0.3359375]
    assert state.values["fc1.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", [FULL, FRONT], ids=["full", "front"])
def test_the_mean_of_equal_values_is_that_value(dtype, spec):
    value = torch.tensor(0.3, dtype=dtype).item()
    state = half_state(dtype, value)
    give(state, wide(state, Mean()), *[value] * 50, spec=spec, samples=[7 + 13 * n for n in range(50)])
    assert all(bool((buffer == value).all()) for buffer in state.values.buffers.values())


def test_values_that_others_have_changed_since_are_the_ones_merged_into():
    """As when a run is resumed: parts have been asked for problems before its values are there."""
    state = half_state(value=1.0)
    merge = wide(state, Mean(alpha=0.5))
    assert merge.check(state) == [] and merge.report(state) == {}
    state.values.buffers[torch.bfloat16].fill_(3.0)
    give(state, merge, 5.0)
    assert state.values["fc2.bias"].item() == 4.0


def test_what_is_kept_is_single_precision_and_the_model_its_own():
    state = half_state()
    merge = wide(state, Deltas())
    take(merge, state, Update(1, 1, 0, FlatTensors.zeros(state.submodels.layout(part="trained")), 1), FULL, 0)
    assert state.memory.of(DeltasMemory).sum.layout.dtypes == (torch.float32,)
    assert state.values.layout.dtypes == (torch.bfloat16,)


# ---- complex numbers ----


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(7))


def wave_state():
    module = Wave()
    submodels = Submodels(module)
    return GlobalState(submodels, submodels.state(module))


@pytest.mark.parametrize(("combine", "mean"), [("median", 2 + 2j), ("trimmed_mean", 2 + 2j), ("mean", 2 + 3j)])
def test_parts_of_complex_numbers_are_combined_each_for_itself(combine, mean):
    """Real parts 1, 3 and 2, imaginary parts 2, -1 and 8: medians 2 and 2, means 2 and 3."""
    state = wave_state()
    algorithm = guarded(fed_buff(3), Guard(combine=combine, **({"trim": 0.34} if combine == "trimmed_mean" else {})))
    give(state, widened(algorithm, state.submodels).merge, 1 + 2j, 3 - 1j, 2 + 8j)
    assert state.values["wave"].tolist() == [mean, mean] and state.values["count"].item() == 7


def test_the_norm_of_complex_numbers_is_that_of_all_their_parts():
    """Two times 3 + 4j: sqrt(2 (9 + 16)) = 7.07, clipped to a tenth of that."""
    state = wave_state()
    algorithm = guarded(fed_buff(1), Guard(clip_norm=50**0.5 / 10))
    give(state, widened(algorithm, state.submodels).merge, 3 + 4j)
    assert state.values["wave"].tolist() == pytest.approx([0.3 + 0.4j, 0.3 + 0.4j])


# ---- running statistics ----


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)


def test_a_small_variance_beside_a_large_mean_is_kept_in_half_precision():
    """In bfloat16 100^2 + 0.5 is 9984: sent as a second moment a variance of 0.5 would come back as 0."""
    module = Normed().to(torch.bfloat16)
    submodels = Submodels(module)
    state = GlobalState(submodels, submodels.state(module))
    pooling = Pooling(module)
    merge = WideMerge(Pooled(Mean(), pooling), WideSubmodels(submodels))
    for client, variance in ((1, 0.5), (2, 1.5)):
        tensors = submodels.plan().gather(state.values)
        tensors["norm.running_mean"].fill_(100.0)
        tensors["norm.running_var"].fill_(variance)
        pooling.to_moments_(tensors, half=False)
        assert tensors["norm.running_var"].item() == variance
        take(merge, state, Update(client, client, 0, tensors, 1), FULL, 0)
        merge.detach(state)
    merge_all(merge, state)
    assert state.values["norm.running_mean"].item() == 100.0 and state.values["norm.running_var"].item() == 1.0
