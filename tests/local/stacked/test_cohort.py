"""Tasks trained as one: each client's values, metrics and draws are what it has alone, to the bit, or the cohort is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from raafl.core.algorithm import Local, Training
from raafl.data.federated import ClientData
from raafl.local.captured import Capture
from raafl.local.device_data import Feed
from raafl.local.stacked import CohortTrainer, Member, Parted, Unstackable, mode
from raafl.rng import generators, same_generators
from raafl.submodel import FULL, Spec
from tests.helpers.emulated_cuda import Emulated
from tests.local.bench import BATCH_SIZE, Bench, Net, assignment, samples
from tests.local.stacked.models import (
    ELEMENTWISE,
    Adam,
    Attached,
    Branching,
    Counting,
    Cycled,
    Dropping,
    Estimating,
    Groups,
    Hooked,
    Logging,
    LogsMetric,
    LogsProduct,
    Losses,
    Mapped,
    Monitored,
    Noisy,
    Normed,
    Numpy,
    Odd,
    OneByOne,
    Parting,
    Recurrent,
    Remembering,
    Replacing,
    Rprop,
    Scheduled,
    Seldom,
    Skipping,
    Transferred,
)

SIZES = (22, 7, 22, 13, 5)


def members(bench: Bench, spec: Spec = FULL, sizes=SIZES, data: Any = None, **length: Any) -> list[Member]:
    """Tasks with values, seeds and data of their own."""
    generator = torch.Generator().manual_seed(9)
    found = []
    for number, size in enumerate(sizes, start=1):
        values = bench.submodels.plan(spec, "present").gather(bench.values)
        for buffer in values.buffers.values():
            if buffer.is_floating_point():
                buffer.add_(torch.rand(buffer.shape, generator=generator), alpha=0.1)
        task = replace(assignment(spec, seed=number, **length), id=number, client=number)
        found.append(Member(task, values, ClientData(data or samples(number), torch.arange(size), BATCH_SIZE)))
    return found


def check(bench: Bench, tasks: list[Member]) -> None:
    """Train them as one and one after the other, and compare."""
    device = bench.trainer.fabric.device
    together = CohortTrainer(bench.trainer)
    assert together.refusal() is None
    trained = together.train(tasks)
    for task in reversed(tasks):
        alone = bench.trainer.run(*task)
        alone.tensors = alone.tensors.clone()
        drawn = generators(device)
        found = trained.update(task.assignment.id, draws=True)
        assert found.tensors.fingerprint() == alone.tensors.fingerprint()
        assert same_generators(drawn, generators(device))
        for name in ("metrics", "num_steps", "num_samples", "extra", "refusal", "assignment", "client"):
            assert getattr(found, name) == getattr(alone, name), name


EQUAL = (Net, Dropping, Normed, Adam, *ELEMENTWISE, Groups, Odd, Logging, Losses, Recurrent, Noisy, Branching, Cycled)


@pytest.mark.parametrize("make", EQUAL)
def test_clients_of_unequal_sizes_are_trained_as_alone(make):
    bench = Bench.of(make)
    check(bench, members(bench, epochs=2))


class Fixed(Net):
    """Passes a parameter to its optimizer that does not train."""

    def __init__(self):
        super().__init__()
        self.fc1.bias.requires_grad_(False)


PARTIAL = [Spec.select({}, trained=["fc2"]), Spec.select({"fc1": (1, 4, 6)}, trained=["fc1"])]


@pytest.mark.parametrize("spec", PARTIAL)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1, "local": Local(prox=0.3), "sends": "delta"}])
def test_parts_that_do_not_train_in_a_task_stay_as_they_were_received(spec, options):
    """The module passes all of its parameters to the optimizer, which skips those without gradients."""
    bench = Bench.of(Net, **options)
    check(bench, members(bench, spec, epochs=2))
    bench = Bench.of(Fixed, **options)
    check(bench, members(bench, epochs=2))


# Noisy draws on the CPU; an LSTM makes its first state where a stack within vmap says that it lies, in the emulation the CPU
@pytest.mark.quick_cases("Net", "Odd", "Normed", "Branching", "AdamW")
@pytest.mark.parametrize("make", [make for make in EQUAL if make not in (Noisy, Recurrent)])
def test_clients_on_an_emulated_gpu_are_trained_as_alone(emulated_cuda: Emulated, make):
    bench = Bench.of(make, accelerator="cuda")
    bench.trainer.feed = Feed(bench.trainer.fabric.device, 0.25)
    check(bench, members(bench, epochs=2))


def test_with_all_that_may_surround_a_step_on_an_emulated_gpu(emulated_cuda: Emulated):
    local = Local(prox=0.3, rescale=True, masked=True)
    bench = Bench.of(Dropping, accelerator="cuda", local=local, sends="delta", gradient_clip_val=0.7)
    axis = next(iter(bench.submodels.axes))
    check(bench, members(bench, Spec.select({axis: (1, 4, 6)}), steps=4, sizes=(22, 2, 3, 13)))


def test_steps_of_a_cohort_wait_for_the_gpu_never(emulated_cuda: Emulated):
    """Two epochs more cost no wait more, where all clients have batches of one shape at a time."""
    bench, waits = Bench.of(Logging, accelerator="cuda"), []
    bench.trainer.feed = Feed(bench.trainer.fabric.device, 0.25)
    together, data = CohortTrainer(bench.trainer), samples()
    for epochs in (1, 1, 3):
        tasks = members(bench, sizes=(22, 22, 22), data=data, epochs=epochs)
        before = emulated_cuda.counts["waits"]
        trained = together.train(tasks)
        waits.append(emulated_cuda.counts["waits"] - before)
        for task in tasks:
            before = emulated_cuda.counts["waits"]
            trained.update(task.assignment.id)
            assert emulated_cuda.counts["waits"] - before == 1  # all that a task reads is read at once
    assert waits[0] > waits[1] == waits[2]  # the first tries products


class Ignoring(Net):
    """Leaves labels of class 2 out of its loss, as language models do with padding."""

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), torch.where(y == 2, -100, y))


def test_ignored_labels_on_an_emulated_gpu_are_not_looked_at(emulated_cuda: Emulated):
    bench = Bench.of(Ignoring, accelerator="cuda")
    check(bench, members(bench, epochs=2, sizes=(20, 20, 20)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("make", [Net, Dropping, Normed, Logging, Ignoring, *ELEMENTWISE[:1]])
def test_fast_clients_are_those_alone_up_to_rounding_with_draws_of_their_own(request, make, device):
    if device == "cuda":
        request.getfixturevalue("emulated_cuda")
    bench = Bench.of(make, accelerator=device, gradient_clip_val=0.7, local=Local(prox=0.1))
    tasks = members(bench, epochs=2)
    trained = CohortTrainer(bench.trainer, fast=True).train(tasks)
    for task in tasks:
        alone = bench.trainer.run(*task)
        values, metrics = alone.tensors.clone(), alone.metrics
        drawn = generators(bench.trainer.fabric.device)
        found = trained.update(task.assignment.id, draws=True)
        assert same_generators(drawn, generators(bench.trainer.fabric.device))
        for dtype, buffer in found.tensors.buffers.items():
            assert torch.allclose(buffer.cpu().double(), values.buffers[dtype].cpu().double(), atol=1e-5)
        assert found.metrics == pytest.approx(metrics, abs=1e-5) and found.num_steps == alone.num_steps


@pytest.mark.parametrize("make", [Net, ELEMENTWISE[1], Scheduled])  # a fused SGD, a capturable RMSprop, falling rates
def test_optimizers_have_the_form_of_eager_tasks_beside_captured_ones(emulated_cuda: Emulated, make):
    bench = Bench.of(make, accelerator="cuda")
    bench.trainer.capture = Capture(bench.trainer)
    tasks = members(bench, epochs=2, sizes=(22, 21, 22))
    trained = CohortTrainer(bench.trainer).train(tasks)
    found = [trained.update(task.assignment.id).tensors.fingerprint() for task in tasks]
    assert found == [bench.trainer.run(*task).tensors.fingerprint() for task in tasks]


def captured(make, **options):
    """Return a bench whose trainer captures steps."""
    bench = Bench.of(make, accelerator="cuda", **options)
    bench.trainer.feed = Feed(bench.trainer.fabric.device, 0.25)
    bench.trainer.capture = Capture(bench.trainer)
    return bench


def plain(make, **options):
    """Return a bench like `captured`, whose steps are all eager, with optimizers in the same form."""
    bench = captured(make, **options)
    bench.trainer.capture._problems = ["this is the eager one"]
    return bench


def assert_as_alone(bench, tasks, trained):
    """Each client of a batch has the update of its task trained alone."""
    for task in tasks:
        alone = bench.trainer.run(*task)
        alone.tensors = alone.tensors.clone()
        assert not alone.difference(trained.update(task.assignment.id))


class Logs(Net):
    """Logs tensors in each way."""

    def training_step(self, batch, index):
        x, y = batch
        scores = self(x)
        loss = F.cross_entropy(scores, y)
        self.log("accuracy", (scores.argmax(1) == y).float().mean())
        self.log("largest", scores.max(), reduce_fx="max")
        self.log_dict({"sum": scores.sum(), "other": loss}, reduce_fx="sum")
        return loss


CAPTURED = {
    "momentum": (Net, {}),
    "clipped, proximal": (Net, {"gradient_clip_val": 0.05, "local": Local(prox=0.5)}),
    "logs": (Logs, {}),
    "adam": (ELEMENTWISE[0], {}),
    "rmsprop": (ELEMENTWISE[1], {}),
    "groups": (Groups, {}),
    "a schedule": (Scheduled, {}),
    "batch norm": (Normed, {}),
    "odd tensors": (Odd, {}),
    "labels that are ignored": (Ignoring, {}),
    "deltas": (Net, {"sends": "delta"}),
}


@pytest.mark.quick_cases("clipped, proximal", "logs", "adam", "a schedule")
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_batches_are_eager_ones_to_the_bit(emulated_cuda: Emulated, name):
    """Warm-ups, captures and comparisons in three batches of clients, then one of other values and seeds that is graphs alone."""
    make, options = CAPTURED[name]
    bench, other = captured(make, **options), plain(make, **options)
    together, eager = CohortTrainer(bench.trainer), CohortTrainer(other.trainer)
    eager._known = together._known
    for turn in range(4):
        tasks = members(bench, sizes=(20, 20, 20), epochs=1)
        seeds = [replace(task.assignment, seed=10 * turn + task.assignment.id) for task in tasks]
        tasks = [task._replace(assignment=one) for task, one in zip(tasks, seeds, strict=True)]
        trained = together.train(tasks)
    expected = eager.train(tasks)
    for task in tasks:
        one, alone = (found.update(task.assignment.id) for found in (trained, expected))
        assert not alone.difference(one)
    counted = bench.trainer.capture.counted()
    assert (counted["batches"], counted["batches_captured"], counted["eager"]) == (4, 4, [])
    [graphs] = together._graphs.values()
    assert graphs.num_eager == 3 and not graphs.unproven


def test_clients_of_unequal_lengths_have_eager_steps_between_captured_ones(emulated_cuda: Emulated):
    bench, other = captured(Logs), plain(Logs)
    together = CohortTrainer(bench.trainer)
    tasks = members(bench, sizes=(20, 22, 20), epochs=1)
    for _ in range(3):
        trained = together.train(tasks)
    assert_as_alone(other, tasks, trained)
    counted = bench.trainer.capture.counted()
    assert (counted["batches_captured"], counted["eager"]) == (3, [])
    [graphs] = together._graphs.values()
    assert graphs.num_eager == 3 + 3  # a step of one client alone in each batch of clients


NOT_CAPTURED = {
    "batches of clients: clients draw random numbers of their own": (Dropping, {}),
    "batches of clients: training_step uses the index of its batch": (Logging, {}),
    "batches of clients: the optimizer is Adagrad, which has no form that can be captured": (ELEMENTWISE[2], {}),
    "batches of clients: a masked loss has masks of each client's classes": (Net, {"local": Local(masked=True)}),
}


@pytest.mark.quick_cases(*list(NOT_CAPTURED)[:2])
@pytest.mark.parametrize("reason", NOT_CAPTURED)
def test_batches_that_no_graph_can_have_are_eager_and_say_why(emulated_cuda: Emulated, reason):
    make, options = NOT_CAPTURED[reason]
    bench, other = captured(make, **options), plain(make, **options)
    together, tasks = CohortTrainer(bench.trainer), members(bench, sizes=(20, 20), epochs=1)
    for _ in range(2):
        trained = together.train(tasks)
    assert_as_alone(other, tasks, trained)
    counted = bench.trainer.capture.counted()
    assert (counted["batches"], counted["batches_captured"]) == (2, 0)
    [said] = counted["eager"]
    assert said.startswith(reason) or reason.partition(": ")[2] in said


def test_a_batch_whose_graph_cannot_be_made_is_trained_eagerly_and_counts(emulated_cuda: Emulated):
    class Refusing(Net):
        def training_step(self, batch, index):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("not into a graph")
            x, y = batch
            return F.cross_entropy(self(x), y)

    bench, other = captured(Refusing), plain(Refusing)
    together, tasks = CohortTrainer(bench.trainer), members(bench, sizes=(20, 20), epochs=1)
    for _ in range(3):  # the second meets the error
        assert_as_alone(other, tasks, together.train(tasks))
    counted = bench.trainer.capture.counted()
    assert (counted["batches"], counted["batches_captured"]) == (3, 0)
    [said] = counted["eager"]
    assert said.startswith("batches of clients: RuntimeError: not into a graph")


def test_what_no_check_of_a_batch_sees_is_caught_by_the_comparison(emulated_cuda: Emulated):
    """A step that moves its features by a number of Python's, which a graph freezes."""
    numbers = itertools.count()

    class Frozen(Net):
        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self(torch.roll(x, next(numbers) % 5, 1)), y)

    bench = captured(Frozen)
    together, tasks = CohortTrainer(bench.trainer), members(bench, sizes=(20, 20), epochs=1)
    together.train(tasks)
    assert bench.trainer.capture.counted()["eager"][0].startswith(
        "batches of clients: captured steps give other results"
    )


