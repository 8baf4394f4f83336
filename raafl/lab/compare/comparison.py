"""Read a comparison file: a base config, rows with options, seeds, and an optional search for each row's settings."""

from __future__ import annotations

import itertools
import logging
import math
import random
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from raafl.config.targets import direction
from raafl.errors import BadInput, at_least, nearest
from raafl.lab.compare.statistics import Curve, on_grid, smoothed
from raafl.plain_yaml import read_yaml

SAMPLERS = ("tpe", "random", "gp")
PRUNERS = ("halving", "median")
_log = logging.getLogger(__name__)
_HOLDOUT = 0.1
_SET_FOR_EACH_RUN = {
    "--seed": "give seeds, and search.seeds for trials",
    "--output": "choose the comparison's folder by its own --output",
    "--resume": "leave it out, the same command continues",
}
_OF_A_RUN = {"model", "data", "algorithm"}  # sections of a run's config, which a comparison must not contain


@dataclass(frozen=True)
class Halving:
    """Settings of successive halving: trials run with a part of the budget, and the better ones again with twice as much."""

    # number of stages; after each, the trials are compared, and the next stage has twice the budget
    rungs: int = 3
    # share of the trials that continue after a stage, above 0 and below 1; at least one continues
    keep: float = 0.5

    def __post_init__(self) -> None:
        at_least("search.halving.rungs", self.rungs, 2)
        if not 0 < self.keep < 1:
            raise BadInput(f"search.halving.keep is {self.keep}: give a share above 0 and below 1, such as 0.5")


@dataclass(frozen=True)
class Range:
    """A range of values that a sampler searches, in place of a list; whole numbers where both ends are."""

    low: float
    high: float
    log: bool = False  # whether values are drawn uniformly by their logarithm

    @property
    def whole(self) -> bool:
        """Whether the values are whole numbers."""
        return type(self.low) is int and type(self.high) is int

    @staticmethod
    def of(option: str, given: Mapping[str, Any]) -> Range:
        """Read the range of an option: a mapping with low, high and log; raise `BadInput` if it is wrong."""
        name = f"search.grid.{option}."
        found = check_fields(given, Range, name)
        for end in ("low", "high"):
            if end not in found:
                raise BadInput(f"{name}{end} is missing: give low and high, or a list of values")
        space = Range(**found)
        ends = space.low, space.high
        if not all(map(math.isfinite, ends)) or not space.low < space.high or (space.log and space.low <= 0):
            raise BadInput(
                f"{name}low is {space.low}, high {space.high}: give numbers, low below high, above 0 with log"
            )
        return space


