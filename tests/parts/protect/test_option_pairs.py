"""Ask every pair of options that change a merge each question that a coordinator asks it.

What waits, when the run ends, what is saved, which weights count, and what a crash has undone: the answers follow from the events
alone, and are compared with books that the tests keep.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from model_zoo import MLP
from raafl.algorithms import fed_avg, fed_per
from raafl.core.algorithm import Merge
from raafl.core.hooks import RunHooks
from raafl.core.options import Compress, Guard, Privacy, Rounds, SecureAggregation
from raafl.core.state import GlobalState, Memory
from raafl.core.types import Arrived, Update
from raafl.errors import BadInput
from raafl.parts.protect.assembly import widened, with_options
from raafl.parts.protect.privacy import PrivacyMemory, epsilon
from raafl.parts.protect.robust import CentredMemory, Copies
from raafl.runtime.run import simulate
from raafl.submodel import FULL, Submodels
from tests.helpers.coordinators import EXAMPLE, Line, filled
from tests.helpers.crash import crash
from tests.helpers.merges import bounded, merge_all, take
from tests.helpers.small_runs import experiment, finish

BUDGET = 3.0
SIGMA = 2.0
DELTA = 1e-5

FIELDS = {
    "privacy": {"privacy": Privacy(clip_norm=1.0, noise_multiplier=SIGMA, delta=DELTA, max_epsilon=BUDGET)},
    "secure": {"secure_aggregation": SecureAggregation(min_cover=2, clip_norm=1.0)},
    "guard": {"guard": Guard(clip_norm=1.0, outlier=50.0)},
    "robust": {"guard": Guard(combine="median")},
    "wide": {"model": None},
    "personal": {"algorithm": fed_per(cohort=4)},
    "compression": {"compress": Compress(down="bf16", up="int8")},
}
"""Fields of an experiment with one option each."""

REFUSED = {
    ("privacy", "guard"): "guard and privacy are both on: leave guard out",
    ("privacy", "robust"): "guard and privacy are both on: leave guard out",
    ("privacy", "personal"): "privacy.clip_norm is 1, but fed_per merges each client's update by itself",
    ("secure", "guard"): "secure_aggregation.min_cover is set, but guard is on",
    ("secure", "robust"): "secure_aggregation.min_cover is set, but guard is on",
    ("secure", "wide"): "trains in bfloat16: use a model in float32",
    ("secure", "personal"): "the merge of fed_per .* needs more than a sum",
    ("secure", "compression"): "compress.up is int8, but masked numbers cannot be compressed",
    ("robust", "personal"): "guard.combine is 'median', but fed_per merges each client's update by itself",
}
"""Pairs that exclude each other, by what the user reads."""

PAIRS = list(combinations(FIELDS, 2))
ALLOWED = [pair for pair in PAIRS if pair not in REFUSED]


class Half(MLP):
    """A multilayer perceptron that trains in bfloat16."""

    def __init__(self) -> None:
        super().__init__(64, (24,), 10, lr=0.05)
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(torch.bfloat16)).float()


def fields_of(pair):
    both = {"algorithm": fed_avg(cohort=4)}
    for name in pair:
        for key, value in FIELDS[name].items():
            if key == "guard" and key in both:
                value = replace(value, combine="median", clip_norm=1.0, outlier=50.0)
            both[key] = Half if name == "wide" else value
    return both


class Books(RunHooks):
    """Count by events alone what waits and what each client has spent; ask the run's merge the same after each event."""

    def __init__(self, is_private: bool, save_from: int = 0) -> None:
        """Save a checkpoint after each event once ``save_from`` updates have arrived; 0 = never."""
        self.is_private, self.save_from = is_private, save_from
        self.arrived: list[tuple[int, int]] = []
        self.settled: set[int] = set()
        self.merged: list[int] = []
        self.squares: Counter[int] = Counter()
        self.num_waiting: list[int] = []

    def on_settled(self, settled, now):
        self.settled.add(settled.assignment.id)
        if settled.outcome == "merged":
            self.merged.append(settled.client)

    def on_event(self, event, coordinator, now):
        if isinstance(event, Arrived):
            self.arrived.append((event.update.assignment, event.update.client))
        self.squares.update({client: num**2 for client, num in Counter(self.merged).items()})
        self.merged.clear()
        state, merge = coordinator.state, coordinator.algorithm.merge
        waits = [one for one in self.arrived if one[0] not in self.settled]
        self.num_waiting.append(len(waits))
        assert [(item.update.assignment, item.update.client) for item in state.waiting] == waits
        after = max((self.squares[c] + num**2 for c, num in Counter(client for _, client in waits).items()), default=0)
        is_over = self.is_private and epsilon(SIGMA, after, DELTA) > BUDGET
        assert merge.ends_run(state) == ("epsilon" if is_over else None)
        spent = epsilon(SIGMA, max(self.squares.values(), default=0), DELTA)
        assert merge.figures(state).get("epsilon", 0.0) == (spent if self.is_private else 0.0)

    def checkpoint_due(self):
        return 0 < self.save_from <= len(self.arrived)


