from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F

from model_zoo import CNN, MLP
from raafl.algorithms import fed_avg, split_fed
from raafl.algorithms.split_fed.cut import cuts_of
from raafl.algorithms.split_fed.local import Halved, Split
from raafl.algorithms.split_fed.questions import halves
from raafl.compression.compressors import Compress
from raafl.compression.streams import RESIDUAL, CompressedSnapshots
from raafl.core.algorithm import Fleet, Training
from raafl.core.sample import Sample
from raafl.core.state import GlobalState
from raafl.core.types import Assign, Assignment, ClientInfo, Joined, Update, Work
from raafl.data import Digits
from raafl.devices.profiles import Device, Profile
from raafl.errors import BadInput
from raafl.local.train import FabricOptions
from raafl.parts.merge.mean import Mean
from raafl.parts.trigger import AllReported
from raafl.plan.plan import make_plan
from raafl.runtime.setup import build
from raafl.submodel import FULL, FlatTensors, SpecError, Submodels
from tests.federation import experiment, finish


class Small(LightningModule):
    """What the models below share; a batch is (inputs, labels)."""

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, index):
        return {"loss": self.training_step(batch, index)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


class Skip(Small):
    """The embedding goes around the block as well as into it, and ends in the sum."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x):
        h = self.embed(x.flatten(1))
        return self.head(h + F.relu(self.block(h)))


class Tied(Small):
    """One layer is used at the bottom and at the top."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.first(F.relu(self.first(x.flatten(1)))))


class Masked(Small):
    """A layer without parameters makes a mask of the inputs, which the head needs; the scale is the root's own parameter."""

    class Mask(nn.Module):
        def forward(self, x):
            return (x.flatten(1)[:, :8] > 0.5).float()

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 0.5))
        self.mask, self.low, self.head = self.Mask(), nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        mask = self.mask(x)
        h = F.relu(self.low(x.flatten(1) * self.scale), inplace=True)
        return self.head(h * mask)


class Argmax(Small):
    """What the first layer likes best decides above without a gradient."""

    def __init__(self):
        super().__init__()
        self.low, self.high, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x):
        h = self.low(x.flatten(1))
        choice = F.one_hot(h.argmax(1), 8).float()
        return self.head(self.high(h) * choice)


class Conv(CNN):
    """Digits as small images, with batch norm."""

    def __init__(self):
        super().__init__(1, 8, (4, 8), (16, 12), 10, lr=0.05, momentum=0.5, batch_norm=True)

    def forward(self, x):
        return super().forward(x.view(-1, 1, 8, 8))


def mlp(dropout: float = 0.0) -> MLP:
    return MLP(64, (24, 16), 10, lr=0.05, momentum=0.5, dropout=dropout)


def submodels_of(make: Callable[[], nn.Module], num_samples: int = 2) -> Submodels:
    return Submodels(make(), [torch.zeros(num_samples, 64), torch.zeros(num_samples, dtype=torch.int64)])


def paths(make: Callable[[], nn.Module]) -> list[str]:
    return [cut.path for cut in cuts_of(submodels_of(make))[0]]


