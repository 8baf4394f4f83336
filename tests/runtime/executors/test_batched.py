"""Tasks trained together: what waits is taken, compared, kept, and left to the loop where that is the only way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raafl.core.algorithm import Local
from raafl.data.federated import ClientData
from raafl.errors import TaskFailed
from raafl.runtime.executors import Inline, batched
from raafl.runtime.executors.batched import BatchedExecutor
from raafl.submodel import FULL, Spec
from tests.local.bench import BATCH_SIZE, Bench, Net
from tests.local.stacked.models import Branching, Numpy
from tests.local.stacked.test_cohort import members


class Late(Branching):
    """Some clients' loss comes below the limit, in the later cohorts alone."""

    limit = 0.8


class Failing(Net):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if loss > 1.345:
            raise ZeroDivisionError("in the user's code")
        return loss


@pytest.fixture
def small(monkeypatch):
    """Two cohorts of two and of three clients are compared, before all is taken on trust."""
    monkeypatch.setattr(batched, "_TRIALS", (2, 3))


def executor(make, tasks, most=4, **options):
    bench = Bench.of(make, **options)
    made = BatchedExecutor(bench.trainer, {task.assignment.client: task.data for task in tasks}.__getitem__, most)
    notes = []
    made.note = notes.append
    return made, notes


def outcome(executor, task):
    try:
        update = executor.result(task.assignment.id)
    except TaskFailed as failed:
        return failed.error, failed.where
    return update.tensors.fingerprint(), update.metrics, update.num_steps, update.num_samples


def alike(make, tasks, most=4, **options):
    """Submit all, ask for each in order; give the executor, its notes, and check each outcome against the loop's."""
    inline = Inline(
        Bench.of(make, **options).trainer, {task.assignment.client: task.data for task in tasks}.__getitem__
    )
    made, notes = executor(make, tasks, most, **options)
    for place, task in enumerate(tasks):
        for one in (inline, made):
            one.submit(task.assignment, task.received, float(place))
    for task in tasks:
        assert outcome(made, task) == outcome(inline, task)
    made.close()
    return made.report(), notes


def tasks_of(make, num, spec=FULL, **length):
    return members(Bench.of(make), spec, sizes=[22, 13][:1] * num, **(length or {"epochs": 1}))


def test_what_is_due_first_is_trained_together_up_to_the_most(small):
    report, notes = alike(Net, tasks_of(Net, 14), most=4)
    # two and three are compared, then four, four, and one is left, which is alone
    assert report == {"share": 8 / 14, "mean_cohort": 4.0, "in_vain": 0, "by_the_loop": []} and not notes


def test_tasks_of_other_specs_and_lengths_are_not_mixed(small):
    bench = Bench.of(Net)
    part = Spec.select({next(iter(bench.submodels.axes)): (0, 3, 5)})
    tasks = [*members(bench, sizes=[22] * 7, epochs=1), *members(bench, part, sizes=[22] * 7, steps=2)]
    tasks = [
        task._replace(assignment=_numbered(task.assignment, number))
        for number, task in enumerate(tasks[::2] + tasks[1::2])
    ]
    report, _ = alike(Net, tasks)
    assert report["share"] > 0 and report["by_the_loop"] == []


def _numbered(assignment, number):
    return replace(assignment, id=number + 1, client=number + 1)


def test_a_batch_of_another_shape_is_compared_before_it_is_trusted(small, monkeypatch):
    compared = []
    real = BatchedExecutor._compare
    monkeypatch.setattr(
        BatchedExecutor, "_compare", lambda self, *given: compared.append(given[0]) or real(self, *given)
    )
    sizes = [22] * 8 + [13] * 8  # last batches of two, then of three
    report, _ = alike(Net, members(Bench.of(Net), sizes=sizes, epochs=1))
    found = [[task.data.num_samples for task in tasks] for tasks in compared if tasks]
    assert found == [[22] * 2, [22] * 3, [13]]  # of the third cohort the one that has a new kind
    assert report["share"] == 10 / 16


def test_what_cannot_be_stacked_is_trained_by_the_loop_and_its_reason_said_once(small):
    report, notes = alike(Numpy, tasks_of(Numpy, 6))
    reason = (
        "training draws random numbers without torch, for example with numpy: draw them with torch to train clients as "
        "one batch"
    )
    assert report == {"share": 0.0, "mean_cohort": 0.0, "in_vain": 0, "by_the_loop": [reason]}
    assert notes == [f"clients are trained one after the other: {reason}"]
    report, _ = alike(Net, tasks_of(Net, 6), accumulate_grad_batches=2)
    assert report["by_the_loop"] == ["fabric.accumulate_grad_batches is 2"]


@pytest.mark.parametrize(
    ("num", "most", "lr_scale", "reason"),
    [
        (3, "auto", 1.0, "fewer than 4 tasks of the same submodel and length wait at a time"),
        (1, 4, 1.0, "fewer than 2 tasks of the same submodel and length wait at a time"),
        (4, 4, 0.5, "train.lr_schedule gives tasks learning rates of their own"),
    ],
)
def test_tasks_that_were_never_tried_together_have_a_reason(num, most, lr_scale, reason):
    tasks = [task._replace(assignment=replace(task.assignment, lr_scale=lr_scale)) for task in tasks_of(Net, num)]
    report, notes = alike(Net, tasks, most)
    assert report == {"share": 0.0, "mean_cohort": 0.0, "in_vain": 0, "by_the_loop": [reason]} and not notes