@pytest.mark.parametrize(("pair", "says"), REFUSED.items(), ids="+".join)
def test_pairs_that_exclude_each_other_say_so(tmp_path, pair, says):
    with pytest.raises(BadInput, match=says):
        finish(experiment(tmp_path / "run", **fields_of(pair)))


@pytest.mark.quick_cases("privacy+secure", "guard+robust", "wide+personal")
@pytest.mark.parametrize("pair", ALLOWED, ids="+".join)
def test_what_waits_when_to_end_and_what_is_saved(tmp_path, monkeypatch, pair):
    """One release of sigma 2 spends 1.8, two 2.7 and three 3.4: a budget of 3 ends the run at two rounds of four clients."""
    if is_private := "privacy" in pair:
        pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    fields = {**fields_of(pair), "eval_every": 100}
    books = Books(is_private)
    run = finish(experiment(tmp_path / "run", **fields), lambda made: simulate(made, observer=books))
    merged = 8 if is_private else 12
    assert (run.summary["finished"], run.summary["updates_merged"]) == (
        "epsilon" if is_private else "max_updates",
        merged,
    )
    assert max(books.num_waiting) >= 2
    again = experiment(tmp_path / "again", **fields)
    with crash(monkeypatch, 8):  # of the second round three updates wait, and are in the checkpoint
        finish(again, lambda made: simulate(made, observer=Books(is_private, save_from=4)))
    resumed = finish(replace(again, output=None, resume=again.output))
    assert resumed.digest == run.digest
    same = ("finished", "updates_merged", "privacy", "guard", "own_parameters", "secure_aggregation")
    assert {name: resumed.summary.get(name) for name in same} == {name: run.summary.get(name) for name in same}


# ---- weights ----


def zero_state(dtype: torch.dtype) -> GlobalState:
    """Return a state of `Line` with every parameter 0."""
    module = Line().to(dtype)
    for parameter in module.parameters():
        parameter.detach().zero_()
    submodels = Submodels(module, EXAMPLE)
    return GlobalState(submodels, submodels.state(module))


def merge_of(pair: tuple[str, str], state: GlobalState) -> Merge:
    """Return the merge of a run with two options, which clip and add noise nowhere."""
    fields = fields_of(pair)
    privacy, guard = fields.get("privacy", Privacy()), fields.get("guard", Guard())
    if privacy.is_on:
        privacy = replace(privacy, clip_norm=1e3, noise_multiplier=0.0, max_epsilon=None)
    if guard.clip_norm is not None:
        guard = replace(guard, clip_norm=1e3)
    algorithm = with_options(fields["algorithm"], Rounds(), guard, privacy, 3, b"k" * 32)
    return bounded(widened(algorithm, state.submodels), None).merge


@pytest.mark.parametrize("pair", [pair for pair in ALLOWED if "secure" not in pair], ids="+".join)
def test_which_weights_count_and_what_a_crash_has_undone(pair):
    """Values 1, 2 and 6 of 1, 2 and 3 samples: by samples 23 / 6, their median 2, their private sum over four 9 / 4."""
    state = zero_state(torch.bfloat16 if "wide" in pair else torch.float32)
    merge = merge_of(pair, state)
    for client, value in enumerate((1.0, 2.0, 6.0), start=1):
        take(merge, state, Update(client, client, 0, filled(state, value), client))
        merge.detach(state)
    merge_all(merge, state)
    mean = 2.0 if "robust" in pair else 9 / 4 if "privacy" in pair else 23 / 6
    wanted = torch.tensor(mean).to(torch.bfloat16 if "wide" in pair else torch.float32).item()
    assert state.values["fc1.weight"].unique().item() == pytest.approx(wanted, rel=1e-6)
    head = 0.0 if "personal" in pair else wanted  # each client's own
    assert state.values["fc2.bias"].item() == pytest.approx(head, rel=1e-6)
    merge.on_rollback(state, [(1, 4), (1, 4), (2, 4)])
    spent = merge.report(state).get("privacy")
    if "privacy" in pair:  # in the merge that was undone client 1 had two updates, which cost as much as four
        assert spent["compositions"] == 5
        assert {client: one["updates"] for client, one in spent["clients"].items()} == {"1": 3, "2": 2, "3": 1}
    else:
        assert spent is None


# ---- checkpoints of earlier versions ----


def test_a_checkpoint_whose_wrappers_listed_what_waits_themselves_is_read():
    """An earlier version stored beside each copy, or each sum, the submodels, clients and assignments that waited."""
    copy = filled(zero_state(torch.float32), 2.0)
    memory = Memory()
    memory.load(
        {
            "privacy": {"updates": {1: 2}, "squares": {1: 4}, "sums": {FULL: copy}, "received": [(FULL, 0, 1, 7)]},
            "located": [(FULL, 0, copy)],
            "centred": {"stored": [(FULL, 0, copy)]},
        }
    )
    private, located = memory.find(PrivacyMemory), memory.find(Copies)
    assert (private.squares, private.sums, located.value) == ({1: 4}, {FULL: copy}, [copy])
    assert memory.find(CentredMemory).stored == [copy]
