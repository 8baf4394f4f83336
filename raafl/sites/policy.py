"""Define what the owner of a client's data (a site) allows a server to do, read from a file (`raafl join --policy site.yaml`).

The file is the site's own and is read by the checks of a config: one line for each problem, with field, value and remedy.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from raafl.config.messages import ErrorCollector, Wrong, parser_of, place_in
from raafl.errors import BadInput, at_least, nearest, positive
from raafl.local.train import LocalTrainer
from raafl.log import warn_once
from raafl.parts.protect.privacy import check_accounting, epsilon, gaussian
from raafl.plain_yaml import read_yaml
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.flat import CHUNK, is_merged, reals

_log = logging.getLogger(__name__)
PINNED: Final = ("models", "data", "algorithms")
"""Fields with names of parts; `NAME@DIGEST` allows a part only with exactly the arguments of that digest."""

KINDS: Final = {"models": "model", "data": "data", "algorithms": "algorithm"}
_DIGEST: Final = re.compile(r"[0-9a-f]{16}")
_PARTNER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}(@[0-9A-F]{4}(:[0-9A-F]{4}){15})?")
MAX_SHARE: Final = 0.9
"""Largest share of one site in a sum of secure aggregation, unless its policy has another; see docs/secure-aggregation.md."""
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(kB|MB|GB|TB|B|)\s*", re.I)
_UNITS: Final = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


@dataclass(frozen=True, slots=True)
class SitePrivacy:
    """Clipping and noise that a site adds to each update before it is sent, with its own privacy budget."""

    clip_norm: float  # L2 norm (C) to which the tensors of an update are clipped
    # standard deviation of the noise added to each number, as a multiple (sigma) of clip_norm; 0 = only clipping
    noise_multiplier: float
    delta: float = 1e-5  # probability with which the privacy guarantee may fail
    # largest epsilon (privacy budget) for all runs that share `SitePolicy.state`; null = no limit
    max_epsilon: float | None = None

    def __post_init__(self) -> None:
        positive("policy.privacy.clip_norm", self.clip_norm)
        at_least("policy.privacy.noise_multiplier", self.noise_multiplier, 0)
        positive("policy.privacy.max_epsilon", self.max_epsilon, optional=True)
        for name in ("clip_norm", "noise_multiplier"):
            if not math.isfinite(getattr(self, name)):
                raise BadInput(f"policy.privacy.{name} is {getattr(self, name)}: give a finite number")
        if not 0 < self.delta < 1:
            raise BadInput(f"policy.privacy.delta is {self.delta}: give a number between 0 and 1, such as 1e-5")
        if self.max_epsilon is not None and self.noise_multiplier == 0:
            raise BadInput(
                f"policy.privacy.max_epsilon is {self.max_epsilon:g}, and policy.privacy.noise_multiplier is 0: "
                "give a noise_multiplier above 0, since epsilon is infinite without noise"
            )


@dataclass(frozen=True, slots=True)
class Consent:
    """Settings for asking a person at the site for consent.

    Attributes:
        how: ``ask`` = at the terminal; ``spool`` = by a request in a folder, which a reviewer answers.
        every: occasion to ask: ``run`` = before joining a run, ``task`` = before training, ``update`` = before sending
            an update.
        folder: folder for the requests if ``how`` is ``spool``, relative to the policy's file.
        wait_s: seconds to wait for an answer; no answer counts as a refusal.
    """

    how: Literal["ask", "spool"]
    every: Literal["run", "task", "update"] = "run"
    folder: str | None = None
    wait_s: float = 300.0

    def __post_init__(self) -> None:
        positive("policy.consent.wait_s", self.wait_s)
        if (self.folder is None) == (self.how == "spool"):
            raise BadInput(
                f"policy.consent.how is '{self.how}', and policy.consent.folder is {self.folder}: give a folder with "
                "spool, and none with ask"
            )


@dataclass(frozen=True, slots=True)
class SiteLogs:
    """Choice of those log lines of a client that are sent to the server."""

    level: Literal["error", "warning", "info"] = "warning"  # lowest level of the lines
    # names of the loggers, which include their child loggers; ``raafl`` = all of raafl
    loggers: list[str] = field(default_factory=lambda: ["raafl"])

    def __post_init__(self) -> None:
        if not self.loggers or not all(re.fullmatch(r"\w+(\.\w+)*", name) for name in self.loggers):
            raise BadInput(f"policy.logs.loggers is {self.loggers}: name loggers, such as [raafl, my_project.training]")


@dataclass(frozen=True, slots=True)
class SitePolicy:
    """Policy of a site: limits that the client checks before and after each task, whatever the server asks for."""

    # names of the models that may be trained, such as ``MLP``, or ``NAME@DIGEST``; null = any
    models: list[str] | None = None
    max_parameters: int | None = None  # largest number of parameters of the whole model; null = any number
    data: list[str] | None = None  # names of the data that a task may read, or ``NAME@DIGEST``; null = any
    algorithms: list[str] | None = None  # names of the methods that may be run, or ``NAME@DIGEST``; null = any
    # smallest number of different samples on which an update may be trained; a task with fewer is refused
    min_samples: int = 1
    # hours in which the site works, such as ``mon-fri 20:00-06:00``, in its local time; null = always
    hours: list[str] | None = None
    # largest number of bytes sent and received per day of local time, such as ``2GB``; null = any number
    bytes_per_day: int | str | None = None
    privacy: SitePrivacy | None = None  # clipping and noise that the site adds to updates; null = none
    # names of the metrics that a client sends to the server with an update; ``*`` stands for any text. null = all
    metrics: list[str] | None = None
    consent: Consent | None = None  # settings of asking a person for consent; null = nobody is asked
    # folder, relative to the policy's file, in which used bytes and privacy budget are stored, so that they survive a
    # restart; null = none
    state: str | None = None
    # largest share, above 0 up to 1, that one site may have in any part of a securely aggregated sum; groups in which a
    # site has more are refused. Only used with certificates
    max_share: float = MAX_SHARE
    # whether a part of a securely aggregated sum counts as hidden only by sites that received the same submodel, version
    # and values, since a server can give others a model from which they learn nothing. Only used with certificates
    same_values: bool = False
    # sites with which updates may be summed in secure aggregation, each ``NAME``, or ``NAME@FINGERPRINT`` of its
    # key as `raafl certs request` prints it; null = all sites that the authority certifies
    partners: list[str] | None = None
    tracebacks: bool = False  # whether the traceback of a task that fails is sent to the server
    logs: SiteLogs | None = None  # settings of which log lines are sent to the server; null = none are sent

    def __post_init__(self) -> None:
        for name in PINNED:
            _check_names(name, getattr(self, name))
        at_least("policy.max_parameters", self.max_parameters, 1, optional=True)
        at_least("policy.min_samples", self.min_samples, 1)
        if self.hours == []:
            raise BadInput("policy.hours is empty: give hours, such as ['mon-fri 20:00-06:00'], or null for always")
        if not 0 < self.max_share <= 1:
            raise BadInput(f"policy.max_share is {self.max_share}: give a number above 0, up to 1 (any share)")
        for partner in self.partners or []:
            if not _PARTNER.fullmatch(partner):
                raise BadInput(
                    f"policy.partners has '{partner}': give the NAME of a site, or NAME@FINGERPRINT with the 16 groups of digits "
                    "that `raafl certs request` prints"
                )
        self.windows()
        at_least("policy.bytes_per_day", self.max_bytes, 1, optional=True)

    def check(self) -> None:
        """Raise `BadInput` if fields contradict each other."""
        needs = "bytes_per_day" if self.max_bytes is not None else None if self.privacy is None else "privacy"
        if needs is not None and self.state is None:
            raise BadInput(
                f"policy.state is null, and policy.{needs} is given: name a folder of this site, such as "
                "site-state, which keeps the used budget over restarts"
            )
        if self.privacy is not None and self.metrics is None:
            raise BadInput(
                "policy.metrics is null, but policy.privacy adds no noise to metrics: name the metrics that may be "
                "sent without noise, or give [] for none"
            )
        if self.privacy is not None and self.privacy.noise_multiplier > 0:
            check_accounting("policy.privacy")

    def windows(self) -> list[Hours]:
        """Return the site's hours, parsed; an empty list = it always works."""
        return [Hours.parse(f"policy.hours[{i}]", text) for i, text in enumerate(self.hours or [])]

    @property
    def max_bytes(self) -> float | None:
        """Largest number of bytes per day; None = no limit."""
        if self.bytes_per_day is None:
            return None
        match = _SIZE.fullmatch(str(self.bytes_per_day))
        number = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
        if not number > 0:
            raise BadInput(f"policy.bytes_per_day is {self.bytes_per_day}: give bytes above 0, such as 500MB or 2GB")
        return number


