"""Define rules of operations that take windows of their input, or move its pixels; see `operations`."""

from __future__ import annotations

from torch import Tensor

from raafl.submodel.find.labels import Dim, ShapeConflict
from raafl.submodel.find.operations import Call, Dims, rule

_PIXELS = "they are pixels"
_WINDOWS = "windows of it are taken"


@rule("constant_pad_nd")
def _pad(call: Call) -> list[Dims]:
    dims, pad = call.dims(), call["pad"]
    for back in range(len(pad) // 2):
        if pad[2 * back] or pad[2 * back + 1]:
            call.labels.pin(dims[-1 - back], "it is padded")
            dims[-1 - back] = call.labels.new(call.outs[0].shape[-1 - back], "it is padded")
    return [dims]


@rule("unfold")
def _unfold(call: Call) -> list[Dims]:
    dims, place, out = call.dims(), call["dimension"] % call.ins[0].dim(), call.outs[0]
    call.labels.pin(dims[place], _WINDOWS)
    dims[place], inside = call.new((out.shape[place], out.shape[-1]), _WINDOWS)
    return [[*dims, inside]]


@rule("im2col")
def _im2col(call: Call) -> list[Dims]:
    (*samples, channels, high, wide), out = call.dims(), call.outs[0]
    for dim in (high, wide):
        call.labels.pin(dim, _PIXELS)
    places, windows = call.new((out.shape[-2] // channels.size, out.shape[-1]), _WINDOWS)
    return [[*samples, Dim([*channels.atoms, *places.atoms]), windows]]


@rule("col2im")
def _col2im(call: Call) -> list[Dims]:
    (*samples, rows, windows), out = call.dims(), call.outs[0]
    channels, places = call.labels.regroup([rows], [out.shape[-3], rows.size // out.shape[-3]])
    for dim in (places, windows):
        call.labels.pin(dim, _WINDOWS)
    return [[*samples, channels, *call.new(out.shape[-2:], _PIXELS)]]


@rule("as_strided")
def _as_strided(call: Call) -> list[Dims]:
    """Follow a dimension through which no other runs, neither before nor after; of the others, windows are taken."""
    x, out = call.ins[0], call.outs[0]
    if x.storage_offset() != out.storage_offset():
        raise ShapeConflict
    dims = call.dims()
    known = {laid: dim for laid, dim in zip(_laid(x), dims, strict=True) if laid is not None}
    found: list[Dim] = []
    for laid, size in zip(_laid(out), out.shape, strict=True):
        same = known.pop(laid, None) if laid is not None else None
        found.append(call.labels.new(size, _WINDOWS) if same is None else same)
    for dim in dims:
        if not any(dim is other for other in found):
            call.labels.pin(dim, _WINDOWS)
    return [found]


def _laid(x: Tensor) -> list[tuple[int, int] | None]:
    """Return size and stride of each dimension whose index an element's address tells; None of the others."""
    laid: list[tuple[int, int]] = [(n, step) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1]
    found: list[tuple[int, int] | None] = []
    for size, step in zip(x.shape, x.stride(), strict=True):
        inner = sum((n - 1) * by for n, by in laid if by < step)
        others = [by for n, by in laid if by >= step and (n, by) != (size, step)]
        told = (
            size > 1 and laid.count((size, step)) == 1 and inner < step and not any(by % (size * step) for by in others)
        )
        found.append((size, step) if told else None)
    return found


@rule("pixel_shuffle")
def _pixel_shuffle(call: Call) -> list[Dims]:
    dims, factor = call.dims(), call["upscale_factor"]
    channels, *inner = call.labels.regroup([dims[-3]], [dims[-3].size // factor**2, factor, factor])
    for dim in (*inner, *dims[-2:]):
        call.labels.pin(dim, _PIXELS)
    return [[*dims[:-3], channels, *call.new(call.outs[0].shape[-2:], _PIXELS)]]


@rule("pixel_unshuffle")
def _pixel_unshuffle(call: Call) -> list[Dims]:
    (*samples, channels, high, wide), factor = call.dims(), call["downscale_factor"]
    for dim in (high, wide):
        call.labels.pin(dim, _PIXELS)
    inner = call.new((factor, factor), _PIXELS)
    channels = Dim([*channels.atoms, *(atom for dim in inner for atom in dim.atoms)])
    return [[*samples, channels, *call.new(call.outs[0].shape[-2:], _PIXELS)]]


@rule("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(call: Call) -> list[Dims]:
    dims, groups = call.dims(), call["groups"]
    outer, inner = call.labels.regroup([dims[1]], [groups, dims[1].size // groups])
    call.labels.pin(outer, "channels are shuffled by their groups")
    return [[dims[0], Dim([*inner.atoms, *outer.atoms]), *dims[2:]]]


@rule("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(call: Call) -> list[Dims]:
    x, grid, out = call.dims("input"), call.dims("grid"), call.outs[0]
    call.labels.unify(x[0], grid[0])
    for dim in (*x[2:], *grid[1:]):
        call.labels.pin(dim, _PIXELS)
    return [[*x[:2], *call.new(out.shape[2:], _PIXELS)]]


@rule("max_unpool2d", "max_unpool3d")
def _max_unpool(call: Call) -> list[Dims]:
    x, indices, out = call.dims("self"), call.dims("indices"), call.outs[0]
    pixels = 2 if call.name == "max_unpool2d" else 3
    for dim, index in zip(x[:-pixels], indices, strict=False):
        call.labels.unify(dim, index)
    for dim in x[-pixels:]:
        call.labels.pin(dim, _PIXELS)
    return [[*x[:-pixels], *call.new(out.shape[-pixels:], _PIXELS)]]
