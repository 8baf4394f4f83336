"""Check each task against the policy of a client's site, before training and before the update is sent.

The server is told that a task is refused, `POLICY`, and nothing else; the site's own log says which field forbids it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import yaml

from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData
from raafl.errors import BadInput, TaskFailed
from raafl.local.train import LocalTrainer
from raafl.runtime.client.worker import Client, ClientExtension, Gate, TaskRefused, TrainedTask
from raafl.runtime.protocol import MAX_LOG_LINES, MAX_LOG_TEXT, Answer, Failed, LogLine, level_of
from raafl.sanitize import sanitize_text
from raafl.sites.policy import (
    KINDS,
    BudgetSpent,
    Consent,
    SiteBooks,
    SiteLogs,
    SitePolicy,
    opens_at,
    privatise,
    problem,
    same_part,
)
from raafl.submodel import FlatTensors, Submodels
from raafl.transport import Connection, Kind, Message
from raafl.transport.codec import Expect
from raafl.units import quantity, size

_log = logging.getLogger(__name__)

Then = Literal["go on", "wait", "end"]
"""What a client does after a refusal: take the next task; leave until the site is open again; leave for good."""

_LONGEST_S = 60.0  # longest sleep in seconds, since somebody may set the clock meanwhile


def _say(text: str) -> None:
    """Log a line on the client's machine only; `SitePolicy.logs` never sends it to the server."""
    _log.info(text, extra={"private": True})


class PolicyRefusal(TaskRefused):
    """Raised for a run or task that the policy of the site does not allow; the message is shown only at the site."""

    def __init__(self, text: str, then: Then = "end") -> None:
        super().__init__(f"the site's policy refuses {text}", then)


class SiteClient(ClientExtension):
    """A client whose tasks and updates the policy of its site checks."""

    def __init__(self, client: Client, gate: SiteGate) -> None:
        super().__init__(client)
        self._gate, gate.stopped = gate, client.stop.is_set
        # no task may start before it was checked, and bytes sent beside a task would bypass the site's byte limit
        self.forbids = frozenset({"begin early", "send beside"} if gate.counts_bytes else {"begin early"})

    def before(self, assignment: Assignment) -> None:
        """Refuse a task that the policy does not allow."""
        self._gate.before(assignment)

    def after(self, work: TrainedTask) -> None:
        """Refuse an update that the policy forbids to send; else add the policy's noise to it."""
        work.update = self._gate.after(work.assignment, work.update, work.received)

    def answer(self, answer: Answer) -> Answer:
        """Leave out metrics that may not leave the site, and add its log lines."""
        logs = self._gate.log_lines() if self.client.may("send logs") else ()
        return replace(answer, metrics=self._gate.metrics(answer.metrics), logs=logs)

    def failure(self, error: TaskFailed, told: Failed) -> Failed:
        """Remove the traceback from a failure unless the policy allows to send it, and add the log lines that it allows."""
        told = Failed.of(error, private=not self._gate.policy.tracebacks)
        return replace(told, logs=self._gate.log_lines())


