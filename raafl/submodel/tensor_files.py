"""Store tensors in files, for payloads and per-client state that do not fit the server's memory.

The files have no names: nothing is left of them when the run has ended, however it ended.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from raafl.errors import BadInput, RunFailed
from raafl.submodel import FlatTensors, Layout

_libc: Final = ctypes.CDLL(None)
_IN_RAM: Final = ("tmpfs", "ramfs")


class NoRoom(OSError):
    """Raised if a disk has no room for a payload (the tensors of one task)."""


class _Held:
    """Counter of the bytes of all payloads in memory, which threads share."""

    def __init__(self) -> None:
        self.num_bytes, self._lock = 0, threading.Lock()

    def take(self, num_bytes: int, most_bytes: int) -> bool:
        """Count ``num_bytes`` more and return True, or return False if that would exceed ``most_bytes``."""
        with self._lock:
            fits = self.num_bytes + num_bytes <= most_bytes
            self.num_bytes += num_bytes if fits else 0
            return fits

    def give(self, num_bytes: int) -> None:
        """Count ``num_bytes`` fewer, after a payload was freed."""
        with self._lock:
            self.num_bytes -= num_bytes


@dataclass(frozen=True, slots=True)
class PayloadRoom:
    """Allocator of storage for payloads (the tensors of one task): in memory, or in files for large ones and for too many.

    A file's content need not stay in memory: the operating system can write it to disk and free the memory.
    """

    folder: str | None = None  # folder of the files; None = all payloads are in memory
    most_bytes: int = 0  # largest payload that is stored in memory, in bytes
    # bytes of all payloads in memory together: 10,000 clients may have one each
    most_in_all_bytes: int = 1 << 30
    _held: _Held = field(default_factory=_Held, compare=False)

    def __call__(self, layout: Layout, device: torch.device | str = "cpu") -> FlatTensors:
        """Allocate storage for ``layout`` in memory or in a file, uninitialised; raises NoRoom if the disk is full."""
        return self._made(FlatTensors.empty, layout, device)

    def zeros(self, layout: Layout, device: torch.device | str = "cpu") -> FlatTensors:
        """Return storage for ``layout``, filled with zeros.

        Raises:
            NoRoom: the disk is full.
        """
        return self._made(FlatTensors.zeros, layout, device)

    def _made(
        self, make: Callable[[Layout, torch.device | str], FlatTensors], layout: Layout, device: torch.device | str
    ) -> FlatTensors:
        num_bytes = layout.num_bytes
        if self.folder is None or torch.device(device).type != "cpu":
            return make(layout, device)
        if num_bytes > self.most_bytes or not self._held.take(num_bytes, self.most_in_all_bytes):
            return self._in_files(layout)
        made = make(layout, device)
        weakref.finalize(made, self._held.give, num_bytes).atexit = False
        return made

    def _in_files(self, layout: Layout) -> FlatTensors:
        assert self.folder is not None
        try:
            return _in_files(self.folder, layout)
        except OSError as error:
            raise NoRoom(
                f"'{self.folder}' has no room for a payload of {layout.num_bytes:,} bytes ({error.strerror}): free some space, or "
                "keep payloads in memory with payload_memory_bytes null"
            ) from error


class InFile(Tensor):
    """A 1-D tensor whose memory is a temporary file. A clone gets another file; results of operations are in ordinary memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    folder: str

    def clone(self, *_: object, **__: object) -> Tensor:
        """Return a copy in a temporary file of its own, which takes no memory; in ordinary memory if the disk is full."""
        try:
            copy = _mapped(self.folder, self.numel(), self.dtype)
        except OSError:
            return super().clone()
        copy.copy_(self)
        _release(copy)
        _release(self)
        return copy


def zeros_in(folder: str, layout: Layout) -> FlatTensors:
    """Return zeros for ``layout`` that are stored in files in ``folder``; clones are stored there, too.

    Raises:
        RunFailed: the disk is full.
    """
    try:
        return _in_files(folder, layout)
    except OSError as error:
        raise RunFailed(
            f"memory_folder is '{folder}', which has no room to store the latest update of one more client "
            f"({layout.num_bytes:,} bytes): {error.strerror}; make room, and continue with --resume"
        ) from error


def _in_files(folder: str, layout: Layout) -> FlatTensors:
    buffers: dict[torch.dtype, Tensor] = {}
    for dtype, numel in layout.numel.items():
        buffers[dtype] = buffer = _mapped(folder, numel, dtype).as_subclass(InFile)
        buffer.folder = folder
    return FlatTensors(layout, buffers)


def is_in_files(flat: FlatTensors) -> bool:
    """Check whether the buffers of ``flat`` are stored in files, as those from `zeros_in` are."""
    return all(isinstance(buffer, InFile) for buffer in flat.buffers.values())


def release(flat: FlatTensors) -> None:
    """Free the memory in which the files of ``flat`` are cached; no effect on tensors that are not in files."""
    for buffer in flat.buffers.values():
        if isinstance(buffer, InFile):
            _release(buffer)


def check_folder(folder: str) -> None:
    """Raise `BadInput` unless files can be created in ``folder``."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(
            f"memory_folder is '{folder}', in which no file can be created: {error.strerror}; name a folder on a "
            "disk with free space"
        ) from error


def check_room(folder: str, num_bytes: int, what: str) -> None:
    """Raise `BadInput` if the disk of ``folder`` has too little free space."""
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        raise BadInput(
            f"memory_folder is '{folder}', which has {free:,} bytes free, but {num_bytes:,} are needed: {what}; "
            "make room, or name another folder"
        )


def is_in_ram(folder: str) -> bool:
    """Check whether files in ``folder`` are stored in memory, as in a RAM disk."""
    place = Path(folder).resolve()
    kinds = [line.split(" ")[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    around = [(len(point), kind) for point, kind in kinds if place.is_relative_to(point)]
    return bool(around) and max(around, key=lambda pair: pair[0])[1] in _IN_RAM


def _mapped(folder: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Create a file of zeros and map it into memory; its disk space is reserved, as a write to a full disk would be fatal."""
    if numel == 0:
        return torch.zeros(0, dtype=dtype)
    file, path = tempfile.mkstemp(prefix="raafl-", dir=folder)
    try:
        os.posix_fallocate(file, 0, numel * dtype.itemsize)
        return torch.from_file(path, shared=True, size=numel, dtype=dtype)
    except RuntimeError as error:  # torch raises this if the process has mapped too many files (vm.max_map_count)
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)} ({str(error).splitlines()[0]})") from None
    finally:
        os.close(file)
        os.unlink(path)


def _release(tensor: Tensor) -> None:
    if tensor.numel():
        size = ctypes.c_size_t(tensor.numel() * tensor.itemsize)
        _libc.madvise(ctypes.c_void_p(tensor.data_ptr()), size, mmap.MADV_DONTNEED)
