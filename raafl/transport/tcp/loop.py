"""Read and write many sockets on one thread: those of all clients of a server, admitted or not, and their deadlines.

The thread runs an asyncio loop, which brings timers in one heap, locks, tasks, and waking from other threads. It only waits for
the sockets: bytes pass through this package's own streams (`raafl.transport.tcp.stream`), straight into the storage of tensors.
asyncio's own TLS would keep 256 KiB for each connection, 2.6 GB for ten thousand, and copy every byte twice more.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import queue
import resource
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Generic

from raafl.transport.tcp.stream import T, Wait, Waits

TICK_S = 0.25
"""Seconds between two looks at how busy the loop is, while a session waits for its client by `Patience`."""

_MOST_SLOWLY = 10  # factor by which `Patience` is slowed down where the loop is always busy
_MAX_CODECS = 4  # largest number of threads that encode and decode messages


class Mailbox(Generic[T]):
    """Queue into which other threads put what a session waits for.

    `wake`: called after an item was put; None = nobody waits without a thread.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.wake: Callable[[], None] | None = None

    def put(self, item: T) -> None:
        """Add an item; callable from any thread."""
        self._items.put(item)
        if (wake := self.wake) is not None:
            wake()

    def get(self, timeout_s: float = 0.0) -> T:
        """Return the next item; raise `queue.Empty` if there is none within ``timeout_s`` seconds."""
        return self._items.get(timeout=timeout_s) if timeout_s > 0 else self._items.get_nowait()

    def nudge(self) -> None:
        """Wake the waiting session although no item has come; to be called on the loop's thread."""
        if (wake := self.wake) is not None:
            wake()

    @property
    def is_empty(self) -> bool:
        """Whether no item waits."""
        return self._items.empty()


class Reminders:
    """Calls to many, each once in so many seconds while it wants them, by one timer: a timer each would wake the loop each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, every_s: float) -> None:
        self._loop, self._every_s = loop, every_s
        self._look_s = min(every_s / 4, 1.0)  # a reminder is late by at most this many seconds
        # all wait equally long, so the order of insertion is that of the times
        self._due: dict[Callable[[], None], float] = {}
        self._is_running = False

    def add(self, function: Callable[[], None]) -> None:
        """Call a function in so many seconds, and again and again; to be called on the loop's thread."""
        self._due[function] = time.monotonic() + self._every_s
        if not self._is_running:
            self._is_running = True
            self._loop.call_later(self._look_s, self._look)

    def discard(self, function: Callable[[], None]) -> None:
        """Call it no more; to be called on the loop's thread."""
        self._due.pop(function, None)

    def _look(self) -> None:
        now = time.monotonic()
        due = [function for function, _ in itertools.takewhile(lambda item: item[1] <= now, self._due.items())]
        for function in due:
            del self._due[function]
            self._due[function] = now + self._every_s
        for function in due:
            function()
        self._is_running = bool(self._due)
        if self._is_running:
            self._loop.call_later(self._look_s, self._look)


class _Selector(selectors.DefaultSelector):
    """Selector that adds up the seconds in which nothing was ready, `idle_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.idle_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for sockets; see `selectors.BaseSelector.select`."""
        # sockets that became ready while another thread or process had the processor are no idle time
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        since = time.monotonic()
        ready = super().select(timeout)
        self.idle_s += min(time.monotonic() - since, math.inf if timeout is None else timeout)
        return ready


