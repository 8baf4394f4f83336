"""Run one client as several processes (`torchrun --nproc-per-node 2 -m raafl join ...`); only the first talks to the server.

The leader forwards config and assignments over a connection to each follower, and values and gradients within a process group.
When a process dies the others terminate at once, whatever they are waiting for: the server finds the connection broken and
counts the client as lost.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as _distributed

from raafl.core.types import Assignment
from raafl.errors import BadInput, RunFailed
from raafl.local.client_group import ClientProcesses, ShardedProcesses, Shards, num_processes, problem
from raafl.local.context import Stopped, TaskContext
from raafl.runtime.executors.base import attempt
from raafl.runtime.identity import Difference, Identity, agree
from raafl.runtime.protocol import Assign, Config, Hello, no_tensors
from raafl.submodel import FlatTensors
from raafl.submodel.cut.layers import statistics_of
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.gloo import GlooConnection, cloned
from raafl.transport.nccl import checked_group, identity, opened

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from raafl.runtime.client.setup import ClientSetup

dist: Any = _distributed  # untyped: most of torch.distributed has no annotations

MakeSite = Callable[[str | None], "ClientSetup"]

_MEET_S = 600.0  # seconds in which all processes must have started and loaded their data
_FOR_EVER_S = 1e9
_LOOPBACK = "lo"
_log = logging.getLogger(__name__)
_WORD_S = 2.0  # seconds in which another thread may report which process died


def together(make_site: MakeSite, work: Callable[[MakeSite], int], client: int, say: Callable[[str], None]) -> int:
    """Train one client in all processes that torchrun started; return the exit code.

    `make_site`: function that builds the client; its argument is the text of the server's config, or None if the
    client has a config of its own.

    Raises:
        BadInput: the algorithm cannot train one client in several processes.
        RunFailed: the processes cannot reach each other, or differ in version, config, model or data.
    """
    if num_processes() == 1:
        return work(make_site)
    with ClientGroup(client, say) as span:
        if span.rank == 0:
            return work(span.in_all_processes(make_site))
        span.follow(make_site)
    return 0


def refuse(site: ClientSetup) -> None:
    """Raise `BadInput` if the algorithm cannot train one client in several processes.

    The processes of a client average their gradients and nothing else, which is not enough for some algorithms.
    """
    if not site.experiment.algorithm.local.traits.supports_data_parallel:
        raise BadInput(
            f"algorithm is '{site.experiment.algorithm.name}', whose clients cannot have several processes: join "
            "with one process, without torchrun"
        )
    experiment = site.experiment
    if experiment.fabric.shard and (why := problem(experiment.algorithm.local, experiment.fabric, site.submodels)):
        raise BadInput(
            f"fabric.shard is true, but {why}: set it to false, so that each process of the client has the whole "
            "submodel"
        )


class ClientGroup:
    """The processes of one client: the first (leader) forwards tasks to the others (followers)."""

    def __init__(self, client: int, say: Callable[[str], None]) -> None:
        """Connect to the client's other processes, which torchrun's variables name; raises RunFailed if some are missing."""
        self.rank, self.size = int(os.environ["RANK"]), num_processes()
        self._client, self._say = client, say
        self._group: GroupSums | None = None
        self._ending = threading.Lock()
        self._closing = False
        self._said, self._joined = threading.Event(), threading.Event()
        self._terminated_before: Any = None
        try:
            self._store = _store(self.rank, self.size)
            numbers = range(1, self.size) if self.rank == 0 else [self.rank]
            self._pairs = {number: self._meet(number) for number in numbers}
        except (PeerLost, PeerTimeout, RuntimeError) as error:
            raise RunFailed(
                f"client {client}: its {self.size} processes could not form a process group "
                f"({str(error).splitlines()[0]}): start them with one torchrun, on machines that can connect to "
                "each other"
            ) from None

    def _meet(self, number: int) -> GlooConnection:
        local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        hostname = "127.0.0.1" if local else None
        return GlooConnection.connect(self._store, f"pair/{number}", self.rank == 0, _MEET_S, hostname)

    # ---- the leader (process 0) ----

    def in_all_processes(self, make_site: MakeSite) -> MakeSite:
        """Return a function that builds the client like ``make_site``, but in all processes.

        It raises `RunFailed` if the processes differ in version, config, model or data.

        `make_site`: function that builds the client in this process; its argument is the text of the server's config,
        or None if the client has a config of its own.
        """

        def make(config_yaml: str | None) -> ClientSetup:
            site = make_site(config_yaml)
            refuse(site)
            for pair in self._pairs.values():
                pair.send(Message(Kind.CONFIG, meta=Config(config_yaml).to_meta()))
            for number, pair in self._pairs.items():
                site = self._compared(site, number, self._hello_of(number, pair))
            note = f"this client has {self.size} processes: each trains on its part of every batch"
            if statistics_of(site.submodels.module):
                note += "; batch norm normalises by that part alone, and the leader's running statistics count"
            site.notes.append(note)
            for number, pair in self._pairs.items():  # started before anything waits for one of these processes
                threading.Thread(target=self._watch, args=(number, pair), name=f"process-{number}", daemon=True).start()
            self._join_group(site)
            kind = ShardedProcesses if site.experiment.fabric.shard else ClientProcesses
            announce = partial(self._announce, whole=not site.experiment.fabric.shard)
            return replace(site, process_group=kind(self.rank, self.size, self._begin_sum, announce, self._failed))

        return make

    def _hello_of(self, number: int, pair: GlooConnection) -> Hello:
        try:
            return Hello.from_meta(pair.recv(no_tensors, _MEET_S).meta)
        except (PeerLost, PeerTimeout, Refused) as error:
            raise RunFailed(
                f"client {self._client}: its process {number} did not start ({error}): see the output of that process"
            ) from None

    def _compared(self, site: ClientSetup, number: int, theirs: Hello) -> ClientSetup:
        """Raise `RunFailed` if process ``number`` has another config, model or data; return the setup with the lesser memory."""
        different = agree(Identity.of(site.submodels, site.sections), theirs.identity, same_package=True)
        if different is None and (here := site.info.num_samples) != (there := theirs.num_samples):
            different = Difference("num_samples", str(here), str(there))
        if different is not None:
            name = "frozen parameters" if different.field == "base" else different.field
            raise RunFailed(
                f"client {self._client}: its processes differ in {name}: {different.ours} in process 0, {different.theirs} in "
                f"process {number}: start all with the same raafl, config and data"
            )
        if theirs.memory_bytes is None:
            return site
        least = min(site.info.profile.memory_bytes, theirs.memory_bytes)
        return replace(site, info=replace(site.info, profile=replace(site.info.profile, memory_bytes=least)))

    def _announce(self, assignment: Assignment, received: FlatTensors, *, whole: bool) -> None:
        """Start a task in the followers, and send them all values if these are not sharded (``whole``)."""
        with self._together():
            for pair in self._pairs.values():
                meta = Assign(assignment).to_meta()
                pair.send(Message(Kind.ASSIGN, assignment.id, assignment.incarnation, meta))
            if whole:
                self._broadcast(received)

    def _watch(self, number: int, pair: GlooConnection) -> None:
        """Wait until the connection to a follower breaks, which means that it has died; then end this process."""
        with suppress(PeerLost, PeerTimeout, Refused):
            pair.recv(no_tensors, _FOR_EVER_S)
        self._end(f"process {number} of this client is gone: the client ends")

    # ---- a follower (any other process) ----

    def follow(self, make_site: MakeSite) -> None:
        """Train the tasks that the leader forwards, until it stops; runs in a follower."""
        (pair,) = self._pairs.values()
        try:
            message = pair.recv(no_tensors, _FOR_EVER_S)
        except (PeerLost, PeerTimeout, Refused):
            return  # the leader has ended, and reported the reason
        if message.kind is not Kind.CONFIG:
            return
        try:
            site = make_site(Config.from_meta(message.meta).config_yaml)
        except BadInput as error:  # the leader has accepted this config, so this process is at fault
            raise RunFailed(f"client {self._client}: {error}") from None
        pair.send(Message(Kind.HELLO, meta=_hello(site).to_meta()))
        tasks: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(pair, tasks), name="leader", daemon=True).start()
        self._join_group(site)
        is_sharded = site.experiment.fabric.shard
        kind = ShardedProcesses if is_sharded else ClientProcesses
        context = TaskContext(process_group=kind(self.rank, self.size, self._begin_sum, failed=self._failed))
        received: FlatTensors | None = None
        while (assignment := tasks.get()) is not None:
            layout = site.trainer.payload.layout(assignment.spec, "sent")
            if received is None or received.layout != layout:
                received = None
                received = FlatTensors.empty(layout, "meta" if is_sharded else site.trainer.fabric.device)
            if not is_sharded:
                with self._together():
                    self._broadcast(received)
            with suppress(Stopped):
                attempt(site.trainer, assignment, received, site.data, context)

    def _listen(self, pair: GlooConnection, tasks: queue.SimpleQueue[Assignment | None]) -> None:
        try:
            while (message := pair.recv(no_tensors, _FOR_EVER_S)).kind is Kind.ASSIGN:
                tasks.put(Assign.from_meta(message.meta).assignment)
            tasks.put(None)
            if not self._joined.wait(_WORD_S):
                self._end("")  # the leader has failed, and will not create the group
        except (PeerLost, PeerTimeout, Refused):
            self._end("")  # the leader has reported the reason

    # ---- all processes ----

    def _join_group(self, site: ClientSetup) -> None:
        device, waits = site.trainer.fabric.device, site.experiment.waits
        self._store.set(f"device/{self.rank}", identity(device))
        devices = [self._store.get(f"device/{number}").decode() for number in range(self.size)]
        with self._together():
            self._group = GroupSums(self._store, self.rank, self.size, waits.task_s, device, devices)
            if site.experiment.fabric.shard:
                site.trainer.shards = Shards(open_mesh(self._store, self.rank, self.size, waits.task_s, device))
        self._joined.set()

    def _begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        assert self._group is not None
        with self._together():
            wait = self._group.begin_sum(tensor)

        def ended() -> None:
            with self._together():
                wait()

        return ended

    def _broadcast(self, values: FlatTensors) -> None:
        assert self._group is not None
        for buffer in values.buffers.values():
            if buffer.numel():
                self._group.broadcast(buffer)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """End this process if communication with the client's other processes fails in the ``with`` block."""
        try:
            yield
        except (RuntimeError, PeerLost, PeerTimeout) as error:
            self._said.wait(_WORD_S)
            self._end(f"the processes of this client have lost their connections: {str(error).splitlines()[0]}")
            raise

    def _failed(self) -> None:
        """Wait briefly until another thread has reported which process died, since FSDP2 may fail before that."""
        self._said.wait(_WORD_S)

    def _end(self, text: str) -> None:
        """End this process at once, and print ``text`` unless another thread ends it already."""
        if self._closing:
            return
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # waits until the other thread has ended the process
        if text and self.rank == 0:
            self._say(text)
        sys.stderr.flush()
        self._said.set()
        os._exit(1)

    def __enter__(self) -> ClientGroup:
        """Handle SIGTERM, so that a process's death is reported before torchrun ends this process."""
        self._terminated_before = signal.signal(signal.SIGTERM, self._terminated)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the followers, if this is the leader, and close the connections."""
        self._closing = True
        if dist.is_initialized():
            dist.destroy_process_group()
        signal.signal(signal.SIGTERM, self._terminated_before)
        for pair in self._pairs.values() if self.rank == 0 else ():
            with suppress(PeerLost, PeerTimeout):
                pair.send(Message(Kind.STOP), _WORD_S)
            pair.close()

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if self.rank == 0:
            time.sleep(_WORD_S)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _store(rank: int, size: int) -> Any:
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=hosts,
        timeout=timedelta(seconds=_MEET_S),
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"raafl/client/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _hello(site: ClientSetup) -> Hello:
    """Describe this process's identity and memory, by which the leader compares the client's processes."""
    memory_bytes = site.info.profile.memory_bytes
    return Hello(
        Identity.of(site.submodels, site.sections),
        client={"num_samples": site.info.num_samples},
        memory_bytes=memory_bytes if memory_bytes < math.inf else None,  # infinity has no form in JSON
    )


def open_mesh(store: Any, rank: int, size: int, timeout_s: float, device: torch.device) -> DeviceMesh:
    """Return the device mesh over which FSDP2 shards a model between the processes of one client.

    This initialises torch's default process group, which FSDP2 needs.
    """
    from torch.distributed.device_mesh import init_device_mesh

    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    with _local_interface():
        dist.init_process_group(
            backend, store=dist.PrefixStore("shards", store), rank=rank, world_size=size, timeout=timeout
        )
    return init_device_mesh(device.type, (size,))


@contextmanager
def _local_interface() -> Iterator[None]:
    """Restrict Gloo's default group to the loopback interface in the ``with`` block, if all processes are on this machine."""
    name = "GLOO_SOCKET_IFNAME"
    names = {interface for _, interface in socket.if_nameindex()}
    if name in os.environ or not _is_local() or _LOOPBACK not in names:
        yield
        return
    os.environ[name] = _LOOPBACK  # set as a variable, since torch has no argument for the interface
    try:
        yield
    finally:
        del os.environ[name]


