"""Secure aggregation in whole runs on the virtual clock: equal to the plain sum to the bit, replayed, resumed, refused by name."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_rolex, hetero_fl, ra_fed, scaffold
from raafl.core.options import Compress, Guard, Privacy, Rounds, SecureAggregation
from raafl.core.types import Assign, Joined
from raafl.data.partition import Dirichlet
from raafl.errors import BadInput
from raafl.parts.select.rate_select import RateSelect
from raafl.runfolder import checkpoint_reader
from raafl.runtime.setup import build, make_executor
from tests.helpers.crash import crash
from tests.helpers.small_runs import COMING_AND_GOING, equal_replay, experiment, finish, unequal

ON = SecureAggregation(min_cover=2)
MASKED = replace(ON, simulate_masks=True)


@pytest.mark.quick_cases("hetero_fl", "fed_buff")
@pytest.mark.parametrize(
    "algorithm",
    [fed_avg(), hetero_fl(rates=[1.0, 0.5]), fed_rolex(rates=[1.0, 0.5]), ra_fed(), fed_buff(buffer_size=3)],
    ids=lambda one: one.name,
)
def test_masks_change_no_bit_and_a_run_replays(tmp_path, algorithm):
    plain = finish(experiment(tmp_path / "plain", algorithm, secure_aggregation=ON))
    masked = finish(experiment(tmp_path / "masked", algorithm, secure_aggregation=MASKED))
    assert masked.digest == plain.digest and masked.summary["updates_merged"] == 12
    arrived = masked.events("arrived")
    assert all(row["masked"] and row["fingerprint"] == "" and len(row["group"]) >= 3 for row in arrived)
    for run, options in ((plain, ON), (masked, MASKED)):
        assert equal_replay(experiment(tmp_path / "again", algorithm, secure_aggregation=options), run)
    told = masked.summary["secure_aggregation"]
    assert told["sums"] == 12 // len(arrived[0]["group"]) and told["unsound"] == 0


RANDOM = ra_fed(submodel=RateSelect(selector="random", rates=0.5))


def test_submodels_that_overlap_in_too_many_ways_are_summed_in_parts(tmp_path, monkeypatch):
    """Eight clients with random halves: one sum with up to 2^8 cells, or two of four clients with up to 2^4 each."""
    fields = {
        "secure_aggregation": MASKED,
        "clients": 8,
        "devices": unequal([8e7, 5e7, 3e7, 2e7] * 2),
        "max_updates": 16,
    }
    whole = finish(experiment(tmp_path / "whole", RANDOM, **fields)).summary
    assert (whole["secure_aggregation"]["sums"], whole["updates_merged"], whole["versions"]) == (2, 16, 2)
    monkeypatch.setattr("raafl.parts.protect.secure.group.MAX_CELLS", 16)
    run = finish(experiment(tmp_path / "parts", RANDOM, **fields))
    assert {len(row["group"]) for row in run.events("arrived")} == {4}
    told = run.summary["secure_aggregation"]
    assert (told["sums"], told["unsound"], run.summary["updates_merged"], run.summary["versions"]) == (4, 0, 16, 2)
    assert equal_replay(experiment(tmp_path / "again", RANDOM, **fields), run)


def test_submodels_that_cannot_be_summed_in_parts_are_refused_with_the_remedy(tmp_path, monkeypatch, caplog):
    """Groups of four cannot be divided, since three hide each other."""
    monkeypatch.setattr("raafl.parts.protect.secure.group.MAX_CELLS", 5)
    run = finish(experiment(tmp_path / "run", RANDOM, secure_aggregation=MASKED)).summary
    assert "every client were refused" in run["finished"] and run["updates_refused"]["not-opened"] >= 4
    assert "a sum could not be read: bad-group: the submodels of 4 clients overlap in" in caplog.text
    assert "can be summed: use fewer rates or smaller groups" in caplog.text


def tasks_of(made):
    """Return the submodels, the values before the first round, and spec, change and samples of each of its tasks."""
    parts, trained = build(made, pace=False), []
    values, executor = parts.coordinator.state.values.clone(), make_executor(parts, 1)
    for client in parts.clients:
        for action in parts.coordinator.handle(Joined(client), 0.0):
            if isinstance(action, Assign):
                spec = action.assignment.spec
                executor.submit(action.assignment, parts.submodels.plan(spec, "sent").gather(values), 0.0)
                update = executor.result(action.assignment.id)
                trained.append((spec, update.tensors.clone(), update.num_samples))
    return parts.submodels, values, trained


def test_a_round_is_the_weighted_mean_over_coverage_in_fixed_point(tmp_path):
    """Each change times its share of the weight, in whole steps; their sum over the sum of weights; what one alone has stays."""
    algorithm = hetero_fl(rates=[1.0, 0.5, 0.5, 0.25], by_samples=True, masked=False)
    made = experiment(tmp_path / "run", algorithm, secure_aggregation=ON, max_updates=4, partition=Dirichlet(alpha=1.0))
    submodels, values, trained = tasks_of(made)
    found = checkpoint_reader.load(finish(made).folder).state_dict
    most, steps = max(samples for *_, samples in trained), 2**25  # 4 * 8 * 2^26 is one more than 31 bits hold
    num_alone = 0
    for name, shape in submodels.layout(part="trained").shapes.items():
        numbered = values.clone().zero_()
        numbered[name].copy_(torch.arange(values[name].numel()).view(shape))
        sums, weights = defaultdict(int), defaultdict(list)
        for spec, change, samples in trained:
            places = submodels.plan(spec).gather(numbered)[name].long().flatten().tolist()
            for place, number in zip(places, change[name].flatten().tolist(), strict=True):
                sums[place] += int(number * (samples / most) * steps)
                weights[place].append(samples)
        expected = values[name].flatten().clone()
        for place, total in sums.items():
            if len(weights[place]) > 1:
                expected[place] += torch.tensor(total / steps * most).float() / float(sum(weights[place]))
        num_alone += sum(len(one) == 1 for one in weights.values())
        assert torch.equal(found[name].flatten(), expected)
    assert num_alone > 100 and len({samples for *_, samples in trained}) > 1


def test_clients_that_come_and_go_leave_no_mask_behind(tmp_path):
    fields = {"devices": COMING_AND_GOING, "max_updates": 24, "clients": 4}
    plain = finish(experiment(tmp_path / "plain", fed_avg(), secure_aggregation=ON, **fields))
    made = experiment(tmp_path / "masked", fed_avg(), secure_aggregation=MASKED, **fields)
    masked = finish(made)
    assert masked.digest == plain.digest and masked.summary["updates_lost"] > 0
    assert masked.summary["secure_aggregation"]["unsound"] == 0
    assert masked.summary["updates_refused"] == {}  # two clients that are left in a round wait for a third
    assert equal_replay(made, masked)


def test_a_run_that_crashed_goes_on_to_the_same_model(tmp_path, monkeypatch):
    algorithm = fed_buff(buffer_size=3)
    fields = {"secure_aggregation": ON, "checkpoint_every": 1, "max_updates": 12}
    run = finish(experiment(tmp_path / "run", algorithm, **fields))
    again = experiment(tmp_path / "again", algorithm, **fields)
    with crash(monkeypatch, 11):  # two clients wait for a third
        finish(again)
    assert finish(replace(again, output=None, resume=again.output)).digest == run.digest


def test_it_goes_with_privacy(tmp_path):
    privacy = Privacy(clip_norm=0.5, noise_multiplier=0.5, delta=1e-3)
    clipping = {name: replace(one, clip_norm=0.5) for name, one in (("plain", ON), ("masked", MASKED))}
    runs = [
        finish(experiment(tmp_path / name, fed_avg(), privacy=privacy, secure_aggregation=one))
        for name, one in clipping.items()
    ]
    assert runs[0].digest == runs[1].digest
    without = finish(experiment(tmp_path / "without", fed_avg(), privacy=privacy))
    told, wanted = runs[0].summary["privacy"], without.summary["privacy"]
    assert told == wanted and told["epsilon"] > 0
    with pytest.raises(
        BadInput, match=r"privacy.clip_norm is 0.5, and secure_aggregation.clip_norm null: give both the same"
    ):
        experiment(tmp_path / "run", fed_avg(), privacy=privacy, secure_aggregation=ON).check()


def test_an_update_out_of_range_is_refused_and_the_others_are_summed(tmp_path):
    run = finish(
        experiment(tmp_path / "run", fed_avg(), secure_aggregation=replace(ON, bound=1e-3), max_updates=4, max_time=0.5)
    )
    assert run.summary["updates_refused"]["out-of-range"] >= 4 and run.summary["updates_merged"] == 0


@pytest.mark.parametrize(
    ("algorithm", "fields", "why"),
    [
        (fed_async(), {}, "fed_async merges each update, .*: choose fed_avg, hetero_fl, fed_rolex, ra_fed or fed_buff"),
        (fed_buff(buffer_size=1), {}, "fed_buff merges each update"),
        (scaffold(), {}, "the merge of scaffold .* needs more than a sum"),
        (fed_buff(3, server_optimizer="adam"), {}, "the merge of fed_buff .* needs more than a sum"),
        (fed_avg(), {"guard": Guard(combine="median")}, "guard is on, .*: leave guard out"),
        (fed_avg(), {"rounds": Rounds(close_at=0.5)}, "rounds may end early, .*: leave rounds out"),
        (fed_avg(), {"compress": Compress(up="int8")}, "compress.up is int8, .*: set compress.up to none"),
        (fed_avg(concurrency=2), {}, "sums 4 clients at a time, .* but only 2 work at once"),
        (fed_avg(), {"secure_aggregation": SecureAggregation(min_cover=5)}, "min_cover is 5 for groups of 4 clients"),
        (fed_buff(2), {}, "groups of 2 clients: use 3 clients or more"),
        (fed_avg(), {"secure_aggregation": SecureAggregation(2, bound=1e9)}, "give a smaller bound"),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_what_cannot_go_with_it_is_refused_by_name(tmp_path, algorithm, fields, why):
    with pytest.raises(BadInput, match=why):
        experiment(tmp_path / "run", algorithm, **{"secure_aggregation": ON, **fields}).check()