def test_a_captured_step_of_a_batch_has_one_launch_and_waits_never(emulated_cuda: Emulated):
    bench = captured(Logs)
    together, tasks = CohortTrainer(bench.trainer), members(bench, sizes=(20, 20, 20), epochs=1, data=samples())
    for _ in range(3):
        together.train(tasks)
    before = emulated_cuda.counts["waits"]
    [graphs] = together._graphs.values()
    replays = graphs._num_replays
    together.train(tasks)
    assert graphs._num_replays - replays == 4
    assert emulated_cuda.counts["waits"] - before == len(tasks)  # for the values that each task brings, none for a step
    assert [together.fitting(num) for num in (1, 2, 3, 5, 7, 100, 256)] == [1, 2, 3, 4, 6, 96, 256]


def test_a_rate_that_falls_with_each_epoch_of_clients_of_one_length():
    for make in (Scheduled, Seldom):
        bench = Bench.of(make)
        check(bench, members(bench, epochs=3, sizes=(22, 21, 22)))


@pytest.mark.parametrize("most", [1e-3, 0.7, 1e3])
def test_gradients_are_clipped_by_the_norm_of_each_client(most):
    bench = Bench.of(Odd, gradient_clip_val=most, local=Local(prox=0.1))
    check(bench, members(bench, epochs=2))


