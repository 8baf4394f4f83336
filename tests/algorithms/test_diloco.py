"""DiLoCo and HeLoCo: what they equal, the inner optimizer's moments and the correction by hand, runs that a replay finds again."""

from __future__ import annotations

import pytest
import torch

from raafl.algorithms import ALGORITHMS, diloco, fed_avg
from raafl.algorithms.diloco import HeLoCo
from raafl.compression.plan import CompressionPlan
from raafl.core.algorithm import Training
from raafl.core.options import Compress
from raafl.core.snapshots import Snapshots
from raafl.core.types import Joined, Lost, Update
from raafl.data import Iid
from raafl.devices.profiles import Device
from raafl.errors import BadInput
from raafl.parts import RateSelect
from raafl.parts.merge.nesterov import NesterovMemory
from raafl.rules import CURRENT, Rules
from raafl.runfolder import checkpoint_reader
from raafl.submodel import FULL, FlatTensors, Spec
from tests.helpers.coordinators import assigned, coordinator_for, filled, join, line_state, values_of
from tests.helpers.refusals import refuses
from tests.helpers.single_task import Slope, SteepSlope, give, small_with_adam, task_of, whole
from tests.helpers.small_runs import SPEEDS, equal_replay, experiment, finish
from tests.parts.merge.test_nesterov import TOP, push

# ---- DiLoCo: what it is equal to, its inner optimizer's moments by hand, and a run of each kind that a re ----


SLICES = RateSelect(rates=[1.0, 1.0, 0.5, 0.25], rate_of="width")
KINDS = {
    "rounds, steps by speed": diloco(steps="speed", least_steps=2),
    "each arrival, slices": diloco(0.4, trigger="each", steps="speed", least_steps=1, submodel=SLICES),
    "a quorum by tokens, moments kept": diloco(
        0.4, trigger="quorum", grace_s=0.01, weights="tokens", inner_state="kept", submodel=SLICES
    ),
}


@pytest.mark.parametrize(("revision", "steps"), [(7, [10, 10, 10, 7, 7]), (CURRENT, [10, 10, 10, 10])])
def test_a_wait_for_the_uplink_is_no_slowness_of_steps(tmp_path, revision, steps):
    """Both clients train for 0.4 s. The second sends for 1.2 s: with `overlap` its next update waits until that is over."""
    num_bytes, flops = 4 * (64 * 24 + 24 + 24 * 10 + 10), 10 * 64 * (4 * 64 * 24 + 6 * 24 * 10)
    devices = [
        Device(name=name, flops_per_s=flops / 0.4, down_bytes_per_s=num_bytes / 0.1, up_bytes_per_s=num_bytes / up_s)
        for name, up_s in (("near", 0.1), ("far", 1.2))
    ]
    algorithm, training = diloco(trigger="each", steps="speed", least_steps=1), Training(None, 10, 64)
    fields = {"clients": 2, "devices": devices, "train": training, "max_updates": 14, "rules": revision}
    run = finish(experiment(tmp_path / "r", algorithm, overlap=True, **fields))
    assert [row["num_steps"] for row in run.events("assigned") if row["client"] == 2][: len(steps)] == steps


def values(finished):
    return checkpoint_reader.load(finished.folder).state_dict


# ---- what it is equal to ----


ALIKE = {"devices": None, "partition": Iid(), "max_updates": 4}
EQUAL = {
    # with SGD inside, eta 1 and no momentum: theta + mean(theta_n - theta) is the mean of the models
    "a plain outer step is unweighted FedAvg": (diloco(1.0, 0.0), fed_avg(by_samples=False), {}, 1e-4, 1e-5),
    # four alike, N = 4: the four deltas of the first wave are all from one model, in both forms
    "a wave of equal workers is a round": (diloco(), diloco(trigger="each"), ALIKE, 1e-4, 1e-6),
    # tasks that end within the window start again from one model, so that N = 4 deltas are always from one
    "a grace window is a round": (diloco(), diloco(trigger="each", grace_s=10.0), {"max_updates": 12}, 1e-3, 1e-5),
    "one worker": (diloco(), diloco(trigger="each"), {"clients": 1, "max_updates": 5}, 1e-4, 1e-6),
}


