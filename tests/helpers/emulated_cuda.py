"""Emulate CUDA: two GPUs whose tensors lie in the CPU's memory and refuse what tensors of a GPU refuse.

Every operation passes through `Emulated`. It marks what is made on ``cuda`` with its device, computes on the CPU, refuses to
mix devices where PyTorch does (`tests/test_emulated_cuda.py` holds the cases, which a real GPU checks), has each device
draw from a generator of its own, counts copies and what the CPU must wait for a device for, and refuses what is done out of the
order of its streams (`emulated_streams.py`), and captures graphs (`emulated_graphs.py`). What it does not have: NCCL, the bits
of a GPU's kernels and fused optimisers; autocast is the CPU's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.helpers.emulated_graphs import Graph, patches
from tests.helpers.emulated_rules import COPIES, INDEXING, where
from tests.helpers.emulated_streams import Counts, Event, Stream, Streams

aten = torch.ops.aten
CPU = torch.device("cpu")
NUM_DEVICES, NUM_BYTES = 2, 2**30
WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.unique_dim,
    aten.bincount,
    aten.repeat_interleave,
}
"""Operations whose answer, or its size, the CPU must have before it goes on."""


class OnDevice(Tensor):
    """Tensor in the CPU's memory that reports to lie on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    index: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return self.index

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(
            *args, **{k: v for k, v in kwargs.items() if k != "copy"}
        )
        device, dtype = self.device if device is None else EMULATED[-1].full(device), dtype or self.dtype
        if (device, dtype) == (self.device, self.dtype) and not kwargs.get("copy"):
            return self
        return aten._to_copy(self, device=device, dtype=dtype, non_blocking=non_blocking, memory_format=memory_format)

    def cpu(self) -> Tensor:
        return self.to(CPU)

    def cuda(self, device: Any = None, *_: Any) -> Tensor:
        return self.to(torch.device("cuda") if device is None else device)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __setitem__(self, rows: Any, value: Any) -> None:
        if isinstance(rows, Tensor) and rows.dim() and not rows.is_cuda:  # on a real GPU, C++ moves them
            rows = rows.to(self.device)
        super().__setitem__(rows, value)

    def __format__(self, how: str) -> str:
        return format(self.cpu(), how)

    def record_stream(self, stream: Any) -> None:
        """Do nothing: the emulation never reuses freed memory before the stream's work is done."""

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy it first.")

    __array__ = numpy

    def __reduce_ex__(self, proto: Any) -> Any:
        raise TypeError(f"a file with a tensor on {self.device} can only be read where there is such a device")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return EMULATED[-1].compute(func, args, kwargs or {})


def on(tensor: Tensor, index: int) -> Tensor:
    """Mark ``tensor`` as lying on GPU ``index``; the memory is shared."""
    marked: Any = torch.Tensor._make_subclass(OnDevice, tensor)
    marked.index = index
    return marked


def _plain_sgd(params: Any, grads: Any, buffers: Any, *, lr: Any, is_first_step: bool, **options: Any) -> None:
    """Compute `torch._fused_sgd_` one parameter at a time, as the unfused optimizer does."""
    single: Any = import_module("torch.optim.sgd")._single_tensor_sgd
    names = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
    chosen = {name: options[name] for name in names}
    for param, grad, buffer in zip(params, grads, buffers or [None] * len(params), strict=True):
        own = [None if is_first_step else buffer]
        single([param], [grad], own, None, None, lr=float(lr), has_sparse_grad=False, **chosen)
        if is_first_step and buffer is not None:
            buffer.copy_(own[0])


EMULATED: list[Emulated] = []
"""The one in use."""


