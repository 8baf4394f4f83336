"""Train one client in several processes: each on its rows of every batch, with gradients averaged before a step.

Gradients are summed in buckets during the backward pass, as in Li et al., "PyTorch Distributed" (VLDB 2020), section 3. All
processes draw the same batches from the assignment's seed and hold the same parameters, so a step is that of a single process whose
loss is a mean over the samples of its batch. `raafl.runtime.client.multiprocess` provides the communication.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raafl.core.algorithm import Local
from raafl.core.options import FabricOptions
from raafl.core.payload import Payload
from raafl.core.types import Assignment, derive_seed
from raafl.data.federated import ClientData, Sized
from raafl.errors import BadInput
from raafl.local.record import Recorder
from raafl.local.trainable import TrainableSubmodel, make_dense_
from raafl.rng import reseed
from raafl.submodel import FlatTensors, Layout, Spec, Submodels
from raafl.submodel.flat import reals, sum_of_bits, wide_dtype
from raafl.submodel.module_state import ModuleState
from raafl.submodel.submodels import Shrunk
from raafl.units import size

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from torch.distributed.device_mesh import DeviceMesh

BUCKET_BYTES = 25 << 20
"""Size of the gradients that are summed at once (PyTorch's default); a larger single gradient is summed alone."""

BeginSum = Callable[[Tensor], Callable[[], None]]
"""Begins to replace a tensor by its sum over all processes, which all call in the same order; what it returns waits for that."""

_TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_processes() -> int:
    """Return the number of processes that torchrun has started for this client; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _TORCHRUN) else 1


class ClientProcesses:
    """The group of processes that train one client together, as seen from one of them."""

    def __init__(
        self,
        rank: int,
        size: int,
        begin_sum: BeginSum,
        announce: Callable[[Assignment, FlatTensors], None] = lambda assignment, received: None,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        """Create the group of a client's processes, as seen by the one with ``rank``.

        `begin_sum`: starts to sum a tensor over the processes; `announce`: on the leader, starts a task in the other
        processes.
        """
        self.rank, self.size, self._begin_sum, self._announce = rank, size, begin_sum, announce
        self.failed = failed
        self._share: Share | None = None
        self._buckets: Buckets | None = None
        self._stepped = True

    def begin(self, assignment: Assignment, received: FlatTensors, data: ClientData) -> Share:
        """Start a task in all processes of the client; return this process's share of the client's data."""
        self._announce(assignment, received)
        self._share, self._stepped = Share(data, self.rank, self.size), True
        return self._share

    def seed(self, seed: int) -> int:
        """Derive a seed for this process's random draws, so that dropout differs between processes.

        The order of the data is the same in all processes.
        """
        return seed if self.rank == 0 else derive_seed(seed, f"process {self.rank}")

    def weighed(self, loss: Tensor) -> Tensor:
        """Return the loss times a weight, such that the mean over processes equals the mean over the whole batch."""
        weight = 1.0 if self._share is None else self._share.weight
        return loss if weight == 1.0 else loss * weight

    @contextmanager
    def summing(self, module: nn.Module) -> Iterator[None]:
        """Return a context for a step's last backward pass: each gradient is summed over the processes once it is computed.

        Call `average` afterwards, which waits for the sums.
        """
        self._buckets = buckets = Buckets((p for p in module.parameters() if p.requires_grad), self._begin_sum)
        register: Any = Tensor.register_post_accumulate_grad_hook
        handles = [register(p, buckets.arrived) for p in buckets.parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def average(self, stop: bool) -> bool:
        """Set each gradient to its mean over the processes; return whether any process wants to stop the task.

        If one does, the gradients are not changed.

        Raises:
            BadInput: the optimizer has not used the averaged gradients of the step before.
        """
        self._check_stepped()
        buckets, self._buckets = self._buckets, None
        assert buckets is not None
        # all processes sum in the same order, so parameters without a gradient are summed, too
        buckets.end()
        known = torch.tensor(
            [*(p.grad is not None for p in buckets.parameters), stop, buckets.again], dtype=torch.float32
        )
        self._total(known)
        if known[-2]:
            return True
        if known[-1]:  # with several backward passes, some sums began before their gradients were complete
            buckets = Buckets(reversed(buckets.parameters), self._begin_sum)
            buckets.end()
        buckets.average(self.size, known[:-2].tolist())
        self._stepped = False
        return False

    def stepped(self) -> None:
        """Record that the optimizer has used the averaged gradients; without this, the next `average` or `finish` fails."""
        self._stepped = True

    def _total(self, tensor: Tensor) -> None:
        self._begin_sum(tensor)()

    @torch.no_grad()
    def finish(self, module: nn.Module, loss: float, recorder: Recorder) -> float:
        """Finish a task in all processes; return the mean of their losses.

        Raises:
            BadInput: the processes have ended with different parameters.
        """
        self._check_stepped()
        self._compare(module)
        mean = torch.tensor(loss, dtype=torch.float64)
        self._total(mean)
        self._combine(recorder)
        return float(mean) / self.size

    def _check_stepped(self) -> None:
        if not self._stepped:
            raise BadInput(_own_way("makes no step with the gradients of the module"))

    def _compare(self, module: nn.Module) -> None:
        """Raise `BadInput` unless all processes have equal parameters."""
        words = sum((sum_of_bits(p) for p in module.parameters() if p.requires_grad), torch.tensor(0))
        digests = torch.zeros(self.size, dtype=torch.int64)
        digests[self.rank] = int(words) & (2**62 - 1)
        self._total(digests)
        if len(set(digests.tolist())) > 1:
            raise BadInput(_own_way("comes to other values in each process (or the processes have unlike GPUs)"))

    def _combine(self, recorder: Recorder) -> None:
        """Combine the values that a client's processes have logged under the same names; torchmetrics are the leader's."""
        names, sums = recorder.partial()
        agreed = torch.zeros(self.size, dtype=torch.int64)
        agreed[self.rank] = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:7], "big")
        self._total(agreed)
        if not names or len(set(agreed.tolist())) > 1:
            return
        parts = torch.zeros(self.size, *sums.shape, dtype=torch.float64)
        parts[self.rank] = sums
        self._total(parts)
        recorder.combine(parts)


class Buckets:
    """Gradients of one training step in groups (buckets); each group is summed over the processes at once.

    A backward pass computes gradients in about the reverse order of the parameters. The sum of a bucket starts once all
    of its gradients are computed and the sums of earlier buckets have started, so that all processes sum the same
    bucket at a time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], begin_sum: BeginSum) -> None:
        """Divide ``parameters`` into buckets of one dtype, in the order in which a backward pass computes their gradients."""
        self.parameters, self._begin_sum = list(reversed(list(parameters))), begin_sum
        self._buckets: list[list[nn.Parameter]] = []
        num_bytes = 0
        for parameter in self.parameters:
            last = self._buckets[-1] if self._buckets else []
            if not last or last[0].dtype != parameter.dtype or num_bytes + parameter.nbytes > BUCKET_BYTES:
                self._buckets.append(last := [])
                num_bytes = 0
            last.append(parameter)
            num_bytes += parameter.nbytes
        self._missing = [set(bucket) for bucket in self._buckets]
        self._of = {parameter: number for number, bucket in enumerate(self._buckets) for parameter in bucket}
        self._begun: list[tuple[Tensor, Callable[[], None]]] = []
        self.again = False  # whether a gradient has changed after it was summed, as with several backward passes

    def arrived(self, parameter: nn.Parameter) -> None:
        """Record that a parameter's gradient exists; start to sum the buckets (groups of gradients) that are now complete."""
        missing = self._missing[self._of[parameter]]
        self.again = self.again or parameter not in missing
        missing.discard(parameter)
        while len(self._begun) < len(self._buckets) and not self._missing[len(self._begun)]:
            self._begin()

    def end(self) -> None:
        """Start to sum the buckets (groups of gradients) that are still incomplete; missing gradients count as 0."""
        while len(self._begun) < len(self._buckets):
            self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        bucket = self._buckets[len(self._begun)]
        make_dense_(bucket)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([reals(grad).flatten() for grad in grads]).to(wide_dtype(bucket[0].dtype))
        self._begun.append((flat, self._begin_sum(flat)))

    def average(self, size: int, used: Iterable[float]) -> None:
        """Wait for all sums, and set each parameter's gradient to the mean over the processes.

        A parameter that has no gradient in any process keeps none.
        """
        counts = dict(zip(self.parameters, used, strict=True))
        for bucket, (flat, wait) in zip(self._buckets, self._begun, strict=True):
            wait()
            flat /= size
            for parameter, part in zip(bucket, torch.split(flat, [reals(p).numel() for p in bucket]), strict=True):
                if counts[parameter]:
                    mean = part.view(reals(parameter).shape).to(reals(parameter).dtype)
                    parameter.grad = torch.view_as_complex(mean) if parameter.is_complex() else mean


