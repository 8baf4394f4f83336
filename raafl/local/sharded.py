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
from raafl.core.payload import Payload
from raafl.core.types import Assignment
from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.local.client_group import ClientProcesses, Share
from raafl.local.options import FabricOptions
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
    """Return the reason why a client cannot be sharded; None = it can be.

    Args:
        local: local part of the method.
        options: options of Fabric.
        submodels: submodels of the model.
    """
    if not local.steps_are_plain or local.prox or local.down or local.up or local.exchange(submodels) is not None:
        return "the method works with whole parameters in its steps, or sends more than the model's values"
    if options.precision == "16-mixed":
        return "fabric.precision is 16-mixed, whose scale the processes would not share: use bf16-mixed"
    complex_one = next((e.name for e in submodels.layout(part="trained").entries if e.dtype.is_complex), None)
    return None if complex_one is None else f"parameter '{complex_one}' is complex, which FSDP2 does not add up"


def room_bytes(least_bytes: float, num_processes: int, whole_bytes: int) -> float:
    """Return the memory for a task of a client whose processes share it: W times what each has beside whole values.

    The leader holds the received values, and at a task's end those that it sends. No more than 1/W of the rest lies on each.

    Args:
        least_bytes: memory of the process with the least.
        num_processes: number of processes (W).
        whole_bytes: number of bytes of the whole model's values.

    Raises:
        BadInput: the memory has no room for more than the values.
    """
    room = num_processes * (least_bytes - 2 * whole_bytes)
    if room <= 0:
        raise BadInput(
            f"memory is {size(least_bytes)}: with fabric.shard the leader needs more than {size(2 * whole_bytes)}, for values "
            "that it receives and sends"
        )
    return room


class Shards:
    """The processes over which a client is sharded, and what they exchange beside FSDP2's own.

    Attributes:
        mesh: device mesh of the processes.
        leads: whether this process talks to the server.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Take the processes of ``mesh``, the first of which leads."""
        self.mesh, self.leads = mesh, mesh.get_rank() == 0

    def apply(self, module: nn.Module) -> None:
        """Shard the parameters that train in ``module``, in place; frozen parameters stay whole in each process."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        more: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
            "ignored_params": {p for p in module.parameters() if not p.requires_grad},
        }
        lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
        for part in reversed(lists):  # from the inside out
            for child in part.children():
                if any(p.requires_grad for p in child.parameters()):
                    fully_shard(child, **more)
        # a step may use the module's own parameters after the forward pass
        fully_shard(module, reshard_after_forward=False, **more)
        for name in _STEPS:
            if callable(getattr(module, name, None)):
                register_fsdp_forward_method(module, name)

    def spread(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor, in place, by the leader's."""
        import torch.distributed as dist

        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, group=self.mesh.get_group())

    def part(self, whole: Tensor, parameter: Any) -> Tensor:
        """Return this process's part of a parameter's whole value."""
        from torch.distributed.tensor import distribute_tensor

        made: Any = distribute_tensor(whole, self.mesh, parameter.placements, src_data_rank=None)
        local: Tensor = made.to_local()
        return local


class ShardedSubmodel(TrainableSubmodel):
    """A small module of which each process of a client holds a part.

    Attributes:
        present: tensors that are not sharded: buffers, and parameters that the spec freezes.
        trained: values that are sent after a task, on the leader; without tensors before, and on the other processes.
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

    def load(self, values: FlatTensors) -> None:
        """Take the values of another task from the leader, whose ``values`` have storage; reset everything else."""
        self.trained = FlatTensors.empty(Layout(()))  # of the last task
        self.state.restore()
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
        self.versions = [p._version for _, p in self.frozen]

    def gather(self) -> None:
        """Collect the values that are sent on the leader; gradients and the optimizer's state go before they come."""
        self.buffers.gather()
        self.module.zero_grad()
        self.optimizer.state.clear()
        reshard(self.module)
        self.trained = FlatTensors.empty(self._sent if self._shards.leads else Layout(()), self._device)
        with torch.no_grad():
            for entry in self._sent.entries:
                parameter = self._sharded.get(entry.name)
                whole = self.present[entry.name] if parameter is None else parameter.full_tensor()
                if self._shards.leads:
                    self.trained[entry.name].copy_(whole)

    def answer(self) -> FlatTensors:
        """Return the values that are sent to the server; without tensors in a process that does not lead."""
        return self.trained


class _ShardedState(ModuleState):
    """State of a module whose parameters are in parts between tasks."""

    def __init__(self, module: nn.Module, submodels: Submodels) -> None:
        super().__init__(module, submodels)
        self._module = module

    def restore(self) -> None:
        reshard(self._module)
        super().restore()

    def check(self) -> None:
        reshard(self._module)
        super().check()


def reshard(module: nn.Module) -> None:
    """Release gathered parameters, so that each process has only its part of them again."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class ShardedProcesses(ClientProcesses):
    """Processes that train a sharded client: FSDP2 averages gradients, and these agree on what is beside them."""

    def begin(self, assignment: Assignment, received: FlatTensors, data: ClientData) -> Share:
        """Begin a task in all processes, which all measure the client's test part; see `ClientProcesses.begin`."""
        share = super().begin(assignment, received, data)
        share.test = data.test
        return share

    @contextmanager
    def summing(self, module: nn.Module) -> Iterator[None]:
        """Return a context for a backward pass, in which FSDP2 itself averages gradients."""
        yield

    @torch.no_grad()
    def average(self, stop: bool) -> bool:
        """Agree on whether any process wants to ``stop``, and return it; FSDP2 has averaged the gradients."""
        self._check_stepped()
        known = torch.tensor([float(stop)])
        self._total(known)
        self._stepped = False
        return bool(known.item())

    def _compare(self, module: nn.Module) -> None:
        return  # each process has other parts