def _check_names(field: str, entries: Sequence[str] | None) -> None:
    """Raise `BadInput` for an entry of a policy's list whose name is unknown or whose digest is malformed."""
    for entry in entries or []:
        name, at, digest = entry.partition("@")
        if at and not _DIGEST.fullmatch(digest):
            raise BadInput(
                f"policy.{field} has '{entry}': give NAME, or NAME@DIGEST with the 16 digits that `raafl join --dry-run` shows"
            )
        if "." not in name and name not in _own_names(field):
            raise BadInput(
                f"policy.{field} has '{name}': {nearest(name, _own_names(field))}; for your own class give its "
                "import path"
            )


def _own_names(field: str) -> set[str]:
    """List raafl's own classes and functions that may stand in a policy's list ``field``, such as models."""
    from raafl.config.trust import registry

    return {entry.name for entry in registry()[KINDS[field]].values()}


def same_part(field: str, allowed: str, path: str) -> bool:
    """Check whether a name in the policy and an import path in a config mean the same class or function.

    A name without dots means one of raafl's own, never a class with that name in another module.
    """
    from raafl.config.trust import registry

    table = registry()[KINDS[field]]
    asked = table.get(path)
    if "." not in allowed:
        return asked is not None and asked.name == allowed
    return path == allowed or (asked is not None and table.get(allowed) == asked)


