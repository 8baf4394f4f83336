"""Answer a task with masked numbers: a client's end of the exchange in which its group's sum is opened."""

from __future__ import annotations

import queue
from typing import Any

from raafl.core.types import Assignment, Update
from raafl.local.train import Stopped
from raafl.parts.protect.secure.coverage import Ring
from raafl.parts.protect.secure.fixed_point import OUT_OF_RANGE, OutOfRange
from raafl.parts.protect.secure.group import CannotOpen
from raafl.parts.protect.secure.member import Member
from raafl.parts.protect.secure.merge import SecureSum
from raafl.runtime.fields import Meta
from raafl.runtime.protocol import Answer
from raafl.runtime.secure_protocol import (
    Formed,
    Members,
    layout_of,
    sizes_for,
    sizes_from,
    split,
    to_bytes,
    to_tensors,
)
from raafl.submodel import FlatTensors, Layout, Submodels
from raafl.transport import Connection, Kind, Message, PeerLost, PeerTimeout, Refused


class SecureSide:
    """A client's side of masked tasks: the training thread sends messages and waits; the receiving thread passes on replies."""

    def __init__(self, pair: Connection, submodels: Submodels, merge: SecureSum) -> None:
        """Prepare.

        Args:
            pair: connection to the server.
            submodels: of the model.
            merge: of sums, by this client's own config.
        """
        self._pair, self._submodels, self._merge = pair, submodels, merge
        self._assignment: Assignment | None = None
        self._expected: Layout | None = None
        self._is_asking = False
        self._replies: queue.SimpleQueue[tuple[Meta, FlatTensors | None] | int | None] = queue.SimpleQueue()

    def refusal(self, assignment: Assignment, update: Update) -> str | None:
        """Return the reason why an update cannot be encoded, or None."""
        if update.refusal is not None:
            return update.refusal
        try:
            self._merge.encoded(self._submodels, assignment.spec, update.tensors, 1.0)
        except OutOfRange:
            return OUT_OF_RANGE
        return None

    def mask(self, assignment: Assignment, update: Update, answer: Answer) -> FlatTensors:
        """Send an update masked; return the shares that this client reveals to open the sum, for the task's last message.

        Args:
            assignment: assignment of the task.
            update: trained update, which is not refused.
            answer: fields of the answer that the server may see.

        Raises:
            CannotOpen: the group is not one that this client agrees to, or too few members are left.
            Stopped: the server has ended the task, or is gone.
        """
        self._assignment, options = assignment, self._merge.options
        member, ring = Member(options.min_cover or 0, options.threshold), Ring(self._submodels)
        meta, _ = self._ask(answer.to_meta(), to_tensors(keys=b"".join(member.public)), None)
        formed = Formed.from_meta(meta)
        group, key = formed.group, assignment.id
        encrypted, commitments = member.join(group, key, ring)
        if group.by_key[key].spec != assignment.spec.cut:
            raise CannotOpen("bad-group", "this client's submodel is another than it was assigned")
        keys = [one.key for one in group.members]
        shares = b"".join(encrypted[other] for other in sizes_from(member.coverage, key, keys))
        sizes = sizes_for(member.coverage, key, keys)
        answer_layout = layout_of(shares=sum(sizes.values()))
        meta, arrived = self._ask({}, to_tensors(shares=shares, commitments=commitments), answer_layout)
        senders = Members.from_meta(meta, keys).keys
        assert arrived is not None
        pieces = split(to_bytes(arrived, "shares"), sizes)
        numbers = self._merge.encoded(self._submodels, assignment.spec, update.tensors, formed.share)
        member.mask_(numbers, {sender: pieces[sender] for sender in senders if sender != key})
        meta, _ = self._ask({}, numbers, None)
        told = member.reveal(Members.from_meta(meta, senders).keys)
        return to_tensors(revealed=b"".join(told[sender] for sender in senders))

    def _ask(
        self, meta: dict[str, Any], tensors: FlatTensors, answer: Layout | None
    ) -> tuple[Meta, FlatTensors | None]:
        """Send a question and wait for the reply, however long the others take: the server sends heartbeats meanwhile."""
        assert self._assignment is not None
        self._expected, self._is_asking = answer, True
        number, incarnation = self._assignment.id, self._assignment.incarnation
        try:
            self._pair.send(Message(Kind.QUESTION, number, incarnation, meta, tensors))
        except (PeerLost, PeerTimeout):  # the reader will say so
            raise Stopped from None
        while isinstance(reply := self._replies.get(), int):
            if reply == number:
                raise Stopped
        if reply is None:
            self._replies.put(None)  # for whoever asks next: nothing will come any more
            raise Stopped
        return reply

    def expect(self, assignment: int) -> FlatTensors | None:
        """Return the storage for a reply's tensors; called on the receiving thread."""
        if not self._is_asking or self._assignment is None or assignment != self._assignment.id:
            raise Refused("bad-kind", f"a reply for assignment {assignment}, which waits for none")
        self._is_asking = False
        return None if self._expected is None else FlatTensors.empty(self._expected)

    def hear(self, meta: Meta, tensors: FlatTensors | None) -> None:
        """Pass a reply to the waiting task."""
        self._replies.put((meta, tensors))

    def stop(self, assignment: int | None = None) -> None:
        """Wake a task that waits for a reply, since none will come; None = any task, now and later."""
        self._replies.put(assignment)
