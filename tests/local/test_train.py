"""A task against the obvious loop in plain torch, and its purity: nothing but the assignment and the data decides."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from raafl.core.algorithm import Local, Training
from raafl.errors import BadInput
from raafl.local.context import Stopped, TaskContext
from raafl.submodel import Spec
from tests.local.bench import NUM_SAMPLES, Bench, Net, Norm, assignment, batches, plain_loop, same, samples

ROOT = Path(__file__).parents[2]
HALF = Spec.select({"fc1": range(4)})


class Dropping(Net):
    dropout = 0.5


class Adam(Net):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05, betas=(0.8, 0.9))


class Counting(Net):
    """Its optimizer counts steps and remembers rates in its parameter group, as some do for the correction of a bias."""

    def configure_optimizers(self):
        class Counter(torch.optim.SGD):
            def step(self, closure=None):
                for group in self.param_groups:
                    group["step"] = group.get("step", 0) + 1
                    group["lr"] = group["rates"][0] / group["step"]
                    group["rates"][0] *= 0.9
                return super().step(closure)

        return Counter([{"params": list(self.parameters()), "rates": [0.1]}], lr=0.1)


class Ageing(torch.optim.SGD):
    """Counts its steps in an attribute, as many optimizers of scripts do."""

    num = 0

    def step(self, closure=None):
        self.num += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.num
        return super().step(closure)


class Aged(Net):
    def configure_optimizers(self):
        return Ageing(self.parameters(), lr=0.1)


class Slow(torch.optim.Optimizer):
    """Wraps another optimizer, and copies the parameters when it is made, as Lookahead does (Zhang et al. 2019)."""

    def __init__(self, inner):
        self.inner, self.num = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.num += 1
        if self.num % 3 == 0:
            fast = [parameter for group in self.param_groups for parameter in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                parameter.copy_(slow.add_(parameter - slow, alpha=0.5))


class Wrapped(Net):
    def configure_optimizers(self):
        return Slow(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))


class HeadOnly(Net):
    """The body has gradients, which nobody steps or clears."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.fc2.parameters(), lr=0.1)


