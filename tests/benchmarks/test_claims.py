"""The verdicts on the papers' claims are those of the committed results, and each is carried by its interval."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from benchmarks import claims as module
from benchmarks.claims import (
    CLAIMS,
    RESULTS,
    VERDICTS,
    WHY,
    Decided,
    all_decided,
    measured,
    needed,
    pages,
    resolution,
    results_of,
    shown,
    spread_out,
    summary,
    verdict_of,
)
from raafl.lab.compare.statistics import Interval


@pytest.fixture(scope="module")
def every():
    return all_decided()


def test_the_pages_are_those_of_the_results():
    stale = [str(path) for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run python -m benchmarks.claims"


def test_no_verdict_goes_beyond_its_interval(every):
    for _, found in every.values():
        for one in found:
            low, high = one.ends if one.measured and one.measured.half is not None else (None, None)
            if one.verdict in ("not run", "cannot be run"):
                assert one.measured is None and one.why
            elif one.verdict in ("shown", "shown smaller") and "level" not in one.claim:
                assert low > 0
                assert one.verdict == "shown" or high < one.size
            elif one.verdict == "shown":
                assert max(high, -low) <= one.claim["margin"]
            elif one.verdict == "contrary":
                assert high < 0 or "level" in one.claim
            assert not one.excluded or (one.verdict == "not shown" and high < one.size)
            assert one.seeds is None or one.seeds > 1


def test_each_claim_says_where_it_stands_and_is_decided_one_way(every):
    for name, claims in yaml.safe_load(CLAIMS.read_text()).items():
        assert len({claim["says"] for claim in claims}) == len(claims), name
        for claim in claims:
            assert {"says", "where", "paper"} <= claim.keys(), claim
            kinds = [kind for kind in ("higher", "sooner", "level", "not_run") if kind in claim]
            assert len(kinds) == (bool(results_of(claim)) or "not_run" in claim), claim
            assert all((RESULTS / f"{result}.json").is_file() for result in results_of(claim))
            assert ("margin" in claim) == ("level" in claim) and ("target" in claim) == ("sooner" in claim)
    assert {one.verdict for _, found in every.values() for one in found} <= set(VERDICTS)


def test_each_reversed_claim_has_a_reason_and_each_reason_a_claim(every):
    named = {
        claim["why"] for claims in yaml.safe_load(CLAIMS.read_text()).values() for claim in claims if "why" in claim
    }
    reversed_ = {one.claim.get("why") for _, found in every.values() for one in found if one.is_reversed}
    assert reversed_ == named == yaml.safe_load(WHY.read_text()).keys()


def test_a_mean_over_results_and_rows_is_taken_seed_by_seed():
    """A less the mean of B and C over two results: 0.8 - 0.55 for seed 0, 0.7 - 0.65 for seed 1; C has no seed 2."""
    finals = {
        "A": ([0.9, 0.6, 0.1], [0.7, 0.8, 0.1]),
        "B": ([0.5, 0.6, 0.1], [0.4, 0.9, 0.1]),
        "C": ([0.7, 0.4], [0.6, 0.7]),
    }
    results = [
        {
            "rows": [
                {"row": label, "runs": [{"seed": seed, "final": value} for seed, value in enumerate(values[place])]}
                for label, values in finals.items()
            ]
        }
        for place in (0, 1)
    ]
    found, bound = measured({"higher": ["A", ["B", "C"]], "results": ["one", "two"]}, *results)
    assert found is not None and (found.num, bound) == (2, "")
    assert found.mean == pytest.approx((0.25 + 0.05) / 2)


def test_clients_that_take_part_more_are_counted_by_seed():
    """Of four clients in 10 versions, A has three (seed 0) and all (seed 1) more often than B in 20: 0.75 - 0.25 and 1 - 0."""
    a = [{"1": 5, "2": 5, "3": 5, "4": 1}, {"1": 2, "2": 2, "3": 2, "4": 2}]
    b = [{"1": 9, "2": 0, "3": 9, "4": 2}, {"1": 3, "2": 3, "3": 3}]
    rows = [
        {"row": label, "runs": [{"seed": i, "versions": num, "merged": one} for i, one in enumerate(merged)]}
        for label, num, merged in (("A", 10, a), ("B", 20, b))
    ]
    found, bound = measured({"higher": ["A", "B"], "figure": "gaining"}, {"rows": rows})
    assert found is not None and (found.mean, found.num, bound) == (0.75, 2, "")


def test_merges_are_counted_in_place_of_seconds(tmp_path, monkeypatch):
    """A merges twice a second, and is at 0.9 after 1 and 2 s; so is B, which merges once a second: twice as many.

    After the first merge, at 0.5 and 1 s, A is 0.3 below. By the evaluations before, A's times may be sqrt(0.5 x 0.75) of these,
    and B's a half.
    """
    curves = {
        "A": ([[0.0, 0.0], [0.5, 0.6], [1.0, 0.9]], [[0.0, 0.0], [0.5, 0.5], [1.0, 0.5], [1.5, 0.7], [2.0, 0.9]]),
        "B": ([[0.0, 0.0], [0.5, 0.1], [1.0, 0.9]], [[0.0, 0.0], [1.0, 0.8], [2.0, 0.9]]),
    }
    rows = [
        {
            "row": label,
            "runs": [
                {"seed": seed, "curve": curve, "time_s": end, "updates": each * end, "time_to": {"0.9": end}}
                for seed, (end, curve) in enumerate(zip((1.0, 2.0), curves[label], strict=True))
            ],
        }
        for label, each in (("A", 2), ("B", 1))
    ]
    (tmp_path / "r.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    ratio = module._compared_rows({"result": "r", "rows": ["A", "B"], "target": 0.9})
    assert ratio == "2.00 x (1.22 to 4.00)"
    gap = module._compared_rows({"result": "r", "rows": ["A", "B"], "after": 1})
    assert gap == "-30.00 ± 0.00 points"


def test_rows_are_compared_by_seconds_and_at_the_end(tmp_path, monkeypatch):
    """A takes 6 and 12 s to 0.9, B 3 and 6; A's last values are 0.1 above B's."""
    times, ends = {"A": (6.0, 12.0), "B": (3.0, 6.0)}, {"A": 0.95, "B": 0.85}
    rows = [
        {
            "row": label,
            "runs": [
                {"seed": seed, "time_to": {"0.9": time_s}, "curve": [[1.0, 0.9], [2.0, ends[label]]]}
                for seed, time_s in enumerate(times[label])
            ],
        }
        for label in times
    ]
    (tmp_path / "r.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    ratio = module._compared_rows({"result": "r", "rows": ["A", "B"], "target": 0.9, "seconds": True})
    # of evaluations at 1 and 2 s: A's times may be 2 s, a factor sqrt(3 x 6) less, B's a factor sqrt(1.5 x 3)
    assert ratio == "2.00 x (0.47 to 4.24)"
    assert module._compared_rows({"result": "r", "rows": ["A", "B"]}) == "+10.00 ± 0.00 points"


@pytest.mark.parametrize(
    ("claim", "mean", "half", "p", "bound", "verdict"),
    [
        ({"higher": []}, 0.1, 0.05, 0.01, "", "shown"),
        ({"higher": [], "size": 0.12}, 0.1, 0.05, 0.01, "", "shown"),
        ({"higher": [], "size": 0.16}, 0.1, 0.05, 0.01, "", "shown smaller"),
        ({"higher": []}, 0.1, 0.05, 0.06, "", "not shown"),  # not after Holm
        ({"higher": []}, -0.1, 0.05, 0.01, "", "contrary"),
        ({"higher": []}, 0.1, None, None, "", "not shown"),  # one seed
        ({"sooner": [], "size": 4}, math.log(2), 0.1, 0.01, "", "shown smaller"),
        ({"sooner": [], "size": 4}, math.log(2), 0.1, 0.01, "at least", "shown"),
        ({"sooner": []}, math.log(2), 0.1, 0.01, "at most", "not shown"),  # the faster row did not get there
        ({"sooner": []}, math.log(2), 0.1, 0.01, "open", "not shown"),
        ({"sooner": []}, -math.log(2), 0.1, 0.01, "at least", "not shown"),
        ({"sooner": []}, -math.log(2), 0.1, 0.01, "at most", "contrary"),
        ({"level": [], "margin": 0.1}, 0.04, 0.05, None, "", "shown"),
        ({"level": [], "margin": 0.1}, 0.06, 0.05, None, "", "not shown"),
        ({"level": [], "margin": 0.1}, -0.2, 0.05, None, "", "contrary"),
    ],
)
def test_a_verdict_is_what_the_interval_says(claim, mean, half, p, bound, verdict):
    assert verdict_of(claim, Interval(mean, half, 3), p, bound) == verdict


def test_a_time_lies_between_two_evaluations():
    """A is seen at 4 s, after 2 s, and B at 9 s, after 3 s and after 8 s: the ratio is at least 3 / 4, or 8 / 4 for the second."""

    def runs(time_s, *curves):
        return [{"seed": seed, "time_to": {"0.9": time_s}, "curve": curve} for seed, curve in enumerate(curves)]

    ours = runs(4.0, [[0.0, 0.1], [2.0, 0.5], [4.000001, 0.9]], [[2.0, 0.5], [4.0, 0.9]])
    theirs = runs(9.0, [[3.0, 0.5], [9.0, 0.9]], [[8.0, 0.5], [9.0, 0.9]])
    rows = {"rows": [{"row": "A", "runs": ours}, {"row": "B", "runs": theirs}]}
    claim = {"sooner": ["A", "B"], "target": "0.9"}
    below, above = resolution(claim, rows)
    assert (below, above) == (pytest.approx(math.log(3 * 9 / 8) / 2), pytest.approx(math.log(2)))
    assert resolution({"higher": ["A", "B"]}, rows) == (0, 0)
    level = Interval(0.5, 0.0, 3)  # all seeds at one evaluation: p is 0
    assert verdict_of(claim, level, 0.0, "", (0.6, 0.1)) == "not shown"
    assert verdict_of(claim, level, 0.0, "", (0.4, 0.1)) == "shown"
    assert verdict_of({**claim, "size": math.exp(0.7)}, level, 0.0, "", (0.4, 0.1)) == "shown smaller"
    assert verdict_of({**claim, "size": math.exp(0.7)}, level, 0.0, "", (0.4, 0.3)) == "shown"
    ours[0]["curve"] = [[4.0, 0.9]]
    assert resolution(claim, rows)[1] == math.inf, "reached at the first evaluation"


@pytest.mark.parametrize(("effect", "tests", "seeds"), [(0.5, 1, 34), (0.8, 1, 15), (1.0, 1, 10), (-1.0, 1, None)])
def test_the_number_of_seeds_is_that_of_tables_of_power(effect, tests, seeds):
    """Of a paired t test, two-sided at 0.05, with power 0.8: Cohen's and G*Power's tables."""
    half = 3.0 * 4.302653 / math.sqrt(3)  # of three values with standard deviation 3
    assert needed(3.0 * effect, Interval(0.0, half, 3), tests) == seeds


def test_a_claim_that_is_not_shown_says_what_would_decide_it():
    def left(claim, mean, half, bound=""):
        one = Decided(claim, "not shown", Interval(mean, half, 3), 0.5, (0.0, 0.0), 1, bound)
        return module._verdict(one)

    assert left({"higher": [], "size": 0.3}, 0.1, 0.1) == "not shown, size excluded"
    half = 4.302653 / math.sqrt(3)  # standard deviation 1
    assert left({"higher": [], "size": 1.0}, 0.1, half) == "not shown, 10 seeds"
    assert left({"higher": []}, 0.5, half) == "not shown, 34 seeds"
    assert left({"higher": []}, -0.5, half) == "not shown"
    assert left({"level": [], "margin": 1.5}, -0.5, half) == "not shown, 10 seeds"
    assert left({"sooner": [], "size": 9.0}, 0.1, half, bound="at least") == "not shown, longer runs"


def test_differences_are_paired_by_seed_and_times_are_ratios():
    def run(seed, final, time_s):
        return {"seed": seed, "final": final, "time_to": {"0.9": time_s}, "time_s": 80.0}

    rows = [("A", [run(1, 0.5, 10.0), run(2, 0.7, 20.0)]), ("B", [run(2, 0.6, None), run(1, 0.4, 40.0)])]
    result = {"rows": [{"row": label, "runs": runs} for label, runs in rows]}
    found, bound = measured({"higher": ["A", "B"]}, result)
    assert (found.mean, bound) == (pytest.approx(0.1), "")
    found, bound = measured({"sooner": ["A", "B"], "target": "0.9"}, result)
    assert (found.mean, bound) == (pytest.approx(math.log(4)), "at least")  # 40 / 10, and 80 / 20, the end of the run
    found, bound = measured({"sooner": ["B", "A"], "target": "0.9"}, result)
    assert (found.mean, bound) == (pytest.approx(-math.log(4)), "at most")


def test_a_figure_is_a_field_of_a_run_or_one_of_its_metrics(every):
    rows = [
        {"row": label, "runs": [{"seed": 0, "utilisation": value, "metrics": {"macro_f1": 2 * value}}]}
        for label, value in (("A", 0.3), ("B", 0.2))
    ]
    for figure, difference in (("utilisation", 0.1), ("macro_f1", 0.2)):
        found, _ = measured({"higher": ["A", "B"], "figure": figure}, {"rows": rows})
        assert found is not None and found.mean == pytest.approx(difference)
    assert all(one.measured is not None for _, found in every.values() for one in found if "result" in one.claim)


def test_of_two_rows_that_did_not_reach_a_target_the_one_that_ended_sooner_is_not_the_faster():
    def text_of(reached_s):
        def runs(end_s):
            return [{"seed": seed, "time_to": {"0.9": None}, "time_s": end_s + seed} for seed in range(3)]

        rows = [{"row": "A", "runs": runs(10.0)}, {"row": "B", "runs": runs(80.0)}]
        for row in rows:
            row["runs"][0]["time_to"] = {"0.9": reached_s and reached_s * row["runs"][0]["time_s"]}
        claim = {"sooner": ["A", "B"], "target": "0.9"}
        found, bound = measured(claim, {"rows": rows})
        assert bound == ("unreached" if reached_s is None else "open") and found.p < 0.01
        assert verdict_of(claim, found, found.p, bound) == "not shown"
        return shown(Decided(claim, "not shown", found, found.p, bound=bound))

    assert text_of(None) == "no run of either reached it"
    assert text_of(1.0).startswith("7.38 x (")


def test_times_at_the_same_evaluations_differ_by_less_than_their_distance():
    """Of three values within a width of 0.3 the standard deviation is at most 0.15 sqrt(3 / 2); t(0.975, 2) = 4.3027."""
    level, slack = Interval(0.5, 0.0, 3), (0.1, 0.2)
    found = spread_out(level, slack)
    assert (found.mean, found.num) == (0.5, 3) and found.half == pytest.approx(4.302653 * 0.15 / math.sqrt(2))
    assert spread_out(level, (0.0, 0.0)) is level and spread_out(None, slack) is None
    assert (
        spread_out(Interval(0.5, 0.1, 3), slack).half == 0.1 and spread_out(Interval(0.5, None, 1), slack).half is None
    )


def test_a_paper_is_summed_up_in_a_sentence(every):
    _, found = every["timely-fl"]
    assert summary("timely-fl", found[:1] * 2 + found[-1:]).startswith("Of TimelyFL's 3 claims ")
    assert all(shown(one) for one in found)