class Emulated(TorchDispatchMode):
    """Dispatch mode that runs every operation on emulated devices.

    Attributes:
        counts: counts of copies ``to device``, ``to host`` and ``between``, and of ``waits``.
        num_bytes: number of bytes of these copies.
        generators: generators of each device.
        made_for: the devices of generators that were made while it is in use, by their addresses.
        streams: streams of all devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.num_bytes = Counts(), Counts()
        self._of_thread = threading.local()
        self.generators = [torch.Generator() for _ in range(NUM_DEVICES)]
        self.made_for: dict[int, torch.device] = {}
        self.streams = Streams(self.counts, NUM_DEVICES)
        self.sync_debug = 0

    @property
    def capturing(self) -> Graph | None:
        """The CUDA graph that this thread is capturing; None = none."""
        return getattr(self._of_thread, "capturing", None)

    @capturing.setter
    def capturing(self, graph: Graph | None) -> None:
        self._of_thread.capturing = graph

    @property
    def current(self) -> int:
        """Index of the current device of this thread."""
        return getattr(self._of_thread, "index", 0)

    @current.setter
    def current(self, index: int) -> None:
        self._of_thread.index = index

    def full(self, device: Any) -> torch.device:
        """Return a device with its index."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return device
        if (device.index or 0) >= NUM_DEVICES:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", self.current if device.index is None else device.index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run ATen's operation ``func`` on the CPU in place of the GPU that it names, and mark the result as that GPU's."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        place = where(func, args, kwargs, tensors)
        casts = func is aten._to_copy.default and kwargs.get("dtype") not in (None, tensors[0].dtype)
        if casts and place.type == "cuda" and torch._C._current_autograd_node() is not None:
            kwargs = {**kwargs, "device": None}  # for a cast, C++ has noted the input's device as the CPU
        if kwargs.get("device") is not None:
            place = self.full(kwargs["device"])
            kwargs = {**kwargs, "device": CPU if place.type == "cuda" else place}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        generator = kwargs.get("generator")
        of = CPU if generator is None else self.made_for.get(generator._cdata, CPU)
        if generator is not None and of.type != place.type:
            raise RuntimeError(f"Expected a '{place.type}' device type for generator but found '{of.type}'")
        devices = dict.fromkeys((place, *(tensor.device for tensor in tensors)))
        gpus = [device.index for device in devices if device.type == "cuda"]
        graph = self.capturing if gpus else None
        if graph is not None:
            graph.check(func, args, kwargs, tensors, place, self._waits(func, args, kwargs, tensors, place))
        # a captured operation is no work of a stream yet
        late = graph is None and self.streams.begin(func, args, kwargs, tensors, gpus)
        if self._counted(func, args, kwargs, tensors, place) and gpus:
            self.streams.known(self.streams.current(gpus[0]).mark())
        if late:
            return args[0]
        with self.drawing(func, place), torch._C._DisableTorchDispatch():
            answer = self.kernel(func)(*args, **kwargs)
        known = {id(tensor) for tensor in tensors}

        def mark(item: Any) -> Any:
            if not isinstance(item, Tensor) or id(item) in known:
                return item
            stays = func.overloadpacket is aten._pack_padded_sequence and item is answer[1]
            if place.type == "cuda" and not stays:
                made = on(item, place.index)
                if graph is None and not func.is_view:
                    self.streams.made(made)
                return made
            return torch.Tensor._make_subclass(Tensor, item) if isinstance(item, OnDevice) else item

        answer = tree_map(mark, answer)
        if graph is not None:
            graph.record(func, args, kwargs, answer, tensors)
        return answer

    def kernel(self, func: Any) -> Any:
        """Return the function that computes an operation; fused SGD has the bits of unfused SGD here, unlike on a GPU."""
        return _plain_sgd if func.overloadpacket is aten._fused_sgd_ else func

    def _waits(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], place: torch.device) -> bool:
        """Check whether the CPU must wait for an operation because it needs the result or its size."""
        packet = func.overloadpacket
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if packet in INDEXING else []
        # rows chosen by a mask must be counted before they can be copied
        return place.type == "cuda" and (packet in WAITS or bool(masks))

    def _counted(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], place: torch.device) -> bool:
        """Count an operation and its copies; return whether the CPU waits for it."""
        packet, waits = func.overloadpacket, self._waits(func, args, kwargs, tensors, place)
        source = tensors[-1].device if packet in COPIES and tensors else place
        if source != place and "meta" not in (source.type, place.type):
            to = {"cuda": "to device", "cpu": "to host"}[place.type] if CPU in (source, place) else "between"
            self.counts.add(to)
            self.num_bytes.add(to, tensors[-1].nbytes)
            is_late = kwargs.get("non_blocking") or (packet is not aten._to_copy and args[2:3] == (True,))
            # a blocking copy waits in both directions, see `memcpy_and_sync` in ATen's Copy.cu
            waits = to != "between" and not is_late
        if waits:
            if self.sync_debug == 2:
                raise RuntimeError("called a synchronizing CUDA operation")
            self.counts.add("waits")
        return waits

    @contextmanager
    def drawing(self, func: Any, place: torch.device) -> Iterator[None]:
        """Draw random numbers from the emulated device's own generator within the block."""
        if place.type != "cuda" or torch.Tag.nondeterministic_seeded not in func.tags:
            yield
            return
        outer, own = torch.default_generator.get_state(), self.generators[place.index]
        torch.default_generator.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(outer)


def generators(of: Emulated) -> type:
    """Return a replacement of the class `torch.Generator` that draws on the CPU and remembers its device."""
    plain: Any = torch.Generator
    kind: Any = type(plain)

    class Kind(kind):
        def __instancecheck__(cls, item: Any) -> bool:
            return isinstance(item, plain)

    class Generator(plain, metaclass=Kind):
        def __new__(cls, device: Any = CPU) -> Any:
            made = super().__new__(cls)
            of.made_for[made._cdata] = of.full(device)
            return made

        device = property(lambda self: of.made_for[self._cdata])

    return Generator


@pytest.fixture
def emulated_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """Fixture: emulate two GPUs of 1 GiB in all threads and forked processes that the test starts."""
    with emulation(monkeypatch) as made:
        yield made


