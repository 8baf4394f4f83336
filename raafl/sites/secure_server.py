"""Sum masked updates on the server (secure aggregation): a session for each client, and the place where groups are formed.

A session passes each message of its client to the aggregator, which works in the server's main loop, and waits for the
reply. While a group is in the protocol, the coordinator gets no other events. So the group's members, weights and staleness are the
same when it is formed, when its sum is computed, and in a replay. There is one group at a time.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raafl.core.types import Arrived, Assignment, Event, Lost, SumGroup, Update
from raafl.log import warn_once
from raafl.parts.protect.privacy import Private
from raafl.parts.protect.secure.group import OUT_OF_RANGE, CannotOpen, Group, IntegerLayouts, threshold_of
from raafl.parts.protect.secure.member import Opening, is_signed, lists_text, senders_text
from raafl.runtime.protocol import Answer, Failed, Meta
from raafl.runtime.server.link import ForExtension
from raafl.runtime.server.session_protocol import Await, Confirm, Sent, SessionExtension, Steps
from raafl.runtime.server.wall_clock import LoopExtension
from raafl.sites.secure_messages import (
    KEY_BYTES,
    NOT_OPENED,
    UNCERTIFIED,
    Claim,
    Formed,
    Members,
    SecureGroups,
    Signatures,
    Signed,
    layout_of,
    reveal_sizes,
    shares_layout,
    sizes_from,
    split,
    to_bytes,
    to_tensors,
)
from raafl.submodel import FlatTensors, Layout
from raafl.transport import Kind, Refused
from raafl.transport.tcp.loop import Mailbox

if TYPE_CHECKING:
    from raafl.runtime.server.wall_clock import Server

_log = logging.getLogger(__name__)
Phase = Literal["ready", "shares", "masked", "signed", "opened"]
NEXT: dict[Phase, Phase] = {"ready": "shares", "shares": "masked", "masked": "signed", "signed": "opened"}


@dataclass(frozen=True, slots=True)
class Reply:
    """Message of a session to its client, with the tensor layout of the message that the client sends next."""

    meta: dict[str, Any]  # fields of the message
    tensors: FlatTensors | None  # tensors of the message; None = none
    expect: Layout  # tensor layout of the client's next message


@dataclass(frozen=True, slots=True)
class SecureStep(ForExtension):
    """Message of a client in secure aggregation, passed from its session to the main loop."""

    assignment: Assignment  # task of the client
    phase: Phase  # phase of the protocol to which the message belongs
    answer: Answer  # fields of the client's answer that the server may read; only in the first message
    tensors: FlatTensors  # tensors of the message, on the CPU; the receiver may change them
    moved: tuple[int, int]  # number of bytes sent and received for the task so far
    replies: Mailbox[Reply | None]  # queue in which the session waits for a reply; None for the last message
    claim: Claim = field(default_factory=Claim)  # statement of the client about itself, from its first message
    signature: bytes = b""  # signature of the lists that the client knows; empty before it has masked its numbers

    @property
    def life(self) -> tuple[int, int]:
        """Id of the client, and the number of times that it has joined."""
        return self.assignment.client, self.assignment.incarnation

    def update(self, tensors: FlatTensors, moved: tuple[int, int]) -> Update:
        """Build the update of the task from these tensors."""
        answer, (down, up) = self.answer, moved
        return Update(
            self.assignment.id, *self.life, tensors, answer.num_samples, answer.num_steps, bytes_down=down, bytes_up=up
        )


def _refused(step: SecureStep) -> Update:
    update = step.update(FlatTensors.empty(Layout(())), step.moved)
    update.refusal = NOT_OPENED
    return update


class MaskedSession(SessionExtension):
    """A session whose client masks its updates: it takes the client through the protocol of its group's sum."""

    def answer(self, sent: Sent, plain: Callable[[Sent], Steps[Update | None]]) -> Steps[Update | None]:
        """Exchange all messages of a task with its client; the update itself is reported by `SecureAggregator`."""
        return self.session.telling(sent, self._phases(sent))

    def _phases(self, sent: Sent) -> Steps[Update | None]:
        session, talk, assignment = self.session, sent.talk, sent.assignment
        replies: Mailbox[Reply | None] = Mailbox()
        phase: Phase = "ready"
        first = message = yield from talk.recv(Kind.QUESTION, self._room(layout_of(keys=3 * KEY_BYTES)))
        answer, claim = session.checked_answer(assignment.spec, first.meta), Claim.from_meta(first.meta)
        while True:
            assert message.tensors is not None
            moved = (talk.down_bytes, talk.up_bytes)
            signature = Signed.from_meta(message.meta).signature if phase in ("masked", "signed") else b""
            step = SecureStep(assignment, phase, answer, message.tensors, moved, replies, claim, signature)
            session.report(step)
            if phase == "opened":
                break
            reply: Reply | None = yield Await(replies)
            if reply is None:
                raise Refused(NOT_OPENED, "too few clients are left in its group, or it was too late for it")
            yield from talk.send(Kind.REPLY, reply.meta, reply.tensors)
            phase = NEXT[phase]
            kind = Kind.UPDATE if phase == "opened" else Kind.QUESTION
            message = yield from talk.recv(kind, self._room(reply.expect))
        session.setup.moved(0, talk.up_bytes)
        yield Confirm(assignment.id)
        return None

    def _room(self, layout: Layout) -> Callable[[Meta], FlatTensors]:
        """Return a function that allocates memory for a client's message; on the CPU, where masks are added."""
        return lambda meta: self.session.setup.terms.storage(layout)

    def refusal(self, failed: Failed) -> str | None:
        """Return the reason of a client that takes no part in a sum."""
        if failed.reason not in (NOT_OPENED, OUT_OF_RANGE, "non-finite"):
            return None
        why = Refused(failed.reason, failed.error)
        warn_once(_log, f"client {self.session.client} takes no part in a sum: {why}")
        return failed.reason