class Patience:
    """Clock by which a server waits for clients; it runs slowly while the clients wait for the server.

    A tick counts in full if the loop had nothing to do for a tenth of it and the run's loop owes no client an answer, else as a
    tenth of it at least. Time in which the process did not run (a suspended machine) counts as one tick.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, selector: _Selector) -> None:
        self._loop, self._selector = loop, selector
        self._elapsed_s = self._looked_s = self._idle_s = 0.0
        self._num_waits = self._num_asked = 0
        self._is_ticking = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the clock run during the ``with`` block; to be used on the loop's thread."""
        self._num_waits += 1
        if not self._is_ticking:
            self._is_ticking, self._looked_s, self._idle_s = True, time.monotonic(), self._selector.idle_s
            self._loop.call_later(TICK_S, self._tick)
        try:
            yield
        finally:
            self._num_waits -= 1

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Slow the clock down while the server owes a client an answer; to be used on the loop's thread."""
        self._num_asked += 1
        try:
            yield
        finally:
            self._num_asked -= 1

    @property
    def now(self) -> float:
        """Seconds on this clock."""
        return self._elapsed_s

    def _tick(self) -> None:
        now, idle_s = time.monotonic(), self._selector.idle_s
        passed_s = min(now - self._looked_s, TICK_S)
        free_s = 0.0 if self._num_asked else idle_s - self._idle_s
        self._elapsed_s += min(passed_s, max(passed_s / _MOST_SLOWLY, _MOST_SLOWLY * free_s))
        self._looked_s, self._idle_s = now, idle_s
        self._is_ticking = self._num_waits > 0
        if self._is_ticking:
            self._loop.call_later(TICK_S, self._tick)


class _Watch:
    """A socket that the event loop watches for reading or for writing, with the futures that wait for it.

    It stays registered when nothing waits, since registering it for each message costs two system calls. `has_fired`:
    whether the waiting futures were set since the loop last reported the socket; a report of bytes that are still
    unread sets none.
    """

    __slots__ = ("has_fired", "sock", "waiting")

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.waiting, self.has_fired = weakref.ref(sock), list[asyncio.Future[bool]](), False