@pytest.mark.parametrize("sends", ["values", "delta"])
@pytest.mark.parametrize("prox", [0.0, 0.3])
def test_submodels_with_prox_and_scaler_and_a_masked_loss_are_trained_as_alone(prox, sends):
    bench = Bench.of(Dropping, local=Local(prox=prox, rescale=True, masked=True), sends=sends)
    axis = next(iter(bench.submodels.axes))
    tasks = members(bench, Spec.select({axis: (1, 4, 6)}), steps=4, sizes=(22, 2, 3, 13))
    assert any(len(task.data.classes()) < 3 for task in tasks)
    check(bench, tasks)


def test_clients_measure_their_own_test_part_with_what_they_have_learnt():
    class Measured(Dropping):
        def validation_step(self, batch, index):
            x, y = batch
            return {"accuracy": (self(x).argmax(1) == y).float().mean(), "drawn": torch.rand(())}

    bench = Bench.of(Measured)
    tasks = members(bench, epochs=1)
    for task in tasks:
        task.data.test = ClientData(samples(40), torch.arange(9), BATCH_SIZE)
    check(bench, tasks)


@pytest.mark.parametrize("ahead", [1, 1 << 24])
def test_clients_of_equally_many_samples_are_gathered_a_few_steps_at_a_time(monkeypatch, ahead):
    """Two epochs of 22 samples, in batches of 5 and a last one of 2; and 7 of the 10 steps."""
    monkeypatch.setattr(mode, "_AHEAD_BYTES", ahead)
    for length in ({"epochs": 2}, {"steps": 7}):
        bench = Bench.of(Dropping)
        for sends in ("values", "delta"):
            bench.trainer.sends = sends
            check(bench, members(bench, sizes=(22, 22, 22), data=samples(40), **length))