def load_policy(file: str) -> SitePolicy:
    """Read the policy of a site from a YAML file; its folders are relative to that file.

    Raises:
        BadInput: the file is missing or not a mapping, or fields are unknown or have wrong values (a line for each).
    """
    path = Path(file)
    try:
        tree = read_yaml(path, f"policy {file}")
    except OSError as error:
        raise BadInput(f"policy is '{file}', which cannot be read ({error.strerror}): name a YAML file") from None
    if not isinstance(tree, dict):
        raise BadInput(f"policy {file} holds {tree!r:.40}: write fields, with lines such as `models: [MLP]`")
    policy = make_record(tree, SitePolicy, "policy", file)
    policy.check()
    state, consent = policy.state, policy.consent
    if consent is not None and consent.folder is not None:
        consent = replace(consent, folder=_placed(path, "consent.folder", consent.folder, ""))
    return replace(policy, state=None if state is None else _placed(path, "state", state, FILE), consent=consent)


def _placed(policy: Path, field: str, name: str, content: str) -> str:
    """Return the path of a folder that a policy names: beside the policy, wherever the process was started.

    Earlier versions had it in the folder in which the process was started; one that is there is used, so that no budget is
    forgotten. `content`: file by which it is known; "" = none.

    Raises:
        BadInput: there are two such folders.
    """
    beside, before = policy.absolute().parent / name, Path(name).absolute()
    has_moved, was_here = (beside / content).exists(), (before / content).exists()
    if not was_here or (has_moved and (not content or beside.samefile(before))):
        return str(beside)
    if has_moved:
        raise BadInput(
            f"policy.{field} is '{name}', but there are two, '{beside}' and '{before}': remove one, or give its whole path"
        )
    warn_once(_log, f"policy.{field} is '{before}', but its place is beside the policy: move it to '{beside}'")
    return str(before)


DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TEXT = re.compile(r"([a-z]{3}(?:[-,][a-z]{3})*)\s+(\d\d):(\d\d)-(\d\d):(\d\d)")
_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Hours:
    """A window of time on certain days of the week, in the local time of the machine."""

    days: frozenset[int]  # days on which the window begins, Monday = 0
    start: int  # minute of the day at which the window begins, from 0
    minutes: int  # length of the window in minutes, 1 to 1440; it may end on the next day

    @classmethod
    def parse(cls, field: str, text: str) -> Hours:
        """Parse ``DAYS HH:MM-HH:MM``, where days are three letters each, listed (``sat,sun``) or as a range (``mon-fri``).

        Raises:
            BadInput: the text is not of that form.
        """
        match = _TEXT.fullmatch(text.strip().lower())
        days = None if match is None else _days(match[1])
        if match is None or days is None:
            raise BadInput(
                f"{field} is '{text}': give days and hours, such as 'mon-fri 20:00-06:00' or 'sat,sun 00:00-24:00'"
            )
        start, end = int(match[2]) * 60 + int(match[3]), int(match[4]) * 60 + int(match[5])
        if start >= _MINUTES or end > _MINUTES or match[3] >= "60" or match[5] >= "60":
            raise BadInput(f"{field} is '{text}': give hours from 00:00 to 24:00")
        return cls(days, start, end - start if end > start else end - start + _MINUTES)

    def holds(self, at: datetime) -> bool:
        """Check whether a local time is within these hours."""
        return any(begin <= at < begin + timedelta(minutes=self.minutes) for begin in self._around(at))

    def next_start(self, at: datetime) -> datetime:
        """Return the next time after ``at`` at which these hours begin, in local time."""
        return min(begin for begin in self._around(at) if begin > at)

    def _around(self, at: datetime) -> list[datetime]:
        """List the times at which the window starts, from the day before ``at`` to a week after it."""
        midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
        days = (midnight + timedelta(days=number) for number in range(-1, 8))
        return [day + timedelta(minutes=self.start) for day in days if day.weekday() in self.days]


def opens_at(hours: Sequence[Hours], at: datetime) -> datetime | None:
    """Return the next time at which any of these hours begin; None if ``at`` is within some of them, or there are none."""
    if not hours or any(window.holds(at) for window in hours):
        return None
    return min(window.next_start(at) for window in hours)


def _days(text: str) -> frozenset[int] | None:
    """Parse weekdays such as ``mon-fri`` or ``sat,sun`` to numbers (Monday = 0); None if ``text`` is invalid."""
    days: set[int] = set()
    for part in text.split(","):
        names = part.split("-")
        if len(names) > 2 or not set(names) <= set(DAYS):
            return None
        first, last = DAYS.index(names[0]), DAYS.index(names[-1])
        days |= {number % 7 for number in range(first, last + 1 if last >= first else last + 8)}
    return frozenset(days)


Record = TypeVar("Record")


def make_record(tree: Mapping[str, Any], kind: type[Record], name: str, file: str) -> Record:
    """Build a dataclass of options from the content of a file.

    Raises:
        BadInput: a field is unknown or has a wrong value; the message has a line for each.
    """
    assert is_dataclass(kind)
    parser = parser_of(kind)
    checked, problems = ErrorCollector(parser), []
    for key, value in tree.items():
        try:
            checked.arguments({key: value}, kind, name, kind.__name__)
        except Wrong as wrong:
            problems.append(f"{wrong}{place_in(file, wrong.field.removeprefix(f'{name}.'), str(key))}")
    problems += _missing(tree, kind, name, file)
    if problems:
        raise BadInput("\n".join(problems))
    made: Record = parser.instantiate(parser.parse_object({"of": dict(tree)})).of
    return made


def _missing(tree: Mapping[str, Any], kind: Any, name: str, file: str) -> Iterator[str]:
    """Yield a message for each field without a default that a section of the file lacks."""
    for section, hint in get_type_hints(kind).items():
        given, nested = tree.get(section), next(filter(is_dataclass, get_args(hint)), None)
        if nested is None or not isinstance(given, dict):
            continue
        required = [one.name for one in fields(nested) if one.default is MISSING and one.default_factory is MISSING]
        # jsonargparse would report it with the classes that it tried
        for lacking in (one for one in required if one not in given):
            yield f"{name}.{section}.{lacking} is missing: give it, or leave {section} out{place_in(file, section)}"


