"""Every message of a run: who sends it when, which fields it has, and how a peer's words are checked.

A message is a frame of `raafl.transport.codec`: a kind, an assignment's id, a client's incarnation, a JSON object `meta` and
tensors. This module is the only place that names a field of `meta`. Each record writes it with `to_meta`; `from_meta` bounds
and checks what a peer wrote, and raises `Refused` for anything else. A field that is not known is ignored.

========= ===================================================== ======================= ==============================
kind      who sends it, and when                                record                  tensors
========= ===================================================== ======================= ==============================
CONFIG    client, first, if it has no config; the server's reply `Config`                none
RESUME    client, for a HELLO: its connection broke             `raafl.runtime.resumption`  none; a WELCOME answers it
HELLO     client, process of a client, or rank, once set up     `Hello`                 none
WELCOME   server or rank 0: the peer is admitted                `Welcome`               none
ASSIGN    server, leader or rank 0: train this                  `Assign`                the submodel's values
UPDATE    client or rank: the answer                            `Answer`                what was trained
FAILED    client or rank: no answer; before a HELLO: no client   `Failed`                none
QUESTION  client, in the middle of a task with an exchange      `Question`              the method's
REPLY     server, to a question                                 none                    the method's
REFUSED   server: the task's exchange is over, nothing is used  `Reason`                none
MEASURE   rank 0: measure these batches                         `Measure`               the model's values, the first time
MEASURED  rank: the partial sums                                plain data of `Evaluator.partials`  none
KEEPALIVE server, to an idle client                             none                    none
STOP      server, leader or rank 0: the run, or the client, ends `Reason`               none
========= ===================================================== ======================= ==============================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, cast

from raafl.core.records_json import assignment_from_json, assignment_to_json, client_to_json
from raafl.core.types import UNANSWERED, Assignment, ClientInfo
from raafl.devices.series import as_sent, problem_of_sent
from raafl.errors import LONGEST, GpuLost, TaskFailed
from raafl.runtime.fields import HEAD_FIELDS, LogLine, Meta, SignedHead, count_of, log_lines_of, logs_to_meta
from raafl.runtime.identity import Identity
from raafl.sanitize import sanitize_text
from raafl.submodel import SpecError, Submodels
from raafl.transport import Kind, Refused

MAX_METRIC: Final = 3.5e38
"""Slightly above the largest single-precision number, which is what clients measure in: sums of these are finite."""
MAX_METRICS: Final = 100
MAX_TRACEBACK: Final = 20_000
GPU_LOST, DRY_RUN = "gpu", "dry-run"
PAUSED: Final = "interrupted: the server is to be resumed"
"""Reason of a STOP from a server that SIGTERM ended, for an upgrade or a restart: clients of other machines wait for the next."""
PRECISIONS: Final = ("32-true", "32", "bf16-mixed")
"""Those in which both sides of an exchange can train; 16-mixed scales losses, which takes one backward pass."""


def no_tensors(kind: Kind, assignment: int, meta: Meta) -> None:
    """Expect a message without tensors; arguments as for `raafl.transport.Expect`."""


# ---- records, in the order of a session ----


@dataclass(frozen=True, slots=True)
class Config:
    """Message with the server's config, for a client without one; if it has no text, it is the client's request for the config.

    Attributes:
        config_yaml: text of config.yaml; None = a request, or the reply to a client that has its own.
    """

    config_yaml: str | None = None

    def to_meta(self) -> dict[str, Any]:
        """Return the fields of the message."""
        return {"config_yaml": self.config_yaml}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read a Config message; raise `Refused` if its text is not a text."""
        text = meta.get("config_yaml")
        if text is not None and not isinstance(text, str):
            raise Refused("bad-meta", "config_yaml is no text")
        return cls(text)


