"""Emulate CUDA graphs: record the operations of a capture with their very storages, and repeat them into the same ones.

A capture leaves no trace: what it wrote to is as before, generators are, too, and memory of the graph's pool holds NaN until a
replay, and again once another graph of that pool was replayed. What CUDA refuses in a capture is refused: waiting for the
device, copies from or to the host, pinned memory, a generator of one's own. A replay that reads memory which nobody else holds
any more is refused, where a GPU would read whatever lies there by then. Memory is not reused within a pool; `peak_bytes` says
how much would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.helpers.emulated_streams import Stream, key, writes

if TYPE_CHECKING:
    from tests.helpers.emulated_cuda import Emulated

CPU = torch.device("cpu")
aten = torch.ops.aten


@dataclass(frozen=True)
class Recorded:
    """One recorded operation of a graph; its tensors share memory with those that the captured step used."""

    func: Any
    args: Any
    kwargs: Any
    answers: list[Tensor]


class Graph:
    """Emulation of `torch.cuda.CUDAGraph`.

    `num_replays`: number of replays so far. `operations`: operations in their order.
    """

    def __init__(self, of: Emulated) -> None:
        self._of, self.operations, self.num_replays = of, list[Recorded](), 0
        self._pool: Pool | None = None
        self._broken = False
        self._made: dict[int, Tensor] = {}  # storages allocated during the capture, by address
        # storages allocated elsewhere, with the graph's own tensors in them
        self._outside: dict[int, list[Tensor]] = {}
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def pool(self) -> Pool | None:
        return self._pool

    # ---- capture ----

    def begin(self, pool: Pool | None) -> None:
        self._pool = pool or Pool()
        self._index, self._drawn = self._of.current, self._of.generators[self._of.current].get_state()

    def check(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], place: torch.device, waits: bool) -> None:
        """Refuse an operation that CUDA refuses during a capture; otherwise save what it will overwrite."""
        generator = kwargs.get("generator")
        own = self._of.generators[self._index]
        copies = {tensor.device.type for tensor in tensors} | {place.type}
        moves = func.overloadpacket in (aten.copy_, aten._to_copy, aten._foreach_copy_) and copies == {"cpu", "cuda"}
        if waits or moves or kwargs.get("pin_memory") or (generator is not None and generator is not own):
            self._broken = True
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({func})")
        for leaf in tree_leaves(writes(func, args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_cuda and key(leaf) not in self._made | self._saved:
                whole = _bytes(leaf)
                self._saved[key(leaf)] = whole, _raw(lambda whole=whole: whole.clone())

    def record(self, func: Any, args: Any, kwargs: Any, answer: Any, tensors: list[Tensor]) -> None:
        """Record an operation that has just been computed."""
        before = {key(tensor) for tensor in tensors}
        answers = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
        for leaf in answers:
            if leaf.is_cuda and key(leaf) not in before | self._outside.keys():
                # a second reference to the tensor would make autograd copy a gradient instead of keeping it
                self._made[key(leaf)] = _raw(lambda leaf=leaf: leaf.detach())
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        args, kwargs = tree_map(self._own, (args, kwargs))
        self.operations.append(Recorded(func, args, kwargs, [self._own(leaf) for leaf in answers]))

    def _own(self, item: Any) -> Any:
        """Return the graph's own tensor in the same memory; a number on the CPU is copied, since a launch freezes it."""
        from tests.helpers.emulated_cuda import on

        if not isinstance(item, Tensor):
            return item
        if not item.is_cuda:
            return _raw(lambda: item.detach().clone())
        own = on(_raw(lambda: item.detach()), item.get_device())
        if key(item) not in self._made and item.numel():
            self._outside.setdefault(key(item), []).append(own)
        return own

    def end(self) -> None:
        """Undo all that the capture has computed."""
        for whole, before in self._saved.values():
            _raw(lambda whole=whole, before=before: whole.copy_(before))
        self._saved.clear()
        self._of.generators[self._index].set_state(self._drawn)
        self.spoil()

    def spoil(self) -> None:
        """Fill the graph's memory with NaN: only a replay may read what is there."""
        for tensor in self._made.values():
            if tensor.is_floating_point():
                _raw(lambda tensor=tensor: tensor.fill_(torch.nan))

    @property
    def peak_bytes(self) -> int:
        """Compute the most memory in bytes that the capture's own storages take at once, if each is freed after its last use."""
        first, last = dict[int, int](), dict[int, int]()
        for place, one in enumerate(self.operations):
            for leaf in tree_leaves((one.args, one.kwargs, one.answers)):
                if isinstance(leaf, Tensor) and key(leaf) in self._made:
                    first.setdefault(key(leaf), place)
                    last[key(leaf)] = place
        sizes = {address: self._made[address].untyped_storage().nbytes() for address in first}
        return max(
            sum(sizes[address] for address in first if first[address] <= place <= last[address])
            for place in range(len(self.operations))
        )

    # ---- replay ----

    def replay(self) -> None:
        """Repeat the recorded operations on the current stream."""
        if self._broken or self._pool is None:
            raise RuntimeError(
                "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"
            )
        if self._of.capturing is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (replay)")
        for own in self._outside.values():
            storage = own[0].untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) <= len(own) + 1:
                raise RuntimeError("the graph uses memory that was freed since its capture")
        self._pool.enter(self)
        self.num_replays += 1
        for one in self.operations:
            self._repeat(one)

    def _repeat(self, one: Recorded) -> None:
        tensors = [leaf for leaf in tree_leaves((one.args, one.kwargs)) if isinstance(leaf, Tensor)]
        place = torch.device("cuda", self._index) if any(t.is_cuda for t in (*tensors, *one.answers)) else CPU
        self._of.streams.begin(one.func, one.args, one.kwargs, tensors, [self._index])

        def compute() -> None:
            with self._of.drawing(one.func, place):
                answer = self._of.kernel(one.func)(*one.args, **one.kwargs)
            for found, into in zip([x for x in tree_leaves(answer) if isinstance(x, Tensor)], one.answers, strict=True):
                if found.untyped_storage().data_ptr() != key(into):
                    into.copy_(found)
                    self._of.streams.made(into)

        _raw(compute)