@dataclass(frozen=True)
class Search:
    """Search for the best settings of each row of a comparison.

    Each row gets equally many trials. These use seeds and data that the reported runs do not use.

    Attributes:
        grid: values to try, by option; a single row may have another grid in `rows`.
        seeds: seeds of the trials; they must not be seeds of the comparison.
        rows: values to try for single rows in place of `grid`, under the row's label.
        trials: number of settings from its grid that each row tries, drawn at random; None = all, and then all grids
            must have the same size.
        options: further options of the trials, such as a smaller budget.
        validation_share: share of the training set on which trials are scored; no client trains on it. The test set is
            not used.
        halving: settings by which trials with low scores end early; None = each trial is run completely. Deprecated: take
            ``sampler`` and ``pruner``.
        sampler: sampler of an Optuna study that chooses ``trials`` settings one after the other, from lists and ranges: tpe,
            random or gp; None = settings are those of the grid.
        pruner: with a sampler, how trials end early, by their scores after a quarter and half of the budget: halving or
            median; None = each trial is run completely.
        storage: with a sampler, where its studies are: a URL of a database as Optuna has it (``sqlite:///studies.db``), or
            the path of a journal; None = ``search.journal`` in the comparison's folder.
        target: value of the metric; trials are compared by the virtual time until it is reached, and one that does not
            reach it is the worst; None = they are compared by the metric at their end.
    """

    grid: Mapping[str, Any]  # values to try for each option: lists or, with a sampler, ranges
    seeds: tuple[int, ...]
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trials: int | None = None
    options: Options = ()
    validation_share: float = _HOLDOUT
    halving: Halving | None = None
    sampler: str | None = None
    pruner: str | None = None
    storage: str | None = None
    target: float | None = None

    @property
    def trial_options(self) -> Options:
        """Options that all trials have, beside the settings that they try."""
        return *self.options, "--partition.validation_share", str(self.validation_share)

    def settings(self, label: str) -> list[Options]:
        """Return the settings that the row ``label`` tries, as command-line options."""
        grid = self.rows.get(label, self.grid)
        settings = [
            tuple(word for option, value in zip(grid, values, strict=True) for word in (option, word_of(value)))
            for values in itertools.product(*grid.values())
        ]
        if self.trials is None:
            return settings
        chosen = random.Random(f"raafl compare {label}").sample(range(len(settings)), self.trials)
        return [settings[i] for i in sorted(chosen)]

    def check(self, labels: Sequence[str], seeds: Sequence[int]) -> None:
        """Raise `BadInput` unless each row gets equally many trials, with seeds that the reported runs do not use."""
        for label in self.rows:
            if label not in labels:
                raise BadInput(f"search.rows has '{label}', which is no row: {nearest(label, labels)}")
        if not self.seeds:
            raise BadInput("search.seeds is empty: give at least one seed that is not among the comparison's")
        if len(set(self.seeds)) < len(self.seeds):
            raise BadInput(f"search.seeds is {list(self.seeds)}: give each seed once")
        if shared := sorted(set(self.seeds) & set(seeds)):
            raise BadInput(
                f"search.seeds has {shared[0]}, which is also a seed of the comparison: search on other seeds"
            )
        if not 0 < self.validation_share < 1:
            raise BadInput(
                f"search.validation_share is {self.validation_share}: give a share of the training set, such as 0.1"
            )
        if self.target is not None and (self.pruner or self.halving):
            raise BadInput(
                f"search.target is {self.target:g}, and trials that end early have not reached it: leave out "
                f"search.{'pruner' if self.pruner else 'halving'}"
            )
        if self.sampler is not None or self.pruner is not None:
            self._check_study(labels)
            return
        if self.storage is not None:
            raise BadInput(f"search.storage is '{self.storage:.80}', but there is no sampler: give search.sampler: tpe")
        if self.halving is not None:
            _log.warning("search.halving is deprecated: give search.sampler: tpe and search.pruner: halving")
        sizes = {label: _size(label, self.rows.get(label, self.grid)) for label in labels}
        if self.trials is None and len(set(sizes.values())) > 1:
            few, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
            raise BadInput(
                f"search gives row '{few}' {sizes[few]} trials and row '{most}' {sizes[most]}: give all the same number, "
                "or set search.trials"
            )
        if self.trials is not None:
            at_least("search.trials", self.trials, 1)
            for label, size in sizes.items():
                if size < self.trials:
                    raise BadInput(
                        f"search.trials is {self.trials}, but row '{label}' has only {size} combinations of "
                        "settings: lower search.trials"
                    )

    def _check_study(self, labels: Sequence[str]) -> None:
        """Check the settings of an Optuna search; raise `BadInput` if one is invalid, or two exclude each other."""
        for name, value, known in (("sampler", self.sampler, SAMPLERS), ("pruner", self.pruner, PRUNERS)):
            if value is not None and value not in known:
                raise BadInput(f"search.{name} is '{value}': {nearest(value, known)}")
        if self.sampler is None:
            raise BadInput(f"search.pruner is '{self.pruner}', but there is no sampler: give search.sampler: tpe")
        if self.halving is not None:
            raise BadInput("search.halving is given beside search.sampler: give search.pruner: halving in its place")
        if self.trials is None:
            raise BadInput("search.trials is missing: with search.sampler give the number of trials of each row")
        at_least("search.trials", self.trials, 1)
        for label in labels:
            lists = {}
            for option, values in self.rows.get(label, self.grid).items():
                if isinstance(values, Mapping):
                    Range.of(option, values)
                lists[option] = [0] if isinstance(values, Mapping) else values
            _size(label, lists)


def _size(label: str, grid: Mapping[str, Any]) -> int:
    size = 1
    for option, values in grid.items():
        if not str(option).startswith("--") or not isinstance(values, list) or not values:
            raise BadInput(
                f"search of row '{label}' has {option!s:.60}: {values!s:.60}: give each option a list of values, "
                "--OPTION: [VALUE, ...]"
            )
        size *= len(values)
    return size


