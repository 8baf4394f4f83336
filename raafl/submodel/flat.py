"""Store all tensors of a model in one contiguous buffer per dtype, with a layout that names them.

A merge, a checksum or a send then works on one buffer instead of hundreds of tensors.
"""

from __future__ import annotations

import cmath
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash
from torch import Tensor

from raafl.errors import BadInput

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
"""Every dtype that flat storage and the wire know, by name."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_merged(dtype: torch.dtype) -> bool:
    """Check whether tensors of ``dtype`` can be trained and merged: real and complex floating-point numbers."""
    return dtype.is_floating_point or dtype.is_complex


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are summed: real, of at least 32 bits; integers keep their dtype."""
    return torch.promote_types(dtype.to_real(), torch.float32) if is_merged(dtype) else dtype


def reals(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a view of pairs of real numbers, shape ``(*shape, 2)``; other tensors are returned unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One named tensor of a layout: its shape, and the position of its first element in the flat buffer of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the tensor's contiguous view, in elements."""
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= size
        return tuple(reversed(strides))


@dataclass(frozen=True)
class Layout:
    """Positions of named tensors in flat buffers, one per dtype. Equal layouts have equal fingerprints."""

    entries: tuple[TensorEntry, ...]

    @classmethod
    def pack(cls, tensors: Iterable[tuple[str, Iterable[int], torch.dtype]]) -> Layout:
        """Return the layout that packs tensors, given as ``(name, shape, dtype)``, one after the other.

        Raises:
            BadInput: a name occurs twice, or a dtype is not in `DTYPES`.
        """
        ends: dict[torch.dtype, int] = {}
        entries: dict[str, TensorEntry] = {}
        for name, shape, dtype in tensors:
            if name in entries:
                raise BadInput(f"tensor '{name}' occurs twice in the layout: give each tensor its own name")
            if dtype not in DTYPE_NAMES:
                raise BadInput(f"tensor '{name}' has dtype {dtype}: convert it to one of {', '.join(DTYPES)}")
            entry = entries[name] = TensorEntry(name, tuple(shape), dtype, ends.get(dtype, 0))
            ends[dtype] = entry.offset + entry.numel
        return cls(tuple(entries.values()))

    @cached_property
    def numel(self) -> dict[torch.dtype, int]:
        """Number of elements in the buffer of each dtype, in the order of the buffers."""
        ends: dict[torch.dtype, int] = {}
        for entry in self.entries:
            ends[entry.dtype] = max(ends.get(entry.dtype, 0), entry.offset + entry.numel)
        return ends

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the buffers, in the order in which they first occur among the tensors."""
        return tuple(self.numel)

    @cached_property
    def num_bytes(self) -> int:
        """Number of bytes of all buffers."""
        return sum(numel * dtype.itemsize for dtype, numel in self.numel.items())

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """Shape and position of each tensor, by name."""
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def wide(self) -> Layout:
        """Layout for exact sums: half precision as single, complex tensors as pairs of real numbers; self if nothing changes."""
        if all(wide_dtype(dtype) == dtype for dtype in self.dtypes):
            return self
        return Layout.pack(
            (e.name, (*e.shape, 2) if e.dtype.is_complex else e.shape, wide_dtype(e.dtype)) for e in self.entries
        )

    @cached_property
    def single_copy_bytes(self) -> int:
        """Bytes of a single-precision copy of all half-precision tensors, for exact sums; 0 if there are none."""
        return sum(4 * numel for dtype, numel in self.numel.items() if is_merged(dtype) and dtype.itemsize == 2)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by name."""
        return {entry.name: entry.shape for entry in self.entries}

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of names, shapes, dtypes and order; the same on every machine."""
        return hashlib.blake2b(json.dumps(self.to_json()).encode(), digest_size=16).hexdigest()

    @cached_property
    def _hash(self) -> int:
        return hash(self.entries)

    def __hash__(self) -> int:
        """Return the hash of the entries, computed once since layouts are keys of many caches."""
        return self._hash

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain data; positions are left out, since they follow from the order."""
        return {"tensors": [[e.name, list(e.shape), DTYPE_NAMES[e.dtype]] for e in self.entries]}

    def only(self, names: Collection[str]) -> Layout:
        """Return a layout with only the tensors in ``names``, in this layout's order."""
        return Layout.pack((e.name, e.shape, e.dtype) for e in self.entries if e.name in names)

    def is_prefix_of(self, other: Layout) -> bool:
        """Check whether each buffer of this layout is the beginning of the same buffer of ``other``."""
        return all(other.by_name.get(entry.name) == entry for entry in self.entries)


class FlatTensors:
    """Named tensors, stored as views into one flat buffer per dtype.

    Attributes:
        layout: names, shapes and positions of the tensors.
        buffers: one contiguous 1-D tensor per dtype, in the layout's order, which may be a view into larger storage.
            Write into them, but never replace them, since views of them are cached.
        views: cache of further views, which `CopyPlan` uses.
    """

    __slots__ = ("__weakref__", "buffers", "layout", "views")

    def __init__(self, layout: Layout, buffers: dict[torch.dtype, Tensor]) -> None:
        """Combine a layout with buffers of its dtypes and lengths.

        Raises:
            BadInput: a buffer is missing, has another length or dtype, or is not contiguous.
        """
        for dtype, numel in layout.numel.items():
            buffer = buffers.get(dtype)
            if buffer is None or buffer.dtype != dtype or buffer.shape != (numel,) or not buffer.is_contiguous():
                raise BadInput(f"the {dtype} buffer does not fit the layout: give {numel} contiguous elements in 1-D")
        self.layout = layout
        self.buffers = {dtype: buffers[dtype] for dtype in layout.dtypes}
        self.views: dict[Any, list[list[Tensor]]] = {}

    @classmethod
    def unchecked(cls, layout: Layout, buffers: dict[torch.dtype, Tensor]) -> FlatTensors:
        """Combine a layout with buffers that fit it by construction, in the order of its dtypes; see the constructor.

        Args:
            layout: names, shapes and positions of the tensors.
            buffers: a contiguous tensor of shape (elements,) for each dtype of the layout.
        """
        flat = cls.__new__(cls)
        flat.layout, flat.buffers, flat.views = layout, buffers, {}
        return flat

    @classmethod
    def empty(cls, layout: Layout, device: torch.device | str = "cpu") -> FlatTensors:
        """Return uninitialised storage for the tensors of ``layout``.

        Args:
            layout: names, shapes and positions of the tensors.
            device: device of the storage.
        """
        return cls.unchecked(layout, {d: torch.empty(n, dtype=d, device=device) for d, n in layout.numel.items()})

    @classmethod
    def zeros(cls, layout: Layout, device: torch.device | str = "cpu") -> FlatTensors:
        """Return storage for the tensors of ``layout``, filled with zeros, on a device."""
        return cls.unchecked(layout, {d: torch.zeros(n, dtype=d, device=device) for d, n in layout.numel.items()})

    @classmethod
    def from_named(cls, tensors: Mapping[str, Tensor], layout: Layout | None = None) -> FlatTensors:
        """Copy named tensors into new storage with one buffer per dtype.

        Args:
            tensors: tensors by name.
            layout: layout of the result; None = pack the tensors in the order of the mapping.

        Raises:
            BadInput: a tensor of ``layout`` is missing or has another shape or dtype.
        """
        if layout is None:
            layout = Layout.pack((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        first = next(iter(tensors.values()), None)
        flat = cls.empty(layout, "cpu" if first is None else first.device)
        for entry in layout.entries:
            tensor = tensors.get(entry.name)
            if tensor is None or tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                found = "missing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise BadInput(f"tensor '{entry.name}' is {found}: give {entry.shape} {entry.dtype}")
            flat[entry.name].copy_(tensor.detach())
        return flat

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor called ``name``, as a view of the buffer."""
        return self.view(self.layout.by_name[name])

    def view(self, entry: TensorEntry) -> Tensor:
        """Return the tensor of ``entry`` as a view; the entry must belong to this layout."""
        buffer = self.buffers[entry.dtype]
        return buffer.as_strided(entry.shape, entry.stride, buffer.storage_offset() + entry.offset)

    def __contains__(self, name: object) -> bool:
        """Check whether there is a tensor of that name."""
        return name in self.layout.by_name

    def __len__(self) -> int:
        """Return the number of tensors in the layout."""
        return len(self.layout.entries)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as (name, view), in the layout's order."""
        for entry in self.layout.entries:
            yield entry.name, self.view(entry)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all buffers."""
        return self.layout.num_bytes

    @property
    def device(self) -> torch.device:
        """Device of the buffers; the CPU if there are none."""
        for buffer in self.buffers.values():
            return buffer.device
        return torch.device("cpu")

    def copy_(self, other: FlatTensors) -> FlatTensors:
        """Copy the values of ``other``, which has the same layout, into this storage; return self."""
        same_layout(self.layout, other.layout)
        for dtype, buffer in self.buffers.items():
            buffer.copy_(other.buffers[dtype])
        return self

    def take_(self, other: FlatTensors) -> FlatTensors:
        """Copy into this storage those tensors of ``other`` whose names occur in both; return self."""
        for name, tensor in self.items():
            if name in other:
                tensor.copy_(other[name])
        return self

    def zero_(self) -> FlatTensors:
        """Set every element to 0, in place; return self."""
        for buffer in self.buffers.values():
            buffer.zero_()
        return self

    def clone(self) -> FlatTensors:
        """Return a copy with storage of its own."""
        return FlatTensors.unchecked(self.layout, {dtype: buffer.clone() for dtype, buffer in self.buffers.items()})

    def to(self, device: torch.device | str) -> FlatTensors:
        """Return the same values on ``device``: self if they are there already, or else a copy."""
        device = torch.device(device)
        if device == torch.device("cuda"):  # the current GPU has an index, without which devices would compare unequal
            device = torch.device("cuda", torch.cuda.current_device())
        if device == self.device:
            return self
        return FlatTensors.unchecked(self.layout, {dtype: buffer.to(device) for dtype, buffer in self.buffers.items()})

    def prefix(self, layout: Layout) -> FlatTensors:
        """Return the tensors of ``layout``, the first of each dtype here, as flat tensors that share the storage.

        Raises:
            BadInput: the tensors in ``layout`` are not the first ones here.
        """
        if not layout.is_prefix_of(self.layout):
            raise BadInput(
                "layout does not start with the same tensors: only the first tensors of each dtype can be viewed; "
                "copy the others"
            )
        return FlatTensors.unchecked(layout, {dtype: self.buffers[dtype][:n] for dtype, n in layout.numel.items()})

    def is_finite(self) -> bool:
        """Check whether no element is NaN or infinite."""
        return all(is_finite(buffer) for buffer in self.buffers.values())

    def sums(self) -> list[Tensor]:
        """Return a real number for each buffer, on its device: finite only if all its elements are."""
        buffers = [b for b in self.buffers.values() if is_merged(b.dtype)]
        return [torch.view_as_real(b).sum() if b.is_complex() else _sum(b) for b in buffers]

    def fingerprint(self) -> str:
        """Return the xxh3_128 digest of all bytes, as hexadecimal digits."""
        digest = xxhash.xxh3_128()
        for buffer in self.buffers.values():
            digest.update(_bytes(buffer))
        return digest.hexdigest()

    def model_digest(self) -> str:
        """Return the sha256 digest of names, dtypes, shapes and values, in the order of names, as hexadecimal digits."""
        digest = hashlib.sha256()
        for entry in sorted(self.layout.entries, key=lambda e: e.name):
            digest.update(json.dumps([entry.name, DTYPE_NAMES[entry.dtype], list(entry.shape)]).encode())
            digest.update(_bytes(self.buffers[entry.dtype][entry.offset : entry.offset + entry.numel]))
        return digest.hexdigest()

    def __repr__(self) -> str:
        """Describe the tensors by their number, bytes and device."""
        return f"FlatTensors({len(self)} tensors, {self.num_bytes} bytes, {self.device})"


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of all elements' bits as integers, modulo 2^64: an int64 scalar on the tensor's device."""
    return tensor.detach().contiguous().flatten().view(_WORDS[min(tensor.element_size(), 8)]).sum(dtype=torch.int64)


def same_layout(one: Layout, other: Layout) -> None:
    """Raise `BadInput` unless two layouts are equal."""
    if one is not other and one.fingerprint != other.fingerprint:
        raise BadInput("flat tensors have different layouts: make both from the same model, spec and part")


def _bytes(buffer: Tensor) -> Any:
    if buffer.dtype is torch.float32 and buffer.device.type == "cpu" and not buffer.requires_grad:
        return buffer.numpy()  # eight times as fast as what follows, which counts for small tasks
    return buffer.detach().cpu().view(torch.uint8).numpy()


def is_finite(piece: Tensor) -> bool:
    """Check that a tensor has no NaN or infinity: a finite sum proves it; if the sum is not finite, test each element.

    A tensor on the meta device has no values, so none that is not finite.
    """
    if not is_merged(piece.dtype) or piece.is_meta:
        return True
    return cmath.isfinite(_sum(piece).item()) or bool(torch.isfinite(piece).all())


def _sum(piece: Tensor) -> Tensor:
    """Return a tensor's sum, which is NaN if any element is; half precision is summed in float32, against overflow."""
    return piece.sum(dtype=torch.float32 if piece.dtype.itemsize == 2 else None)


CHUNK = 1 << 16
"""Elements processed at a time on a CPU, so that intermediate results stay in its cache."""


ACCELERATOR_CHUNK = 1 << 24
"""Elements processed at a time on an accelerator: few enough that intermediate results take little memory."""


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split equally large tensors into matching pieces, to save memory, and yield these as flat views."""
    flat = [tensor.view(-1) for tensor in tensors]
    size = CHUNK if flat[0].device.type == "cpu" else ACCELERATOR_CHUNK
    if flat[0].numel() <= size:  # to split the tensors of a small model costs more than its arithmetic
        return iter((tuple(flat),))
    return zip(*(torch.split(tensor, size) for tensor in flat), strict=True)