def test_any_difference_is_found_and_ends_it(small, monkeypatch):
    from raafl.local.stacked.steps import Steps

    real = Steps.run

    def other(self):
        real(self)
        self.rows.buffers[torch.float32][0, 0] += 1e-6

    monkeypatch.setattr(Steps, "run", other)
    report, notes = alike(Net, tasks_of(Net, 6))
    assert report["share"] == 0 and report["by_the_loop"] == [
        "clients trained together give other results than alone: other values"
    ]
    assert len(notes) == 1


def test_clients_that_part_later_are_trained_again_by_the_loop(small):
    report, notes = alike(Late, tasks_of(Late, 24))  # clients 9 and 21 part from the others
    assert report["share"] == 11 / 24 and not notes


def test_a_task_that_fails_fails_when_its_turn_comes(small):
    tasks = tasks_of(Failing, 19)
    made, _ = executor(Failing, tasks)
    inline = Inline(Bench.of(Failing).trainer, {task.assignment.client: task.data for task in tasks}.__getitem__)
    for task in tasks:
        for one in (made, inline):
            one.submit(task.assignment, task.received, 0.0)
    found = [(outcome(made, task), outcome(inline, task)) for task in tasks]
    assert all(one == other for one, other in found) and any("ZeroDivisionError" in str(one[0]) for one, _ in found)


def test_what_is_cancelled_is_forgotten_or_was_in_vain(small):
    tasks = tasks_of(Net, 12)
    made, _ = executor(Net, tasks)
    for place, task in enumerate(tasks):
        made.submit(task.assignment, task.received, float(place))
    for task in tasks[:6]:  # two and three compared, and the first of four
        made.result(task.assignment.id)
    for number in (7, 8, 12):
        made.cancel(number)
    made.result(9)
    made.close()
    made.close()
    assert made.report()["in_vain"] == 2


def last(monkeypatch, together_s):
    """Let a task trained alone last a second of CPU time, and a batch ``together_s``."""
    clock = [0.0]

    def lasting(seconds, function):
        def call(*args):
            clock[0] += seconds
            return function(*args)

        return call

    monkeypatch.setattr(batched.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(batched, "attempt", lasting(1.0, batched.attempt))
    monkeypatch.setattr(batched.CohortTrainer, "train", lasting(together_s, batched.CohortTrainer.train))


@pytest.mark.parametrize(
    ("together_s", "first_s", "trial_s", "share", "says"),
    [
        (1.0, 0.0, 8.0, 11 / 20, ""),
        (4.0, 0.0, 8.0, 0.0, "4 clients are not faster together"),
        (1.0, 0.0, 3.9, 0.0, ""),
        (2.9, 0.0, 4.0, 11 / 20, ""),  # a second trial takes 2.9 s, and 12 tasks that wait would save 0.275 s each
        (3.0, 0.0, 4.0, 0.0, ""),  # 3 s, and 12 times 0.25 s
        (1.0, 0.5, 4.5, 11 / 20, ""),  # the first trial is taken for four tasks and what it takes beside them
        (1.0, 0.5, 4.4, 0.0, ""),
    ],
)
def test_auto_leaves_to_the_loop_what_is_not_faster_together_or_dear_to_try(
    monkeypatch, together_s, first_s, trial_s, share, says
):
    monkeypatch.setattr(batched, "_TRIALS", (4, 4))
    monkeypatch.setattr(batched, "_FIRST_S", first_s)
    monkeypatch.setattr(batched, "_TRIAL_S", trial_s)
    last(monkeypatch, together_s)
    report, notes = alike(Net, tasks_of(Net, 20), most="auto")
    assert report["share"] == share and [note.partition(": ")[2][: len(says)] for note in notes] == [says] * bool(says)


def test_auto_tries_once_what_gains_nothing(monkeypatch):
    monkeypatch.setattr(batched, "_TRIALS", (4, 8))
    monkeypatch.setattr(batched, "_TRIAL_S", 100.0)
    last(monkeypatch, 4.0)  # as long as four alone
    _, notes = alike(Net, tasks_of(Net, 20), most="auto")
    assert notes == [
        "clients are trained one after the other: 4 clients are not faster together than one after the other"
    ]


def test_a_cohort_is_as_large_as_its_values_gradients_and_states_fit(monkeypatch):
    tasks = tasks_of(Net, 2)
    made, _ = executor(Net, tasks, most="auto")
    monkeypatch.setattr(batched, "MOST_BYTES", 4 * (6 * 8 + 8 + 8 * 3 + 3) * 4 * 5)
    assert made._cap(FULL) == 5
    assert executor(Net, tasks, most=7)[0]._cap(FULL) == 7


def test_a_cohort_on_a_gpu_may_be_larger(emulated_cuda):
    tasks = tasks_of(Net, 2)
    assert executor(Net, tasks, most="auto")[0]._cap(FULL) == batched.MOST == 128
    assert executor(Net, tasks, most="fast", accelerator="cuda")[0]._cap(FULL) == batched.MOST_ON_GPU


def test_a_test_part_that_cannot_be_measured_fails_as_in_the_loop(small):
    class Broken(Net):
        def validation_step(self, batch, index):
            if not self.training and batch[0].shape[0] == 9 and batch[1].sum() > 8:
                raise ZeroDivisionError("while it is measured")
            return {"accuracy": (self(batch[0]).argmax(1) == batch[1]).float().mean()}

    tasks = tasks_of(Broken, 9)
    from tests.local.bench import samples

    for number, task in enumerate(tasks):
        task.data.test = ClientData(samples(number), torch.arange(9), 9)
    alike(Broken, tasks, local=Local())
    assert BATCH_SIZE == 5
