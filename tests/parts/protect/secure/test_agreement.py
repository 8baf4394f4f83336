"""What members agree on before they reveal shares: the two lies that read single clients, and sums that are of one site."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.parts.protect.secure.group import CannotOpen, Group, GroupMember, IntegerLayouts, threshold_of
from raafl.parts.protect.secure.member import Member, combine, is_signed, lists_text, senders_text
from raafl.submodel import FULL, Spec, Submodels
from tests.helpers.coordinators import EXAMPLE, Line

LAYOUTS = IntegerLayouts(Submodels(Line(8), EXAMPLE))
HALF = Spec.select({"hidden": range(4)})


class Round:
    """Members 1 to n, of which the first ``num_whole`` have the whole model, in the state after `step`."""

    def __init__(self, num, num_whole=None, min_cover=2, weights=None, careful=(), **changes):
        specs = {key: FULL if num_whole is None or key <= num_whole else HALF for key in range(1, num + 1)}
        self.members = {key: Member(min_cover, 2 / 3, key in careful) for key in specs}
        rows = [
            GroupMember(key, *one.public, specs[key], **changes.get(f"m{key}", {})) for key, one in self.members.items()
        ]
        self.group = Group("ab", tuple(rows), threshold_of(num, 2 / 3), min_cover, 9, "run")
        self.weights = weights

    def join(self):
        self.encrypted = {key: one.join(self.group, key, LAYOUTS, self.weights)[0] for key, one in self.members.items()}
        return self

    def mask(self, hidden=lambda key: ()):
        """Mask; the server hides ``hidden(key)`` from a member, as if they had sent no shares."""
        self.signed = {}
        for key, one in self.members.items():
            senders = [other for other in self.members if other != key and other not in hidden(key)]
            numbers = LAYOUTS.zeros(self.group.by_id[key].spec)
            self.signed[key] = one.mask_(numbers, {other: self.encrypted[other][key] for other in senders})
        return self

    def sign(self, key, survivors):
        return self.members[key].sign({other: self.signed[other] for other in survivors})


def test_a_victim_that_was_told_of_other_senders_is_in_nobodys_list():
    """Its cell would carry no pairwise mask: the other holder is hidden from it, and everybody else is told the truth."""
    told = Round(4, 2).join().mask(lambda key: {2} if key == 1 else ())
    with pytest.raises(CannotOpen, match="bad-group: member 1 has not signed that it knows the same group"):
        told.sign(3, [1, 2, 3, 4])
    with pytest.raises(CannotOpen, match="bad-group: member 3 has not signed"):
        told.sign(1, [1, 3, 4])
    with pytest.raises(CannotOpen, match="the server names other members than before"):
        told.sign(1, [1, 2, 3, 4])
    assert told.sign(3, [2, 3, 4])  # without the victim


def test_members_that_were_told_of_other_survivors_reveal_nothing():
    told = Round(4).join().mask()
    lists = {1: [1, 2, 3], 2: [1, 2, 3], 3: [1, 3, 4], 4: [1, 3, 4]}
    signatures = {key: told.sign(key, survivors) for key, survivors in lists.items()}
    for member in told.members.values():
        with pytest.raises(
            CannotOpen, match="too-few: 2 members signed the same lists of members as this client, 3 must"
        ):
            member.reveal(signatures)


@pytest.mark.parametrize("num_helpers", [1, 2])
def test_the_bound_on_members_that_help_a_lying_server_is_tight(num_helpers):
    """Of 4 members 3 must help, so that 2 x 3 - 4 = 2 helpers can sign two lists: one reveals seeds of client 1, one its key."""
    told = Round(4, min_cover=4).join().mask()
    helpers = set(range(5 - num_helpers, 5))
    lists = {1: {1, 2, 3, 4}, 2: {2, 3, 4}, 3: {1, 2, 3, 4}}
    signatures = {key: told.sign(key, lists[key]) for key in lists if key not in helpers}
    seeds, keys = {}, {}
    for key in signatures:
        text = lists_text(told.group, [1, 2, 3, 4], lists[key])
        helped = {other: told.members[other]._signs.sign(text) for other in helpers}
        try:
            revealed = told.members[key].reveal(signatures | helped)[1]
        except CannotOpen:
            continue
        (seeds if 1 in lists[key] else keys)[told.group.point(key)] = revealed
    for other in helpers:
        piece, point = told.members[other]._held[1], told.group.point(other)
        keys[point], seeds[point] = piece[:32], piece[32:]
    is_read = (
        combine(seeds) == told.members[1]._seeds[0] and combine(keys) == told.members[1]._masks.private_bytes_raw()
    )
    assert is_read == (num_helpers == 2)


def test_a_signature_counts_once_and_for_one_text():
    told = Round(3).join().mask()
    own = told.sign(1, [1, 2, 3])
    with pytest.raises(CannotOpen, match="has signed a list before"):
        told.sign(1, [1, 2, 3])
    with pytest.raises(CannotOpen, match="1 members signed the same lists"):
        told.members[1].reveal({1: own, 2: own, 3: told.signed[3], 7: own})
    with pytest.raises(CannotOpen, match="signed no list"):
        told.members[2].reveal({1: own})
    texts = [
        senders_text(told.group, [1, 2]),
        lists_text(told.group, [1, 2], [1, 2]),
        lists_text(told.group, [1], [2, 1, 2]),
    ]
    others = [
        senders_text(replace(told.group, version=8), [1, 2]),
        lists_text(replace(told.group, run="b"), [1, 2], [1, 2]),
    ]
    assert len({*texts, *others}) == 5
    assert is_signed(lists_text(told.group, [3, 2, 1], [1, 2, 3]), own, told.group.by_id[1].sign_key)
    assert not is_signed(texts[0], own, b"short") and not is_signed(texts[0], b"", told.group.by_id[1].sign_key)


def test_keys_join_one_group_and_mask_one_update():
    told = Round(3).join().mask()
    with pytest.raises(CannotOpen, match="has joined a group with these keys before"):
        told.members[1].join(told.group, 1, LAYOUTS)
    with pytest.raises(CannotOpen, match="has masked an update for this group before"):
        told.members[1].mask_(LAYOUTS.zeros(), {2: told.encrypted[2][1], 3: told.encrypted[3][1]})


# ---- whose sum it is ----


def shares(weights, most=0.9, num_whole=None, sites=()):
    fields = {f"m{key}": {"max_share": most, "site": sites[key - 1] if sites else f"s{key}"} for key in weights}
    return Round(len(weights), num_whole, weights=weights, **fields)


@pytest.mark.parametrize("weights", [{1: 1.0, 2: 0.0, 3: 0.0}, {1: 97.0, 2: 2.0, 3: 1.0}], ids=str)
def test_a_sum_that_is_one_clients_is_refused_by_everyone(weights):
    told = shares(weights)
    for key, member in told.members.items():
        with pytest.raises(CannotOpen, match=r"(100.0|97.0)% of a sum would be of site 's1', .* allows max_share 0.9"):
            member.join(told.group, key, LAYOUTS, told.weights)


def test_it_is_refused_in_any_cell_and_counted_by_site():
    """Clients 1 and 2 alone have the outer half: 95 of 100 there, and 95 of 195 elsewhere."""
    weights = {1: 95.0, 2: 5.0, 3: 50.0, 4: 45.0}
    with pytest.raises(CannotOpen, match=r"95.0% of a sum would be of site 's1'"):
        shares(weights, num_whole=2).join()
    shares(weights).join()
    shares(weights, num_whole=2, most=0.96).join()
    with pytest.raises(CannotOpen, match=r"95.0% of a sum would be of site 's1'"):
        shares({1: 50.0, 2: 45.0, 3: 4.0, 4: 0.5, 5: 0.5}, sites=["s1", "s1", "s2", "s3", "s4"]).join()


def test_the_strictest_site_counts_also_when_others_have_dropped_out():
    told = shares({1: 60.0, 2: 10.0, 3: 10.0, 4: 20.0}, most=0.7).join().mask()
    assert told.sign(2, [1, 2, 3, 4])
    with pytest.raises(CannotOpen, match=r"75.0% of a sum would be of site 's1'"):
        told.sign(1, [1, 2, 3])
    strict = {f"m{key}": {"max_share": 0.5 if key == 3 else 1.0} for key in (1, 2, 3)}
    with pytest.raises(CannotOpen, match=r"60.0% of a sum would be of member 1, .* max_share 0.5"):
        Round(3, weights={1: 6.0, 2: 2.0, 3: 2.0}, **strict).join()


def test_sites_are_counted_among_survivors():
    """Of 7 members 5 must help; clients 1 and 2 are of one site: five that include both are of four sites."""
    sites = {f"m{key}": {"site": site} for key, site in enumerate("aabcdef", 1)}
    told = Round(7, min_cover=5, **sites).join().mask()
    assert told.sign(1, [1, 3, 4, 5, 6])
    with pytest.raises(
        CannotOpen, match=r"summed over clients of 4 sites that trained, and secure_aggregation.min_cover is 5"
    ):
        told.sign(3, [1, 2, 3, 4, 5])


def test_a_site_that_made_no_step_hides_nobody():
    """A loader that drops the last batch may have none; of three clients two then remain."""
    sites = {f"m{key}": {"site": site, "num_steps": int(site != "c")} for key, site in enumerate("abcd", 1)}
    Round(4, min_cover=3, **sites).join()
    with pytest.raises(CannotOpen, match="summed over clients of 3 sites that trained"):
        Round(4, min_cover=4, **sites).join()
    told = Round(4, min_cover=3, **sites).join().mask()
    with pytest.raises(CannotOpen, match="summed over clients of 2 sites that trained"):
        told.sign(1, [1, 2, 3])


STARTS = {f"m{key}": {"start": "whole" if key <= 2 else "half", "version": 9} for key in range(1, 8)}


def test_who_asks_for_it_is_hidden_by_those_who_received_the_same_values_alone():
    """Members 1 and 2 have the whole model, 3 to 7 a half of it: all seven share that half."""
    Round(7, 2, min_cover=3, **STARTS).join()
    Round(7, 2, min_cover=3, careful=[3, 7], **STARTS).join()  # five sites
    same = r"clients of {} sites that trained from the same values \(policy.same_values\), and .*min_cover is {}"
    with pytest.raises(CannotOpen, match=same.format(2, 3)):
        Round(7, 2, min_cover=3, careful=[1], **STARTS).join()
    for other in ({"version": 8}, {"start": ""}):  # of another version; one that states nothing
        fields = {**STARTS, "m7": {**STARTS["m7"], **other}}
        Round(7, 2, min_cover=4, careful=[3], **fields).join()
        with pytest.raises(CannotOpen, match=same.format(4, 5)):
            Round(7, 2, min_cover=5, careful=[3], **fields).join()
    with pytest.raises(CannotOpen, match=same.format(0, 3)):
        Round(7, 2, min_cover=3, careful=[3], m3={"version": 9}).join()  # it states nothing itself
    told = Round(7, 2, min_cover=4, careful=[3], **STARTS).join().mask()
    assert told.sign(4, [1, 2, 3, 4, 5])  # five of seven must help
    with pytest.raises(CannotOpen, match=same.format(3, 4)):
        told.sign(3, [1, 2, 3, 4, 5])


def test_a_share_is_also_one_of_those_who_received_the_same_values():
    """Of the shared half member 3 has 40 of 204, but 40 of 44 among those with its submodel."""
    weights = {1: 100.0, 2: 60.0, 3: 40.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 1.0}
    fields = {key: {**one, "max_share": 0.8, "site": key} for key, one in STARTS.items()}
    Round(7, 2, weights=weights, **fields).join()
    with pytest.raises(CannotOpen, match=r"90.9% of a sum would be of site 'm3'"):
        Round(7, 2, weights=weights, careful=[3], **fields).join()


def test_one_site_cannot_bring_as_many_members_as_would_sign_two_lists():
    """Of 4 members 3 must help: two that are of one site could make up the third of each of two lists."""
    sites = {f"m{key}": {"site": site} for key, site in enumerate(["a", "b", "b", "c"], 1)}
    told = Round(4, **sites)
    for key in (1, 4):
        with pytest.raises(CannotOpen, match=r"so many of this group's 4 clients are of site 'b'"):
            told.members[key].join(told.group, key, LAYOUTS)
    told.members[2].join(told.group, 2, LAYOUTS)  # whose own site it is
    sites = {f"m{key}": {"site": site} for key, site in enumerate("aabbccdef", 1)}
    Round(9, **sites).join()  # of 9 members 7 must help: 4 may be of one site


@pytest.mark.parametrize(
    "fields", [{"counted": 101}, {"counted": 0}, {"version": 10}, {"start": "other"}, {"start": ""}], ids=str
)
def test_counts_and_what_was_sent_are_checked(fields):
    same = {"num_samples": 100, "counted": 100, "version": 9, "start": "a"}
    told = Round(3, m1=same, m2=same, m3={**same, **fields})
    why = "received other values" if "start" in fields else "the server counts"
    if fields == {"start": ""}:  # it states nothing, as with compression
        told.join()
        return
    with pytest.raises(CannotOpen, match=why):
        told.join()
    Round(3, m1=same, m2=same, m3={**same, "version": 8, "start": "other"}).join()
