from __future__ import annotations

import itertools
import math
import secrets

import numpy as np
import pytest
import torch
from torch import nn

from raafl.errors import BadInput
from raafl.parts.protect.secure import member as members
from raafl.parts.protect.secure.group import (
    CannotOpen,
    Coverage,
    FixedPoint,
    Group,
    GroupMember,
    IntegerLayouts,
    OutOfRange,
    add_,
    buffer_of,
    expand,
    threshold_of,
)
from raafl.parts.protect.secure.member import Member, combine, mask_and_open_, share
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from tests.helpers.coordinators import EXAMPLE, Line

# ---- Shamir's sharing ----


def test_shamir_restores_the_published_vector():
    """draft-mcgrew-tss-03, section 9: the secret "test\\0", two shares, both needed."""
    shares = {1: bytes.fromhex("B9FA07E185"), 2: bytes.fromhex("F5409B4511")}
    assert combine(shares) == bytes.fromhex("7465737400")


def slow_product(a: int, b: int) -> int:
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11B << (bit - 8)
    return product


def test_shares_are_the_polynomials_values(monkeypatch):
    """Coefficients 7 x^2 + 9 x + secret, evaluated by schoolbook multiplication."""
    drawn = iter([bytes([7]), bytes([9])])
    monkeypatch.setattr(secrets, "token_bytes", lambda num: next(drawn))
    values = [slow_product(7, slow_product(x, x)) ^ slow_product(9, x) ^ 0x42 for x in range(1, 6)]
    assert [piece[0] for piece in share(b"\x42", 3, 5)] == values


def test_any_threshold_of_shares_restores_and_fewer_do_not():
    secret = bytes(range(256))
    shares = dict(enumerate(share(secret, 3, 5), start=1))
    for points in itertools.combinations(shares, 3):
        assert combine({point: shares[point] for point in points}) == secret
    assert combine({point: shares[point] for point in (1, 2)}) != secret


def test_one_share_tells_nothing_of_the_secret():
    """Whatever the secret is, each value of a share is equally likely: 256 draws of a byte differ by chance alone."""
    counts = np.zeros(256, int)
    for text in share(bytes(1 << 16), 2, 2)[0:1]:
        counts += np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    # 256 expected in each cell with a deviation of 16: six of them are a chance of 1e-9 a cell
    assert counts.min() > 256 - 96 and counts.max() < 256 + 96


@pytest.mark.parametrize(("threshold", "num"), [(0, 3), (4, 3), (2, 256)])
def test_impossible_thresholds_are_refused(threshold, num):
    with pytest.raises(ValueError, match="1 to 255"):
        share(b"x", threshold, num)


# ---- fixed point ----


def test_precision_is_as_stated():
    point = FixedPoint(bound=8.0, num_members=10)
    # 10 * 8 * 2^24 = 1,342,177,280 is below 2^31, and twice that is not
    assert point.bits == 24 and point.step == 2.0**-24
    values = torch.tensor([1.0, -1.0, 8.0, -8.0, 2.0**-24, -(2.0**-25), 0.3])
    numbers = point.encode(values)
    assert numbers.tolist()[:6] == [2**24, -(2**24), 2**27, -(2**27), 1, 0]
    assert abs(point.decode(numbers)[6].item() - 0.3) < point.step


def test_the_largest_sum_does_not_overflow():
    point = FixedPoint(bound=1.9375, num_members=7)
    total = torch.zeros(1, dtype=torch.int32)
    for _ in range(7):
        add_(total, point.encode(torch.tensor([1.9375])))
    assert point.decode(total).item() == pytest.approx(7 * 1.9375, abs=7 * point.step)


@pytest.mark.parametrize("value", [8.1, -9.0, math.nan, math.inf])
def test_an_element_beyond_the_bound_is_refused(value):
    with pytest.raises(OutOfRange, match=r"larger than 8 \(secure_aggregation.bound\)"):
        FixedPoint(8.0, 10).scale(torch.tensor([0.0, value]))


