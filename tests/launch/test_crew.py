"""Several processes that train one client, here as threads: together they make the steps of one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raafl.algorithms import ALGORITHMS
from raafl.core.algorithm import Hook, Local
from raafl.errors import BadInput
from raafl.local import client_group
from raafl.local.client_group import ClientProcesses, Share
from raafl.local.context import Stopped, TaskContext
from raafl.submodel import FULL, Spec
from tests.local.bench import Bench, Net, assignment

HALF = Spec.select({"fc1": range(4)})
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
"""Float32 sums in another order differ by some 1e-7 of their size, and the ten to twenty steps of a task let that grow."""


class Sums:
    """Sums over threads, as a process group does over processes."""

    def __init__(self, size):
        self.barrier, self.tensors = threading.Barrier(size), [None] * size

    def of(self, rank):
        def total(tensor):
            self.tensors[rank] = tensor
            self.barrier.wait(60)
            result = sum(tensor.clone() for tensor in self.tensors)
            self.barrier.wait(60)
            tensor.copy_(result)
            return lambda: None

        return total


def together(size, make, task, stop=None):
    """What each of ``size`` processes comes to: its update, or what it raised. All have the values of the first."""
    benches, sums = [make() for _ in range(size)], Sums(size)
    for bench in benches:
        bench.submodels.plan(task.spec, "present")  # torch.fx traces one at a time in a process

    def run(rank):
        bench = benches[rank]
        context = TaskContext(threading.Event(), process_group=ClientProcesses(rank, size, sums.of(rank)))
        if rank == stop:
            context.stop.set()
        try:
            return bench.run(task, context)[0]
        except (BadInput, Stopped) as error:
            return error
        except BaseException:
            sums.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def alone(make, task):
    return make().run(task)[0]


class Adam(Net):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Twice(Local):
    """Makes two backward passes for a step."""

    def hook(self, task):
        class Parts(Hook):
            def backward(self, loss):
                (loss / 4).backward(retain_graph=True)
                (loss * 3 / 4).backward()

        return Parts(task)


class Sparse(Net):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 6, sparse=True)

    def forward(self, x):
        return super().forward(x + self.table(torch.zeros(len(x), dtype=torch.int64)))


class Partly(Net):
    """Uses one of its layers in some batches only: in the others it has no gradient, and momentum must not move it."""

    def training_step(self, batch, index):
        x, y = batch
        hidden = torch.relu(self.fc1(x))
        return F.cross_entropy(self.fc2(hidden if index % 2 else hidden.detach()), y)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "net, spec, options",
    [
        (Net, FULL, {}),
        (Net, HALF, {"local": Local(prox=0.3), "sends": "delta"}),
        (Net, HALF, {"local": Local(masked=True, rescale=True), "gradient_clip_val": 0.5}),
        (Adam, FULL, {"accumulate_grad_batches": 2}),
        (Partly, FULL, {}),
        (Net, FULL, {"local": Twice()}),
        (Sparse, FULL, {}),
    ],
    ids=["plain", "prox", "masked", "accumulate", "partly", "twice", "sparse"],
)
def test_a_task_is_that_of_one_process(net, spec, options, size):
    """Batches of 5, 5, 5, 5 and 2 rows: no two shares are alike, and of three processes one has nothing of the last."""

    def make():
        return Bench.of(net, **options)

    task = assignment(spec, epochs=4)
    expected, updates = alone(make, task), together(size, make, task)
    before = make()
    start = before.submodels.plan(spec, "present").gather(before.values)
    for entry in expected.tensors.layout.entries:
        wanted = expected.tensors[entry.name]
        torch.testing.assert_close(updates[0].tensors[entry.name], wanted, **CLOSE)
        moved = wanted if options.get("sends") == "delta" else wanted - start[entry.name]
        assert moved.abs().max() > 1000 * CLOSE["atol"]
    assert (updates[0].num_steps, updates[0].num_samples) == (expected.num_steps, expected.num_samples)
    assert [update.metrics["loss"] for update in updates] == pytest.approx([expected.metrics["loss"]] * size, rel=1e-5)


class Logging(Net):
    """Numbers of the rows of each process: a mean, a sum and extremes."""

    def training_step(self, batch, index):
        x, y = batch
        self.log("label", y.double().mean())
        self.log("rows", float(len(y)), reduce_fx="sum")
        self.log("least", x.min(), reduce_fx="min")
        self.log_dict({"most": x.max()}, reduce_fx="max")
        return super().training_step(batch, index)


def test_what_is_logged_is_of_the_rows_of_all_processes():
    """Of 22 rows in batches of 5, 5, 5, 5 and 2, of which two processes have 13 and 9."""
    task = assignment(epochs=1)
    expected, (leader, _) = alone(lambda: Bench.of(Logging), task), together(2, lambda: Bench.of(Logging), task)
    wanted = {name: value for name, value in expected.metrics.items() if name != "loss"}
    assert {name: leader.metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)
    assert wanted["rows"] == 22


def test_shares_are_disjoint_and_weighed_by_their_rows():
    bench = Bench.of(Net)
    whole = [batch for batch, _ in bench.data.batches(torch.Generator().manual_seed(1), num_epochs=1)]
    shares = [Share(bench.data, rank, 3) for rank in range(3)]
    found = [
        [
            (batch[0], share.weight, num)
            for (batch, num) in share.batches(torch.Generator().manual_seed(1), num_epochs=1)
        ]
        for share in shares
    ]
    for number, (x, _) in enumerate(whole):
        rows = [one[number][0] for one in found]
        weights, sizes = ([one[number][place] for one in found] for place in (1, 2))
        assert sizes == [len(x[rank::3]) for rank in range(3)]
        assert weights == pytest.approx([len(x[rank::3]) * 3 / len(x) for rank in range(3)])
        assert all(torch.equal(mine, x[rank::3]) for rank, mine in enumerate(rows) if weights[rank])
        assert [len(mine) for mine in rows] == [max(len(x[rank::3]), 1) for rank in range(3)]


def test_what_is_drawn_beside_the_order_of_the_data_differs():
    crews = [ClientProcesses(rank, 3, lambda tensor: None) for rank in range(3)]
    assert crews[0].seed(11) == 11
    assert len({process_group.seed(11) for process_group in crews}) == 3


def test_gradients_are_summed_while_the_backward_pass_goes_on(monkeypatch):
    """In buckets of one dtype, the last layer's first; what has no gradient counts as 0."""
    monkeypatch.setattr(client_group, "BUCKET_BYTES", 4 * (6 * 5 + 6))  # of the second layer
    net, events = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 5), nn.Linear(7, 7)), []

    def begin_sum(tensor):
        events.append(tensor.numel())
        return lambda: events.append("waited")

    process_group = ClientProcesses(0, 2, begin_sum)
    net[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    with process_group.summing(net):
        net[:3](torch.ones(2, 4)).sum().backward()
    assert events == ["first layer"]  # the unused layer's bucket comes before all others, and holds them up
    events.clear()
    assert not process_group.average(stop=False)
    assert events == [
        7,
        49,
        35,
        36,
        25,
        10,
        *["waited"] * 6,
    ]  # the last tells who has which gradient, and who is to stop
    assert net[3].weight.grad is None  # nobody has one
    net[3].requires_grad_(False)
    net.zero_grad()
    events.clear()
    with process_group.summing(net):
        net[:3](torch.ones(2, 4)).sum().backward()
    assert events == [35, 36, "first layer", 25]


def test_all_stop_when_one_is_to_stop():
    assert [type(one) for one in together(2, lambda: Bench.of(Net), assignment(epochs=1), stop=0)] == [Stopped, Stopped]


class OwnWay(Local):
    """Trains something beside the module, as a hook with an optimiser of its own does."""

    def hook(self, task):
        class Own(Hook):
            def update(self):
                pass

        return Own(task)


class Marked(Net):
    """Writes to a parameter what its rows say."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.fc1.bias.data.copy_(torch.full((8,), batch[0].mean().item()))
        return loss


@pytest.mark.parametrize(
    "net, options, complaint",
    [
        (Net, {"local": OwnWay()}, "makes no step with the gradients of the module"),
        (Marked, {}, "comes to other values in each process"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_every_process(net, options, complaint):
    for error in together(2, lambda: Bench.of(net, **options), assignment(epochs=1)):
        assert isinstance(error, BadInput)
        assert complaint in str(error)
        assert "join with one process, without torchrun" in str(error)


def test_algorithms_that_cannot_span_are_those_that_say_so():
    """One that joins them has to be refused, or to be averaged."""
    refused = {name for name in ALGORITHMS if not ALGORITHMS[name]().local.traits.supports_data_parallel}
    assert refused == {"fed_mezo", "split_fed"}
