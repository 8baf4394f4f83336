"""Shard a client's submodel over its processes, with FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each of W processes holds 1/W of what trains, of its gradients and of the optimizer's state. The members of each `ModuleList` and
`Sequential` are gathered one after the other while they compute, the rest for the whole step. The leader alone has the values that
came from the server and those that go back, in whole: tensor by tensor they are spread and collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raafl.core.algorithm import Local
from raafl.core.options import FabricOptions
from raafl.core.payload import Payload
from raafl.core.types import Assignment
from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.local.client_group import ClientProcesses, Share
from raafl.local.trainable import TrainableSubmodel
from raafl.submodel import FlatTensors, Layout, Spec, Submodels
from raafl.submodel.cut.shrink import Shrunk
from raafl.submodel.module_state import ModuleState
from raafl.units import size

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from torch.distributed.device_mesh import DeviceMesh

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
        """Use the processes of ``mesh``, the first of which leads."""
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
        for part in reversed(lists):  # inner modules first
            for child in part.children():
                if any(p.requires_grad for p in child.parameters()):
                    fully_shard(child, **more)
        # a step may use the module's own parameters after the forward pass
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
        """Build and shard the module of ``spec``; see `TrainableSubmodel`."""
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
        """Copy the values, which only the leading process has, into the shards of all processes."""
        self.trained = FlatTensors.empty(Layout(()))  # discard the last task's result
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
    """Free the gathered parameters of ``module``, so that each process keeps only its own shards."""
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
        return  # each process has different shards, so nothing can be compared
