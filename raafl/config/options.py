"""Define the sections of a run's configuration that other packages need, too."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raafl.errors import BadInput, at_least, positive

Mode = Literal["auto", "live", "plain", "verbose", "quiet"]
MODES: tuple[Mode, ...] = ("auto", "live", "plain", "verbose", "quiet")

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

Group = Literal["who", "end", "shown", "computed", "other"]
GROUPS: dict[Group, str] = {
    "who": "who trains what",
    "end": "when it ends (the first that comes)",
    "shown": "what is measured, kept and shown",
    "computed": "how it is computed",
    "other": "",
}
"""The headings of `--help`."""


@dataclass(frozen=True, slots=True)
class About:
    """Help text and rules of a field of the configuration, stored in the field's metadata."""

    help: str
    metavar: str | None = None
    group: Group = "other"
    must_match: bool = False
    sent_to_clients: bool = False
    may_change: bool = False
    keyword: bool = True
    used_by_replay: bool = True
    least: int | None = None
    most: int | None = None


def about(text: str, metavar: str | None = None, **more: Any) -> dict[str, About]:
    """Return the metadata of a dataclass field: its help text and rules.

    `metavar`: placeholder of the value in the help text; None = derived from the type.
    """
    return {"about": About(text, metavar, **more)}


_OF_A_METRIC = ("drop", "gap", "diff", "std", "var", "variance")
"""Last words of names of a property of a metric, for which another direction may be better than for the metric."""


def direction(metric: str) -> Direction | None:
    """Tell by the words of a metric's name whether lower or higher values are better; None if the name does not say it.

    The last known word counts, as in ``val_loss``, ``train/rmse`` or ``top5_accuracy``; a leading ``neg_`` turns the
    direction round, as in scikit-learn.
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", metric).lower()
    if words.rpartition("_")[2] in _OF_A_METRIC:
        return None
    # names like mIoU are also matched without splitting them at capitals
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
        """Return METRIC=VALUE, or METRIC<=VALUE or METRIC>=VALUE if the metric's name does not imply the direction."""
        sign = {None: "=", "min": "<=", "max": ">="}[self.mode]
        return f"{self.metric}{sign}{self.value:g}"


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
            return cls(updates and int(updates), time_s and float(time_s), tuple(targets))
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of a wall-clock run, in seconds.

    Attributes:
        join_s: seconds for a client to connect.
        task_s: seconds for a client to answer an assignment.
        idle_s: seconds without a message after which a client gives the server up; the server sends three heartbeats in
            this time.
        stop_s: seconds for threads and clients to end.
        eval_s: seconds for the last evaluation, once the run has ended.
        alone_s: seconds after which `raafl serve` ends if it has too few clients, and `raafl join` if it has no server;
            also for a client to build its model from the server's config.
        resume_s: seconds for which `raafl serve` waits for a client whose connection broke during a task, and keeps the
            part of its update that has arrived; 0 = the task is lost at once. Only for runs on several machines.
    """

    join_s: float = 120.0
    task_s: float = 600.0
    idle_s: float = 60.0
    stop_s: float = 10.0
    eval_s: float = 600.0
    alone_s: float = 600.0
    resume_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Samples:
    """Texts and predictions of the global model that are recorded at evaluations, in samples.csv.

    Attributes:
        prompts: texts that a language model continues, always with the most probable token.
        predictions: number of test samples whose predicted classes are recorded, the first ones.
        images: number of test images whose predicted classes are recorded, the first ones, each with a small picture of it.
        every: record at each so-many-th evaluation, beside the run's first model.
        max_new_tokens: most tokens written after a prompt.
    """

    prompts: list[str] = field(default_factory=list)
    predictions: int = 0
    images: int = 0
    every: int = 1
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        for name, least in (("predictions", 0), ("images", 0), ("every", 1), ("max_new_tokens", 1)):
            at_least(f"samples.{name}", getattr(self, name), least)
        if self.max_new_tokens != 32 and not self.prompts:
            raise BadInput(f"samples.max_new_tokens is {self.max_new_tokens}, but there are no prompts: give some")
        if self.every != 1 and not self:
            raise BadInput(
                f"samples.every is {self.every}, but nothing is recorded: give samples.prompts, predictions or images"
            )

    def __bool__(self) -> bool:
        return bool(self.prompts or self.num_predictions)

    @property
    def num_predictions(self) -> int:
        """Number of test samples whose predicted classes are recorded."""
        return max(self.predictions, self.images)


@dataclass(frozen=True, slots=True)
class Engine:
    """Options for where the tasks of a simulated run are trained.

    Attributes:
        name: processes = this one, and those that `workers` forks; ray = the workers of a Ray cluster, of which ``workers``
            train at a time (1 = as many as there is room for).
        address: address of a running Ray cluster, or auto for the one of this machine; null = Ray is started on this machine
            for the run.
        cpus_per_worker: CPUs that a worker of Ray occupies.
        gpus_per_worker: GPUs that a worker of Ray occupies; 0.25 = four workers share one.
    """

    name: Literal["processes", "ray"] = "processes"
    address: str | None = None
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ("processes", "ray"):
            raise BadInput(f"engine.name is {self.name!r}: give processes or ray")
        positive("engine.cpus_per_worker", self.cpus_per_worker)
        if not 0 <= self.gpus_per_worker < math.inf:
            raise BadInput(f"engine.gpus_per_worker is {self.gpus_per_worker}: give 0 or more")
        if self.name == "processes" and (self.address, self.cpus_per_worker, self.gpus_per_worker) != (None, 1.0, 0.0):
            raise BadInput(
                f"engine is {self}, but only Ray takes these options: give engine.name ray, or leave them out"
            )


@dataclass(frozen=True, slots=True)
class SubmodelOptions:
    """Options for cutting submodels from the model, and for batch norm statistics; null = the default of the model.

    Attributes:
        residual_width: whether the width of the residual stream, over which norm layers compute statistics, may shrink.
        batch_norm: handling of running statistics: merged = clients send them and the server averages them; static =
            they are not sent, and the server computes them when the model is evaluated or saved.
        static_batches: number of training batches for computing static statistics.
        exits: depths, in blocks, at which a transformer gets an additional output head (early exit): [2, 4] adds one
            after block 2 and one after block 4.
    """

    residual_width: bool | None = None
    batch_norm: Literal["merged", "static"] | None = None
    static_batches: int = 20
    exits: list[int] | None = None

    def __post_init__(self) -> None:
        if self.residual_width not in (True, False, None):
            raise BadInput(f"submodels.residual_width is {self.residual_width!r}: give true, false or null")
        if self.batch_norm not in ("merged", "static", None):
            raise BadInput(f"submodels.batch_norm is '{self.batch_norm}': give merged, static or null")
        positive("submodels.static_batches", self.static_batches)
        if not all(type(depth) is int and depth > 0 for depth in self.exits or ()):
            raise BadInput(f"submodels.exits is {self.exits}: give depths in blocks, from 1, such as [2, 4]")
