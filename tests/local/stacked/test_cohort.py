"""Tasks trained as one: each client's values, metrics and draws are what it has alone, to the bit, or the cohort is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from raafl.core.algorithm import Local, Training
from raafl.data.federated import ClientData
from raafl.local.rng import generators, same_generators
from raafl.local.stacked import CohortTrainer, Member, Parted, Unstackable
from raafl.submodel import FULL, Spec
from tests.local.bench import BATCH_SIZE, Bench, Net, assignment, samples

SIZES = (22, 7, 22, 13, 5)


class Dropping(Net):
    dropout = 0.3


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8))


class Adam(Net):
    kind: Any = torch.optim.Adam

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.02, weight_decay=0.01)


ELEMENTWISE = [
    type(kind.__name__, (Adam,), {"kind": kind})
    for kind in (
        torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
        torch.optim.NAdam, torch.optim.RAdam,
    )
]  # fmt: skip


class Groups(Net):
    def configure_optimizers(self):
        slow = {"params": self.fc2.parameters(), "lr": 0.01, "momentum": 0.0}
        return torch.optim.SGD([slow, {"params": self.fc1.parameters()}], lr=0.1, momentum=0.9, nesterov=True)


class Odd(Net):
    """Tensors of a client that begin at no multiple of 16 bytes, one number, and one that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3))
        self.fc1, self.fc2 = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.scale * super().forward(x)


class Part(LightningModule):
    """Logs by itself."""

    def forward(self, x):
        self.log("inside", x.mean())
        return x


class Logging(Net):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def training_step(self, batch, index):
        x, y = batch
        logits = self.part(self(x))
        loss = F.cross_entropy(logits, y)
        self.log("hits", (logits.argmax(1) == y).float().mean(), batch_size=len(y))
        self.log_dict({"largest": logits.max(), "index": float(index)}, reduce_fx="max")
        self.log("step", float(index))
        self.log("half", logits.mean().bfloat16())
        return {"loss": loss}