class Pool:
    """Memory pool of several graphs; the replay of one overwrites the results of the others."""

    def __init__(self) -> None:
        self._graphs: list[Graph] = []
        self._last: Graph | None = None

    @property
    def peak_bytes(self) -> int:
        """Compute the bytes of a pool that suffices for any one of its graphs, since no two replay at once."""
        return max(graph.peak_bytes for graph in self._graphs)

    def enter(self, graph: Graph) -> None:
        if graph not in self._graphs:
            self._graphs.append(graph)
        if self._last is not None and self._last is not graph:
            self._last.spoil()
        self._last = graph


def patches(of: Emulated) -> dict[str, Any]:
    """Return replacements for the functions of `torch.cuda` about graphs."""

    @contextmanager
    def capture(
        graph: Graph, pool: Pool | None = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        stream = stream or Stream(of.streams, of.current)
        of.streams.synchronize(of.current, counted=False)  # as torch.cuda.graph does
        graph.begin(pool)
        with of.streams.on(stream):
            of.capturing = graph
            try:
                yield
            except BaseException:
                graph._broken = True
                raise
            finally:
                of.capturing = None
                graph.end()

    def set_mode(mode: str | int) -> None:
        names = ("default", "warn", "error")
        of.sync_debug = mode if isinstance(mode, int) else names.index(mode)

    return {
        "CUDAGraph": lambda: Graph(of),
        "graph": capture,
        "graph_pool_handle": Pool,
        "is_current_stream_capturing": lambda: of.capturing is not None,
        "set_sync_debug_mode": set_mode,
        "get_sync_debug_mode": lambda: of.sync_debug,
    }


def _raw(function: Callable[[], Any]) -> Any:
    """Call ``function`` on plain memory: without emulated devices, autograd and version counters."""
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        return function()


def _bytes(tensor: Tensor) -> Tensor:
    def whole() -> Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())

    made: Tensor = _raw(whole)
    return made