@dataclass(frozen=True)
class Comparison:
    """A comparison of settings: rows of options, each run with several seeds; read from a file and checked.

    Attributes:
        name: name of the comparison's folder; by default the file's name.
        config: base config: a path, or the name of one of raafl's own configs.
        rows: options of each row, under the row's label, in the order of the result table.
        seeds: seeds of the reported runs.
        options: options that all runs have.
        search: search for each row's settings; None = no search.
        metric: metric by which rows are compared.
        maximize: whether a larger value of the metric is better.
        targets: values of the metric; the time to reach each is measured.
        smooth: number of consecutive evaluations to average before the time to a target is measured.
        eval_every: distance between evaluations of all runs, in seconds of the virtual clock (`10s`) or in samples trained
            (`5000 samples`); None = as each row's options say, which the result warns about where rows differ.
        baseline: label of the row with which the others are compared; None = the first row.
        about: introduction for readers of the result page.
        published: values from a paper, under the row's label, shown beside the measured values.
    """

    name: str
    config: str
    rows: Mapping[str, Options]
    seeds: tuple[int, ...]
    options: Options = ()
    search: Search | None = None
    metric: str = "accuracy"
    maximize: bool = True
    targets: tuple[float, ...] = ()
    smooth: int = 1
    eval_every: str | None = None
    baseline: str | None = None
    about: str = ""
    published: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_folder_name(self.name)
        at_least("smooth", self.smooth, 1)
        self._check_distance()
        for place, names in self._names_by_place():
            if mine := sorted(names & _SET_FOR_EACH_RUN.keys()):
                raise BadInput(f"{place} has {mine[0]}, which has no effect there: {_SET_FOR_EACH_RUN[mine[0]]}")
        if not self.rows:
            raise BadInput("rows is empty: give at least one row, LABEL: OPTIONS")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise BadInput(f"seeds is {list(self.seeds)}: give at least one seed, each once")
        for name, label in [("baseline", self.baseline), *(("published", label) for label in self.published)]:
            if label is not None and label not in self.rows:
                raise BadInput(f"{name} is '{label}', which is no row: {nearest(label, self.rows)}")
        if self.search is not None:
            self.search.check(list(self.rows), self.seeds)

    def _names_by_place(self) -> list[tuple[str, set[str]]]:
        """List the words of options in each field of the comparison that has some, without values that follow an equals sign."""
        search = self.search
        more = [] if search is None else [("search.options", search.options), ("search.grid", tuple(search.grid))]
        more += [] if search is None else [(f"search.rows.{label}", tuple(own)) for label, own in search.rows.items()]
        places = [("options", self.options), *((f"rows.{label}", own) for label, own in self.rows.items()), *more]
        return [(place, {str(word).partition("=")[0] for word in options}) for place, options in places]

    def _check_distance(self) -> None:
        """Check that ``eval_every`` is set once for all rows, in seconds or samples; raise `BadInput` otherwise."""
        if self.eval_every is None:
            return
        from raafl.config.options import distance

        found = distance("eval_every", self.eval_every)
        if found is not None and found.unit == "versions":
            raise BadInput(
                f"eval_every is {self.eval_every}: versions of two rows are not the same training; give seconds such as 10s, "
                "or samples such as '5000 samples'"
            )
        for place, names in self._names_by_place():
            if "--eval_every" in names:
                raise BadInput(f"{place} has --eval_every, and the comparison has eval_every: give one of them")

    @property
    def every_s(self) -> float | None:
        """Seconds between evaluations of all rows; None = they are measured by versions or samples."""
        from raafl.config.options import distance

        found = distance("eval_every", self.eval_every)
        return found.size if found is not None and found.unit == "seconds" else None

    def options_of(self, label: str, settings: Options = ()) -> Options:
        """Return the options of a row's runs.

        Args:
            label: label of the row.
            settings: settings that a search has found, or that a trial tries.
        """
        every = () if self.eval_every is None else ("--eval_every", self.eval_every)
        return (*self.options, *self.rows[label], *settings, *every)

    def points(self, curve: Curve) -> list[tuple[float, float]]:
        """Return the points of a run's curve from which targets and the final value are read.

        Args:
            curve: seconds and value of each evaluation.
        """
        return smoothed(curve if self.every_s is None else on_grid(curve, self.every_s), self.smooth)

    def only(self, labels: Sequence[str]) -> Comparison:
        """Return the comparison with only the rows that have these labels; raise `BadInput` for an unknown label."""
        for label in labels:
            if label not in self.rows:
                raise BadInput(f"rows has '{label}', which is no row of the comparison: {nearest(label, self.rows)}")
        search = self.search
        if search is not None:
            search = replace(search, rows={label: grid for label, grid in search.rows.items() if label in labels})
        return replace(
            self,
            rows={label: options for label, options in self.rows.items() if label in labels},
            search=search,
            baseline=self.baseline if self.baseline in labels else None,
            published={label: value for label, value in self.published.items() if label in labels},
        )

    @property
    def reference(self) -> str:
        """Label of the row with which the others are compared."""
        return self.baseline if self.baseline is not None else next(iter(self.rows))