def test_every_argument_reaches_its_part():
    algorithm = split_fed(share=0.25, by_samples=False, cohort=4, concurrency=2)
    assert algorithm.sample == Sample(4, 2)
    assert algorithm.select == Halved()
    assert algorithm.local == Split(None, 0.25, None)
    assert algorithm.trigger == AllReported()
    assert algorithm.merge == Mean(by_samples=False)
    assert split_fed().local == Split(2)
    assert (
        split_fed(cut="layers.2").describe()["local"] == "SGD on the loss in two halves, up to layers.2 at the client"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"client_layers": 0}, "client_layers is 0: give a number above 0"),
        ({"share": 1.5}, r"share is 1\.5"),
        ({"share": 0.5, "cut": "layers.1"}, r"share is 0\.5 and cut is layers\.1: give exactly one"),
        ({"client_layers": 1, "share": 0.5}, r"client_layers is 1 and share is 0\.5: give exactly one"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(BadInput, match=message):
        split_fed(**arguments)


# ---- where a model can be cut ----


def test_a_chain_can_be_cut_after_every_layer_but_where_one_side_has_nothing_to_train():
    assert paths(mlp) == ["layers.1", "layers.2", "layers.3", "layers.4"]  # 0 flattens, 5 is the last layer
    first = cuts_of(submodels_of(mlp))[0][0]
    assert (first.num_layers, first.num_values, first.sample_bytes) == (1, 64 * 24 + 24, 24 * 4)
    assert first.lower == {"layers.1.weight", "layers.1.bias"}
    assert first.leaves == (1,)  # the labels: the inputs stay where they are


def test_a_skip_connection_is_not_cut_through():
    assert paths(Skip) == ["embed"]


def test_a_layer_used_on_both_sides_allows_no_cut():
    found, reason = cuts_of(submodels_of(Tied))
    assert found == ()
    assert "more than one value leads from the layers below" in reason


def test_what_leads_past_a_cut_without_a_gradient_counts_as_well():
    # After `low`, h goes on to `high` and `argmax`: only h itself crosses. After `high`, the choice made of h does, too.
    assert paths(Argmax) == ["low"]


def test_parts_of_the_batch_that_the_server_needs_are_found_through_layers_without_parameters():
    (cut,) = cuts_of(submodels_of(Masked))[0]
    assert (cut.path, cut.leaves) == ("low", (0, 1))
    assert cut.lower == {"scale", "low.weight", "low.bias"}


def test_batch_norms_statistics_belong_to_their_layer():
    cut = next(cut for cut in cuts_of(submodels_of(Conv))[0] if cut.path == "norm1")
    assert {"norm1.running_mean", "norm1.running_var", "norm1.num_batches_tracked"} <= cut.lower
    assert not any(name.startswith(("norm2", "conv2", "fc")) for name in cut.lower)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({}, "layers.4"),  # two layers at the client; the last place to cut with these, of those that send least
        ({"client_layers": 1}, "layers.2"),
        ({"client_layers": 9}, "layers.4"),
        ({"share": 0.01}, "layers.2"),  # 1560 of 2130 parameters are 73 %, 1960 are 92 %
        ({"share": 0.8}, "layers.2"),
        ({"share": 0.9}, "layers.4"),
        ({"cut": "layers.1"}, "layers.1"),
    ],
)
def test_where_the_settings_cut(arguments, path):
    assert split_fed(**arguments).local.place(submodels_of(mlp)).path == path


def fleet_for(submodels: Submodels, algorithm, **profile) -> Fleet:
    import random

    state = GlobalState(submodels, submodels.state(mlp()))
    clients = {1: ClientInfo(1, 70, Profile(**profile))}
    return Fleet(state, clients, random.Random(0), Training(num_epochs=3), 32, local=algorithm.local)


def test_a_cut_that_there_is_not_and_memory_that_is_too_small_are_named_before_the_start():
    submodels = submodels_of(mlp)
    algorithm = split_fed(cut="layers.9")
    (problem,) = algorithm.select.check(fleet_for(submodels, algorithm))
    assert "cut is 'layers.9', where the model cannot be cut: use one of layers.1, layers.2" in problem
    algorithm = split_fed()
    (problem,) = algorithm.select.check(fleet_for(submodels, algorithm, memory_bytes=1000.0))
    assert "client 1: memory_bytes is 1000, the part up to 'layers.4' needs" in problem
    with pytest.raises(SpecError, match=r"the model cannot be cut after 'layers\.5'"):
        halves(submodels, "layers.5")


# ---- what a half is, and what it costs ----


def test_each_half_has_its_own_values_and_no_memory_for_the_others():
    submodels = submodels_of(mlp)
    found = halves(submodels, "layers.2")
    both = {"lower": found.client, "upper": found.server}
    whole = submodels.layout(FULL, "trained").num_bytes
    sizes = {side: half.layout(FULL, "trained").num_bytes for side, half in both.items()}
    assert sizes == {"lower": 1560 * 4, "upper": whole - 1560 * 4}
    for side, half in both.items():
        shrunk = half.shrink()
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in shrunk.module.parameters()}
        blanks = 4 * (4 if side == "lower" else 2)  # one element for each tensor that is not there
        assert sum(held.values()) == sizes[side] + blanks
        assert {p.requires_grad for n, p in shrunk.module.named_parameters() if not half.has(n)} == {False}


