"""Define the sections of a run's configuration that other packages need, too."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from raafl.errors import BadInput, at_least, positive

Mode = Literal["auto", "live", "plain", "verbose", "quiet"]
MODES: tuple[Mode, ...] = ("auto", "live", "plain", "verbose", "quiet")

Group = Literal["who", "end", "shown", "computed", "other"]
"""Keys of the groups of options, which `raafl.config.parse.GROUPS` gives headings."""


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
    """Return the metadata of a field that must be given: its help text and rules.

    `metavar`: placeholder of the value in the help text; None = derived from the type.
    """
    return {"about": About(text, metavar, **more)}


def option(default: Any, text: str, metavar: str | None = None, **more: Any) -> Any:
    """Return a field of a dataclass with its default, or a class or function that makes it, and its help text and rules."""
    how = {"default_factory": default} if callable(default) else {"default": default}
    return field(**how, metadata=about(text, metavar, **more))


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
        predictions: number of test samples whose predicted classes are recorded, the first ones; at most 1000.
        images: number of test images whose predicted classes are recorded, the first ones, each with a small picture; at most 64.
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


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(field_name: str, value: float | str | None) -> float | None:
    """Convert a duration to seconds; it is a number, or a text such as 90s, 5m, 2h or 1d.

    Raises:
        BadInput: the value is not a duration above 0.
    """
    if value is None:
        return None
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([smhd]?)\s*", str(value).lower(), re.ASCII)
    number = float(match[1]) * _UNITS_S[match[2] or "s"] if match else math.nan
    if not 0 < number < math.inf:
        raise BadInput(f"{field_name} is {value}: give seconds above 0, or text such as 90s, 5m, 2h")
    return number


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance between two evaluations, in versions, in seconds of the run's clock, or in samples trained."""

    size: float
    unit: Literal["versions", "seconds", "samples"]


def distance(field_name: str, value: int | str | None) -> Distance | None:
    """Convert a distance between evaluations: a number of versions, a duration with its unit, or `5000 samples`.

    `value`: value of the field; None = not given.

    Raises:
        BadInput: the value is none of these, or not above 0.
    """
    if value is None:
        return None
    text = str(value).strip().lower()
    match = re.fullmatch(r"(-?[0-9]+)\s*(samples?)?", text)
    if match and int(match[1]) > 0:
        return Distance(int(match[1]), "samples" if match[2] else "versions")
    if match is None and re.fullmatch(r"[0-9.e+-]+\s*[smhd]", text):
        return Distance(seconds(field_name, text) or 0.0, "seconds")
    raise BadInput(
        f"{field_name} is {value}: give 1 or more versions, seconds above 0 such as 10s, or samples such as '5000 samples'"
    )
