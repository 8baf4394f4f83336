"""A TCP proxy on loopback that does to chosen connections what networks do: delay, throttle, hold, corrupt, cut."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import struct
import threading
from typing import Self

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time to linger: close says RST, not FIN


class Side:
    """One direction of a link. The fields may be set from any thread; each chunk looks at them as it passes.

    Attributes:
        delay_s: each chunk waits so long.
        bytes_per_s: chunks are passed on at this rate; None = as they come.
        held: nothing passes, and nothing is lost, until it is False again.
        flip: how many of the next chunks get one bit flipped.
        num_bytes: passed so far.
        num_flipped: bits flipped so far.
    """

    def __init__(self) -> None:
        self.delay_s, self.bytes_per_s, self.held, self.flip = 0.0, None, False, 0
        self.num_bytes = self.num_flipped = 0
        self.bytes_per_s: float | None

    def clear(self) -> None:
        """Let what comes pass as it is."""
        self.delay_s, self.bytes_per_s, self.held, self.flip = 0.0, None, False, 0


class Link:
    """One connection through the proxy, from the one who called (``up``) and back (``down``)."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop, ends: list[asyncio.StreamWriter]) -> None:
        self.number, self.up, self.down = number, Side(), Side()
        self._loop, self._ends = loop, ends

    def cut(self, *, reset: bool = True) -> None:
        """Break the connection on both sides, by RST or by FIN; from any thread."""
        with contextlib.suppress(RuntimeError):  # the proxy has been closed
            self._loop.call_soon_threadsafe(self._cut, reset)

    def _cut(self, reset: bool) -> None:
        for end in self._ends:
            if reset:
                with contextlib.suppress(OSError, AttributeError):
                    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.transport.abort()
            else:
                end.close()


class FaultProxy:
    """Listens on a port of its own and passes every connection on to ``port``; with faults, as `Link` and `Side` say."""

    def __init__(self, port: int, seed: int = 0) -> None:
        """Prepare; entering starts a thread."""
        self._target, self._random, self._numbers = port, random.Random(seed), itertools.count(1)
        self._links: dict[int, Link] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def links(self) -> list[Link]:
        """The connections there are, oldest first."""
        return [link for _, link in sorted(self._links.copy().items())]

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener)
        await self._stop.wait()
        server.close()
        for link in self.links():
            link._cut(reset=True)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        number = next(self._numbers)
        link = self._links[number] = Link(number, self._loop, [writer, far_writer])
        try:
            up = self._pump(reader, far_writer, link.up)
            down = self._pump(far_reader, writer, link.down)
            await asyncio.gather(up, down)
        except OSError:  # one end is gone, so the other is told
            link._cut(reset=True)
        finally:
            del self._links[number]
            for end in (writer, far_writer):
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, side: Side) -> None:
        while chunk := await reader.read(_CHUNK):
            if side.delay_s:
                await asyncio.sleep(side.delay_s)
            while side.held:
                await asyncio.sleep(0.02)
            if side.flip:
                chunk = self._flipped(chunk)
                side.flip, side.num_flipped = side.flip - 1, side.num_flipped + 1
            while chunk:
                rate = side.bytes_per_s
                piece = chunk if rate is None else chunk[: max(1, int(rate / 20))]
                side.num_bytes += len(piece)  # first: whoever has received a byte may ask at once
                writer.write(piece)
                await writer.drain()
                chunk = chunk[len(piece) :]
                if rate is not None:
                    await asyncio.sleep(len(piece) / rate)
        if writer.can_write_eof():
            writer.write_eof()

    def _flipped(self, chunk: bytes) -> bytes:
        bit = self._random.randrange(8 * len(chunk))
        changed = bytearray(chunk)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)