def test_the_cost_is_that_of_the_clients_layers_and_of_every_samples_activation_and_gradient():
    submodels = submodels_of(mlp)
    local = split_fed(cut="layers.2").local
    fleet = fleet_for(submodels, split_fed(cut="layers.2"))
    work = split_fed().select(fleet.clients[1], fleet)
    terms = {"cut": "layers.2", "batch_size": 32, "num_samples": 70, "per_epoch": 3, "batches": 9, "samples": 210}
    terms["sends"] = "values"
    assert work == Work(num_epochs=3, extra={"split": terms})
    cost = fleet.cost(FULL, work.extra)
    assert cost.params == 1560
    assert cost.down_bytes == 1560 * 4 + 210 * 24 * 4  # its layers' values; 24 gradients for each sample
    assert cost.up_bytes == 1560 * 4 + 210 * (24 * 4 + 8)  # the same; and a label of 8 bytes
    # forward 2 * 64 * 24; backward the same for the weights, nothing for the inputs
    assert cost.flops_per_sample == 2 * (2 * 64 * 24)
    whole = submodels.cost(FULL, 32)
    assert cost.flops_per_sample < whole.flops_per_sample
    assert cost.peak_bytes < whole.peak_bytes + 32 * (2 * 96 + 8)
    assert local.cost(submodels, FULL, 32, {}).up_bytes == 1560 * 4
    assert (cost.num_exchanges, whole.num_exchanges) == (9, 0)


@pytest.mark.parametrize(
    ("training", "drop_last", "per_epoch", "batches", "samples"),
    [
        (Training(num_epochs=2), False, 3, 6, 140),  # 32, 32 and 6 of 70, twice
        (Training(num_epochs=2), True, 2, 4, 128),  # the 6 are left out
        (Training(num_epochs=None, num_steps=4), False, 3, 4, 70 + 32),  # an epoch, and the first batch of the next
        (Training(num_epochs=None, num_steps=3), True, 2, 3, 64 + 32),
        (Training(num_epochs=None, num_steps=2), False, 3, 2, 64),
    ],
)
def test_the_server_expects_the_batches_that_the_client_makes(training, drop_last, per_epoch, batches, samples):
    from raafl.data.federated import ClientData

    algorithm = split_fed()
    fleet = replace(fleet_for(submodels_of(mlp), algorithm), training=training, drop_last=drop_last)
    work = algorithm.select(fleet.clients[1], fleet)
    terms = work.extra["split"]
    assert [terms[name] for name in ("per_epoch", "batches", "samples")] == [per_epoch, batches, samples]
    dataset = torch.utils.data.TensorDataset(torch.zeros(70, 1))
    data = ClientData(dataset, torch.arange(70), 32, drop_last=drop_last)
    sizes = [len(x) for (x,) in data.batches(torch.Generator(), None, work.num_epochs, work.num_steps)]
    assert (data.num_batches(), len(sizes), sum(sizes)) == (per_epoch, batches, samples)


LINK = {"latency_s": 0.25, "flops_per_s": 1e6, "down_bytes_per_s": 1e4, "up_bytes_per_s": 2e4}


def test_every_batch_takes_the_latency_of_the_link_both_ways():
    submodels, algorithm = submodels_of(mlp), split_fed(cut="layers.2")
    fleet = replace(fleet_for(submodels, algorithm, **LINK), training=Training(num_epochs=1))  # 70 samples by 32
    client = fleet.clients[1]
    time = fleet.task_time(client, algorithm.select(client, fleet))
    # down 1560 values and 24 gradients a sample; up the same values, 24 activations and a label of 8 bytes
    assert time.down_s == pytest.approx(0.25 + 3 * 0.25 + (1560 * 4 + 70 * 96) / 1e4)
    assert time.up_s == pytest.approx(0.25 + 3 * 0.25 + (1560 * 4 + 70 * 104) / 2e4)
    assert time.compute_s == pytest.approx(70 * 2 * (2 * 64 * 24) / 1e6)
    whole = fed_avg()
    fleet = replace(fleet, local=whole.local)
    time = fleet.task_time(client, whole.select(client, fleet))
    assert time.down_s == 0.25 + 2130 * 4 / 1e4