class Share(ClientData):
    """One process's share of a client's data: of W processes, process r has the rows r, r + W, r + 2 W, ... of each batch.

    If a batch has no row for this process, it gets one row with weight 0.

    Attributes:
        weight: factor on this process's loss of the latest batch, so that the mean over processes is the mean over the
            whole batch.
    """

    def __init__(self, whole: ClientData, rank: int, size: int) -> None:
        """Take this process's share of the client's data ``whole``; only the leader gets its test part."""
        self.__dict__.update(whole.__dict__)
        self._whole, self._rank, self._num_shares, self._rows_of = whole, rank, size, whole._fetch
        self._fetch = self._mine
        self.test = whole.test if rank == 0 else None
        self.weight = 1.0

    def classes(self) -> frozenset[int] | None:
        """Return all classes of the client's samples, including those in other processes' rows."""
        return self._whole.classes()

    def _fetched(self, batches: Iterable[Tensor]) -> Iterator[Sized]:
        """Yield this process's rows of each batch, and their number, which may be 0."""
        reseed(self.owned)
        for rows in batches:
            yield self._fetch(rows), len(rows[self._rank :: self._num_shares])

    def _mine(self, rows: Tensor) -> object:
        mine = rows[self._rank :: self._num_shares]
        self.weight = len(mine) * self._num_shares / len(rows)
        return self._rows_of(mine if len(mine) else rows[:1])


