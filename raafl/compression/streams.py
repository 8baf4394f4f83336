"""Compress both directions of each client's connection, with error feedback; and both ends of all clients in a simulation.

Down, top_k sends changes: both ends hold a copy of what the client has, which the first tasks fill with whole tensors. What was
left out is part of the next difference; that is the error feedback. Trained values lack it, so the server adds it to them. Up, the
client adds its residual, what earlier updates left out, to each update. Tensors beside the model, such as SCAFFOLD's variates, have
no residual: they go up as differences from what has come down, so what was left out is part of the next difference; hence top_k
sends them down whole. Copy and residual live as long as an incarnation of the client: a client that reconnects starts without
either, so both ends agree whatever was lost between. They are stored in a `ClientState`: an end's own, or, for a simulated client,
the run's, which is checkpointed.

A *resident* payload stays on the client between its tasks, so that only the values travel that a task names. The first task of
an incarnation brings all values, and bundles of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from raafl.compression.plan import CompressionPlan
from raafl.core.coordinator import Coordinator
from raafl.core.payload import Payload, Way
from raafl.core.snapshots import Snapshots
from raafl.core.state import ClientState, OneValue
from raafl.core.types import OUT_OF_MEMORY, Assignment, Update, derive_seed
from raafl.errors import InvalidPayload
from raafl.submodel import FlatTensors, Layout, Spec

if TYPE_CHECKING:
    from raafl.submodel.tensor_files import PayloadRoom

COPY, RESIDUAL = "compressed copy", "compressed residual"  # keys in `ClientState`
LAGS = ("compressed lag", "compressed lag of the other task")
"""Keys of what the client's task lacks of the server's values: with overlap a client has two tasks, which take turns."""
_MAX_KEPT = 2


@dataclass
class LastSent(OneValue[dict[int, list[int]]]):
    """State in checkpoints: the incarnation of each simulated client, and the bytes that it was sent last."""

    key = "compressed lives"
    # [incarnation, bytes sent for the latest task], by client id
    value: dict[int, list[int]] = field(default_factory=dict)


class Scratch:
    """Reusable storage for intermediate tensors, one for each of the layouts that were used last."""

    def __init__(self, storage: PayloadRoom | None = None) -> None:
        """Store ``storage``, which allocates tensors; None = in ordinary memory."""
        self._kept: dict[str, dict[Layout, FlatTensors]] = {}
        self._storage = storage or FlatTensors.empty

    def __call__(self, purpose: str, layout: Layout, device: torch.device) -> FlatTensors:
        """Return uninitialised tensors, which a later call with the same purpose and layout returns again."""
        kept = self._kept.setdefault(purpose, {})
        found = kept.get(layout)
        if found is None or found.device != device:
            while len(kept) >= _MAX_KEPT:
                kept.pop(next(iter(kept)))
            found = kept[layout] = self._storage(layout, device)
        return found


class _End:
    """One end of one direction of a client's connection: it encodes or decodes messages, with the state for error feedback.

    Codecs of one thread may share ``scratch``.
    """

    def __init__(
        self, plan: CompressionPlan, scratch: Scratch | None = None, kept: ClientState | None = None, client: int = 0
    ) -> None:
        """Keep the plan; ``kept`` has the client's copy of the model and its residual from earlier; None = begin without."""
        self._plan, self._scratch = plan, scratch or Scratch()
        self._kept, self._client = kept or ClientState(), client
        self._resident = ResidentPayload(plan.payload, self._kept, client) if plan.payload.is_resident else None
        self._next: tuple[Spec, FlatTensors | None] | None = None
        self._exact: FlatTensors | None = None  # values to be sent, on the server from `DownlinkCodec.pack` to `unpack`

    def _lag(self, assignment: Assignment) -> str:
        return LAGS[assignment.task % 2]


