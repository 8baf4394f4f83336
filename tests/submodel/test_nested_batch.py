"""Batches of any kind: rebuilt as they are, with other tensors."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from raafl.local.trainable import to_device
from raafl.submodel.nested_batch import batch_tensors, mapped, meta_batch, num_samples, repeated, tensors_in

LoraPair = namedtuple("Pair", "x y")


class Strict(namedtuple("Strict", "x y")):
    """Has a constructor of its own."""

    def __new__(cls, both):
        return super().__new__(cls, both, both)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "a"


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    inner: Frozen
    more: list = field(init=False, default_factory=list)


class Graph:
    """As torch_geometric's batches: tensors in attributes; it knows itself."""

    def __init__(self, x):
        self.x, self.tables, self.name, self.me = x, {"edges": [x + 1]}, "g", self


class Listed(list):
    extra = 7


X = torch.arange(6.0).view(3, 2)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ([X, (X, "text"), None], lambda b: [b[0], b[1][0]]),
        (LoraPair(X, {"a": X}), lambda b: [b.x, b.y["a"]]),
        (Strict(X), lambda b: [b.x, b.y]),
        (Frozen(X, "b"), lambda b: [b.x]),
        (Slotted(X, Frozen(X)), lambda b: [b.x, b.inner.x]),
        (Graph(X), lambda b: [b.x, b.tables["edges"][0] - 1]),
        (OrderedDict(a=X), lambda b: [b["a"]]),
        (defaultdict(list, a=X), lambda b: [b["a"], *b["missing"]]),
        (Listed([X]), lambda b: [b[0]]),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_batch_is_rebuilt_as_its_own_kind(batch, parts):
    kept = [one.clone() for one in parts(batch)]
    doubled = mapped(batch, lambda x: 2 * x if torch.equal(x, X) else 2 * (x - 1) + 1)
    assert type(doubled) is type(batch)
    for before, own, after in zip(kept, parts(batch), parts(doubled), strict=True):
        assert torch.equal(own, before) and torch.equal(after, 2 * before)
    assert len(batch_tensors(batch)) == len(kept)
    assert all(one.is_meta for one in batch_tensors(to_device(batch, torch.device("meta"))))
    assert to_device(batch, torch.device("cpu")) is batch


def test_an_object_that_moves_itself_is_asked_to():
    class Graph:
        """Holds its tensors deep inside, and can be called, as PyTorch Geometric's."""

        def __init__(self, x):
            self._store = [{"x": x}]

        def __call__(self):
            return iter(self._store)

        def to(self, device):
            return Graph(self._store[0]["x"].to(device))

    moved, labels = to_device((Graph(X), X), torch.device("meta"))
    assert moved._store[0]["x"].is_meta and labels.is_meta


def test_what_is_no_tensor_stays_the_same_object():
    class Thing:
        pass

    thing = Thing()
    for batch in ("text", 3, None, thing, len, torch.float32, {1, 2}):
        assert mapped(batch, lambda x: x) is batch
    frozen = Frozen(X, "b")
    assert mapped(frozen, lambda x: x) is frozen and mapped(frozen, lambda x: x + 1).name == "b"


def test_an_operations_arguments_are_not_searched_for_objects():
    assert [len(tensors_in((X, {"a": [X]}, Graph(X)))), len(batch_tensors((X, Graph(X))))] == [2, 3]


@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_packed_sequence_is_one_of_as_many_samples(is_sorted):
    rows = [torch.arange(6.0).view(3, 2), torch.tensor([[9.0, 9.0]])]
    packed = pack_sequence(rows if is_sorted else rows[::-1], enforce_sorted=is_sorted)
    batch = {"x": packed, "y": torch.tensor([0, 1])}
    assert num_samples(batch) == 2
    many = repeated(batch, 4)
    padded, lengths = pad_packed_sequence(many["x"])
    wanted, wanted_lengths = pad_packed_sequence(packed)
    assert lengths.tolist() == wanted_lengths.repeat_interleave(2).tolist()
    assert torch.equal(padded, wanted.repeat_interleave(2, dim=1)) and many["y"].tolist() == [0, 0, 1, 1]
    meta = meta_batch(batch, 4)
    assert isinstance(meta["x"], PackedSequence) and meta["x"].data.is_meta and meta["y"].shape == (4,)
    assert meta["x"].data.shape == many["x"].data.shape and torch.equal(meta["x"].batch_sizes, many["x"].batch_sizes)
    assert not meta["x"].batch_sizes.is_meta  # torch wants them on the CPU, wherever the values are
    half = mapped(packed, lambda x: x.half() if x.is_floating_point() else x)
    assert half.data.dtype is torch.float16 and torch.equal(half.data.float(), packed.data)