# Store how many bytes and how much of its privacy budget a site has used, in a folder that later processes read.
#
# `books.json` is replaced as a whole under a lock, so that several clients of one site share one budget, and a crash leaves
# the old or the new one. Whoever deletes it resets the budget: that is the site's own decision.

FILE, LEDGER = "books.json", "ledger.jsonl"
_LOCK = "lock"


@dataclass(slots=True)
class Used:
    """Number of bytes that a site has sent and received, and the part of its privacy budget that it has used."""

    day: str = ""  # day, in local time, to which ``bytes`` belongs; empty = none yet
    bytes: int = 0  # number of bytes sent and received on that day
    releases: int = 0  # number of updates that were sent after clipping or noise
    # sum over these updates of 1 / sigma^2, sigma being the noise level; infinite if one had no noise
    inverse_squares: float = 0.0

    def bytes_on(self, day: date) -> int:
        """Return the number of bytes sent and received on ``day``; 0 if the stored number is of another day."""
        return self.bytes if self.day == day.isoformat() else 0


class BudgetSpent(Exception):
    """Raised if sending another update would exceed the privacy budget; the message says by how much."""


def _after_update(used: Used, privacy: SitePrivacy) -> float:
    """Return the sum `Used.inverse_squares` after one more update: 1 / sigma^2 more, or infinite without noise."""
    return used.inverse_squares + (privacy.noise_multiplier**-2 if privacy.noise_multiplier else math.inf)


