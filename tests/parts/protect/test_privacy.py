from __future__ import annotations

import hashlib
import importlib.util
import math
import stat
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch

from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_opt, fed_raa
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Mean, Staleness
from raafl.parts.merge.server_optimizer import ServerOptimizer
from raafl.parts.protect import privacy as privacies
from raafl.parts.protect.privacy import Privacy, Private, epsilon, expected_updates, gaussian, noise_key, private
from raafl.submodel import FULL, Spec
from tests.habits.source import ROOT
from tests.helpers.coordinators import coordinator_for, cut_in_the_middle, filled, line_state, values_of
from tests.helpers.merges import merge_all, take
from tests.parts.protect.test_robust import BOTTOM, INF, MIDDLE, TOP, WithNorm, one

KEY = b"k" * 32


def make(inner, clip_norm=INF, sigma=0.0, divisor=1.0, key=KEY, **fields):
    return Private(inner, clip_norm, sigma, 1e-5, divisor, key, **fields)


def give(merge, state, updates, first=1):
    """Each update: (value everywhere, spec, samples, staleness, client)."""
    for place, (value, spec, samples, staleness, client) in enumerate(updates):
        take(merge, state, Update(first + place, client, 0, filled(state, value, spec), samples), spec, staleness)
        merge.detach(state)
    merge_all(merge, state)
    return state


def noise_for(assignments, num, key=KEY, *digest):
    """Box and Muller on SHAKE-256, one number at a time."""
    key = hashlib.blake2b(key + repr((assignments, 0, *digest)).encode(), digest_size=32).digest()
    pairs = (num + 1) // 2
    stream = hashlib.shake_256(key + (0).to_bytes(8, "little")).digest(16 * pairs)
    uniform = [((int.from_bytes(stream[8 * i : 8 * i + 8], "little") >> 11) + 0.5) / 2**53 for i in range(2 * pairs)]
    radius = [math.sqrt(-2 * math.log(u)) for u in uniform[:pairs]]
    turn = [2 * math.pi * u for u in uniform[pairs:]]
    pairs_of = list(zip(radius, turn, strict=True))
    return ([r * math.cos(a) for r, a in pairs_of] + [r * math.sin(a) for r, a in pairs_of])[:num]


# ---- the release ----


def test_the_sum_of_clipped_updates_over_a_fixed_number():
    # differences 2 (norm 2 sqrt(13), clipped to half: 1) and 0.5; the divisor is 4 though two came
    state = line_state(value=1.0)
    give(make(Mean(), clip_norm=math.sqrt(13), divisor=4), state, [(3.0, FULL, 9, 0, 1), (1.5, FULL, 1, 0, 2)])
    assert values_of(state).tolist() == pytest.approx([1 + 1.5 / 4] * 13, rel=1e-6)


def test_submodels_that_overlap_partly_share_one_divisor():
    updates = [(3.0, TOP, 1, 0, 1), (0.5, MIDDLE, 7, 0, 2), (-1.0, BOTTOM, 1, 0, 3)]
    # clipped to 1, 0.5, -1 by their norms 3 sqrt(7), 0.5 sqrt(7), sqrt(7); never divided by their coverage
    state = give(make(Deltas(), clip_norm=math.sqrt(7), divisor=3), line_state(), updates)
    expected = [1 / 3, 0.5, -0.5 / 3, -1 / 3]
    assert state.values["fc2.weight"][0].tolist() == pytest.approx(expected, rel=1e-6)
    assert state.values["fc1.weight"][:, 0].tolist() == pytest.approx(expected, rel=1e-6)
    assert state.values["fc2.bias"].item() == pytest.approx(0.5 / 3, rel=1e-6)


@pytest.mark.parametrize("inner", [Mean(by_samples=False), Deltas(staleness=Staleness())], ids=str)
def test_without_noise_and_clipping_it_is_the_plain_mean(inner):
    updates = [(1.0, FULL, 5, 0, 1), (-2.0, FULL, 1, 0, 2), (4.0, FULL, 2, 0, 3)]
    plain, released = give(inner, line_state(), updates), give(make(inner, divisor=3), line_state(), updates)
    torch.testing.assert_close(values_of(released), values_of(plain), rtol=1e-6, atol=1e-7)


