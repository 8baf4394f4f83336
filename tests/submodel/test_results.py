"""Results made in the form of earlier ones are those that torch itself gives; all others it gives itself."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from raafl.submodel.cost import kernels
from raafl.submodel.cost.kernels import result_of
from raafl.submodel.cost.ledger import Ledger

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """What is remembered, nothing at first."""
    monkeypatch.setattr(kernels, "_known", {})
    return kernels._known


def empty(*shape, **options):
    return torch.empty(shape, device="meta", **options)


def forms(result):
    tensors = result if isinstance(result, list | tuple) else [result]
    return [x if x is None else (x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes()) for x in tensors]


NORM = aten.native_layer_norm.default, (empty(2, 3), [3], empty(3), empty(3), 1e-5)
CASES = {
    "product": (aten.mm.default, (empty(2, 3), empty(3, 4))),
    "turned": (aten.add.Tensor, (empty(3, 2).t(), empty(2, 3))),
    "several": NORM,
    "gradients, of which one is not asked for": (
        aten.native_layer_norm_backward.default,
        (empty(2, 3), empty(2, 3), [3], empty(2, 1), empty(2, 1), empty(3), empty(3), [True, False, True]),
    ),
    "list": (aten.cat.default, ([empty(2, 3), empty(4, 3)],)),
    "other type": (aten._to_copy.default, (empty(2),)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_second_is_as_the_first_and_has_a_storage_of_its_own(name, known):
    func, args = CASES[name]
    kwargs = {"dtype": torch.float64} if name == "other type" else {}
    first = result_of(func, args, kwargs)
    assert len(known) == 1
    second = result_of(func, args, kwargs)
    assert type(second) is type(first) and forms(second) == forms(first) == forms(func(*args, **kwargs))
    made = [x for x in (first, second) for x in (x if isinstance(x, tuple) else [x]) if x is not None]
    assert len({x.untyped_storage()._cdata for x in made}) == len(made)


def test_what_decides_the_form_is_told_apart():
    whole = empty(2, dtype=torch.int64)
    for _ in range(2):
        assert [result_of(aten.mul.Tensor, (whole, by), {}).dtype for by in (2, 2.0, True)] == [
            torch.int64,
            torch.float32,
            torch.int64,
        ]
        assert result_of(aten.div.Tensor, (whole, whole), {}).dtype == torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            assert result_of(aten.div.Tensor, (whole, whole), {}).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert result_of(aten.relu.default, (empty(2, 3).t(),), {}).stride() == (1, 3)
        assert result_of(aten.relu.default, (empty(3, 2),), {}).stride() == (2, 1)


def test_views_changes_values_and_new_tensors_are_torchs_own(known):
    x, here = empty(2, 3), torch.ones(2)
    for _ in range(2):
        assert result_of(aten.t.default, (x,), {})._is_view()
        assert result_of(aten.add_.Tensor, (x, 1), {}) is x
        assert torch.equal(result_of(aten.add.Tensor, (here, here), {}), 2 * here)
        assert result_of(aten.ones.default, ([2],), {"device": torch.device("cpu")}).tolist() == [1, 1]
        one, other = result_of(aten.unsafe_split.Tensor, (x, 1), {})
        assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
    assert known == {}


def test_modes_of_torchs_functions_see_nothing_of_the_ledgers_looks():
    """Each attribute of a tensor that is read goes through the modes that are entered, and took most of a plan's time."""
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, ledger = empty(2, 3), Ledger()
    with ledger, Mode():
        for _ in range(2):
            torch.mm(x, empty(3, 4))
            x.mul_(2)
    assert len(seen) == 6
    assert ledger.flops == 2 * 2 * 2 * 3 * 4 and ledger.kernels.total() == 4


def test_no_more_are_remembered_than_there_is_room_for(known, monkeypatch):
    monkeypatch.setattr(kernels, "_MOST", 2)
    for size in range(1, 4):
        result_of(aten.relu.default, (empty(size),), {})
    assert len(known) == 1