class SiteBooks:
    """Stored account of the bytes and the privacy budget that one site has used.

    Each call reads the files anew, since another client of the site may have changed them.
    """

    def __init__(self, folder: str) -> None:
        """Open the record of a site's used bytes and budget in ``folder``; create the folder, for its owner alone, if missing.

        Raises BadInput if the folder cannot be written or the record cannot be read.
        """
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._changing(lasting=True):
                pass
        except OSError as error:
            raise BadInput(
                f"policy.state is '{folder}', in which no file can be written ({error.strerror}): name another folder"
            ) from None

    def used(self) -> Used:
        """Read the bytes and the privacy budget that the site has used; raise `BadInput` if the file cannot be read."""
        file = self._folder / FILE
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            used = Used(**found)
            if not all(type(getattr(used, one.name)) is type(one.default) for one in fields(Used)):
                raise ValueError("a value has a wrong type")
            return used
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(
                f"policy.state is '{self._folder}', whose {FILE} cannot be read ({error}): restore it from a copy; "
                "without it the used budget is unknown"
            ) from None

    def add_bytes(self, num: int, day: date) -> None:
        """Add ``num`` to the number of bytes sent and received on ``day``; the number of an earlier day is discarded."""
        with self._changing() as used:
            used.bytes = used.bytes_on(day) + num
            used.day = day.isoformat()

    def release(self, privacy: SitePrivacy, about: Mapping[str, Any]) -> float | None:
        """Charge an update to the privacy budget before it is sent; return the epsilon used so far, None = infinite.

        Raises:
            BudgetSpent: the update would exceed ``max_epsilon``; nothing was charged.
        """
        with self._changing(lasting=True) as used:
            used.inverse_squares, used.releases = _after_update(used, privacy), used.releases + 1
            epsilon = spent(used.inverse_squares, privacy.delta)
            if privacy.max_epsilon is not None and (epsilon is None or epsilon > privacy.max_epsilon):
                raise BudgetSpent(
                    f"another update would raise epsilon to {math.inf if epsilon is None else epsilon:.3g}, but "
                    f"policy.privacy.max_epsilon is {privacy.max_epsilon:g}"
                )
            row = {
                "time": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
                **about,
                "clip_norm": privacy.clip_norm,
                "noise_multiplier": privacy.noise_multiplier,
                "delta": privacy.delta,
                "epsilon": epsilon,
            }
            with (self._folder / LEDGER).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return epsilon

    def check_budget(self, privacy: SitePrivacy) -> None:
        """Raise `BudgetSpent` if one more update would exceed the site's privacy budget."""
        epsilon = spent(_after_update(self.used(), privacy), privacy.delta)
        if privacy.max_epsilon is not None and (epsilon is None or epsilon > privacy.max_epsilon):
            raise BudgetSpent(f"the privacy budget is used up: policy.privacy.max_epsilon is {privacy.max_epsilon:g}")

    @contextmanager
    def _changing(self, *, lasting: bool = False) -> Iterator[Used]:
        """Lock and read the record, let the ``with`` block change it, then write it; ``lasting``: flush it to disk."""
        with (self._folder / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            used = self.used()
            yield used
            new = self._folder / f"{FILE}.new"
            with new.open("w", encoding="utf-8") as file:
                json.dump(asdict(used), file)
                if lasting:
                    file.flush()
                    os.fsync(file.fileno())
            new.replace(self._folder / FILE)


NEIGHBOURS = "this site's data replaced by any other data"
"""Adjacency of the site's epsilon, in words."""


def spent(inverse_squares: float, delta: float) -> float | None:
    """Return the epsilon (privacy budget) that the updates sent by this site have used.

    Returns:
        The epsilon; None = infinite.
    """
    if inverse_squares == 0:
        return 0.0
    return None if math.isinf(inverse_squares) else epsilon(0.5 / math.sqrt(inverse_squares), 1, delta)


def problem(trainer: LocalTrainer) -> str | None:
    """Return the reason why noise cannot make this trainer's updates private, such as activations that it sends.

    None if noise on the update's tensors is enough.
    """
    local, submodels = trainer.local, trainer.submodels
    if local.exchange(submodels) is not None:
        return "its method sends activations during a task"
    if local.traits.up_as is not None:
        return f"its method sends {local.traits.up_as} in the place of values"
    if trainer.payload.is_resident:
        return "its method goes on from what the last task has left on the client, which noise would spoil"
    if local.masked:
        return "its method sends which classes the client has"
    entries = submodels.layout(part="trained").entries
    if statistics := [entry.name for entry in entries if entry.name not in submodels.parameter_names]:
        return f"its model sends running statistics ({statistics[0]}), which noise would spoil"
    if numbers := [entry.name for entry in trainer.payload.layout(way="trained").entries if not is_merged(entry.dtype)]:
        return f"its method sends whole numbers ({numbers[0]})"
    return None


def privatise(
    privacy: SitePrivacy, trainer: LocalTrainer, spec: Spec, trained: FlatTensors, received: FlatTensors
) -> None:
    """Clip a trained update and add Gaussian noise, in place: ``d min(1, C / ||d||) + N(0, (sigma C)^2)``.

    d is the difference of all trained tensors from the received values, with one norm over all of them. If the client
    sends parameter values and not differences, the received values are added to the result.

    Raises:
        ValueError: the update contains NaN or infinity.
    """
    before = trainer.payload.split(received, spec, "sent")[0]
    values, bundles = trainer.payload.split(trained, spec, "trained")
    adds_back = trainer.sends == "values"
    pairs = [(reals(buffer), reals(before.buffers[dtype])[: len(buffer)]) for dtype, buffer in values.buffers.items()]
    changes = [reals(buffer) for bundle in bundles.values() for buffer in bundle.buffers.values()]
    if adds_back:
        for buffer, old in pairs:
            buffer.sub_(old.to(buffer.device))
    changes += [buffer for buffer, _ in pairs]
    norm = math.sqrt(math.fsum(square for buffer in changes for square in _squares(buffer)))
    if not math.isfinite(norm):
        raise ValueError("the update contains NaN or infinity")
    key = secrets.token_bytes(32)
    for number, buffer in enumerate(changes):
        if norm > privacy.clip_norm:
            buffer.mul_(privacy.clip_norm / norm)
        if privacy.noise_multiplier > 0:
            flat = buffer.flatten()  # view, not copy: the storage is contiguous
            noise = gaussian(key + number.to_bytes(4, "little"), len(flat))
            for piece, drawn in zip(torch.split(flat, CHUNK), noise, strict=True):
                piece.add_((drawn * (privacy.noise_multiplier * privacy.clip_norm)).to(piece))
    if adds_back:
        for buffer, old in pairs:
            buffer.add_(old.to(buffer.device))


def _squares(buffer: Tensor) -> Iterator[float]:
    for piece in torch.split(buffer.flatten(), CHUNK):
        yield piece.double().square().sum().item()