class Restless(Net):
    """Replaces its buffer instead of changing it in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def training_step(self, batch, index):
        self.mean = 0.5 * self.mean + batch[0].mean(0)
        return super().training_step((batch[0] - self.mean, batch[1]), index)


class Drawing(Net):
    """Draws from Python's and numpy's generators too, as augmentations do."""

    def training_step(self, batch, index):
        return super().training_step(batch, index) * (random.random() + np.random.rand())


def axis_of(bench):
    return next(iter(bench.submodels.axes))


# ---- what a task computes ----


@pytest.mark.parametrize("make", [Net, Adam, Norm, Dropping, Restless, Drawing, Counting, Aged, Wrapped])
@pytest.mark.parametrize("much", [{"epochs": 2}, {"steps": 7}, {"steps": 5}, {"steps": 1}])
def test_a_task_is_the_plain_loop_bit_for_bit(make, much):
    bench, task = Bench.of(make), assignment(**much)
    update, tensors = bench.run(task)
    assert same(tensors, plain_loop(bench, task))
    assert update.num_steps == (10 if "epochs" in much else much["steps"])
    assert update.num_samples == NUM_SAMPLES
    assert update.refusal is None


def test_the_runs_own_setting_holds_unless_the_assignment_says_otherwise():
    assert Bench.of(Net, training=Training(num_epochs=3)).run(assignment())[0].num_steps == 15
    assert Bench.of(Net, training=Training(num_epochs=3)).run(assignment(epochs=1))[0].num_steps == 5
    assert Bench.of(Net, training=Training(num_epochs=3, num_steps=4)).run(assignment())[0].num_steps == 4
    assert Bench.of(Net, training=Training(num_epochs=None, num_steps=4)).run(assignment(epochs=2))[0].num_steps == 10


@pytest.mark.parametrize("prox", [0.1, 2.0])
def test_the_proximal_pull_is_the_gradient_of_the_penalty(prox):
    bench, task = Bench.of(Net, local=Local(prox=prox)), assignment(epochs=2)
    _, tensors = bench.run(task)
    expected = plain_loop(bench, task, prox=prox)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    free = plain_loop(bench, task)
    assert not torch.allclose(tensors["fc1.weight"], free["fc1.weight"], atol=1e-3)


def test_a_pull_of_zero_is_none_bit_for_bit():
    bench, task = Bench.of(Net, local=Local(prox=0.0)), assignment(epochs=2)
    assert same(bench.run(task)[1], plain_loop(bench, task))


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_gradients_are_clipped_by_their_common_norm(clip):
    bench, task = Bench.of(Net, gradient_clip_val=clip), assignment(epochs=1)
    _, tensors = bench.run(task)
    assert same(tensors, plain_loop(bench, task, clip=clip))
    assert same(tensors, plain_loop(bench, task)) == (clip > 1)


# of an epoch's five batches, the third and the fifth end a step; so does the last batch of a task
@pytest.mark.parametrize(
    ("much", "num_steps"), [({"epochs": 2}, 4), ({"steps": 8}, 3), ({"steps": 7}, 3), ({"steps": 2}, 1)]
)
def test_accumulated_batches_make_one_step_and_an_epoch_ends_a_step(much, num_steps):
    bench, task = Bench.of(Net, accumulate_grad_batches=3), assignment(**much)
    update, tensors = bench.run(task)
    assert same(tensors, plain_loop(bench, task, accumulate=3))
    assert update.num_steps == num_steps


def test_a_task_given_up_between_two_batches_of_a_step_leaves_no_gradient():
    bench, task = Bench.of(Net, accumulate_grad_batches=3), assignment(steps=6)
    wanted = bench.run(task)[1]

    class AtTheSecondBatch(threading.Event):
        looks = 0

        def is_set(self):
            self.looks += 1
            return self.looks == 2

    with pytest.raises(Stopped):
        bench.run(task, TaskContext(AtTheSecondBatch()))
    assert same(bench.run(task)[1], wanted)


def scheduled(form, interval):
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            config = {"scheduler": scheduler, "interval": interval}
            if form == "dict":
                return {"optimizer": optimizer, "lr_scheduler": config}
            return [optimizer], [scheduler if interval == "epoch" else config]

    return Scheduled


@pytest.mark.parametrize("form", ["dict", "lists"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedulers_step_by_step_or_by_epoch_and_start_anew_with_each_task(form, interval):
    bench = Bench.of(scheduled(form, interval))
    first = bench.run(assignment(epochs=2))[1]
    second = bench.run(assignment(epochs=2))[1]
    assert first.fingerprint() == second.fingerprint()
    module = Net()
    module.load_state_dict(bench.module.state_dict())
    rate = 0.4
    for number, (x, y) in enumerate(batches(11, epochs=2), start=1):
        grads = torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(module.parameters(), grads, strict=True):
                parameter.add_(grad, alpha=-rate)
        if interval == "step" or number == 5:
            rate /= 2
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_a_delta_is_what_was_trained_minus_what_was_received():
    task = assignment(epochs=1)
    values, delta = Bench.of(Norm), Bench.of(Norm, sends="delta")
    received = delta.values.clone()
    trained, difference = values.run(task)[1], delta.run(task)[1]
    for name, tensor in difference.items():
        assert torch.equal(tensor, trained[name] - received[name])
    assert delta.values.fingerprint() == received.fingerprint()


def test_what_was_received_stays_as_it_is():
    bench = Bench.of(Restless)
    received = bench.submodels.plan(Spec(), "present").gather(bench.values)
    before = received.fingerprint()
    bench.trainer.run(assignment(epochs=1), received, bench.data)
    assert received.fingerprint() == before


def test_frozen_parameters_do_not_move_and_do_not_come_back():
    class Frozen(Net):
        def __init__(self):
            super().__init__()
            self.fc1.requires_grad_(False)

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    bench = Bench.of(Frozen)
    _, tensors = bench.run(assignment(epochs=1))
    assert [name for name, _ in tensors.items()] == ["fc2.weight", "fc2.bias"]
    built = next(iter(bench.trainer._built.values()))
    assert torch.equal(built.module.fc1.weight, bench.module.fc1.weight)


def test_a_hook_of_an_optimizer_that_counts_steps_begins_anew_in_each_task():
    class Counting(Net):
        def configure_optimizers(self):
            made, rates = torch.optim.SGD(self.parameters(), lr=0.1), iter([0.1, 0.05, 0.02, 0.01, 0.005, 0.002])
            made.register_step_post_hook(lambda *_: made.param_groups[0].update(lr=next(rates)))
            return made

    bench = Bench.of(Counting)
    first, second = (bench.run(assignment(epochs=1))[1].fingerprint() for _ in range(2))
    assert first == second


class ByData(Norm):
    """Bounds a weight, and moves a buffer, by setting `data` or in place; the second of these leaves both where they are."""

    sets = True
    fails = False

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def training_step(self, batch, index):
        x, y = batch
        if self.fails and index == 2:
            raise RuntimeError("in the middle")
        for tensor, new in (
            (self.fc2.weight, self.fc2.weight.clamp(-0.2, 0.2)),
            (self.mean, 0.9 * self.mean + x.mean(0)),
        ):
            if self.sets:
                tensor.data = new.data
            else:
                tensor.data.copy_(new)
        return F.cross_entropy(self(x - self.mean), y)


def test_what_a_step_gives_other_memory_is_sent_and_is_no_part_of_the_next_task():
    found = [Bench.of(type("Made", (ByData,), {"sets": sets})) for sets in (True, False)]
    (sent, again), (expected, _) = ([bench.run(assignment(epochs=1))[1] for _ in range(2)] for bench in found)
    assert same(sent, dict(expected.items())) and sent.fingerprint() == again.fingerprint()
    assert sent["fc2.weight"].abs().max() > 0 and sent["mean"].abs().max() > 0
    kind = type(found[0].module)
    kind.fails = True
    with pytest.raises(RuntimeError, match="in the middle"):
        found[0].run(assignment(epochs=1))
    kind.fails = False
    assert found[0].run(assignment(epochs=1))[1].fingerprint() == sent.fingerprint()


def test_running_statistics_come_back_and_the_count_of_batches_does_not():
    bench, task = Bench.of(Norm), assignment(epochs=1)
    _, tensors = bench.run(task)
    assert {"norm.running_mean", "norm.running_var"} <= {name for name, _ in tensors.items()}
    assert "norm.num_batches_tracked" not in tensors
    assert same(tensors, plain_loop(bench, task))


def test_only_what_the_optimizer_steps_is_clipped_as_in_lightning():
    bench, task = Bench.of(HeadOnly, gradient_clip_val=0.5), assignment(epochs=3)
    assert same(bench.run(task)[1], plain_loop(bench, task, clip=0.5))


def test_a_skipped_epochs_gradient_is_dropped_as_in_lightning():
    """Each epoch ends at its fourth batch, in the middle of a step of two batches."""

    class Skipping(Net):
        def on_train_batch_start(self, batch, index):
            return -1 if index == 3 else None

    bench, task = Bench.of(Skipping, accumulate_grad_batches=2), assignment(epochs=3)
    torch.manual_seed(3)
    module = Net()
    module.load_state_dict(bench.module.state_dict())
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(batches(task.seed, 3)):
        if number % 5 < 2:
            (module.training_step(batch, number) / 2).backward()
        if number % 5 == 1:
            optimizer.step()
            optimizer.zero_grad()
    assert same(bench.run(task)[1], module.state_dict())


def test_a_group_that_a_hook_adds_is_gone_in_the_next_task():
    class Unfreezing(HeadOnly):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.optimizers().add_param_group({"params": list(self.fc1.parameters()), "lr": 0.01})

    bench, task = Bench.of(Unfreezing), assignment(epochs=2)
    first = bench.run(task)[1].fingerprint()
    assert [bench.run(task)[1].fingerprint() for _ in range(2)] == [first, first]


# ---- purity ----


@pytest.mark.parametrize("schedules", [False, True])
def test_what_configure_optimizers_draws_depends_on_the_task_alone(schedules):
    class Drawn(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1 * random.random() + 0.1 * torch.rand(()).item())
            return {
                "optimizer": optimizer,
                **({"lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)} if schedules else {}),
            }

    bench, task = Bench.of(Drawn), assignment(epochs=1)
    first = bench.run(task)[1].fingerprint()
    bench.run(assignment(seed=99, epochs=1))
    assert bench.run(task)[1].fingerprint() == first


@pytest.mark.parametrize("make", [Net, Adam, Norm, Dropping, Restless, Drawing, Counting, Aged, Wrapped])
@pytest.mark.parametrize("max_built", [1, 4])
def test_a_result_does_not_depend_on_what_was_trained_before(make, max_built):
    task = assignment(epochs=1)
    fresh = Bench.of(make).run(task)[1].fingerprint()
    bench = Bench.of(make, max_built=max_built)
    torch.rand(5), random.random(), np.random.rand()
    bench.run(assignment(seed=99, epochs=3))
    assert bench.run(task)[1].fingerprint() == fresh
    part = Spec.select({axis_of(bench): range(1, 4)})
    bench.run(assignment(spec=part, seed=5, epochs=1))
    assert bench.run(task)[1].fingerprint() == fresh


def test_a_part_is_trained_the_same_whatever_came_before():
    bench = Bench.of(Dropping, max_built=2)
    parts = [Spec.select({axis_of(bench): range(i, i + 3)}) for i in range(4)]
    alone = [Bench.of(Dropping).run(assignment(spec=part, epochs=1))[1].fingerprint() for part in parts]
    again = [bench.run(assignment(spec=part, epochs=1))[1].fingerprint() for part in (*parts, *reversed(parts))]
    assert again == [*alone, *reversed(alone)]
    assert len(set(alone)) == 4


@pytest.mark.parametrize("make", [Dropping, Drawing])
def test_another_seed_gives_another_result(make):
    bench = Bench.of(make)
    prints = {bench.run(assignment(seed=seed, epochs=1))[1].fingerprint() for seed in (1, 2, 2**62 + 3)}
    assert len(prints) == 3


def test_a_client_with_a_data_set_of_its_own_draws_from_the_tasks_seed():
    class Noisy(Dataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return torch.randn(6) + random.random(), int(np.random.randint(3))

    bench = Bench.of(Net, data=Noisy())
    prints = [bench.run(assignment(epochs=2))[1].fingerprint() for _ in range(2)]
    assert prints[0] == prints[1]


@pytest.mark.long("tests/data/test_partition.py::test_another_process_gives_the_same_parts")
@pytest.mark.slow("a process starts from nothing")
@pytest.mark.timeout(120)
def test_another_process_gives_the_same_bits():
    script = """
        from raafl.lean_import import import_lightning, quick_imports
        with quick_imports():
            import_lightning()
            from tests.local.bench import Bench, Net, assignment
        bench = Bench.of(type("Dropping", (Net,), {"dropout": 0.5}))
        print(bench.run(assignment(epochs=2))[1].fingerprint())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    there = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True).stdout.split()[
        -1
    ]
    assert Bench.of(Dropping).run(assignment(epochs=2))[1].fingerprint() == there