def test_simulation_pacing_and_plan_take_the_latency_from_one_place(tmp_path):
    link = {"latency_s": 0.25, "flops_per_s": 1e6}
    made = experiment(
        tmp_path / "run", split_fed(cut="layers.2"), model=mlp, max_updates=4, devices=[Device(name="phone", **link)]
    )  # three batches of 64 for each task
    compute_s = 3 * 64 * 2 * (2 * 64 * 24) / 1e6
    wanted_s = 2 * 0.25 + 3 * 2 * 0.25 + compute_s
    plan = make_plan(made, algorithms=[])
    assert plan.devices[0].seconds[0] == pytest.approx(wanted_s)
    assert plan.algorithms[0].time_s == pytest.approx(wanted_s)  # four clients, one round
    coordinator = build(made, pace=True).coordinator
    clients = [ClientInfo(number, 300, Profile(**link)) for number in range(1, 5)]
    actions = [action for client in clients for action in coordinator.handle(Joined(client), 0.0)]
    paces = [action.assignment.pace_s for action in actions if isinstance(action, Assign)]
    assert paces == pytest.approx([wanted_s] * 4)
    run = finish(made)
    assert [float(row["train_s"]) for row in run.rows()] == pytest.approx([wanted_s] * 4)


def test_the_notes_say_what_leaves_the_clients():
    notes = "\n".join(split_fed().local.notes(submodels_of(mlp)))
    assert "clients train 1,960 of 2,130 parameters" in notes
    assert "PRIVACY: the server sees what leaves 'layers.4' for every sample (64 bytes)" in notes
    assert "number 1; labels are among them" in notes
    assert "the server trains a copy of the upper part: 680 bytes of values" in notes
    (note,) = split_fed().local.notes(submodels_of(Tied))
    assert "the model cannot be cut, so clients train all of it, as in FedAvg" in note


# ---- FedAvg, with the work elsewhere ----


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (mlp, {}),
        (mlp, {"client_layers": 1}),
        (Conv, {}),
        (Conv, {"share": 0.5}),
        (Skip, {}),
        (Masked, {}),
        (Argmax, {}),
    ],
)
def test_it_is_fed_avg_bit_for_bit(tmp_path, model, arguments):
    one = finish(experiment(tmp_path / "one", fed_avg(), model=model, max_updates=4))
    two = finish(experiment(tmp_path / "two", split_fed(**arguments), model=model, max_updates=4))
    assert two.digest == one.digest
    assert two.summary["bytes_up"] != one.summary["bytes_up"]
    loss = [[row["loss"] for row in run.rows()] for run in (one, two)]
    assert loss[0] == loss[1]


def test_a_model_that_cannot_be_cut_is_trained_as_by_fed_avg(tmp_path):
    one = finish(experiment(tmp_path / "one", fed_avg(), model=Tied))
    two = finish(experiment(tmp_path / "two", split_fed(), model=Tied))
    assert two.digest == one.digest
    assert two.summary["bytes_up"] == one.summary["bytes_up"]


def test_batches_are_gathered_for_a_step_as_in_fed_avg(tmp_path):
    more = {"fabric": FabricOptions(accumulate_grad_batches=2), "train": Training(num_epochs=1), "max_updates": 4}
    more |= {"data": lambda: Digits(batch_size=100)}
    one = finish(experiment(tmp_path / "one", fed_avg(), **more))
    two = finish(experiment(tmp_path / "two", split_fed(), **more))
    assert two.digest == one.digest


def test_dropout_is_drawn_by_each_half_and_repeats_in_any_number_of_processes(tmp_path):
    more = {"model": lambda: mlp(0.5), "max_updates": 4}
    one = finish(experiment(tmp_path / "one", split_fed(client_layers=1), **more))
    two = finish(experiment(tmp_path / "two", split_fed(client_layers=1), workers=2, **more))
    assert two.digest == one.digest
    assert one.digest != finish(experiment(tmp_path / "plain", fed_avg(), **more)).digest  # another stream of draws


