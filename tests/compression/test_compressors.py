"""Compressors on tensors: by hand, and against slow obvious references."""

from __future__ import annotations

import math

import pytest
import torch

from raafl.compression.plan import (
    BFloat16,
    Bits,
    Compress,
    Int8,
    InvalidPayload,
    TopK,
    compressor,
    num_rows,
    up_name,
)
from raafl.errors import BadInput
from raafl.submodel import FlatTensors, Layout
from tests.helpers.refusals import refuses

EVERY = {"bf16": BFloat16(), "int8": Int8(), "top_k": TopK(share=0.25), "bits": Bits()}


def flat(**tensors) -> FlatTensors:
    return FlatTensors.from_named({name: torch.as_tensor(value) for name, value in tensors.items()})


def sent(one, values: FlatTensors, seed: int = 0) -> FlatTensors:
    wire = FlatTensors.empty(one.layout(values.layout))
    one.encode(values, wire, seed)
    return wire


def returned(one, wire: FlatTensors, layout: Layout) -> FlatTensors:
    out = FlatTensors.empty(layout)
    one.decode(wire, out)
    return out


def round_trip(one, values: FlatTensors, seed: int = 0) -> FlatTensors:
    return returned(one, sent(one, values, seed), values.layout)


def mixed() -> FlatTensors:
    draw = torch.Generator().manual_seed(3)
    return flat(
        weight=(torch.randn(4, 40, generator=draw) > 0).float(),
        count=torch.tensor(7),
        bias=torch.tensor([0.0, 1.0, 1.0]),
        mask=torch.tensor([True, False]),
        double=torch.tensor([1.0, 0.0], dtype=torch.float64),
        half=torch.tensor([1.0, 0.0], dtype=torch.float16),
        none=torch.empty(0, 3),
    )


# ---- layouts ----


def test_bf16_travels_in_the_same_shapes():
    layout = BFloat16().layout(mixed().layout)
    assert {e.name: (e.shape, e.dtype) for e in layout.entries} == {
        "weight": ((4, 40), torch.bfloat16),
        "bias": ((3,), torch.bfloat16),
        "double": ((2,), torch.bfloat16),
        "count": ((), torch.int64),
        "mask": ((2,), torch.bool),
        "half": ((2,), torch.float16),
        "none": ((0, 3), torch.float32),
    }


def test_int8_travels_with_a_scale_to_each_long_row():
    assert [num_rows(shape) for shape in [(), (9,), (5, 31), (5, 32), (5, 4, 3, 3), (5, 3, 3, 3)]] == [1, 1, 1, 5, 5, 1]
    values = flat(weight=torch.zeros(4, 40), bias=torch.zeros(3), count=torch.tensor(7))
    layout = Int8().layout(values.layout)
    assert [(e.name, e.shape, e.dtype) for e in layout.entries] == [
        ("weight", (4, 40), torch.int8),
        ("bias", (3,), torch.int8),
        ("weight scales", (4,), torch.float32),
        ("bias scales", (1,), torch.float32),
        ("count", (), torch.int64),
    ]
    assert layout.num_bytes == 163 + 4 * 5 + 8


def test_top_k_travels_as_places_and_elements_of_each_dtype():
    values = flat(a=torch.zeros(3, 3), b=torch.zeros(3, dtype=torch.float64), c=torch.zeros(1), d=torch.tensor(1))
    layout = TopK(share=0.25).layout(values.layout)
    assert [(e.name, e.shape, e.dtype) for e in layout.entries] == [
        ("torch.float32 places", (2,), torch.int32),
        ("torch.float32 elements", (2,), torch.float32),
        ("torch.float64 places", (1,), torch.int32),
        ("torch.float64 elements", (1,), torch.float64),
        ("d", (), torch.int64),
    ]


@pytest.mark.parametrize(("share", "numel", "count"), [(0.1, 4, 1), (0.1, 26, 3), (1.0, 7, 7), (1e-9, 5, 1)])
def test_the_count_of_top_k(share, numel, count):
    assert TopK(share=share).count(numel) == count


def test_bits_travel_eight_to_the_byte():
    layout = Bits().layout(flat(a=torch.zeros(3, 3), b=torch.zeros(8)).layout)
    assert [(e.name, e.shape, e.dtype) for e in layout.entries] == [("a", (2,), torch.uint8), ("b", (1,), torch.uint8)]


