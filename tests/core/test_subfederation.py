"""A subfederation is a client whose local training is a federation: exact where sums are, refused or noted elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model_zoo import MLP
from raafl.algorithms import ALGORITHMS, diloco, fed_avg, fed_buff, fed_prox
from raafl.core.options import Guard, Privacy, Subfederation, Training
from raafl.core.subfederation import check_contributions, common, differences, from_json, problem_above, to_json
from raafl.core.types import Assignment, ClientInfo, Received
from raafl.data import Dirichlet
from raafl.parts import RateSelect
from raafl.runtime.setup import build
from raafl.submodel import FULL, FlatTensors, Spec, SpecError, Submodels
from tests.helpers.levels import Level
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import experiment

HALVES = {1: (1, 2, 3), 2: (4, 5, 6)}
ONE = Subfederation(merges=1)
PRIVATE = Privacy(noise_multiplier=1.0, clip_norm=1.0)
RATES = (1.0, 0.5, 0.25, 0.5, 0.25, 0.25)


def levels(tmp_path, above, below=None, groups=HALVES, subfederation=ONE, **fields):
    """Return a server over subfederations, whose clients have the ids, data and seeds that they have in a flat federation."""
    settings = {"partition": Dirichlet(0.5), "clients": 6, "max_updates": None, **fields}
    regions = {
        region: Level(
            experiment(tmp_path, (below or above)(len(clients)), **settings, subfederation=subfederation),
            dict.fromkeys(clients),
        )
        for region, clients in groups.items()
    }
    settings |= {"max_updates": 3 * len(groups), "guard": Guard(max_below=6, max_weight=None)}
    return Level(experiment(tmp_path, above(len(groups)), **settings), regions)


def flat(tmp_path, algorithm, **fields):
    settings = {"partition": Dirichlet(0.5), "clients": 6, "max_updates": 18, **fields}
    level = Level(experiment(tmp_path, algorithm(6), **settings), dict.fromkeys(range(1, 7)))
    return level.start_together(HALVES.values())


def largest_gap(one, other):
    buffers = zip(one.values.buffers.values(), other.values.buffers.values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in buffers)


def rates(num):
    return RateSelect(rates=list(RATES))


METHODS = {
    "fed_avg": (lambda num: fed_avg(), None),
    "fed_avg, equal weights": (lambda num: fed_avg(by_samples=False), None),
    "fed_avg, submodels": (lambda num: fed_avg(submodel=rates(num)), None),
    "fed_prox": (lambda num: fed_prox(0.1), None),
    "fed_buff": (lambda num: fed_buff(num), None),
    "fed_buff, submodels": (
        lambda num: fed_buff(num, 0.5, submodel=rates(num)),
        lambda num: fed_buff(num, submodel=rates(num)),
    ),
    "diloco": (lambda num: diloco(), lambda num: diloco(1.0, 0.0)),
    "diloco, by samples": (lambda num: diloco(weights="samples"), lambda num: diloco(1.0, 0.0, weights="samples")),
    "diloco, submodels": (lambda num: diloco(submodel=rates(num)), lambda num: diloco(1.0, 0.0, submodel=rates(num))),
}


@pytest.mark.parametrize("name", METHODS)
def test_two_subfederations_equal_the_flat_federation(tmp_path, name):
    above, below = METHODS[name]
    hierarchy = levels(tmp_path, above, below).run()
    wanted = flat(tmp_path, above)
    assert hierarchy.coordinator.state.version == wanted.coordinator.state.version == 3
    assert largest_gap(hierarchy, wanted) < 1e-6


def test_three_levels_equal_the_flat_federation(tmp_path):
    settings = {"partition": Dirichlet(0.5), "clients": 6, "max_updates": None}
    guard = Guard(max_below=6, max_weight=None)

    def below(clients):
        made = experiment(tmp_path, fed_avg(submodel=rates(1)), **settings, subfederation=ONE, guard=guard)
        return Level(made, clients)

    middle = below({1: below(dict.fromkeys((1, 2))), 3: below(dict.fromkeys((3,)))})
    top = experiment(tmp_path, fed_avg(submodel=rates(1)), **{**settings, "max_updates": 6, "guard": guard})
    hierarchy = Level(top, {1: middle, 2: below(dict.fromkeys((4, 5, 6)))}).run()
    assert largest_gap(hierarchy, flat(tmp_path, lambda num: fed_avg(submodel=rates(num)))) < 1e-6


def test_a_subfederation_weighs_at_most_as_much_as_its_clients_may(tmp_path):
    # six clients of 100 samples above, of which three stand below client 1: the median of six is 100
    made = experiment(tmp_path, fed_avg(), clients=4, guard=Guard(max_below=3, max_weight=2.0))
    coordinator = build(made, pace=False, min_clients=4).coordinator
    for client in (2, 3, 4):
        coordinator.roster.join(ClientInfo(client, 100, own_data=True))
    region = ClientInfo(1, 100_000, own_data=True, below=3)
    coordinator.roster.join(region)
    assert coordinator.admission.counted_samples(region, 100_000) == 2 * 100 * 3


def test_between_two_tasks_of_the_server_above_nobody_trains(tmp_path):
    level = Level(experiment(tmp_path, fed_avg(), max_updates=None, subfederation=ONE), dict.fromkeys((1, 2, 3, 4)))
    assert not level.run().settled
    values = FlatTensors.from_named({name: value + 1 for name, value in level.values.items()}, level.values.layout)
    assignment = Assignment(5, 1, 0, 0, 7, FULL, 0, None, None, 1, 0.0)
    update = level.train(assignment, values, "delta")
    assert [one.num_updates for one in update.contributions] == [4.0]
    assert level.coordinator.state.version == 1 and level.coordinator.above.waits
    assert largest_gap(level, level) == 0.0 and not level._due


def _subfederation_and_server(tmp_path):
    level = Level(experiment(tmp_path, fed_buff(2), max_updates=None, subfederation=ONE), dict.fromkeys((1, 2, 3, 4)))
    return level, level.coordinator


def test_what_clients_began_for_an_earlier_task_does_not_count(tmp_path):
    level, coordinator = _subfederation_and_server(tmp_path)
    level.tell(Received(1, 0, FULL, level.values.clone()))
    assert len(level._due) == 2  # as many as the last merge of the task needs
    level._work()  # one of two has reported as the server above loses this task and gives another
    level.tell(Received(2, 0, FULL, level.values.clone()))
    assert [one.outcome for one in level.settled] == ["unused"]
    level.run()
    assert [one.outcome for one in level.settled] == ["unused", "refused:late", "merged", "merged"]
    assert not coordinator.admission.backoff.refused  # a late answer is not the client's fault


def test_a_second_task_without_a_merge_below_starts_from_its_own_values(tmp_path):
    level, _ = _subfederation_and_server(tmp_path)
    for number in (1, 2):
        values = level.values.clone()
        for buffer in values.buffers.values():
            buffer.fill_(number)
        level.tell(Received(number, 0, FULL, values))
    for _ in range(2):  # both had begun for the first one
        level._work()
    sent = {float(next(iter(values.buffers.values()))[0]) for _, values in level._due}
    assert sent == {2.0}


def test_clients_train_all_of_the_layers_that_the_server_above_names(tmp_path):
    level = Level(experiment(tmp_path, fed_avg(), max_updates=None, subfederation=ONE), dict.fromkeys((1, 2, 3, 4)))
    last = Spec.select(trained=["layers.3"])
    received = level.coordinator.state.submodels.plan(last, "sent").gather(level.values)
    update = level.train(Assignment(5, 1, 0, 0, 7, last, 0, None, None, 1, 0.0), received, "delta")
    assert [(one.spec, one.num_updates) for one in update.contributions] == [(last, 4.0)]
    assert list(update.tensors.layout.by_name) == ["layers.3.weight", "layers.3.bias"]


HALF = Spec.select({"layers.1": range(12)})
LOWEST = Spec.select(
    {"ffn": range(6)}, blocks={"h": range(2)}, trained=["wte", "h.0", "h.1", "exit1", "exit2"], exits=["1", "2"]
)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (HALF, Spec.select(trained=["layers.3"]), Spec.select({"layers.1": range(12)}, trained=["layers.3"])),
        (Spec.select(trained=["h.0", "wte"]), Spec.select(trained=["h"]), Spec.select(trained=["h.0"])),
        (Spec.select({"ffn": range(4)}), LOWEST, replace(LOWEST, kept=(("ffn", range(4)),))),
        (
            Spec.select(blocks={"h": range(1)}, trained=["wte", "h.0", "exit1"], exits=["1"]),
            LOWEST,
            Spec.select({"ffn": range(6)}, blocks={"h": range(1)}, trained=["wte", "h.0", "exit1"], exits=["1"]),
        ),
    ],
)
def test_what_two_submodels_share_by_hand(one, other, expected):
    assert common(one, other) == common(other, one) == expected


def test_two_submodels_that_train_nothing_in_common_are_refused():
    with pytest.raises(SpecError, match=r"trains nothing of trains h\.1, from the server above"):
        common(Spec.select(trained=["h.0"]), Spec.select(trained=["h.1"]))


def _checked(data, spec=None):
    submodels = Submodels(MLP(64, (24,), 10))
    return check_contributions(from_json(data), submodels, spec or FULL, 3)


test_what_a_subfederation_says_is_checked = refuses(
    _checked,
    ({"data": "few"}, "contributions is no list"),
    ({"data": [[{}, 1.0, 5]]}, "a contribution has other fields"),
    ({"data": [[{}, 0, 5, 1]]}, "a contribution has no number of updates"),
    ({"data": [[{}, float("nan"), 5, 1]]}, "a contribution has no number of updates"),
    ({"data": [[{}, 1.0, 0, 1]]}, "a contribution has no number of samples or steps"),
    ({"data": [[{}, 1.0, 2.5, 1]]}, "a contribution has no number of samples or steps"),
    ({"data": [[{}, 4.0, 5, 1]]}, "4 updates of 3 clients"),
    ({"data": [[{}, 1e-9, 5, 1]] * (64 * 3 + 1)}, "193 contributions of 3 clients, at most 64 of each count"),
    ({"data": [[7, 1.0, 5, 1]]}, "spec is '7'"),
    ({"data": [[{}, 1.0, 5, 1]], "spec": HALF}, "is no part of"),
    error=(ValueError, SpecError),
)


def test_contributions_of_one_submodel_are_one():
    data = [[HALF.to_json(), 1, 5, 2], [{}, 1, 7, 2], [HALF.to_json(), 1, 6, 3]]
    assert to_json(_checked(data)) == [[HALF.to_json(), 2.0, 11, 5], [{}, 1.0, 7, 2]]
    assert _checked([[{}, 2**-6, 5, 1]] * (64 * 3))[0].num_updates == 3.0


@pytest.mark.parametrize(
    ("above", "below", "num_merges", "said"),
    [
        (fed_avg(), fed_avg(), 1, []),
        (fed_buff(2), fed_buff(3), 1, []),
        (diloco(), diloco(1.0, 0.0), 1, []),
        (fed_avg(), fed_avg(), 2, ["several merges"]),
        (fed_avg(), fed_avg(), None, ["several merges"]),
        (fed_buff(2), fed_buff(2), 1, ["may leave clients out"]),
        (fed_buff(2), fed_buff(3, 0.5), 1, ["by 0.5 of"]),
        (fed_avg(), fed_avg(by_samples=False), 1, ["weigh otherwise"]),
        (fed_avg(), fed_avg(cohort=2), 1, ["may leave clients out"]),
        (fed_prox(0.1), fed_avg(), 1, ["train otherwise"]),
    ],
)
def test_what_differs_from_a_flat_federation_is_said(above, below, num_merges, said):
    found = differences(above, below, Training(), num_merges, 3)
    assert len(found) == len(said) and all(part in line for part, line in zip(said, found, strict=True))


@pytest.mark.parametrize("name", ["fed_raa", "fed_avg", "fed_prox", "fed_buff", "diloco"])
def test_methods_whose_merge_is_a_mean_take_subfederations(name):
    algorithm = ALGORITHMS[name]()
    assert problem_above(algorithm, algorithm.merge) is None


@pytest.mark.parametrize(
    "name", ["scaffold", "hetero_fl", "fed_nova", "fed_per", "ca2fl", "fed_pm", "moon", "prune_fl"]
)
def test_a_merge_that_must_see_each_client_takes_none(name):
    algorithm = ALGORITHMS[name]()
    found = problem_above(algorithm, algorithm.merge)
    assert found == f"the merge of {name} ({algorithm.merge}) needs each client's own update, not a mean of several"


def test_neither_does_a_method_with_an_exchange_or_bundles():
    split, variates = ALGORITHMS["split_fed"](), ALGORITHMS["scaffold"]()
    assert problem_above(split, split.merge) == "tasks of split_fed exchange messages with the server"
    # with a merge that means would do for
    assert problem_above(variates, split.merge) == "clients of scaffold send more than the values of their submodel"


test_what_cannot_be_below_is_refused = refuses(
    lambda algorithm, **fields: build(experiment("unused", algorithm, max_updates=None, **fields), pace=False),
    ({"algorithm": diloco(), "subfederation": ONE}, "whose merge .* is more than a mean"),
    ({"algorithm": "scaffold", "guard": Guard(max_below=2)}, "guard.max_below is 2, but"),
    ({"algorithm": fed_avg(), "guard": Guard(max_below=2), "privacy": PRIVATE}, "but privacy is on"),
)