@dataclass(frozen=True, slots=True)
class Hello:
    """Message in which a peer describes itself after it has built its model.

    Attributes:
        identity: properties that must be equal at peer and server.
        unsent: id of an assignment whose answer could not be sent on an earlier connection; None = none.
        client: description of a client (`client_to_json`), with digests of its recorded series; empty under torchrun.
        memory_bytes: number of bytes of memory that a process of a client may use; None = no limit.
    """

    identity: Identity
    unsent: int | None = None
    client: Meta = field(default_factory=dict)
    memory_bytes: float | None = None

    @classmethod
    def of_client(cls, identity: Identity, info: ClientInfo, unsent: int | None = None) -> Self:
        """Return the HELLO of a client; a series of its profile is replaced by a digest, for a server that has the series.

        Args:
            identity: identity of this process: config, model and version.
            info: description of the client.
            unsent: id of an assignment whose update was not sent on an earlier connection; None = there is none.
        """
        data = client_to_json(info)
        return cls(identity, unsent, {**data, "profile": as_sent(data["profile"])})

    def to_meta(self) -> dict[str, Any]:
        """Return the fields of the message."""
        limit = {} if self.memory_bytes is None else {"memory_bytes": self.memory_bytes}
        return {**self.identity.to_meta(), "unsent": self.unsent, **limit, **self.client}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read a HELLO; raise `Refused` if `unsent` or `memory_bytes` is not a number above 0, or a series is sent in full."""
        unsent = None if meta.get("unsent") is None else count_of(meta, "unsent", least=1)
        memory = meta.get("memory_bytes")
        if memory is not None and not (isinstance(memory, int | float) and 0 < memory < math.inf):
            raise Refused("bad-json", f"memory_bytes is {sanitize_text(memory)}")
        profile = meta.get("profile")
        if isinstance(profile, dict) and (problem := problem_of_sent(profile)) is not None:
            remedy = "give it the same devices in the server's config, or a shorter series"
            raise Refused("bad-json", f"profile of client {sanitize_text(meta.get('client'), 20)}: {problem}: {remedy}")
        return cls(Identity.from_meta(meta), unsent, meta, memory)

    @property
    def num_samples(self) -> int:
        """Number of training samples of the client; raises `Refused` unless it is a whole number of at least 1."""
        return count_of(self.client, "num_samples", least=1)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Message by which the server admits a peer.

    Attributes:
        kept_whole: names of the axes that the server could not verify as safe to cut; the peer must not cut them either.
        client: id of the client; None for a rank.
    """

    kept_whole: tuple[str, ...] = ()
    client: int | None = None

    def to_meta(self) -> dict[str, Any]:
        """Return the fields of the message."""
        client = {} if self.client is None else {"client": self.client}
        return {**client, "kept_whole": list(self.kept_whole)} if self.kept_whole or self.client is None else client

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read a Welcome message; raise `Refused` if ``kept_whole`` is not a list of texts."""
        names = meta.get("kept_whole", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused("bad-meta", "kept_whole is no list of names of axes")
        return cls(tuple(names))

    def apply_to(self, submodels: Submodels) -> None:
        """Exclude the axes in `kept_whole` from cuts; raise `Refused` for an axis that the model does not have."""
        try:
            submodels.exclude_axis(dict.fromkeys(self.kept_whole, "not proven by the server"))
        except SpecError as error:
            raise Refused("bad-meta", f"kept_whole: {error}") from None


@dataclass(frozen=True, slots=True)
class Assign:
    """Message that sends a task; its tensors are the submodel's values.

    Attributes:
        assignment: assignment of the task.
        more: whether the following tasks are trained together with this one, as one batch.
        head: head of the server's journal, for the site's receipt; None = none.
    """

    assignment: Assignment
    more: bool = False
    head: SignedHead | None = None

    def to_meta(self) -> dict[str, Any]:
        """Return the fields of the message."""
        head = {} if self.head is None else self.head.to_meta()
        return {**assignment_to_json(self.assignment), **({"more": True} if self.more else {}), **head}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read an Assign message; raise `Refused` if it has no valid assignment."""
        try:
            fields = {name: value for name, value in meta.items() if name not in ("more", *HEAD_FIELDS)}
            return cls(assignment_from_json(fields), meta.get("more") is True, SignedHead.from_meta(meta))
        except (SpecError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise Refused("bad-json", f"assignment: {sanitize_text(error)}") from None


@dataclass(frozen=True, slots=True)
class Answer:
    """Message with the result of a task; its tensors are the update.

    Attributes:
        num_samples: number of samples that the client has trained on, by which its update may be weighted.
        num_steps: number of optimiser steps made.
        metrics: metrics that the client measured, by name; at most `MAX_METRICS`.
        extra: plain data from the method's hook for the merge.
        base: digest of the frozen parameters in the precision that the task asked for; None = the task named no
            precision.
        refusal: reason, found where the update was trained, for which it may not be merged; None = no reason.
        counted: counts of how a rank's executor has trained so far; empty from a client.
        logs: lines that the client has logged and that its site lets leave.
    """

    num_samples: int
    num_steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    refusal: str | None = None
    counted: Mapping[str, Any] = field(default_factory=dict)
    logs: tuple[LogLine, ...] = ()

    def to_meta(self, *, exact: bool = False) -> dict[str, Any]:
        """Return the fields of the message.

        Args:
            exact: whether to write metrics as text, so that NaN and infinity survive JSON; used between ranks of one
                simulated run.
        """
        if exact:
            metrics: dict[str, float | str] = {name: repr(value) for name, value in self.metrics.items()}
        else:
            metrics = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        meta: dict[str, Any] = {"num_samples": self.num_samples, "num_steps": self.num_steps, "metrics": metrics}
        optional = {"extra": self.extra, "base": self.base, "refusal": self.refusal, "counted": self.counted}
        return meta | {name: value for name, value in (optional | logs_to_meta(self.logs)).items() if value}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read a client's Answer; metrics that are not numbers, or are above `MAX_METRIC`, are left out.

        Raise `Refused` if invalid.
        """
        metrics, extra, base = meta.get("metrics", {}), meta.get("extra", {}), meta.get("base")
        if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
            raise Refused("bad-json", "metrics is not a small table")
        if not isinstance(extra, dict):
            raise Refused("bad-json", "extra is not a table")
        try:
            numbers = {
                sanitize_text(name): float(value) for name, value in metrics.items() if isinstance(value, int | float)
            }
        except OverflowError:
            raise Refused("bad-json", "a metric is out of range") from None
        within = {name: value for name, value in numbers.items() if abs(value) <= MAX_METRIC}  # NaN is not
        num_samples, num_steps = count_of(meta, "num_samples", least=1), count_of(meta, "num_steps")
        base = base if isinstance(base, str) else None
        return cls(num_samples, num_steps, within, extra, base, logs=log_lines_of(meta))

    @classmethod
    def from_rank(cls, meta: Meta) -> Self:
        """Read a rank's Answer, whose metrics are exact.

        Ranks of one run trust each other, but an invalid field is refused all the same.
        """
        refusal, counted = meta.get("refusal"), meta.get("counted", {})
        try:
            metrics = {str(name): float(text) for name, text in meta["metrics"].items()}
            extra = dict(meta.get("extra", {}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refused("bad-json", f"metrics or extra: {sanitize_text(error)}") from None
        if not isinstance(counted, dict) or not (refusal is None or isinstance(refusal, str)):
            raise Refused("bad-json", "counted or refusal is of another type")
        return cls(count_of(meta, "num_samples"), count_of(meta, "num_steps"), metrics, extra, None, refusal, counted)


@dataclass(frozen=True, slots=True)
class Failed:
    """Message in place of an Answer: memory was too small, the site does not allow the task, or the code raised an error.

    Attributes:
        reason: one of `UNANSWERED`, `GPU_LOST`, or "" for an error of the code; before a HELLO, `POLICY` or `DRY_RUN`.
        where: the task and the line of code, as the client describes them.
        error: error in one line.
        traceback: full traceback, at most `MAX_TRACEBACK` characters; "" if the client's data are private.
        logs: lines that the client has logged, as in an `Answer`.
    """

    reason: str = ""
    where: str = ""
    error: str = ""
    traceback: str = ""
    logs: tuple[LogLine, ...] = ()

    @classmethod
    def of(cls, failure: TaskFailed, *, private: bool) -> Self:
        """Return the message for a failure; if the client's data are ``private``, it has only the error's type and place."""
        reason = GPU_LOST if isinstance(failure, GpuLost) else ""
        if not private:
            return cls(reason, failure.where, failure.error, failure.traceback)
        kind, place = failure.error.partition(":")[0], failure.error.rpartition(" (")[2]
        at = f" ({place}" if place.endswith(")") else ""
        return cls(reason, failure.where, kind.partition(" (")[0] + at)

    def to_meta(self) -> dict[str, Any]:
        """Return the fields of the message."""
        fields = {"reason": self.reason, "where": self.where, "error": self.error, "traceback": self.traceback}
        return {name: value for name, value in (fields | logs_to_meta(self.logs)).items() if value}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read a Failed message; its texts are sanitised and shortened, whatever they are."""
        lines = str(meta.get("traceback", ""))[-MAX_TRACEBACK:].splitlines()
        return cls(
            sanitize_text(meta.get("reason", "")), sanitize_text(meta.get("where", "")),
            sanitize_text(meta.get("error", ""), 2 * LONGEST), "\n".join(map(sanitize_text, lines)),
            log_lines_of(meta),
        )  # fmt: skip

    @property
    def refusal(self) -> str | None:
        """Reason for which the client refuses the task; None = its code raised an error."""
        return self.reason if self.reason in UNANSWERED else None

    def to_error(self, client: int) -> TaskFailed:
        """Return the failure of ``client`` as an exception."""
        made = GpuLost if self.reason == GPU_LOST else TaskFailed
        return made(client, self.where, self.error, self.traceback)


@dataclass(frozen=True, slots=True)
class Reason:
    """Message with the reason for which the server stops or refuses a peer."""

    reason: str

    def to_meta(self) -> dict[str, Any]:
        """Return the fields of the message."""
        return {"reason": self.reason}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read a Reason message; its text is sanitised and shortened."""
        return cls(sanitize_text(meta.get("reason", "")))


@dataclass(frozen=True, slots=True)
class Question:
    """Message of an exchange in mid-task: settings that the server's side must match, and fields of the method.

    Attributes:
        precision: numeric precision, one of `PRECISIONS`.
        accumulate: number of batches to an optimiser step, at least 1.
        sends: content of the client's update, values or a difference.
    """

    precision: str
    accumulate: int
    sends: Literal["values", "delta"]

    def to_meta(self) -> dict[str, Any]:
        """Return the fields of the message, to be added to those of the method."""
        return {"precision": self.precision, "accumulate": self.accumulate, "sends": self.sends}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read a Question message; raise `Refused` for a value out of range."""
        precision, accumulate, sends = meta.get("precision"), meta.get("accumulate"), meta.get("sends")
        if precision not in PRECISIONS:
            raise Refused("bad-json", f"precision is {sanitize_text(precision, 40)}: use {', '.join(PRECISIONS)}")
        if type(accumulate) is not int or not 0 < accumulate < 2**31 or sends not in ("values", "delta"):
            raise Refused("bad-json", f"accumulate {sanitize_text(accumulate, 40)}, sends {sanitize_text(sends, 40)}")
        return cls(cast(str, precision), accumulate, cast(Literal["values", "delta"], sends))


@dataclass(frozen=True, slots=True)
class Measure:
    """Message that asks a rank to evaluate some test batches.

    Attributes:
        start: index of the first batch.
        stop: index after the last one.
        has_values: whether the model's values come with the message; else those of the last message are used.
    """

    start: int
    stop: int
    has_values: bool

    def to_meta(self) -> dict[str, Any]:
        """Return the fields of the message."""
        return {"start": self.start, "stop": self.stop, "has_values": self.has_values}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read a Measure message; raise `Refused` if it has no valid range."""
        start, stop = count_of(meta, "start"), count_of(meta, "stop", least=1)
        return cls(start, stop, meta.get("has_values") is True)