class SiteGate(Gate):
    """Gate that applies the policy of a client's site."""

    stopped: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the task at hand is no longer wanted; set by the client."""

    def __init__(
        self,
        policy: SitePolicy,
        say: Callable[[str], None] = _say,
        now: Callable[[], datetime] = datetime.now,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open the site's record of used bytes and privacy budget, if the policy has limits; raise BadInput if that fails."""
        self.policy, self._say, self._now, self._sleep = policy, say, now, sleep
        self._logs = None if policy.logs is None else LogBuffer(policy.logs)
        self._hours, self.counts_bytes = policy.windows(), policy.max_bytes is not None
        self._books = None if policy.state is None else SiteBooks(policy.state)
        self._day_is_over: datetime | None = None
        self._consents = Consents(policy.consent, lambda: self.stopped())
        self._asks: dict[str, Any] = {}
        self._models: list[str] = []

    def extensions(self) -> Iterable[Callable[[Client], ClientExtension]]:
        """Have each task checked."""
        return (partial(SiteClient, gate=self),)

    # ---- checks before a client joins ----

    def check_config(self, config_yaml: str, digests: Mapping[str, str]) -> None:
        """Check the model, data and method that a run's config names, before any of them is built.

        Raises:
            PolicyRefusal: the site does not allow this model, these data or this method.
        """
        config = yaml.safe_load(config_yaml) or {}
        self._asks = {kind: config.get(kind) for kind in KINDS.values()}
        for field, kind in KINDS.items():
            allowed = getattr(self.policy, field)
            if allowed is None:
                continue
            section = config.get(kind)
            path = str(section.get("class_path") if isinstance(section, dict) else section)
            mine = [entry for entry in allowed if same_part(field, entry.partition("@")[0], path)]
            if not mine:
                raise PolicyRefusal(f"this run: its {kind} is {path}, but policy.{field} allows only {allowed}")
            if kind == "model":
                self._models = mine  # the digest covers the tensors' shapes, so it is checked once the model is built
            else:
                self._check_digest(field, mine, digests[kind])

    def _check_digest(self, field: str, entries: list[str], digest: str) -> None:
        if not any(entry.partition("@")[2] in ("", digest) for entry in entries):
            raise PolicyRefusal(
                f"this run: its {KINDS[field]} has digest {digest}, but policy.{field} allows only {entries}"
            )

    def check_size(self, num_parameters: int) -> None:
        """Raise `PolicyRefusal` if a model has more parameters, frozen ones included, than the site allows."""
        most = self.policy.max_parameters
        if most is not None and num_parameters > most:
            raise PolicyRefusal(
                f"this run: its model has {num_parameters:,} parameters, but policy.max_parameters is {most:,}"
            )

    def check_parts(
        self, submodels: Submodels, trainer: LocalTrainer, data: ClientData, digests: Mapping[str, str]
    ) -> None:
        """Check by the site's policy whether this client may train the run's model on its data.

        From now on this gate (the check of all that a client does) serves that run only.

        Raises:
            PolicyRefusal: the policy does not allow this model, the client has fewer samples than the policy requires,
                this method's updates cannot be made private, the privacy budget is used up, or nobody has consented.
        """
        self._trainer, self._data = trainer, data
        self._asks["model_digest"] = digest = model_digest(submodels, digests)
        if self.policy.models is not None:
            self._check_digest("models", self._models, digest)
        if data.num_samples < self.policy.min_samples:
            raise PolicyRefusal(
                f"this run: the client has {quantity(data.num_samples, 'sample')}, but policy.min_samples is "
                f"{self.policy.min_samples}"
            )
        if self.policy.privacy is not None and (why := problem(trainer)) is not None:
            raise PolicyRefusal(f"this run: {why}, so policy.privacy cannot make its updates private")
        consent = self.policy.consent
        if consent is not None and consent.every == "update" and trainer.local.exchange(submodels) is not None:
            raise PolicyRefusal(
                "this run: its method sends activations during a task, before anybody is asked (policy.consent.every is update)"
            )
        self._check_budget()
        if not self._consents.given("run", self._asks):
            raise PolicyRefusal("this run: nobody has consented to it (policy.consent)")

    # ---- waits between connections ----

    def wait(self) -> bool:
        """Wait until the site allows work at this hour, and its daily limit on bytes is not used up; see `Gate.wait`."""
        waited = False
        while (closed := self._closed()) is not None:
            until, why = closed
            if not waited:
                self._say(f"{why}: waiting until {until:%a %d %b %H:%M}")
            waited = True
            self._sleep(min(max((until - self._now()).total_seconds(), 1.0), _LONGEST_S))
        return waited

    def connection(self, pair: Connection) -> Connection:
        """Count the bytes of the connection if the policy limits them; see `Gate.connection`."""
        if self.policy.max_bytes is None:
            return pair
        return MeteredConnection(pair, self._moved, self._check_bytes)

    def _check_bytes(self, num: int, what: str = "it") -> None:
        """Refuse a task if ``num`` more bytes exceed the site's limit for today, which ``what`` has."""
        most, used = self.policy.max_bytes, self._bytes_today()
        if most is not None and used + num > most:
            self._day_is_over = _midnight_after(self._now())
            raise PolicyRefusal(
                f"a task: {what} has {size(num)}, and today {size(used)} were transferred, but policy.bytes_per_day is "
                f"{size(most)}",
                "wait",
            )

    def _moved(self, num: int) -> None:
        if num and self._books is not None:
            with self._writing():
                self._books.add_bytes(num, self._now().date())

    def _closed(self) -> tuple[datetime, str] | None:
        """Return when the site opens again and why it is closed now; None if it is open."""
        now = self._now()
        opens = opens_at(self._hours, now)
        if opens is not None:
            return opens, "policy.hours allows no task now"
        if self._day_is_over is not None and now < self._day_is_over:
            return self._day_is_over, "the day's bytes (policy.bytes_per_day) are used up"
        most = self.policy.max_bytes
        if most is not None and self._bytes_today() >= most:
            return _midnight_after(now), "the day's bytes (policy.bytes_per_day) are used up"
        return None

    def _bytes_today(self) -> int:
        return 0 if self._books is None else self._books.used().bytes_on(self._now().date())

    # ---- checks of a task ----

    def before(self, assignment: Assignment) -> None:
        """Refuse a task outside the site's hours, beyond its byte limit, or with too few samples."""
        self._check_hours()
        if self.counts_bytes:
            answer = self._trainer.payload.layout(assignment.spec, "trained")
            self._check_bytes(answer.num_bytes, "its answer")
        epochs, steps = self._trainer.training.length(assignment)
        per_epoch = self._data.num_batches(self._trainer.training.batch_size)
        self._check_samples(per_epoch * (epochs or 1) if steps is None else steps)
        self._check_budget()
        self._ask("task", {**_in_words(assignment), "epochs": epochs, "batches": steps})

    def after(self, assignment: Assignment, update: Update, received: FlatTensors) -> Update:
        """Refuse an update outside the site's hours, or one trained on too few samples; return it with the policy's noise."""
        self._check_hours()
        self._check_samples(update.num_steps * self._trainer.options.accumulate_grad_batches)
        leaves = {"samples": update.num_samples, "metrics": self.metrics(update.metrics)}
        self._ask("update", {**_in_words(assignment), **leaves})
        self._add_noise(assignment, update, received)
        return update

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that `SitePolicy.metrics` allows."""
        allowed = self.policy.metrics
        if allowed is None:
            return dict(metrics)
        return {name: value for name, value in metrics.items() if any(fnmatchcase(name, one) for one in allowed)}

    def logs_kept(self) -> AbstractContextManager[None]:
        """Return a context that collects log lines for the server, of the loggers that `SitePolicy.logs` names."""
        return nullcontext() if self._logs is None else self._logs.listening()

    def log_lines(self) -> tuple[LogLine, ...]:
        """Return the collected log lines of the loggers in `SitePolicy.logs`, and empty the collection."""
        return () if self._logs is None else self._logs.take()

    def _add_noise(self, assignment: Assignment, update: Update, received: FlatTensors) -> None:
        """Clip the update and add noise to it, in place, after recording the release in the site's privacy budget."""
        privacy = self.policy.privacy
        if privacy is None or self._books is None:
            return
        if update.extra:
            raise PolicyRefusal(
                f"this run: its method sends {', '.join(update.extra)} beside the tensors, and policy.privacy can add noise "
                "to tensors only"
            )
        if update.refusal is not None:
            raise PolicyRefusal("a task: its update contains NaN or infinity", "go on")
        try:
            with self._writing():
                self._books.release(privacy, _in_words(assignment))
        except BudgetSpent as spent:
            raise PolicyRefusal(f"a task: {spent}") from None
        privatise(privacy, self._trainer, assignment.spec, update.tensors, received)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Return a context for writing the site's record of bytes and budget; if that fails, the client leaves the run for good."""
        try:
            yield
        except OSError as error:
            raise PolicyRefusal(
                f"this run: policy.state is '{self.policy.state}', in which no file can be written ({error.strerror}): "
                "make room, or name another folder, and start the client again"
            ) from None

    def _check_budget(self) -> None:
        if self.policy.privacy is None or self._books is None:
            return
        try:
            self._books.check_budget(self.policy.privacy)
        except BudgetSpent as spent:
            raise PolicyRefusal(f"this run: {spent}") from None

    def _ask(self, every: Literal["task", "update"], request: Mapping[str, Any]) -> None:
        if not self._consents.given(every, {**self._asks, **request}):
            raise PolicyRefusal(f"a task: nobody has consented to its {every} (policy.consent)", "go on")

    def _check_hours(self) -> None:
        if (closed := opens_at(self._hours, self._now())) is not None:
            raise PolicyRefusal(f"a task: policy.hours allows no task until {closed:%a %H:%M}", "wait")

    def _check_samples(self, num_batches: int) -> None:
        """Refuse a task that trains on fewer samples than the policy requires.

        A client trains on batches times batch size samples, at most on all that it has.
        """
        batch_size = self._trainer.training.batch_size or self._data.batch_size or 1
        num = min(num_batches * batch_size, self._data.num_samples)
        if num < self.policy.min_samples:
            raise PolicyRefusal(
                f"a task: it trains on {quantity(num, 'sample')}, but policy.min_samples is {self.policy.min_samples}",
                "go on",
            )


