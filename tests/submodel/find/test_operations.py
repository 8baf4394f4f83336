"""What operations say of dimensions: for each, which units of two weights turn out to be the same, and which cannot go."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raafl.submodel.find.trace import Tracer


class Weights(nn.Module):
    """Parameters a, b, c, ... of these shapes."""

    def __init__(self, *shapes):
        super().__init__()
        for letter, shape in zip("abcdef", shapes, strict=False):
            self.register_parameter(letter, nn.Parameter(torch.rand(shape)))


def followed(function, *shapes):
    """The labels of the parameters after ``function(a, b, ...)``, and those of its answer."""
    module = Weights(*shapes)
    tracer = Tracer(module)
    tensors = list(module.parameters())
    with torch.no_grad(), tracer:
        answer = function(*tensors)
    return tracer, [tracer.dims_of(x) for x in tensors], tracer.dims_of(answer)


def alike(one, other):
    return one.leaves() == other.leaves()


def pinned(dim):
    return [atom.pin is not None for atom in dim.units()]


@pytest.mark.parametrize(
    "function, shapes, same",
    [
        (lambda a, b: a + b, [(3, 4), (4,)], [("a1", "b0")]),
        (lambda a, b: a * b, [(3, 4), (3, 1)], [("a0", "b0")]),
        (lambda a, b: a.add_(b), [(3, 4), (3, 4)], [("a0", "b0"), ("a1", "b1")]),
        (lambda a, b: torch.where(a > 0, a, b), [(3, 4), (3, 4)], [("a0", "b0"), ("a1", "b1")]),
        (lambda a, b: a @ b, [(3, 4), (4, 5)], [("a1", "b0"), ("a0", "r0"), ("b1", "r1")]),
        (lambda a, b: a @ b, [(2, 3, 4), (2, 4, 5)], [("a2", "b1"), ("a0", "b0"), ("b2", "r2")]),
        (lambda a, b: a @ b, [(3, 4), (4,)], [("a1", "b0"), ("a0", "r0")]),
        (lambda a, b, c: F.linear(a, b, c), [(2, 3), (4, 3), (4,)], [("a1", "b1"), ("b0", "c0"), ("b0", "r1")]),
        (lambda a, b: torch.einsum("bi,oi->bo", a, b), [(2, 3), (4, 3)], [("a1", "b1"), ("b0", "r1")]),
        (
            lambda a, b, c: F.conv2d(a, b, c),
            [(2, 3, 5, 5), (4, 3, 1, 1), (4,)],
            [("a1", "b1"), ("b0", "c0"), ("b0", "r1")],
        ),
        (lambda a, b: F.conv2d(a, b, groups=3), [(2, 3, 5, 5), (3, 1, 2, 2)], [("a1", "b0"), ("a1", "r1")]),
        (lambda a, b: F.conv_transpose1d(a, b), [(2, 3, 5), (3, 4, 2)], [("a1", "b0"), ("b1", "r1")]),
        (lambda a, b, c: F.layer_norm(a, [4], b, c), [(3, 4), (4,), (4,)], [("a1", "b0"), ("b0", "c0")]),
        (lambda a, b: F.batch_norm(a, None, None, b, training=True), [(3, 4), (4,)], [("a1", "b0")]),
        (lambda a, b: F.embedding(torch.tensor([1, 0]), a) + b, [(5, 4), (4,)], [("a1", "b0")]),
        (lambda a, b: torch.stack([a, b]), [(3,), (3,)], [("a0", "b0"), ("a0", "r1")]),
        (lambda a, b: torch.cat([a, b], 1), [(3, 4), (3, 5)], [("a0", "b0")]),
        (lambda a, b: F.glu(a) * b, [(3, 8), (4,)], [("b0", "r1")]),
        (lambda a, b: a.t().transpose_(0, 1) + b, [(3, 4), (3, 4)], [("a0", "b0"), ("a1", "b1")]),
        (lambda a, b: a.squeeze(1)[:, None].unsqueeze(-1)[..., 0] + b, [(3, 1), (3, 1)], [("a0", "b0")]),
        (lambda a, b: a.sum(0) + b, [(3, 4), (4,)], [("a1", "b0")]),
        (lambda a, b: a.expand(2, 3) + b, [(3,), (2, 3)], [("a0", "b1")]),
        (lambda a, b: a[::2] * b, [(6,), (3,)], [("b0", "r0")]),
        (lambda a, b: torch.view_as_real(torch.view_as_complex(a) * 2).sum(-1) + b, [(3, 2), (3,)], [("a0", "b0")]),
        (lambda a, b: F.conv1d(a, b), [(2, 3, 5), (4, 3, 1)], [("a1", "b1"), ("a2", "r2"), ("b0", "r1")]),
        (lambda a, b: F.unfold(a, 2).view(2, 3, 4, 9) * b, [(2, 3, 4, 4), (3, 1, 1)], [("a1", "b0"), ("a0", "r0")]),
        (lambda a, b: F.fold(a, (3, 3), 2) * b, [(2, 12, 4), (3, 1, 1)], [("b0", "r1"), ("a0", "r0")]),
        (lambda a, b: a.as_strided((2, 5, 2, 4), (24, 4, 4, 1)) * b, [(2, 6, 4), (4,)], [("a0", "r0"), ("a2", "b0")]),
        (lambda a, b: F.pixel_unshuffle(a, 2).view(2, 3, 4, 2, 2) * b, [(2, 3, 4, 4), (3, 1, 1, 1)], [("a1", "b0")]),
        (lambda a, b: F.channel_shuffle(F.channel_shuffle(a, 2), 3) * b, [(2, 6, 5), (6, 1)], [("a1", "b0")]),
        (
            lambda a, b: torch.grid_sampler(a, torch.zeros(2, 5, 5, 2), 0, 0, True) * b,
            [(2, 3, 4, 4), (3, 1, 1)],
            [("a1", "b0")],
        ),
        (
            lambda a, b: F.max_unpool2d(*F.max_pool2d(a, 2, return_indices=True), 2) * b,
            [(2, 3, 4, 4), (3, 1, 1)],
            [("a1", "b0")],
        ),
        (lambda a, b, c: F.bilinear(a, b, c), [(2, 3), (2, 4), (5, 3, 4)], [("a1", "c1"), ("b1", "c2"), ("c0", "r1")]),
        (lambda a, b: torch.cdist(a, b), [(2, 3), (4, 3)], [("a1", "b1"), ("a0", "r0"), ("b0", "r1")]),
        (lambda a, b: F.logsigmoid(a) * b, [(3,), (3,)], [("a0", "b0")]),
        (lambda a, b: a.view(2, 3, 5, 4) * b, [(2, 3, 4, 5), (3, 1, 1)], [("a1", "b0"), ("a0", "r0")]),
        (
            lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
            [(3, 4, 4), (3, 4, 5)],
            [("a0", "b0"), ("b2", "r2")],
        ),
    ],
)
def test_what_goes_together(function, shapes, same):
    _, dims, answer = followed(function, *shapes)
    rows = dict(zip("abcdef", dims, strict=False)) | {"r": answer}
    for one, other in same:
        assert alike(rows[one[0]][int(one[1])], rows[other[0]][int(other[1])]), (one, other)


@pytest.mark.parametrize(
    "function, whole",
    [
        (lambda a: torch.softmax(a, -1), [False, True]),
        (lambda a: a.cumsum(0), [True, False]),
        (lambda a: a.amax(1), [False, True]),
        (lambda a: a.sum(1), [False, False]),
        (lambda a: a.flip(0), [True, False]),
        (lambda a: a[:, 2], [False, True]),
        (lambda a: a[:, ::2], [False, True]),
        (lambda a: a.topk(2).values, [False, True]),
        (lambda a: F.pad(a, (1, 0)), [False, True]),
        (lambda a: a[torch.tensor([0, 2])], [True, False]),
        (lambda a: a.gather(1, torch.zeros(3, 1, dtype=torch.long)), [False, True]),
        (lambda a: a.index_select(0, torch.tensor([1])), [True, False]),
        (lambda a: a.tril(), [True, True]),
        (lambda a: a.as_strided((2, 2, 4), (4, 4, 1)), [True, False]),
        (lambda a: torch.fft.rfft(a).abs(), [False, True]),
        (lambda a: a + torch.arange(4), [False, True]),
        (lambda a: torch.linalg.inv(a[:, :3]), [True, True]),
    ],
)
def test_what_cannot_go(function, whole):
    _, ((first, second),), _ = followed(function, (3, 4))
    assert [all(pinned(first)), any(pinned(second))] == whole


def test_an_operation_without_a_rule_says_where_it_is():
    def function(a):
        return torch.linalg.inv(a)

    _, ((first, _),), _ = followed(function, (3, 3))
    (atom,) = first.leaves()
    assert atom.pin.text == "operation 'linalg_inv_ex' is not followed"
    assert atom.pin.place.startswith("test_operations.py:")


def test_a_mean_and_a_norm_are_spans():
    for function in (lambda a: a.mean(1), lambda a: F.layer_norm(a, [4]), lambda a: a.pow(2).var(-1)):
        _, ((first, second),), _ = followed(function, (3, 4))
        assert first.leaves()[0].span is None
        assert second.leaves()[0].span is not None and not any(pinned(second))


def test_only_whole_groups_of_a_group_norm_go():
    _, ((_, channels, _), _), _ = followed(lambda a, b: F.group_norm(a, 3, b), (2, 6, 5), (6,))
    assert [atom.size for atom in channels.leaves()] == [3, 2] and pinned(channels) == [False, True]


def test_query_heads_go_with_their_key_and_value():
    def attention(q, k, v):
        q, k, v = (x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)

    _, (q, k, v), out = followed(attention, (2, 5, 24), (2, 5, 12), (2, 5, 12))
    heads = k[2].leaves()[0]
    assert [atom.size for atom in q[2].leaves()] == [3, 2, 4]
    assert heads is q[2].leaves()[0] is v[2].leaves()[0] is out[2].leaves()[0] and "batch" in heads.marks


def test_weights_know_which_side_makes_units():
    _, (_, (made, read)), _ = followed(lambda x, w: F.linear(x, w), (2, 3), (4, 3))
    assert made.is_made and not made.is_read and read.is_read and not read.is_made


def test_what_is_written_into_a_slice_is_found_there():
    def function(a, b):
        whole = torch.zeros(3, 9)
        whole[:, :4] = a
        whole[:, 4:] = b
        return whole

    _, (a, b), whole = followed(function, (3, 4), (3, 5))
    parts = whole[1].leaves()[0].parts
    assert alike(parts[0], a[1]) and alike(parts[1], b[1]) and alike(whole[0], a[0])
