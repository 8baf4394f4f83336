"""One client that spans several processes: each trains on its rows of every batch, and gradients are averaged before a step.

All processes draw the same batches from the assignment's seed and hold the same parameters, so a step is that of a single
process whose loss is a mean over the samples of its batch. What talks between them comes from `raafl.runtime.spanning`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raafl.core.types import Assignment, derive_seed
from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.submodel import FlatTensors
from raafl.submodel.flat import sum_of_bits


class ClientProcesses:
    """The processes of one client, as each of them sees it while it trains."""

    def __init__(
        self, rank: int, size: int, total: Callable[[Tensor], None],
        announce: Callable[[Assignment, FlatTensors], None] = lambda assignment, received: None,
    ) -> None:  # fmt: skip
        """Prepare.

        ``total`` replaces a tensor by its sum over all processes, which all call in the same order; ``announce`` has
        the other processes begin a task, for the one that leads.
        """
        self.rank, self.size, self._total, self._announce = rank, size, total, announce
        self._share: Share | None = None
        self._stepped = True

    def begin(self, assignment: Assignment, received: FlatTensors, data: ClientData) -> Share:
        """Begin a task in all processes; return this one's part of the client's data."""
        self._announce(assignment, received)
        self._share, self._stepped = Share(data, self.rank, self.size), True
        return self._share

    def seed(self, seed: int) -> int:
        """Derive the seed of all that this process draws besides the data's order: dropout differs from one to another."""
        return seed if self.rank == 0 else derive_seed(seed, f"process {self.rank}")

    def weighed(self, loss: Tensor) -> Tensor:
        """Return the loss of this process's rows times the weight by which the mean over processes is the batch's."""
        weight = 1.0 if self._share is None else self._share.weight
        return loss if weight == 1.0 else loss * weight

    @torch.no_grad()
    def average(self, module: nn.Module, stop: bool) -> bool:
        """Replace gradients by their mean over all processes; return whether any of them is to ``stop``.

        Raises:
            BadInput: sparse gradients, or a method that does not step by the gradients of the module.
        """
        if not self._stepped:
            raise BadInput(_own_way("makes no step with the gradients of the module"))
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters):
            raise BadInput(_own_way("has sparse gradients"))
        known = torch.tensor([*(p.grad is not None for p in parameters), stop], dtype=torch.float32)
        self._total(known)
        if known[-1]:
            return True
        used = [parameter for parameter, number in zip(parameters, known[:-1].tolist(), strict=True) if number]
        for dtype in dict.fromkeys(p.dtype for p in used):
            self._average([p for p in used if p.dtype == dtype], dtype)
        self._stepped = False
        return False

    def _average(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([grad.flatten() for grad in grads]).to(torch.promote_types(dtype, torch.float32))
        self._total(flat)
        flat /= self.size
        for parameter, part in zip(parameters, torch.split(flat, [g.numel() for g in grads]), strict=True):
            parameter.grad = part.view_as(parameter).to(dtype)

    def stepped(self) -> None:
        """Note that the module's optimiser has made its step."""
        self._stepped = True

    @torch.no_grad()
    def finish(self, module: nn.Module, loss: float) -> float:
        """Return the mean loss of all processes, once the task is done.

        Raises:
            BadInput: they have come to different parameters.
        """
        if not self._stepped:
            raise BadInput(_own_way("makes no step with the gradients of the module"))
        words = sum((sum_of_bits(p) for p in module.parameters() if p.requires_grad), torch.tensor(0))
        digests, mean = torch.zeros(self.size, dtype=torch.int64), torch.tensor(loss, dtype=torch.float64)
        digests[self.rank] = int(words) & (2**62 - 1)
        self._total(digests)
        self._total(mean)
        if len(set(digests.tolist())) > 1:
            raise BadInput(_own_way("comes to other values in each process (or the processes have unlike GPUs)"))
        return float(mean) / self.size


class Share(ClientData):
    """One process's rows of each of a client's batches: row r, r + W, r + 2 W, ... for process r of W.

    A batch of fewer rows than processes is one row, with weight 0, for those that have none.

    Attributes:
        weight: by which the mean loss of the rows last given counts in the mean over processes.
    """

    def __init__(self, whole: ClientData, rank: int, size: int) -> None:
        """Share ``whole``, which stays as it is; its test part is the leader's to measure."""
        self.__dict__.update(whole.__dict__)
        self._whole, self._rank, self._num_shares, self._rows_of = whole, rank, size, whole._fetch
        self._fetch = self._mine
        self.test = whole.test if rank == 0 else None
        self.weight = 1.0

    def classes(self) -> frozenset[int] | None:
        """The classes of all of the client's samples."""
        return self._whole.classes()

    def _mine(self, rows: Tensor) -> Any:
        mine = rows[self._rank :: self._num_shares]
        self.weight = len(mine) * self._num_shares / len(rows)
        return self._rows_of(mine if len(mine) else rows[:1])


def _own_way(what: str) -> str:
    return f"this client spans several processes, but its training {what}: join with one process, without torchrun"