def test_a_clients_count_of_samples_gives_no_weight():
    few = give(make(Mean(), divisor=2), line_state(), [(1.0, FULL, 1, 0, 1), (3.0, FULL, 1, 0, 2)])
    many = give(make(Mean(), divisor=2), line_state(), [(1.0, FULL, 1000, 0, 1), (3.0, FULL, 1, 0, 2)])
    assert few.values.model_digest() == many.values.model_digest() and one(few) == 2.0


def test_the_noise_is_on_the_sum_and_on_nothing_that_is_not_covered():
    state = line_state(value=0.5)
    give(make(Deltas(), clip_norm=2.0, sigma=1.5, divisor=4), state, [(0.0, TOP, 1, 0, 1)], first=7)
    # (0 + 1.5 * 2 * n) / 4 on the seven numbers of the submodel: 4 weights, 2 weights, the bias
    moved = [0.5 + 3 * n / 4 for n in noise_for([7], 7)]
    assert state.values["fc1.weight"][:2].flatten().tolist() == pytest.approx(moved[:4], rel=1e-5)
    assert state.values["fc2.weight"][0, :2].tolist() == pytest.approx(moved[4:6], rel=1e-5)
    assert state.values["fc2.bias"].item() == pytest.approx(moved[6], rel=1e-5)
    assert state.values["fc1.weight"][2:].eq(0.5).all() and state.values["fc2.weight"][0, 2:].eq(0.5).all()


def test_overlapping_submodels_get_one_draw_of_noise():
    state = give(make(Deltas(), clip_norm=1.0, sigma=2.0), line_state(), [(0.0, TOP, 1, 0, 1), (0.0, MIDDLE, 1, 0, 2)])
    noise = noise_for([1, 2], 13)  # of the whole model, in its order: fc1 by rows, fc2, the bias
    assert state.values["fc1.weight"][:3].flatten().tolist() == pytest.approx([2 * n for n in noise[:6]], rel=1e-5)
    assert state.values["fc2.bias"].item() == pytest.approx(2 * noise[12], rel=1e-5)
    assert state.values["fc1.weight"][3].eq(0).all()


def test_every_merge_draws_noise_of_its_own():
    """Also one that follows in the place of a merge that was lost: its assignments are others."""
    first = give(make(Deltas(), 1.0, 1.0), line_state(), [(0.0, FULL, 1, 0, 1)], first=1)
    again = give(make(Deltas(), 1.0, 1.0), line_state(), [(0.0, FULL, 1, 0, 1)], first=1)
    other = give(make(Deltas(), 1.0, 1.0), line_state(), [(0.0, FULL, 1, 0, 1)], first=2)
    secret = give(make(Deltas(), 1.0, 1.0, key=b"s" * 32), line_state(), [(0.0, FULL, 1, 0, 1)], first=1)
    digests = [state.values.model_digest() for state in (first, again, other, secret)]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_with_a_seed_file_ids_may_come_again_and_the_noise_does_not():
    """In another run with that file, or after a power failure: the difference of two models is then no client's update."""

    def released(value, **fields):
        state = give(make(Deltas(), 1.0, 2.0, **fields), line_state(), [(value, FULL, 1, 0, 1)])
        return values_of(state)

    # without it: an update of norm 0.25 sqrt(13), below 1, is what the model moves by beside the noise of another
    torch.testing.assert_close(released(0.25) - released(0.0), torch.full((13,), 0.25), rtol=0, atol=1e-6)
    for value in (0.0, 0.25):
        digest = filled(line_state(), value).model_digest()
        expected = [value + 2 * noise for noise in noise_for([1], 13, KEY, digest)]
        assert released(value, follows_sum=True).tolist() == pytest.approx(expected, rel=1e-5)
        assert torch.equal(released(value, follows_sum=True), released(value, follows_sum=True))  # as in a replay
    change = released(0.25, follows_sum=True) - released(0.0, follows_sum=True) - 0.25
    assert change.abs().max() > 1


