from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raafl.algorithms import fed_avg, split_fed
from raafl.algorithms.split_fed import Halved, Split
from raafl.compression.plan import Compress
from raafl.compression.streams import RESIDUAL, CompressedSnapshots
from raafl.core.algorithm import Training
from raafl.core.types import Assign, Assignment, ClientInfo, Joined, Update
from raafl.data import Digits
from raafl.devices.profiles import Device, Profile
from raafl.errors import BadInput
from raafl.lab.plan.plan import make_plan
from raafl.local.train import FabricOptions
from raafl.parts.merge.mean import Mean
from raafl.parts.trigger import AllReported
from raafl.runtime.setup import build
from raafl.submodel import FULL, FlatTensors
from tests.algorithms.split_fed.models import Argmax, Conv, Masked, Skip, Tied, mlp
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import experiment, finish


def test_every_argument_reaches_its_part():
    algorithm = split_fed(share=0.25, by_samples=False)
    assert algorithm.select == Halved()
    assert algorithm.local == Split(None, 0.25, None)
    assert algorithm.trigger == AllReported()
    assert algorithm.merge == Mean(by_samples=False)
    assert split_fed().local == Split(2)
    assert (
        split_fed(cut="layers.2").describe()["local"] == "SGD on the loss in two halves, up to layers.2 at the client"
    )


test_bad_arguments_are_named = refuses(
    split_fed,
    ({"client_layers": 0}, "client_layers is 0: give a number above 0"),
    ({"share": 1.5}, r"share is 1\.5"),
    ({"share": 0.5, "cut": "layers.1"}, r"share is 0\.5 and cut is layers\.1: give exactly one"),
    ({"client_layers": 1, "share": 0.5}, r"client_layers is 1 and share is 0\.5: give exactly one"),
)


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


def test_dropout_is_drawn_by_each_half_and_repeats(tmp_path):
    more = {"model": lambda: mlp(0.5), "max_updates": 4}
    one = finish(experiment(tmp_path / "one", split_fed(client_layers=1), **more))
    two = finish(experiment(tmp_path / "two", split_fed(client_layers=1), **more))
    assert two.digest == one.digest
    assert one.digest != finish(experiment(tmp_path / "plain", fed_avg(), **more)).digest  # another stream of draws


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
        (FabricOptions(gradient_clip_val=1.0), "fabric.gradient_clip_val is 1.0, but with split_fed neither side"),
        (FabricOptions(precision="16-mixed"), "fabric.precision is 16-mixed, which needs a loss scaler"),
    ],
)
def test_what_needs_both_halves_at_once_is_refused_before_the_run(tmp_path, fabric, message):
    with pytest.raises(BadInput, match=message):
        finish(experiment(tmp_path / "one", split_fed(), fabric=fabric))
    assert not (tmp_path / "one").exists()