@pytest.mark.parametrize("name", EVERY)
def test_what_is_not_named_or_not_floating_travels_as_it_is(name):
    values = mixed()
    one = compressor(name, 0.25, frozenset({"weight", "count", "mask"}))
    assert [entry.name for entry in one.taken(values.layout)] == ["weight"]
    out = round_trip(one, values)
    for other, tensor in values.items():
        if other != "weight":
            assert torch.equal(out[other], tensor) and out[other].dtype == tensor.dtype


@pytest.mark.parametrize("name", ["bf16", "int8", "top_k"])
def test_complex_numbers_travel_as_the_pairs_of_reals_that_they_are(name):
    pairs = torch.randn(4, 40, 2, generator=torch.Generator().manual_seed(3))
    wave, plain = flat(wave=torch.view_as_complex(pairs), bias=pairs[0, 0]), flat(wave=pairs, bias=pairs[0, 0])
    one, other = sent(EVERY[name], wave, seed=5), sent(EVERY[name], plain, seed=5)
    assert one.fingerprint() == other.fingerprint() and one.layout == other.layout
    out = returned(EVERY[name], one, wave.layout)["wave"]
    assert torch.equal(torch.view_as_real(out), returned(EVERY[name], other, plain.layout)["wave"])


@pytest.mark.parametrize("name", EVERY)
def test_nothing_to_compress(name):
    values = flat(count=torch.tensor(7))
    assert round_trip(EVERY[name], values)["count"] == 7
    nothing = FlatTensors.empty(Layout(()))
    assert len(round_trip(EVERY[name], nothing)) == 0


@pytest.mark.parametrize("name", EVERY)
def test_the_values_are_left_as_they_are_and_the_same_seed_gives_the_same_bits(name):
    values = mixed()
    before = values.clone()
    first, second = sent(EVERY[name], values, seed=5), sent(EVERY[name], values, seed=5)
    assert first.fingerprint() == second.fingerprint() and values.fingerprint() == before.fingerprint()


# ---- bf16 ----


def test_bf16_rounds_to_nearest_even():
    # 8 bits of significand: between 1 and 2 the step is 2^-7; halfway goes to the even neighbour
    values = flat(x=torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, -(1 + 2**-7), 3e38, 0.0]))
    expected = torch.tensor([1.0, 1.0, 1 + 2**-6, 1.0, -(1 + 2**-7), 3e38, 0.0])
    out = round_trip(BFloat16(), values)["x"]
    assert torch.equal(out[:5], expected[:5]) and out[6] == 0
    assert out[5].item() == pytest.approx(3e38, rel=2**-8)


# ---- int8 ----


def test_int8_is_exact_on_its_levels():
    row = torch.arange(-127, 128).float() * 0.5  # the scale is 63.5 / 127
    out = round_trip(Int8(), flat(x=row, zero=torch.zeros(5), one=torch.tensor([-3.0])), seed=1)
    assert torch.equal(out["x"], row) and torch.equal(out["zero"], torch.zeros(5)) and out["one"].item() == -3.0


def test_int8_rounds_to_a_neighbouring_level():
    values = flat(x=torch.linspace(-1.0, 1.0, 1001).view(1, -1))
    wire = sent(Int8(), values, seed=2)
    scale = wire["x scales"].item()
    assert scale == torch.tensor(1.0).div(127).item()
    gap = (round_trip(Int8(), values, seed=2)["x"] - values["x"]).abs().max().item()
    assert scale / 2 < gap <= scale * (1 + 1e-5)


def test_int8_is_unbiased():
    """The mean over seeds of x = 0.3 levels is within five standard deviations, sqrt(0.3 * 0.7 / n), for these seeds."""
    values = flat(x=torch.tensor([127.0, 0.3, -0.3, 12.75]))
    num = 1000
    total = torch.zeros(4, dtype=torch.float64)
    for seed in range(num):
        total += round_trip(Int8(), values, seed)["x"]
    mean = total / num
    for found, x in zip(mean.tolist(), [127.0, 0.3, -0.3, 12.75], strict=True):
        share = x - math.floor(x)
        assert abs(found - x) <= 5 * math.sqrt(share * (1 - share) / num) + 1e-4


