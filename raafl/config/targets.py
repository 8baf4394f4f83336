"""Know which values of a metric are better, parse the targets at which a run ends, and state a run's goals."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raafl.errors import BadInput

Direction = Literal["min", "max"]
"""Whether lower or higher values of a metric are better."""


_LOWER = (
    r"loss|losses|perplexity|ppl|error|errors|err|mse|rmse|nrmse|mae|mape|smape|msle|rmsle|nll|neg(?:ative)?_(?:log_)?likelihood"
    r"|bce|cross_?entropy|xent|bpc|bpb|bits_per_\w+|wer|cer|eer|ece|brier|fid|lpips|kl|kld|crps|deviance|regret|fpr|fnr"
)


_HIGHER = (
    r"accuracy|acc|auc|auroc|auprc|roc|ap|map|precision|recall|sensitivity|specificity|f[12]|fbeta|r2|top_?\d+|iou|miou|jaccard"
    r"|dice|bleu|rouge|meteor|chrf|psnr|ssim|ndcg|mrr|hits?|reward|correlation|pearson|spearman|kendall|kappa|mcc|tpr|tnr"
    r"|explained_variance|exact_match|likelihood"
)


_KNOWN = re.compile(rf"(?<![a-z0-9])(?:(?P<min>{_LOWER})|(?P<max>{_HIGHER}))\d*(?![a-z0-9])")


_NEGATED = re.compile(r"(?<![a-z0-9])neg_(?!(?:log_)?likelihood)")


_TARGET = re.compile(r"\s*(.*?\S)\s*(<=|>=|=)(.*)", re.S)


_OF_A_METRIC = ("drop", "gap", "diff", "std", "var", "variance")
"""Last words of names of a property of a metric, for which another direction may be better than for the metric."""


def exact(value: float) -> str:
    """Format a number briefly, but with all digits that it has."""
    return short if float(short := f"{value:g}") == value else repr(value)


def direction(metric: str) -> Direction | None:
    """Tell by the words of a metric's name whether lower or higher values are better; None if the name does not say it.

    The last known word counts, as in ``val_loss``, ``train/rmse`` or ``top5_accuracy``; a leading ``neg_`` turns the
    direction round, as in scikit-learn.
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", metric).lower()
    if words.rpartition("_")[2] in _OF_A_METRIC:
        return None
    # a name like mIoU would be split at its capitals, so the whole name is searched, too
    whole = re.sub(r"[^A-Za-z0-9]+", "_", metric).lower()
    found = [match.lastgroup for match in _KNOWN.finditer(words)] or [
        match.lastgroup for match in _KNOWN.finditer(whole)
    ]
    if found[-1:] == ["max"]:
        return "min" if _NEGATED.search(words) else "max"
    if found or words.endswith(("loss", "perplexity", "error")):
        return "max" if _NEGATED.search(words) else "min"
    return "max" if "score" in words.split("_") else None


def ranking(text: str) -> tuple[str, Direction | None]:
    """Split METRIC, METRIC:min or METRIC:max into a metric and its direction; None = the name does not say it."""
    metric, _, last = text.rpartition(":")
    if metric and last in ("min", "max"):
        return metric, "min" if last == "min" else "max"
    return text, direction(text)


@dataclass(frozen=True, slots=True)
class Target:
    """Value of a metric at which the run ends, such as accuracy=0.93.

    Attributes:
        metric: name of the metric.
        value: value to reach.
        mode: direction in which the value is reached, min from above; None = as the metric's name says.
    """

    metric: str
    value: float
    mode: Direction | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse a target of the form ``METRIC=VALUE``, ``METRIC<=VALUE`` or ``METRIC>=VALUE``.

        Raises:
            BadInput: the text is not of that form.
        """
        match = _TARGET.fullmatch(text)
        try:
            number = float(match[3]) if match else math.nan
        except ValueError:
            number = math.nan
        if not match or not math.isfinite(number):
            raise BadInput(
                f"target is '{text}': give METRIC=VALUE, for example accuracy=0.93, or METRIC<=VALUE or METRIC>=VALUE"
            )
        given: dict[str, Direction] = {"<=": "min", ">=": "max"}
        return cls.of(match[1], number, given.get(match[2]))

    @classmethod
    def of(cls, metric: str, value: float, mode: Direction | None) -> Target:
        """Return a target whose ``mode`` is None where the metric's name says the same, so that equal targets are equal.

        Args:
            metric: name of the metric.
            value: value to reach.
            mode: direction in which the value is reached; None = as the metric's name says.
        """
        return cls(metric, value, None if mode == direction(metric) else mode)

    @property
    def is_clear(self) -> bool:
        """Whether the target or its metric's name says which values are better."""
        return self.mode is not None or direction(self.metric) is not None

    @property
    def at_most(self) -> bool:
        """Whether lower values of the metric are better, so that the target is an upper limit."""
        return (self.mode or direction(self.metric)) == "min"

    def met(self, metrics: Mapping[str, float]) -> bool:
        """Check whether the metrics of an evaluation reach the target."""
        if self.metric not in metrics:
            return False
        value = metrics[self.metric]
        return value <= self.value if self.at_most else value >= self.value

    def __str__(self) -> str:
        """Format the target as METRIC=VALUE, or with <= or >= if the metric's name does not imply the direction.

        `parse` reads the same target from it.
        """
        return self.metric + {None: "=", "min": "<=", "max": ">="}[self.mode] + exact(self.value)


@dataclass(frozen=True, slots=True)
class Goals:
    """Limits of a run: updates, seconds, and targets of metrics. The run ends when the first limit is met."""

    max_updates: int | None = None
    max_time_s: float | None = None
    targets: tuple[Target, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the goals as plain data, for the journal."""
        targets = [{"metric": one.metric, "value": one.value, "at_most": one.at_most} for one in self.targets]
        return {"max_updates": self.max_updates, "max_time_s": self.max_time_s, "targets": targets}

    @classmethod
    def from_json(cls, data: Any) -> Goals:
        """Restore goals from the result of `to_json`; the result has no goals if ``data`` has another form."""
        try:
            targets = [
                Target.of(str(one["metric"]), float(one["value"]), "min" if one["at_most"] else "max")
                for one in data["targets"]
            ]
            updates, time_s = data["max_updates"], data["max_time_s"]
            return cls(
                None if updates is None else int(updates), None if time_s is None else float(time_s), tuple(targets)
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()