@dataclass
class _Running:
    """Secure aggregation of one group, in progress: the phase of the protocol and the messages that have arrived."""

    opening: Opening  # server's side of the protocol
    scale: float  # largest weight of a member
    ready: dict[int, SecureStep]  # first step of each member
    until: float  # deadline in seconds of the run's clock, after which the group goes on without missing members
    phase: Phase = "shares"  # phase of the messages that the group waits for
    waiting: set[int] = field(default_factory=set)  # members whose message has not arrived yet
    here: dict[int, SecureStep] = field(default_factory=dict)  # steps of this phase, by member
    senders: tuple[int, ...] = ()  # members that sent shares
    masked: dict[int, SecureStep] = field(default_factory=dict)  # steps with masked numbers, by member; first empty
    gone: set[int] = field(default_factory=set)  # members whose connection has ended
    signed: Reply | None = None  # reply to members that sign both lists; None = not ready yet

    def await_(self, phase: Phase, keys: Iterable[int]) -> None:
        """Enter ``phase`` and wait for a message of each member in ``keys`` that is still connected."""
        self.phase, self.waiting, self.here = phase, set(keys) - self.gone, {}


class SecureAggregator:
    """Secure aggregation in the server's main loop: it forms groups of clients, and computes the sum of each group's updates."""

    def __init__(self, groups: SecureGroups, note: Callable[[str], None]) -> None:
        """Store the groups' rules, and ``note``, a function that is called with the reason if a sum cannot be opened."""
        self._groups, self._note = groups, note
        self._layouts = IntegerLayouts(groups.coordinator.state.submodels)
        self._ready: dict[int, SecureStep] = {}
        self._running: _Running | None = None
        self._done: list[Update] = []
        self._late: list[Update] = []

    @property
    def is_running(self) -> bool:
        """Whether a group is in the middle of the protocol; until it ends, no other events go to the coordinator."""
        return self._running is not None

    def take(self, step: SecureStep) -> None:
        """Accept a client's message."""
        key, running = step.assignment.id, self._running
        if step.phase == "ready" and key in self._groups.coordinator.roster.active:
            self._ready[key] = step
        elif running is not None and step.phase == running.phase and key in running.waiting:
            running.here[key] = step
            running.waiting.discard(key)
        elif running is not None and running.signed is not None and step.phase == "signed" and key in running.masked:
            # the member is late, but its masked numbers are in the sum, so its shares can still help to open it
            running.waiting.add(key)
            step.replies.put(running.signed)
        elif step.phase != "opened":  # the member was too slow: its group continued without it
            step.replies.put(None)
        elif key in self._groups.coordinator.roster.active:  # its group was given up, so its task is refused
            self._late.append(_refused(step))

    def lose(self, client: int, incarnation: int) -> None:
        """Continue without a client whose connection has ended."""
        life = (client, incarnation)
        self._ready = {key: step for key, step in self._ready.items() if step.life != life}
        if self._running is not None:
            gone = {key for key, step in self._running.ready.items() if step.life == life}
            self._running.gone |= gone
            self._running.waiting -= gone

    def look(self, now: float) -> list[Update]:
        """Continue the protocol as far as messages and deadlines allow.

        Return the updates of a group that is finished, and updates that came too late for their group.
        """
        if self._running is None:
            # a client that has joined again has lost its earlier task, so that task's message is dropped
            active = self._groups.coordinator.roster.active
            self._ready = {key: step for key, step in self._ready.items() if key in active}
            if self._groups.is_complete(self._ready):
                self._form(now)
        while (running := self._running) is not None and (not running.waiting or now >= running.until):
            self._advance(running, now)
        done, self._done = self._done, []
        if self._running is None:
            done, self._late = [*self._late, *done], []
        return done

    # ---- steps of a group's protocol ----

    def _form(self, now: float) -> None:
        groups = self._groups
        first = list(self._ready.items())[: groups.merge.point.num_members]
        chosen = dict(sorted(first[: groups.num_together([step.assignment.spec for _, step in first])]))
        for key in chosen:
            del self._ready[key]
        group = self._group(chosen)
        scale = max(groups.merge.weights(group).values(), default=1.0) or 1.0
        try:
            opening = Opening(group, self._layouts)
        except CannotOpen as error:
            self._note(f"a sum could not be read: {error}")
            for step in chosen.values():
                step.replies.put(None)
            return
        running = _Running(opening, scale, chosen, now + groups.merge.options.step_s)
        self._running, running.here = running, dict(chosen)
        if len(chosen) < groups.least:
            self._fail(running, f"{len(chosen)} clients are too few for a sum")
            return
        proofs = {key: step.claim.proof for key, step in chosen.items() if step.claim.proof.signature}
        formed = Formed(group, proofs).to_meta()
        for key, step in chosen.items():
            step.replies.put(Reply(formed, None, shares_layout(running.opening.coverage, key, chosen)))
        running.await_("shares", chosen)

    def _group(self, chosen: Mapping[int, SecureStep]) -> Group:
        """Describe a new group by its members' own claims; the server may only lower the number of samples that counts for each."""
        groups, coordinator = self._groups, self._groups.coordinator
        members = []
        for step in chosen.values():
            client = coordinator.roster.clients[step.assignment.client]
            counted = coordinator.admission.counted_samples(client, step.answer.num_samples)
            members.append(step.claim.member(step.assignment, to_bytes(step.tensors, "keys"), step.answer, counted))
        threshold = threshold_of(len(chosen), groups.merge.options.threshold)
        run = next((step.claim.run for step in chosen.values()), "")
        version, equal = coordinator.state.version, isinstance(groups.merge.inner, Private)
        return Group(secrets.token_hex(16), tuple(members), threshold, groups.merge.min_cover, version, run, equal)

    def _advance(self, running: _Running, now: float) -> None:
        """Move a group to its next phase with the members that have answered; give it up if there are too few."""
        try:
            if running.phase != "opened" and len(running.here) < running.opening.group.threshold:
                need = running.opening.group.threshold
                raise CannotOpen(
                    f"{len(running.here)} of {len(running.ready)} clients are left, {need} must help", "too-few"
                )
            {"shares": self._shared, "masked": self._masked, "signed": self._signed, "opened": self._opened}[
                running.phase
            ](running)
        except CannotOpen as error:
            self._fail(running, str(error))
            return
        running.until = now + self._groups.merge.options.step_s

    def _shared(self, running: _Running) -> None:
        opening, here = running.opening, dict(sorted(running.here.items()))
        pieces = {}
        for key, step in here.items():
            opening.commitments[key] = to_bytes(step.tensors, "commitments")
            sizes = sizes_from(opening.coverage, key, running.ready)
            pieces[key] = split(to_bytes(step.tensors, "shares"), sizes)
        running.senders = tuple(here)
        senders = Members(running.senders).to_meta()
        for key, step in here.items():
            joined = b"".join(
                pieces[other][key] if other in pieces else bytes(sizes_from(opening.coverage, other, [key])[key])
                for other in running.ready
                if other != key
            )
            layout = self._layouts.layout(step.assignment.spec)
            step.replies.put(Reply(senders, to_tensors(shares=joined), layout))
        running.await_("masked", here)

    def _masked(self, running: _Running) -> None:
        group = running.opening.group
        running.masked = self._signers(running, senders_text(group, running.senders))
        told = Signatures({key: step.signature for key, step in running.masked.items()}).to_meta()
        for step in running.masked.values():
            step.replies.put(Reply(told, None, layout_of(nothing=0)))
        running.await_("signed", running.masked)

    def _signed(self, running: _Running) -> None:
        opening, group = running.opening, running.opening.group
        left = frozenset(running.masked)
        signers = self._signers(running, lists_text(group, running.senders, left))
        sizes = reveal_sizes(opening.coverage, opening.commitments, left, group.min_cover)
        told = Signatures({key: step.signature for key, step in signers.items()}).to_meta()
        running.signed = Reply(told, None, layout_of(revealed=sum(sizes.values())))
        for step in signers.values():
            step.replies.put(running.signed)
        running.await_("opened", signers)

    def _signers(self, running: _Running, text: bytes) -> dict[int, SecureStep]:
        """Return the messages whose signature of ``text`` is valid, by member; members with an invalid one count as lost.

        Raises CannotOpen if too few remain.
        """
        group, here = running.opening.group, dict(sorted(running.here.items()))
        signed = {key: step for key, step in here.items() if is_signed(text, step.signature, group.by_id[key].sign_key)}
        if len(signed) < group.threshold:
            raise CannotOpen(f"{len(signed)} clients have signed the same lists, {group.threshold} must", "too-few")
        for key in here.keys() - signed.keys():
            here[key].replies.put(None)
        return signed

    def _opened(self, running: _Running) -> None:
        opening, group = running.opening, running.opening.group
        left = frozenset(running.masked)
        sizes = reveal_sizes(opening.coverage, opening.commitments, left, group.min_cover)
        revealed = {key: split(to_bytes(step.tensors, "revealed"), sizes) for key, step in running.here.items()}
        for key in opening.restore(left, revealed):
            client = running.ready[key].assignment.client
            self._note(f"client {client} revealed wrong shares, so a sum was read without its help")
        record = SumGroup(tuple(running.masked), running.scale, masked=True)
        self._running, self._done = None, []
        for key, step in running.masked.items():
            opening.unmask_(key, step.tensors)
            last = running.here.get(key, step)
            update = running.ready[key].update(step.tensors, last.moved)
            update.group = record
            self._done.append(update)

    def _fail(self, running: _Running, why: str) -> None:
        """Give up a group: each member's task is refused with ``why``."""
        self._running, self._done = None, []
        self._note(f"a sum could not be read: {why}")
        for step in running.here.values():
            if running.phase == "opened":
                self._done.append(_refused(step))
            else:
                step.replies.put(None)