def model_digest(submodels: Submodels, digests: Mapping[str, str]) -> str:
    """Return 16 hex digits that identify a model: they change with its class, arguments, tensor shapes or frozen parameters."""
    base = "" if submodels.base is None else submodels.base.digest
    text = "\n".join((digests["model"], submodels.layout().fingerprint, base))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _in_words(assignment: Assignment) -> dict[str, Any]:
    """Describe a task by its client, id and submodel, for the person who is asked for consent."""
    return {"client": assignment.client, "assignment": assignment.id, "submodel": str(assignment.spec)}


def _midnight_after(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)


def policy_of(gate: Gate) -> SitePolicy:
    """Return the policy of a client's site; a site without one has that of the defaults."""
    return gate.policy if isinstance(gate, SiteGate) else SitePolicy()


class LogBuffer(logging.Handler):
    """Logging handler that collects the last lines of the loggers that a policy names.

    Records whose attribute `private` is true are not collected: they explain refusals, which only the site may see.
    """

    def __init__(self, allowed: SiteLogs) -> None:
        """Create a handler that collects the log lines that ``allowed`` permits; `listening` attaches it to the loggers."""
        super().__init__(logging.getLevelNamesMapping()[allowed.level.upper()])
        self._names = allowed.loggers
        self._lines: deque[LogLine] = deque(maxlen=MAX_LOG_LINES - 1)
        self._num_left_out, self._changing = 0, threading.Lock()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Return a context in which log lines are collected."""
        loggers = [logging.getLogger(name) for name in self._names]
        for logger in loggers:
            logger.addHandler(self)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a log line; print it if no other handler would, as `logging` does by default."""
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and self._is_alone(record.name):
            last.handle(record)
        if getattr(record, "private", False):
            return
        line = LogLine(level_of(record.levelno), sanitize_text(record.getMessage(), MAX_LOG_TEXT))
        with self._changing:
            self._num_left_out += len(self._lines) == self._lines.maxlen
            self._lines.append(line)

    def take(self) -> tuple[LogLine, ...]:
        """Return the lines collected since the last call; a first line tells if some were dropped."""
        with self._changing:
            left_out, self._num_left_out = self._num_left_out, 0
            lines = tuple(self._lines)
            self._lines.clear()
        return (LogLine("warning", f"{left_out} earlier lines are left out"), *lines) if left_out else lines

    def _is_alone(self, name: str) -> bool:
        """Check that no other handler receives a logger's records."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


class MeteredConnection(Connection):
    """Connection that reports the number of bytes of each message sent or received."""

    def __init__(
        self, inner: Connection, moved: Callable[[int], None], check: Callable[[int], None] = lambda num: None
    ) -> None:
        self._inner, self._moved, self._check = inner, moved, check

    @property
    def received_bytes(self) -> int:  # type: ignore[override]
        """Size in bytes of the last received message."""
        return self._inner.received_bytes

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the connection has ended."""
        return self._inner.closed

    def send(self, message: Message, timeout_s: float | None = None) -> int:
        """Send a message; see `Connection.send`."""
        # count the tensors before they are sent: what arrives meanwhile is checked against the same byte limit
        announced = 0 if message.tensors is None else message.tensors.num_bytes
        self._moved(announced)
        sent = self._inner.send(message, timeout_s)
        self._moved(sent - announced)
        return sent

    def recv(self, expect: Expect, timeout_s: float, *, finite: bool = False) -> Message:
        """Receive a message; see `Connection.recv`."""

        def expect_within(kind: Kind, assignment: int, meta: dict[str, Any]) -> FlatTensors | None:
            target = expect(kind, assignment, meta)
            if target is not None:
                self._check(target.layout.num_bytes)
            return target

        try:
            return self._inner.recv(expect_within, timeout_s, finite=finite)
        finally:
            self._moved(self._inner.received_bytes)

    def settle(self, stopped: Callable[[], bool]) -> None:
        """Wait until the caller may change the tensors of the last message; see `Connection.settle`."""
        self._inner.settle(stopped)

    def check(self) -> None:
        """Raise `PeerLost` if the peer is gone; see `Connection.check`."""
        self._inner.check()

    def close(self) -> None:
        """End the connection; see `Connection.close`."""
        self._inner.close()