@pytest.mark.parametrize("name", EQUAL)
def test_two_forms_of_one_computation_agree_but_for_rounding(tmp_path, name):
    first, second, settings, rtol, atol = EQUAL[name]
    one = values(finish(experiment(tmp_path / "a", first, **settings)))
    other = values(finish(experiment(tmp_path / "b", second, **settings)))
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_replays_to_the_same_bits(tmp_path, name):
    def made():
        return experiment(
            tmp_path / "run", KINDS[name], model=small_with_adam, train=Training(num_epochs=None, num_steps=8)
        )

    run = finish(made())
    assert run.summary["updates_merged"] >= 12 and equal_replay(made(), run)
    by_client = {row["client"]: int(row["num_steps"]) for row in run.rows() if row["outcome"] == "merged"}
    assert by_client["1"] == 8 and (by_client["2"] == 5) == ("moments" not in name)  # 5/8 as fast


# ---- failures, and bytes ----

LASTS = 4.0
"""Virtual seconds of a run in which one of four nodes is gone for 0.7 of every 2 seconds."""


def failing():
    up = {"availability": ((0.0, 1.3),), "period_s": 2.0}
    return [
        Device(name=f"d{i}", flops_per_s=speed, **(up if i == 4 else {})) for i, speed in enumerate(SPEEDS, start=1)
    ]


@pytest.mark.parametrize(
    "fields", [{"trigger": "each"}, {"trigger": "quorum", "quorum": 0.5, "grace_s": 0.002}], ids=str
)
def test_the_living_train_on_where_a_quarter_fails(tmp_path, fields):
    """Steps merged over those that nodes could have made while they were there; the run itself ends in the midst of tasks."""
    algorithm = diloco(0.4, steps="speed", least_steps=1, **fields)
    run = finish(
        experiment(
            tmp_path,
            algorithm,
            devices=failing(),
            max_updates=None,
            max_time=f"{LASTS}s",
            eval_every=1000,
            train=Training(num_epochs=None, num_steps=8),
        )
    )
    merged = [row for row in run.rows() if row["outcome"] == "merged"]
    lost = [row for row in run.rows() if row["outcome"].startswith("lost")]
    step_s = {row["client"]: float(row["train_s"]) / int(row["num_steps"]) for row in merged}
    there_s = {client: LASTS if client != "4" else 2 * 1.3 for client in step_s}
    possible = sum(there_s[client] / step_s[client] for client in step_s)
    assert sum(int(row["num_steps"]) for row in merged) / possible >= 0.88
    assert len(lost) >= 1 and max(int(row["incarnation"]) for row in merged if row["client"] == "4") >= 1


def test_int8_up_and_bf16_down_weigh_what_the_formula_says(tmp_path):
    """A byte up and two down for each parameter, a scale for each long row, once in H steps; data-parallel: 8 bytes a step."""
    run = finish(experiment(tmp_path, diloco(), compress=Compress(down="bf16", up="int8"), max_updates=8))
    # a scale of 4 bytes for each of the 24 rows of 64, one for each other tensor
    num, scales = 64 * 24 + 24 + 24 * 10 + 10, 24 + 3
    assert run.summary["bytes_down"] == 8 * 2 * num and run.summary["bytes_up"] == 8 * (num + 4 * scales)


@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize("kind", ["int8", "top_k"])
def test_compressors_that_send_small_moments_as_0_are_refused_where_they_travel(way, kind):
    """A second moment of 1e-6 beside one of 1 is below int8's step of 1/127: sent as 0, it makes a step lr m / 1e-8."""
    submodels, wanted, kept = line_state().submodels, Compress(**{way: kind}), diloco(inner_state="kept")
    with pytest.raises(
        BadInput, match=f"compress.{way} is {kind}, which sends small second moments of an optimizer as 0"
    ):
        CompressionPlan.of(submodels, wanted, "delta", kept.local)
    assert CompressionPlan.of(submodels, Compress(**{way: "bf16"}), "delta", kept.local) is not None
    assert CompressionPlan.of(submodels, wanted, "delta", diloco().local) is not None
    submodels.rules = Rules(6)  # an older run folder replays
    assert CompressionPlan.of(submodels, wanted, "delta", kept.local) is not None


# ---- the inner optimizer ----


def plain_steps(num):
    """Weight and moments of AdamW after so many steps from 8, for y = 4."""
    weight = torch.nn.Parameter(torch.tensor([[8.0]]))
    optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.1)
    for _ in range(num):
        weight.grad = (weight - 4.0).detach()
        optimizer.step()
    state = optimizer.state[weight]
    return weight.item(), state["exp_avg"].item(), state["exp_avg_sq"].item()