def test_clipping_comes_before_the_bound_and_is_never_exceeded():
    point = FixedPoint(bound=1.0, num_members=3)
    change = torch.full((10_000,), 5.0)
    numbers = point.encode(change, scale=point.scale(change, clip_norm=2.0))  # each element to 2 / 100
    norm = torch.linalg.vector_norm(point.decode(numbers)).item()
    assert 2.0 - 100 * point.step < norm <= 2.0


def test_a_bound_that_32_bits_do_not_hold_is_refused():
    with pytest.raises(BadInput, match="give a smaller bound"):
        FixedPoint(bound=1e9, num_members=10)


def test_sums_wrap_around_as_the_ring_does():
    total = torch.tensor([2**31 - 1], dtype=torch.int32)
    add_(total, torch.tensor([2], dtype=torch.int32))
    assert total.item() == -(2**31) + 1


# ---- coverage ----


class Wide(nn.Module):
    """Two hidden layers, so that the middle weight is cut in both dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def submodel_axes(self):
        return {
            "a": [("a.weight", 0), ("a.bias", 0), ("b.weight", 1)],
            "b": [("b.weight", 0), ("b.bias", 0), ("c.weight", 1)],
        }


@pytest.fixture(scope="module")
def wide() -> IntegerLayouts:
    return IntegerLayouts(Submodels(Wide(), (torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))))


SPECS = {
    1: FULL,
    2: Spec.select({"a": range(4), "b": range(3)}),
    3: Spec.select({"a": [0, 1, 6, 7], "b": [1, 3, 5]}),
    4: Spec.select({"a": range(4), "b": range(3)}),
    5: Spec.select({"a": range(2, 7)}),
    6: FULL,
}


def holders_by_hand(layouts: IntegerLayouts, specs: dict[int, Spec]) -> list[frozenset[int]]:
    """For each element of the whole model, who has it: one submodel at a time."""
    found = [set() for _ in range(buffer_of(layouts.zeros()).numel())]
    for key, spec in specs.items():
        count = layouts.zeros()
        layouts.plan(spec).cover_(count, 1)
        for place in np.flatnonzero(buffer_of(count).numpy()):
            found[place].add(key)
    return [frozenset(one) for one in found]


def test_cells_are_the_elements_that_the_same_members_have(wide):
    coverage, wanted = Coverage(wide, SPECS), holders_by_hand(wide, SPECS)
    places = wide.zeros()
    buffer_of(places).copy_(torch.arange(len(wanted)))
    for key, spec in SPECS.items():
        own = buffer_of(wide.plan(spec).gather(places)).tolist()
        assert own == sorted(own)  # so two members meet their common elements in the same order
        assert [coverage.holders[cell] for cell in coverage.cells_of(key)] == [wanted[place] for place in own]
        for other in SPECS:
            chosen = np.zeros(len(own), bool)
            chosen[coverage.shared_elements(key, other)] = True
            assert chosen.tolist() == [other in wanted[place] for place in own]


def test_many_submodels_find_the_same_cells_as_few(wide):
    """Seventeen windows of the first layer: more than have a table."""
    specs = {
        key: Spec.select({"a": range(key % 8, key % 8 + 1), "b": range(key // 8, key // 8 + 4)}) for key in range(17)
    }
    coverage, wanted = Coverage(wide, specs), holders_by_hand(wide, specs)
    assert len(set(specs.values())) == 17 and set(coverage.holders) == set(wanted)


def test_a_group_may_have_more_submodels_than_a_number_has_bits(wide):
    """Each of 255 clients has another: all subsets of the first layer's eight units but the empty one."""
    units = [[unit for unit in range(8) if number >> unit & 1] for number in range(1, 256)]
    specs = {key: Spec.select({"a": kept, "b": [key % 6]}) for key, kept in enumerate(units)}
    coverage, wanted = Coverage(wide, specs), holders_by_hand(wide, specs)
    assert set(coverage.holders) == set(wanted) and len(coverage.holders) == len(set(wanted))
    for key, spec in list(specs.items())[::50]:
        mine = [holders for holders in wanted if key in holders]
        assert [coverage.holders[cell] for cell in coverage.cells_of(key)] == mine, spec