# Ask a person at the site for consent: at the terminal, or by a file that a reviewer answers.
#
# In the folder a request is ``ID.json``. The reviewer answers by a file beside it, ``ID.yes`` or ``ID.no``; both are then
# removed by the client, and what was asked and answered goes to ``answers.jsonl``. No answer in time is a no, and so is a
# folder that cannot be used: without a line in ``answers.jsonl`` there is no consent.

_LOOK_S = 0.2


class Consents:
    """Asks people at the site for the consent that its policy requires."""

    def __init__(self, consent: Consent | None, ended: Callable[[], bool] = lambda: False) -> None:
        """Create the folder for requests for consent if it is missing; raise BadInput if that fails.

        `consent`: the policy's settings; None = nobody is asked. `ended`: called while waiting; True ends the wait.
        """
        self._consent, self.ended = consent, ended
        self._is_failing = False
        if consent is not None and consent.folder is not None:
            try:
                Path(consent.folder).mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise BadInput(
                    f"policy.consent.folder is '{consent.folder}', which cannot be created ({error.strerror}): name "
                    "another folder"
                ) from None

    def given(self, every: Literal["run", "task", "update"], request: Mapping[str, Any]) -> bool:
        """Ask a person for consent and return the answer; return True at once if the policy does not require it here."""
        consent = self._consent
        if consent is None or consent.every != every:
            return True
        shown = {"asks": f"consent to this {every}", **request}
        if consent.folder is None:
            return self._at_terminal(shown, consent.wait_s)
        try:
            is_given = self._by_spool(Path(consent.folder), shown, consent.wait_s)
        except OSError as error:  # the disk is full, or the folder was deleted
            self._warn(consent.folder, error)
            return False
        self._is_failing = False
        return is_given

    def _warn(self, folder: str, error: OSError) -> None:
        """Warn that requests cannot be written, so that nobody can consent; once until a request succeeds."""
        if not self._is_failing:
            _log.warning(
                f"policy.consent.folder is '{folder}', in which no file can be written ({error.strerror}): make room, "
                "or create the folder again; until then nobody consents",
                extra={"private": True},
            )
        self._is_failing = True

    def _at_terminal(self, request: Mapping[str, Any], wait_s: float) -> bool:
        """Ask for consent at the terminal; return True only if somebody types yes within ``wait_s`` seconds."""
        lines = "\n".join(f"  {name}: {value}" for name, value in request.items())
        sys.stderr.write(f"{lines}\nConsent? [y/N] ")
        sys.stderr.flush()
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not self.ended():
            if select.select([sys.stdin], [], [], _LOOK_S)[0]:
                return sys.stdin.readline().strip().lower() in ("y", "yes")
        sys.stderr.write("no answer\n")
        return False

    def _by_spool(self, folder: Path, request: Mapping[str, Any], wait_s: float) -> bool:
        """Write the request to a file and wait for the reviewer's answer file; return True only for a yes within ``wait_s``."""
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{uuid4().hex[:8]}"
        new, file = folder / f"{name}.new", folder / f"{name}.json"
        yes, no = folder / f"{name}.yes", folder / f"{name}.no"
        try:
            new.write_text(json.dumps(request, indent=2, default=str) + "\n", encoding="utf-8")
            new.rename(file)  # rename the finished file, so that a reviewer never reads half of one
            _log.info(
                f"waiting up to {wait_s:g} s for {request['asks']}: answer '{file}' by a file {yes.name} or {no.name} beside it",
                extra={"private": True},
            )
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline and not self.ended() and not (yes.exists() or no.exists()):
                time.sleep(_LOOK_S)
            answer = "no" if no.exists() else "yes" if yes.exists() else "none"
            with (folder / "answers.jsonl").open("a", encoding="utf-8") as answers:
                answers.write(json.dumps({"id": name, "answer": answer, **request}, default=str) + "\n")
        finally:
            for one in (new, file, yes, no):
                with suppress(OSError):
                    one.unlink()
        return answer == "yes"
