"""Define every message of a run: who sends it and when, its fields, and how a received message is checked.

A message is a frame of `raafl.transport.codec`: a kind, an assignment's id, a client's incarnation, a JSON object `meta` and
tensors. This module is the only place that names a field of `meta`. Each record writes it with `to_meta`; `from_meta` bounds
and checks what a peer wrote, and raises `Refused` for anything else. A field that is not known is ignored.

========= ===================================================== ======================= ==============================
kind      who sends it, and when                                record                  tensors
========= ===================================================== ======================= ==============================
CONFIG    client, first, if it has no config; the server's reply `Config`                none
RESUME    client, for a HELLO: its connection broke             `raafl.runtime.protocol`  none; a WELCOME answers it
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
RUNS      peer of a server for many runs; its answer            `raafl.sites.run_server`  none
STOP      server, leader or rank 0: the run, or the client, ends `Reason`               none
========= ===================================================== ======================= ==============================
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any, Final, Literal, Self, cast, get_args

from raafl.core.restoring import assignment_from_json
from raafl.core.saving import assignment_to_json, client_to_json
from raafl.core.types import UNANSWERED, Assignment, ClientInfo
from raafl.devices.recordings import as_sent, problem_of_sent
from raafl.errors import LONGEST, GpuLost, TaskFailed
from raafl.local.evaluate import MAX_METRIC
from raafl.runfolder.seals import Signer, is_signed
from raafl.runtime.identity import Identity
from raafl.sanitize import sanitize_text
from raafl.submodel import SpecError, Submodels
from raafl.transport import Kind, Refused
from raafl.transport.tcp.resumable import Position

MAX_METRICS: Final = 100
MAX_TRACEBACK: Final = 20_000
GPU_LOST, DRY_RUN = "gpu", "dry-run"
PAUSED: Final = "interrupted: the server is to be resumed"
"""Reason of a STOP from a server that SIGTERM ended (upgrade, restart): clients elsewhere wait for the next server."""
PRECISIONS: Final = ("32-true", "32", "bf16-mixed")
"""Precisions in which both sides of an exchange can train; 16-mixed scales losses, which needs one backward pass."""


def no_tensors(kind: Kind, assignment: int, meta: Meta) -> None:
    """Callback for `Connection.recv` that accepts a message without tensors; arguments as for `raafl.transport.Expect`."""


# ---- records, in the order of a session ----


@dataclass(frozen=True, slots=True)
class Config:
    """Message by which a client without a config asks the server for one; the server answers with the same message.

    Attributes:
        config_yaml: text of config.yaml in the answer; None in the question, or if each process has its own config.
    """

    config_yaml: str | None = None

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        return {"config_yaml": self.config_yaml}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; raise `Refused` if the config is not a text."""
        text = meta.get("config_yaml")
        if text is not None and not isinstance(text, str):
            raise Refused("bad-meta", "config_yaml is no text")
        return cls(text)


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a client, or of a rank that trains: it describes the sender, after it has built its model."""

    identity: Identity  # fingerprints of model, config and raafl's version, which must be equal on both sides
    unsent: int | None = None  # id of a task whose result was lost with an earlier connection; None = none
    # description of a client (`client_to_json`), such as its samples and device; empty under torchrun
    client: Meta = field(default_factory=dict)
    memory_bytes: float | None = None  # bytes of memory that a process of a client may use; None = no limit

    @classmethod
    def of_client(cls, identity: Identity, info: ClientInfo, unsent: int | None = None) -> Self:
        """Build a client's first message; if the device's speed varies over time, the message contains a digest of the speeds.

        `unsent`: id of a task whose update could not be sent on an earlier connection; None = none.
        """
        data = client_to_json(info)
        return cls(identity, unsent, {**data, "profile": as_sent(data["profile"])})

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        limit = {} if self.memory_bytes is None else {"memory_bytes": self.memory_bytes}
        return {**self.identity.to_meta(), "unsent": self.unsent, **limit, **self.client}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message; raise `Refused` if a number is not above 0, or a device's speeds were sent in place of their digest."""
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
        """Number of training samples that the client reports; raises `Refused` unless it is a whole number of at least 1."""
        return count_of(self.client, "num_samples", least=1)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Message in which the server admits a client or a rank."""

    # names of the axes that must not be cut, since their proof failed
    kept_whole: tuple[str, ...] = ()
    client: int | None = None  # id of the client; None for a rank that only trains

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        client = {} if self.client is None else {"client": self.client}
        return {**client, "kept_whole": list(self.kept_whole)} if self.kept_whole or self.client is None else client

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; raise `Refused` if the names of the axes are not a list of texts."""
        names = meta.get("kept_whole", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused("bad-meta", "kept_whole is no list of names of axes")
        return cls(tuple(names))

    def apply_to(self, submodels: Submodels) -> None:
        """Mark the axes (tensor dimensions) in this message as not to be cut; raise `Refused` for one that the model lacks."""
        try:
            submodels.exclude_axis(dict.fromkeys(self.kept_whole, "not proven by the server"))
        except SpecError as error:
            raise Refused("bad-meta", f"kept_whole: {error}") from None


@dataclass(frozen=True, slots=True)
class Assign:
    """Message that sends a training task to a client; its tensors are the submodel's values.

    Attributes:
        assignment: description of the task.
        more: whether the next task is to be trained together with this one, as one batch.
        head: signed hash of the server's journal, for the client's receipt; None = none.
        ahead: whether the server may send the next task while the client still sends its answer to this one.
    """

    assignment: Assignment
    more: bool = False
    head: SignedHead | None = None
    ahead: bool = False

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        flags = {name: True for name in ("more", "ahead") if getattr(self, name)}
        return {**assignment_to_json(self.assignment), **flags, **({} if self.head is None else self.head.to_meta())}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; raise `Refused` if it does not describe a valid task."""
        try:
            fields = {name: value for name, value in meta.items() if name not in ("more", "ahead", *HEAD_FIELDS)}
            flags = {name: meta.get(name) is True for name in ("more", "ahead")}
            found = check_assignment(assignment_from_json(fields))
            return cls(found, head=SignedHead.from_meta(meta), **flags)
        except (SpecError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise Refused("bad-json", f"assignment: {sanitize_text(error)}") from None


@dataclass(frozen=True, slots=True)
class Answer:
    """Message with the result of a training task; its tensors are the update.

    Attributes:
        num_samples: number of samples on which the client trained; the merge may weight the update by it.
        num_steps: number of optimiser steps made.
        metrics: metrics that the client measured, by name; at most `MAX_METRICS`.
        extra: plain data that the method sends to the merge.
        base: digest of the frozen parameters in the precision that the task names; None = the task names no precision.
        refusal: reason for which the update may not be merged; None = it may be merged.
        counted: statistics of how a rank has trained its tasks so far; empty from a client.
        logs: log lines of the client that its site allows to be sent.
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
        """Convert the message to its JSON fields.

        Args:
            exact: whether to write metrics as text, which keeps NaN and infinity; used between ranks of one simulation.
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
        """Read the message of a client; metrics that are not numbers, or are too large, are left out.

        Raises:
            Refused: a field is invalid.
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
        # the comparison is false for NaN, too
        within = {name: value for name, value in numbers.items() if abs(value) <= MAX_METRIC}
        num_samples, num_steps = count_of(meta, "num_samples", least=1), count_of(meta, "num_steps")
        base = base if isinstance(base, str) else None
        return cls(num_samples, num_steps, within, extra, base, logs=log_lines_of(meta))

    @classmethod
    def from_rank(cls, meta: Meta) -> Self:
        """Read the message of a rank of the same simulation, whose metrics are exact; raise `Refused` if a field is invalid."""
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
    """Message that a task failed: too little memory, the site does not allow it, or the code raised an error."""

    # reason code from `UNANSWERED`, or `GPU_LOST`, `POLICY`, `DRY_RUN`; "" = the code raised an error
    reason: str = ""
    where: str = ""  # the task and the line of code, as the client describes them
    error: str = ""  # the error as one line of text
    traceback: str = ""  # full traceback of at most `MAX_TRACEBACK` characters; "" if the client's data are private
    logs: tuple[LogLine, ...] = ()  # log lines of the client that its site lets it send

    @classmethod
    def of(cls, failure: TaskFailed, *, private: bool) -> Self:
        """Build the message from an error; if the client's data are ``private``, only the error's type and place are sent."""
        reason = GPU_LOST if isinstance(failure, GpuLost) else ""
        if not private:
            return cls(reason, failure.where, failure.error, failure.traceback)
        kind = failure.error.partition(":")[0].partition(" (")[0]
        return cls(reason, failure.where, kind + _place_of(failure))

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        fields = {"reason": self.reason, "where": self.where, "error": self.error, "traceback": self.traceback}
        return {name: value for name, value in (fields | logs_to_meta(self.logs)).items() if value}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; all texts are sanitised and shortened."""
        lines = str(meta.get("traceback", ""))[-MAX_TRACEBACK:].splitlines()
        return cls(
            sanitize_text(meta.get("reason", "")),
            sanitize_text(meta.get("where", "")),
            sanitize_text(meta.get("error", ""), 2 * LONGEST),
            "\n".join(map(sanitize_text, lines)),
            log_lines_of(meta),
        )

    @property
    def refusal(self) -> str | None:
        """Reason for which the client refused the task; None = its code raised an error."""
        return self.reason if self.reason in UNANSWERED else None

    def to_error(self, client: int) -> TaskFailed:
        """Convert the message to an exception for the failed task of ``client``."""
        made = GpuLost if self.reason == GPU_LOST else TaskFailed
        return made(client, self.where, self.error, self.traceback)


def _place_of(failure: TaskFailed) -> str:
    """Return the file and line at the end of an error, as `` (FILE:LINE)``; "" unless they are in its traceback, too."""
    place = failure.error.rpartition(" (")[2].removesuffix(")")
    file, _, line = place.rpartition(":")
    # the message itself may end in parentheses, with anything in them
    is_place = file and line.isdigit() and f'{file}", line {line}' in failure.traceback
    return f" ({place})" if is_place else ""


@dataclass(frozen=True, slots=True)
class Reason:
    """Message with the reason why the server stops or refuses a client or a rank."""

    reason: str

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        return {"reason": self.reason}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; its text is sanitised and shortened."""
        return cls(sanitize_text(meta.get("reason", "")))


@dataclass(frozen=True, slots=True)
class Question:
    """Training settings that a client adds to each message which it sends during a task split with the server."""

    precision: str  # numeric precision, from `PRECISIONS`
    accumulate: int  # number of batches for each optimizer step
    # whether the update has parameter values, or their difference from those received
    sends: Literal["values", "delta"]

    def to_meta(self) -> dict[str, Any]:
        """Convert the settings to JSON fields of a message, which has further fields of the method."""
        return {"precision": self.precision, "accumulate": self.accumulate, "sends": self.sends}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the settings from the JSON fields of a message; raise `Refused` for a value out of range."""
        precision, accumulate, sends = meta.get("precision"), meta.get("accumulate"), meta.get("sends")
        if precision not in PRECISIONS:
            raise Refused("bad-json", f"precision is {sanitize_text(precision, 40)}: use {', '.join(PRECISIONS)}")
        if type(accumulate) is not int or not 0 < accumulate < 2**31 or sends not in ("values", "delta"):
            raise Refused("bad-json", f"accumulate {sanitize_text(accumulate, 40)}, sends {sanitize_text(sends, 40)}")
        return cls(cast(str, precision), accumulate, cast(Literal["values", "delta"], sends))


@dataclass(frozen=True, slots=True)
class Measure:
    """Message that asks a rank to evaluate a range of test batches."""

    start: int  # index of the first batch
    stop: int  # index after the last one
    has_values: bool  # whether the model's values come with this message; else those of the last message are used

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        return {"start": self.start, "stop": self.stop, "has_values": self.has_values}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; raise `Refused` if the range of batches is invalid."""
        start, stop = count_of(meta, "start"), count_of(meta, "stop", least=1)
        return cls(start, stop, meta.get("has_values") is True)


Meta = Mapping[str, Any]
"""A JSON object that a peer sent: bounded in size and depth by the codec, and otherwise anything."""
LogLevel = Literal["error", "warning", "info"]
LOG_LEVELS: Final[tuple[LogLevel, ...]] = get_args(LogLevel)
MAX_LOG_LINES: Final = 50
"""Log lines that one message of a client may carry."""
MAX_LOG_TEXT: Final = 500
HEAD_FIELDS: Final = ("head", "head_signature", "head_key")


def count_of(meta: Meta, name: str, least: int = 0) -> int:
    """Read a field of a message that must be a whole number below 2**53.

    Raises:
        Refused: the field is missing, or has another value.
    """
    value = meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        raise Refused("bad-json", f"{name} is {sanitize_text(value)}")
    return value


def text_of(meta: Meta, name: str, longest: int = 1000) -> str:
    """Read an optional text field of a message; return "" if it is missing.

    Raises:
        Refused: the field is no text, is too long, or has unusual characters.
    """
    value = meta.get(name, "")
    if not isinstance(value, str) or len(value) > longest or not (value.isascii() and value.isprintable()):
        raise Refused("bad-json", f"{name} is no text of up to {longest} plain characters")
    return value


_WHOLE = {
    "id": 2**64,
    "client": 2**32,
    "incarnation": 2**32,
    "task": 2**53,
    "version": 2**53,
    "region": 2**53,
    "seed": 2**64,
}
_OPTIONAL = {"num_epochs": 2**53, "num_steps": 2**53, "next_seed": 2**64}
_LEAST = {"region": -1, "num_epochs": 1, "num_steps": 1}
_REAL = {
    "assigned_s": 1e30,
    "pace_s": 1e9,
    "lr_scale": 1e30,
    "next_lr_scale": 1e30,
}  # largest values that are accepted; no run lasts longer than 1e9 s


def check_assignment(assignment: Assignment) -> Assignment:
    """Check the types and bounds of an assignment's numbers, as a peer sent them, and return it.

    Raises:
        Refused: a number is of another type, or out of bounds, or ``extra`` is no mapping.
    """
    values = {one.name: getattr(assignment, one.name) for one in dataclass_fields(assignment)}
    for name, end in (_WHOLE | _OPTIONAL).items():
        value, least = values[name], _LEAST.get(name, 0)
        if (value is not None or name in _WHOLE) and not (type(value) is int and least <= value < end):
            raise Refused("bad-json", f"assignment: {name} is {sanitize_text(value, 40)}")
    for name, bound in _REAL.items():
        value = values[name]
        if type(value) not in (int, float) or not abs(value) < bound:
            raise Refused("bad-json", f"assignment: {name} is {sanitize_text(value, 40)}")
    if not isinstance(assignment.extra, dict):
        raise Refused("bad-json", "assignment: extra is no table")
    return assignment


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log message of a client, as sent to the server."""

    level: LogLevel  # from `LOG_LEVELS`
    text: str  # one line of at most `MAX_LOG_TEXT` characters, safe to print


def level_of(number: int) -> LogLevel:
    """Convert a level number of `logging` to the level's name."""
    return "error" if number >= logging.ERROR else "warning" if number >= logging.WARNING else "info"


def logs_to_meta(lines: Sequence[LogLine]) -> dict[str, Any]:
    """Convert log lines to a field of a message."""
    return {"logs": [[line.level, line.text] for line in lines]}


def log_lines_of(meta: Meta) -> tuple[LogLine, ...]:
    """Read the log lines in a message; their text is sanitised and shortened, and at most `MAX_LOG_LINES` are returned."""
    rows = meta.get("logs", [])
    lines = []
    for row in rows[:MAX_LOG_LINES] if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) == 2 and row[0] in LOG_LEVELS:
            lines.append(LogLine(row[0], sanitize_text(row[1], MAX_LOG_TEXT)))
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class SignedHead:
    """Hash of the server's journal (its log of all events), signed by the server when it assigns a task.

    A client can keep it as evidence against later changes of the journal.
    """

    head: str  # hash of the journal's last row and all rows before; see `raafl.runfolder.append_file`
    signature: str = ""  # signature of the hash and the task id; "" = unsigned
    key: str = ""  # public key by which the signature is checked; "" = unsigned

    @classmethod
    def sign(cls, head: str, assignment: int, signer: Signer | None) -> Self:
        """Sign the journal's hash, which is sent with a task.

        `signer`: holder of the server's key; None = do not sign.
        """
        return cls(head) if signer is None else cls(head, signer.sign(_signed(head, assignment)), signer.public)

    def is_signed(self, assignment: int) -> bool:
        """Check whether the signature is valid for the task with id ``assignment``."""
        return is_signed(_signed(self.head, assignment), self.signature, self.key)

    def to_meta(self) -> dict[str, Any]:
        """Convert the signed hash to fields of a message."""
        return dict(zip(HEAD_FIELDS, (self.head, self.signature, self.key), strict=True))

    @classmethod
    def from_meta(cls, meta: Meta) -> Self | None:
        """Read the signed hash from a message; None if it has none. Raise `Refused` if a field is not a short text."""
        if "head" not in meta:
            return None
        return cls(*(text_of(meta, name) for name in HEAD_FIELDS))


def _signed(head: str, assignment: int) -> str:
    return f"raafl head 1\n{assignment}\n{head}"


class ToldToStop(Exception):
    """Raised if a client asks for a config or wants to continue its session, and is told that the run has ended or it must stop.

    `reason`: reason given by the server.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Resume:
    """Message by which a session continues on a new connection: it says which messages its sender has received.

    The client sends this message first, and the server answers with one of its own.

    Attributes:
        position: number of messages that the sender has received, and of chunks of the message that broke off.
    """

    position: Position

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        return {"received": self.position.num_messages, "chunks": self.position.num_chunks}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; raise `Refused` if a field is not a whole number of at least 0."""
        return cls(Position(count_of(meta, "received"), count_of(meta, "chunks")))
