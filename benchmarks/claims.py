"""Write docs/claims.md, the verdict on each claim of the papers: python -m benchmarks.claims [--check].

Claims are in benchmarks/claims.yaml, by hand; verdicts are computed from the runs of committed results. Differences (of times,
the logarithm of their ratio) are paired by seed, with Student's t; p-values are corrected by Holm's method for all claims that one
result decides. A run that did not reach a target counts as if it had reached it at its end: a bound, unless both rows have such
runs. Times that are equal for all seeds have the largest spread that the distance of evaluations leaves. A claim that is not shown
gets the number of seeds that would show the paper's size, by the spread of the differences that was seen.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from scipy.special import stdtrit

from benchmarks.tables import ROOT, markdown
from raafl.commands.reproduce import Exhibit, Paper, paper
from raafl.lab.compare.results import gaining
from raafl.lab.compare.statistics import ALPHA, Interval, holm, paired
from raafl.rules import CURRENT, recorded_revision
from raafl.units import quantity

CLAIMS = ROOT / "benchmarks" / "claims.yaml"
WHY = ROOT / "benchmarks" / "claims-why.yaml"
PAGE = ROOT / "docs" / "claims.md"
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
VERDICTS = ("shown", "shown smaller", "not shown", "contrary", "not run", "cannot be run")
NAMES = {"fed-raa": "Fed-RAA", "co-s2p": "Co-S2P", "timely-fl": "TimelyFL", "ram-fed": "RA-Fed and RAM-Fed"}
_SUMMARY = re.compile(r"(<!-- claims -->\n).*?(<!-- end of claims -->)", re.S)
_KINDS = ("higher", "sooner", "level")
_POWER, _MOST_SEEDS = 0.8, 1000


@dataclass(frozen=True)
class Decided:
    """A claim of a paper with what its runs have measured, and the verdict."""

    claim: Mapping[str, Any]
    verdict: str
    measured: Interval | None = None  # difference, or logarithm of a ratio of times; None = not run
    p: float | None = None  # corrected p-value of the difference
    slack: tuple[float, float] = (0.0, 0.0)  # what the distance of evaluations adds to the interval, below and above
    tests: int = 1  # number of claims that the result decides
    # what the true difference is where a run did not reach the target: "at least" or "at most" the measured, "open", or
    # "unreached" where no run of either row did
    bound: str = ""
    why: str = ""  # why there is no run

    @property
    def size(self) -> float | None:
        """The paper's size in units of the difference; None = it gives a direction only, or says that there is no difference."""
        size = self.claim.get("size")
        return math.log(size) if size is not None and "sooner" in self.claim else size

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the interval of the difference; it must have been measured with two seeds or more."""
        assert self.measured is not None and self.measured.half is not None
        mean, half, (below, above) = self.measured.mean, self.measured.half, self.slack
        return mean - half - below, mean + half + above

    @property
    def is_reversed(self) -> bool:
        """Whether a reason is given why the difference comes out the other way, shown or not."""
        mean = 0.0 if self.measured is None else self.measured.mean
        return self.verdict == "contrary" or (self.verdict == "not shown" and "why" in self.claim and mean < 0)

    @property
    def excluded(self) -> bool:
        """Whether the whole interval of a claim that is not shown lies below the paper's size."""
        if self.verdict != "not shown" or self.size is None or self.measured is None or self.measured.half is None:
            return False
        return not self.bound and self.ends[1] < self.size

    @property
    def seeds(self) -> int | None:
        """Number of seeds that would show the paper's size, or without one the difference seen, with probability 0.8.

        None: the claim is decided, its size is excluded, runs ended before the target, or no such number is below 1,000.
        """
        found = self.measured
        if self.verdict != "not shown" or self.excluded or self.bound or found is None or not found.half:
            return None
        if "level" in self.claim:
            return needed(self.claim["margin"] - abs(found.mean), found, 1)
        return needed(found.mean if self.size is None else self.size, found, self.tests)