class SocketLoop:
    """A thread that reads and writes many sockets."""

    def __init__(self) -> None:
        selector = _Selector()
        self._loop = asyncio.SelectorEventLoop(selector)
        self.patience = Patience(self._loop, selector)
        self._thread = threading.Thread(target=self._run, name="sockets", daemon=True)
        self._codecs = ThreadPoolExecutor(min(_MAX_CODECS, os.cpu_count() or 1), "codec")
        self._tasks: set[asyncio.Task[Any]] = set()
        # by descriptor, and whether it is watched for writing
        self._watches: dict[tuple[int, bool], _Watch] = {}
        # calls from other threads, which together wake the loop once
        self._posted: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_woken = False
        self._reminders: dict[float, Reminders] = {}  # reminders by their interval in seconds

    def start(self) -> SocketLoop:
        """Start the thread; return the loop. The process may then open as many files as the system lets it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with suppress(ValueError, OSError):  # macOS has a lower limit
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread, and whatever still runs on it."""
        if self._thread.ident is not None:
            self.post(self._loop.stop)
            self._thread.join()
        self._codecs.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the loop's thread soon; callable from any thread. Nothing happens once the loop has ended."""
        self._posted.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._call_posted)

    def _call_posted(self) -> None:
        self._is_woken = False  # reset first, so that a call posted from now on is seen below or wakes the loop again
        while self._posted:
            function, args = self._posted.popleft()
            # schedule the call, so that an error in it does not stop the others
            self._loop.call_soon(function, *args)

    def begin(self, steps: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Perform a coroutine beside the others; to be called on the loop's thread."""
        task = self._loop.create_task(steps)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drive(self, steps: Waits[T], mailbox: Mailbox[Any] | None = None) -> T:
        """Perform the steps of a transfer; return their result. Waits end early once ``mailbox`` has an item."""
        is_ready: Any = None
        try:
            while True:
                wait = steps.send(is_ready)
                is_ready = await self._wait(wait, mailbox)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    async def pause(self, seconds: float, mailbox: Mailbox[Any]) -> None:
        """Wait until ``mailbox`` has an item, or for so long."""
        await self._wait(Wait(None, False, seconds), mailbox)

    async def sleep(self, seconds: float) -> None:
        """Wait for so long."""
        await asyncio.sleep(seconds)

    async def compute(self, function: Callable[[], T]) -> T:
        """Call a function on a thread that encodes and decodes; return its result."""
        return await self._loop.run_in_executor(self._codecs, function)

    async def work(self, function: Callable[[], T]) -> T:
        """Call a function on a thread of its own, since it may wait for this loop; return its result."""
        done: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                self.post(_fail, done, error)
            else:
                self.post(_settle, done, result)

        threading.Thread(target=run, name="work", daemon=True).start()
        return await done

    def wait_for(self, steps: Coroutine[Any, Any, T]) -> T:
        """Perform a coroutine on the loop's thread; return its result. Callable from any other thread, which waits."""
        return asyncio.run_coroutine_threadsafe(steps, self._loop).result()

    def reminders(self, every_s: float) -> Reminders:
        """Return an object that calls functions on the loop's thread, each every ``every_s`` seconds."""
        if every_s not in self._reminders:
            self._reminders[every_s] = Reminders(self._loop, every_s)
        return self._reminders[every_s]

    def add_reader(self, sock: socket.socket, function: Callable[[], None]) -> None:
        """Call a function whenever a socket has something to read; to be called on the loop's thread."""
        self._loop.add_reader(sock, function)

    def remove_reader(self, sock: socket.socket) -> None:
        """Call it no more; to be called on the loop's thread."""
        self._loop.remove_reader(sock)

    def forget(self, sock: socket.socket) -> None:
        """Watch a socket no more that another process goes on to use; to be called on the loop's thread, before it is closed.

        The system would go on to report it, since closing this process's descriptor does not close the connection.
        """
        for key in ((sock.fileno(), False), (sock.fileno(), True)):
            if key in self._watches:
                self._watch_no_more(key)

    async def _wait(self, wait: Wait, mailbox: Mailbox[Any] | None) -> bool:
        """Wait until a socket is ready, a mailbox has an item or time is up; return whether the socket is ready."""
        descriptor = -1
        if wait.stream is not None and (descriptor := wait.stream.sock.fileno()) < 0:
            return True  # closed by another thread: the next read or write raises
        if wait.timeout_s <= 0:
            await asyncio.sleep(0)
            return wait.stream is not None and wait.stream.poll(wait.writes, 0)
        done: asyncio.Future[bool] = self._loop.create_future()
        timer = None if wait.timeout_s == math.inf else self._loop.call_later(wait.timeout_s, _settle, done, False)
        if mailbox is not None:
            mailbox.wake = lambda: self.post(_settle, done, False)
            if not mailbox.is_empty:  # an item arrived before `wake` was set
                _settle(done, False)
        watch = None if wait.stream is None else self._watch(wait.stream.sock, (descriptor, wait.writes))
        if watch is not None:
            watch.waiting.append(done)
        try:
            return await done
        finally:
            if timer is not None:
                timer.cancel()
            if mailbox is not None:
                mailbox.wake = None
            if watch is not None:
                watch.waiting.remove(done)
                # a descriptor that is closed while it is watched for writing would fail the next socket with its number
                if wait.writes and not watch.waiting and self._watches.get((descriptor, True)) is watch:
                    self._watch_no_more((descriptor, True))

    def _watch(self, sock: socket.socket, key: tuple[int, bool]) -> _Watch:
        watch = self._watches.get(key)
        if watch is not None and watch.sock() is not sock:  # the descriptor's number was reused by another socket
            self._watch_no_more(key)
            watch = None
        if watch is None:
            watch = self._watches[key] = _Watch(sock)
            add = self._loop.add_writer if key[1] else self._loop.add_reader
            add(key[0], self._ready, key, watch)
        return watch

    def _watch_no_more(self, key: tuple[int, bool]) -> None:
        del self._watches[key]
        remove = self._loop.remove_writer if key[1] else self._loop.remove_reader
        remove(key[0])

    def _ready(self, key: tuple[int, bool], watch: _Watch) -> None:
        if watch.has_fired:
            watch.has_fired = False
        elif watch.waiting:
            # a socket can nearly always be written to, so it is watched for writing only while a sender waits
            watch.has_fired = not key[1]
            for done in watch.waiting:
                _settle(done, True)
            if key[1]:
                self._watch_no_more(key)
        elif self._watches.get(key) is watch:
            self._watch_no_more(key)


def _settle(done: asyncio.Future[T], result: T) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[Any], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