def read(path: Path, variant: str | None = None) -> Comparison:
    """Read a comparison file.

    `variant`: name of an entry of `variants` in the file, whose fields replace the fields of the same name; None = no
    replacement.

    Raises:
        BadInput: the file is missing or not YAML, or a field is unknown, missing, of another type or out of range.
    """
    raw = read_mapping(path, f"comparison '{path}'", "give config, rows and seeds")
    if "rows" not in raw and raw.keys() >= _OF_A_RUN:
        raise BadInput(
            f"'{path}' is the config of a run, not a comparison: write a file with config: {path}, rows and seeds, or show "
            "runs beside each other by `raafl report RUN RUN`"
        )
    return of_fields(raw, path.stem, f"'{path}'", variant)


def of_fields(raw: Mapping[str, Any], name: str, where: str, variant: str | None = None) -> Comparison:
    """Make a comparison of the fields of a comparison file.

    `name`: name of the comparison where the fields have none.
    `where`: where the fields are from, for messages.
    `variant`: as for `read`.

    Raises:
        BadInput: a field is unknown, missing, of another type or out of range.
    """
    raw = _variant({**raw, "name": name if raw.get("name") is None else str(raw["name"])}, variant)
    if raw.get("baseline") is not None:
        raw["baseline"] = str(raw["baseline"])  # YAML reads a label such as 1.5 as a number
    raw = with_direction(check_fields(raw, Comparison, ""), Comparison.metric)
    for needed in ("config", "rows", "seeds"):
        if needed not in raw:
            raise BadInput(f"{needed} is missing in {where}: a comparison needs config, rows and seeds")
    given = {
        **raw,
        "rows": {label: words(f"rows.{label}", text) for label, text in labelled("rows", raw["rows"]).items()},
        "seeds": seeds_of("seeds", raw["seeds"]),
        "options": words("options", raw.get("options")),
        "targets": tuple(numbers("targets", raw.get("targets", []))),
        "search": _search(raw["search"]) if "search" in raw else None,
        "published": _published(raw.get("published")),
    }
    return Comparison(**given)


def _variant(raw: Mapping[str, Any], variant: str | None) -> dict[str, Any]:
    """Return the fields of a comparison file with those of ``variant`` in place of its own; None = no variant."""
    variants = {
        name: mapping(f"variants.{name}", fields) for name, fields in labelled("variants", raw.get("variants")).items()
    }
    for name, given in variants.items():
        check_names(given, Comparison, f"variants.{name}.")
    if variant is not None and variant not in variants:
        raise BadInput(f"variant is '{variant}', which the comparison does not have: {nearest(variant, variants)}")
    found = {name: value for name, value in raw.items() if name != "variants"}
    if variant is None:
        return found
    own = variants[variant].get("name")
    return {**found, **variants[variant], "name": f"{raw['name']}-{variant}" if own is None else str(own)}


def _published(value: object) -> dict[str, float | str]:
    found = {label: one for label, one in labelled("published", value).items() if one is not None}
    for label, one in found.items():
        if type(one) not in (int, float, str):
            raise BadInput(f"published.{label} is {one!s:.80}: give a number or text")
    return found


def _search(raw: object) -> Search:
    given = check_fields(mapping("search", raw), Search, "search.")
    for name in ("grid", "seeds"):
        if name not in given:
            raise BadInput(f"search.{name} is missing: give search.grid (--OPTION: [VALUE, ...]) and search.seeds")
    halving = given.get("halving")
    if halving is not None:
        halving = Halving(**check_fields(mapping("search.halving", halving), Halving, "search.halving."))
    rows = labelled("search.rows", given.get("rows"))
    return Search(
        **{
            **given,
            "grid": mapping("search.grid", given["grid"]),
            "seeds": seeds_of("search.seeds", given["seeds"]),
            "rows": {label: mapping(f"search.rows.{label}", grid) for label, grid in rows.items()},
            "options": words("search.options", given.get("options")),
            "halving": halving,
        }
    )


Options = tuple[str, ...]
"""Options of `raafl simulate`, as words of a command line."""

