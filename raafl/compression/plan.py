"""Plan what travels between server and clients: layouts and bytes each way, for every submodel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from raafl.compression.compressors import Compressor, compressor, up_name
from raafl.core.options import Compress
from raafl.core.payload import MAX_CACHED, Payload, Way
from raafl.errors import BadInput
from raafl.submodel.extract import CopyPlan
from raafl.submodel.spec import FULL, Spec
from raafl.units import quantity

if TYPE_CHECKING:
    from raafl.core.coordinator import Coordinator
    from raafl.core.local import Local
    from raafl.submodel.cost import Cost
    from raafl.submodel.flat import Layout, TensorEntry
    from raafl.submodel.submodels import Submodels

WAYS: tuple[Way, Way] = ("sent", "trained")


class CompressionPlan:
    """Compressors of a run in both directions, and the layouts on the wire; the same on server and clients.

    Parameters and bundles are compressed; bundles are extra tensors that a method sends beside the model. Running
    statistics of norm layers and other buffers are sent unchanged, since they are small.

    `payload`: layouts (names, shapes and dtypes) of the tensors that are sent, before compression.
    `submodels`: submodels of the model, or in split learning of the part that clients train.
    `down`: compressor of tensors for clients; None = no compression.
    `up`: compressor of tensors from clients; None = no compression.
    `adds_back`: whether clients send differences from the received values, although the merge needs the trained
    values. The server then adds the values that it sent.
    """

    def __init__(
        self,
        payload: Payload,
        sends: Literal["values", "delta"] = "values",
        down: Compressor | None = None,
        up: Compressor | None = None,
    ) -> None:
        """Combine payload and compressors; ``sends`` is what the merge asks clients to send."""
        self.payload, self.submodels, self.down, self.up = payload, payload.submodels, down, up
        self.adds_back = up is not None and up.differences and sends == "values"
        self._more = lru_cache(MAX_CACHED)(self._more_bytes)

    @classmethod
    def of(
        cls, submodels: Submodels, compress: Compress, sends: Literal["values", "delta"], local: Local
    ) -> CompressionPlan | None:
        """Build the plan from the config's section ``compress``; None if nothing is compressed.

        Raises:
            BadInput: the section and the algorithm contradict each other.
        """
        exchange = local.exchange(submodels)
        payload = local.payload(submodels if exchange is None else exchange.client)
        kinds = compress.down, up_name(compress, payload.up_as)
        if kinds[0] == "none" and kinds[1] in ("none", "scalars") and not payload.has_bundles:
            return None
        down, up = (compressor(kind, compress.top_k, payload.names) for kind in kinds)
        for way, one in (("down", down), ("up", up)):
            if payload.is_resident and one is not None and one.feeds_back:
                raise BadInput(
                    f"compress.{way} is {kinds[way == 'up']}, which does not work with this algorithm, whose clients "
                    "keep tensors between tasks: give none, bf16 or int8"
                )
        return cls(payload, sends, down, up)

    @classmethod
    def on(cls, coordinator: Coordinator) -> CompressionPlan:
        """Return the compression plan of a coordinator's run."""
        plan = coordinator.fleet.plan
        return plan if isinstance(plan, cls) else cls(coordinator.payload)

    @property
    def sender_unpacks(self) -> bool:
        """Whether the server also decodes what it sends, and stores the result, to know the exact values at the client."""
        return self.adds_back or (self.down is not None and self.down.feeds_back)

    @property
    def remembers(self) -> bool:
        """Whether a transfer depends on the client's earlier tasks, through error feedback or tensors that it keeps."""
        return self.payload.is_resident or any(one is not None and one.feeds_back for one in (self.down, self.up))

    def compressor(self, way: Way) -> Compressor | None:
        """Return the compressor of one direction."""
        return self.down if way == "sent" else self.up

    def layout(self, spec: Spec, way: Way, extra: Mapping[str, Any] | None = None) -> Layout:
        """Return the layout of the tensors that are sent in one direction for a task, after compression.

        `extra`: further settings of the task (`Work.extra`); None = all tensors are sent.
        """
        one, plain = self.compressor(way), self.payload.travelling(spec, way, extra)
        return plain if one is None else one.layout(plain)

    def added_back(self, layout: Layout) -> list[TensorEntry]:
        """Return those tensors of an update that arrive as differences and must become values again.

        The compressor needs trained minus received values, but the merge needs the trained values; so the server adds
        what it sent.
        """
        if self.up is None or not self.adds_back:
            return []
        return [entry for entry in self.up.taken(layout) if entry.name in self.submodels.parameter_names]

    def plan(self, spec: Spec, way: Way) -> CopyPlan:
        """Return the copy plan of a task: for each of the task's tensors, where in the whole model its elements are."""
        return self.payload.plan(spec, way)

    # ---- costs ----

    def cost(self, cost: Cost, spec: Spec, extra: Mapping[str, Any] | None = None) -> Cost:
        """Return the cost of a task with compression: fewer bytes are sent, but the client needs memory for it.

        `extra`: further settings of the task (`Work.extra`); None = unknown.
        """
        down, up, held = self._more(self.submodels.normal(spec).leading)
        if self.payload.is_resident:
            whole = self.submodels.layout(spec, "sent").num_bytes, self.submodels.layout(spec, "trained").num_bytes
            down, up = (self.layout(spec, way, extra).num_bytes - w for way, w in zip(WAYS, whole, strict=True))
        return replace(
            cost, down_bytes=cost.down_bytes + down, up_bytes=cost.up_bytes + up, peak_bytes=cost.peak_bytes + held
        )

    def _more_bytes(self, spec: Spec) -> tuple[int, int, int]:
        """Return the extra bytes sent down, sent up, and held by the client, compared with plain tensors."""
        more, held = [], 0
        for way in WAYS:
            one, plain, wire = self.compressor(way), self.payload.layout(spec, way), self.layout(spec, way)
            values = self.submodels.layout(spec, way).num_bytes
            more.append(wire.num_bytes - values)
            held += plain.num_bytes - values
            # memory for the message, the difference, the residual or copy, its part in use, and the decoded message
            if one is not None:
                held += wire.num_bytes + (plain.num_bytes if way == "trained" else 0)
                if one.feeds_back:
                    held += self.payload.layout(way=way).num_bytes + plain.num_bytes * (1 + (way == "trained"))
            # a resident payload stays on the client between tasks
            held += plain.num_bytes if self.payload.is_resident and way == "sent" else 0
        return more[0], more[1], held

    def notes(self, num_clients: int) -> list[str]:
        """Return remarks for the user at the start of a run: the compression, and the memory that the server needs for it."""
        if self.down is None and self.up is None:
            return []
        texts, held = [], 0
        sent, trained = (self.payload.layout(FULL, way).num_bytes for way in WAYS)
        for word, way, plain in zip(("down", "up"), WAYS, (sent, trained), strict=True):
            one = self.compressor(way)
            if one is not None:
                wire = self.layout(FULL, way).num_bytes
                texts.append(f"{word} {type(one).__name__}, {wire:,} bytes in the place of {plain:,}")
        if self.down is not None:
            held += self.layout(FULL, "sent").num_bytes
            # for the stored copy, its part in use, and the change since
            held += 3 * sent if self.down.feeds_back else 0
            held += sent if self.sender_unpacks else 0
        if self.up is not None:
            held += trained
        whole = "the clients' part of the model" if self.submodels.whole else "the whole model"
        words = f"compress: {'; '.join(texts)} for {whole}"
        if held:
            words += f"; the server holds up to {num_clients * held:,} bytes more, for {quantity(num_clients, 'client')} at work"
        return [words]