def test_too_many_ways_to_overlap_are_refused(wide, monkeypatch):
    monkeypatch.setattr("raafl.parts.protect.secure.group.MAX_CELLS", 5)
    ways = len(set(holders_by_hand(wide, SPECS)))
    with pytest.raises(
        CannotOpen,
        match=f"bad-group: the submodels of {len(SPECS)} clients overlap in {ways} different ways or more, at most 5",
    ):
        Coverage(wide, SPECS)


def test_whole_models_have_one_cell(wide):
    coverage = Coverage(wide, dict.fromkeys(range(1, 8), FULL))
    assert len(coverage.holders) == 1 and coverage.shared_elements(1, 2) == slice(None)


# ---- masks ----


def drawn(layouts: IntegerLayouts, specs: dict[int, Spec], seed: int = 0) -> dict[int, FlatTensors]:
    """Whole numbers over the full range of 32 bits."""
    rng, numbers = np.random.default_rng(seed), {}
    for key, spec in specs.items():
        numbers[key] = layouts.zeros(spec)
        words = buffer_of(numbers[key]).numpy().view(np.uint32)
        words[:] = rng.integers(0, 2**32, len(words), dtype=np.uint32)
    return numbers


def total_of(layouts: IntegerLayouts, specs: dict[int, Spec], numbers: dict[int, FlatTensors], keys) -> np.ndarray:
    total = layouts.zeros()
    for key in keys:
        layouts.plan(specs[key]).apply_(
            total, numbers[key], lambda target, source: target.copy_(wrapped(target, source))
        )
    return buffer_of(total).numpy()


def wrapped(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.long() + other.long()).to(torch.int32)


@pytest.mark.parametrize("dropped", [(), (2,), (1, 5)], ids=str)
@pytest.mark.parametrize("min_cover", [2, 3])
def test_the_opened_sum_is_the_plain_sum_to_the_bit(wide, dropped, min_cover):
    """Wherever enough contribute; elsewhere it stays hidden, and nobody's own numbers are to be seen anywhere."""
    plain = drawn(wide, SPECS)
    masked = {key: flat.clone() for key, flat in plain.items()}
    mask_and_open_(masked, SPECS, wide, min_cover, 0.5, dropped)
    left = [key for key in SPECS if key not in dropped]
    holders = holders_by_hand(wide, SPECS)
    is_open = np.array([len(one & set(left)) >= min_cover for one in holders])
    wanted, found = (total_of(wide, SPECS, numbers, left) for numbers in (plain, masked))
    assert (found[is_open] == wanted[is_open]).all() and is_open.any()
    covered = np.array([bool(one & set(left)) for one in holders])
    shut = covered & ~is_open
    assert shut.any() == (min_cover == 3 or dropped == (1, 5))
    assert not shut.any() or (found[shut] != wanted[shut]).mean() > 0.9
    for key in left:
        assert (buffer_of(masked[key]).numpy() != buffer_of(plain[key]).numpy()).mean() > 0.95


def test_three_of_ten_may_drop_out_and_a_fourth_may_not(wide):
    specs = dict.fromkeys(range(1, 11), FULL)
    assert threshold_of(10, 2 / 3) == 7
    plain = drawn(wide, specs)
    masked = {key: flat.clone() for key, flat in plain.items()}
    mask_and_open_(masked, specs, wide, 2, 2 / 3, dropped=(3, 7, 10))
    left = [1, 2, 4, 5, 6, 8, 9]
    assert (total_of(wide, specs, masked, left) == total_of(wide, specs, plain, left)).all()
    with pytest.raises(CannotOpen, match="too-few: 6 members are left, 7 must help"):
        mask_and_open_(drawn(wide, specs), specs, wide, 2, 2 / 3, dropped=(2, 3, 7, 10))