# ---- what is reported ----


def test_the_loss_is_the_mean_over_the_batches_and_logged_values_are_over_samples():
    class Logging(Net):
        def training_step(self, batch, index):
            self.log("index", float(index), prog_bar=True)
            self.log_dict({"share": torch.tensor(0.25), "rows": len(batch[0])})
            return {"loss": super().training_step(batch, index) * 0 + index, "more": 1}

    update, _ = Bench.of(Logging).run(assignment(epochs=2))
    # indices 0..4 twice, as in Lightning; rows 5, 5, 5, 5, 2 twice
    index, rows = 2 * (5 * (0 + 1 + 2 + 3) + 2 * 4), 2 * (4 * 5 * 5 + 2 * 2)
    assert update.metrics == {"loss": 2.0, "index": index / 44, "share": 0.25, "rows": rows / 44}


def test_what_a_task_logged_is_not_counted_again_in_the_next():
    class Logging(Net):
        def training_step(self, batch, index):
            self.log("steps", torch.tensor(float(index)))
            return super().training_step(batch, index)

    bench = Bench.of(Logging)
    assert bench.run(assignment(steps=4))[0].metrics["steps"] == 1.5
    assert bench.run(assignment(steps=2))[0].metrics["steps"] == 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_a_number_is_refused_and_leaves_no_trace_in_the_next_task(bad):
    class Sometimes(Net):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * (bad if self.sick else 1.0)

    Sometimes.sick = False
    fresh = Bench.of(Sometimes).run(assignment(epochs=1))[1].fingerprint()
    bench = Bench.of(Sometimes)
    Sometimes.sick = True
    assert bench.run(assignment(epochs=1))[0].refusal == "non-finite"
    Sometimes.sick = False
    update, tensors = bench.run(assignment(epochs=1))
    assert (update.refusal, tensors.fingerprint()) == (None, fresh)