_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
_PLAIN: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def read_mapping(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """Read a YAML file that must be a mapping.

    Raises:
        BadInput: the file is missing, not YAML, not a mapping, or a mapping in it has a key twice.
    """
    try:
        raw = read_yaml(path, what, "is not YAML")
    except OSError as error:
        near = nearest(path.stem, [file.stem for file in path.parent.glob("*.yaml")], none="name a YAML file")
        raise BadInput(f"{what} cannot be read: {error.strerror}: {near}") from None
    if not isinstance(raw, dict):
        raise BadInput(f"{what} is not a mapping: {remedy}")
    return raw


def check_fields(given: Mapping[str, Any], kind: type, prefix: str) -> dict[str, Any]:
    """Return the fields that have a value; a field that is null has its default.

    Fields of plain types (numbers, text, true or false) are checked; the others have readers of their own.

    Raises:
        BadInput: a name is no field of the dataclass, or a value has another type than the field.
    """
    check_names(given, kind, prefix)
    hints = get_type_hints(kind)
    found = {name: value for name, value in given.items() if value is not None}
    for name in found:
        hint = hints[name]
        plain = [one for one in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if one in _PLAIN]
        if float in plain and str not in plain:
            found[name] = _number_of(found[name])
        value = found[name]
        if plain and not any(_is_plain(value, one) for one in plain):
            raise BadInput(f"{prefix}{name} is {value!r:.80}: give {' or '.join(_PLAIN[one] for one in plain)}")
    return found


def with_direction(given: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the fields with ``maximize``, which is false by default if smaller values of the metric are better."""
    return {"maximize": direction(given.get("metric", metric)) != "min", **given}


def _number_of(value: Any) -> Any:
    """Return the number in a text such as 1e-4 or 1.5e3, which YAML 1.1 reads as text; other values as they are.

    It wants a dot, and a sign in the exponent.
    """
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _is_plain(value: object, kind: type) -> bool:
    return type(value) in ((int, float) if kind is float else (kind,))  # type: true is no number


def check_names(given: Mapping[str, Any], kind: type, prefix: str) -> None:
    """Raise `BadInput` if a mapping has a key that is not the name of a field of a dataclass."""
    names = [one.name for one in fields(kind)]
    for name in given:
        if name not in names:
            raise BadInput(f"{prefix}{name} is unknown: {nearest(str(name), names)}")


def folder_of(name: str, output: str | Path | None, kind: str = "comparisons") -> Path:
    """Return the folder of a comparison, a grid or a sweep: ``output``, by default ``kind``/``name``."""
    return Path(kind) / name if output is None else Path(output)


def check_folder_name(name: str) -> None:
    """Raise `BadInput` unless the name of a comparison can be the name of a folder."""
    if not name or "/" in name or name in (".", "..") or not name.isprintable():
        raise BadInput(
            f"name is {name!r:.80}, which is no name of a folder: leave out '/', and choose the folder by --output"
        )


def mapping(name: str, value: object) -> Mapping[str, Any]:
    """Check that the value of a field is a mapping, and return it; else raise a `BadInput` that names the field."""
    if not isinstance(value, dict):
        raise BadInput(f"{name} is {value!s:.80}: give a mapping")
    return value


def labelled(name: str, value: object) -> dict[str, Any]:
    """Check that the value of a field is a mapping, and return it with labels that are text, as those of rows are.

    `value`: value of the field; None = no entries.

    Raises:
        BadInput: the value is no mapping, or two of its labels are equal as text.
    """
    found: dict[str, Any] = {}
    for label, entry in mapping(name, {} if value is None else value).items():
        if str(label) in found:
            raise BadInput(f"{name} has '{label}' twice: give each label once")
        found[str(label)] = entry
    return found


def words(name: str, text: object) -> Options:
    """Split a text into command-line options, as a shell does; raise `BadInput` if it is not text, or a quote is not closed."""
    if text is None:
        return ()
    if isinstance(text, list) and all(isinstance(word, str | int | float) for word in text):
        return tuple(map(str, text))
    if not isinstance(text, str):
        raise BadInput(f"{name} is {text!s:.80}: give the options in one string, such as '--model.lr 0.1'")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BadInput(f"{name} is {text!r:.80}: {error}") from None


def word_of(value: object) -> str:
    """Return a value of YAML as a command-line option has it: a missing one is null there, too, and not the text None."""
    return "null" if value is None else str(value)


def seeds_of(name: str, value: object) -> tuple[int, ...]:
    """Check that the value of a field is a list of seeds, and return them; else raise a `BadInput` that names the field."""
    if not isinstance(value, list) or not all(type(seed) is int and seed >= 0 for seed in value):
        raise BadInput(f"{name} is {value!s:.80}: give a list of whole numbers from 0")
    return tuple(value)


def numbers(name: str, value: object) -> Iterator[float]:
    """Check that the value of a field is a list of numbers, and yield them; else raise a `BadInput` that names the field."""
    found: list[Any] = list(map(_number_of, value)) if isinstance(value, list) else [None]
    if not all(type(number) in (int, float) and math.isfinite(number) for number in found):
        raise BadInput(f"{name} is {value!s:.80}: give a list of numbers")
    return map(float, found)
