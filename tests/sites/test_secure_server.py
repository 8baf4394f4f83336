"""Secure aggregation on real ranks over Gloo: the model of a simulation, a killed client, replays; and the aggregator by hand."""

from __future__ import annotations

import os
import queue
import signal
from dataclasses import dataclass, replace

import pytest

from raafl.algorithms import fed_avg, fed_buff, hetero_fl, ra_fed
from raafl.core.options import Guard, Privacy, Rounds, SecureAggregation
from raafl.core.select import Select
from raafl.core.types import Arrived, Assign, Work
from raafl.data.partition import Dirichlet
from raafl.parts.protect.secure.group import IntegerLayouts
from raafl.parts.protect.secure.member import Member
from raafl.parts.protect.secure.merge import secured
from raafl.runtime.protocol import Answer
from raafl.sites.secure_messages import (
    UNCERTIFIED,
    Formed,
    Members,
    SecureGroups,
    Signatures,
    sizes_for,
    sizes_from,
    split,
    to_bytes,
    to_tensors,
)
from raafl.sites.secure_server import SecureAggregator, SecureStep
from raafl.submodel import Spec
from tests.helpers.coordinators import coordinator_for, join
from tests.helpers.real_ranks import Ranks
from tests.helpers.small_runs import equal_replay, experiment, finish

ON = SecureAggregation(min_cover=2)


def made(folder, algorithm, **fields):
    return experiment(folder, algorithm, **{"secure_aggregation": ON, "emulate": False, "max_updates": 8, **fields})


def test_rounds_of_real_ranks_give_the_model_of_a_simulation_and_replay(tmp_path, caplog):
    algorithm = hetero_fl(rates=[1.0, 0.5])
    ranks = Ranks(made(tmp_path / "ranks", algorithm)).serve()
    assert UNCERTIFIED in caplog.text
    assert ranks.digest == finish(made(tmp_path / "simulated", algorithm)).digest
    assert all(row["masked"] and row["fingerprint"] == "" for row in ranks.events("arrived"))
    assert equal_replay(made(tmp_path / "again", algorithm), ranks)
    assert {row["loss"] for row in ranks.rows()} == {""}
    # 1,810 parameters of 4 bytes for a whole model, and what the exchange adds: below twice that
    whole = [float(row["bytes_up"]) for row in ranks.rows() if row["client"] in ("1", "3")]
    assert len(whole) == 4 and all(4 * 1810 < bytes_up < 2 * 4 * 1810 for bytes_up in whole)