def sent(weight, first, second, steps):
    named = {"line.weight": weight, "exp_avg/line.weight": first, "exp_avg_sq/line.weight": second}
    return {name: whole(value) for name, value in named.items()} | {"inner_steps/steps": [steps]}


def test_two_tasks_with_kept_moments_are_one_long_run():
    algorithm = diloco(inner_state="kept")
    up, _ = task_of(algorithm, SteepSlope(), sent(8.0, 0.0, 0.0, 0.0), 3)
    assert up["line.weight"].item() == pytest.approx(plain_steps(3)[0] - 8.0)
    after = [8.0 + up["line.weight"].item(), *(up[f"{name}/line.weight"].item() for name in ("exp_avg", "exp_avg_sq"))]
    assert after == pytest.approx(plain_steps(3)) and up["inner_steps/steps"].item() == 3.0
    more, _ = task_of(algorithm, SteepSlope(), sent(*after, 3.0), 2)
    assert after[0] + more["line.weight"].item() == pytest.approx(plain_steps(5)[0])
    assert after[1] + more["exp_avg/line.weight"].item() == pytest.approx(plain_steps(5)[1])
    assert more["inner_steps/steps"].item() == 2.0


def test_a_new_inner_state_sends_nothing_more():
    up, _ = task_of(diloco(), SteepSlope(), {"line.weight": whole(8.0)}, 3)
    assert list(up) == ["line.weight"] and up["line.weight"].item() == pytest.approx(plain_steps(3)[0] - 8.0)


def test_an_optimizer_of_another_kind_is_refused():
    with pytest.raises(BadInput, match="inner_state is 'kept', but the model's optimizer is SGD"):
        task_of(diloco(inner_state="kept"), Slope(), sent(8.0, 0.0, 0.0, 0.0), 1)


def told(coordinator, assignment):
    """The first and the last element of what the client is sent: of the first moment, and its number of steps."""
    flat = Snapshots(coordinator).cut(assignment)
    _, bundles = coordinator.payload.split(flat, assignment.spec, "sent")
    return bundles["exp_avg"]["fc2.weight"][0].tolist(), bundles["inner_steps"]["steps"].item()


def test_moments_lie_on_the_server_and_outlive_their_client():
    """A client that is lost and returns has its moments again; of another submodel it has those that it has trained."""
    coordinator = coordinator_for(diloco(inner_state="kept"), num_clients=1)
    (first,) = assigned(join(coordinator, [1])).values()
    assert told(coordinator, first) == ([0.0] * 4, 0.0)
    (second,) = give(coordinator, first, 0.5, exp_avg=0.25, exp_avg_sq=0.5, inner_steps=3.0).values()
    assert told(coordinator, second) == ([0.25] * 4, 3.0)
    client = coordinator.roster.clients[1]
    coordinator.handle(Lost(1, "disconnected"), 1.0)
    (third,) = assigned(coordinator.handle(Joined(client), 3600.0)).values()
    assert told(coordinator, third) == ([0.25] * 4, 3.0)
    assert coordinator.state.clients.find("exp_avg", 1) is not None


def test_moments_of_a_slice_change_only_there():
    merge, state = diloco(inner_state="kept").merge, line_state()
    slice_ = Spec.select({"hidden": range(0, 2)})
    for spec, moment in ((FULL, 1.0), (slice_, 2.0)):
        steps = merge_steps(state, 4.0)
        bundles = {
            "exp_avg": filled(state, moment, spec),
            "exp_avg_sq": filled(state, moment, spec),
            "inner_steps": steps,
        }
        update = Update(1, 1, 0, filled(state, 0.5, spec), 1, 4, bundles=bundles)
        assert merge.reject_reason(state, update, spec, 0) is None
        merge.receive(state, update, spec, 0)
        merge.apply(state)
    assert state.clients.find("exp_avg", 1)["fc2.weight"][0].tolist() == [3.0, 3.0, 1.0, 1.0]
    assert state.clients.find("inner_steps", 1)["steps"].item() == 8.0
    update.bundles["inner_steps"]["steps"].fill_(-1.0)
    assert merge.reject_reason(state, update, FULL, 0) == "bad-inner"


def merge_steps(state, value):
    layout = diloco(inner_state="kept").local.layout_of(state.submodels, "inner_steps", FULL)
    flat = FlatTensors.zeros(layout, "cpu")
    flat["steps"].fill_(value)
    return flat


