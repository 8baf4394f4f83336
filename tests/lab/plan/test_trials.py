"""Candidates are tried at the virtual clock before a run: as many as a share of its work allows, the same way each time."""

import json
from dataclasses import replace

import pytest

import raafl
from raafl.commands.auto import parse_run
from raafl.commands.cli import main
from raafl.config.parse import load_experiment
from raafl.core.options import Privacy
from raafl.errors import BadInput
from raafl.lab.plan import choose as choosing
from raafl.lab.plan.choose import Candidate, Cell, Features, Table, auto, choose, trial_share
from raafl.lab.plan.trials import Load, planned, ranked
from tests.helpers.cached_models import reuse_findings

FEATURES = Features(slowest=0.0, fastest=0.0, link=0.0, fits=1.0, present=1.0, clients=1.0)
CANDIDATES = [
    Candidate("FedBuff", "fed_buff", {"buffer_size": 4}, 12, 7),
    Candidate("FedAvg", "fed_avg", {}, 12, 7),
    Candidate("Fed-RAA", "fed_raa", {"fragments": 3}, 12, 7),
]
TABLE = Table(
    CANDIDATES,
    [
        Cell("equal", "one", FEATURES, {"FedBuff": 1.0, "FedAvg": 1.0, "Fed-RAA": 100.0}),
        Cell("equal", "other", FEATURES, {"FedBuff": 50.0, "FedAvg": 100.0, "Fed-RAA": 1.0}),
    ],
)
CONFIG = ["--config", "configs/quickstart.yaml", "--max_updates", "60", "--progress", "quiet"]


@pytest.fixture(autouse=True)
def cached():
    with reuse_findings():
        yield


@pytest.fixture(scope="module")
def experiment():
    return replace(load_experiment(*CONFIG[1:]), algorithm=auto())


# ---- the plan ----


def test_more_candidates_are_tried_for_a_shorter_time(experiment):
    """Four candidates of one load: 4 T for the first stage, 2 T for the second; a tenth of 600 s is 60 s, so T is 10 s."""
    timed = replace(experiment, max_updates=None, max_time=600)
    loads = {label: Load(per_s=2.0, per_update=1.0) for label in "abcde"}
    found = planned(list("abcde"), loads, timed, 0.1, task_s=20.0)
    assert (found.labels, found.stages, found.share) == (tuple("abcd"), ((10.0, 2), (20.0, 1)), 0.1)
    fewer = planned(list("abcde"), loads, timed, 0.1, task_s=30.0)  # 3 T and then 2 T: 12 s are too short
    assert (fewer.labels, fewer.stages) == (tuple("ab"), ((30.0, 1),))
    assert "about 10%" in fewer.announcement()


def test_two_candidates_may_take_up_to_twice_the_share(experiment):
    """Two for 30 s are a tenth of 600 s; half a task of 100 s takes 50 s, which is 1/6; of 130 s it would be above 1/5."""
    timed = replace(experiment, max_updates=None, max_time=600)
    loads = dict.fromkeys("ab", Load(2.0, 1.0))
    found = planned(["a", "b"], loads, timed, 0.1, task_s=100.0)
    assert found.stages == ((50.0, 1),) and found.share == pytest.approx(1 / 6)
    assert planned(["a", "b"], loads, timed, 0.1, task_s=130.0).startswith("10% of the run is less than half a task")


def test_a_run_without_limits_has_no_share(experiment):
    endless = replace(experiment, max_updates=None)
    loads = dict.fromkeys("ab", Load(2.0, 1.0))
    assert planned(["a", "b"], loads, endless, 0.1, 1.0).startswith("neither max_time nor max_updates")
    assert planned(["a"], loads, experiment, 0.1, 1.0) == "there is one candidate"


def test_trials_spend_no_epsilon_that_a_run_does_not_count(experiment):
    """What trials find is seen by all, so that a private run has none: the table does not know the clients' data."""
    private = replace(experiment, privacy=Privacy(clip_norm=1.0, noise_multiplier=1.0))
    found = choose(private, TABLE, share=0.3)
    assert found.trials is None and "privacy budget" in found.reasons[2]


def test_the_share_is_a_tenth_in_simulations_alone():
    assert [trial_share(auto(), simulated=simulated) for simulated in (True, False)] == [0.1, 0.0]
    assert [trial_share(auto(trials=0.3), simulated=simulated) for simulated in (True, False)] == [0.3, 0.3]
    with pytest.raises(BadInput, match=r"trials is 1.5: give a share"):
        raafl.auto(trials=1.5)


# ---- the trials ----