class DownlinkCodec(_End):
    """Encoder and decoder for all that one client receives, used on both sides; without a compressor, tensors stay unchanged."""

    @property
    def copy(self) -> FlatTensors | None:
        """The client's copy of the whole model, NaN where it has received nothing yet; None = no copy is needed."""
        return self._kept.find(COPY, self._client)

    def layout(self, assignment: Assignment) -> Layout:
        """Return the layout of the tensors that are sent for the client's next task."""
        spec = assignment.spec
        if self._resident is not None:
            plain = self._resident.layout(assignment)
            return plain if self._plan.down is None else self._plan.down.layout(plain)
        if self._is_whole(spec):
            return self._plan.payload.layout(spec, "sent")
        return self._plan.layout(spec, "sent")

    def pack(self, assignment: Assignment, snapshot: FlatTensors) -> FlatTensors:
        """Compress the values of a task for sending; the result is valid until the next call.

        To update its record of the client's values, the server also calls `unpack` with the result.

        Args:
            assignment: assignment of the task.
            snapshot: values to send.
        """
        one, spec = self._plan.down, assignment.spec
        self._exact = snapshot if self._plan.adds_lag else None
        if self._resident is not None:
            part = self._resident.layout_sent(assignment)
            snapshot = self._scratch("travelling", part, snapshot.device).take_(snapshot)
        if one is None or self._is_whole(spec):
            return snapshot
        known, values = self._known(spec), snapshot
        if known is not None:
            values = self._scratch("change", snapshot.layout, snapshot.device).copy_(snapshot)
            for entry in one.taken(values.layout):
                values.view(entry).sub_(known.view(entry))
        wire = self._scratch("down", one.layout(values.layout), values.device)
        one.encode(values, wire, derive_seed(assignment.seed, "down"))
        return wire

    def own(self, assignment: Assignment, device: torch.device) -> FlatTensors | None:
        """Return the client's own copy of a resident payload, valid until the next call of `unpack`; None = it has none."""
        return None if self._resident is None else self._resident.own(assignment, self._scratch, device)

    def unpack(self, assignment: Assignment, wire: FlatTensors, out: FlatTensors | None = None) -> FlatTensors:
        """Decompress the tensors that a client has received, store them as the client's present values, and return them.

        Args:
            assignment: assignment of the task.
            wire: tensors as received.
            out: storage for the result; None = storage that is valid until the next call.

        Raises:
            InvalidPayload: the tensors cannot be the result of `pack`.
        """
        one, spec = self._plan.down, assignment.spec
        layout = self._plan.payload.layout(spec, "sent")
        if self._resident is not None:
            out = out if out is not None else self._scratch("received", layout, wire.device)
            return self._resident.complete(assignment, self._part(assignment, wire), out)
        if one is None:
            return wire
        known, is_whole = self._known(spec), self._is_whole(spec)
        out = out if out is not None else self._scratch("received", layout, wire.device)
        if is_whole:
            out.copy_(wire)
        else:
            # do not stop at values that are not finite: they reach the client, whose update is then refused, as without
            # compression
            one.decode(wire, out, finite=False)
        if known is not None:
            for entry in one.taken(layout):
                out.view(entry).add_(known.view(entry))
        if one.feeds_back:
            whole = self._plan.payload.layout(way="sent")
            copy = self._kept.of(COPY, self._client, whole, wire.device, fill=math.nan)
            self._plan.plan(spec, "sent").scatter_(copy, out)
        self._next = None
        if self._exact is not None:
            self._store_lag(assignment, self._exact, out)
        return out

    def _store_lag(self, assignment: Assignment, exact: FlatTensors, received: FlatTensors) -> None:
        """Store what the values of a task as received lack of the exact ones, for `UplinkCodec.unpack` on the server."""
        name, self._exact = self._lag(assignment), None
        self._kept.forget(name, self._client)
        lag = self._kept.of(name, self._client, received.layout, received.device)
        for entry in self._plan.lagging(received.layout):
            torch.sub(exact.view(entry), received.view(entry), out=lag.view(entry))

    def _part(self, assignment: Assignment, wire: FlatTensors) -> FlatTensors:
        """Decode the transferred part of a resident payload; the other part is still stored on the client."""
        one = self._plan.down
        if one is None or self._resident is None:
            return wire
        part = self._scratch("part", self._resident.layout(assignment), wire.device)
        one.decode(wire, part, finite=False)
        return part

    def _is_whole(self, spec: Spec) -> bool:
        one = self._plan.down
        return one is not None and one.feeds_back and self._known(spec) is None

    def _known(self, spec: Spec) -> FlatTensors | None:
        """Return the values of ``spec`` that both ends know, to which a compressed change is added; None if some are unknown."""
        one, copy = self._plan.down, self.copy
        if one is None or not one.feeds_back or copy is None:
            return None
        if self._next is None or self._next[0] != spec:
            plan = self._plan.plan(spec, "sent")
            known = plan.gather(copy, self._scratch("known", plan.layout, copy.device))
            has = all(not bool(known.view(entry).isnan().any()) for entry in one.taken(known.layout))
            self._next = (spec, known if has else None)
        return self._next[1]


