"""Flat storage: names are views, equal contents have equal digests, and nothing that is not a number gets through."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from raafl.core.restoring import layout_from_json
from raafl.errors import BadInput
from raafl.parts.merge.wide import round_, widened
from raafl.submodel import FlatTensors, Layout, TensorEntry
from raafl.submodel.flat import DTYPES, is_merged, reals

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
layouts = st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPES))), max_size=6).map(
    lambda items: Layout.pack((f"t{i}", shape, DTYPES[dtype]) for i, (shape, dtype) in enumerate(items))
)


@settings(deadline=None)
@given(layouts)
def test_layout_packs_in_order_and_goes_out_and_back(layout):
    again = layout_from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout and hash(again) == hash(layout) and again.fingerprint == layout.fingerprint
    ends = dict.fromkeys(layout.dtypes, 0)
    for entry in layout.entries:
        assert entry.offset == ends[entry.dtype]
        ends[entry.dtype] += math.prod(entry.shape)
    assert ends == layout.numel
    assert layout.num_bytes == sum(math.prod(e.shape) * e.dtype.itemsize for e in layout.entries)


@settings(deadline=None)
@given(layouts)
def test_named_tensors_are_copied_once_and_read_as_views(layout):
    tensors = {e.name: torch.randint(0, 2, e.shape).to(e.dtype) for e in layout.entries}
    flat = FlatTensors.from_named(tensors)
    assert flat.layout == layout
    assert [name for name, _ in flat.items()] == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(flat[name], tensor)
        flat[name].zero_()
    assert all(not buffer.any() for buffer in flat.buffers.values())


@settings(deadline=None)
@given(layouts)
def test_a_wide_copy_has_reals_of_32_bits_or_more_and_rounds_back_to_the_same_bits(layout):
    flat = FlatTensors.from_named({e.name: torch.randn(e.shape).to(e.dtype) for e in layout.entries})
    wide = widened(flat)
    assert (wide is flat) == all(
        (e.dtype.itemsize > 2 and not e.dtype.is_complex) or not is_merged(e.dtype) for e in layout.entries
    )
    for name, tensor in flat.items():
        assert torch.equal(wide[name].to(torch.float64), reals(tensor).to(torch.float64))
        assert wide[name].dtype in (torch.float32, torch.float64) if is_merged(tensor.dtype) else tensor.dtype
    assert round_(FlatTensors.zeros(layout), wide).fingerprint() == flat.fingerprint()


def test_fingerprints_of_layouts_tell_names_shapes_dtypes_and_order_apart():
    f32, f16 = torch.float32, torch.float16
    variants = [
        [("a", (2, 3), f32), ("b", (1,), f32)],
        [("b", (1,), f32), ("a", (2, 3), f32)],
        [("a", (3, 2), f32), ("b", (1,), f32)],
        [("a", (2, 3), f16), ("b", (1,), f32)],
        [("a", (2, 3), f32), ("c", (1,), f32)],
    ]
    assert len({Layout.pack(variant).fingerprint for variant in variants}) == len(variants)


def test_digests_by_hand():
    flat = FlatTensors.from_named({"b": torch.tensor([1.0, 2.0]), "a": torch.tensor(7)})
    b, a = torch.tensor([1.0, 2.0]).numpy().tobytes(), torch.tensor(7).numpy().tobytes()
    assert flat.fingerprint() == xxhash.xxh3_128_hexdigest(b + a)
    by_name = b'["a", "int64", []]' + a + b'["b", "float32", [2]]' + b
    assert flat.model_digest() == hashlib.sha256(by_name).hexdigest()
    other_order = FlatTensors.from_named({"a": torch.tensor(7), "b": torch.tensor([1.0, 2.0])})
    assert other_order.model_digest() == flat.model_digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_finite(dtype):
    big = torch.finfo(dtype).max
    flat = FlatTensors.from_named({"w": torch.full((1000,), big, dtype=dtype), "n": torch.tensor([1])})
    assert flat.is_finite()  # although the sum overflows
    for bad in (math.nan, math.inf, -math.inf):
        flat["w"][500] = bad
        assert not flat.is_finite()
    flat["w"].zero_()
    flat["w"][0], flat["w"][1] = math.inf, -math.inf
    assert not flat.is_finite()


def test_empty_storage_is_finite_and_has_no_bytes():
    flat = FlatTensors.from_named({})
    assert flat.is_finite() and flat.num_bytes == 0 and len(flat) == 0
    assert flat.fingerprint() == xxhash.xxh3_128_hexdigest(b"")


def test_copies_are_independent_and_prefixes_are_not():
    flat = FlatTensors.from_named({"a": torch.ones(3), "b": torch.ones(2)})
    copy = flat.clone()
    begin = flat.prefix(Layout.pack([("a", (3,), torch.float32)]))
    begin["a"].zero_()
    assert flat["a"].tolist() == [0, 0, 0] and copy["a"].tolist() == [1, 1, 1]
    assert flat.copy_(copy)["a"].tolist() == [1, 1, 1]
    with pytest.raises(BadInput, match="first tensors"):
        flat.prefix(Layout.pack([("b", (2,), torch.float32)]))
    with pytest.raises(BadInput, match="different layouts"):
        flat.copy_(begin)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "layout is 'None'"),
        ({"tensors": 3}, "layout is"),
        ({"tensors": [["a", [2]]]}, "has the tensor"),
        ({"tensors": [["a", [-1], "float32"]]}, "has the tensor"),
        ({"tensors": [["a", [True], "float32"]]}, "has the tensor"),
        ({"tensors": [["a", [2], "float33"]]}, "has the tensor"),
        ({"tensors": [["a", [2], ["float32"]]]}, "has the tensor"),
        ({"tensors": [["a", [2], "float32"], ["a", [2], "float32"]]}, "'a' occurs twice"),
    ],
)
def test_bad_layouts_are_refused(data, message):
    with pytest.raises(BadInput, match=message):
        layout_from_json(data)


def test_buffers_must_fit_the_layout():
    layout = Layout((TensorEntry("a", (2, 2), torch.float32, 0),))
    for buffers in (
        {},
        {torch.float32: torch.zeros(3)},
        {torch.float32: torch.zeros(4, dtype=torch.float64)},
        {torch.float32: torch.zeros(8)[::2]},
    ):
        with pytest.raises(BadInput, match="give 4 contiguous elements"):
            FlatTensors(layout, buffers)
    with pytest.raises(BadInput, match="'a' is missing"):
        FlatTensors.from_named({}, layout)
    with pytest.raises(BadInput, match=r"'a' is \(4,\)"):
        FlatTensors.from_named({"a": torch.zeros(4)}, layout)
