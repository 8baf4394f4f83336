"""Compute the figures of each run of a comparison, and their means and differences over seeds."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from raafl.config.targets import exact
from raafl.devices import Device, assign
from raafl.devices.catalog import watts
from raafl.devices.files import load_devices
from raafl.lab.compare.comparison import Comparison
from raafl.lab.compare.runs import Outcome, made_by
from raafl.lab.compare.statistics import ALPHA, Curve, Interval, censored_median, gini, holm, interval, paired, time_to
from raafl.rules import CURRENT, recorded_revision
from raafl.runfolder.schema import CLIENTS, CONFIG, JOURNAL, MERGED, METRICS, TESTED, Summary
from raafl.runfolder.seals import file_digest

COLUMNS = (
    "final",
    "best",
    "time_s",
    "megabytes",
    "energy_kj",
    "updates",
    "versions",
    "utilisation",
    "participation",
    "participation_gini",
    "clients_mean",
    "worst_client",
    "peak_memory_mb",
    "wall_s",
)
"""Names of the values that `measure` computes of a run, beside the metrics of its model."""


def curve_of(folder: Path, metric: str) -> list[tuple[float, float]]:
    """Return (seconds, value) of a metric at each evaluation in a run's metrics.csv; empty if there are none."""
    try:
        with (folder / METRICS).open(newline="") as file:
            return [(float(row["time_s"]), float(row[metric])) for row in csv.DictReader(file) if row.get(metric)]
    except OSError:
        return []


def measure(outcome: Outcome, comparison: Comparison, root: Path) -> dict[str, Any]:
    """Return the measured values of one run as plain data for JSON, or its error if it failed."""
    run, summary = outcome.run, outcome.summary
    known: dict[str, Any] = {
        "seed": run.seed,
        "command": run.command,
        "folder": outcome.folder.relative_to(root).as_posix(),
        "config_digest": run.digest,
        "code_digest": outcome.code,
    } | made_by(outcome.folder)
    config = _config_of(outcome.folder)
    known |= {"rules": recorded_revision(config)} if config else {}
    if summary is None:
        return {**known, "error": outcome.error}
    curve = curve_of(outcome.folder, comparison.metric)
    if curve and not math.isfinite(curve[-1][1]):
        return {**known, "error": f"{comparison.metric} is {curve[-1][1]} at the end"}
    smooth = comparison.points(curve)
    if smooth and not math.isfinite(smooth[-1][1]):
        return {
            **known,
            "error": f"{comparison.metric} is not finite in one of the last {comparison.smooth} evaluations, "
            "of which `smooth` takes the mean",
        }
    values = [value for _, value in curve if math.isfinite(value)]
    times = {exact(target): time_to(smooth, target, comparison.maximize) for target in comparison.targets}
    sent = _megabytes_at(outcome.folder)
    known |= {
        "finished": summary["finished"],
        "model_digest": summary["model_digest"],
        "journal_digest": file_digest(outcome.folder / JOURNAL),
        "metrics": {name: value for name, value in summary["final"].items() if value is not None},
        "final": smooth[-1][1] if smooth else None,
        "best": (max if comparison.maximize else min)(values) if values else None,
        "time_to": times,
        "megabytes_to": {target: _last_before(sent, time_s) for target, time_s in times.items()},
        "curve": [[round(time_s, 6), value if math.isfinite(value) else None] for time_s, value in curve],
    }
    if (summary.get("batched") or {}).get("mode") == "fast":
        known["batch_clients"] = "fast"
    known |= _costs(summary)
    versions = versions_of_clients(outcome.folder)
    if any(versions.get(client, 0) != count for client, count in known["merged"].items()):
        known["took_part"] = versions
    return known | {"energy_kj": energy_kj(outcome.folder, config)} | _clients(outcome.folder, comparison)


def _megabytes_at(folder: Path) -> list[tuple[float, float]]:
    """Read from a run's metrics file the pairs (seconds, megabytes sent and received until then), one for each evaluation."""
    with (folder / METRICS).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(float(row["time_s"]), (float(row["bytes_up"]) + float(row["bytes_down"])) / 1e6) for row in rows]


def _last_before(curve: Curve, time_s: float | None) -> float | None:
    """Return the last value of a curve at or before ``time_s``; None if there is none, or if ``time_s`` is None."""
    return None if time_s is None else next((value for at, value in reversed(curve) if at <= time_s), None)


