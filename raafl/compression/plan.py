"""Plan what travels between server and clients: layouts and bytes each way, for every submodel."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from raafl.core.options import NAMES, Compress
from raafl.core.payload import MAX_CACHED, Payload, Way
from raafl.errors import BadInput, InvalidPayload, nearest
from raafl.submodel.extract import CopyPlan
from raafl.submodel.flat import FlatTensors, Layout, TensorEntry, is_merged, reals
from raafl.submodel.spec import FULL, Spec
from raafl.units import quantity

if TYPE_CHECKING:
    from raafl.core.coordinator import Coordinator
    from raafl.core.local import Local
    from raafl.submodel.cost import Cost
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
    `adds_lag`: whether clients send trained values that lack what ``down`` has not sent yet, its lag. The server then adds
    this, too; else a merge would take it back, so that it would never be sent.
    """

    def __init__(
        self,
        payload: Payload,
        sends: Literal["values", "delta"] = "values",
        down: Compressor | None = None,
        up: Compressor | None = None,
    ) -> None:
        """Store the payload and the compressors; ``sends`` says whether clients send trained values or their change."""
        self.payload, self.submodels, self.down, self.up = payload, payload.submodels, down, up
        self.adds_back = up is not None and up.differences and sends == "values"
        lags = sends == "values" and down is not None and down.feeds_back and payload.up_as is None
        self.adds_lag = lags and self.submodels.rules.adds_lag
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
        if isinstance(down, TopK) and submodels.rules.feeds_back_model:
            # the server adds the difference that comes back to the values that it has, not to those of an older task
            back = {name for name in payload.names - submodels.parameter_names if name.partition("/")[0] in local.up}
            down = replace(down, only=payload.names - back)
        for way, one in (("down", down), ("up", up)):
            if payload.is_resident and one is not None and one.feeds_back:
                raise BadInput(
                    f"compress.{way} is {kinds[way == 'up']}, which does not work with this algorithm, whose clients "
                    "keep tensors between tasks: give none, bf16 or int8"
                )
            if local.traits.sends_roots and isinstance(one, Int8 | TopK) and submodels.rules.keeps_roots:
                raise BadInput(
                    f"compress.{way} is {kinds[way == 'up']}, which sends small second moments of an optimizer as 0, and steps are "
                    "divided by their roots: give none or bf16, or let the optimizer start anew in each task"
                )
        if local.traits.exact_zeros and isinstance(up, Int8 | TopK) and submodels.rules.keeps_zeros:
            raise BadInput(
                f"compress.up is {kinds[1]}, which sends changed elements as 0, and this algorithm averages an element over the "
                "clients that have changed it: give none or bf16"
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
        return self._taken_parameters(self.up, layout) if self.adds_back else []

    def lagging(self, layout: Layout) -> list[TensorEntry]:
        """Return those tensors of an update that lack what `down` has not sent yet."""
        return self._taken_parameters(self.down, layout) if self.adds_lag else []

    def _taken_parameters(self, one: Compressor | None, layout: Layout) -> list[TensorEntry]:
        taken = () if one is None else one.taken(layout)
        return [entry for entry in taken if entry.name in self.submodels.parameter_names]

    def plan(self, spec: Spec, way: Way) -> CopyPlan:
        """Return the copy plan of a task: for each of the task's tensors, where in the whole model its elements are."""
        return self.payload.plan(spec, way)

    # ---- predicted costs of compression ----

    def cost(self, cost: Cost, spec: Spec, extra: Mapping[str, Any] | None = None) -> Cost:
        """Return the cost of a task with compression: fewer bytes are sent, but the client needs memory for it.

        `extra`: further settings of the task (`Work.extra`); None = unknown.
        """
        down, up, held = self._more(self.submodels.normal(spec).leading)
        sent, trained = (self.submodels.layout(spec, way).num_bytes for way in WAYS)
        if self.payload.is_resident:
            down, up = (
                self.layout(spec, way, extra).num_bytes - plain
                for way, plain in zip(WAYS, (sent, trained), strict=True)
            )
        down = round(down * self.charged_share(cost.down_bytes, sent))
        up = round(up * self.charged_share(cost.up_bytes, trained))
        return replace(
            cost, down_bytes=cost.down_bytes + down, up_bytes=cost.up_bytes + up, peak_bytes=cost.peak_bytes + held
        )

    def charged_share(self, charged: int, travelling: int) -> float:
        """Return the share of the ``travelling`` bytes that a method charges: 1 unless it charges fewer than travel.

        TimelyFL with clock "share" charges a share of the whole model; compression saves only that share of its bytes.
        """
        if not self.submodels.rules.compresses_shares or not 0 <= charged < travelling:
            return 1.0
        return charged / travelling

    def _more_bytes(self, spec: Spec) -> tuple[int, int, int]:
        """Compute what compression adds: bytes sent down, bytes sent up, and bytes of a client's memory.

        The first two are negative if compression saves more bytes than the tensors sent beside the submodel add.
        """
        more, held = [], 0
        for way in WAYS:
            one, plain, wire = self.compressor(way), self.payload.layout(spec, way), self.layout(spec, way)
            values = self.submodels.layout(spec, way).num_bytes
            more.append(wire.num_bytes - values)
            held += plain.num_bytes - values
            # memory for the message, the difference that is compressed, the stored residual (up) or copy (down), the part of that
            # for this submodel, and the decoded message
            if one is not None:
                held += wire.num_bytes + (plain.num_bytes if way == "trained" else 0)
                if one.feeds_back:
                    held += self.payload.layout(way=way).num_bytes + plain.num_bytes * (1 + (way == "trained"))
            # a resident payload stays in the client's memory between tasks
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
            # three sizes: the stored copy of what clients have, the part of it for a submodel, and the new values'
            # difference from it; and what a task lacks of the new values
            held += (4 if self.adds_lag else 3) * sent if self.down.feeds_back else 0
            held += sent if self.sender_unpacks else 0
        if self.up is not None:
            held += trained
        whole = "the clients' part of the model" if self.submodels.whole else "the whole model"
        words = f"compress: {'; '.join(texts)} for {whole}"
        if held:
            words += f"; the server holds up to {num_clients * held:,} bytes more, for {quantity(num_clients, 'client')} at work"
        return [words]


ROW = 32
"""Elements that a row of a tensor must have to get an int8 scale of its own."""


@dataclass(frozen=True)
class Compressor(ABC):
    """Encoder and decoder that convert tensors to a smaller layout for the wire, and back."""

    only: frozenset[str] | None = None  # names of the tensors to compress; None = all of floating point
    draws: ClassVar[bool] = False  # whether encoding draws random numbers
    # whether the error of a message is added to the next one (error feedback)
    feeds_back: ClassVar[bool] = False
    # whether clients must send trained minus received values, even if the merge wants trained ones; the server then
    # adds the received values again
    differences: ClassVar[bool] = True

    def takes(self, entry: TensorEntry) -> bool:
        """Check whether this compressor compresses the tensor ``entry``."""
        return is_merged(entry.dtype) and entry.numel > 0 and (self.only is None or entry.name in self.only)

    def taken(self, layout: Layout) -> tuple[TensorEntry, ...]:
        """Return the tensors of ``layout`` that this compressor compresses."""
        return _split(self, layout)[0]

    def layout(self, layout: Layout) -> Layout:
        """Return the layout of what is sent for ``layout``: compressed tensors first, then all others unchanged."""
        return _wire(self, layout)

    def encode(self, values: FlatTensors, out: FlatTensors, seed: int = 0) -> None:
        """Compress ``values`` into ``out``, in place. Values that are not finite make ``out`` not finite, too."""
        taken, others = _split(self, values.layout)
        for entry in others:
            out[entry.name].copy_(values.view(entry))
        self._encode(_as_reals(taken), values, out, seed)

    def decode(self, wire: FlatTensors, out: FlatTensors, *, finite: bool = True) -> None:
        """Decompress ``wire`` into ``out``, in place.

        Raises:
            InvalidPayload: ``wire`` cannot be the result of `encode` for finite tensors; ``out`` may be partly
                overwritten.
        """
        if finite and not wire.is_finite():
            raise InvalidPayload("non-finite")
        taken, others = _split(self, out.layout)
        for entry in others:
            out.view(entry).copy_(wire[entry.name])
        self._decode(_as_reals(taken), wire, out)

    @abstractmethod
    def _packed(self, taken: Sequence[TensorEntry]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Yield name, shape and dtype of each tensor on the wire that encodes the tensors ``taken``."""

    @abstractmethod
    def _encode(self, taken: Sequence[TensorEntry], values: FlatTensors, out: FlatTensors, seed: int) -> None: ...

    @abstractmethod
    def _decode(self, taken: Sequence[TensorEntry], wire: FlatTensors, out: FlatTensors) -> None: ...


@lru_cache(maxsize=1024)
def _split(compressor: Compressor, layout: Layout) -> tuple[tuple[TensorEntry, ...], tuple[TensorEntry, ...]]:
    taken = tuple(entry for entry in layout.entries if compressor.takes(entry))
    return taken, tuple(entry for entry in layout.entries if not compressor.takes(entry))


@lru_cache(maxsize=1024)
def _wire(compressor: Compressor, layout: Layout) -> Layout:
    taken, others = _split(compressor, layout)
    return Layout.pack([*compressor._packed(_as_reals(taken)), *((e.name, e.shape, e.dtype) for e in others)])


def _as_reals(taken: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Replace complex tensors by real ones with a last dimension of 2, in shape and dtype; see `_reals_of`."""
    return [replace(e, shape=(*e.shape, 2), dtype=e.dtype.to_real()) if e.dtype.is_complex else e for e in taken]


def _reals_of(values: FlatTensors, entry: TensorEntry) -> Tensor:
    return reals(values[entry.name])


@dataclass(frozen=True)
class BFloat16(Compressor):
    """Compressor that rounds to bfloat16, which has 8 bits of precision and the range of float32."""

    def takes(self, entry: TensorEntry) -> bool:
        """Check whether this compressor compresses the tensor ``entry``: yes if its elements have more than 16 bits."""
        return super().takes(entry) and entry.dtype.itemsize > 2

    def _packed(self, taken: Sequence[TensorEntry]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        return ((entry.name, entry.shape, torch.bfloat16) for entry in taken)

    def _encode(self, taken: Sequence[TensorEntry], values: FlatTensors, out: FlatTensors, seed: int) -> None:
        for entry in taken:
            out[entry.name].copy_(_reals_of(values, entry))

    def _decode(self, taken: Sequence[TensorEntry], wire: FlatTensors, out: FlatTensors) -> None:
        for entry in taken:
            _reals_of(out, entry).copy_(wire[entry.name])


@dataclass(frozen=True)
class Int8(Compressor):
    """Compressor to 8-bit integers with random rounding, whose expected error is 0.

    An element x is sent as the integer ``q = floor(x / s + u)`` and restored as ``s * q``. Here ``s = max|x| / 127`` is a
    scale, and u is drawn uniformly from [0, 1), so that E[s q] = x. This is QSGD's stochastic rounding (Alistarh et al.
    2017, section 3.1) with 127 levels and the maximum as the norm. Each row of a matrix or kernel (an output neuron or
    channel) has a float32 scale of its own if rows have at least `ROW` elements; other tensors have one scale.
    """

    draws: ClassVar[bool] = True

    def _packed(self, taken: Sequence[TensorEntry]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        for entry in taken:
            yield entry.name, entry.shape, torch.int8
        for entry in taken:
            yield _scales(entry), (num_rows(entry.shape),), torch.float32

    def _encode(self, taken: Sequence[TensorEntry], values: FlatTensors, out: FlatTensors, seed: int) -> None:
        # on the CPU, so that all devices draw the same random bits
        generator = torch.Generator().manual_seed(seed)
        for entry in taken:
            rows = _reals_of(values, entry).reshape(num_rows(entry.shape), -1)
            rows = rows.float() if entry.dtype.itemsize < 4 else rows
            scales = (rows.abs().amax(dim=1) / 127).float()
            out[_scales(entry)].copy_(scales)
            step = torch.where(scales.isfinite() & (scales > 0), scales, 1.0).to(rows.dtype).unsqueeze(1)
            drawn = torch.rand(rows.shape, generator=generator).to(rows)
            # stochastic rounding of y = x / s: floor(y + u) is y on average, as u >= 1 - (y - floor(y)) with
            # probability y - floor(y). |y| exceeds 127 only by the rounding of s to float32, hence the clamp.
            levels = drawn.add_(rows / step).floor_().clamp_(-127, 127).nan_to_num_(0.0)
            out[entry.name].copy_(levels.view(entry.shape))

    def _decode(self, taken: Sequence[TensorEntry], wire: FlatTensors, out: FlatTensors) -> None:
        for entry in taken:
            scales = wire[_scales(entry)]
            if bool((scales < 0).any()):
                raise InvalidPayload("bad-scale", f"a scale of '{entry.name}' is below 0")
            levels = wire[entry.name].reshape(len(scales), -1).to(torch.promote_types(entry.dtype, torch.float32))
            _reals_of(out, entry).copy_((levels * scales.unsqueeze(1)).view(entry.shape))


def num_rows(shape: tuple[int, ...]) -> int:
    """Return the number of scales for a tensor of this shape: one per row of a large matrix, else 1."""
    return shape[0] if len(shape) > 1 and math.prod(shape[1:]) >= ROW else 1


def _scales(entry: TensorEntry) -> str:
    return f"{entry.name} scales"


@dataclass(frozen=True)
class TopK(Compressor):
    """Compressor that sends only the elements of largest magnitude, over all tensors of one dtype, with their positions.

    Of n elements ``max(1, round(share * n))`` are sent (Stich et al. 2018, definition 2.1). The receiver gets 0 for all
    others; the sender adds them to its next message (error feedback, algorithm 1). Positions are ascending, int32, or
    int64 from 2^31 elements on.
    """

    share: float = 0.1  # share of the elements that are sent
    feeds_back: ClassVar[bool] = True

    def count(self, numel: int) -> int:
        """Return the number of elements to send if the tensors have ``numel`` elements."""
        return min(numel, max(1, round(self.share * numel)))

    def _packed(self, taken: Sequence[TensorEntry]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        for dtype, entries in _by_dtype(taken).items():
            numel = sum(entry.numel for entry in entries)
            count = self.count(numel)
            yield f"{dtype} places", (count,), torch.int32 if numel < 2**31 else torch.int64
            yield f"{dtype} elements", (count,), dtype

    def _encode(self, taken: Sequence[TensorEntry], values: FlatTensors, out: FlatTensors, seed: int) -> None:
        for dtype, entries in _by_dtype(taken).items():
            flat = torch.cat([_reals_of(values, entry).reshape(-1) for entry in entries])
            count = self.count(flat.numel())
            # topk ranks NaN first, so that the receiver gets it and refuses the update
            chosen = flat.abs().topk(count, sorted=False).indices.sort().values
            out[f"{dtype} places"].copy_(chosen)
            out[f"{dtype} elements"].copy_(flat[chosen])

    def _decode(self, taken: Sequence[TensorEntry], wire: FlatTensors, out: FlatTensors) -> None:
        for dtype, entries in _by_dtype(taken).items():
            chosen, numel = wire[f"{dtype} places"].long(), sum(entry.numel for entry in entries)
            if int(chosen[0]) < 0 or int(chosen[-1]) >= numel or not bool((chosen[1:] > chosen[:-1]).all()):
                raise InvalidPayload("bad-indices", f"not {len(chosen)} ascending places below {numel}")
            flat = torch.zeros(numel, dtype=dtype, device=chosen.device)
            flat[chosen] = wire[f"{dtype} elements"]
            for entry, part in zip(entries, torch.split(flat, [entry.numel for entry in entries]), strict=True):
                _reals_of(out, entry).copy_(part.view(entry.shape))


def _by_dtype(entries: Sequence[TensorEntry]) -> dict[torch.dtype, list[TensorEntry]]:
    found: dict[torch.dtype, list[TensorEntry]] = {}
    for entry in entries:
        found.setdefault(entry.dtype, []).append(entry)
    return found


@dataclass(frozen=True)
class Bits(Compressor):
    """Lossless compressor for tensors of zeros and ones: eight elements per byte, the first one in the lowest bit."""

    differences: ClassVar[bool] = False

    def _packed(self, taken: Sequence[TensorEntry]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        return ((entry.name, (-(-entry.numel // 8),), torch.uint8) for entry in taken)

    def _encode(self, taken: Sequence[TensorEntry], values: FlatTensors, out: FlatTensors, seed: int) -> None:
        for entry in taken:
            flat, wire = _reals_of(values, entry).reshape(-1), out[entry.name]
            ones = flat == 1
            if not bool((ones | (flat == 0)).all()):
                raise BadInput(f"tensor '{entry.name}' has elements other than 0 and 1: only masks can be sent as bits")
            bits = torch.zeros(8 * len(wire), dtype=torch.uint8, device=wire.device)
            bits[: entry.numel] = ones
            torch.sum(bits.view(-1, 8) << _places(wire), dim=1, dtype=torch.uint8, out=wire)

    def _decode(self, taken: Sequence[TensorEntry], wire: FlatTensors, out: FlatTensors) -> None:
        for entry in taken:
            packed = wire[entry.name]
            bits = ((packed.unsqueeze(1) >> _places(packed)) & 1).view(-1)
            if bool(bits[entry.numel :].any()):
                raise InvalidPayload("bad-bits", f"'{entry.name}' has more than {entry.numel}")
            _reals_of(out, entry).copy_(bits[: entry.numel].view(entry.shape))


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def compressor(name: str, share: float = 0.1, only: frozenset[str] | None = None) -> Compressor | None:
    """Return the compressor with the given name; None for "none", and for "scalars", which sends no tensors.

    `only`: names of the tensors to compress; None = all.

    Raises:
        BadInput: there is no compressor of that name.
    """
    match name:
        case "none" | "scalars":
            return None
        case "bf16":
            return BFloat16(only)
        case "int8":
            return Int8(only)
        case "top_k":
            return TopK(only, share)
        case "bits":
            return Bits(only)
    raise BadInput(f"compressor is '{name}': {nearest(name, (*NAMES, 'bits'))}")


def up_name(compress: Compress, fixed: str | None) -> str:
    """Return the name of the compressor for updates: the one that the method requires, or else ``compress.up``.

    `fixed`: compressor that the method requires (`Traits.up_as`); None = none.

    Raises:
        BadInput: both are given, and they differ.
    """
    if fixed is not None and compress.up not in ("none", fixed):
        raise BadInput(
            f"compress.up is '{compress.up}', but this algorithm's updates travel as {fixed}: leave compress.up out"
        )
    return compress.up if fixed is None else fixed