class SecureLoop(LoopExtension):
    """The place of secure aggregation in the server's loop: while a group is at work, all other events wait."""

    @classmethod
    def notes(cls, *, certified: bool) -> list[str]:
        """Return a warning about what masking does not prevent if clients' keys are not certified."""
        return [] if certified else [UNCERTIFIED]

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        groups = SecureGroups.of(server.coordinator)
        assert groups is not None
        self._aggregator, self._least = SecureAggregator(groups, server.note), groups.least
        # events that arrived while a group was in progress; the coordinator gets them afterwards
        self._deferred: deque[Event] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a group's protocol is in progress, during which the coordinator gets no events."""
        return self._aggregator.is_running

    @property
    def least(self) -> int:
        """Smallest number of clients in a group: with fewer, those that are there would wait for others for ever."""
        return self._least

    def take(self, item: Event | ForExtension | None) -> None:
        """Pass a message or event to the groups; return None, since events reach the coordinator only between groups."""
        if isinstance(item, SecureStep):
            self._aggregator.take(item)
        elif isinstance(item, Lost):
            self._aggregator.lose(item.client, item.incarnation or 0)
        elif isinstance(item, Arrived):  # an update that came unmasked, so its client is no member any more
            self._aggregator.lose(item.update.client, item.update.incarnation)
        if item is not None and not isinstance(item, ForExtension):
            self._deferred.append(item)
        while not self.server.reason:
            self.server.tell_group(self._aggregator.look(self.server.now))
            if self.is_busy or not self._deferred:
                break
            self.server.tell(self._deferred.popleft())