def test_each_tasks_favourite_is_tried_and_the_same_is_chosen_again(experiment):
    """FedBuff and Fed-RAA are the favourites of the table's two tasks; workers change nothing."""
    found = choose(experiment, TABLE, share=0.3)
    assert found.trials is not None and set(found.trials.order[:2]) <= {"FedBuff", "Fed-RAA", "FedAvg"}
    assert found.trials.metric == "loss" and 0 < found.trials.share <= 0.31
    _, values = found.trials.stages[-1]
    best = min(values, key=lambda label: values[label])
    assert found.trials.decisive and found.trials.untrained > 2.2
    assert (
        found.trials.order[0] == found.candidate.label
        and (found.candidate.label == best) != found.trials.decided_by_table
    )
    assert found.reasons[2].startswith("auto: ") and "before virtual time 0" in found.reasons[2]
    again = choose(replace(experiment, workers=2, batch_clients=4), TABLE, share=0.3)
    assert again.trials.to_json() == found.trials.to_json()
    told = choose(experiment, TABLE, share=0.3, only_plan=True)
    assert told.trials is None and told.reasons[2].startswith("auto: tries ")


def test_a_difference_within_the_noise_leaves_the_order_to_the_table():
    """By hand: "b" is 0.02 above "a" with a standard error of 0.02 (two parts of 0.04 and 0.0); "c" is 0.5 below in each."""
    values = {"c": (0.1, 0.1), "a": (0.6, 0.6), "b": (0.64, 0.6), "failed": None}
    found = ranked(values, (0.0, 0.05), 1.0)
    assert (found.order, found.decisive, found.by_table) == (["a", "b", "c", "failed"], True, True)
    turned = {"b": values["b"], "a": values["a"]}
    assert ranked(turned, (0.0, 0.05), 1.0).order == ["b", "a"] and not ranked(turned, (0.0, 0.05), 1.0).by_table
    losses = {"far": (1.0, 1.1), "near": (0.5, 0.55)}  # smaller is better, and 0.5 and 0.55 are clearly so
    assert ranked(losses, (2.3, 2.4), -1.0).order == ["near", "far"]


def test_where_nothing_is_clearly_learnt_a_comparison_says_nothing():
    """Candidates at chance, one of them worse than the untrained model in one part: the table's order stays, failures last."""
    values = {"failed": None, "a": (0.1, 0.1, 0.1), "b": (0.2, 0.05, 0.12), "c": (0.0, 0.1, 0.0)}
    found = ranked(values, (0.1, 0.1, 0.1), 1.0)
    assert (found.order, found.decisive) == (["a", "b", "c", "failed"], False)
    assert ranked({"a": (0.3, 0.4, 0.3)}, (0.1, 0.1, 0.1), 1.0).decisive
    assert ranked({"a": (0.3, 0.4, 0.3)}, None, 1.0).decisive  # the untrained loss is not finite, and this one is


def test_the_table_decides_where_the_trials_say_nothing(monkeypatch, tmp_path, capsys):
    """At a rate of 0 no candidate learns; the table's first of all candidates is taken, and message and files tell it."""
    monkeypatch.setattr(Table, "load", classmethod(lambda cls: TABLE))
    asked = ["--algorithm", "auto", "--algorithm.trials", "0.3", "--output", str(tmp_path / "run"), "--json"]
    assert main(["simulate", *CONFIG, *asked, "--model.lr", "0", "--max_updates", "40"]) == 0
    summary = json.loads(capsys.readouterr().out)
    chosen = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])["chosen"]
    assert chosen["trials"]["decisive"] is False and summary["trials"]["decisive"] is False
    assert summary["trials"]["untrained"] == chosen["trials"]["stages"][-1]["measured"][next(iter(chosen["scores"]))]
    assert (
        chosen["reasons"][2].endswith("so that the table decides")
        and "than the untrained model" in chosen["reasons"][2]
    )
    assert min(chosen["scores"].values()) == 1.0  # the best by the table


def test_trials_are_booked_and_not_made_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Table, "load", classmethod(lambda cls: TABLE))
    asked = ["--algorithm", "auto", "--algorithm.trials", "0.3", "--output", str(tmp_path / "run"), "--json"]
    assert main(["simulate", *CONFIG, *asked]) == 0
    summary = json.loads(capsys.readouterr().out)
    first = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    booked = first["chosen"]["trials"]
    assert booked["virtual_s"] > 0 and booked["updates"] > 0 and "trials_real_s" not in first["chosen"]
    assert summary["trials"]["real_s"] > 0 and booked.items() <= summary["trials"].items()

    def never(*arguments, **options):
        raise AssertionError("tried again")

    monkeypatch.setattr(choosing, "tried", never)
    assert main(["replay", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True


def test_failed_trials_leave_the_choice_to_the_table(experiment, monkeypatch):
    def fails(*arguments):
        raise raafl.RunFailed("FedBuff: no metric")

    monkeypatch.setattr(choosing, "tried", fails)
    found = choose(experiment, TABLE, share=0.3)
    assert found.trials is None and found.reasons[2].endswith("since the trials failed: FedBuff: no metric")


def test_clients_of_a_real_run_try_nothing(monkeypatch):
    monkeypatch.setattr(Table, "load", classmethod(lambda cls: TABLE))
    for command in ("fit", "join"):
        with pytest.raises(BadInput, match=r"algorithm\.trials is 0\.2, but of a real run's processes only the server"):
            parse_run(command, [*CONFIG[:2], "--algorithm", "auto", "--algorithm.trials", "0.2"])
