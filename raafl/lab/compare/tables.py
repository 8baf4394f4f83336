"""Format the rows of a comparison as a table: for a terminal, as CSV, or as LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raafl.units import duration

Cells = list[list[str]]

_FIGURES = (
    ("best", "best"),
    ("megabytes", "MB"),
    ("updates", "updates"),
    ("utilisation", "utilisation"),
    ("participation", "participation"),
    ("participation_gini", "Gini"),
    ("clients_gaining", "clients gaining"),
    ("clients_mean", "clients' own test"),
    ("worst_client", "worst client"),
    ("peak_memory_mb", "peak MB"),
    ("energy_kj", "kJ"),
)


def cells(result: Mapping[str, Any]) -> Cells:
    """Format the result of a comparison as a table of texts, with mean ± half of the 95 % interval over seeds."""
    rows, metric, reference = result["rows"], result["metric"], result["reference"]
    targets = list(rows[0]["time_to"]) if rows else []
    published = any("published" in row for row in rows)
    searched = any(row.get("searched") for row in rows)
    figures = [(name, title) for name, title in _FIGURES if any(name in row for row in rows)]
    head = ["row", *(["settings"] if searched else []), *(["published"] if published else []), metric]
    head += [f"minus {reference}", *(f"s to {target}" for target in targets), *(title for _, title in figures), "seeds"]
    table = [head]
    for row in rows:
        line = [row["row"]]
        line += [" ".join((row.get("searched") or {}).get("settings", []))] if searched else []
        line += [str(row.get("published", ""))] if published else []
        line += [with_interval(row.get("final")), difference(row.get("difference"))]
        line += [time_cell(row["time_to"][target]) for target in targets]
        line += [short(row[name]["mean"]) if name in row else "" for name, _ in figures]
        table.append([*line, str(len(row["seeds"])) + (f" ({row['failed']} failed)" if row["failed"] else "")])
    return table


def with_interval(figure: Mapping[str, Any] | None) -> str:
    """Format a mean and half of its interval: `0.912 ± 0.004`; for a single seed only the mean."""
    if figure is None:
        return "-"
    return short(figure["mean"]) if figure["half"] is None else _rounded(figure["mean"], figure["half"])


def difference(figure: Mapping[str, Any] | None) -> str:
    """Format a difference with its interval; add the remark that the runs show none, after Holm's correction for the table."""
    if figure is None:
        return ""
    sign = "+" if figure["mean"] >= 0 else "-"
    size = abs(figure["mean"])
    if figure["half"] is None:
        return f"{sign}{short(size)} (one seed)"
    return sign + _rounded(size, figure["half"]) + ("" if figure["shown"] else " (not shown)")


def quoted(label: str) -> str:
    """Put a row's label into quotation marks if it has a comma."""
    return f'"{label}"' if "," in label else label


def _rounded(mean: float, half: float) -> str:
    """Format a mean and half its interval to the decimals of the interval's second significant digit."""
    if not (math.isfinite(mean) and math.isfinite(half) and half > 0):
        return f"{short(mean)} ± {short(half)}"
    decimals = max(0, 1 - math.floor(math.log10(half)))
    return f"{mean:,.{decimals}f} ± {half:,.{decimals}f}"


def time_cell(cell: Mapping[str, Any]) -> str:
    """Format a median time to a target, and the number of seeds that reached it: `12.5 (4/5)`, or `never (1/5)`."""
    time_s = "never" if cell["median_s"] is None else short(cell["median_s"])
    return f"{time_s} ({cell['reached']}/{cell['seeds']})"


def short(value: float) -> str:
    """Format a number with four significant digits; large numbers have no decimals."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def p_value(value: float) -> str:
    """Format a p-value with two significant digits; small ones as a bound."""
    return "below 0.001" if value < 0.001 else f"{value:.2g}"


def warnings(result: Mapping[str, Any]) -> list[str]:
    """Return a warning if the rows of a comparison were not measured alike, such as each by its own versions.

    Rows are measured alike if their evaluations are as far from each other in virtual time, or in merged updates.
    """
    if result.get("eval_every") is not None:
        return []
    seconds, updates = (
        {row["row"]: _spacing(row["runs"], name) for row in result["rows"]} for name in ("time_s", "updates")
    )
    known = {label: one for label, one in seconds.items() if one is not None}
    if not known or _are_alike(known.values()) or _are_alike(one for one in updates.values() if one is not None):
        return []
    often, rarely = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    affected = "the best value"
    if result["rows"][0]["time_to"] or result.get("smooth", 1) > 1:
        affected = "times to a target and the best value"
    return [
        f"Rows were not measured alike, from every {duration(known[often])} ({quoted(often)}) to every "
        f"{duration(known[rarely])} ({quoted(rarely)}): {affected} may differ for that alone."
    ]


def _are_alike(distances: Iterable[float]) -> bool:
    """Check whether distances differ by at most a tenth: those in versions vary with the times of tasks."""
    known = list(distances)
    return bool(known) and max(known) <= 1.1 * min(known)


def _spacing(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return how far the evaluations of a row's runs are from each other, in their ``time_s`` or ``updates``; None if unknown."""
    counted = [run for run in runs if len(run.get("curve", ())) > 1 and run.get(name) is not None]
    num = sum(len(run["curve"]) - 1 for run in counted)
    return sum(run[name] for run in counted) / num if num else None


def text(table: Cells) -> str:
    """Format a table as text in aligned columns."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def as_csv(table: Cells) -> str:
    """Format a table as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(table)
    return file.getvalue()


def latex(table: Cells) -> str:
    r"""Format a table as LaTeX (`tabular` with booktabs)."""
    lines = [" & ".join(map(_escaped, line)) + r" \\" for line in table]
    columns = "l" + "r" * (len(table[0]) - 1)
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


def _escaped(cell: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in cell)


def _whole_trials(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the trials of a row's search that had their whole budget."""
    searched = row.get("searched") or {"trials": []}
    return [trial for trial in searched["trials"] if "cut_after" not in trial]


def sentences(rows: Sequence[Mapping[str, Any]], reference: str, metric: str) -> list[str]:
    """Describe each row in a sentence that says whether it differs from the reference row, and searches that chose nothing."""
    found = [
        f"{row['row']}: its {len(some)} trials had the same score, so the search chose nothing: the searched options have no "
        "effect on it, its trials are too short, or the metric is too coarse."
        for row in rows
        if len(some := _whole_trials(row)) > 1 and all(trial["scores"] == some[0]["scores"] for trial in some)
    ]
    for row in rows:
        gap = row.get("difference")
        if gap is None:
            continue
        if gap["half"] is None:
            found.append(f"{row['row']}: compared with {reference} on one seed only, so no difference can be shown.")
        else:
            size, side = _rounded(abs(gap["mean"]), gap["half"]), "above" if gap["mean"] >= 0 else "below"
            end = "." if gap["shown"] else ", so no difference is shown."
            if gap["excludes_0"] and not gap["shown"]:
                end = f"; with {gap['tests']} rows tested, no difference is shown (p {p_value(gap['p_holm'])} by Holm)."
            found.append(
                f"{row['row']}: {metric} is {size} {side} that of {quoted(reference)} (95 % interval, {gap['num']} seeds){end}"
            )
    return found