def _own_way(what: str) -> str:
    return f"this client spans several processes, but its training {what}: join with one process, without torchrun"


# Shard a client's submodel over its processes, with FSDP2 (`torch.distributed.fsdp.fully_shard`).
#
# Each of W processes holds 1/W of the trained parameters, of their gradients and of the optimizer's state. Each member
# of a `ModuleList` or `Sequential` is gathered while it computes, all other parameters during the whole step. The
# values that the server sent, and those of the result, exist as a whole only on the leader, which scatters and gathers
# them tensor by tensor.

_STEPS = ("training_step", "validation_step")


def problem(local: Local, options: FabricOptions, submodels: Submodels) -> str | None:
    """Explain why a client's submodel cannot be sharded over its processes; None = it can."""
    if not local.steps_are_plain or local.prox or local.down or local.up or local.exchange(submodels) is not None:
        return "the method works with whole parameters in its steps, or sends more than the model's values"
    if options.precision == "16-mixed":
        return "fabric.precision is 16-mixed, whose scale the processes would not share: use bf16-mixed"
    complex_one = next((e.name for e in submodels.layout(part="trained").entries if e.dtype.is_complex), None)
    return None if complex_one is None else f"parameter '{complex_one}' is complex, which FSDP2 does not add up"


def room_bytes(least_bytes: float, num_processes: int, whole_bytes: int) -> float:
    """Return the memory in bytes that a task may use in all processes of one client together.

    The first of the W processes also stores two whole models: the received one, and the one to send. So the size of
    two whole models is subtracted from the least memory that any process has, and the rest is multiplied by W.

    Raises:
        BadInput: two whole models do not fit into this memory.
    """
    room = num_processes * (least_bytes - 2 * whole_bytes)
    if room <= 0:
        raise BadInput(
            f"memory is {size(least_bytes)}: with fabric.shard the first process needs more than "
            f"{size(2 * whole_bytes)} for the values that it receives and sends: raise memory, or leave "
            "fabric.shard out"
        )
    return room


class Shards:
    """Processes over which a client's submodel is sharded (FSDP2): each has a part of every trained parameter.

    `mesh`: device mesh of the processes.
    `leads`: whether this process is the one that talks to the server.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Create shards over the processes of ``mesh``, whose first process is the leader."""
        self.mesh, self.leads = mesh, mesh.get_rank() == 0

    def apply(self, module: nn.Module) -> None:
        """Shard the trained parameters of ``module``, in place; frozen parameters stay whole in each process."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        more: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
            "ignored_params": {p for p in module.parameters() if not p.requires_grad},
        }
        lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
        for part in reversed(lists):  # inner modules first, as `fully_shard` requires
            for child in part.children():
                if any(p.requires_grad for p in child.parameters()):
                    fully_shard(child, **more)
        # keep the gathered parameters after the forward pass, since a step may use those of the module itself
        fully_shard(module, reshard_after_forward=False, **more)
        for name in _STEPS:
            if callable(getattr(module, name, None)):
                register_fsdp_forward_method(module, name)

    def build(
        self, submodels: Submodels, spec: Spec, local: Local, payload: Payload, fabric: Fabric
    ) -> TrainableSubmodel:
        """Build the module of ``spec``, sharded over these processes; see `TrainableSubmodel`."""
        return ShardedSubmodel(self, submodels, spec, local, payload, fabric)

    def spread(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor, in place, with its values in the leading process (a broadcast)."""
        import torch.distributed as dist

        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, group=self.mesh.get_group())

    def part(self, whole: Tensor, parameter: Any) -> Tensor:
        """Return this process's part of a parameter."""
        from torch.distributed.tensor import distribute_tensor

        made: Any = distribute_tensor(whole, self.mesh, parameter.placements, src_data_rank=None)
        local: Tensor = made.to_local()
        return local