def test_data_read_one_by_one_are_the_same_batches():
    bench = Bench.of(Mapped, data=OneByOne())
    check(bench, members(bench, data=OneByOne(), epochs=1))


@pytest.mark.parametrize(("num", "change"), [(2000, 1.0), (4, 1e-9)])
def test_arrays_in_batches_that_print_alike_are_not_taken_for_equal(num, change):
    """Of an array NumPy prints eight digits, and of more than 1,000 entries the first and last three."""

    class Weighed(Mapped):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * float(1e6 * (batch["w"][num // 2] - 0.5))

    def collating(client):
        weights = np.full(num, 0.5 + 1e-6)
        weights[num // 2] += client * change
        return lambda given: {**{key: torch.stack([one[key] for one in given]) for key in "xy"}, "w": weights}

    bench, data = Bench.of(Weighed, data=OneByOne()), OneByOne()
    tasks = [
        task._replace(data=ClientData(data, torch.arange(7), BATCH_SIZE, collating(task.assignment.client)))
        for task in members(bench, sizes=(7, 7), data=data, epochs=1)
    ]
    check(bench, tasks)


def test_what_is_logged_counts_by_the_samples_of_a_batch_whatever_its_tensors_show():
    """Clients of 22, 7 and 13 samples: the last batches are of 2 and 3, all tensors of one shape."""

    def collate(given):
        return {"x": torch.stack([one["x"] for one in given]).mean(0, keepdim=True), "y": given[0]["y"].view(1)}

    class Means(Mapped):
        def training_step(self, batch, index):
            self.log("step", float(index))
            return super().training_step(batch, index)

    bench, data = Bench.of(Means, data=OneByOne()), OneByOne()
    tasks = [
        task._replace(data=ClientData(data, torch.arange(size), BATCH_SIZE, collate))
        for task, size in zip(members(bench, sizes=(22, 7, 13), data=data, epochs=1), (22, 7, 13), strict=True)
    ]
    check(bench, tasks)
    steps = [bench.trainer.run(*task).metrics["step"] for task in tasks]
    assert steps == [(5 * (0 + 1 + 2 + 3) + 2 * 4) / 22, 2 * 1 / 7, (5 * 1 + 3 * 2) / 13]


REFUSED = {
    Numpy: "draws random numbers without torch",
    Counting: "changes the attribute calls",
    Remembering: "changes the attribute seen",
    Replacing: "replaces the tensor mean by another",
    Scheduled: "a learning rate scheduler steps once an epoch, but clients' epochs have different lengths",
    Rprop: "its optimizer is Rprop",
    Hooked: "the module overrides on_train_batch_end",
    Transferred: "the module overrides hooks that transfer a batch",
    Attached: "the training step reads self.trainer.global_step",
    Estimating: "configure_optimizers reads self.trainer.estimated_stepping_batches",
    Monitored: "a learning rate scheduler goes by a metric",
    Skipping: "a loss that is not a tensor",
    LogsMetric: "logs 'mean', an object of Mean: log a number to train",
    LogsProduct: "logs 'one' with reduce_fx 'prod': give mean, sum, min, max to train",
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_is_not_understood_is_refused(make):
    bench = Bench.of(make)
    with pytest.raises(Unstackable, match=REFUSED[make]):
        CohortTrainer(bench.trainer).train(members(bench, epochs=1))


def test_clients_that_part_are_refused_and_data_that_draw_as_well():
    bench = Bench.of(Parting)
    with pytest.raises(Parted, match="converts a tensor to a Python number"):
        CohortTrainer(bench.trainer).train(members(bench, epochs=3))
    bench = Bench.of(Mapped, data=OneByOne())
    with pytest.raises(Unstackable, match="draws random numbers without torch"):
        CohortTrainer(bench.trainer).train(members(bench, data=OneByOne(noisy=True), epochs=1))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"accumulate_grad_batches": 2}, "fabric.accumulate_grad_batches is 2"),
        ({"precision": "bf16-mixed"}, "fabric.precision is bf16-mixed"),
    ],
)
def test_settings_that_are_for_the_loop_are_named(options, reason):
    assert CohortTrainer(Bench.of(Net, **options).trainer).refusal() == reason


def test_a_method_with_steps_of_its_own_is_for_the_loop():
    class Own(Local):
        def hook(self, task):
            return super().hook(task)

    class Bundled(Local):
        up = ("scores",)

    for local in (Own(), Bundled()):
        reason = CohortTrainer(Bench.of(Net, local=local).trainer).refusal()
        assert reason == "the algorithm has steps of its own"


def test_training_may_be_long_and_its_batches_are_gathered_piece_by_piece(monkeypatch):
    from raafl.local.stacked import mode

    # two batches of five samples for each of five clients
    monkeypatch.setattr(mode, "_AHEAD_BYTES", 5 * 28 * 5 * 2 + 1)
    bench = Bench.of(Net, training=Training(num_epochs=4))
    check(bench, members(bench))


def test_a_tensor_data_set_of_any_form_is_stacked():
    x, y = samples().tensors
    bench = Bench.of(Net)
    data = TensorDataset(x.double().float(), y)
    check(bench, members(bench, data=data, sizes=(5, 5), steps=1))