def test_the_noise_is_normal():
    sample = torch.cat(list(gaussian(KEY, 200_001))).numpy()
    assert len(sample) == 200_001 and np.isfinite(sample).all()
    assert abs(sample.mean()) < 5 / math.sqrt(len(sample))  # five standard errors, and the draw is always the same
    assert abs(sample.std() - 1) < 5 / math.sqrt(2 * len(sample))
    assert np.mean(np.abs(sample) < 1) == pytest.approx(0.682689, abs=0.006)
    assert np.mean(np.abs(sample) > 3) == pytest.approx(0.0027, abs=0.0006)
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.012


def test_staleness_acts_on_what_is_released():
    # s(0) = 1 and s(3) = 1/2: three quarters of (2 + 6) / 2
    assert one(give(make(Deltas(), divisor=2), line_state(), [(2.0, FULL, 1, 0, 1), (6.0, FULL, 1, 3, 2)])) == 3.0


def test_a_server_optimiser_takes_the_release_as_its_gradient():
    updates = [(1.0, FULL, 1, 0, 1), (3.0, FULL, 1, 0, 2)]
    plain, released = ServerOptimizer(server_lr=0.1), make(ServerOptimizer(server_lr=0.1), divisor=2)
    one_state, other = give(plain, line_state(), updates), give(released, line_state(), updates)
    torch.testing.assert_close(values_of(one_state), values_of(other), rtol=1e-6, atol=1e-7)


# ---- the accountant ----


def test_epsilon_is_the_librarys():
    dp = pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    from dp_accounting import pld

    composed = dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.3), 9)
    accountant = pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL).compose(composed)
    assert epsilon(1.3, 9, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)
    assert epsilon(1.0, 0, 1e-5) == 0.0 and epsilon(0.0, 3, 1e-5) is None