# ---- what cannot be trained ----


def two_optimizers(self):
    return [torch.optim.SGD(self.fc1.parameters(), 0.1), torch.optim.SGD(self.fc2.parameters(), 0.1)]


@pytest.mark.parametrize(
    ("answer", "given"),
    [(two_optimizers, "2 optimizers"), (lambda self: None, "None"), (lambda self: [], "None"), (lambda self: 3, "3")],
)
def test_anything_but_one_optimizer_is_refused_with_the_classes_name(answer, given):
    make = type("Odd", (Net,), {"configure_optimizers": answer})
    with pytest.raises(BadInput, match=rf"Odd\.configure_optimizers gives {given}, but"):
        Bench.of(make).run(assignment(epochs=1))


def test_the_reference_draws_as_the_client_does():
    ours = [x for x, _ in batches(5, steps=6)]
    generator = torch.Generator().manual_seed(5)
    theirs = [x for (x, _), _ in Bench.of(Net).data.batches(generator, num_steps=6)]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(samples()) == NUM_SAMPLES


def test_no_process_asks_mpi_who_it_is(monkeypatch):
    """Lightning would: its import of mpi4py starts a daemon for each client."""
    from lightning.fabric.connector import MPIEnvironment

    asked = []
    monkeypatch.setattr(MPIEnvironment, "detect", lambda: asked.append("MPI") or False)
    Bench.of(Norm).run(assignment())
    assert asked == []
