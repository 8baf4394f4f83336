"""What every executor keeps: the bits of one process, whatever is asked for or dropped, and no memory of what is done."""

from __future__ import annotations

import gc
import random
import time
import weakref
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from model_zoo.metrics import MacroF1, Perplexity
from raafl.algorithms import ALGORITHMS
from raafl.errors import TaskFailed
from raafl.runtime.executors import batched as cohorts_module
from raafl.runtime.executors import ranks as ranks_module
from raafl.runtime.executors.ranks import RankExecutor, Shared
from raafl.runtime.run import simulate
from tests.conformance import executors
from tests.conformance.executors import Dropping, Slow, clients, evaluator_of, in_any_order, one_by_one, tasks_of
from tests.helpers.crash import crash
from tests.helpers.forked_command import wait_for
from tests.helpers.methods import covering, each_method
from tests.helpers.small_runs import COMING_AND_GOING, equal_replay, experiment, finish
from tests.local.bench import Bench, Net

KINDS = [
    executors.inline,
    executors.cohorts,
    executors.ray,
    executors.pool,
    executors.pool_of_cohorts,
    executors.ranks,
]
SHARING = KINDS[3:]
OWN_STEPS = "the algorithm has steps of its own"
POOL, COHORTS, BOTH = ({"workers": workers, "batch_clients": clients} for workers, clients in ((2, 1), (1, 6), (2, 6)))
IN_CYCLES = ("co_s2p", "fed_pm", "platon", "prune_fl", "ra_fed", "ram_fed")
"""Algorithms whose rounds are not alike."""
TRAINED_UNLIKE = covering({name: make() for name, make in ALGORITHMS.items()}, ["local"])
"""Algorithms that have every kind of local."""
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Cohorts of two are compared, and the rest trusted."""
    monkeypatch.setattr(cohorts_module, "_TRIALS", (2, 2))


@pytest.fixture
def patient(monkeypatch):
    """Rank 0 trains what nobody waits for, so that the others have something to do in a run of milliseconds."""
    result = RankExecutor.result

    def others_first(self, assignment_id):
        with self._changed:
            self._changed.wait_for(lambda: self._tasks[assignment_id].begun, timeout=10)
        return result(self, assignment_id)

    monkeypatch.setattr(RankExecutor, "result", others_first)


def alike(run, whole):
    """Check whether a run is another to the last bit in all that it leaves."""
    assert run.digest == whole.digest and run.text("clients.csv") == whole.text("clients.csv")
    metrics = [[{**row, "wall_s": ""} for row in one.rows("metrics.csv")] for one in (run, whole)]
    assert metrics[0] == metrics[1]
    batched = run.summary.pop("batched", None)
    assert {**run.summary, "wall_s": None} == {**whole.summary, "wall_s": None}
    return batched


@pytest.mark.parametrize("name", each_method())
def test_every_algorithm_ends_alike_over_ranks_and_when_it_has_crashed_and_goes_on_elsewhere(
    tmp_path, monkeypatch, request, patient, name
):
    """Clients come and go, so that tasks are cancelled. Ranks train and coordinate nothing: each kind of local goes over them."""
    num_updates = 30 if name in (*IN_CYCLES, "fed_raa") else 20  # so many until one is lost in FedRAA, too
    more = {"devices": COMING_AND_GOING, "max_updates": num_updates, "eval_every": 8, "checkpoint_every": 1}
    whole = finish(experiment(tmp_path / "whole", name, **more))
    assert whole.summary["updates_merged"] >= num_updates and whole.summary["updates_lost"] > 0
    if name in TRAINED_UNLIKE or request.node.get_closest_marker("long"):
        ranks = executors.over_ranks(experiment(tmp_path / "ranks", name, **more))
        assert alike(ranks, whole) is None and ranks.journal() == whole.journal()
    goes_on_elsewhere(tmp_path, monkeypatch, name, whole, 13, POOL, COHORTS, **more)


@pytest.mark.long("test_every_algorithm_ends_alike_over_ranks_and_when_it_has_crashed_and_goes_on_elsewhere")
@pytest.mark.parametrize("name", IN_CYCLES)
def test_an_algorithm_whose_rounds_differ_goes_on_from_a_later_one(tmp_path, monkeypatch, name):
    more = {"devices": COMING_AND_GOING, "max_updates": 30, "eval_every": 8, "checkpoint_every": 1}
    whole = finish(experiment(tmp_path / "whole", name, **more))
    goes_on_elsewhere(tmp_path, monkeypatch, name, whole, 27, COHORTS, BOTH, **more)


def goes_on_elsewhere(tmp_path, monkeypatch, name, whole, at, first, then, **more):
    """Cut a run off at the event ``at``, go on with another executor, and compare it with the whole run.

    Args:
        tmp_path: where the run's folder is made.
        monkeypatch: of the test.
        name: of the algorithm.
        whole: the run that was not cut off.
        at: number of the event at which it crashes.
        first: fields of the executor that begins.
        then: fields of the one that goes on.
        more: fields of both.
    """
    made = experiment(tmp_path / f"cut-{at}", name, **first, **more)
    with crash(monkeypatch, at):
        simulate(made)
    assert not (Path(made.output) / "summary.json").exists()
    run = finish(replace(made, output=None, resume=made.output, **then))
    batched = alike(run, whole)
    before = list(takewhile(lambda event: event["event"] != "resumed", run.journal()))
    assert before == whole.journal()[: len(before)] and len(before) > at
    assert equal_replay(made, run)
    if batched is not None:
        alone = OWN_STEPS in batched["by_the_loop"] or {row["spec"] for row in run.rows()} != {"full"}
        few = [reason for reason in batched["by_the_loop"] if reason.startswith("fewer than ")]
        assert (batched["share"] > 0 or alone) and batched["by_the_loop"] in ([], [OWN_STEPS], few)


class Measured(Net):
    """Logs and returns numbers, and a metric that adds up whole numbers."""

    def validation_step(self, batch, index):
        x, y = batch
        logits = self(x)
        if "f1" not in self._modules:
            self.f1 = MacroF1()
        self.f1.update(logits, y)
        self.log_dict({"f1": self.f1, "most": logits.max()}, reduce_fx="max")
        self.log("share", float((logits.argmax(1) == y).sum()) / len(y))
        self.log("index", index, reduce_fx="sum", batch_size=1)
        return {"loss": F.cross_entropy(logits, y)}


class Drawing(Measured):
    def validation_step(self, batch, index):
        self.log("noise", torch.rand(()) * 0)
        return super().validation_step(batch, index)


class Counting(Measured):
    """Its numbers depend on the batches before."""

    seen = 0

    def validation_step(self, batch, index):
        self.seen += 1
        self.log("seen", self.seen)
        return super().validation_step(batch, index)


class Worded(Measured):
    def validation_step(self, batch, index):
        if "perplexity" not in self._modules:
            self.perplexity = Perplexity()
        self.perplexity.update(self(batch[0]).unsqueeze(1), batch[1].unsqueeze(1))
        self.log("perplexity", self.perplexity)


class Ended(Measured):
    def on_validation_epoch_end(self):
        self.log("ended", 1.0)


SHARED = {Measured: True, Drawing: False, Counting: False, Worded: False, Ended: False}


@pytest.mark.quick_cases(
    *(f"{kind.__name__}-Measured" for kind in KINDS), *(f"pool-{make.__name__}" for make in SHARED)
)
@pytest.mark.parametrize("make", SHARED)
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_has_the_bits_of_one_process(monkeypatch, kind, make):
    added, (add, measure) = [], (ranks_module.add, Shared.measure)

    def others_first(self):
        with self._changed:
            assert self._changed.wait_for(lambda: self._found, timeout=executors.WAIT_S)
        return measure(self)

    monkeypatch.setattr(Shared, "measure", others_first)
    monkeypatch.setattr(ranks_module, "add", lambda own, noted: added.append(noted) or add(own, noted))
    data, bench = clients(), Bench.of(make)
    with kind(bench, data, 3) as executor:
        one, other = evaluator_of(bench), evaluator_of(bench)
        for number in range(3):
            for buffer in bench.values.buffers.values():
                buffer.add_(0.3 * number)
            expected = one(bench.values, number)
            found = executor.evaluate(other, bench.values, number)
            assert set(found) == set(expected)
            same = {name: found[name] == value for name, value in expected.items() if name != "seen"}
            assert all(same.values()), (found, expected)
    assert bool(added) is (SHARED[make] and kind in SHARING)


class Failing(Net):
    def training_step(self, batch, index):
        raise ZeroDivisionError("in the user's code")


@pytest.mark.parametrize(
    ("make", "num_processes"),
    [
        (Dropping, 2),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((Dropping, 4), (Slow, 2), (Slow, 4))),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_tasks_in_any_order_give_what_one_process_gives(kind, make, num_processes):
    data, bench = clients(), Bench.of(make, max_built=2)
    todo = tasks_of(bench, 90)  # more than there is shared memory for
    expected, draw = one_by_one(bench, data, todo), random.Random(2)
    with kind(bench, data, num_processes) as executor:
        found = in_any_order(executor, todo, draw)
    assert 40 < len(found) < 80
    assert found == {number: expected[number] for number in found}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_of_what_was_asked_for_or_dropped(kind):
    data, bench = clients(), Bench.of(Net, max_built=2)
    with kind(bench, data, 2) as executor:
        todo = tasks_of(bench, 40)
        values = [weakref.ref(buffer) for _, started in todo for buffer in started.buffers.values()]
        in_any_order(executor, todo, random.Random(3))
        del todo
        ((last, started),) = tasks_of(bench, 1)
        deadline = time.monotonic() + executors.WAIT_S
        while any(one() is not None for one in values) and time.monotonic() < deadline:
            last = replace(last, id=last.id + 100)  # an id never comes twice
            executor.submit(last, started, 0.0)  # what a process had begun when it was dropped goes once that has ended
            executor.result(last.id)
            gc.collect()
        assert not any(one() is not None for one in values)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_no_more_is_begun_ahead_than_is_needed(kind):
    data, bench = clients(), Bench.of(Slow, max_built=2)
    todo = tasks_of(bench, 12)[::3]  # of one submodel
    with kind(bench, data, 3) as executor:
        executor.needed = 3
        for task, values in todo:
            executor.submit(task, values, float(task.id))
        for number, (task, _) in enumerate(todo[:3]):
            executor.needed = 3 - number
            executor.result(task.id)
        left = getattr(executor, "_tasks", {}).values()
        assert not any(
            getattr(task, "begun", False) or getattr(task, "slot", -1) >= 0 or getattr(task, "answer", None) is not None
            for task in left
        )
        assert executor.report().get("in_vain", 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_told_in_its_own_words_when_its_turn_comes_and_the_next_task_is_trained(kind):
    data, bench = clients(), Bench.of(Failing, max_built=2)
    with kind(bench, data, 2) as executor:
        todo = tasks_of(bench, 9)
        for task, values in todo:
            executor.submit(task, values, float(task.id))
        for task, _ in todo:
            with pytest.raises(TaskFailed, match="ZeroDivisionError: in the user's code") as failed:
                executor.result(task.id)
            assert failed.value.client == task.client


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_that_nobody_asks_for_is_never_told(kind):
    data, bench = clients(), Bench.of(Failing, max_built=2)
    with kind(bench, data, 2) as executor:
        (first, _), *rest = todo = tasks_of(bench, 9)
        for task, values in todo:
            executor.submit(task, values, float(task.id))
        with pytest.raises(TaskFailed):
            executor.result(first.id)
        if kind in SHARING:
            wait_for(lambda: any(task.result for task in executor._tasks.values()), "a failure")
        for task, _ in rest:
            executor.cancel(task.id)
