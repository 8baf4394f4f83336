"""Streaming DiLoCo: fragments, the worker's arithmetic by hand, the schedule, bytes by formula, and what it is equal to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from raafl.algorithms import diloco, streaming_diloco
from raafl.algorithms.streaming_diloco import Fragments
from raafl.core.options import Compress
from raafl.core.types import Joined, Lost
from raafl.errors import BadInput
from raafl.runfolder import checkpoint_reader
from raafl.runtime.replay import replay
from raafl.submodel import SpecError, Submodels
from tests.helpers.coordinators import assigned, coordinator_for, join
from tests.helpers.crash import crashed, simulated
from tests.helpers.refusals import refuses
from tests.helpers.single_task import Slope, SteepSlope, give, small_with_adam, task_of, whole
from tests.helpers.small_runs import equal_replay, experiment, finish

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


# ---- what it is equal to ----


def test_one_fragment_taken_whole_is_diloco_with_kept_moments_but_for_rounding(tmp_path):
    """The moments stay on the client as they are; diloco sends their differences, which rounds."""
    other = finish(experiment(tmp_path / "b", diloco(inner_state="kept"), model=small_with_adam))
    one = finish(
        experiment(
            tmp_path / "a", streaming_diloco(1, alpha=0.0, sync_delay=0, inner_state="kept"), model=small_with_adam
        )
    )
    expected = checkpoint_reader.load(other.folder).state_dict
    for name, tensor in checkpoint_reader.load(one.folder).state_dict.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)


# ---- fragments ----


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 2)  # 10 elements
        # 12 each
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}) for _ in range(3))
        self.head = nn.Linear(2, 1)  # 3


def layers(names):
    return {name.removesuffix(".weight").removesuffix(".bias") for name in names}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (
            "strided",
            [{"embed", "blocks.1.a", "blocks.1.b", "head"}, {"blocks.0.a", "blocks.0.b", "blocks.2.a", "blocks.2.b"}],
        ),
        # 49 elements: the middles of the first three layers lie before 24.5, at 5, 16 and 28 the third does not
        (
            "sequential",
            [{"embed", "blocks.0.a", "blocks.0.b"}, {"blocks.1.a", "blocks.1.b", "blocks.2.a", "blocks.2.b", "head"}],
        ),
    ],
)
def test_a_fragment_is_whole_layers(pattern, expected):
    submodels = Submodels(Stacked())
    fragments = Fragments(2, pattern)
    assert [layers(names) for names in fragments.names(submodels)] == expected
    assert [layers(submodels.layout(fragments.spec(submodels, i), "trained").by_name) for i in (0, 1)] == expected
    assert Fragments(9, pattern).count(submodels) == 5


@pytest.mark.parametrize("index", [2, -1, True, "0", [0]])
def test_a_fragment_that_is_not_there_is_refused(index):
    with pytest.raises(SpecError, match=r"fragment .* is not one of this model's 2: give 0 to 1"):
        Fragments(2).names_for_task(Submodels(Stacked()), {"up": index}, "up")


# ---- the worker ----


def sent(received, replica, steps):
    return {"line.weight": whole(received), "replica/line.weight": whole(replica), "inner_steps/steps": [steps]}


@pytest.mark.parametrize(
    ("sync_delay", "replica", "steps", "ends"),
    [
        (1, 8.0, 3, 3.75),  # w <- (w + 4) / 2: 8, 6, mixed with 0 to 3, 3.5, 3.75
        (0, 10.0, 3, 4.125),  # mixed to 5 at once, 4.5, 4.25, 4.125
        (5, 8.0, 2, 2.5),  # 6, 5, and mixed at the end
    ],
)
def test_a_replica_trains_on_and_takes_a_fragment_in_after_tau_steps(sync_delay, replica, steps, ends):
    up, update = task_of(streaming_diloco(alpha=0.5, sync_delay=sync_delay), Slope(), sent(0.0, replica, 5.0), steps)
    assert up["line.weight"].item() == up["replica/line.weight"].item() == ends
    assert up["inner_steps/steps"].item() == 5 + steps and update.num_steps == steps


def test_the_outer_gradient_is_against_the_values_received_last():
    up, _ = task_of(streaming_diloco(alpha=0.5, sync_delay=1), Slope(), sent(2.0, 8.0, 5.0), 1)  # 6, mixed with 2 to 4
    assert (up["line.weight"].item(), up["replica/line.weight"].item()) == (2.0, 4.0)


@pytest.mark.parametrize(("replica", "steps"), [(8.0, 0.0), (float("nan"), 5.0)])
def test_a_client_without_a_sound_replica_begins_from_what_it_receives(replica, steps):
    up, _ = task_of(streaming_diloco(), Slope(), sent(0.0, replica, steps), 2)  # 2, 3
    assert up["replica/line.weight"].item() == 3.0 and up["inner_steps/steps"].item() == 2.0


def test_two_tasks_with_kept_moments_are_one_long_run():
    """Where the received values are the client's own, mixing changes nothing."""
    algorithm, zero = streaming_diloco(sync_delay=0, inner_state="kept"), whole(0.0)
    start = {**sent(8.0, 0.0, 0.0), "exp_avg/line.weight": zero, "exp_avg_sq/line.weight": zero}
    all_at_once, _ = task_of(algorithm, SteepSlope(), start, 5)
    first, _ = task_of(algorithm, SteepSlope(), start, 3)
    own = {name: value for name, value in first.items() if "/" in name}
    second, _ = task_of(algorithm, SteepSlope(), {**own, "line.weight": own["replica/line.weight"]}, 2)
    for name in own:
        assert second[name].item() == pytest.approx(all_at_once[name].item()), name