class ShardedSubmodel(TrainableSubmodel):
    """A submodel's module whose parameters are sharded over the processes of a client.

    `present`: tensors that are not sharded: buffers and frozen parameters.
    `trained`: values to send, which `gather` collects in the leading process; empty before, and in other processes.
    """

    def __init__(
        self, shards: Shards, submodels: Submodels, spec: Spec, local: Local, payload: Payload, fabric: Fabric
    ) -> None:
        """Create the module of submodel ``spec`` with sharded parameters; see `TrainableSubmodel`."""
        self._shards, self._sent, self._device = shards, submodels.layout(spec, "trained"), fabric.device
        super().__init__(submodels, spec, local, payload, fabric)
        self._sharded: dict[str, Any] = {
            name: p for name, p in self.module.named_parameters() if hasattr(p, "placements")
        }

    def _placed(self, shrunk: Shrunk) -> Shrunk:
        module, whole = shrunk.module, shrunk.present
        self._shards.apply(module)
        sharded = {name for name, p in module.named_parameters() if hasattr(p, "placements")}
        names = [entry.name for entry in whole.layout.entries if entry.name not in sharded]
        rest = FlatTensors.empty(whole.layout.only(names), whole.device)
        for name, p in module.named_parameters():
            if name in rest:
                p.data = rest[name]
        for path, part in module.named_modules():
            for name in part._buffers:
                if (key := f"{path}.{name}" if path else name) in rest:
                    part._buffers[name] = rest[key].data
        return Shrunk(module, rest, FlatTensors.empty(Layout(())))

    def _state_of(self, submodels: Submodels) -> ModuleState:
        return _ShardedState(self.module, submodels)

    def _put(self, values: FlatTensors) -> None:
        """Scatter the values, which only the leader has, to the shards of all processes."""
        self.trained = FlatTensors.empty(Layout(()))  # frees the result of the last task
        with torch.no_grad():
            for entry in values.layout.entries:
                whole = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
                if self._shards.leads:
                    whole.copy_(values.view(entry))
                self._shards.spread(whole)
                if entry.name in self._sharded:
                    parameter = self._sharded[entry.name]
                    parameter.to_local().copy_(self._shards.part(whole, parameter))
                else:
                    self.present[entry.name].copy_(whole)

    def gather(self) -> None:
        """Collect the trained values in the leading process, to be sent; gradients and optimizer state are freed first."""
        self.buffers.gather()
        self.module.zero_grad()
        self.optimizer.state.clear()
        _reshard(self.module)
        self.trained = FlatTensors.empty(self._sent if self._shards.leads else Layout(()), self._device)
        with torch.no_grad():
            for entry in self._sent.entries:
                parameter = self._sharded.get(entry.name)
                whole = self.present[entry.name] if parameter is None else parameter.full_tensor()
                if self._shards.leads:
                    self.trained[entry.name].copy_(whole)

    def answer(self) -> FlatTensors:
        """Return the values to send to the server; empty in processes that do not lead."""
        return self.trained


class _ShardedState(ModuleState):
    """State of a module whose parameters are sharded between tasks."""

    def __init__(self, module: nn.Module, submodels: Submodels) -> None:
        super().__init__(module, submodels)
        self._module = module

    def restore(self, *, metrics: bool = True) -> None:
        _reshard(self._module)
        super().restore(metrics=metrics)

    def check(self) -> None:
        _reshard(self._module)
        super().check()


def _reshard(module: nn.Module) -> None:
    """Free the gathered parameters of ``module``, of which each process then has its shards only."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class ShardedProcesses(ClientProcesses):
    """Processes that train a sharded client. FSDP2 averages gradients; this class synchronises everything else."""

    def begin(self, assignment: Assignment, received: FlatTensors, data: ClientData) -> Share:
        """Start a task in all processes of the client; return this process's share of the client's data.

        All processes evaluate the client's test samples together. For arguments see `ClientProcesses.begin`.
        """
        share = super().begin(assignment, received, data)
        share.test = data.test
        return share

    @contextmanager
    def summing(self, module: nn.Module) -> Iterator[None]:
        """Return a context that does nothing, since FSDP2 averages the gradients; it replaces `ClientProcesses.summing`."""
        yield

    @torch.no_grad()
    def average(self, stop: bool) -> bool:
        """Return True if any process wants to ``stop`` the task. The gradients are means already, since FSDP2 averages them."""
        self._check_stepped()
        known = torch.tensor([float(stop)])
        self._total(known)
        self._stepped = False
        return bool(known.item())

    def _compare(self, module: nn.Module) -> None:
        return  # processes have different shards, so there is nothing to compare