def results_of(claim: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the results that decide a claim: one, or several whose mean it is about; () = not run."""
    return tuple(claim.get("results", [claim["result"]] if "result" in claim else []))


def measured(claim: Mapping[str, Any], *results: Mapping[str, Any]) -> tuple[Interval | None, str]:
    """Return the interval of a claim's difference over seeds, and what bound it is where some run missed the target.

    The slower row's missing times make it a lower bound, the faster row's an upper one, those of both nothing.
    Several results: a row, or each of a list of rows, is taken by its mean over them, seed by seed.
    """
    kind = next(kind for kind in _KINDS if kind in claim)
    if "results" in claim:
        return paired(
            *(_means(results, labels if isinstance(labels, list) else [labels]) for labels in claim[kind])
        ), ""
    (result,) = results
    rows = {row["row"]: [run for run in row["runs"] if "error" not in run] for row in result["rows"]}
    ours, theirs = (rows[label] for label in claim[kind])
    if kind == "sooner":
        target = claim["target"]
        missed = [[run["time_to"][target] is None for run in runs] for runs in (theirs, ours)]
        late, early = map(any, missed)
        times = [
            {run["seed"]: math.log(run["time_s"] if (at := run["time_to"][target]) is None else at) for run in runs}
            for runs in (theirs, ours)
        ]
        unknown = "unreached" if all(map(all, missed)) else "open"
        return paired(*times), unknown if late and early else "at least" if late else "at most" if early else ""
    figure = claim.get("figure", "final")
    if figure == "gaining":
        label, reference = claim[kind]
        shares = gaining(rows, reference)[label]
        return paired(shares, {seed: 1 - share for seed, share in shares.items()}), ""
    values = [
        {
            run["seed"]: value
            for run in runs
            if (value := run.get(figure, run.get("metrics", {}).get(figure))) is not None
        }
        for runs in (ours, theirs)
    ]
    return paired(*values), ""


def _means(results: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> dict[int, float]:
    """Return the mean of rows' final metrics over results, by the seeds that each row has in each result."""
    rows = [
        {row["row"]: {run["seed"]: run["final"] for run in row["runs"] if "error" not in run} for row in one["rows"]}
        for one in results
    ]
    values = [one[label] for one in rows for label in labels]
    return {seed: fmean(runs[seed] for runs in values) for seed in set.intersection(*map(set, values))}


def resolution(claim: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[float, float]:
    """Return what the distance of evaluations adds to a claim's interval, below and above: 0 but for times to a target.

    A target that is seen at an evaluation was reached after the evaluation before it.
    """
    if "sooner" not in claim:
        return 0.0, 0.0
    rows = {row["row"]: [run for run in row["runs"] if "error" not in run] for row in result["rows"]}
    ours, theirs = (
        [_since_before(run["time_to"][claim["target"]], run.get("curve", ())) for run in rows[label]]
        for label in claim["sooner"]
    )
    return sum(theirs) / max(len(theirs), 1), sum(ours) / max(len(ours), 1)


def _since_before(time_s: float | None, curve: Sequence[Sequence[float]]) -> float:
    """Return the logarithm of a time over that of the evaluation before it; 0 if the target was not reached."""
    if time_s is None or not curve:
        return 0.0
    before = max((at for at, _ in curve if at < time_s * (1 - 1e-6)), default=0.0)
    return math.log(time_s / before) if before > 0 else math.inf


def spread_out(found: Interval | None, slack: tuple[float, float]) -> Interval | None:
    """Return an interval of differences that are equal for all seeds with the largest spread that `slack` leaves.

    Others are returned as they are. Times seen at the same evaluations differ by less than their distance; without a spread
    the t test would have p = 0.
    """
    if found is None or found.num < 2 or not any(slack) or found.p is not None:
        return found
    # n values within a width w have at most the standard deviation w / 2 sqrt(n / (n - 1))
    half = float(stdtrit(found.num - 1, 0.975)) * sum(slack) / 2 / math.sqrt(found.num - 1)
    return Interval(found.mean, half, found.num)


def needed(size: float, found: Interval, tests: int) -> int | None:
    """Return the number of seeds with which a paired t test shows a difference of `size` with probability 0.8.

    `found`: the difference seen, whose spread over seeds is taken. `tests`: the level is 0.05 divided by it. None: not below 1,000.
    """
    from scipy.special import nctdtr

    assert found.half is not None
    spread = found.half * math.sqrt(found.num) / float(stdtrit(found.num - 1, 0.975))
    for num in range(2, _MOST_SEEDS):
        least = float(stdtrit(num - 1, 1 - ALPHA / tests / 2))
        if size > 0 and 1 - float(nctdtr(num - 1, size * math.sqrt(num) / spread, least)) >= _POWER:
            return num
    return None


def verdict_of(
    claim: Mapping[str, Any],
    found: Interval | None,
    p: float | None,
    bound: str = "",
    slack: tuple[float, float] = (0.0, 0.0),
) -> str:
    """Derive the verdict on a claim from the interval of its difference.

    `found`: interval in the claim's direction; None = no seed has both rows. `p`: corrected p-value; None = one seed,
    or the claim says that there is no difference. `bound`: see `measured`. `slack`: see `resolution`.
    """
    if found is None or found.half is None:
        return "not shown"
    low, high = found.mean - found.half - slack[0], found.mean + found.half + slack[1]
    if "level" in claim:
        margin = claim["margin"]
        if -margin <= low and high <= margin:
            return "shown"
        return "contrary" if low > margin or high < -margin else "not shown"
    if p is None or p > ALPHA or low <= 0 <= high:
        return "not shown"
    if bound not in ("", "at least" if found.mean > 0 else "at most"):
        return "not shown"
    if found.mean < 0:
        return "contrary"
    size = claim.get("size")
    size = math.log(size) if size is not None and "sooner" in claim else size
    return "shown smaller" if size is not None and high < size and not bound else "shown"


def decided(claims: Sequence[Mapping[str, Any]], of: Paper) -> list[Decided]:
    """Return the verdict on each claim of a paper."""
    found: list[Decided] = []
    by = [results_of(claim) for claim in claims]
    loaded = _loaded(by)
    seen = {i: measured(claim, *map(loaded.__getitem__, by[i])) for i, claim in enumerate(claims) if by[i]}
    slacks = {i: resolution(claims[i], loaded[by[i][0]]) for i in seen}
    intervals = {i: (spread_out(one, slacks[i]), bound) for i, (one, bound) in seen.items()}
    corrected: dict[int, float] = {}
    tests: dict[tuple[str, ...], int] = {}
    for names in sorted({by[i] for i in seen}):
        tested = [
            (i, p)
            for i, (one, _) in intervals.items()
            if by[i] == names and "level" not in claims[i] and one is not None and (p := one.p) is not None
        ]
        tests[names] = len(tested)
        corrected |= dict(zip([i for i, _ in tested], holm([p for _, p in tested]), strict=True))
    for i, claim in enumerate(claims):
        if i in intervals:
            (one, bound), p, slack = intervals[i], corrected.get(i), slacks[i]
            verdict = verdict_of(claim, one, p, bound, slack)
            found.append(Decided(claim, verdict, one, p, slack, tests[by[i]], bound))
            continue
        missing = None if "exhibit" not in claim else of.exhibits[claim["exhibit"]].missing
        why = claim.get("not_run") or missing or "no result is committed yet"
        found.append(Decided(claim, "cannot be run" if missing and "not_run" not in claim else "not run", why=why))
    return found


def shown(one: Decided) -> str:
    """Format what was measured: a difference in points or a ratio of times, with its 95 % interval."""
    found = one.measured
    if found is None:
        return one.why
    if "sooner" in one.claim:
        if one.bound == "unreached":
            return "no run of either reached it"
        text = f"{one.bound} {math.exp(found.mean):.2f} x".removeprefix("open ").strip()
        if found.half is not None:
            low, high = map(math.exp, one.ends)
            text += f" ({low:.2f} to {high:.2f})" if math.isfinite(high) else f" ({low:.2f} and more)"
        return text
    half = "" if found.half is None else f" ± {100 * found.half:.2f}"
    return f"{100 * found.mean:+.2f}{half} points"


def _verdict(one: Decided) -> str:
    """Return the verdict, and for a claim that is not shown what its interval excludes or how many seeds would decide it."""
    if one.excluded:
        return "not shown, size excluded"
    if one.bound and one.verdict == "not shown":
        return "not shown, longer runs"
    return one.verdict if one.seeds is None else f"not shown, {quantity(one.seeds, 'seed')}"


def _left_open(found: Sequence[Decided]) -> list[str]:
    """Return for the claims of one result: how many are not shown, how many sizes are excluded, and seeds for the others."""
    left = [one for one in found if one.verdict == "not shown"]
    seeds = sorted(one.seeds for one in left if one.seeds is not None)
    more = sum(one.seeds is None and not one.excluded for one in left)  # one seed, too small a difference, or bounds
    span = "" if not seeds else f"{seeds[0]}" if seeds[0] == seeds[-1] else f"{seeds[0]} to {seeds[-1]}"
    words = [span, f"{more} without a number" if more else ""]
    excluded = sum(one.excluded for one in left)
    return [str(len(left) or ""), str(excluded or ""), ", ".join(filter(None, words))]


def _scale(exhibit: Exhibit) -> str:
    if exhibit.note:
        return f"small; {exhibit.note}"
    return "the paper's" if exhibit.scales.get("small") == exhibit.scales.get("full") else "small"


def table(found: Sequence[Decided], of: Paper) -> str:
    """Return the claims of a paper, and then the runs that decide them, as two Markdown tables."""
    rows = [["claim", "where", "paper", "here", "verdict", "runs"]]
    runs: dict[tuple[str, str], set[int]] = {}  # seeds by exhibit and result
    for one in found:
        claim = one.claim
        exhibit = of.exhibits.get(claim.get("exhibit", ""))
        name = exhibit.name if exhibit is not None and not exhibit.missing else ""
        if name or "result" in claim:
            seeds = runs.setdefault((name, claim.get("result", "")), set())
            seeds |= set() if one.measured is None else {one.measured.num}
        rows.append([claim["says"], claim["where"], claim["paper"], shown(one), _verdict(one), name])
    decide = [["runs", "result", "seeds", "scale", "not shown", "size excluded", "seeds for the others"]]
    for (name, result), seeds in runs.items():
        link = f"[{result}](../benchmarks/results/{result}.json)" if result else "none yet"
        scale = _scale(of.exhibits[name]) if name and seeds else ""
        of_result = [one for one in found if result and results_of(one.claim) == (result,)]
        decide.append([name, link, " or ".join(map(str, sorted(seeds))), scale, *_left_open(of_result)])
    return f"{markdown(rows)}\n\n`raafl reproduce {of.name} RUNS` does the runs of a row:\n\n{markdown(decide)}"


def reasons(found: Sequence[Decided]) -> str:
    """Return the reasons why claims come out the other way, one paragraph for each in claims-why.yaml; "" = no claim does."""
    known = yaml.safe_load(WHY.read_text(encoding="utf-8"))
    by_reason: dict[str, list[str]] = {}
    for one in found:
        if one.is_reversed:
            by_reason.setdefault(one.claim["why"], []).append(one.claim["says"])
    parts = []
    for name, says in by_reason.items():
        figures = {key: _compared_rows(figure) for key, figure in known[name].get("figures", {}).items()}
        parts.append(f"**{'; '.join(says)}.**\n{known[name]['text'].strip().format(**figures)}")
    return "\n\n".join(["### Why some come out the other way", *parts]) if parts else ""


def _compared_rows(figure: Mapping[str, Any]) -> str:
    """Compare rows A and B: by merges, or `seconds`, to a target, or by their metrics after some merges or at the end.

    Merges before a time are the run's share of them: asynchronous clients that never wait merge at a steady rate.
    """
    result = json.loads((RESULTS / f"{figure['result']}.json").read_text(encoding="utf-8"))
    rows = {row["row"]: row["runs"] for row in result["rows"]}
    if "target" not in figure:
        ends = [{run["seed"]: _after(run, figure.get("after")) for run in rows[label]} for label in figure["rows"]]
        return shown(Decided({"higher": figure["rows"]}, "", paired(*ends)))
    target, by_time = str(figure["target"]), figure.get("seconds", False)
    times = [
        {
            run["seed"]: math.log(run["time_to"][target] * (1 if by_time else run["updates"] / run["time_s"]))
            for run in rows[label]
        }
        for label in figure["rows"]
    ]
    slack = resolution({"sooner": figure["rows"][::-1], "target": target}, result)
    return shown(Decided({"sooner": figure["rows"]}, "", paired(*times), slack=slack))


def _after(run: Mapping[str, Any], merges: int | None) -> float:
    """Return a run's metric at the first evaluation after so many merges; None = at its end."""
    time_s = math.inf if merges is None else merges / run["updates"] * run["time_s"]
    found: float = next((value for at_s, value in run["curve"] if at_s >= time_s), run["curve"][-1][1])
    return found


def summary(name: str, found: Sequence[Decided]) -> str:
    """Say in a sentence how many claims of a paper have which verdict."""
    counts = Counter(one.verdict for one in found)
    words = [f"{counts[verdict]} {'is' if counts[verdict] == 1 else 'are'} {verdict}" for verdict in VERDICTS]
    parts = [text for text, verdict in zip(words, VERDICTS, strict=True) if counts[verdict]]
    parts = [text.replace(" are cannot", " cannot").replace(" is cannot", " cannot") for text in parts]
    return f"Of {NAMES[name]}'s {len(found)} claims {', '.join(parts[:-1])} and {parts[-1]}."


def old_rules(found: Sequence[Decided]) -> list[str]:
    """List the results that ran by earlier rules of times and bits."""
    loaded = _loaded(results_of(one.claim) for one in found)
    return [name for name, result in sorted(loaded.items()) if recorded_revision(result) < CURRENT]


def _loaded(names: Iterable[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Return the committed results of claims by name."""
    return {
        name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in {*chain.from_iterable(names)}
    }


def all_decided() -> dict[str, tuple[Paper, list[Decided]]]:
    """Return each paper of claims.yaml with the verdicts on its claims."""
    claims = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    papers = {name: paper(name) for name in claims}
    return {name: (papers[name], decided(some, papers[name])) for name, some in claims.items()}


def pages() -> dict[Path, str]:
    """Return docs/claims.md and README.md as the committed results imply them."""
    every = all_decided()
    sentences = "\n".join(f"- {summary(name, found)}" for name, (_, found) in every.items())
    readme = _SUMMARY.sub(lambda found: f"{found[1]}{sentences} {found[2]}", README.read_text(encoding="utf-8"))
    return {PAGE: page(every, sentences), README: readme}


def page(every: Mapping[str, tuple[Paper, list[Decided]]], sentences: str) -> str:
    """Return docs/claims.md."""
    old = old_rules([one for _, found in every.values() for one in found])
    sections = [
        "\n\n".join(filter(None, [f"## {NAMES[name]}", f"{of.title}.", table(found, of), reasons(found)]))
        for name, (of, found) in every.items()
    ]
    total = sum(len(found) for _, found in every.values())
    return f"""# The papers' claims

With this page you can look up which of {total} claims of the papers hold here, how far, and by which runs.

{sentences}

`python -m benchmarks.claims` writes this page: claims are in `benchmarks/claims.yaml`, and each verdict is computed
from the runs of a committed result.

| verdict | means |
| --- | --- |
| shown | the difference has the claimed direction (p at most {ALPHA:g} by Holm), and its interval reaches the paper's size |
| shown smaller | it has the direction, and its whole interval is below the paper's size |
| not shown, size excluded | no direction is shown, but the whole 95 % interval, uncorrected, is below the paper's size |
| not shown, longer runs | no direction is shown, and a run ended before its target |
| not shown, N seeds | these runs do not tell; N seeds would ([below](#seeds-that-would-decide)) |
| contrary | the difference has the other direction (p at most {ALPHA:g} by Holm) |
| not run, cannot be run | the column "here" says why |

Figures are in the claim's direction: a negative difference, or a ratio below 1, is the other way round.
Differences are paired by seed, with 95 % intervals by Student's t, and corrected for all claims that one result decides.
Ratios of times are geometric means; a run that did not reach the target counts as reaching it at its end, so its ratio
is only a bound, "at least" or "at most", and not even that where runs of both rows did not reach it.
Claims of no difference are shown where the whole interval lies within the margin in `claims.yaml`.
`raafl reproduce` ends with a `result.json` like the committed one.
Repeated on 2026-11-29, all ten runs of TimelyFL's figure-7 had the committed `model_digest`; their accuracies differ
(+8.8 ± 5.3 points in place of +10.84 ± 6.92), since the last three evaluations are averaged, and the file's
`eval_every` is newer than the committed result.
Pages of results say where that is so.
A claim at a small scale, or on another data set, is one about that scale.
TimelyFL's claims are decided on raafl's clock, on which frozen layers take time; the rows with the paper's clock are on
[its page](results/fed-raa.md#timelyfl-table-1-cifar-10).
A target seen at one evaluation was reached after the one before: intervals of times are wider by that distance on
each side, and times that are equal for all seeds have the largest spread that it leaves.
{len(old)} results were computed by earlier rules of times and bits, as `rules` in their files says.

{(chr(10) * 2).join(sections)}

## Seeds that would decide

N is the number of seeds with which a paired t test shows the paper's size with probability {_POWER:g}, if it is the true
one here; the test's level is {ALPHA:g} divided by the number of claims that the result decides.
A claim without a size is taken at the difference seen, and one of no difference at what is left of its margin.
The spread over seeds is the one seen.
Three seeds know the spread only within a factor of about 0.5 to 6, so N is a plan and no promise.
A claim has no number where it has one seed, where its difference without a size has the other direction, where a run
ended before its target, and where N would be 1,000 or more.

More seeds decide a claim at the scale of its runs only: where that is small, longer runs can come out otherwise.
Where the size is excluded, more seeds of the same runs may show a smaller difference, or the other direction, but
hardly the paper's size.
"""


def main() -> int:
    """Write docs/claims.md and the README's sentences; with --check only name what differs, and return 1 if anything does."""
    stale = {path: text for path, text in pages().items() if not path.is_file() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: {'differs from its results' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