class UplinkCodec(_End):
    """Encoder and decoder for the updates of one client, used on both sides; without a compressor, tensors stay unchanged."""

    @property
    def residual(self) -> FlatTensors | None:
        """The client's accumulated error of compression, over all trained parameters; None = there is none."""
        return self._kept.find(RESIDUAL, self._client)

    def forget(self) -> None:
        """Discard the client's accumulated error of compression."""
        self._kept.forget(RESIDUAL, self._client)

    def pack(self, assignment: Assignment, trained: FlatTensors, received: FlatTensors) -> FlatTensors:
        """Compress the result of a task and store the error of compression; the result is valid until the next call."""
        one = self._plan.up
        if self._resident is not None:
            self._resident.keep(assignment, trained)
            part = self._plan.payload.travelling(assignment.spec, "trained", assignment.extra)
            trained = self._scratch("travelling", part, trained.device).take_(trained)
        if one is None:
            return trained
        change, taken = trained, one.taken(trained.layout)
        if self._plan.adds_back or one.feeds_back:
            change = self._scratch("difference", trained.layout, trained.device).copy_(trained)
        for entry in self._plan.added_back(trained.layout):
            change.view(entry).sub_(received[entry.name].to(change.device))
        if self.residual is not None:
            plan = self._plan.plan(assignment.spec, "trained")
            held = plan.gather(self.residual, self._scratch("held", plan.layout, change.device))
            for entry in taken:
                change.view(entry).add_(held.view(entry))
        wire = self._scratch("up", one.layout(change.layout), change.device)
        one.encode(change, wire, derive_seed(assignment.seed, "up"))
        if one.feeds_back:
            self._leave(assignment.spec, change, wire)
        return wire

    def _leave(self, spec: Spec, change: FlatTensors, wire: FlatTensors) -> None:
        """Store as the residual what the message ``wire`` leaves out of ``change``; ``change`` is overwritten.

        If ``wire`` is not finite, delete the residual, since the server will refuse the update.
        """
        one, plan = self._plan.up, self._plan.plan(spec, "trained")
        if one is None or not wire.is_finite():  # the server will refuse an update that is not finite
            self.forget()
            return
        sent = self._scratch("sent", change.layout, change.device)
        one.decode(wire, sent)
        taken = {entry.name for entry in one.taken(change.layout)}
        if self._plan.submodels.rules.feeds_back_model:
            taken &= self._plan.submodels.parameter_names
        for name, tensor in change.items():
            tensor.sub_(sent[name]) if name in taken else tensor.zero_()
        if self.residual is None and not any(bool(buffer.any()) for buffer in change.buffers.values()):
            return
        plan.scatter_(self._kept.of(RESIDUAL, self._client, plan.full_layout, change.device), change)

    def unpack(self, assignment: Assignment, wire: FlatTensors, received: FlatTensors | None) -> FlatTensors:
        """Decompress an update to the tensors that the merge needs; they are valid until the next call.

        Values that the client keeps and does not send are 0 in the result.

        Raises:
            InvalidPayload: the update cannot be decoded to tensors that may be merged.
        """
        one, spec, payload = self._plan.up, assignment.spec, self._plan.payload
        if one is not None:
            part = payload.travelling(spec, "trained", assignment.extra)
            out = self._scratch("update" if self._resident is None else "part", part, wire.device)
            one.decode(wire, out)
            wire = out
        if self._resident is not None:
            out = self._scratch("update", payload.returned(spec), wire.device).zero_().take_(wire)
        lag = self._kept.find(self._lag(assignment), self._client)
        self._kept.forget(self._lag(assignment), self._client)
        if one is None and self._resident is None:
            if lag is None:
                return wire
            out = self._scratch("update", wire.layout, wire.device).copy_(wire)
        if received is not None:
            for entry in self._plan.added_back(out.layout):
                out.view(entry).add_(received[entry.name].to(out.device))
        if lag is not None:
            for entry in self._plan.lagging(out.layout):
                out.view(entry).add_(lag[entry.name].to(out.device))
        if out.device.type != "meta" and not out.is_finite():  # in a dry run tensors have no values to check
            raise InvalidPayload("non-finite")
        return out

    def nothing(self, spec: Spec, device: torch.device) -> FlatTensors:
        """Return an update of zeros, to be used in place of a refused update."""
        return self._scratch("update", self._plan.payload.returned(spec), device).zero_()