# ---- the schedule, and the merge of a fragment ----


def weights(coordinator):
    values = coordinator.state.values
    return [values[name].flatten()[0].item() for name in ("fc1.weight", "fc2.weight")]


def test_in_rounds_all_send_one_fragment_and_receive_the_last():
    coordinator = coordinator_for(streaming_diloco(2), num_clients=2)
    start = weights(coordinator)
    tasks = assigned(join(coordinator, [1, 2]))
    step, rise, momentum = 0.0, [0.0, 0.0], [0.0, 0.0]
    for turn, extra in enumerate([{"up": 0}, {"up": 1, "down": 0}, {"up": 0, "down": 1}]):
        assert [dict(tasks[client].extra) for client in (1, 2)] == [extra, extra]
        give(coordinator, tasks[1], 1.0)
        tasks = give(coordinator, tasks[2], 1.0)
        # m <- 0.9 m + 1, theta <- theta + 0.7 (1 + 0.9 m), of the fragment alone
        momentum[turn % 2] = 0.9 * momentum[turn % 2] + 1.0
        step = 0.7 * (1 + 0.9 * momentum[turn % 2])
        rise[turn % 2] += step
        assert [now - was for now, was in zip(weights(coordinator), start, strict=True)] == pytest.approx(rise)


def test_a_client_that_returns_gets_the_whole_model():
    coordinator = coordinator_for(streaming_diloco(2, trigger="each"), num_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    assert [dict(tasks[client].extra) for client in (1, 2)] == [{"up": 1}, {"up": 0}]  # each begins at its id
    (again,) = give(coordinator, tasks[1], 1.0).values()
    assert dict(again.extra) == {"up": 0, "down": 1}
    client = coordinator.roster.clients[1]
    coordinator.handle(Lost(1, "disconnected"), 1.0)
    (returned,) = assigned(coordinator.handle(Joined(client), 3600.0)).values()
    assert dict(returned.extra) == {"up": 1}


def test_asynchronous_steps_count_clients_times_fragments():
    """Delta / N with N = 2 x 2; with nothing merged before, the missing updates count as covering."""
    coordinator = coordinator_for(streaming_diloco(2, trigger="each"), num_clients=2)
    start = weights(coordinator)
    tasks = assigned(join(coordinator, [1, 2]))
    give(coordinator, tasks[2], 1.0)  # fragment 0: fc1
    assert [now - was for now, was in zip(weights(coordinator), start, strict=True)] == pytest.approx([0.7 / 4, 0.0])


# ---- runs ----


def test_a_run_weighs_what_the_formula_says_and_replays(tmp_path):
    """Bytes of a fragment each way with a task, but for the whole model with a client's first; moments never travel."""

    def made():
        algorithm = streaming_diloco(2, inner_state="kept", steps="speed", least_steps=1)
        return experiment(tmp_path / "run", algorithm, model=small_with_adam, compress=Compress(down="bf16", up="int8"))

    run = finish(made())
    first, second = 64 * 16 + 16, 16 * 10 + 10
    # a scale of 4 bytes for each of the 16 rows of 64, one for each other tensor
    ups = {0: first + 4 * (16 + 1), 1: second + 4 * 2}
    rows = sorted(run.rows(), key=lambda row: int(row["assignment"]))  # three rounds of four
    assert [int(row["bytes_down"]) for row in rows] == [
        2 * num for num in (first + second, first, second) for _ in range(4)
    ]
    assert [int(row["bytes_up"]) for row in rows] == [ups[turn] for turn in (0, 1, 0) for _ in range(4)]
    assert run.summary["bytes_down"] == 8 * (2 * first + 2 * second) and equal_replay(made(), run)


FLAKY = (
    '[{"name": "steady", "flops_per_s": 1e8}, {"name": "flaky", "flops_per_s": 5e7,'
    ' "availability": [[0.0, 0.3]], "period_s": 0.5}]'
)


@pytest.mark.quick_cases("each")
@pytest.mark.parametrize("trigger", ["all", "each"])
def test_a_run_that_crashed_ends_as_if_it_had_not_and_replays(tmp_path, monkeypatch, trigger):
    """What lies on the clients of a simulation is in each checkpoint; a client that was away begins anew."""
    options = [
        "--config",
        CONFIG,
        "--algorithm=streaming_diloco",
        "--algorithm.fragments=2",
        f"--algorithm.trigger={trigger}",
        f"--devices={FLAKY}",
        "--max_updates=14",
        "--checkpoint_every=2",
        "--eval_every=100",
        "--train.num_epochs=null",
        "--train.num_steps=4",
    ]
    unbroken = simulated(*options, f"--output={tmp_path / 'whole'}")
    crashed(monkeypatch, 11, *options, f"--output={tmp_path / 'cut'}")
    resumed = simulated("--resume", str(tmp_path / "cut"))
    assert {**resumed, "wall_s": 0} == {**unbroken, "wall_s": 0} and unbroken["updates_lost"] > 0
    assert replay(tmp_path / "cut")["equal"] is True


# ---- settings ----


test_settings_that_do_not_go_together_are_refused = refuses(
    streaming_diloco,
    ({"fragments": 0}, "fragments is 0"),
    ({"pattern": "random"}, "pattern"),
    ({"alpha": 1.5}, "alpha is 1.5"),
    ({"sync_delay": -1}, "sync_delay is -1"),
    ({"delay": 4}, "delay is 4"),
    ({"least_steps": 3}, "least_steps is 3"),
    ({"trigger": "quorum"}, "trigger"),
    ({"inner_state": "old"}, "inner_state"),
    ({"steps": "few"}, "steps"),
)


def test_error_feedback_has_no_place_beside_what_stays_on_the_client(tmp_path):
    with pytest.raises(BadInput, match=r"compress\.up is top_k"):
        finish(experiment(tmp_path, streaming_diloco(2), compress=Compress(up="top_k")))


def test_an_optimizer_of_another_kind_is_refused():
    module = Slope()
    start = {**sent(8.0, 0.0, 0.0), "exp_avg/line.weight": whole(0.0), "exp_avg_sq/line.weight": whole(0.0)}
    with pytest.raises(BadInput, match="inner_state is 'kept', but the model's optimizer is SGD"):
        task_of(streaming_diloco(inner_state="kept"), module, start, 1)
