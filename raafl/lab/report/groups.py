"""Group runs that differ only by seed and ended by the same limits, and name the groups."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raafl.runfolder.outcome import REASONS
from raafl.runfolder.reading import RecordedRun
from raafl.watch.state import Goals

NOT_THE_EXPERIMENT = (
    "seed",
    "output",
    "resume",
    "name",
    "json",
    "progress",
    "logger",
    "workers",
    "batch_clients",
    "checkpoint_every",
    "checkpoint_s",
    "keep_checkpoints",
    "samples",
    "monitor",
    "monitor_clients",
    "monitor_stall_s",
)
"""Fields in which runs of one experiment may differ; of these only the seed changes results."""
_MAX_IN_LABEL = 3
_LONGEST_VALUE = 40
COLOURS = (
    "#4269d0",
    "#e8684a",
    "#3ca951",
    "#c98a00",
    "#a463f2",
    "#d6588f",
    "#2f9fb5",
    "#9c6b4e",
    "#7f7f7f",
    "#97a600",
)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ only by seed and ended at the same limit; an interrupted run forms a group of its own."""

    label: str  # short description of how the group differs from other groups
    colour: str  # colour of the group's lines
    runs: tuple[RecordedRun, ...]
    differs: Mapping[str, str]  # config fields in which the groups differ, with this group's values


def group_runs(runs: Sequence[RecordedRun]) -> list[Group]:
    """Group runs that differ only by seed, in the order of their first appearance."""
    found: dict[str, list[RecordedRun]] = {}
    for run in runs:
        found.setdefault(_key(run), []).append(run)
    members = list(found.values())
    fields = [flat(_experiment(some[0])) for some in members]
    for some, mine in zip(members, fields, strict=True):
        mine["clock"] = "virtual" if some[0].is_simulated else "wall"
        mine["algorithm"] = algorithm_of(some[0])
        if _cut_short(some[0]):
            mine["ended"] = str((some[0].summary or {}).get("finished", "not ended"))
    labels = _labels(members, fields)
    names = sorted({name for mine in fields for name in mine})
    differing = [name for name in names if len({mine.get(name) for mine in fields}) > 1]
    return [
        Group(label, COLOURS[i % len(COLOURS)], tuple(some), {name: mine.get(name, "–") for name in differing})
        for i, (label, some, mine) in enumerate(zip(labels, members, fields, strict=True))
    ]


def algorithm_of(run: RecordedRun) -> str:
    """Return the name of a run's algorithm."""
    named = (run.summary or {}).get("algorithm")
    if not named:
        section = run.config.get("algorithm")
        named = section.get("class_path") if isinstance(section, Mapping) else section
    return str(named or "unknown").rpartition(".")[2]


def flat(value: object, prefix: str = "") -> dict[str, str]:
    """Flatten nested mappings and lists to one mapping with dotted keys and texts as values."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        items = [(str(i), item) for i, item in enumerate(value)]
    if not items:
        return {prefix: value if isinstance(value, str) else json.dumps(value, default=str)}
    found: dict[str, str] = {}
    for name, item in items:
        found |= flat(item, f"{prefix}.{name}" if prefix else name)
    return found


def _experiment(run: RecordedRun) -> dict[str, Any]:
    found = {name: value for name, value in run.config.items() if name not in NOT_THE_EXPERIMENT}
    if run.goals:  # a resumed run may have other limits than its config
        goals = Goals.from_json(run.goals)
        targets = list(map(str, goals.targets))
        target = targets[0] if len(targets) == 1 else targets or None
        found |= {"max_updates": goals.max_updates, "max_time": goals.max_time_s, "target": target}
    return found


def _cut_short(run: RecordedRun) -> bool:
    """Check whether a run ended before its limits."""
    return str((run.summary or {}).get("finished")) not in REASONS


def _key(run: RecordedRun) -> str:
    if not run.config or _cut_short(run):
        return f"alone {run.path}"
    return json.dumps([_experiment(run), run.runtime], sort_keys=True, default=str)


def _labels(members: Sequence[Sequence[RecordedRun]], fields: Sequence[Mapping[str, str]]) -> list[str]:
    """Label each group by its algorithm and its differences from other groups of that algorithm."""
    labels: list[str] = []
    for some, mine in zip(members, fields, strict=True):
        alike = [other for other in fields if other["algorithm"] == mine["algorithm"]]
        names = sorted({name for other in alike for name in other}, key=lambda name: (name.count("."), name))
        told = [name for name in names if len({other.get(name) for other in alike}) > 1]
        parts = list(dict.fromkeys(_part(name, mine.get(name, ""), some[0].name) for name in told))[:_MAX_IN_LABEL]
        labels.append(", ".join([mine["algorithm"], *parts]))
    repeated = {label for label in labels if labels.count(label) > 1}
    return [
        f"{label} ({some[0].name})" if label in repeated else label for label, some in zip(labels, members, strict=True)
    ]


def _part(name: str, value: str, folder: str) -> str:
    if name == "clock":
        return f"{value} clock"
    if name == "ended":
        return _short(value)
    if any(part.isdecimal() for part in name.split(".")):  # skip entries of lists, such as devices
        return f"{name.partition('.')[0]} of {folder}"
    return f"{name.rpartition('.')[2]} {_short(value)}"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 1] + "…"


def names_of(groups: Sequence[Group]) -> dict[int, str]:
    """Return a unique name for each run, by `id(run)`: its group's label and seed, and its folder if these are not unique."""
    called: dict[int, str] = {}
    for group in groups:
        for run in group.runs:
            seed = f", seed {run.seed}" if run.seed is not None else ""
            called[id(run)] = f"{group.label}{seed}"
    all_names = list(called.values())
    for group in groups:
        for run in group.runs:
            if all_names.count(called[id(run)]) > 1:
                called[id(run)] += f" ({run.name})"
    return called