class Losses(Net):
    """Attention by hand, an embedding, and losses that are means and sums."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 8, padding_idx=0)
        self.conv = nn.Conv1d(1, 2, 3)

    def training_step(self, batch, index):
        x, y = batch
        hidden = torch.relu(self.fc1(x)) + self.table(y)
        hidden = torch.softmax(hidden @ hidden.t() / 8, -1) @ hidden
        logits = self.fc2(hidden) + self.conv(x.unsqueeze(1)).mean()
        return (
            F.cross_entropy(logits, y, label_smoothing=0.1)
            + F.mse_loss(logits, torch.zeros_like(logits))
            + (hidden**2).sum()
        )


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.LSTM(1, 8, batch_first=True)

    def forward(self, x):
        return self.fc2(self.fc1(x.unsqueeze(-1))[0][:, -1])


class Noisy(Net):
    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x + 0.1 * torch.randn_like(x) * torch.rand(1)), y)


class Branching(Net):
    """Goes another way where the loss is small."""

    limit = -1.0

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss if loss > self.limit else 2 * loss


class Parting(Branching):
    limit = 1.1


class Numpy(Net):
    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x * float(np.random.uniform(0.9, 1.1))), y)


class Counting(Net):
    calls = 0

    def training_step(self, batch, index):
        self.calls += 1
        return super().training_step(batch, index) / self.calls


class Remembering(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append(len(batch))
        return super().training_step(batch, index)


class Replacing(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def training_step(self, batch, index):
        self.mean = 0.9 * self.mean + batch[0].mean(0)
        return super().training_step(batch, index)


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Cycled(Net):
    """Another rate and momentum after each step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class Hooked(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Transferred(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class Attached(Net):
    def training_step(self, batch, index):
        return super().training_step(batch, index) / (1 + self.global_step)


class Estimating(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)


class Monitored(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}


class Skipping(Net):
    def training_step(self, batch, index):
        return None if index == 1 else super().training_step(batch, index)


class Seldom(Scheduled):
    """A scheduler that steps every second batch of an epoch."""

    def configure_optimizers(self):
        optimizer = Net.configure_optimizers(self)
        falls = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step", "frequency": 2}}


class Rprop(Adam):
    kind = staticmethod(lambda parameters, lr, weight_decay: torch.optim.Rprop(parameters, lr))


class OneByOne(Dataset):
    """The same samples without the fast path, in a dict."""

    def __init__(self, noisy=False):
        self.noisy = noisy
        self.tensors = samples().tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, row):
        x, y = (tensor[row] for tensor in self.tensors)
        return {"x": x + 0.1 * torch.randn(6) if self.noisy else x, "y": y}


class Mapped(Net):
    def training_step(self, batch, index):
        return super().training_step((batch["x"], batch["y"]), index)


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
    together = CohortTrainer(bench.trainer)
    assert together.refusal() is None
    trained = together.train(tasks)
    for task in reversed(tasks):
        alone = bench.trainer.run(*task)
        alone.tensors = alone.tensors.clone()
        drawn = generators()
        found = trained.update(task.assignment.id, draws=True)
        assert found.tensors.fingerprint() == alone.tensors.fingerprint()
        assert same_generators(drawn, generators())
        for name in ("metrics", "num_steps", "num_samples", "extra", "refusal", "assignment", "client"):
            assert getattr(found, name) == getattr(alone, name), name


EQUAL = (
    Net, Dropping, Normed, Adam, *ELEMENTWISE, Groups, Odd, Logging, Losses, Recurrent, Noisy, Branching, Cycled,
)  # fmt: skip


@pytest.mark.parametrize("make", EQUAL)
def test_clients_of_unequal_sizes_are_trained_as_alone(make):
    bench = Bench.of(make)
    check(bench, members(bench, epochs=2))


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


def test_data_read_one_by_one_are_the_same_batches():
    bench = Bench.of(Mapped, data=OneByOne())
    check(bench, members(bench, data=OneByOne(), epochs=1))


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
    Numpy: "draws random numbers past torch's functions",
    Counting: "changes the attribute calls",
    Remembering: "changes the attribute seen",
    Replacing: "puts another tensor in the place of mean",
    Scheduled: "a learning rate scheduler steps with epochs, and clients' are of different lengths",
    Rprop: "its optimizer is Rprop",
    Hooked: "the module overrides on_train_batch_end",
    Transferred: "the module overrides hooks that transfer a batch",
    Attached: "the training step reads self.trainer.global_step",
    Estimating: "configure_optimizers reads self.trainer.estimated_stepping_batches",
    Monitored: "a learning rate scheduler goes by a metric",
    Skipping: "a loss that is no tensor",
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_is_not_understood_is_refused(make):
    bench = Bench.of(make)
    with pytest.raises(Unstackable, match=REFUSED[make]):
        CohortTrainer(bench.trainer).train(members(bench, epochs=1))


def test_clients_that_part_are_refused_and_data_that_draw_as_well():
    bench = Bench.of(Parting)
    with pytest.raises(Parted, match="makes a number of a tensor"):
        CohortTrainer(bench.trainer).train(members(bench, epochs=3))
    bench = Bench.of(Mapped, data=OneByOne())
    with pytest.raises(Unstackable, match="draws random numbers past"):
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
    from raafl.local.stacked import batches

    monkeypatch.setattr(
        batches, "_AHEAD_BYTES", 5 * 28 * 5 * 2 + 1
    )  # two batches of five samples for each of five clients
    bench = Bench.of(Net, training=Training(num_epochs=4))
    check(bench, members(bench))


def test_a_tensor_data_set_of_any_form_is_stacked():
    x, y = samples().tensors
    bench = Bench.of(Net)
    data = TensorDataset(x.double().float(), y)
    check(bench, members(bench, data=data, sizes=(5, 5), steps=1))