def test_the_client_that_took_part_most_counts():
    dp = pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    state, merge = line_state(), make(Deltas(), clip_norm=1.0, sigma=2.0)
    for number, clients in enumerate([(1, 2), (2, 3), (2, 1)]):
        give(merge, state, [(0.1, FULL, 1, 0, client) for client in clients], first=1 + 2 * number)
    spent = merge.report(state)["privacy"]
    assert (spent["max_contributions"], spent["compositions"]) == (3, 3)
    composed = dp.SelfComposedDpEvent(dp.GaussianDpEvent(2.0), 3)
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL).compose(composed)
    assert spent["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)
    assert (spent["delta"], spent["noise_multiplier"], spent["clip_norm"]) == (1e-5, 2.0, 1.0)


def test_twice_in_one_merge_costs_four_times():
    dp = pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    state, merge = line_state(), make(Deltas(), clip_norm=1.0, sigma=2.0)
    give(merge, state, [(0.1, FULL, 1, 0, 1), (0.1, FULL, 1, 0, 1), (0.1, FULL, 1, 0, 2)])
    spent = merge.report(state)["privacy"]
    assert (spent["max_contributions"], spent["compositions"]) == (2, 4)
    # one Gaussian mechanism whose sensitivity is 2 C
    assert spent["epsilon"] == pytest.approx(dp.get_epsilon_gaussian(1.0, 1e-5), rel=1e-9)


def test_merges_that_a_crash_has_undone_are_spent_all_the_same():
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    state, merge = line_state(), make(Deltas(), clip_norm=1.0, sigma=2.0)
    give(merge, state, [(0.1, FULL, 1, 0, 1)])
    # after the checkpoint: version 2 with client 1 twice and client 2, version 3 with client 2
    merge.on_rollback(state, [(1, 2), (1, 2), (2, 2), (2, 3)])
    spent = merge.report(state)["privacy"]
    assert (spent["max_contributions"], spent["compositions"]) == (3, 1 + 4)


def test_before_any_merge_nothing_is_spent():
    spent = make(Deltas(), clip_norm=1.0, sigma=1.0).report(line_state())["privacy"]
    assert (spent["epsilon"], spent["max_contributions"]) == (0.0, 0)


@pytest.mark.parametrize(
    ("algorithm", "num"),
    [
        (fed_avg(), 20),
        (fed_avg(cohort=7), 7),
        (fed_opt(cohort=3, concurrency=2), 3),
        (fed_buff(buffer_size=5), 5),
        (fed_async(), 1),
        (fed_raa(), 1),
        (fed_raa(trigger="all"), 20),
    ],
)
def test_a_merge_is_expected_to_have_so_many(algorithm, num):
    assert expected_updates(algorithm, 20) == num
    assert private(algorithm, Privacy(clip_norm=1.0, noise_multiplier=0.0), 20, KEY).merge.divisor == num
    assert private(algorithm, Privacy(clip_norm=1.0, noise_multiplier=0.0, divisor=2.5), 20, KEY).merge.divisor == 2.5


# ---- the seed, saved and restored, bad input ----


def test_a_dp_accounting_that_is_too_old_is_refused_before_the_run(monkeypatch):
    """Before 0.6 it has no `get_epsilon_gaussian`: the run ended at its first merge."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    privacy = Privacy(clip_norm=1.0)
    assert private(fed_avg(), privacy, 4, KEY)
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"dp-accounting": "0.5.1"}[name])
    with pytest.raises(
        BadInput, match=r"^privacy.clip_norm needs the package dp-accounting, 0.6 or newer: pip install"
    ):
        private(fed_avg(), privacy, 4, KEY)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["privacy"] == ["dp-accounting>={}.{}".format(*privacies.OLDEST_ACCOUNTING)]


def test_the_seed_file_is_made_once_and_for_its_owner_alone(tmp_path):
    privacy = Privacy(clip_norm=1.0, seed_file=str(tmp_path / "noise.seed"))
    key, follows_sum = noise_key(privacy, seed=0)
    assert len(key) == 32 and follows_sum and noise_key(privacy, seed=1) == (key, True)
    assert stat.S_IMODE((tmp_path / "noise.seed").stat().st_mode) == 0o600
    assert noise_key(Privacy(clip_norm=1.0, seed_file=str(tmp_path / "other")), seed=0)[0] != key
    assert private(fed_avg(), replace(privacy, noise_multiplier=0.0), 4, *noise_key(privacy, 0)).merge.follows_sum


def test_a_seed_file_of_an_earlier_version_gives_the_noise_that_it_gave(tmp_path):
    (tmp_path / "old").write_text("6b" * 32 + "\n")
    assert noise_key(Privacy(clip_norm=1.0, seed_file=str(tmp_path / "old")), seed=0) == (KEY, False)


def test_without_a_file_the_runs_seed_decides():
    keys = [noise_key(Privacy(clip_norm=1.0), seed) for seed in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]


def test_the_key_is_not_shown():
    assert KEY.decode() not in repr(make(Mean())) + str(make(Mean()))


@pytest.mark.parametrize("cut", [1, 3, 4, 8])
def test_a_restored_coordinator_goes_on_with_the_same_sums_and_noise(cut):
    def fresh():
        privacy = Privacy(clip_norm=1.0, noise_multiplier=0.5)
        return coordinator_for(private(fed_raa(fragments=2, trigger="all"), privacy, 4, KEY), min_clients=4)

    whole, again = cut_in_the_middle(fresh, cut, lambda step: 0.1 * step)
    assert again.state.values.model_digest() == whole.state.values.model_digest()
    assert again.algorithm.merge.report(again.state) == whole.algorithm.merge.report(whole.state)


def test_running_statistics_are_refused_before_training():
    from raafl.core.state import GlobalState
    from raafl.submodel import Submodels

    module = WithNorm()
    submodels = Submodels(module, (torch.randn(4, 2),))
    (problem,) = make(Mean(), 1.0, 1.0).check(GlobalState(submodels, submodels.state(module)))
    assert "running statistics (norm.running_mean)" in problem and "GroupNorm" in problem
    assert make(Mean(), 1.0, 1.0).check(line_state()) == []


def test_no_accountant_is_said_before_training(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install '\.\[privacy\]' in the checkout of raafl"):
        private(fed_avg(), Privacy(clip_norm=1.0), 4, KEY)


def broken_file(tmp_path):
    (tmp_path / "seed").write_text("not hexadecimal")
    return noise_key(Privacy(clip_norm=1.0, seed_file=str(tmp_path / "seed")), 0)


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        (lambda _: Privacy(clip_norm=0.0), "privacy.clip_norm is 0.0: give a number above 0"),
        (lambda _: Privacy(clip_norm=INF), "privacy.clip_norm is inf: give a finite norm"),
        (lambda _: Privacy(noise_multiplier=-1.0), "privacy.noise_multiplier is -1.0: give a finite number, 0 or more"),
        (lambda _: Privacy(delta=0.0), "privacy.delta is 0.0: give a number between 0 and 1"),
        (lambda _: Privacy(divisor=0.0), "privacy.divisor is 0.0"),
        (
            lambda _: private(fed_avg(), Privacy(1.0, 0.0, delta=0.01), 100, KEY),
            "privacy.delta is 0.01: give less than",
        ),
        (broken_file, "privacy.seed_file is '.*seed': .*: name a new file"),
    ],
)
def test_values_out_of_range_are_named(make_it, says, tmp_path):
    with pytest.raises(BadInput, match=says):
        make_it(tmp_path)


def test_off_is_off():
    algorithm = fed_avg()
    assert private(algorithm, Privacy(), 4, KEY) is algorithm
    assert not Privacy().is_on and Privacy(clip_norm=2.0).is_on


def test_no_two_pieces_of_the_noise_are_alike(monkeypatch):
    monkeypatch.setattr(privacies, "CHUNK", 4)
    pieces = list(gaussian(KEY, 10))
    assert [len(piece) for piece in pieces] == [4, 4, 2]
    assert len(set(torch.cat(pieces).tolist())) == 10


def test_indices_far_apart_are_reached_too():
    state = give(make(Mean()), line_state(), [(5.0, Spec.select({"hidden": [0, 2]}), 1, 0, 1)])
    assert state.values["fc2.weight"].tolist() == [[5.0, 0.0, 5.0, 0.0]]


# ---- a budget ----


def waiting(merge, state, *clients, first=1):
    """Let the merge receive an update of each client."""
    for place, client in enumerate(clients):
        take(merge, state, Update(first + place, client, 0, filled(state, 1.0), 1), FULL, 0)


def test_a_merge_above_the_budget_ends_the_run_whoever_it_is_that_spends_most():
    """Two updates of one client in a sum cost as much as four single ones."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    merge = Private(Deltas(), 1.0, 2.0, 1e-5, 1.0, KEY, (epsilon(2.0, 3, 1e-5) + epsilon(2.0, 4, 1e-5)) / 2)
    state = line_state()
    for number in range(3):
        waiting(merge, state, 1, 2, first=10 * number)
        assert merge.ends_run(state) is None
        merge_all(merge, state)
        assert merge.figures(state) == {"epsilon": epsilon(2.0, number + 1, 1e-5)}
    waiting(merge, state, 3)
    assert merge.ends_run(state) is None  # who has spent nothing yet may go on
    waiting(merge, state, 1)
    assert merge.ends_run(state) == "epsilon"
    state = line_state()
    waiting(merge, state, 5, 5)
    assert merge.ends_run(state) == "epsilon"
    assert make(Deltas(), 1.0, 2.0).ends_run(state) is None


def test_a_budget_that_the_first_merge_exceeds_is_refused_before_the_run():
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    merge = Private(Deltas(), 1.0, 1.0, 1e-5, 1.0, KEY, 0.5)
    (problem,) = merge.check(line_state())
    assert problem.startswith("privacy.max_epsilon is 0.5, and a client's first merge spends ")


@pytest.mark.parametrize(
    ("options", "named"),
    [({"clip_norm": 1.0, "noise_multiplier": 0.0}, "noise_multiplier is 0"), ({}, "clip_norm is None")],
)
def test_a_budget_without_noise_is_refused(options, named):
    with pytest.raises(BadInput, match=f"privacy.max_epsilon is 3, and privacy.{named}"):
        Privacy(max_epsilon=3.0, **options)
