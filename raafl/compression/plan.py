"""What travels between server and clients in a run: layouts and bytes each way, for every submodel."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from raafl.compression.compressors import Compress, Compressor, compressor, up_name
from raafl.parts.split_half import Half
from raafl.submodel.axes import Axis, AxisTable
from raafl.submodel.extract import Plan
from raafl.submodel.spec import FULL, Spec

if TYPE_CHECKING:
    from raafl.core.algorithm import Local, Merge
    from raafl.submodel.cost import Cost
    from raafl.submodel.flat import Layout
    from raafl.submodel.submodels import Submodels

Way = Literal["sent", "trained"]
WAYS: tuple[Way, Way] = ("sent", "trained")
MAX_CACHED = 256
"""Specs of which layouts and plans are remembered."""


class Wires:
    """The compressors of a run and what they make of its submodels; the same on server and clients, without state.

    Parameters are compressed. Running statistics and other buffers are few and no step in a direction: they travel as
    they are.

    Attributes:
        submodels: of the model, or of the part of it that travels.
        down: compresses what clients are sent; None = nothing does.
        up: compresses what they send back.
        adds_back: whether updates travel as differences although the merge asks for values, so that the server adds what it
            had sent.
    """

    def __init__(
        self, submodels: Submodels, sends: Literal["values", "delta"] = "values", down: Compressor | None = None,
        up: Compressor | None = None,
    ) -> None:  # fmt: skip
        """Join the compressors and what they are for; ``sends`` is the merge's."""
        self.submodels, self.down, self.up = submodels, down, up
        self.adds_back = up is not None and up.differences and sends == "values"
        self._plan = lru_cache(MAX_CACHED)(self._make_plan)
        self._table = lru_cache(2)(self._make_table)
        self._more = lru_cache(MAX_CACHED)(self._more_bytes)

    @classmethod
    def of(cls, submodels: Submodels, compress: Compress, merge: Merge, local: Local | None = None) -> Wires | None:
        """Return what a config's section and an algorithm's own merge ask for; None where nothing is compressed.

        Args:
            submodels: of the model.
            compress: the section.
            merge: the algorithm's.
            local: the algorithm's, which says what of the model travels; None = all of it.

        Raises:
            BadInput: they contradict each other.
        """
        names = frozenset(submodels.parameter_names)
        down = compressor(compress.down, compress.top_k, names)
        up = compressor(up_name(compress, merge.wire), compress.top_k, names)
        if down is None and up is None:
            return None
        return cls(submodels if local is None else local.travelling(submodels), merge.sends, down, up)

    @property
    def sender_unpacks(self) -> bool:
        """Whether the server is to know what a client has received while its task is out."""
        return self.adds_back or (self.down is not None and self.down.feeds_back)

    @property
    def remembers(self) -> bool:
        """Whether anything depends on what a client was sent, or has sent, before."""
        return any(one is not None and one.feeds_back for one in (self.down, self.up))

    def compressor(self, way: Way) -> Compressor | None:
        """Return what compresses one way: "sent" is down, "trained" is up."""
        return self.down if way == "sent" else self.up

    def layout(self, spec: Spec, way: Way) -> Layout:
        """Return the layout of what travels one way for a task of ``spec``."""
        one, plain = self.compressor(way), self.submodels.layout(spec, way)
        return plain if one is None else one.layout(plain)

    def plan(self, spec: Spec, way: Way) -> Plan:
        """Return the plan between that part of the whole model and of ``spec``; both without what does not travel."""
        return self._plan(self.submodels.normal(spec), way)

    def _make_plan(self, spec: Spec, way: Way) -> Plan:
        whole, small = self.submodels.layout(part=way), self.submodels.layout(spec, way)
        return Plan(spec, whole, small, self._table(way).selections(spec) if spec.kept else {})

    def _make_table(self, way: Way) -> AxisTable:
        whole = self.submodels.layout(part=way)
        axes = [
            Axis(axis.name, axis.size, tuple(m for m in axis.members if m.name in whole.by_name))
            for axis in self.submodels.axes.values()
        ]
        return AxisTable(axes, {entry.name: entry.shape for entry in whole.entries})

    # ---- what it costs ----

    def cost(self, cost: Cost, spec: Spec) -> Cost:
        """Return the cost of a task of ``spec`` with what travels compressed, where ``cost`` is that without."""
        down, up, held = self._more(self._typical(spec))
        return replace(
            cost, down_bytes=cost.down_bytes + down, up_bytes=cost.up_bytes + up, peak_bytes=cost.peak_bytes + held
        )

    def _typical(self, spec: Spec) -> Spec:
        """Return the spec with as many of the first indices kept: which they are does not matter to bytes."""
        spec = self.submodels.normal(spec)
        if not spec.kept:
            return spec
        return Spec(tuple((name, range(len(kept))) for name, kept in spec.kept), spec.blocks, spec.trained, spec.exits)

    def _more_bytes(self, spec: Spec) -> tuple[int, int, int]:
        """Return how many bytes more go down, go up, and are held by the client beside the plain tensors."""
        more, held = [], 0
        for way in WAYS:
            one, plain, wire = self.compressor(way), self.submodels.layout(spec, way), self.layout(spec, way)
            more.append(wire.num_bytes - plain.num_bytes)
            if one is not None:  # what travels; the difference; residual or copy, what is taken of it, what went
                held += wire.num_bytes + (plain.num_bytes if way == "trained" else 0)
                if one.feeds_back:
                    held += self.submodels.layout(part=way).num_bytes + plain.num_bytes * (1 + (way == "trained"))
        return more[0], more[1], held

    def notes(self, num_clients: int) -> list[str]:
        """Return what the user is to know at the start: what travels, and what the server holds for it."""
        texts, held = [], 0
        sent, trained = (self.submodels.layout(part=way).num_bytes for way in WAYS)
        for word, way, plain in zip(("down", "up"), WAYS, (sent, trained), strict=True):
            one = self.compressor(way)
            if one is not None:
                wire = self.layout(FULL, way).num_bytes
                texts.append(f"{word} {type(one).__name__}, {wire:,} bytes in the place of {plain:,}")
        if self.down is not None:
            held += self.layout(FULL, "sent").num_bytes
            held += 3 * sent if self.down.feeds_back else 0  # the copy, what is taken of it, what has changed
            held += sent if self.sender_unpacks else 0
        if self.up is not None:
            held += trained
        whole = "the clients' part of the model" if isinstance(self.submodels, Half) else "the whole model"
        words = f"compress: {'; '.join(texts)} for {whole}"
        if held:
            words += f"; the server holds up to {num_clients * held:,} bytes more, for {num_clients} clients at work"
        return [words]