class GroupSums:
    """Sums and broadcasts between the processes of one client: over NCCL if each has its own GPU, else over Gloo and the CPU."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float, device: torch.device, devices: list[str]
    ) -> None:
        """Create torch's process groups, which all processes of the client must do at the same time."""
        self._span, self._device = timedelta(seconds=timeout_s), device
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = self._span, 1
        options._devices = [_gloo_device()]
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
        self._nccl: Any = None
        own = all(name.startswith("cuda:") for name in devices) and len(set(devices)) == size
        if own and dist.is_nccl_available():
            # half the time for which the other processes wait for this one's result
            self._nccl = self._agreed(*opened(partial(self._joined, store, rank, size, timeout_s / 2), timeout_s / 2))

    def _joined(self, store: Any, rank: int, size: int, timeout_s: float) -> object:
        """Create an NCCL group, and compute a sum in it, which opens its connections."""

        def check(group: Any) -> None:
            one = torch.ones(1, device=self._device)
            group.allreduce([one], dist.AllreduceOptions()).wait()
            if one.item() != size:
                raise RuntimeError("NCCL returns a wrong sum")

        return checked_group(dist.PrefixStore("nccl", cloned(store)), rank, size, timeout_s, check)

    def _agreed(self, group: Any, problem: str) -> object:
        """Return the NCCL group if all processes have one; else destroy it, warn and return None."""
        missing = torch.tensor([int(group is None)])
        self._gloo.allreduce([missing], dist.AllreduceOptions()).wait(self._span)
        if not missing.item():
            return group
        if group is not None:
            group.abort()
        _log.warning(f"NCCL is not used, gradients are summed over Gloo: {problem or 'another process has none'}")
        return None

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start to replace a tensor by its sum over all processes; return a function that waits until that is done."""
        if tensor.is_cuda and self._nccl is not None:
            on_gpu: Callable[[], None] = self._nccl.allreduce([tensor], dist.AllreduceOptions()).wait
            return on_gpu
        there = tensor.cpu()
        work = self._gloo.allreduce([there], dist.AllreduceOptions())

        def wait() -> None:
            work.wait(self._span)
            if there is not tensor:
                tensor.copy_(there)

        return wait

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the tensor of process 0 into that of all other processes (broadcast)."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if tensor.is_cuda and self._nccl is not None:
            self._nccl.broadcast([tensor.view(torch.uint8)], options).wait()
            return
        there = tensor.cpu()
        self._gloo.broadcast([there.view(torch.uint8)], options).wait(self._span)
        if there is not tensor:
            tensor.copy_(there)


def _gloo_device() -> object:
    from raafl.transport.gloo import _device

    return _device("127.0.0.1" if _is_local() else None)


def _is_local() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