class CompressedSnapshots(Snapshots):
    """Values and updates of simulated clients as compression would change them, without sending them over a network.

    Updates are compressed and decompressed in the order of their virtual arrival, so that results do not depend on how
    many worker processes train. In split learning, only the client's part of the model is compressed.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self._coordinator, self._plan = coordinator, CompressionPlan.on(coordinator)
        self.remembers = self._plan.remembers
        self._part = self._plan.submodels if self._plan.submodels.whole is not None else None
        self._scratch = Scratch()
        self._ends: dict[int, tuple[DownlinkCodec, UplinkCodec]] = {}

    def _both(self, assignment: Assignment) -> tuple[DownlinkCodec, UplinkCodec]:
        """Return a client's codecs for both directions; a client that has joined anew starts without copy and residual."""
        client = assignment.client if self.remembers else 0
        if self.remembers and self._life(assignment)[0] != assignment.incarnation:
            self._state.memory.of(LastSent).value[client] = [assignment.incarnation, 0]
            for name in (COPY, RESIDUAL, RESIDENT, *LAGS):
                self._state.clients.forget(name, client)
            self._ends.pop(client, None)
        if client not in self._ends:
            where = self._plan, self._scratch, self._state.clients, client
            self._ends[client] = DownlinkCodec(*where), UplinkCodec(*where)
        return self._ends[client]

    def _life(self, assignment: Assignment) -> list[int]:
        return self._state.memory.of(LastSent).value.setdefault(assignment.client, [assignment.incarnation, 0])

    def cut(self, assignment: Assignment) -> FlatTensors:
        """Return the values that the client receives for a task; they stay unchanged until passed to `give_back`."""
        one, is_resident = self._plan.down, self._plan.payload.is_resident
        if one is None and not is_resident:
            return super().cut(assignment)
        is_new = self.is_outdated(assignment) or assignment.spec not in self._current
        snapshot, (down, _) = super().cut(assignment), self._both(assignment)
        if one is None or one.draws or one.feeds_back or is_resident:
            payload = self._plan.payload
            out = self._room(payload.layout(assignment.spec, "sent") if is_resident else snapshot.layout)
            self._users[id(out)] = 1
            num_bytes = self._carry_down(down, assignment, snapshot, out)
            if self._has_first:
                self._life(assignment)[1] = num_bytes
            self.give_back(snapshot)
            return out
        if is_new:  # clients without a copy share one message, which is encoded once
            self._carry_down(down, assignment, snapshot, snapshot)
        return snapshot

    def _carry_down(self, down: DownlinkCodec, assignment: Assignment, snapshot: FlatTensors, out: FlatTensors) -> int:
        """Compress and decompress a task's values into ``out``, which may be ``snapshot``; return the number of bytes sent."""
        wire = down.pack(assignment, self._travelling(assignment, snapshot, "sent"))
        if self._part is None:
            down.unpack(assignment, wire, out)
        else:
            if out is not snapshot:
                out.copy_(snapshot)
            out.take_(down.unpack(assignment, wire))
        return wire.num_bytes

    def _travelling(self, assignment: Assignment, values: FlatTensors, way: Way) -> FlatTensors:
        """Select the values that travel: all, or a resident payload's part; the result is valid until the next call."""
        if self._part is None:
            return values
        layout = self._part.layout(assignment.spec, way)
        return self._scratch(f"part {way}", layout, values.device).take_(values)

    def more_bytes(self, assignment: Assignment) -> int:
        """Return the number of bytes beyond the prediction that were sent to a client for its latest task.

        Where only changes are sent to a client, its first tasks get whole tensors, for which the prediction is too low.
        """
        if not self._has_first:
            return 0
        spec, extra = assignment.spec, assignment.extra
        predicted = self._plan.layout(spec, "sent", extra).num_bytes
        charged = self._coordinator.fleet.cost(spec, extra).down_bytes
        return round((self._life(assignment)[1] - predicted) * self._plan.charged_share(charged, predicted))

    @property
    def _has_first(self) -> bool:
        """Check whether a client's first task can transfer more bytes than its later ones."""
        down = self._plan.down
        return self._plan.payload.is_resident or (down is not None and down.feeds_back)

    def returned(self, assignment: Assignment, update: Update, received: FlatTensors) -> None:
        """Replace the tensors of ``update`` by those that the server receives, after compression."""
        if update.refusal == OUT_OF_MEMORY:  # a client that had too little memory has sent nothing
            if self._part is not None:
                self.refused(assignment)
            return
        update.tensors = update.tensors.to(self._state.values.device)
        if self._plan.up is None and not (self._plan.payload.is_resident or self._plan.adds_lag):
            return
        (_, up), trained = self._both(assignment), update.tensors
        part = self._travelling(assignment, trained, "trained")
        received = self._travelling(assignment, received, "sent")
        try:
            wire = up.pack(assignment, part, received)
            update.tensors = up.unpack(assignment, wire, received)
            if self._part is not None:
                whole = self._scratch("whole", trained.layout, trained.device).copy_(trained)
                update.tensors = whole.take_(update.tensors)
        except InvalidPayload as unsound:
            update.tensors, update.refusal = up.nothing(assignment.spec, trained.device), unsound.reason
        if self._part is not None and update.refusal is not None:
            self.refused(assignment)

    def refused(self, assignment: Assignment) -> None:
        """Discard the client's accumulated error of compression, since its task was refused (split learning only)."""
        self._both(assignment)[1].forget()