def test_with_privacy_ranks_of_unequal_data_weigh_the_same(tmp_path):
    """Each client masks with weight 1, though its own config says nothing of the server's noise."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    fields = {
        "privacy": Privacy(clip_norm=0.5, noise_multiplier=0.5, delta=1e-3),
        "partition": Dirichlet(alpha=1.0),
        "secure_aggregation": replace(ON, clip_norm=0.5),
        "max_updates": 4,
    }
    ranks = Ranks(made(tmp_path / "ranks", fed_avg(), **fields)).serve()
    assert ranks.digest == finish(made(tmp_path / "simulated", fed_avg(), **fields)).digest
    assert {row["scale"] for row in ranks.events("arrived")} == {1.0}
    assert len({row["num_samples"] for row in ranks.events("arrived")}) > 1


def dies_in_its_second_sum(rank):
    if rank != 4:
        return
    mask, sums = Member.mask_, []

    def die(self, *args):
        sums.append(self)
        if len(sums) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return mask(self, *args)

    Member.mask_ = die


def test_a_client_killed_after_it_shared_its_keys_leaves_no_mask_behind(tmp_path):
    one = made(tmp_path / "ranks", fed_avg(), max_updates=10)
    ranks = Ranks(one, dies_in_its_second_sum).serve()
    assert ranks.summary["finished"] == "max_updates" and ranks.summary["updates_lost"] == 1
    groups = [len(row["group"]) for row in ranks.events("arrived")]
    assert groups == [4] * 4 + [3] * 6 and ranks.summary["secure_aggregation"]["unsound"] == 0
    assert equal_replay(replace(one, output=str(tmp_path / "again")), ranks)


def test_a_buffer_forms_its_groups_before_they_are_masked(tmp_path):
    one = made(tmp_path / "ranks", fed_buff(buffer_size=3), max_updates=9)
    ranks = Ranks(one).serve()
    assert ranks.summary["updates_merged"] == 9 and {len(row["group"]) for row in ranks.events("arrived")} == {3}
    assert equal_replay(replace(one, output=str(tmp_path / "again")), ranks)


# ---- the aggregator, with clients by hand ----


class Hand:
    """A client whose messages the test sends one by one."""

    def __init__(self, assignment, aggregator, layouts):
        self.assignment, self.aggregator, self.layouts = assignment, aggregator, layouts
        self.replies, self.member = queue.SimpleQueue(), Member(2, 2 / 3)
        self.say("ready", to_tensors(keys=b"".join(self.member.public)))

    def say(self, phase, tensors, signature=b""):
        step = SecureStep(self.assignment, phase, Answer(1, 1), tensors, (0, 0), self.replies, signature=signature)
        self.aggregator.take(step)

    def heard(self):
        return self.replies.get_nowait()

    def share(self):
        formed = Formed.from_meta(self.heard().meta)
        self.keys = [one.id for one in formed.group.members]
        encrypted, commitments = self.member.join(formed.group, self.assignment.id, self.layouts)
        order = sizes_from(self.member.coverage, self.assignment.id, self.keys)
        self.say("shares", to_tensors(shares=b"".join(encrypted[key] for key in order), commitments=commitments))

    def mask(self, value):
        reply, own = self.heard(), self.assignment.id
        self.senders = Members.from_meta(reply.meta, self.keys).keys
        pieces = split(to_bytes(reply.tensors, "shares"), sizes_for(self.member.coverage, own, self.keys))
        numbers = self.layouts.zeros(self.assignment.spec)
        for buffer in numbers.buffers.values():
            buffer.fill_(value)
        signature = self.member.mask_(numbers, {key: pieces[key] for key in self.senders if key != own})
        self.say("masked", numbers, signature)

    def sign(self):
        signature = self.member.sign(Signatures.from_meta(self.heard().meta, self.senders).by_member)
        self.say("signed", to_tensors(nothing=b""), signature)

    def reveal(self):
        told = self.member.reveal(Signatures.from_meta(self.heard().meta, self.senders).by_member)
        self.say("opened", to_tensors(revealed=b"".join(told[key] for key in self.senders)))


@pytest.fixture
def aggregator():
    """An aggregator, and four clients that have trained for a round that starts at version 0."""
    algorithm = secured(fed_avg(by_samples=False), ON, Rounds(), Guard(), Privacy(), 4)
    coordinator = coordinator_for(algorithm, min_clients=4, num_clients=4)
    tasks = [action.assignment for action in join(coordinator, [1, 2, 3, 4]) if isinstance(action, Assign)]
    notes: list[str] = []
    one = SecureAggregator(SecureGroups.of(coordinator), notes.append)
    layouts = IntegerLayouts(coordinator.state.submodels)
    return coordinator, one, [Hand(task, one, layouts) for task in tasks], notes


def merged(coordinator, updates):
    for update in updates:
        coordinator.handle(Arrived(update), 1.0)
    return coordinator.state.values["fc1.weight"]


STEPS = 2**25  # of four changes up to 8


def masks(hand):
    hand.mask(STEPS)


def together(one, hands, *steps):
    """Let the clients make each step, the aggregator look after it; return what it then has."""
    for step in steps:
        for hand in hands:
            step(hand)
        updates = one.look(0.0)
    return updates


def test_the_aggregator_waits_for_all_and_reads_their_sum(aggregator):
    coordinator, one, hands, _ = aggregator
    assert one.look(0.0) == [] and one.is_running
    for step in (Hand.share, lambda hand: hand.mask(STEPS * hand.assignment.client), Hand.sign, Hand.reveal):
        for hand in hands:
            assert one.look(0.0) == []
            step(hand)
    updates = one.look(0.0)
    assert len(updates) == 4 and not one.is_running
    assert merged(coordinator, updates).eq(2.5).all()  # (1 + 2 + 3 + 4) / 4


@dataclass(frozen=True)
class Kept(Select):
    """Each client keeps units of its own of the four hidden ones."""

    units: tuple[tuple[int, ...], ...]

    def __call__(self, client, fleet):
        return Work(Spec.select({"hidden": self.units[client.id - 1]}))


def overlapping(*units):
    """An aggregator, clients that keep these units of the model for a round, and the notes."""
    algorithm, num = secured(ra_fed(submodel=Kept(units)), ON, Rounds(), Guard(), Privacy(), len(units)), len(units)
    coordinator = coordinator_for(algorithm, min_clients=num, num_clients=num)
    tasks = [action.assignment for action in join(coordinator, range(1, num + 1)) if isinstance(action, Assign)]
    notes: list[str] = []
    one = SecureAggregator(SecureGroups.of(coordinator), notes.append)
    layouts = IntegerLayouts(coordinator.state.submodels)
    return coordinator, one, [Hand(task, one, layouts) for task in tasks], notes


def test_submodels_that_overlap_in_too_many_ways_are_summed_in_parts(monkeypatch):
    """Together five ways: a set of clients for each unit, and all of them for the bias; three and three have four."""
    monkeypatch.setattr("raafl.parts.protect.secure.group.MAX_CELLS", 4)
    coordinator, one, hands, notes = overlapping((0, 1), (0, 2), (0, 3), (1, 2, 3), (1, 2), (1,))
    for some in (hands[:3], hands[3:]):
        assert one.look(0.0) == [] and one.is_running and coordinator.state.version == 0
        updates = together(one, some, Hand.share, masks, Hand.sign, Hand.reveal)
        assert [update.client for update in updates] == [hand.assignment.client for hand in some]
        merged(coordinator, updates)
    assert coordinator.state.version == 1 and not notes
    # units 0 and 1 have three clients or more, unit 2 two in the second sum alone, unit 3 one in each
    assert coordinator.state.values["fc1.weight"].ne(0).all(1).tolist() == [True, True, True, False]


def test_submodels_that_cannot_be_summed_are_refused_and_everyone_is_told(monkeypatch):
    monkeypatch.setattr("raafl.parts.protect.secure.group.MAX_CELLS", 4)
    _, one, hands, notes = overlapping((0, 1), (0, 2), (0, 3), (1, 2, 3))
    assert one.look(0.0) == [] and not one.is_running
    assert [hand.heard() for hand in hands] == [None] * 4
    assert len(notes) == 1
    assert notes[0].startswith(
        "a sum could not be read: bad-group: the submodels of 4 clients overlap in 5 different ways"
    )


def test_a_client_that_is_too_slow_is_left_out_and_told(aggregator):
    coordinator, one, hands, _ = aggregator
    one.look(0.0)
    for hand in hands:
        hand.share()
    one.look(1.0)
    for hand in hands[:3]:
        hand.mask(STEPS)
    assert one.look(60.9) == []
    one.look(61.1)  # 60 s after the step began
    hands[3].mask(STEPS)
    assert hands[3].heard() is None
    for hand in hands[:3]:
        hand.sign()
    assert one.look(61.2) == []
    for hand in hands[:3]:
        hand.reveal()
    updates = one.look(62.0)
    assert [update.client for update in updates] == [1, 2, 3]
    assert not coordinator.state.version and merged(coordinator, updates).eq(0).all()  # client 4 is still out


def test_two_lost_of_four_are_too_many_and_everyone_is_told(aggregator):
    _, one, hands, notes = aggregator
    one.look(0.0)
    together(one, hands, Hand.share)
    for hand in hands[:2]:
        hand.mask(STEPS)
    for hand in hands[2:]:
        one.lose(hand.assignment.client, hand.assignment.incarnation)
    assert one.look(0.0) == [] and not one.is_running
    assert [hand.heard() for hand in hands[:2]] == [None, None]
    assert notes == ["a sum could not be read: too-few: 2 of 4 clients are left, 3 must help"]


def test_one_that_opens_nothing_counts_if_enough_others_do(aggregator):
    coordinator, one, hands, _ = aggregator
    one.look(0.0)
    together(one, hands, Hand.share, masks, Hand.sign)
    for hand in hands[1:]:
        hand.reveal()
    one.lose(hands[0].assignment.client, 0)
    updates = one.look(0.0)
    assert len(updates) == 4 and merged(coordinator, updates).eq(1).all()


def test_one_that_is_lost_before_it_signs_the_survivors_is_still_in_the_sum(aggregator):
    """Its signature of the senders came with its numbers, which is what its masks depend on."""
    coordinator, one, hands, _ = aggregator
    one.look(0.0)
    together(one, hands, Hand.share, masks)
    one.lose(hands[3].assignment.client, 0)
    updates = together(one, hands[:3], Hand.sign, Hand.reveal)
    assert len(updates) == 4 and merged(coordinator, updates).eq(1).all()


def test_one_that_signs_the_survivors_too_late_can_still_help(aggregator):
    _, one, hands, _ = aggregator
    one.look(0.0)
    together(one, hands, Hand.share, masks)
    for hand in hands[:3]:
        hand.sign()
    assert one.look(60.1) == []
    hands[3].sign()
    for hand in hands[1:]:
        hand.reveal()
    assert one.look(61.0) == []  # the first is awaited
    updates = one.look(121.0)
    assert [update.refusal for update in updates] == [None] * 4 and not one.is_running


def test_one_whose_signature_is_wrong_is_left_out_and_told(aggregator):
    _, one, hands, _ = aggregator
    one.look(0.0)
    together(one, hands, Hand.share)
    for hand in hands[:3]:
        hand.mask(STEPS)
    hands[3].say("masked", hands[3].layouts.zeros(), bytes(64))
    one.look(0.0)
    assert hands[3].heard().meta["members"] == [1, 2, 3, 4] and hands[3].heard() is None  # the senders, then no more
    updates = together(one, hands[:3], Hand.sign, Hand.reveal)
    assert [update.client for update in updates] == [1, 2, 3]


@pytest.mark.parametrize("num_helpers", [4, 3])
def test_a_wrong_share_is_left_out_if_enough_others_help_and_else_ends_the_sum(aggregator, num_helpers):
    """Three of four must help: with a fourth, the server sees whose share fits no commitment."""
    coordinator, one, hands, notes = aggregator
    one.look(0.0)
    together(one, hands, Hand.share, lambda hand: hand.mask(STEPS * hand.assignment.client), Hand.sign)
    hands[1].say("opened", to_tensors(revealed=bytes(4 * 32)))
    for hand in (hands[0], hands[2], hands[3])[: num_helpers - 1]:
        hand.reveal()
    updates = one.look(61.0)  # longer than it waits for the fourth
    assert not one.is_running
    if num_helpers == 4:
        assert notes == ["client 2 revealed wrong shares, so a sum was read without its help"]
        assert len(updates) == 4 and merged(coordinator, updates).eq(2.5).all()  # (1 + 2 + 3 + 4) / 4
    else:
        assert [update.refusal for update in updates] == ["not-opened"] * 3
        assert notes == ["a sum could not be read: bad-share: the revealed shares give a wrong seed for member 1"]


def test_a_client_that_left_before_the_group_formed_is_not_in_it(aggregator):
    one = aggregator[1]
    one.lose(4, 0)
    assert one.look(0.0) == [] and not one.is_running  # its task is out until the coordinator hears of the loss