def _costs(summary: Summary) -> dict[str, Any]:
    merged = list(summary["participation"].values())
    peak = summary.get("peak_memory") or {}
    peak_bytes = peak.get("measured_bytes") or peak.get("predicted_bytes")
    return {
        "time_s": summary["time_s"],
        "wall_s": summary["wall_s"],
        "megabytes": (summary["bytes_up"] + summary["bytes_down"]) / 1e6,
        "updates": summary["updates_merged"],
        "versions": summary["versions"],
        "utilisation": summary["utilisation"],
        "merged": summary["participation"],
        "participation": summary["participation_rate"]["mean"],
        "participation_gini": gini(merged),
        "peak_memory_mb": None if not peak_bytes else peak_bytes / 1e6,
    }


def _merged_rows(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a run's clients.csv whose updates were merged."""
    with (folder / CLIENTS).open(newline="") as file:
        yield from (row for row in csv.DictReader(file) if row["outcome"] == MERGED)


def versions_of_clients(folder: Path) -> dict[str, int]:
    """Count the versions in which each client took part, by client; several of its updates in one version count once."""
    versions: dict[str, set[str]] = {}
    for row in _merged_rows(folder):
        versions.setdefault(row["client"], set()).add(row["merged_version"])
    return {client: len(some) for client, some in versions.items()}


def _clients(folder: Path, comparison: Comparison) -> dict[str, Any]:
    """Summarise the clients' evaluations on their own test data, of each client's last merged update.

    The result has the means of all metrics, weighted by training and test samples as in the run's own summary, and the
    worst client's value of the comparison's metric; none of a metric that is not finite for a client.
    """
    last = {row["client"]: row for row in _merged_rows(folder) if row.get(TESTED + comparison.metric)}
    if not last:
        return {"clients_mean": None, "worst_client": None}
    sizes = [float(row["num_samples"]) + float(row.get(f"{TESTED}num_samples") or 0) for row in last.values()]
    names = [name for name in next(iter(last.values())) if name.startswith(TESTED)]
    means = {
        name.removeprefix(TESTED): sum(size * float(row[name]) for size, row in zip(sizes, last.values(), strict=True))
        / sum(sizes)
        for name in names
        if all(row[name] and math.isfinite(float(row[name])) for row in last.values())
    }
    if comparison.metric not in means:
        return {"clients": means, "clients_mean": None, "worst_client": None}
    worst = (min if comparison.maximize else max)(float(row[TESTED + comparison.metric]) for row in last.values())
    return {"clients": means, "clients_mean": means[comparison.metric], "worst_client": worst}


def summarize(label: str, runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> dict[str, Any]:
    """Summarise the runs of a row: mean and interval over seeds of each value, and the median time to each target."""
    done = [run for run in runs if "error" not in run]
    figures = {name: _plain(interval(_values(done, name))) for name in COLUMNS}
    metrics = sorted({name for run in done for name in run["metrics"]})
    targets = [exact(target) for target in comparison.targets]
    return {
        "row": label,
        "seeds": [run["seed"] for run in done],
        "failed": len(runs) - len(done),
        **{name: figure for name, figure in figures.items() if figure is not None},
        "metrics": {name: _plain(interval(_values([run["metrics"] for run in done], name))) for name in metrics},
        "time_to": {target: reached([run.get("time_to", {}).get(target) for run in runs]) for target in targets},
        "megabytes_to": {
            target: censored_median([run.get("megabytes_to", {}).get(target) for run in runs]) for target in targets
        },
    }


def reached(times_s: Sequence[float | None]) -> dict[str, Any]:
    """Return the median time to a target over the seeds, and the number of seeds that reached it.

    A target that was not reached counts as reached later than all others.
    """
    return {
        "median_s": censored_median(times_s),
        "reached": sum(one is not None for one in times_s),
        "seeds": len(times_s),
    }


def differences(rows: Mapping[str, Sequence[Mapping[str, Any]]], reference: str) -> dict[str, dict[str, Any] | None]:
    """Compare the final value of each row with the reference row's, seed by seed.

    Returns:
        Mean difference and its interval over the seeds that both rows have, under each row's label, with what
        `with_holm` adds; None for the reference row.
    """
    finals = {
        label: {run["seed"]: run["final"] for run in runs if run.get("final") is not None}
        for label, runs in rows.items()
    }
    return with_holm(
        {
            label: _plain(paired(values, finals[reference])) if label != reference else None
            for label, values in finals.items()
        }
    )


def with_holm(gaps: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, Any] | None]:
    """Add to each difference of a table its verdict after Holm's correction for all differences of the table.

    `gaps`: mean difference and half of its 95 % interval, under each row's label; None = the row has none.

    Returns:
        The differences with `p` (t test, before the correction), `p_holm`, the number of `tests` and whether the
        difference is `shown`; p-values are None for one seed, or equal differences of all, which are no test.
    """
    values = {label: Interval(gap["mean"], gap["half"], gap["num"]).p for label, gap in gaps.items() if gap is not None}
    tested = {label: p for label, p in values.items() if p is not None}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    return {
        label: None
        if gap is None
        else {
            **gap,
            "p": values[label],
            "p_holm": corrected.get(label),
            "tests": len(tested),
            "shown": corrected.get(label, 1.0) <= ALPHA,
        }
        for label, gap in gaps.items()
    }


def gains(rows: Mapping[str, Sequence[Mapping[str, Any]]], reference: str) -> dict[str, dict[str, Any] | None]:
    """Return the share of clients that take part in a larger fraction of the merges than in the reference row.

    Returns:
        Mean and interval over the seeds that both rows have, under each row's label; None for the reference row itself.
    """
    shares = gaining(rows, reference)
    return {label: _plain(interval(list(shares[label].values()))) if label in shares else None for label in rows}


def gaining(rows: Mapping[str, Sequence[Mapping[str, Any]]], reference: str) -> dict[str, dict[int, float]]:
    """Return the same for each seed that both rows have, by label and seed; the reference row itself is left out."""
    rates = {label: {run["seed"]: _rates(run) for run in runs if run.get("versions")} for label, runs in rows.items()}
    theirs = rates.pop(reference)
    return {
        label: {
            seed: sum(rate > theirs[seed].get(client, 0.0) for client, rate in own.items()) / len(own)
            for seed, own in by_seed.items()
            if seed in theirs and own
        }
        for label, by_seed in rates.items()
    }


def _rates(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of a run's versions in which each client took part; results of older raafl have updates only."""
    counts = run.get("took_part", run["merged"])
    return {client: counts.get(client, 0) / run["versions"] for client in run["merged"]}


def _values(items: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(item[name]) for item in items if item.get(name) is not None]


def _plain(value: Interval | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {"mean": value.mean, "half": value.half, "num": value.num, "excludes_0": value.excludes_0}


def rules_of(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the oldest revision of the rules that a run of these rows followed; that of this code if none has started."""
    return min((run["rules"] for row in rows for run in row["runs"] if "rules" in run), default=CURRENT)


def _config_of(folder: Path) -> dict[str, Any]:
    """Return the config of a run folder; empty if the run has written none."""
    try:
        return dict(yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def energy_kj(folder: Path, config: Mapping[str, Any]) -> float | None:
    """Estimate the energy in kilojoules that the clients of a run used for finished tasks, including transfers.

    It is the most that devices may draw: their power times the time in which they worked or sent.

    Returns:
        The energy; None if the power of a client's device is unknown.
    """
    devices = config.get("devices")
    if devices is None:
        return None
    found = load_devices(devices) if isinstance(devices, str) else [Device(**row) for row in devices]
    power = [watts(profile.name) for profile in assign(found, config["clients"])]
    if None in power:
        return None
    return sum((power[client - 1] or 0.0) * busy_s for client, busy_s in _busy_s(folder)) / 1e3


def _busy_s(folder: Path) -> Iterator[tuple[int, float]]:
    """Yield client and seconds of each finished task, without those in which the client's task before went on, too.

    With `overlap` a client trains its next task while its last update travels.
    """
    until_s: dict[int, float] = {}  # by client: end of its tasks so far
    with (folder / CLIENTS).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train_s"]]
    for row in sorted(rows, key=lambda row: float(row["assigned_s"] or 0)):
        client, begin_s, took_s = int(row["client"]), float(row["assigned_s"] or 0), float(row["train_s"])
        shared_s = min(until_s.get(client, 0.0) - begin_s, took_s)
        # times in the table are rounded, so that the next task may seem to begin a little early
        yield client, took_s - (shared_s if shared_s > 1e-9 * (1 + begin_s) else 0.0)
        until_s[client] = max(until_s.get(client, 0.0), begin_s + took_s)