def test_what_keeping_moments_costs_is_said():
    algorithm, state = diloco(inner_state="kept"), line_state()
    # 2 x 4 + 4 + 1 parameters of 4 bytes, twice
    (note,) = algorithm.merge.notes(state, 3)
    assert (
        note.startswith("inner_state kept: a task of the whole model sends 104 more bytes each way")
        and "312 bytes in memory" in note
    )


# ---- settings ----


test_settings_that_do_not_go_together_are_refused = refuses(
    ALGORITHMS["diloco"],
    ({"quorum": 0.7}, "quorum is 0.7"),
    ({"grace_s": 1.0}, "grace_s is 1.0"),
    ({"delay": 4}, "delay is 4"),
    ({"trigger": "each", "weights": "tokens"}, "weights is tokens"),
    ({"least_steps": 3}, "least_steps is 3"),
    ({"staleness": "polynomial"}, "staleness is polynomial"),
    ({"trigger": "eech"}, "trigger"),
    ({"outer_momentum": 1.0}, "outer_momentum is 1.0"),
    ({"trigger": "each", "delay": 0}, "delay is 0"),
    ({"inner_state": "old"}, "inner_state"),
)


# ---- HeLoCo's correction by hand, in two dimensions, and its outer step on a model whose tensors have one ----


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        ((0.0, 0.0), (3.0, 4.0)),  # there is no momentum yet
        ((6.0, 8.0), (3.0, 4.0)),  # c = 1
        ((5.0, 0.0), (3.0, 4.0)),  # c = 0.6, above c_ok
        # c = -0.8, conf = 5 / 10, so 0.4 of the part 0.8 x 5 = 4 against m goes: 4 - 1.6
        ((0.0, -5.0), (3.0, 2.4)),
        # the momentum is three times as long: conf = 5 / 20, 0.2 of it goes
        ((0.0, -15.0), (3.0, 3.2)),
    ],
)
def test_a_delta_of_length_5_beside_a_momentum(m, expected):
    found = HeLoCo().corrected(torch.tensor([3.0, 4.0]), torch.tensor(m))
    assert found.tolist() == pytest.approx(expected)


def test_a_delta_at_a_right_angle_is_turned_and_keeps_its_length():
    """c = 0, conf = 1/2, l = 1/4: the direction of (3/4, 1/4)."""
    found = HeLoCo().corrected(torch.tensor([5.0, 0.0]), torch.tensor([0.0, 5.0]))
    assert found.tolist() == pytest.approx([5 * 3 / 10**0.5, 5 / 10**0.5])


def test_steps_by_hand():
    merge, state = HeLoCo(0.5, 0.5), line_state(value=1.0)
    # m = 4 / 2 = 2; 1 + 0.5 (4 + 0.5 x 2) = 3.5
    assert push(merge, state, (2.0,), (6.0,)) == [3.5]
    # c = -1, conf = 1/2: half of -2 stays; m = (2 - 1) / 2 = 0.5; 3.5 + 0.5 (-1 + 0.5 x 0.5) = 3.125
    assert push(merge, state, (-2.0,)) == pytest.approx([3.125])


def test_a_slice_moves_and_measures_only_what_it_covers():
    """A whole update first, so that there is momentum everywhere; then one of half of the units, against it."""
    merge, state = HeLoCo(0.5, 0.5), line_state(value=1.0)
    push(merge, state, (4.0,))
    before = values_of(state).clone()
    push(merge, state, (-2.0, TOP, 0, 1, 1))
    covered = state.submodels.plan(TOP).gather(state.values)
    assert torch.cat([one.flatten() for _, one in covered.items()]).unique().tolist() == pytest.approx([3.125])
    assert 3.5 in before.unique().tolist() and 3.5 in values_of(state).unique().tolist()  # what it does not cover
    assert sorted(state.memory.of(NesterovMemory).m["fc1.weight"].unique().tolist()) == pytest.approx([0.5, 2.0])


def test_an_asynchronous_run_replays_to_the_same_bits(tmp_path):
    def made():
        algorithm = diloco(0.4, trigger="each", steps="speed", least_steps=1, outer="heloco", staleness="polynomial")
        return experiment(tmp_path / "run", algorithm, train=Training(num_epochs=None, num_steps=8))

    run = finish(made())
    assert run.summary["updates_merged"] >= 12 and equal_replay(made(), run)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"outer_momentum": 0.0}, "outer_momentum is 0"), ({"trigger": "each", "delay": 3}, "delay is 3")],
)
def test_what_does_not_go_with_it_is_refused(fields, named):
    with pytest.raises(BadInput, match=named):
        diloco(outer="heloco", **fields)