@contextmanager
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """Emulate two GPUs inside this context, by patches that stay in place after it."""
    # torch caches this list; made after the patches it would lack torch.tensor, and `with torch.device("meta")` would
    # miss it
    _device_constructors()
    made = Emulated()
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    start, tensor, as_tensor, plain_to = threading.Thread.start, torch.tensor, torch.as_tensor, torch.Tensor.to
    autocast, plain_grouped = torch.autocast.__init__, torch._C._group_tensors_by_device_and_dtype

    def start_inside(thread: threading.Thread) -> None:
        run = thread.run

        def inside() -> None:
            with made:
                run()

        thread.run = inside  # type: ignore[method-assign]
        start(thread)

    def moved(function: Any) -> Any:  # a C++ function, which looks for a real device
        def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            found = function(data, *args, **kwargs) if not isinstance(data, OnDevice) else data.to(kwargs.get("dtype"))
            return found if device is None else found.to(made.full(device))

        return make

    def pinned(tensor: Tensor, *_: Any) -> Tensor:
        if tensor.is_cuda:
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        return tensor

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # C++ takes the other tensor's device for the CPU
        if args and isinstance(args[0], OnDevice):
            args = (args[0].device, args[0].dtype, *args[1:])
        return plain_to(tensor, *args, **kwargs)

    def cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
        return to(tensor, made.full("cuda" if device is None else device), non_blocking=non_blocking)

    def autocasts(context: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if torch.device(device_type).type == "cuda":  # autocast of the CPU must be on, since the tensors lie there
            device_type, dtype = "cpu", dtype or torch.float16
        autocast(context, device_type, dtype, *args, **kwargs)

    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="Emulated GPU",
            major=9,
            minor=0,
            total_memory=NUM_BYTES,
            uuid=f"GPU-emulated-{made.full(device or 0).index}",
        )

    def index(device: Any = None) -> int:
        return made.full("cuda" if device is None else device).index

    def current_stream(device: Any = None) -> Stream:
        return made.streams.current(index(device))

    def grouped(lists: Any, with_indices: bool = False) -> Any:  # C++ takes the tensors for the CPU's
        return {
            (found[0][0][0].device, dtype): found for (_, dtype), found in plain_grouped(lists, with_indices).items()
        }

    def uncaptured(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if made.capturing is not None:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            return function(*args, **kwargs)

        return call

    def set_device(device: Any) -> None:
        made.current = index(device)

    def exchange_device(index: int) -> int:
        before, made.current = made.current, index
        return before

    fake: dict[str, Any] = {
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: made.current,
        "set_device": set_device,
        "manual_seed": uncaptured(lambda seed: made.generators[made.current].manual_seed(seed)),
        "manual_seed_all": uncaptured(lambda seed: [generator.manual_seed(seed) for generator in made.generators]),
        "get_rng_state": lambda device="cuda": made.generators[index(device)].get_state(),
        "set_rng_state": uncaptured(lambda state, device="cuda": made.generators[index(device)].set_state(state)),
        "get_rng_state_all": lambda: [generator.get_state() for generator in made.generators],
        "set_rng_state_all": uncaptured(
            lambda states: [g.set_state(s) for g, s in zip(made.generators, states, strict=True)]
        ),
        "get_device_properties": properties,
        "get_device_name": lambda device=None: "Emulated GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (NUM_BYTES, NUM_BYTES),
        "max_memory_allocated": lambda device=None: 2**20,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": uncaptured(lambda device=None: made.streams.synchronize(index(device))),
        "current_stream": current_stream,
        "stream": made.streams.on,
        "Stream": lambda device=None: Stream(made.streams, index(device)),
        "Event": lambda **_: Event(made.streams),
        **patches(made),
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
    monkeypatch.setattr(torch._C, "_group_tensors_by_device_and_dtype", grouped)
    stream = SimpleNamespace(is_capturing=lambda: made.capturing is not None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(threading.Thread, "start", start_inside)
    monkeypatch.setattr(torch.autocast, "__init__", autocasts)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cuda": enabled("cpu" if kind == "cuda" else kind))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: dtype_of("cpu" if kind == "cuda" else kind))
    monkeypatch.setattr(torch, "Generator", generators(made))
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "cuda", cuda)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    optimizers: Any = import_module("torch.optim.optimizer")
    foreach = [*optimizers._foreach_supported_types, OnDevice]  # otherwise optimizers would loop over the parameters
    monkeypatch.setattr(optimizers, "_foreach_supported_types", foreach)
    monkeypatch.setattr(torch, "tensor", moved(tensor))
    monkeypatch.setattr(torch, "as_tensor", moved(as_tensor))
    swap = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # so that `.data =` keeps a tensor's class
    EMULATED.append(made)
    try:
        with made:
            yield made
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(swap)
        EMULATED.remove(made)