def test_int8_scales_rows_by_themselves():
    rows = torch.ones(2, 32)
    rows[1] = 1000.0
    assert torch.equal(round_trip(Int8(), flat(x=rows))["x"], rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_int8_of_other_floats(dtype):
    values = flat(x=torch.tensor([127.0, -64.0, 1.0, 0.0], dtype=dtype))
    out = round_trip(Int8(), values)
    assert torch.equal(out["x"], values["x"]) and out["x"].dtype == dtype


# ---- top_k ----


def test_top_k_keeps_the_largest_of_all_tensors_together():
    values = flat(a=torch.tensor([[0.1, -5.0], [3.0, 0.2]]), b=torch.tensor([-4.0, 0.3, 0.0, 0.4]))
    wire = sent(TopK(share=3 / 8), values)
    assert wire["torch.float32 places"].tolist() == [1, 2, 4]
    assert wire["torch.float32 elements"].tolist() == [-5.0, 3.0, -4.0]
    out = returned(TopK(share=3 / 8), wire, values.layout)
    assert out["a"].tolist() == [[0.0, -5.0], [3.0, 0.0]] and out["b"].tolist() == [-4.0, 0.0, 0.0, 0.0]


def test_all_of_top_k_is_all():
    values = flat(a=torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), b=torch.zeros(4))
    assert round_trip(TopK(share=1.0), values).fingerprint() == values.fingerprint()


@pytest.mark.parametrize("places", [[-1, 2], [2, 1], [1, 1], [0, 8], [0, 2**31 - 1]])
def test_places_that_cannot_be_are_refused(places):
    values = flat(a=torch.arange(8.0))
    wire = sent(TopK(share=0.25), values)
    wire["torch.float32 places"].copy_(torch.tensor(places))
    with pytest.raises(InvalidPayload, match="2 ascending places below 8") as caught:
        returned(TopK(share=0.25), wire, values.layout)
    assert caught.value.reason == "bad-indices"


# ---- bits ----


def test_bits_are_packed_from_the_lowest_on():
    values = flat(x=torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1, 1, 1]), y=torch.ones(1, dtype=torch.float64))
    wire = sent(Bits(), values)
    assert wire["x"].tolist() == [1 + 8 + 128, 3] and wire["y"].tolist() == [1]
    assert returned(Bits(), wire, values.layout).fingerprint() == values.fingerprint()


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 64, 1001])
def test_bits_come_back_exactly(numel):
    values = flat(x=torch.randint(2, (numel,), generator=torch.Generator().manual_seed(numel)).float())
    assert round_trip(Bits(), values).fingerprint() == values.fingerprint()


def test_bits_are_for_zeros_and_ones_alone():
    with pytest.raises(BadInput, match="tensor 'x' has elements other than 0 and 1"):
        sent(Bits(), flat(x=torch.tensor([1.0, 0.5])))
    wire = sent(Bits(), flat(x=torch.ones(3)))
    wire["x"].fill_(8)
    with pytest.raises(InvalidPayload, match="bad-bits: 'x' has more than 3"):
        returned(Bits(), wire, flat(x=torch.ones(3)).layout)


# ---- what is not finite ----


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["bf16", "int8", "top_k"])
def test_what_is_not_finite_is_found_at_the_other_end(name, bad):
    x = torch.arange(100.0)
    x[17] = bad
    for values in (flat(x=x), flat(x=torch.ones(2, 40), statistics=torch.tensor([bad]))):
        one = compressor(name, 0.1, frozenset({"x"}))
        wire = sent(one, values)
        assert not wire.is_finite()
        with pytest.raises(InvalidPayload, match="non-finite"):
            returned(one, wire, values.layout)


def test_a_scale_below_zero_is_refused():
    values = flat(x=torch.ones(3))
    wire = sent(Int8(), values)
    wire["x scales"].fill_(-1.0)
    with pytest.raises(InvalidPayload, match="bad-scale"):
        returned(Int8(), wire, values.layout)


# ---- the section ----


test_values_out_of_range = refuses(
    Compress,
    ({"down": "int4"}, "compress.down is 'int4'"),
    ({"up": "bits"}, "compress.up is 'bits'"),
    ({"top_k": 0.0}, "compress.top_k is 0.0"),
    ({"top_k": 1.5}, "compress.top_k is 1.5"),
    (
        {"top_k": 0.2, "up": "int8"},
        "compress.top_k is 0.2, but neither .* is top_k: set one of these to top_k, or set compress.top_k to 0.1, or",
    ),
)


def test_what_a_merge_fixes_goes_up():
    assert up_name(Compress(up="int8"), None) == "int8" and up_name(Compress(), "bits") == "bits"
    assert up_name(Compress(), None) == "none" and compressor("none") is None
    with pytest.raises(BadInput, match=r"compress\.up is 'int8', but this algorithm's updates travel as bits"):
        up_name(Compress(up="int8"), "bits")
    with pytest.raises(BadInput, match="compressor is 'zip'"):
        compressor("zip")