RESIDENT = "resident payload"
"""Name in `ClientState` under which a client's resident payload is stored."""


class ResidentPayload:
    """Tensors that a client keeps between its tasks, so that the server need not send all of them for each task.

    One object serves one client. Server and client each have one, and so agree on which tensors are sent.
    """

    def __init__(self, payload: Payload, kept: ClientState, client: int) -> None:
        """Store the payload, and ``kept``, the store that has the client's values."""
        self._payload, self._kept, self._client = payload, kept, client
        # layout of the latest task's values; only at an end that stores no copy of them
        self._sent: Layout | None = None

    def layout(self, assignment: Assignment) -> Layout:
        """Return the layout of the tensors that the client receives for a task, before compression.

        A client that has kept nothing yet receives all values; any other client receives only those that the task
        names.
        """
        copy = self._kept.find(RESIDENT, self._client)
        return self._travelling(assignment, None if copy is None else copy.layout)

    def layout_sent(self, assignment: Assignment) -> Layout:
        """Return the layout of the tensors to send to the client for a task, before compression.

        The first layout contains all values; the client then has a copy, so later layouts contain only values that the
        task names.
        """
        copy = self._kept.find(RESIDENT, self._client)
        layout = self._travelling(assignment, self._sent if copy is None else copy.layout)
        self._sent = self._payload.layout(assignment.spec, "sent")
        return layout

    def _travelling(self, assignment: Assignment, copy: Layout | None) -> Layout:
        known = copy == self._payload.layout(assignment.spec, "sent")
        return self._payload.travelling(assignment.spec, "sent", assignment.extra if known else None)

    def own(
        self, assignment: Assignment, storage: Callable[[str, Layout, torch.device], FlatTensors], device: torch.device
    ) -> FlatTensors | None:
        """Return the client's copy, in the payload's layout; None = it has no copy for the task's submodel."""
        copy, layout = self._kept.find(RESIDENT, self._client), self._payload.layout(assignment.spec, "sent")
        return None if copy is None or copy.layout != layout else storage("received", layout, device).copy_(copy)

    def complete(self, assignment: Assignment, part: FlatTensors, out: FlatTensors) -> FlatTensors:
        """Combine the received tensors with those that the client kept; return all tensors of the task, in ``out``."""
        layout = self._payload.layout(assignment.spec, "sent")
        copy = self._kept.find(RESIDENT, self._client)
        if copy is not None and copy.layout != layout:
            self._kept.forget(RESIDENT, self._client)
        copy = self._kept.of(RESIDENT, self._client, layout, part.device)
        return out.copy_(copy.take_(part))

    def keep(self, assignment: Assignment, trained: FlatTensors) -> None:
        """Keep a task's trained bundles (extra tensors of the method) for the client's next task.

        Parameters are not kept as trained: the client's copy of them stays as the server sent it.
        """
        copy = self._kept.find(RESIDENT, self._client)
        assert copy is not None  # `complete` has stored it for this task
        _, stored = self._payload.split(copy, assignment.spec, "sent")
        _, bundles = self._payload.split(trained, assignment.spec, "trained")
        for name, bundle in bundles.items():
            stored[name].copy_(bundle)
