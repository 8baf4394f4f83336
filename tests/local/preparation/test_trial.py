"""A model is tried on the data before a run; what fails is named by layer, shape and line."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from raafl.core.options import Training
from raafl.data.federated import FederatedData
from raafl.data.partition import Iid
from raafl.errors import BadInput
from raafl.local.explain import explained, shapes
from raafl.local.prepare import start_observers
from raafl.runtime.first_look import try_single_samples, try_training
from raafl.submodel import skeleton
from tests.data.modules import Module

INF = float("inf")
BATCH = (torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64))


class Net(LightningModule):
    """Six inputs, five hidden units, three classes; each test breaks one thing."""

    def __init__(self, inputs: int = 6) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(inputs, 5), nn.Dropout(0.5), nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.last(self.drop(self.first(x))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def failure(module, batch=BATCH) -> str:
    with pytest.raises(BadInput) as error:
        try_training(module, batch)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_sound_model_passes_and_keeps_values_gradients_and_random_state():
    module = Net()
    before = {name: p.clone() for name, p in module.named_parameters()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
    logged = module.log
    state = torch.get_rng_state()
    try_training(module, BATCH)
    assert torch.equal(torch.get_rng_state(), state), "dropout has drawn from a state of its own"
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in module.named_parameters())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()) == hooks == 0
    assert module.log == logged


def test_a_layer_of_the_wrong_width_is_named_with_both_shapes_and_the_line():
    text = failure(Net(inputs=7))
    assert text.startswith(
        "Net.training_step fails on a batch of float32 (2, 6), int64 (2,), where first, "
        "Linear(in_features=7, out_features=5, bias=True), is given float32 (2, 6): RuntimeError: "
    )
    assert "(tests/local/preparation/test_trial.py:" in text
    assert text.endswith(": make the model's arguments and the data fit")


def test_a_loss_that_fails_outside_any_layer_is_not_blamed_on_one():
    text = failure(Net(), (torch.zeros(2, 6), torch.full((2,), 3)))  # classes are 0 to 2
    assert text.startswith("Net.training_step fails on a batch of float32 (2, 6), int64 (2,): IndexError: Target 3")


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (lambda loss: None, "nothing"),
        (lambda loss: {"score": loss, "l": loss}, "a dict with 'score', 'l' and without 'loss'"),
        (lambda loss: {"loss": None}, "nothing as 'loss'"),
        (lambda loss: {"loss": loss.detach()}, "detached float32 () as 'loss'"),
        (lambda loss: loss.item(), "float"),
        (lambda loss: loss.detach(), "detached float32 ()"),
        (lambda loss: torch.stack([loss, loss]), "float32 (2,)"),
    ],
)
def test_a_step_without_a_usable_loss(answer, given):
    class Wrong(Net):
        def training_step(self, batch, batch_idx):
            return answer(super().training_step(batch, batch_idx))

    assert failure(Wrong()) == (
        f"Wrong.training_step gives {given}: return the loss, one number that depends on the parameters, "
        "or a dict with it under 'loss'"
    )


def test_a_loss_in_a_dict_passes():
    losses = []

    class InDict(Net):
        def training_step(self, batch, batch_idx):
            losses.append(super().training_step(batch, batch_idx))
            losses[-1].register_hook(lambda gradient: losses.append(gradient.item()))
            return {"loss": losses[-1], "more": 1}

    try_training(InDict(), BATCH)
    assert losses[1:] == [1.0]  # its backward pass has run


def test_an_optimizer_that_refuses_its_arguments():
    class Eager(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=-1.0)

    text = failure(Eager())
    assert text.startswith(
        "Eager.configure_optimizers fails: ValueError: Invalid learning rate: -1.0 (tests/local/preparation/test_t"
    )


def test_two_optimizers_are_refused_in_the_trainers_own_words():
    class Two(Net):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    assert "Two.configure_optimizers gives 2 optimizers, but a federated task runs" in failure(Two())


def test_the_innermost_layer_is_named_and_layers_that_ended_are_not():
    class Deep(LightningModule):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))

    module = Deep()
    with pytest.raises(BadInput) as error, explained(module, "validation_step", BATCH):
        module.body(BATCH[0])
    assert "where body.1.1, Linear(in_features=3, out_features=2, bias=True), is given float32 (2, 4)" in str(
        error.value
    )


def test_shapes_of_nested_batches():
    batch = {"ids": torch.zeros(2, 3, dtype=torch.int64), "more": [torch.zeros(1), "text"]}
    assert shapes(batch) == "ids int64 (2, 3), more float32 (1,)"
    assert shapes("text") == "str"


@pytest.mark.parametrize(
    ("sizes", "batch_size", "loader", "length", "message"),
    [
        (
            25,
            8,
            {},
            {},
            r"client 1 \(1 more clients too\) has a batch of one sample, its 25 samples in batches of 8: set drop_",
        ),
        (25, 8, {}, {"num_epochs": None, "num_steps": 4}, "client 1 .* has a batch of one sample"),
        (25, 8, {}, {"num_epochs": None, "num_steps": 3}, None),
        (25, 8, {"drop_last": True}, {}, None),
        (24, 8, {}, {}, None),
        (24, 1, {}, {}, "its 24 samples in batches of 1: give a larger train.batch_size"),
        (1, 8, {"drop_last": True}, {}, "its 1 samples in batches of 8: use fewer clients"),
    ],
)
def test_a_batch_of_one_sample_under_batch_norm_is_said_for_every_client(sizes, batch_size, loader, length, message):
    num = 2 * sizes
    rows = TensorDataset(torch.zeros(num, 6), torch.zeros(num, dtype=torch.int64))
    data = FederatedData(Module(rows, batch_size=4, **loader), Iid(), 2)
    training = Training(batch_size=batch_size, **length)
    if message is None:
        try_single_samples(Net(), data, training)
        return
    with pytest.raises(BadInput, match=message) as refused:
        try_single_samples(Net(), data, training)
    assert "Expected more than 1 value per channel when training" in str(refused.value)


def test_a_model_that_trains_on_one_sample_is_let():
    plain = Net()
    plain.norm = nn.LayerNorm(3)
    data = FederatedData(Module(TensorDataset(*(tensor[:1] for tensor in BATCH)), batch_size=4), Iid(), 1)
    try_single_samples(plain, data, Training())


@pytest.mark.parametrize("skips", [lambda batch, index: index == 0, lambda batch, index: len(batch[1]) < 4])
def test_a_step_that_skips_the_first_or_small_batches_is_tried_on_another(skips):
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if skips(batch, batch_idx) else super().training_step(batch, batch_idx)

    tried = try_training(Skips(), BATCH, more=lambda: (torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)))
    assert tried.logged == ["loss"]


def test_what_a_task_has_not_is_said_by_name():
    class Asks(Net):
        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_scalar("x", 1.0)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    plateau, logger = try_training(Asks(), BATCH).warnings
    assert plateau.startswith("Asks: ReduceLROnPlateau monitors 'val_loss', which training_step does not log")
    assert plateau.endswith("monitor one of loss")
    assert logger.startswith("Asks uses self.logger")


def test_an_optimizer_that_needs_a_closure_is_refused_by_name():
    text = failure(
        type("Closed", (Net,), {"configure_optimizers": lambda self: torch.optim.LBFGS(self.parameters())})()
    )
    assert text.startswith("Closed.configure_optimizers gives LBFGS, whose step needs a closure")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_buffer_that_changes_its_shape_is_named(in_place):
    class Growing(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1, 6))
            self.register_buffer("mask", torch.zeros(0), persistent=False)

        def training_step(self, batch, batch_idx):
            self.mask = torch.ones(len(batch[0]))
            if in_place:
                self.seen.resize_(3, 6)
            else:
                self.seen = torch.cat([self.seen, batch[0]])
            return super().training_step(batch, batch_idx)

    assert failure(Growing()).startswith(
        "Growing.training_step changes the shape of buffer 'seen' from (1, 6) to (3, 6): give it its size in __init__, if need"
    )


class Observed(Net):
    """Has a range for each input, and one of all, as an observer before its first step; ``sized`` says how long the first is."""

    def __init__(self, sized=lambda x: x.shape[1]):
        super().__init__()
        self.sized = sized
        self.register_buffer("most", torch.zeros(0))
        self.register_buffer("largest", torch.tensor(-INF))
        self.register_buffer("count", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        if self.most.numel() == 0:
            self.most.resize_(self.sized(batch[0])).fill_(0.0)
        self.largest = torch.maximum(self.largest, batch[0].max())
        self.count += 1
        return super().training_step(batch, batch_idx)


def rows(num):
    return [torch.arange(6.0 * num).reshape(num, 6), torch.zeros(num, dtype=torch.long)]


def test_buffers_that_wait_for_a_first_step_get_their_sizes():
    with skeleton():
        without_values = Observed()
    for one in (Observed(), without_values):
        start_observers(one, rows, Observed)
        assert (one.most.shape, float(one.largest), float(one.count)) == ((6,), 11.0, 0.0)  # what had a value keeps it
        assert one.first.weight.is_meta == (one is without_values)


def test_a_buffer_whose_size_hangs_on_the_number_of_samples_is_still_refused():
    module = Observed(sized=len)
    start_observers(module, rows, Observed)
    assert module.most.numel() == 0
    assert failure(module).startswith("Observed.training_step changes the shape of buffer 'most' from (0,) to (")


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_stays_infinite_is_refused_before_every_update_is(persistent):
    class Masked(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((3, 3), -INF).triu(1), persistent=persistent)
            self.register_buffer("least", torch.tensor(INF))  # an observer's, before it has seen anything

        def training_step(self, batch, batch_idx):
            self.least = torch.minimum(self.least, batch[0].min())
            return super().training_step(batch, batch_idx)

    if not persistent:
        try_training(Masked(), BATCH)
        return
    with pytest.raises(
        BadInput, match=r"buffer 'mask' of Masked has infinities or NaN, .*: register it with persistent=False"
    ):
        try_training(Masked(), BATCH)


class Checkpointed(LightningModule):
    """Adapters behind a frozen embedding, in layers that are checkpointed, as `gradient_checkpointing_enable` does."""

    def __init__(self, reentrant, trains_head=True):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.adapter, self.head, self.reentrant = (
            nn.Linear(6, 6),
            nn.Linear(6, 2).requires_grad_(trains_head),
            reentrant,
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, index):
        warnings.warn("the user's own", UserWarning, stacklevel=1)
        hidden = checkpoint(lambda x: self.adapter(self.base(x)), batch[0], use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.head(hidden), batch[1])


@pytest.mark.filterwarnings("ignore:the user's own")
def test_reentrant_checkpointing_over_an_input_without_gradient_is_named():
    batch = (torch.ones(2, 6), torch.tensor([0, 1]))
    what = (
        r"Checkpointed.training_step checkpoints layers \(use_reentrant=True\) whose input needs no gradient, so that "
    )
    with pytest.raises(
        BadInput, match=what + r"adapter.weight, adapter.bias.* get none and would not train: give use_re"
    ):
        try_training(Checkpointed(reentrant=True), batch)
    with pytest.raises(BadInput, match=what + "the loss has none"):
        try_training(Checkpointed(reentrant=True, trains_head=False), batch)
    with pytest.warns(UserWarning, match="the user's own"):
        assert "adapter" not in " ".join(try_training(Checkpointed(reentrant=False), batch).warnings)