def test_masks_are_aes_in_counter_mode():
    """NIST SP 800-38A has no vector with a counter from 0: FIPS-197's of a single block, C.3, as the first of a stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes(range(32))
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(bytes(16))
    assert expand(key, 4).tobytes() == block and len(expand(key, 1001)) == 1001


# ---- what a client does not agree to ----


def group_of(keys: dict[int, Member], **changes) -> Group:
    made = tuple(GroupMember(key, *member.public, FULL) for key, member in keys.items())
    return Group(**{"id": "ab", "members": made, "threshold": 3, "min_cover": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"threshold": 2}, "in this group of 3, 2 members could unmask the sum; this client"),
        ({"min_cover": 1}, "min_cover is 1 on the server, but 2 on this client"),
        ({"members": ()}, "does not list this client with its own public keys"),
    ],
    ids=str,
)
def test_a_client_refuses_a_group_that_is_weaker_than_its_own_config(wide, changes, why):
    everyone = {key: Member(2, 2 / 3) for key in (1, 2, 3)}
    with pytest.raises(CannotOpen, match=why):
        everyone[1].join(group_of(everyone, **changes), 1, wide)


def test_a_client_refuses_a_group_that_is_one_client_several_times(wide):
    own, other = Member(2, 2 / 3), Member(2, 2 / 3)
    with pytest.raises(CannotOpen, match="share a key"):
        own.join(group_of({1: own, 2: other, 3: other}), 1, wide)


def joined(layouts: IntegerLayouts) -> tuple[dict[int, Member], dict[int, dict[int, bytes]]]:
    everyone = {key: Member(2, 2 / 3) for key in (1, 2, 3)}
    group = group_of(everyone)
    return everyone, {key: member.join(group, key, layouts)[0] for key, member in everyone.items()}


def test_shares_are_for_their_receiver_alone_and_are_revealed_once(wide):
    everyone, encrypted = joined(wide)
    with pytest.raises(CannotOpen, match="bad-share: member 2's share was not encrypted for this client"):
        everyone[1].mask_(wide.zeros(), {2: encrypted[2][3], 3: encrypted[3][1]})
    masked = {
        key: everyone[key].mask_(wide.zeros(), {one: encrypted[one][key] for one in everyone if one != key})
        for key in everyone
    }
    signed = {key: member.sign(masked) for key, member in everyone.items()}
    assert set(everyone[1].reveal(signed)) == {1, 2, 3}
    with pytest.raises(CannotOpen, match="bad-group"):  # else both of one member could be had
        everyone[1].reveal(signed)


def test_a_wrong_share_is_noticed(wide, monkeypatch):
    reveal = Member.reveal
    monkeypatch.setattr(
        members.Member,
        "reveal",
        lambda self, told: {key: bytes([text[0] ^ 1]) + text[1:] for key, text in reveal(self, told).items()},
    )
    specs = dict.fromkeys((1, 2, 3), FULL)
    with pytest.raises(CannotOpen, match="bad-share: the revealed shares give a wrong seed for member 1"):
        mask_and_open_(drawn(wide, specs), specs, wide, 2, 2 / 3)


def test_a_line_of_one_axis_works_too():
    layouts = IntegerLayouts(Submodels(Line(), EXAMPLE))
    specs = {1: FULL, 2: Spec.select({"hidden": range(2)}), 3: Spec.select({"hidden": [1, 3]})}
    plain = drawn(layouts, specs)
    masked = {key: flat.clone() for key, flat in plain.items()}
    mask_and_open_(masked, specs, layouts, 2, 2 / 3)
    is_open = np.array([len(one) >= 2 for one in holders_by_hand(layouts, specs)])
    found, wanted = (total_of(layouts, specs, numbers, specs) for numbers in (masked, plain))
    assert (found[is_open] == wanted[is_open]).all()