# ---- compressed ----


@pytest.mark.parametrize(
    ("compress", "first", "later", "back"),
    [
        # 24 rows of 64 and a bias of 24: a byte each, and 25 scales
        (Compress("int8", "int8"), 1560 + 25 * 4, 1560 + 25 * 4, 1560 + 25 * 4),
        (Compress(down="bf16"), 1560 * 2, 1560 * 2, 1560 * 4),
        # 156 places and elements; the first time all is sent down
        (Compress("top_k", "top_k", 0.1), 1560 * 4, 156 * 8, 156 * 8),
    ],
)
def test_the_clients_part_travels_compressed_and_the_batches_as_they_are(tmp_path, compress, first, later, back):
    made = experiment(tmp_path / "run", split_fed(cut="layers.2"), model=mlp, max_updates=8, compress=compress)
    run = finish(made)
    samples = 3 * 64
    rows = sorted(run.rows(), key=lambda row: int(row["assignment"]))
    down = [int(row["bytes_down"]) - samples * 24 * 4 for row in rows]
    assert down == [first] * 4 + [later] * 4
    assert {int(row["bytes_up"]) - samples * (24 * 4 + 8) for row in rows} == {back}
    plain = finish(replace(made, output=str(tmp_path / "plain"), compress=Compress()))
    assert run.summary["time_s"] < plain.summary["time_s"]
    assert run.digest != plain.digest


def test_what_stays_at_the_server_is_not_rounded(tmp_path):
    made = experiment(tmp_path / "run", split_fed(cut="layers.2"), model=mlp, compress=Compress(down="bf16"))
    coordinator = build(made, pace=False).coordinator
    client = ClientInfo(1, 300)
    work = made.algorithm.select(client, coordinator.fleet)
    task = Assignment(1, 1, 0, 0, 0, FULL, 0, None, 3, 5, 0.0, extra=work.extra)
    received, values = CompressedSnapshots(coordinator).cut(task), coordinator.state.values
    for name, tensor in received.items():
        sent = values[name].bfloat16().float() if name.startswith("layers.1.") else values[name]
        assert torch.equal(tensor, sent)
    assert not torch.equal(received["layers.1.weight"], values["layers.1.weight"])


def test_a_refused_task_leaves_no_residual(tmp_path):
    made = experiment(tmp_path / "run", split_fed(cut="layers.2"), model=mlp, compress=Compress(up="top_k"))
    coordinator = build(made, pace=False).coordinator
    carried, submodels = CompressedSnapshots(coordinator), coordinator.state.submodels
    work = made.algorithm.select(ClientInfo(1, 300), coordinator.fleet)
    task = Assignment(1, 1, 0, 0, 0, FULL, 0, None, 3, 5, 0.0, extra=work.extra)
    received = carried.cut(task)

    def answered(refusal: str | None) -> list[object]:
        values = FlatTensors.empty(submodels.layout(FULL, "trained"))
        for name, tensor in values.items():
            tensor.copy_(received[name] + torch.arange(tensor.numel()).view(tensor.shape))
        carried.returned(task, update := Update(1, 1, 0, values, 300, refusal=refusal), received)
        changed = update.tensors["layers.1.weight"] - received["layers.1.weight"]
        assert int((changed != 0).sum()) == 156  # of 1560; the largest are all in the weight
        assert torch.equal(update.tensors["layers.5.weight"], values["layers.5.weight"])
        return coordinator.state.clients.find(RESIDUAL, 1)

    assert answered(None) is not None
    assert answered("non-finite") is None


@pytest.mark.parametrize(
    ("fabric", "message"),
    [
        (FabricOptions(gradient_clip_val=1.0), "fabric.gradient_clip_val is 1.0, but neither half"),
        (FabricOptions(precision="16-mixed"), "fabric.precision is 16-mixed, but a model in two halves"),
    ],
)
def test_what_needs_both_halves_at_once_is_refused_before_the_run(tmp_path, fabric, message):
    with pytest.raises(BadInput, match=message):
        finish(experiment(tmp_path / "one", split_fed(), fabric=fabric))
    assert not (tmp_path / "one").exists()
